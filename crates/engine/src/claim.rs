//! Ports of the kernel's addresses that Tidegate takes over.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tidegate_port::Port;
use tidegate_port::steering::{Protocol, Rule};
use tidegate_stack::TcpId;

use crate::Engine;

/// The kernel's addresses that a stack lives on; none when it has its own.
pub struct KernelAddresses {
    addresses: Vec<IpAddr>,
    /// The program has bound a socket of the kernel's to each port.
    ports_are_held: bool,
    /// Ports of closed connections, which stay ours until those have ended.
    ending: Vec<(TcpId, Arc<Claim>)>,
}

impl KernelAddresses {
    pub(crate) fn new(addresses: Vec<IpAddr>, ports_are_held: bool) -> Self {
        Self { addresses, ports_are_held, ending: Vec::new() }
    }

    /// Whether the stack has addresses of its own.
    pub fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    /// Takes a port away from the kernel, if the stack lives on its addresses.
    /// `local` may be the unspecified address: then the port of each address of
    /// its families is taken.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when a program has the port from the kernel,
    /// and when the port does not take the rule.
    pub fn claim(
        &self,
        port: &mut dyn Port,
        protocol: Protocol,
        local: SocketAddr,
        dual_stack: bool,
    ) -> io::Result<Option<Arc<Claim>>> {
        if self.is_empty() {
            return Ok(None);
        }
        Claim::take(port, protocol, local, dual_stack, self).map(|claim| Some(Arc::new(claim)))
    }

    /// As [`KernelAddresses::claim`], for a connection to `peer`. Without `local`
    /// it leaves from an address that can reach the peer, and any port.
    ///
    /// # Errors
    /// As [`KernelAddresses::claim`].
    pub fn claim_to_reach(
        &self,
        port: &mut dyn Port,
        local: Option<SocketAddr>,
        peer: SocketAddr,
    ) -> io::Result<Option<Arc<Claim>>> {
        let like = || self.like(peer).map(|own| SocketAddr::new(own, 0));
        match local.or_else(like) {
            Some(own) => self.claim(port, Protocol::Tcp, own, false),
            None => Ok(None),
        }
    }

    /// Gives a port back to the kernel, if nobody else needs it.
    pub fn release(&self, port: &mut dyn Port, claim: Option<Arc<Claim>>) {
        if let Some(claim) = claim.and_then(Arc::into_inner) {
            claim.release(port);
        }
    }

    /// The port of a connection that was closed is given back when that has ended.
    pub fn release_later(&mut self, id: TcpId, claim: Option<Arc<Claim>>) {
        self.ending.extend(claim.map(|claim| (id, claim)));
    }

    /// Gives the ports of connections back that have ended.
    pub fn release_ended(&mut self, engine: &mut Engine) {
        if self.ending.is_empty() {
            return;
        }
        let (open, over) = std::mem::take(&mut self.ending)
            .into_iter()
            .partition::<Vec<_>, _>(|(id, _)| engine.stack().tcp_exists(*id));
        self.ending = open;
        over.into_iter().for_each(|(_, claim)| self.release(engine.port(), Some(claim)));
    }

    /// The address to reach `peer` from.
    fn like(&self, peer: SocketAddr) -> Option<IpAddr> {
        let usable = |own: &&IpAddr| match own {
            IpAddr::V4(_) => peer.is_ipv4(),
            IpAddr::V6(own) => peer.is_ipv6() && !own.is_unicast_link_local(),
        };
        self.addresses.iter().find(usable).copied()
    }
}

/// A port of a shared address that was moved from the kernel to Tidegate.
///
/// The kernel's own socket on it is held too: so no other program gets the
/// port, and stray packets that the kernel still sees are not answered with
/// "port unreachable".
pub struct Claim {
    rules: Vec<Rule>,
    local: SocketAddr,
    _kernel: Option<OwnedFd>,
}

/// A socket of the kernel's that nothing is read from.
fn reserve(protocol: Protocol, local: SocketAddr, dual_stack: bool) -> io::Result<OwnedFd> {
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let kind = match protocol {
        Protocol::Udp => SocketType::DGRAM,
        Protocol::Tcp => SocketType::STREAM,
    };
    let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    if local.is_ipv6() {
        rustix::net::sockopt::set_ipv6_v6only(&fd, !dual_stack)?;
    }
    rustix::net::bind(&fd, &local)?;
    Ok(fd)
}

impl Claim {
    /// Moves `local`, which may be the unspecified address: then the port of
    /// each of the kernel's addresses of its families moves.
    fn take(
        port: &mut dyn Port,
        protocol: Protocol,
        mut local: SocketAddr,
        dual_stack: bool,
        kernels: &KernelAddresses,
    ) -> io::Result<Self> {
        let KernelAddresses { addresses, ports_are_held, .. } = kernels;
        let is_held = *ports_are_held && local.port() != 0;
        let kernel = (!is_held).then(|| reserve(protocol, local, dual_stack)).transpose()?;
        if let Some(kernel) = &kernel
            && local.port() == 0
        {
            let chosen = rustix::net::getsockname(kernel)?;
            local.set_port(SocketAddr::try_from(chosen)?.port());
        }
        let takes = |address: IpAddr| match local.ip() {
            IpAddr::V4(any) if any.is_unspecified() => address.is_ipv4(),
            IpAddr::V6(any) if any.is_unspecified() => dual_stack || address.is_ipv6(),
            one => one == address,
        };
        let rules = addresses
            .iter()
            .copied()
            .filter(|&address| takes(address))
            .map(|address| Rule::Port { protocol, address: Some(address), port: local.port() });
        let claim = Self { rules: rules.collect(), local, _kernel: kernel };
        for rule in &claim.rules {
            if let Err(error) = port.set_steering(rule, true) {
                claim.release(port);
                return Err(error);
            }
        }
        Ok(claim)
    }

    /// What was moved, with the port that the kernel chose for port 0.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Moves it back.
    fn release(&self, port: &mut dyn Port) {
        for rule in &self.rules {
            // The port is closing or gone when this fails, and then it takes
            // nothing any more.
            let _ = port.set_steering(rule, false);
        }
    }
}
