//! From a configuration to a running engine.

use std::io::{self, Read};
use std::net::IpAddr;

use tidegate_gate::{Mode, Settings, admission};
use tidegate_memory::{Arena, ArenaConfig, ArenaError, FrameSize};
use tidegate_port::dpdk::{self, DpdkConfig, DpdkError};
use tidegate_port::mem::MemPort;
use tidegate_port::netlink::{self, Interface, NetlinkError};
use tidegate_port::packet::{self, PacketConfig, PacketError, PacketPort};
use tidegate_port::steering::Rule;
use tidegate_port::tap::{TapConfig, TapError, TapPort};
use tidegate_port::xdp::{XdpConfig, XdpError, XdpPort};
use tidegate_port::{Left, Port};
use tidegate_stack::{ConfigError, Limits, Ownership, RestoreError, Route};
use tidegate_wire::{IpCidr, MacAddr};

use crate::admission::AdmissionError;
use crate::{Clock, EngineConfig, IdleConfig};

/// Where packets come from.
pub enum PortConfig {
    /// AF_XDP on an interface. What to take is filled in from the addresses,
    /// or, on a shared address, from the sockets that are bound.
    Xdp(XdpConfig),
    /// AF_PACKET on an interface. What to take is filled in likewise.
    Packet(PacketConfig),
    /// A TAP or TUN device.
    Tap(TapConfig),
    /// A device of DPDK's; needs a program built with it.
    Dpdk(DpdkConfig),
    /// One end of a wire in memory.
    Mem(Box<MemPort>),
    /// Anything else.
    Custom(OpenPort),
}

/// Opens a port with the arena that its frames will live in.
pub type OpenPort = Box<dyn FnOnce(&mut Arena) -> io::Result<Box<dyn Port>> + Send>;

impl PortConfig {
    /// How large packet buffers should be that frames of one packet each are
    /// received into.
    pub fn frame_size(&self) -> FrameSize {
        match self {
            Self::Dpdk(_) => dpdk::FRAME_SIZE,
            _ => FrameSize::K2,
        }
    }

    /// The same once more; what can be used only once is taken out.
    pub(crate) fn again(&mut self) -> Self {
        match self {
            Self::Xdp(config) => Self::Xdp(config.clone()),
            Self::Packet(config) => Self::Packet(config.clone()),
            Self::Tap(config) => Self::Tap(config.clone()),
            Self::Dpdk(config) => Self::Dpdk(config.clone()),
            Self::Mem(_) | Self::Custom(_) => {
                let used = || io::Error::other("this port can be opened only once");
                std::mem::replace(self, Self::Custom(Box::new(move |_| Err(used()))))
            }
        }
    }
}

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

impl From<DpdkConfig> for PortConfig {
    fn from(config: DpdkConfig) -> Self {
        Self::Dpdk(config)
    }
}

/// Wraps a port after it was opened: faults, tracing, capture.
pub type Wrap = Box<dyn FnOnce(Box<dyn Port>) -> io::Result<Box<dyn Port>> + Send>;

/// What a stack and its engine are made of.
pub struct NetConfig {
    pub(crate) port: PortConfig,
    pub(crate) wraps: Vec<Wrap>,
    pub(crate) addresses: Vec<IpCidr>,
    pub(crate) routes: Vec<Route>,
    pub(crate) ownership: Ownership,
    pub(crate) mac: Option<MacAddr>,
    pub(crate) vlan: Option<u16>,
    pub(crate) limits: Limits,
    pub(crate) arena: ArenaConfig,
    pub(crate) engine: EngineConfig,
    pub(crate) own_thread: bool,
    pub(crate) counts_lock: bool,
    pub(crate) ports_are_held: bool,
    pub(crate) admission: Option<admission::Config>,
    pub(crate) seed: Option<[u8; 16]>,
    pub(crate) clock: Clock,
}

impl NetConfig {
    /// A stack on this port, without an address yet.
    pub fn new(port: impl Into<PortConfig>) -> Self {
        let port = port.into();
        let frame_size = port.frame_size();
        Self {
            port,
            wraps: Vec::new(),
            addresses: Vec::new(),
            routes: Vec::new(),
            ownership: Ownership::Own,
            mac: None,
            vlan: None,
            limits: Limits::default(),
            arena: ArenaConfig { frame_size, ..ArenaConfig::default() },
            engine: EngineConfig::default(),
            own_thread: false,
            counts_lock: false,
            ports_are_held: false,
            admission: None,
            seed: None,
            clock: Clock::new(),
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

    /// Counts how the lock is used that threads share the stack by. That takes
    /// two readings of the time stamp counter for each call on a socket.
    #[must_use]
    pub fn lock_statistics(mut self, counted: bool) -> Self {
        self.counts_lock = counted;
        self
    }

    /// On a shared address: the program has bound a socket of the kernel's to
    /// each port that it binds here, so none is taken for it.
    #[must_use]
    pub fn ports_are_held(mut self, held: bool) -> Self {
        self.ports_are_held = held;
        self
    }

    /// Whether the lock of the stack is counted.
    pub fn counts_lock(&self) -> bool {
        self.counts_lock
    }

    /// The mode, if threads of the stack's own run it; else the calls that wait
    /// for a socket do.
    pub fn mode_of_threads(&self) -> Option<Mode> {
        let mode = self.engine.gate.config().mode;
        let by_calls = matches!(mode, Mode::Polled | Mode::Dedicated) && !self.own_thread;
        (!by_calls).then_some(mode)
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

/// Why a stack could not be opened.
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
    /// The DPDK port.
    #[error(transparent)]
    Dpdk(#[from] DpdkError),
    /// What the kernel knows could not be read.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The stack does not take the configuration.
    #[error(transparent)]
    Stack(#[from] ConfigError),
    /// What another process has saved.
    #[error("what the other daemon has handed over cannot be taken up: {0}")]
    Restore(#[from] RestoreError),
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
    /// Neighbours and ports of the kernel's are followed by one core.
    #[error(
        "several network cores need an address that the kernel does not have: give the stack one \
         of its own, or use one network core"
    )]
    SharedByCores,
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

impl OpenError {
    /// Another process still has what is needed, which it may be about to give
    /// up.
    pub fn is_busy(&self) -> bool {
        matches!(
            self,
            Self::Xdp(XdpError::AlreadyAttached(_) | XdpError::QueueBusy { .. })
                | Self::Dpdk(DpdkError::Busy { .. })
        )
    }
}

pub(crate) fn open_port(
    config: &mut NetConfig,
    left: &mut Option<Left>,
    arena: &mut Arena,
) -> Result<Box<dyn Port>, OpenError> {
    let port = config.port.again();
    let (addresses, vlan) = (&config.addresses, config.vlan);
    Ok(match port {
        PortConfig::Xdp(mut xdp) => {
            if config.ownership == Ownership::Own {
                not_the_kernels(&xdp.interface, addresses)?;
                let own = addresses.iter().map(|address| Rule::Address(address.address()));
                xdp.steering.rules.extend(own);
            }
            xdp.steering.vlan = vlan;
            match left {
                Some(Left::Xdp(loaded)) => Box::new(XdpPort::open_loaded(xdp, loaded, arena)?),
                _ => Box::new(XdpPort::open(xdp, arena)?),
            }
        }
        PortConfig::Packet(mut packet) => {
            not_the_kernels(&packet.interface, addresses)?;
            packet.steering = packet_steering(addresses, vlan);
            Box::new(PacketPort::open(&packet, arena)?)
        }
        PortConfig::Tap(tap) => Box::new(match left.take() {
            Some(Left::Tap(device)) => TapPort::open_on(device, &tap, arena)?,
            _ => TapPort::open(&tap, arena)?,
        }),
        PortConfig::Dpdk(config) => dpdk::open(&config, arena)?,
        PortConfig::Mem(port) => port,
        PortConfig::Custom(open) => open(arena).map_err(OpenError::Io)?,
    })
}

/// What an AF_PACKET port takes. The filter reads untagged frames only.
pub(crate) fn packet_steering(addresses: &[IpCidr], vlan: Option<u16>) -> packet::Steering {
    match vlan {
        Some(_) => packet::Steering::Everything,
        None => packet::Steering::Addresses(addresses.iter().map(IpCidr::address).collect()),
    }
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

pub(crate) fn random_seed() -> Result<[u8; 16], OpenError> {
    let mut seed = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut seed))
        .map_err(OpenError::Io)?;
    Ok(seed)
}
