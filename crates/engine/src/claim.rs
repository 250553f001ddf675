//! Local ports that others could have too: the kernel, or other cores.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tidegate_port::Port;
use tidegate_port::spread::{Crossing, LocalPort, Sharing};
use tidegate_port::steering::{Protocol, Rule};
use tidegate_stack::TcpId;

use crate::Engine;

/// Whose leave a stack needs to use a local port.
enum Rival {
    /// Nobody's: the addresses are its own.
    Nobody,
    /// The kernel's, on whose addresses it lives.
    Kernel {
        addresses: Vec<IpAddr>,
        /// The program has bound a socket of the kernel's to each port.
        ports_are_held: bool,
    },
    /// That of stacks on other cores, which live on the same addresses.
    Cores { crossing: Arc<Crossing>, own: usize },
}

/// The claims of one stack on its local ports.
pub struct Claims {
    rival: Rival,
    /// Ports of closed connections, which stay ours until those have ended.
    ending: Vec<(TcpId, Arc<Claim>)>,
}

impl Claims {
    pub(crate) fn new(addresses: Vec<IpAddr>, ports_are_held: bool) -> Self {
        let rival = match addresses.is_empty() {
            true => Rival::Nobody,
            false => Rival::Kernel { addresses, ports_are_held },
        };
        Self { rival, ending: Vec::new() }
    }

    /// Claims of the stack on a core beside others behind one port.
    pub(crate) fn among_cores(crossing: Arc<Crossing>, own: usize) -> Self {
        Self { rival: Rival::Cores { crossing, own }, ending: Vec::new() }
    }

    /// Whether the stack lives on the kernel's addresses.
    pub fn is_shared(&self) -> bool {
        matches!(self.rival, Rival::Kernel { .. })
    }

    /// Takes a port away from the kernel, if the stack lives on its addresses.
    /// `local` may be the unspecified address: then the port of each address of
    /// its families is taken. `held` is a socket of the kernel's that is bound to it
    /// already, if there is one.
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
        held: Option<OwnedFd>,
    ) -> io::Result<Option<Arc<Claim>>> {
        let Rival::Kernel { addresses, ports_are_held } = &self.rival else { return Ok(None) };
        let kernel = match held {
            Some(held) => Some(held),
            None if *ports_are_held && local.port() != 0 => None,
            None => Some(reserve(protocol, local, dual_stack)?),
        };
        let claim = Claim::take(port, protocol, local, dual_stack, addresses, kernel)?;
        Ok(Some(Arc::new(claim)))
    }

    /// As [`Claims::claim`], for a connection to `peer`. Without `local` it leaves
    /// from an address that can reach the peer, and any port.
    ///
    /// # Errors
    /// As [`Claims::claim`].
    pub fn claim_to_reach(
        &self,
        port: &mut dyn Port,
        local: Option<SocketAddr>,
        peer: SocketAddr,
        held: Option<OwnedFd>,
    ) -> io::Result<Option<Arc<Claim>>> {
        let like = || self.like(peer).map(|own| SocketAddr::new(own, 0));
        match local.or_else(like) {
            Some(own) => self.claim(port, Protocol::Tcp, own, false, held),
            None => Ok(None),
        }
    }

    /// Takes a port that another process took before, with what that had of the kernel
    /// for it.
    ///
    /// # Errors
    /// When the port does not take the rules.
    pub fn resume(
        port: &mut dyn Port,
        protocol: Protocol,
        local: SocketAddr,
        addresses: &[IpAddr],
        kernel: Option<OwnedFd>,
    ) -> io::Result<Arc<Claim>> {
        let rules = addresses.iter().map(|&address| Rule::Port {
            protocol,
            address: Some(address),
            port: local.port(),
        });
        Ok(Arc::new(Claim::hold(port, protocol, local, rules.collect(), kernel)?))
    }

    /// The stack has a socket on this port now: claims it before the other cores,
    /// if there are any, alone or shared with their sockets that share theirs. `claim`
    /// is what the kernel was asked for.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when another core has the port, and it is not shared.
    pub fn settle(
        &self,
        protocol: Protocol,
        local: SocketAddr,
        sharing: Sharing,
        claim: Option<Arc<Claim>>,
    ) -> io::Result<Option<Arc<Claim>>> {
        let Rival::Cores { crossing, own } = &self.rival else { return Ok(claim) };
        crossing.claim(*own, (protocol, local.port()), sharing)?;
        Ok(Some(Arc::new(Claim { protocol, rules: Vec::new(), local, sharing, kernel: None })))
    }

    /// Gives a port back, if nobody else needs it.
    pub fn release(&self, port: &mut dyn Port, claim: Option<Arc<Claim>>) {
        if let Some(claim) = claim.and_then(Arc::into_inner) {
            if let Rival::Cores { crossing, own } = &self.rival {
                crossing.release(*own, claim.local_port(), claim.sharing);
            }
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

    /// Closed connections that have not ended yet, with their claims.
    pub fn ending(&self) -> impl Iterator<Item = (TcpId, &Arc<Claim>)> {
        self.ending.iter().map(|(id, claim)| (*id, claim))
    }

    /// The ports of closed connections that have not ended yet.
    pub fn ending_ports(&self) -> impl Iterator<Item = LocalPort> {
        self.ending.iter().map(|(_, claim)| claim.local_port())
    }

    /// Whether closed connections have this port.
    pub fn has_ending(&self, port: LocalPort) -> bool {
        self.ending.iter().any(|(_, claim)| claim.local_port() == port)
    }

    /// Closed connections that another core is to have, with their claims.
    pub fn take_ending(&mut self, moves: impl Fn(&Arc<Claim>) -> bool) -> Vec<(TcpId, Arc<Claim>)> {
        let is_moving = |(_, claim): &(TcpId, Arc<Claim>)| moves(claim);
        let (moving, staying) = std::mem::take(&mut self.ending).into_iter().partition(is_moving);
        self.ending = staying;
        moving
    }

    /// The address to reach `peer` from.
    fn like(&self, peer: SocketAddr) -> Option<IpAddr> {
        let Rival::Kernel { addresses, .. } = &self.rival else { return None };
        let usable = |own: &&IpAddr| match own {
            IpAddr::V4(_) => peer.is_ipv4(),
            IpAddr::V6(own) => peer.is_ipv6() && !own.is_unicast_link_local(),
        };
        addresses.iter().find(usable).copied()
    }
}

/// A local port that is ours before others.
///
/// On a shared address it was moved from the kernel to Tidegate. The kernel's own
/// socket on it is held too: so no other program gets the port, and stray packets
/// that the kernel still sees are not answered with "port unreachable".
pub struct Claim {
    protocol: Protocol,
    rules: Vec<Rule>,
    local: SocketAddr,
    /// With whom on other cores.
    sharing: Sharing,
    kernel: Option<OwnedFd>,
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
        addresses: &[IpAddr],
        kernel: Option<OwnedFd>,
    ) -> io::Result<Self> {
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
        Self::hold(port, protocol, local, rules.collect(), kernel)
    }

    fn hold(
        port: &mut dyn Port,
        protocol: Protocol,
        local: SocketAddr,
        rules: Vec<Rule>,
        kernel: Option<OwnedFd>,
    ) -> io::Result<Self> {
        let claim = Self { protocol, rules, local, sharing: Sharing::Alone, kernel };
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

    /// The addresses whose port it is.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.rules.iter().filter_map(|rule| match rule {
            Rule::Port { address, .. } => *address,
            _ => None,
        })
    }

    /// The socket of the kernel's that is held with it, if there is one.
    pub fn kernel(&self) -> Option<BorrowedFd<'_>> {
        self.kernel.as_ref().map(AsFd::as_fd)
    }

    /// The kernel's socket keeps the port and listens no more, if it did: nobody accepts
    /// from it.
    pub fn stop_listening(&self) {
        if let Some(kernel) = &self.kernel {
            // One that did not listen says so.
            let _ = rustix::net::shutdown(kernel, rustix::net::Shutdown::Both);
        }
    }

    /// Whether sockets on other cores may have the port, too.
    pub fn is_shared(&self) -> bool {
        self.sharing != Sharing::Alone
    }

    /// The port, whatever the address.
    pub fn local_port(&self) -> LocalPort {
        (self.protocol, self.local.port())
    }

    /// Gives it back.
    fn release(&self, port: &mut dyn Port) {
        for rule in &self.rules {
            // The port is closing or gone when this fails, and then it takes
            // nothing any more.
            let _ = port.set_steering(rule, false);
        }
    }
}
