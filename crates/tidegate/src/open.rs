//! From a configuration to a running engine.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tidegate_engine::admission::AdmissionError;
use tidegate_engine::{Clock, Engine, EngineConfig, IdleConfig, KernelNeighbours};
use tidegate_gate::{Mode, Settings, admission};
use tidegate_memory::{Arena, ArenaConfig, ArenaError, FrameSize, HEADROOM_BYTES};
use tidegate_port::Port;
use tidegate_port::mem::MemPort;
use tidegate_port::netlink::{self, Interface, NetlinkError};
use tidegate_port::packet::{self, PacketConfig, PacketError, PacketPort};
use tidegate_port::steering::{Protocol, Rule};
use tidegate_port::tap::{TapConfig, TapError, TapPort};
use tidegate_port::xdp::{XdpConfig, XdpError, XdpPort};
use tidegate_stack::{Config, ConfigError, Limits, Ownership, Route, Stack};
use tidegate_wire::{IpCidr, MacAddr};

use crate::threads::Form;

/// Where packets come from.
pub enum PortConfig {
    /// AF_XDP on an interface. What to take is filled in from the addresses,
    /// or, on a shared address, from the sockets that are bound.
    Xdp(XdpConfig),
    /// AF_PACKET on an interface. What to take is filled in likewise.
    Packet(PacketConfig),
    /// A TAP or TUN device.
    Tap(TapConfig),
    /// One end of a wire in memory.
    Mem(Box<MemPort>),
    /// Anything else.
    Custom(OpenPort),
}

/// Opens a port with the arena that its frames will live in.
pub type OpenPort = Box<dyn FnOnce(&mut Arena) -> io::Result<Box<dyn Port>> + Send>;

impl From<MemPort> for PortConfig {
    fn from(port: MemPort) -> Self {
        Self::Mem(Box::new(port))
    }
}

impl From<XdpConfig> for PortConfig {
    fn from(config: XdpConfig) -> Self {
        Self::Xdp(config)
    }
}

impl From<PacketConfig> for PortConfig {
    fn from(config: PacketConfig) -> Self {
        Self::Packet(config)
    }
}

impl From<TapConfig> for PortConfig {
    fn from(config: TapConfig) -> Self {
        Self::Tap(config)
    }
}

/// Wraps a port after it was opened: faults, tracing, capture.
pub type Wrap = Box<dyn FnOnce(Box<dyn Port>) -> io::Result<Box<dyn Port>> + Send>;

/// What a [`crate::Net`] is made of.
pub struct NetConfig {
    port: PortConfig,
    wraps: Vec<Wrap>,
    addresses: Vec<IpCidr>,
    routes: Vec<Route>,
    ownership: Ownership,
    mac: Option<MacAddr>,
    vlan: Option<u16>,
    limits: Limits,
    arena: ArenaConfig,
    engine: EngineConfig,
    own_thread: bool,
    counts_lock: bool,
    admission: Option<admission::Config>,
    seed: Option<[u8; 16]>,
}

impl NetConfig {
    /// A stack on this port, without an address yet.
    pub fn new(port: impl Into<PortConfig>) -> Self {
        Self {
            port: port.into(),
            wraps: Vec::new(),
            addresses: Vec::new(),
            routes: Vec::new(),
            ownership: Ownership::Own,
            mac: None,
            vlan: None,
            limits: Limits::default(),
            arena: ArenaConfig::default(),
            engine: EngineConfig::default(),
            own_thread: false,
            counts_lock: false,
            admission: None,
            seed: None,
        }
    }

    /// Adds an address of its own, with the prefix of its network. The stack
    /// answers ARP, neighbour discovery and ping for it.
    #[must_use]
    pub fn address(mut self, address: IpCidr) -> Self {
        self.addresses.push(address);
        self
    }

    /// Adds a route.
    #[must_use]
    pub fn route(mut self, route: Route) -> Self {
        self.routes.push(route);
        self
    }

    /// Lives on the kernel's addresses, routes and neighbours of the interface
    /// instead of its own: only the ports of bound sockets are taken, all else
    /// stays with the kernel. On AF_XDP only.
    #[must_use]
    pub fn shared(mut self) -> Self {
        self.ownership = Ownership::Shared;
        self
    }

    /// Uses this hardware address instead of the interface's.
    #[must_use]
    pub fn mac(mut self, mac: MacAddr) -> Self {
        self.mac = Some(mac);
        self
    }

    /// Is in this VLAN (IEEE 802.1Q).
    #[must_use]
    pub fn vlan(mut self, vlan: u16) -> Self {
        self.vlan = Some(vlan);
        self
    }

    /// Sets the limits of the stack's tables and queues.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets how many packet buffers there are, and of which size.
    #[must_use]
    pub fn frames(mut self, frames: u32, size: FrameSize) -> Self {
        (self.arena.frames, self.arena.frame_size) = (frames, size);
        self
    }

    /// Whether to try hugepages for packet buffers; ordinary pages are the
    /// fallback.
    #[must_use]
    pub fn hugepages(mut self, hugepages: bool) -> Self {
        self.arena.hugepages = hugepages;
        self
    }

    /// Sets when to look for packets and how many to take. Modes `interrupt`,
    /// `moderated` and `napi` start threads of real-time priority on the
    /// processors of the caller.
    #[must_use]
    pub fn gate(mut self, settings: Settings) -> Self {
        self.engine.gate = settings;
        self
    }

    /// Sets what is taken when not everything can be.
    #[must_use]
    pub fn admission(mut self, admission: admission::Config) -> Self {
        self.admission = Some(admission);
        self
    }

    /// Sets how to wait when there is nothing to do.
    #[must_use]
    pub fn idle(mut self, idle: IdleConfig) -> Self {
        self.engine.idle = idle;
        self
    }

    /// Lets a thread of its own run the stack in modes `polled` and
    /// `dedicated`, instead of the calls that wait for a socket.
    #[must_use]
    pub fn own_thread(mut self, own_thread: bool) -> Self {
        self.own_thread = own_thread;
        self
    }

    /// Counts how the lock of the stack is used, for
    /// [`crate::Net::lock_statistics`]. That takes two readings of the time
    /// stamp counter for each call on a socket.
    #[must_use]
    pub fn lock_statistics(mut self, counted: bool) -> Self {
        self.counts_lock = counted;
        self
    }

    /// Whether the lock of the stack is counted.
    pub(crate) fn counts_lock(&self) -> bool {
        self.counts_lock
    }

    /// Who runs the engine.
    pub(crate) fn form(&self) -> Form {
        let mode = self.engine.gate.config().mode;
        let by_calls = matches!(mode, Mode::Polled | Mode::Dedicated) && !self.own_thread;
        if by_calls { Form::Calls } else { Form::Threads(mode) }
    }

    /// Keys the hash tables and port choices from this seed instead of the
    /// system's randomness, so that a run can be repeated.
    #[must_use]
    pub fn seed(mut self, seed: [u8; 16]) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Wraps the port after it was opened; later wraps are further out.
    #[must_use]
    pub fn wrap(mut self, wrap: Wrap) -> Self {
        self.wraps.push(wrap);
        self
    }
}

/// Why a [`crate::Net`] could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No memory for packet buffers.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The AF_XDP port.
    #[error(transparent)]
    Xdp(#[from] XdpError),
    /// The AF_PACKET port.
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// The TAP port.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// What the kernel knows could not be read.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The stack does not take the configuration.
    #[error(transparent)]
    Stack(#[from] ConfigError),
    /// The settings of admission, or a port that does not take them.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// Admission in a mode that does not know how things go.
    #[error(
        "admission needs a mode that polls, and {} is none: choose mode polled or dedicated",
        .0.name()
    )]
    AdmissionNeedsPolling(Mode),
    /// Neither an own nor a shared address.
    #[error("no address: give the stack one of its own, or let it share the kernel's on AF_XDP")]
    NoAddress,
    /// Sharing works only where frames can be taken away from the kernel.
    #[error(
        "only AF_XDP can share the kernel's address: on any other port the kernel sees every \
         packet too and answers it; use the xdp port or an own address"
    )]
    CannotShare,
    /// The kernel has no address on the interface to share.
    #[error("the kernel has no address on {0} to share: `ip address add` one, or use an own one")]
    NothingToShare(String),
    /// The kernel has the address that the stack was to own.
    #[error(
        "{address} is the kernel's address on {interface}: share it, or take one that nobody has"
    )]
    KernelHasAddress {
        /// The address.
        address: IpAddr,
        /// The interface.
        interface: String,
    },
    /// The system refused something else.
    #[error(transparent)]
    Io(io::Error),
}

/// Opens the port and joins it to a stack. Also gives the addresses that are
/// shared with the kernel, if any.
pub(crate) fn engine(mut config: NetConfig) -> Result<(Engine, Vec<IpAddr>), OpenError> {
    let shared = config.ownership == Ownership::Shared;
    let mode = config.engine.gate.config().mode;
    if config.admission.is_some() && !matches!(mode, Mode::Polled | Mode::Dedicated) {
        return Err(OpenError::AdmissionNeedsPolling(mode));
    }
    let mut neighbours = None;
    if shared {
        let PortConfig::Xdp(xdp) = &config.port else { return Err(OpenError::CannotShare) };
        let interface = Interface::by_name(&xdp.interface)?;
        neighbours = Some(KernelNeighbours::follow(interface.index)?);
        config.addresses = netlink::addresses(interface.index)?;
        if config.addresses.is_empty() {
            return Err(OpenError::NothingToShare(interface.name));
        }
        let routes = netlink::routes(interface.index)?;
        let routes =
            routes.iter().map(|route| Route { prefix: route.destination, gateway: route.gateway });
        config.routes.extend(routes);
    } else if config.addresses.is_empty() {
        return Err(OpenError::NoAddress);
    }
    let shared_addresses =
        if shared { config.addresses.iter().map(IpCidr::address).collect() } else { Vec::new() };
    let kernel_receives = matches!(config.port, PortConfig::Packet(_) | PortConfig::Tap(_));
    if kernel_receives && config.engine.idle == IdleConfig::default() {
        // Its work may need this core: a pause lets it have it.
        config.engine.idle.spin_ns = 0;
    }
    let mut arena = Arena::new(config.arena)?;
    let mut port = open_port(config.port, &config.addresses, config.vlan, shared, &mut arena)?;
    for wrap in config.wraps {
        port = wrap(port).map_err(OpenError::Io)?;
    }
    let capabilities = port.capabilities();
    let mac = config.mac.unwrap_or(MacAddr(capabilities.mac));
    let seed = config.seed.map_or_else(random_seed, Ok)?;
    let stack = Config {
        medium: capabilities.medium,
        mtu: capabilities.mtu,
        vlan: config.vlan,
        addresses: config.addresses,
        routes: config.routes,
        ownership: config.ownership,
        limits: config.limits,
        transmit_checksum: capabilities.transmit_checksum,
        segmentation_bytes: match capabilities.segmentation {
            // Headers go in front.
            true => usize::from(u16::MAX - HEADROOM_BYTES),
            false => 0,
        },
        ..Config::ethernet(mac, seed)
    };
    let clock = Clock::new();
    let stack = Stack::new(stack, clock.now_ns())?;
    let mut engine = Engine::new(port, arena, stack, clock, neighbours, config.engine);
    if let Some(admission) = &config.admission {
        engine.set_admission(admission, seed)?;
    }
    Ok((engine, shared_addresses))
}

fn open_port(
    port: PortConfig,
    addresses: &[IpCidr],
    vlan: Option<u16>,
    shared: bool,
    arena: &mut Arena,
) -> Result<Box<dyn Port>, OpenError> {
    Ok(match port {
        PortConfig::Xdp(mut xdp) => {
            if !shared {
                not_the_kernels(&xdp.interface, addresses)?;
                let own = addresses.iter().map(|address| Rule::Address(address.address()));
                xdp.steering.rules.extend(own);
            }
            xdp.steering.vlan = vlan;
            Box::new(XdpPort::open(xdp, arena)?)
        }
        PortConfig::Packet(mut packet) => {
            not_the_kernels(&packet.interface, addresses)?;
            // The filter reads untagged frames only.
            packet.steering = match vlan {
                Some(_) => packet::Steering::Everything,
                None => {
                    packet::Steering::Addresses(addresses.iter().map(IpCidr::address).collect())
                }
            };
            Box::new(PacketPort::open(&packet, arena)?)
        }
        PortConfig::Tap(tap) => Box::new(TapPort::open(&tap, arena)?),
        PortConfig::Mem(port) => port,
        PortConfig::Custom(open) => open(arena).map_err(OpenError::Io)?,
    })
}

/// Refuses an own address that the kernel answers for too.
fn not_the_kernels(interface: &str, addresses: &[IpCidr]) -> Result<(), OpenError> {
    let interface = Interface::by_name(interface)?;
    for kernels in netlink::addresses(interface.index)? {
        let address = kernels.address();
        if addresses.iter().any(|own| own.address() == address) {
            return Err(OpenError::KernelHasAddress { address, interface: interface.name });
        }
    }
    Ok(())
}

fn random_seed() -> Result<[u8; 16], OpenError> {
    let mut seed = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut seed))
        .map_err(OpenError::Io)?;
    Ok(seed)
}

/// A port of a shared address that was moved from the kernel to Tidegate.
///
/// The kernel's own socket on it is held too: so no other program gets the
/// port, and stray packets that the kernel still sees are not answered with
/// "port unreachable".
pub(crate) struct Claim {
    rules: Vec<Rule>,
    local: SocketAddr,
    _kernel: OwnedFd,
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
    /// each of the `shared` addresses of its families moves.
    pub(crate) fn take(
        port: &mut dyn Port,
        protocol: Protocol,
        mut local: SocketAddr,
        dual_stack: bool,
        shared: &[IpAddr],
    ) -> io::Result<Self> {
        let kernel = reserve(protocol, local, dual_stack)?;
        if local.port() == 0 {
            let chosen = rustix::net::getsockname(&kernel)?;
            local.set_port(SocketAddr::try_from(chosen)?.port());
        }
        let takes = |address: IpAddr| match local.ip() {
            IpAddr::V4(any) if any.is_unspecified() => address.is_ipv4(),
            IpAddr::V6(any) if any.is_unspecified() => dual_stack || address.is_ipv6(),
            one => one == address,
        };
        let rules = shared
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
    pub(crate) fn local(&self) -> SocketAddr {
        self.local
    }

    pub(crate) fn release(&self, port: &mut dyn Port) {
        for rule in &self.rules {
            // The port is closing or gone when this fails, and then it takes
            // nothing any more.
            let _ = port.set_steering(rule, false);
        }
    }
}
