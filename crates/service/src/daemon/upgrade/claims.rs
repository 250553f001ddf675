//! Ports held by a daemon's sockets, across a handover to another daemon.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tidegate_device::sharded::PortSharing;
use tidegate_device::steering::TransportProtocol;
use tidegate_engine::{HeldSocket, PortClaim, PortClaims};
use tidegate_stack::TcpId;

use super::snapshot::ClaimSnapshot;
use crate::daemon::core::server::SocketServer;
use crate::daemon::ids::{NO_APP, SocketKey};
use crate::daemon::snapshot_error::InvalidSnapshot;
use crate::daemon::workers::AppFd;

/// Port claims of a daemon's sockets, without duplicates.
#[derive(Default)]
pub(super) struct ClaimTable<'c> {
    indices: HashMap<*const PortClaim, u32>,
    claims: Vec<&'c PortClaim>,
}

impl<'c> ClaimTable<'c> {
    /// Index of a claim, which is added if it is new.
    pub(super) fn index_of(&mut self, claim: &'c Arc<PortClaim>) -> u32 {
        let next = self.claims.len() as u32;
        *self.indices.entry(Arc::as_ptr(claim)).or_insert_with(|| {
            self.claims.push(claim);
            next
        })
    }

    /// Snapshots of all claims, with their kernel sockets.
    pub(in crate::daemon) fn save(self) -> Vec<(ClaimSnapshot, Option<Arc<dyn HeldSocket>>)> {
        let save = |claim: &PortClaim| {
            let kernel = claim.kernel_socket().cloned();
            let (protocol, _) = claim.local_port();
            let saved = ClaimSnapshot {
                protocol: protocol.into(),
                local: claim.local(),
                addresses: claim.addresses().collect(),
                has_kernel_socket: kernel.is_some(),
            };
            (saved, kernel)
        };
        self.claims.into_iter().map(save).collect()
    }
}

/// Port claims of the previous daemon, and the sockets and connections they belong to, by index.
pub(super) struct RestoredClaims {
    claims: Vec<(Option<AppFd>, ClaimSnapshot)>,
    sockets: Vec<(SocketKey, u32)>,
    closing: Vec<(TcpId, u32)>,
}

impl RestoredClaims {
    /// # Errors
    /// [`InvalidSnapshot`] when a claim's index is out of range.
    pub(in crate::daemon) fn new(
        claims: Vec<(Option<AppFd>, ClaimSnapshot)>,
        sockets: Vec<(SocketKey, u32)>,
        closing: Vec<(TcpId, u32)>,
    ) -> Result<Self, InvalidSnapshot> {
        let numbers = sockets.iter().map(|(_, number)| number);
        let mut numbers = numbers.chain(closing.iter().map(|(_, number)| number));
        if numbers.any(|&number| number as usize >= claims.len()) {
            return Err(InvalidSnapshot("a socket refers to a port claim that does not exist"));
        }
        Ok(Self { claims, sockets, closing })
    }
}

impl SocketServer {
    /// Takes from the kernel again the ports that the previous daemon had taken.
    ///
    /// # Errors
    /// When the device rejects a steering rule.
    pub(super) fn restore_claims(&mut self, restored: RestoredClaims) -> io::Result<()> {
        if !self.claims.shares_kernel_addresses() {
            return Ok(());
        }
        let port = self.engine.device();
        let resume = |(kernel, claim): (Option<AppFd>, ClaimSnapshot)| {
            let kernel = kernel.map(|fd| Arc::new(fd) as Arc<dyn HeldSocket>);
            PortClaims::resume(port, claim.protocol.into(), claim.local, &claim.addresses, kernel)
        };
        let claims = restored.claims.into_iter().map(resume).collect::<io::Result<Vec<_>>>()?;
        for (key, number) in restored.sockets {
            self.sockets.set_claim(key, claims.get(number as usize).cloned());
        }
        for (id, number) in restored.closing {
            let (stack, _, _) = self.engine.parts();
            self.claims.release_after_close(stack, id, claims.get(number as usize).cloned());
        }
        Ok(())
    }

    /// Claims the ports of all restored sockets among the network cores.
    ///
    /// # Errors
    /// When a port belongs to another core.
    pub(super) fn claim_all_among_cores(&mut self) -> io::Result<()> {
        if self.claims.shares_kernel_addresses() {
            return Ok(());
        }
        // On a shared port each application has a claim of its own: the applications can migrate
        // separately.
        let mut claims = HashMap::new();
        let mut settle = |host: &mut Self, app, protocol, local: SocketAddr, sharing| {
            let of = (sharing != PortSharing::Exclusive).then_some(app);
            let settled = match claims.entry((protocol, local.port(), of)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    new.insert(host.claim_among_cores(protocol, local, sharing, None)?)
                }
            };
            io::Result::Ok(settled.clone())
        };
        for key in self.sockets.keys() {
            let stack = self.engine.stack();
            let Some(socket) = self.sockets.get(key) else { continue };
            let (id, app) = (socket.id(), socket.origin().app);
            let Some((protocol, local)) = id.local(stack) else { continue };
            let claim = settle(self, app, protocol, local, id.sharing(stack))?;
            self.sockets.set_claim(key, claim);
        }
        let lingering: Vec<_> = self.engine.stack().tcp_lingering().collect();
        for (id, local, options) in lingering {
            let sharing = PortSharing::new(options.reuse_port, options.owner);
            let claim = settle(self, NO_APP, TransportProtocol::Tcp, local, sharing)?;
            let (stack, _, _) = self.engine.parts();
            self.claims.release_after_close(stack, id, claim);
        }
        Ok(())
    }
}
