//! What several stacks of one host have in common, so that no peer can tell
//! which of them it has to do with.

use super::peer_clock::PeerClock;
use super::prf::Secret;
use crate::Stack;

/// The secret behind initial numbers, time stamps and SYN cookies, and the clock
/// that peers see in them. To be kept as secret as connections are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSecrets {
    secret: Secret,
    clock: PeerClock,
}

impl Stack {
    /// What another stack of this process needs for sockets to move there and
    /// back ([`Stack::share_tcp_secrets`]).
    pub fn tcp_secrets(&self) -> TcpSecrets {
        TcpSecrets { secret: self.tcp.secret, clock: self.tcp.clock }
    }

    /// Takes the secrets of another stack, whose `now_ns` is of the same clock:
    /// to a peer both are one host then. To be called before there are
    /// listeners, and again after [`Stack::restore`], since each stack that was
    /// saved has a pause of its own: cookies of other secrets are not accepted
    /// any more. Connections go on as they are.
    pub fn share_tcp_secrets(&mut self, secrets: TcpSecrets) {
        (self.tcp.secret, self.tcp.clock) = (secrets.secret, secrets.clock);
    }
}
