//! TCP sockets.

mod listener;
mod poll;
mod stream;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate_port::steering::Protocol;

pub use listener::TcpListener;
pub(crate) use stream::Ended;
pub use stream::TcpStream;

use crate::net::Core;
use crate::open::Claim;
use crate::wait::Patience;

fn patience(nonblocking: &AtomicBool, timeout: Option<Duration>) -> Patience {
    match nonblocking.load(Ordering::Relaxed) {
        true => Patience::None,
        false => Patience::timeout(timeout),
    }
}

impl Core {
    /// Takes a port away from the kernel, if the stack lives on its addresses.
    fn claim(&mut self, local: SocketAddr, dual: bool) -> io::Result<Option<Arc<Claim>>> {
        if self.shared_addresses.is_empty() {
            return Ok(None);
        }
        let (port, shared) = (self.engine.port(), &self.shared_addresses);
        Ok(Some(Arc::new(Claim::take(port, Protocol::Tcp, local, dual, shared)?)))
    }

    /// Gives it back, if nobody else needs it.
    fn release(&mut self, claim: Option<Arc<Claim>>) {
        if let Some(claim) = claim.and_then(Arc::into_inner) {
            claim.release(self.engine.port());
        }
    }

    /// The kernel's address to reach `peer` from.
    fn shared_address_like(&self, peer: SocketAddr) -> Option<std::net::IpAddr> {
        let same = |own: &&std::net::IpAddr| own.is_ipv4() == peer.is_ipv4();
        let usable = |own: &&std::net::IpAddr| match own {
            std::net::IpAddr::V6(v6) => !v6.is_unicast_link_local(),
            std::net::IpAddr::V4(_) => true,
        };
        self.shared_addresses.iter().filter(same).find(usable).copied()
    }
}
