//! Opens a router from its configuration.

use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::str::FromStr;

use tidegate::{AddressProbe, Arena, FrameSize, IpCidr, Limits, MacAddr, Route};
use tidegate_device::Device;
use tidegate_device::dpdk::{self, DpdkConfig, DpdkError};
use tidegate_device::mem::MemDevice;
use tidegate_device::netlink::{self, Interface, NetlinkError};
use tidegate_device::packet::{PacketConfig, PacketDevice, PacketError};
use tidegate_device::sharded::shard_router;
use tidegate_device::tap::{TapConfig, TapDevice, TapError};
use tidegate_device::xdp::{BusyPoll, SteeringRule, XdpConfig, XdpDevice, XdpError};
use tidegate_engine::{AddressReservations, Clock, ReservationError};
use tidegate_gate::{Quota, Settings};
use tidegate_memory::{ArenaConfig, ArenaError};
use tidegate_stack::{Config, ConfigError, Router, Stack};

use super::Forwarder;
use crate::filter::{FilterConfig, FilterLink};

/// Most packets that one busy poll takes from a NIC.
const MAX_POLL_BUDGET: u32 = 64;

/// Device of one router interface.
pub enum RouterDevice {
    /// AF_XDP on an interface; takes all arriving packets.
    Xdp(XdpConfig),
    /// AF_PACKET on an interface.
    Packet(PacketConfig),
    /// A TAP or TUN device.
    Tap(TapConfig),
    /// DPDK device; needs a build with DPDK.
    Dpdk(DpdkConfig),
    /// One end of an in-memory link.
    Mem(Box<MemDevice>),
}

impl RouterDevice {
    /// Shares the receive queues out among network cores, as far as the kind of device can; returns
    /// the name of the interface.
    fn share_queues(&mut self, cores: usize) -> String {
        match self {
            Self::Xdp(xdp) => xdp.cores = cores,
            Self::Packet(packet) => packet.cores = cores,
            Self::Dpdk(device) => device.cores = cores,
            Self::Tap(_) | Self::Mem(_) => {}
        }
        self.name()
    }

    /// Name of the interface.
    pub fn name(&self) -> String {
        match self {
            Self::Xdp(xdp) => xdp.interface.clone(),
            Self::Packet(packet) => packet.interface.clone(),
            Self::Tap(tap) => tap.name.clone(),
            Self::Dpdk(device) => device.device.clone(),
            Self::Mem(_) => "the in-memory link".to_owned(),
        }
    }
}

/// One interface of a router.
pub struct InterfaceSpec {
    /// Device that receives and sends the packets.
    pub device: RouterDevice,
    /// The router's addresses on the interface, each with the network on the link.
    pub addresses: Vec<IpCidr>,
}

/// Configuration of a router.
pub struct RouterConfig {
    /// Interfaces of the router; at least two.
    pub interfaces: Vec<InterfaceSpec>,
    /// Routes beyond the links; each gateway is on one of the links.
    pub routes: Vec<Route>,
    /// Check that no other host uses an address of the router.
    pub probe: AddressProbe,
    /// Settings of the gate: when to poll, and how many packets to take.
    pub gate: Settings,
    /// Packet filter, if every transit packet needs a verdict.
    pub filter: Option<FilterConfig>,
    /// Number of packet buffers of each network core.
    pub frames: u32,
    /// Tries hugepages for the packet buffers.
    pub hugepages: bool,
    /// Limits of each interface.
    pub limits: Limits,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            interfaces: Vec::new(),
            routes: Vec::new(),
            probe: AddressProbe::default(),
            gate: Settings::default(),
            filter: None,
            frames: 16_384,
            hugepages: true,
            limits: Limits::default(),
        }
    }
}

/// Errors in an interface description.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InterfaceSpecError {
    /// The description does not begin with a kind and an interface.
    #[error("interface {0:?}: expected KIND:INTERFACE,ADDRESS/BITS,..., e.g. xdp:eth0,10.0.0.1/24")]
    Syntax(String),
    /// The kind is unknown.
    #[error("interface {text:?}: unknown device kind {kind:?}; choose xdp, packet, tap or dpdk")]
    UnknownKind {
        /// Interface description.
        text: String,
        /// Text in place of the kind.
        kind: String,
    },
    /// An address cannot be parsed or has no prefix.
    #[error("interface {text:?}: {address:?} is no address with a prefix length, e.g. 10.0.0.1/24")]
    InvalidAddress {
        /// Interface description.
        text: String,
        /// Text in place of the address.
        address: String,
    },
    /// The description has no address.
    #[error("interface {0:?} has no address: append one with its prefix length, e.g. ,10.0.0.1/24")]
    NoAddress(String),
}

impl FromStr for InterfaceSpec {
    type Err = InterfaceSpecError;

    /// Parses `KIND:INTERFACE,ADDRESS/BITS,...`. A DPDK device may have its own arguments: all
    /// parts that contain a `=`.
    fn from_str(text: &str) -> Result<Self, InterfaceSpecError> {
        let syntax_error = || InterfaceSpecError::Syntax(text.to_owned());
        let (kind, rest) = text.split_once(':').ok_or_else(syntax_error)?;
        let mut parts = rest.split(',').peekable();
        let interface = parts.next().filter(|name| !name.is_empty()).ok_or_else(syntax_error)?;
        let device = match kind {
            "xdp" => {
                let mut config = XdpConfig::new(interface);
                config.busy_poll = Some(BusyPoll::default());
                RouterDevice::Xdp(config)
            }
            "packet" => RouterDevice::Packet(PacketConfig::new(interface)),
            "tap" => RouterDevice::Tap(TapConfig::new(interface)),
            "dpdk" => {
                let arguments = std::iter::from_fn(|| parts.next_if(|part| part.contains('=')));
                let device: Vec<&str> = std::iter::once(interface).chain(arguments).collect();
                let Ok(config) = device.join(",").parse();
                RouterDevice::Dpdk(config)
            }
            _ => {
                return Err(InterfaceSpecError::UnknownKind {
                    text: text.to_owned(),
                    kind: kind.to_owned(),
                });
            }
        };
        let address = |part: &str| {
            // An interface address without its network is a mistake.
            let with_prefix = Some(part).filter(|part| part.contains('/'));
            with_prefix.and_then(|part| part.parse().ok()).ok_or_else(|| {
                InterfaceSpecError::InvalidAddress {
                    text: text.to_owned(),
                    address: part.to_owned(),
                }
            })
        };
        let addresses = parts.map(address).collect::<Result<Vec<IpCidr>, _>>()?;
        if addresses.is_empty() {
            return Err(InterfaceSpecError::NoAddress(text.to_owned()));
        }
        Ok(Self { device, addresses })
    }
}

/// Errors when opening a router.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// Fewer than two interfaces.
    #[error(
        "a router needs two interfaces or more: give --io KIND:INTERFACE,ADDRESS/BITS for each"
    )]
    TooFewInterfaces,
    /// Two interfaces have addresses in the same network.
    #[error(
        "{first} and {second} are in the same network: give each interface a network of its own"
    )]
    SameNetwork {
        /// Address on the first interface.
        first: IpCidr,
        /// Address on the second interface.
        second: IpCidr,
    },
    /// A route's gateway is on no link.
    #[error("the gateway {gateway} of {prefix} is in no network of this router's interfaces")]
    UnreachableGateway {
        /// Destination prefix of the route.
        prefix: IpCidr,
        /// Gateway of the route.
        gateway: IpAddr,
    },
    /// An address of the router is also assigned to the kernel's interface.
    #[error(
        "{address} is also assigned to the kernel's interface {interface}: remove it with \
         `ip address del {address} dev {interface}`, or give the router another address"
    )]
    KernelHasAddress {
        /// Address in conflict.
        address: IpCidr,
        /// Name of the interface.
        interface: String,
    },
    /// Another program has an address of the router, or the address cannot be reserved.
    #[error(transparent)]
    Reservation(#[from] ReservationError),
    /// The packet buffers could not be allocated.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// An AF_XDP device could not be opened.
    #[error(transparent)]
    Xdp(#[from] XdpError),
    /// An AF_PACKET device could not be opened.
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// A TAP device could not be opened.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// A DPDK device could not be opened.
    #[error(transparent)]
    Dpdk(#[from] DpdkError),
    /// The kernel's interface data could not be read.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// An interface rejected its configuration.
    #[error(transparent)]
    Stack(#[from] ConfigError),
    /// Network cores would receive nothing from an interface.
    #[error(
        "{interface} has receive queues for {queues} network cores, not for {cores}: give fewer \
         --cores, or more queues (`ethtool -L {interface} combined {cores}`); AF_PACKET needs none, \
         TAP and DPDK have one core"
    )]
    TooFewQueues {
        /// Name of the interface.
        interface: String,
        /// Number of network cores that have a queue.
        queues: usize,
        /// Number of network cores.
        cores: usize,
    },
    /// Several network cores with a packet filter.
    #[error("a filter serves one network core: omit --filter, or give --cores 1")]
    FilterMultiCore,
    /// Another system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Opens the devices of a router and joins them.
///
/// # Errors
/// [`RouterError`] says what is wrong and what to do; everything opened so far is closed again.
///
/// # Examples
/// ```no_run
/// use std::sync::atomic::AtomicBool;
///
/// use tidegate_apps::router::{self, Priorities, RouterConfig};
///
/// let config = RouterConfig {
///     interfaces: vec!["xdp:eth0,10.0.0.1/24".parse()?, "xdp:eth1,10.0.1.1/24".parse()?],
///     ..RouterConfig::default()
/// };
/// let mut forwarder = router::open(config)?;
/// router::run(&mut forwarder, Priorities::default(), &AtomicBool::new(false))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn open(config: RouterConfig) -> Result<Forwarder, RouterError> {
    let mut forwarders = open_cores(config, 1)?;
    Ok(forwarders.remove(0))
}

/// As [`open`], for several network cores: each forwards what its own receive queue of each
/// interface brings, and is to be [`run`](super::run) on a thread of its own. The first answers for
/// the addresses.
///
/// # Errors
/// As [`open`]; and if an interface has no receive queue for each core, or there is a filter.
pub fn open_cores(config: RouterConfig, cores: usize) -> Result<Vec<Forwarder>, RouterError> {
    check_config(&config)?;
    if cores > 1 && config.filter.is_some() {
        return Err(RouterError::FilterMultiCore);
    }
    let clock = Clock::new();
    let mut routes = vec![Vec::new(); config.interfaces.len()];
    for route in config.routes {
        let Some(index) = interface_for_route(&config.interfaces, &route) else { continue };
        routes[index].push(route);
    }
    let is_dpdk = |spec: &InterfaceSpec| matches!(spec.device, RouterDevice::Dpdk(_));
    let arena = ArenaConfig {
        frames: config.frames,
        frame_size: match config.interfaces.iter().any(is_dpdk) {
            true => dpdk::RECOMMENDED_FRAME_SIZE,
            false => FrameSize::K2,
        },
        hugepages: config.hugepages,
    };
    let core =
        || Ok(CoreParts { arena: Arena::new(arena)?, devices: Vec::new(), stacks: Vec::new() });
    let mut parts = (0..cores).map(|_| core()).collect::<Result<Vec<_>, RouterError>>()?;
    let seeds = (0..cores).map(|_| random_seed()).collect::<io::Result<Vec<_>>>()?;
    let mut reservations = Vec::new();
    for (spec, routes) in config.interfaces.into_iter().zip(routes) {
        reservations.push(reserve_addresses(&spec)?);
        let addresses = spec.addresses.clone();
        let devices = open_devices(spec, &config.gate, &mut parts)?;
        for ((device, core), seed) in devices.into_iter().zip(&mut parts).zip(&seeds) {
            let capabilities = device.capabilities();
            let stack = Config::ethernet(MacAddr(capabilities.mac), *seed)
                .medium(capabilities.medium)
                .mtu(capabilities.mtu)
                .addresses(addresses.clone())
                .routes(routes.clone())
                .forwarding(true)
                .limits(config.limits.clone())
                .transmit_checksum(capabilities.transmit_checksum);
            core.stacks.push(Stack::new(stack, clock.now_ns())?);
            core.devices.push(device);
        }
        // The first core probes and defends the addresses for all.
        if let Some(stack) = parts[0].stacks.last_mut() {
            stack.claim_addresses(clock.now_ns(), config.probe);
        }
    }
    let mut filter = config.filter.map(FilterLink::new);
    let forwarder = |(core, seed): (CoreParts, &[u8; 16])| {
        let CoreParts { arena, devices, stacks } = core;
        let router = Router::new(stacks, *seed);
        Forwarder::new(devices, arena, router, filter.take(), config.gate.clone(), clock)
    };
    let mut forwarders: Vec<_> = parts.into_iter().zip(&seeds).map(forwarder).collect();
    forwarders[0].keep_reservations(reservations);
    Ok(forwarders)
}

/// Parts of the forwarder of one network core, with an interface each.
struct CoreParts {
    // Devices come first: see [`Forwarder`].
    devices: Vec<Box<dyn Device>>,
    arena: Arena,
    stacks: Vec<Stack>,
}

/// Opens an interface, with a device for each core.
fn open_devices(
    mut spec: InterfaceSpec,
    settings: &Settings,
    parts: &mut [CoreParts],
) -> Result<Vec<Box<dyn Device>>, RouterError> {
    let cores = parts.len();
    let interface = spec.device.share_queues(cores);
    let device = open_device(spec.device, &spec.addresses, settings, &mut parts[0].arena)?;
    if cores == 1 {
        return Ok(vec![device]);
    }
    let addresses = spec.addresses.iter().map(IpCidr::address);
    let mut devices = shard_router(device, cores, addresses)?;
    for (device, core) in devices.iter_mut().zip(&mut *parts) {
        device.open_queue(&mut core.arena)?;
    }
    let queues = devices.iter().filter(|device| device.has_queue()).count();
    if queues < cores {
        return Err(RouterError::TooFewQueues { interface, queues, cores });
    }
    Ok(devices.into_iter().map(|device| Box::new(device) as Box<dyn Device>).collect())
}

/// Reserves the addresses of an interface among the programs on it.
fn reserve_addresses(spec: &InterfaceSpec) -> Result<AddressReservations, ReservationError> {
    let interface = match &spec.device {
        RouterDevice::Xdp(xdp) => &xdp.interface,
        RouterDevice::Packet(packet) => &packet.interface,
        RouterDevice::Tap(_) | RouterDevice::Dpdk(_) | RouterDevice::Mem(_) => {
            return Ok(AddressReservations::default());
        }
    };
    let addresses = spec.addresses.iter().map(IpCidr::address);
    AddressReservations::reserve(interface, None, addresses)
}

fn check_config(config: &RouterConfig) -> Result<(), RouterError> {
    if config.interfaces.len() < 2 {
        return Err(RouterError::TooFewInterfaces);
    }
    for (index, interface) in config.interfaces.iter().enumerate() {
        for &first in &interface.addresses {
            let others = config.interfaces[index + 1..].iter().flat_map(|other| &other.addresses);
            let same = |second: &&IpCidr| second.network() == first.network();
            if let Some(&second) = others.into_iter().find(same) {
                return Err(RouterError::SameNetwork { first, second });
            }
        }
    }
    for route in &config.routes {
        if interface_for_route(&config.interfaces, route).is_none() {
            let Some(gateway) = route.gateway else { continue };
            return Err(RouterError::UnreachableGateway { prefix: route.prefix, gateway });
        }
    }
    Ok(())
}

/// Index of the interface whose link the route's gateway is on.
fn interface_for_route(interfaces: &[InterfaceSpec], route: &Route) -> Option<usize> {
    let gateway = route.gateway?;
    interfaces
        .iter()
        .position(|interface| interface.addresses.iter().any(|address| address.contains(gateway)))
}

fn open_device(
    device: RouterDevice,
    addresses: &[IpCidr],
    settings: &Settings,
    arena: &mut Arena,
) -> Result<Box<dyn Device>, RouterError> {
    Ok(match device {
        RouterDevice::Xdp(mut xdp) => {
            check_not_kernel_address(&xdp.interface, addresses)?;
            xdp.steering.rules = vec![SteeringRule::Everything];
            xdp.busy_poll = busy_poll(xdp.busy_poll, settings);
            Box::new(XdpDevice::open(xdp, arena)?)
        }
        RouterDevice::Packet(packet) => {
            check_not_kernel_address(&packet.interface, addresses)?;
            Box::new(PacketDevice::open(&packet, arena)?)
        }
        RouterDevice::Tap(tap) => Box::new(TapDevice::open(&tap, arena)?),
        RouterDevice::Dpdk(device) => dpdk::open(&device, arena)?,
        RouterDevice::Mem(device) => device,
    })
}

/// Busy-poll settings with the gate's quota. The modes with an input queue rely on interrupts.
fn busy_poll(requested: Option<BusyPoll>, settings: &Settings) -> Option<BusyPoll> {
    let config = settings.config();
    if config.mode.has_input_queue() {
        return None;
    }
    let quota = match config.receive_quota {
        Quota::Packets(packets) => packets.min(MAX_POLL_BUDGET),
        Quota::Unlimited => MAX_POLL_BUDGET,
    };
    requested.map(|asked| asked.budget(quota as u16))
}

/// Rejects an address that is also assigned to the kernel's interface.
fn check_not_kernel_address(interface: &str, addresses: &[IpCidr]) -> Result<(), RouterError> {
    let interface = Interface::by_name(interface)?;
    for kernel_address in netlink::addresses(interface.index)? {
        if addresses.iter().any(|own| own.address() == kernel_address.address()) {
            let interface = interface.name;
            return Err(RouterError::KernelHasAddress { address: kernel_address, interface });
        }
    }
    Ok(())
}

fn random_seed() -> io::Result<[u8; 16]> {
    let mut seed = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut seed)?;
    Ok(seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_interface_specs() {
        let spec: InterfaceSpec = "xdp:eth0,10.0.0.1/24,fd00::1/64".parse().unwrap();
        assert!(matches!(&spec.device, RouterDevice::Xdp(xdp) if xdp.interface == "eth0"));
        assert_eq!(spec.addresses.len(), 2);
        let memif = "net_memif0,role=client,socket=/run/memif,id=0";
        let spec: InterfaceSpec = format!("dpdk:{memif},10.0.0.1/24,fd00::1/64").parse().unwrap();
        assert!(matches!(&spec.device, RouterDevice::Dpdk(dpdk) if dpdk.device == memif));
        assert_eq!(spec.addresses.len(), 2);
        for (text, words) in [
            ("eth0", "KIND:INTERFACE"),
            ("xdp:,10.0.0.1/24", "KIND:INTERFACE"),
            ("wire:eth0,10.0.0.1/24", "xdp, packet, tap or dpdk"),
            ("dpdk:net_tap0,iface=tg0", "no address"),
            ("dpdk:0000:01:00.0,10.0.0.1", "10.0.0.1/24"),
            ("xdp:eth0", "no address"),
            ("xdp:eth0,10.0.0.1", "10.0.0.1/24"),
        ] {
            let error = text.parse::<InterfaceSpec>().err().expect(text).to_string();
            assert!(error.contains(words), "{words:?} is not in: {error}");
        }
    }

    #[test]
    fn rejects_configurations_that_cannot_route() {
        let interfaces = |texts: [&str; 2]| texts.map(|text| text.parse().unwrap()).into();
        let refused = |config| check_config(&config).expect_err("must be rejected").to_string();
        assert!(refused(RouterConfig::default()).contains("two interfaces"));
        let same = RouterConfig {
            interfaces: interfaces(["xdp:a,10.0.0.1/24", "xdp:b,10.0.0.2/24"]),
            ..RouterConfig::default()
        };
        assert!(refused(same).contains("same network"));
        let route = Route {
            prefix: "0.0.0.0/0".parse().unwrap(),
            gateway: Some("192.0.2.1".parse().unwrap()),
        };
        let unreachable_gateway = RouterConfig {
            interfaces: interfaces(["xdp:a,10.0.0.1/24", "xdp:b,10.0.1.1/24"]),
            routes: vec![route],
            ..RouterConfig::default()
        };
        assert!(refused(unreachable_gateway).contains("no network of this router"));
    }
}
