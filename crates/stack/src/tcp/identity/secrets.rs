//! Secrets shared by all stacks of a host, so that peers cannot tell the stacks apart.

use super::peer_clock::PeerClock;
use super::prf::Secret;
use crate::Stack;

/// Secret behind initial sequence numbers, time stamps and SYN cookies, and the clock that peers
/// see in them. Disclosure puts all connections at risk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSecrets {
    secret: Secret,
    clock: PeerClock,
}

impl Stack {
    /// Returns the secrets of this stack. Sockets can migrate between stacks of one process only
    /// if they have the same secrets ([`Stack::set_tcp_secrets`]).
    pub fn tcp_secrets(&self) -> TcpSecrets {
        TcpSecrets { secret: self.tcp.secret, clock: self.tcp.clock }
    }

    /// Sets the secrets of another stack, so that peers see both stacks as one host. `now_ns` must
    /// come from the same clock in both stacks.
    ///
    /// Call this before creating listeners, and again after [`Stack::restore`], because each saved
    /// stack has a pause of its own. SYN cookies made with the old secrets are no longer accepted;
    /// existing connections are unaffected.
    pub fn set_tcp_secrets(&mut self, secrets: TcpSecrets) {
        (self.tcp.secret, self.tcp.clock) = (secrets.secret, secrets.clock);
    }
}
