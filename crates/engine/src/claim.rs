//! Exclusive use of local UDP and TCP ports, against the kernel and other network cores.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tidegate_device::Device;
use tidegate_device::sharded::{FlowSteering, LocalPort, PortSharing};
use tidegate_device::steering::{SteeringRule, TransportProtocol};
use tidegate_stack::{Stack, TcpId};

use crate::Engine;
use crate::kernel_port::{
    HeldSocket, KernelPort, NetworkNamespace, OwnSockets, bind_kernel_socket, check_unprivileged,
};

/// Ports of the kernel, whose addresses a stack shares. A clone is for another core.
#[derive(Clone)]
struct KernelPorts {
    addresses: Vec<IpAddr>,
    /// True if the application binds a kernel socket to each port itself.
    are_bound: bool,
    /// Network namespace of the addresses.
    namespace: NetworkNamespace,
    /// Kernel sockets that the cores hold for themselves.
    own_sockets: Arc<OwnSockets>,
}

/// Flow steering among network cores that share their addresses.
struct CorePorts {
    flow_steering: Arc<FlowSteering>,
    core: usize,
}

/// Claims of one stack on its local ports.
pub struct PortClaims {
    /// `None` if the stack has addresses of its own.
    kernel: Option<KernelPorts>,
    /// `None` if the stack runs on one core.
    cores: Option<CorePorts>,
    /// Claims of closed connections that have not terminated yet (TIME-WAIT, for example).
    closing: HashMap<TcpId, Arc<PortClaim>>,
    /// The same connections by local port.
    closing_on: BTreeSet<(u16, TcpId)>,
    /// Claims of closed connections that had terminated before their end could be reported.
    terminated: Vec<Arc<PortClaim>>,
}

impl PortClaims {
    pub(crate) fn new(addresses: Vec<IpAddr>, kernel_ports_bound: bool) -> Self {
        let kernel = (!addresses.is_empty()).then(|| KernelPorts {
            addresses,
            are_bound: kernel_ports_bound,
            namespace: NetworkNamespace::current(),
            own_sockets: Arc::default(),
        });
        Self::with(kernel, None)
    }

    /// Claims of the stack on core `core`, among several cores behind one device. `self` are those of
    /// the primary core before it was one of several.
    pub(crate) fn for_core(&self, flow_steering: Arc<FlowSteering>, core: usize) -> Self {
        Self::with(self.kernel.clone(), Some(CorePorts { flow_steering, core }))
    }

    fn with(kernel: Option<KernelPorts>, cores: Option<CorePorts>) -> Self {
        let (closing, closing_on) = Default::default();
        Self { kernel, cores, closing, closing_on, terminated: Vec::new() }
    }

    /// True if the stack shares the kernel's addresses.
    pub fn shares_kernel_addresses(&self) -> bool {
        self.kernel.is_some()
    }

    /// Diverts a local port from the kernel, if the stack shares the kernel's addresses; otherwise
    /// returns `None`.
    ///
    /// If `local` is an unspecified address, the port is diverted for every address of its
    /// families.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] if a kernel socket of another process has the port;
    /// [`io::ErrorKind::PermissionDenied`] if `kernel_port` gives no right to it; an error of the
    /// device if it rejects the steering rule.
    pub fn claim(
        &self,
        device: &mut dyn Device,
        protocol: TransportProtocol,
        local: SocketAddr,
        dual_stack: bool,
        kernel_port: KernelPort,
    ) -> io::Result<Option<Arc<PortClaim>>> {
        let Some(KernelPorts { addresses, are_bound, namespace, own_sockets }) = &self.kernel
        else {
            return Ok(None);
        };
        let bind = || -> io::Result<Option<Arc<dyn HeldSocket>>> {
            match &self.cores {
                // Sockets on several cores may share a port; the flow steering decides that.
                Some(_) => Ok(Some(own_sockets.bind(protocol, local, dual_stack)?)),
                None => Ok(Some(Arc::new(bind_kernel_socket(protocol, local, dual_stack)?))),
            }
        };
        let kernel_socket = match kernel_port {
            KernelPort::Held(held, port)
                if port.covers(protocol, local, dual_stack) && port.is_in(*namespace) =>
            {
                Some(held)
            }
            KernelPort::Held(..) => {
                return Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    format!("the kernel socket does not cover {local} in this network namespace"),
                ));
            }
            KernelPort::Own if *are_bound && local.port() != 0 => None,
            KernelPort::Own => bind()?,
            KernelPort::Unprivileged => {
                check_unprivileged(local.port())?;
                bind()?
            }
        };
        let claim =
            PortClaim::divert(device, protocol, local, dual_stack, addresses, kernel_socket)?;
        Ok(Some(Arc::new(claim)))
    }

    /// As [`PortClaims::claim`], for a TCP connection to `peer`. Without `local`, picks an address that
    /// can reach the peer and an ephemeral port.
    ///
    /// # Errors
    /// As [`PortClaims::claim`].
    pub fn claim_for_peer(
        &self,
        device: &mut dyn Device,
        local: Option<SocketAddr>,
        peer: SocketAddr,
        kernel_port: KernelPort,
    ) -> io::Result<Option<Arc<PortClaim>>> {
        let any_port = || self.source_address_for(peer).map(|own| SocketAddr::new(own, 0));
        match local.or_else(any_port) {
            Some(own) => self.claim(device, TransportProtocol::Tcp, own, false, kernel_port),
            None => Ok(None),
        }
    }

    /// Restores a claim of another process, together with its kernel socket for the port.
    ///
    /// # Errors
    /// If the device rejects the steering rules.
    pub fn resume(
        device: &mut dyn Device,
        protocol: TransportProtocol,
        local: SocketAddr,
        addresses: &[IpAddr],
        kernel_socket: Option<Arc<dyn HeldSocket>>,
    ) -> io::Result<Arc<PortClaim>> {
        let rules = addresses.iter().map(|&address| SteeringRule::Port {
            protocol,
            address: Some(address),
            port: local.port(),
        });
        Ok(Arc::new(PortClaim::install_rules(
            device,
            protocol,
            local,
            rules.collect(),
            kernel_socket,
        )?))
    }

    /// Claims the port of a new socket among the network cores, exclusively or shared with sockets
    /// of the same group (`sharing`). Without other cores, returns `claim`, which is the claim
    /// against the kernel.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] if another core has the port and does not share it.
    pub fn claim_among_cores(
        &self,
        device: &mut dyn Device,
        protocol: TransportProtocol,
        local: SocketAddr,
        sharing: PortSharing,
        claim: Option<Arc<PortClaim>>,
    ) -> io::Result<Option<Arc<PortClaim>>> {
        let Some(CorePorts { flow_steering, core }) = &self.cores else { return Ok(claim) };
        if let Err(error) = flow_steering.claim(*core, (protocol, local.port()), sharing) {
            // Nobody has seen the claim yet, so this is its only owner.
            if let Some(claim) = claim.and_then(Arc::into_inner) {
                claim.release(device);
            }
            return Err(error);
        }
        let claim = claim.and_then(Arc::into_inner).unwrap_or_else(|| PortClaim {
            protocol,
            rules: Vec::new(),
            local,
            sharing,
            kernel_socket: None,
        });
        Ok(Some(Arc::new(PortClaim { sharing, ..claim })))
    }

    /// Releases a port when its last claim is dropped.
    pub fn release(&self, device: &mut dyn Device, claim: Option<Arc<PortClaim>>) {
        if let Some(claim) = claim.and_then(Arc::into_inner) {
            if let Some(CorePorts { flow_steering, core }) = &self.cores {
                flow_steering.release(*core, claim.local_port(), claim.sharing);
            }
            claim.release(device);
        }
    }

    /// Keeps the port of a closed connection until the connection has terminated.
    pub fn release_after_close(
        &mut self,
        stack: &mut Stack,
        id: TcpId,
        claim: Option<Arc<PortClaim>>,
    ) {
        let Some(claim) = claim else { return };
        if stack.tcp_report_end(id) {
            self.closing_on.insert((claim.local.port(), id));
            self.closing.insert(id, claim);
        } else {
            self.terminated.push(claim);
        }
    }

    /// Releases the ports of closed connections that have terminated, as far as
    /// [`Engine::poll_event`] has taken the events of the stack.
    pub fn release_closed(&mut self, engine: &mut Engine) {
        if engine.ended.is_empty() && self.terminated.is_empty() {
            return;
        }
        let Self { closing, closing_on, .. } = self;
        let ended = engine.ended.drain(..).filter_map(|id| {
            let claim = closing.remove(&id)?;
            closing_on.remove(&(claim.local.port(), id));
            Some(claim)
        });
        let terminated: Vec<_> = ended.chain(self.terminated.drain(..)).collect();
        terminated.into_iter().for_each(|claim| self.release(engine.device(), Some(claim)));
    }

    /// Closed connections that have not terminated yet, with their claims.
    pub fn closing(&self) -> impl Iterator<Item = (TcpId, &Arc<PortClaim>)> {
        self.closing.iter().map(|(&id, claim)| (id, claim))
    }

    /// Ports of closed connections that have not terminated yet.
    pub fn closing_ports(&self) -> impl Iterator<Item = LocalPort> {
        self.closing.values().map(|claim| claim.local_port())
    }

    /// True if a closed connection still has this port.
    pub fn has_closing(&self, port: LocalPort) -> bool {
        self.closing_with(port).next().is_some()
    }

    /// Closed connections with this port.
    fn closing_with(&self, (protocol, port): LocalPort) -> impl Iterator<Item = TcpId> {
        let all = (port, TcpId::from_bits(0))..=(port, TcpId::from_bits(u64::MAX));
        let is_tcp = protocol == TransportProtocol::Tcp;
        is_tcp.then(|| self.closing_on.range(all)).into_iter().flatten().map(|&(_, id)| id)
    }

    /// Removes and returns the closed connections on these ports, with their claims, that move to
    /// another core.
    pub fn take_closing(
        &mut self,
        ports: &[LocalPort],
        moves: impl Fn(&Arc<PortClaim>) -> bool,
    ) -> Vec<(TcpId, Arc<PortClaim>)> {
        let on_ports = ports.iter().flat_map(|&port| self.closing_with(port));
        let moving: Vec<_> =
            on_ports.filter(|id| self.closing.get(id).is_some_and(&moves)).collect();
        let take = |id| {
            let claim = self.closing.remove(&id)?;
            self.closing_on.remove(&(claim.local.port(), id));
            Some((id, claim))
        };
        moving.into_iter().filter_map(take).collect()
    }

    /// Source address for packets to `peer`: the first address of the family that is not
    /// link-local IPv6.
    fn source_address_for(&self, peer: SocketAddr) -> Option<IpAddr> {
        let addresses = &self.kernel.as_ref()?.addresses;
        let usable = |own: &&IpAddr| match own {
            IpAddr::V4(_) => peer.is_ipv4(),
            IpAddr::V6(own) => peer.is_ipv6() && !own.is_unicast_link_local(),
        };
        addresses.iter().find(usable).copied()
    }
}

/// Claim of one stack on a local port.
///
/// On a shared address, the port was diverted from the kernel to Tidegate. The claim then also
/// holds a kernel socket bound to the port. So no other process gets the port, and the kernel
/// does not answer stray packets with "port unreachable".
pub struct PortClaim {
    protocol: TransportProtocol,
    rules: Vec<SteeringRule>,
    local: SocketAddr,
    /// Sharing with sockets on other cores.
    sharing: PortSharing,
    kernel_socket: Option<Arc<dyn HeldSocket>>,
}

impl PortClaim {
    /// Diverts the port of `local` from the kernel. An unspecified address means every kernel
    /// address of its families.
    fn divert(
        device: &mut dyn Device,
        protocol: TransportProtocol,
        mut local: SocketAddr,
        dual_stack: bool,
        addresses: &[IpAddr],
        kernel_socket: Option<Arc<dyn HeldSocket>>,
    ) -> io::Result<Self> {
        if let Some(kernel_socket) = &kernel_socket
            && local.port() == 0
        {
            let chosen = rustix::net::getsockname(kernel_socket)?;
            local.set_port(SocketAddr::try_from(chosen)?.port());
        }
        let is_diverted = |address: IpAddr| match local.ip() {
            IpAddr::V4(any) if any.is_unspecified() => address.is_ipv4(),
            IpAddr::V6(any) if any.is_unspecified() => dual_stack || address.is_ipv6(),
            one => one == address,
        };
        let rules =
            addresses.iter().copied().filter(|&address| is_diverted(address)).map(|address| {
                SteeringRule::Port { protocol, address: Some(address), port: local.port() }
            });
        Self::install_rules(device, protocol, local, rules.collect(), kernel_socket)
    }

    fn install_rules(
        device: &mut dyn Device,
        protocol: TransportProtocol,
        local: SocketAddr,
        rules: Vec<SteeringRule>,
        kernel_socket: Option<Arc<dyn HeldSocket>>,
    ) -> io::Result<Self> {
        let sharing = PortSharing::Exclusive;
        let mut claim = Self { protocol, rules: Vec::new(), local, sharing, kernel_socket };
        for rule in rules {
            if let Err(error) = device.set_steering(&rule, true) {
                // Other claims may use the rules that this claim has not added.
                claim.release(device);
                return Err(error);
            }
            claim.rules.push(rule);
        }
        Ok(claim)
    }

    /// Claimed address and port; port 0 is replaced by the port that the kernel chose.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Addresses whose port is diverted from the kernel.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.rules.iter().filter_map(|rule| match rule {
            SteeringRule::Port { address, .. } => *address,
            _ => None,
        })
    }

    /// Kernel socket held with the claim, if any.
    pub fn kernel_socket(&self) -> Option<&Arc<dyn HeldSocket>> {
        self.kernel_socket.as_ref()
    }

    /// Stops listening on the kernel socket, which keeps the port: no process accepts connections
    /// from it.
    pub fn stop_listening(&self) {
        if let Some(kernel_socket) = &self.kernel_socket {
            kernel_socket.stop_listening();
        }
    }

    /// True if sockets on other cores may have the port too.
    pub fn is_shared(&self) -> bool {
        self.sharing != PortSharing::Exclusive
    }

    /// Protocol and port number, without the address.
    pub fn local_port(&self) -> LocalPort {
        (self.protocol, self.local.port())
    }

    /// Removes the steering rules of the claim.
    fn release(&self, device: &mut dyn Device) {
        for rule in &self.rules {
            // Fails only while the device is closing or gone; then it takes no packets any more.
            let _ = device.set_steering(rule, false);
        }
    }
}
