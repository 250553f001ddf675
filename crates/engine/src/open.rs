//! Configuration of a stack.

use std::io::{self, Read};
use std::net::IpAddr;

use tidegate_device::Device;
use tidegate_device::capabilities::MissingCapabilities;
use tidegate_device::dpdk::DpdkError;
use tidegate_device::netlink::NetlinkError;
#[cfg(feature = "packet")]
use tidegate_device::packet::PacketError;
use tidegate_device::rdma::RdmaError;
use tidegate_device::tap::TapError;
#[cfg(feature = "xdp")]
use tidegate_device::xdp::XdpError;
use tidegate_gate::{Mode, Settings, admission, transmit};
use tidegate_memory::{ArenaConfig, ArenaError, FrameSize};
use tidegate_stack::{AddressOwnership, AddressProbe, ConfigError, Limits, RestoreError, Route};
use tidegate_wire::{IpCidr, MacAddr};

use crate::address_reservation::ReservationError;
use crate::admission::AdmissionError;
use crate::placement::node_of_device;
use crate::{Clock, DeviceConfig, EngineConfig, IdleConfig, NeighbourResolver};

/// Function that wraps an open device: fault injection, tracing, capture.
pub type DeviceWrapper = Box<dyn FnOnce(Box<dyn Device>) -> io::Result<Box<dyn Device>> + Send>;

/// Function that is called once the device is open.
pub type OpenHook = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// Configuration of a stack and its engine.
pub struct NetConfig {
    pub(crate) device: DeviceConfig,
    /// NUMA node of the card, where the memory for packets is.
    pub(crate) node: Option<usize>,
    pub(crate) wrappers: Vec<DeviceWrapper>,
    pub(crate) open_hook: Option<OpenHook>,
    pub(crate) addresses: Vec<IpCidr>,
    pub(crate) routes: Vec<Route>,
    pub(crate) ownership: AddressOwnership,
    pub(crate) probe: AddressProbe,
    pub(crate) neighbour_resolver: Option<NeighbourResolver>,
    /// Interface whose addresses are shared, if the device does not say it: on a secondary core.
    pub(crate) kernel_interface: Option<String>,
    pub(crate) mac: Option<MacAddr>,
    pub(crate) vlan: Option<u16>,
    pub(crate) limits: Limits,
    pub(crate) arena: ArenaConfig,
    pub(crate) engine: EngineConfig,
    pub(crate) own_thread: bool,
    pub(crate) lock_statistics: bool,
    pub(crate) kernel_ports_bound: bool,
    pub(crate) admission: Option<admission::Config>,
    pub(crate) transmit: Option<transmit::Config>,
    pub(crate) seed: Option<[u8; 16]>,
    pub(crate) clock: Clock,
}

impl NetConfig {
    /// Creates a configuration for a stack on this device, without addresses.
    pub fn new(device: impl Into<DeviceConfig>) -> Self {
        let device = device.into();
        let frame_size = device.frame_size();
        Self {
            node: node_of_device(&device),
            device,
            wrappers: Vec::new(),
            open_hook: None,
            addresses: Vec::new(),
            routes: Vec::new(),
            ownership: AddressOwnership::Exclusive,
            probe: AddressProbe::default(),
            neighbour_resolver: None,
            kernel_interface: None,
            mac: None,
            vlan: None,
            limits: Limits::default(),
            arena: ArenaConfig { frame_size, ..ArenaConfig::default() },
            engine: EngineConfig::default(),
            own_thread: false,
            lock_statistics: false,
            kernel_ports_bound: false,
            admission: None,
            transmit: None,
            seed: None,
            clock: Clock::new(),
        }
    }

    /// Adds an address of the stack, with the prefix length of its network. The stack answers ARP,
    /// neighbour discovery and ping for the address.
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

    /// Shares the kernel's addresses, routes and neighbours of the interface. Only the ports of
    /// bound sockets are diverted to the stack; all other traffic stays with the kernel. On AF_XDP
    /// and AF_PACKET.
    #[must_use]
    pub fn shared(mut self) -> Self {
        self.ownership = AddressOwnership::Shared;
        self
    }

    /// Sets how own addresses are checked for uniqueness.
    #[must_use]
    pub fn address_probe(mut self, probe: AddressProbe) -> Self {
        self.probe = probe;
        self
    }

    /// Uses this hardware address instead of the interface's.
    #[must_use]
    pub fn mac(mut self, mac: MacAddr) -> Self {
        self.mac = Some(mac);
        self
    }

    /// Sets the VLAN ID (IEEE 802.1Q).
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

    /// Sets the number and the size of packet buffers.
    #[must_use]
    pub fn frames(mut self, frames: u32, size: FrameSize) -> Self {
        (self.arena.frames, self.arena.frame_size) = (frames, size);
        self
    }

    /// Sets whether to try hugepages for packet buffers; ordinary pages are the fallback.
    #[must_use]
    pub fn hugepages(mut self, hugepages: bool) -> Self {
        self.arena.hugepages = hugepages;
        self
    }

    /// Sets receive scheduling: mode and quotas. Modes `interrupt`, `moderated` and `napi` start
    /// threads of real-time priority on the processors of the caller.
    #[must_use]
    pub fn gate(mut self, settings: Settings) -> Self {
        self.engine.gate = settings;
        self
    }

    /// Enables admission control: which sources take precedence under overload.
    #[must_use]
    pub fn admission(mut self, admission: admission::Config) -> Self {
        self.admission = Some(admission);
        self
    }

    /// Sends frames by classes: which go first while the link is slower than its senders. Each of
    /// several cores gets an equal part of the ceilings.
    #[must_use]
    pub fn transmit(mut self, transmit: transmit::Config) -> Self {
        self.transmit = Some(transmit);
        self
    }

    /// Sets the times of busy-polling and pausing before a sleep.
    #[must_use]
    pub fn idle(mut self, idle: IdleConfig) -> Self {
        self.engine.idle = idle;
        self
    }

    /// Sets whether a thread of the stack runs it in modes `polled` and `dedicated`. Otherwise the
    /// calls that wait for a socket do.
    #[must_use]
    pub fn own_thread(mut self, own_thread: bool) -> Self {
        self.own_thread = own_thread;
        self
    }

    /// Sets whether to count contention of the lock by which threads share the stack. The cost is
    /// two readings of the time stamp counter per socket call.
    #[must_use]
    pub fn lock_statistics(mut self, enabled: bool) -> Self {
        self.lock_statistics = enabled;
        self
    }

    /// On a shared address: declares that the application binds a kernel socket to each port that
    /// it binds here, so the stack binds none.
    #[must_use]
    pub fn kernel_ports_bound(mut self, bound: bool) -> Self {
        self.kernel_ports_bound = bound;
        self
    }

    /// True if contention of the stack's lock is counted.
    pub fn has_lock_statistics(&self) -> bool {
        self.lock_statistics
    }

    /// Mode of the stack's own threads; `None` if the calls that wait for a socket run the stack.
    pub fn thread_mode(&self) -> Option<Mode> {
        let mode = self.engine.gate.config().mode;
        let by_calls = matches!(mode, Mode::Polled | Mode::Dedicated) && !self.own_thread;
        (!by_calls).then_some(mode)
    }

    /// True if the stack shares the kernel's addresses.
    pub fn shares_kernel_addresses(&self) -> bool {
        self.ownership == AddressOwnership::Shared
    }

    /// Resolves neighbours on a shared address through this function, and not by netlink, which
    /// needs CAP_NET_ADMIN for as long as the stack is open.
    #[must_use]
    pub fn neighbour_resolver(mut self, resolver: NeighbourResolver) -> Self {
        self.neighbour_resolver = Some(resolver);
        self
    }

    /// Keys the hash tables and port selection with this seed instead of system randomness, for
    /// repeatable runs.
    #[must_use]
    pub fn seed(mut self, seed: [u8; 16]) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Calls this function once the device is open, with the queues of all network cores: it may give
    /// up what opening needs. Only the last function set is called.
    #[must_use]
    pub fn once_open(mut self, hook: OpenHook) -> Self {
        self.open_hook = Some(hook);
        self
    }

    /// Wraps the device after it is opened; later wrappers are further out.
    #[must_use]
    pub fn wrap(mut self, wrap: DeviceWrapper) -> Self {
        self.wrappers.push(wrap);
        self
    }
}

/// Error of opening a stack.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No memory for packet buffers.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The AF_XDP device cannot be opened.
    #[cfg(feature = "xdp")]
    #[error(transparent)]
    Xdp(#[from] XdpError),
    /// The AF_PACKET device cannot be opened.
    #[cfg(feature = "packet")]
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// The TAP device cannot be opened.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// The DPDK device cannot be opened.
    #[error(transparent)]
    Dpdk(#[from] DpdkError),
    /// The RDMA device cannot be opened.
    #[error(transparent)]
    Rdma(#[from] RdmaError),
    /// The kernel's configuration cannot be read.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The stack rejects the configuration.
    #[error(transparent)]
    Stack(#[from] ConfigError),
    /// The state saved by another process cannot be restored.
    #[error("cannot restore the state of the other daemon: {0}")]
    Restore(#[from] RestoreError),
    /// The admission configuration is invalid, or the device rejects it.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// Admission control in a mode that does not measure load.
    #[error(
        "admission needs a polling mode, but the mode is {}: choose polled or dedicated",
        .0.name()
    )]
    AdmissionNeedsPolling(Mode),
    /// The configuration of the transmit classes is invalid.
    #[error(transparent)]
    Transmit(#[from] transmit::ConfigError),
    /// Neither an own nor a shared address is configured.
    #[error("no address: give the stack an own address, or share the kernel's")]
    NoAddress,
    /// The device cannot share the kernel's addresses: it cannot divert frames from the kernel.
    #[error(
        "only AF_XDP and AF_PACKET can share the kernel's address (AF_PACKET in a build with \
         feature `xdp`): use one of them, or an own address"
    )]
    CannotShareAddress,
    /// The kernel has no address on the interface to share.
    #[error("the kernel has no address on {0}: run `ip address add`, or use an own address")]
    NoKernelAddress(String),
    /// The kernel has the address configured as the stack's own.
    #[error("{address} is the kernel's address on {interface}: share it, or use an unused address")]
    KernelHasAddress {
        /// The address.
        address: IpAddr,
        /// The interface.
        interface: String,
    },
    /// Another program has the own address, or it cannot be reserved.
    #[error(transparent)]
    Reservation(#[from] ReservationError),
    /// Another system error.
    #[error(transparent)]
    Io(io::Error),
}

impl OpenError {
    /// True if another process holds a required resource, which it may be about to release.
    pub fn is_busy(&self) -> bool {
        match self {
            #[cfg(feature = "xdp")]
            Self::Xdp(error) => error.is_busy(),
            Self::Dpdk(error) => matches!(error, DpdkError::Busy { .. }),
            _ => false,
        }
    }

    /// Capabilities that the process lacks for its device, where that is the cause.
    pub fn missing_capabilities(&self) -> Option<MissingCapabilities> {
        match self {
            #[cfg(feature = "xdp")]
            Self::Xdp(XdpError::NotPermitted { why, .. }) => Some(*why),
            #[cfg(feature = "packet")]
            Self::Packet(PacketError::Permission(why)) => Some(*why),
            Self::Tap(TapError::Permission { why, .. }) => Some(*why),
            _ => None,
        }
    }
}

pub(crate) fn random_seed() -> Result<[u8; 16], OpenError> {
    let mut seed = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut seed))
        .map_err(OpenError::Io)?;
    Ok(seed)
}
