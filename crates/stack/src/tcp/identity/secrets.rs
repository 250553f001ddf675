//! Secrets shared by all stacks of a host, so that peers cannot tell the stacks apart.

use super::peer_clock::PeerClock;
use super::prf::Secret;

/// Secret behind initial sequence numbers, time stamps and SYN cookies, and the clock that peers
/// see in them. Disclosure puts all connections at risk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSecrets {
    pub(crate) secret: Secret,
    pub(crate) clock: PeerClock,
}
