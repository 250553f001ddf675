//! Whose the ports are when one daemon goes on in another one's place.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tidegate_engine::{Claim, Claims};
use tidegate_port::spread::Sharing;
use tidegate_port::steering::Protocol;
use tidegate_stack::TcpId;

use super::calls::Host;
use super::names::{NOBODY, SocketKey};
use super::state::{Damaged, SavedClaim, SavedProtocol};

/// The claims of a daemon's sockets, each once.
#[derive(Default)]
pub(super) struct Numbered<'c> {
    numbers: HashMap<*const Claim, u32>,
    all: Vec<&'c Claim>,
}

impl<'c> Numbered<'c> {
    /// The number of a claim, which is added if it is new.
    pub(super) fn number(&mut self, claim: &'c Arc<Claim>) -> u32 {
        let next = self.all.len() as u32;
        *self.numbers.entry(Arc::as_ptr(claim)).or_insert_with(|| {
            self.all.push(claim);
            next
        })
    }

    /// All of them, with what is held of the kernel.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub(super) fn save(self) -> io::Result<Vec<(SavedClaim, Option<OwnedFd>)>> {
        let save = |claim: &Claim| {
            let kernel = claim.kernel().map(|fd| fd.try_clone_to_owned()).transpose()?;
            let (protocol, _) = claim.local_port();
            let saved = SavedClaim {
                protocol: match protocol {
                    Protocol::Udp => SavedProtocol::Udp,
                    Protocol::Tcp => SavedProtocol::Tcp,
                },
                local: claim.local(),
                addresses: claim.addresses().collect(),
                is_held: kernel.is_some(),
            };
            Ok((saved, kernel))
        };
        self.all.into_iter().map(save).collect()
    }
}

/// What another daemon had taken from the kernel, and for whom, by its numbers.
pub(super) struct Taken {
    claims: Vec<(Option<OwnedFd>, SavedClaim)>,
    sockets: Vec<(SocketKey, u32)>,
    ending: Vec<(TcpId, u32)>,
}

impl Taken {
    /// # Errors
    /// [`Damaged`] when there is no claim of a number.
    pub(super) fn new(
        claims: Vec<(Option<OwnedFd>, SavedClaim)>,
        sockets: Vec<(SocketKey, u32)>,
        ending: Vec<(TcpId, u32)>,
    ) -> Result<Self, Damaged> {
        let numbers = sockets.iter().map(|(_, number)| number);
        let mut numbers = numbers.chain(ending.iter().map(|(_, number)| number));
        if numbers.any(|&number| number as usize >= claims.len()) {
            return Err(Damaged("a socket has a port that nobody has taken"));
        }
        Ok(Self { claims, sockets, ending })
    }
}

impl Host {
    /// What another daemon had taken from the kernel is taken again.
    ///
    /// # Errors
    /// When the port does not take it.
    pub(super) fn take_again(&mut self, taken: Taken) -> io::Result<()> {
        if !self.claims.is_shared() {
            return Ok(());
        }
        let port = self.engine.port();
        let resume = |(kernel, claim): (Option<OwnedFd>, SavedClaim)| {
            let protocol = match claim.protocol {
                SavedProtocol::Udp => Protocol::Udp,
                SavedProtocol::Tcp => Protocol::Tcp,
            };
            Claims::resume(port, protocol, claim.local, &claim.addresses, kernel)
        };
        let claims = taken.claims.into_iter().map(resume).collect::<io::Result<Vec<_>>>()?;
        for (key, number) in taken.sockets {
            if let Some(socket) = self.sockets.get_mut(key) {
                socket.claim = claims.get(number as usize).cloned();
            }
        }
        for (id, number) in taken.ending {
            self.claims.release_later(id, claims.get(number as usize).cloned());
        }
        Ok(())
    }

    /// What another daemon had has its ports here before those of other cores.
    ///
    /// # Errors
    /// When a port is another core's.
    pub(super) fn settle_all(&mut self) -> io::Result<()> {
        if self.claims.is_shared() {
            return Ok(());
        }
        // Of a port that is shared, each application has a claim of its own: they need
        // not go together.
        let mut claims = HashMap::new();
        let mut settle = |host: &mut Self, app, protocol, local: SocketAddr, sharing| {
            let of = (sharing != Sharing::Alone).then_some(app);
            let settled = match claims.entry((protocol, local.port(), of)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(host.settle(protocol, local, sharing, None)?),
            };
            io::Result::Ok(settled.clone())
        };
        for key in self.sockets.keys() {
            let stack = self.engine.stack();
            let Some(socket) = self.sockets.get(key) else { continue };
            let (id, app) = (socket.id(), socket.origin.app);
            let Some((protocol, local)) = id.local(stack) else { continue };
            let claim = settle(self, app, protocol, local, id.sharing(stack))?;
            if let Some(socket) = self.sockets.get_mut(key) {
                socket.claim = claim;
            }
        }
        let lingering: Vec<_> = self.engine.stack().tcp_lingering().collect();
        for (id, local, options) in lingering {
            let sharing = Sharing::new(options.reuse_port, options.party);
            let claim = settle(self, NOBODY, Protocol::Tcp, local, sharing)?;
            self.claims.release_later(id, claim);
        }
        Ok(())
    }
}
