//! From a configuration to a router.

use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::str::FromStr;

use tidegate::{Arena, FrameSize, IpCidr, Limits, MacAddr, Route};
use tidegate_engine::Clock;
use tidegate_gate::{Quota, Settings};
use tidegate_memory::{ArenaConfig, ArenaError};
use tidegate_port::Port;
use tidegate_port::dpdk::{self, DpdkConfig, DpdkError};
use tidegate_port::mem::MemPort;
use tidegate_port::netlink::{self, Interface, NetlinkError};
use tidegate_port::packet::{PacketConfig, PacketError, PacketPort};
use tidegate_port::tap::{TapConfig, TapError, TapPort};
use tidegate_port::xdp::{BusyPoll, Rule, XdpConfig, XdpError, XdpPort};
use tidegate_stack::{Config, ConfigError, Router, Stack};

use super::Forwarder;
use crate::screen::{ScreenConfig, ScreenLink};

/// The most packets that one busy poll takes from a card.
const POLL_BUDGET_MAX: u32 = 64;

/// Where a router's packets come from and go to.
pub enum RouterPort {
    /// AF_XDP on an interface; everything that arrives is taken.
    Xdp(XdpConfig),
    /// AF_PACKET on an interface.
    Packet(PacketConfig),
    /// A TAP or TUN device.
    Tap(TapConfig),
    /// A device of DPDK's; needs a program built with it.
    Dpdk(DpdkConfig),
    /// One end of a wire in memory.
    Mem(Box<MemPort>),
}

/// One interface of a router.
pub struct PortSpec {
    /// Where packets come from.
    pub port: RouterPort,
    /// The router's addresses there, each with the network on the link.
    pub addresses: Vec<IpCidr>,
}

/// What a router is made of.
pub struct RouterConfig {
    /// Its interfaces.
    pub ports: Vec<PortSpec>,
    /// The ways beyond the links; each gateway is on one of them.
    pub routes: Vec<Route>,
    /// When to look for packets, and how many to take.
    pub gate: Settings,
    /// The packet screen, if every packet is to be shown to one.
    pub screen: Option<ScreenConfig>,
    /// Packet buffers.
    pub frames: u32,
    /// Whether to try hugepages.
    pub hugepages: bool,
    /// Limits of each interface.
    pub limits: Limits,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            ports: Vec::new(),
            routes: Vec::new(),
            gate: Settings::default(),
            screen: None,
            frames: 16_384,
            hugepages: true,
            limits: Limits::default(),
        }
    }
}

/// Why a port's description is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortSpecError {
    /// It does not begin with a kind and an interface.
    #[error("port {0:?}: expected KIND:INTERFACE,ADDRESS/BITS,..., as xdp:eth0,10.0.0.1/24")]
    Form(String),
    /// The kind is unknown.
    #[error("port {text:?}: {kind:?} is no kind of port; choose xdp, packet, tap or dpdk")]
    Kind {
        /// The description.
        text: String,
        /// What stands for the kind.
        kind: String,
    },
    /// An address is none.
    #[error("port {text:?}: {address:?} is no address with a prefix, as 10.0.0.1/24")]
    Address {
        /// The description.
        text: String,
        /// What stands for the address.
        address: String,
    },
    /// There is no address.
    #[error("port {0:?} has no address: add one with its prefix, as ,10.0.0.1/24")]
    NoAddress(String),
}

impl FromStr for PortSpec {
    type Err = PortSpecError;

    /// Reads `KIND:INTERFACE,ADDRESS/BITS,...`. A device of DPDK's may have
    /// arguments of its own: whatever has a `=`.
    fn from_str(text: &str) -> Result<Self, PortSpecError> {
        let form = || PortSpecError::Form(text.to_owned());
        let (kind, rest) = text.split_once(':').ok_or_else(form)?;
        let mut parts = rest.split(',').peekable();
        let interface = parts.next().filter(|name| !name.is_empty()).ok_or_else(form)?;
        let port = match kind {
            "xdp" => {
                let mut config = XdpConfig::new(interface);
                config.busy_poll = Some(BusyPoll::default());
                RouterPort::Xdp(config)
            }
            "packet" => RouterPort::Packet(PacketConfig::new(interface)),
            "tap" => RouterPort::Tap(TapConfig::new(interface)),
            "dpdk" => {
                let arguments = std::iter::from_fn(|| parts.next_if(|part| part.contains('=')));
                let device: Vec<&str> = std::iter::once(interface).chain(arguments).collect();
                let Ok(config) = device.join(",").parse();
                RouterPort::Dpdk(config)
            }
            _ => {
                return Err(PortSpecError::Kind { text: text.to_owned(), kind: kind.to_owned() });
            }
        };
        let address = |part: &str| {
            // A router with no network on its link is a mistake.
            let with_prefix = Some(part).filter(|part| part.contains('/'));
            with_prefix.and_then(|part| part.parse().ok()).ok_or_else(|| PortSpecError::Address {
                text: text.to_owned(),
                address: part.to_owned(),
            })
        };
        let addresses = parts.map(address).collect::<Result<Vec<IpCidr>, _>>()?;
        if addresses.is_empty() {
            return Err(PortSpecError::NoAddress(text.to_owned()));
        }
        Ok(Self { port, addresses })
    }
}

/// Why a router could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// There is nothing to route between.
    #[error("a router needs two ports or more: give --port KIND:INTERFACE,ADDRESS/BITS for each")]
    TooFewPorts,
    /// Two ports have the same network.
    #[error("{first} and {second} are in the same network, on two ports: give each link its own")]
    SameNetwork {
        /// An address.
        first: IpCidr,
        /// The other.
        second: IpCidr,
    },
    /// A route's gateway is on no link.
    #[error("the gateway {gateway} of {prefix} is in no network of this router's ports")]
    Gateway {
        /// Where the route leads.
        prefix: IpCidr,
        /// The gateway.
        gateway: IpAddr,
    },
    /// The kernel has the address that the router was to own.
    #[error(
        "{address} is the kernel's address on {interface} too: take it off with \
         `ip address del {address} dev {interface}`, or give the router another one"
    )]
    KernelHasAddress {
        /// The address.
        address: IpCidr,
        /// The interface.
        interface: String,
    },
    /// No memory for packet buffers.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// An AF_XDP port.
    #[error(transparent)]
    Xdp(#[from] XdpError),
    /// An AF_PACKET port.
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// A TAP port.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// A DPDK port.
    #[error(transparent)]
    Dpdk(#[from] DpdkError),
    /// The kernel did not tell about an interface.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// An interface does not take its configuration.
    #[error(transparent)]
    Stack(#[from] ConfigError),
    /// The system refused something else.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Opens the ports of a router and joins them.
///
/// # Errors
/// [`RouterError`] says what is wrong and what to do; nothing stays behind.
pub fn open(config: RouterConfig) -> Result<Forwarder, RouterError> {
    check(&config)?;
    let seed = random_seed()?;
    let clock = Clock::new();
    let is_dpdk = |spec: &PortSpec| matches!(spec.port, RouterPort::Dpdk(_));
    let mut arena = Arena::new(ArenaConfig {
        frames: config.frames,
        frame_size: match config.ports.iter().any(is_dpdk) {
            true => dpdk::FRAME_SIZE,
            false => FrameSize::K2,
        },
        hugepages: config.hugepages,
    })?;
    let mut routes = vec![Vec::new(); config.ports.len()];
    for route in config.routes {
        let Some(at) = port_of(&config.ports, &route) else { continue };
        routes[at].push(route);
    }
    let (mut ports, mut stacks) = (Vec::new(), Vec::new());
    for (spec, routes) in config.ports.into_iter().zip(routes) {
        let port = open_port(spec.port, &spec.addresses, &config.gate, &mut arena)?;
        let capabilities = port.capabilities();
        let stack = Config {
            medium: capabilities.medium,
            mtu: capabilities.mtu,
            addresses: spec.addresses,
            routes,
            forwarding: true,
            limits: config.limits.clone(),
            transmit_checksum: capabilities.transmit_checksum,
            ..Config::ethernet(MacAddr(capabilities.mac), seed)
        };
        stacks.push(Stack::new(stack, clock.now_ns())?);
        ports.push(port);
    }
    let router = Router::new(stacks, seed);
    let screen = config.screen.map(ScreenLink::new);
    Ok(Forwarder::new(ports, arena, router, screen, config.gate, clock))
}

fn check(config: &RouterConfig) -> Result<(), RouterError> {
    if config.ports.len() < 2 {
        return Err(RouterError::TooFewPorts);
    }
    for (at, port) in config.ports.iter().enumerate() {
        for &first in &port.addresses {
            let others = config.ports[at + 1..].iter().flat_map(|other| &other.addresses);
            let same = |second: &&IpCidr| second.network() == first.network();
            if let Some(&second) = others.into_iter().find(same) {
                return Err(RouterError::SameNetwork { first, second });
            }
        }
    }
    for route in &config.routes {
        if port_of(&config.ports, route).is_none() {
            let Some(gateway) = route.gateway else { continue };
            return Err(RouterError::Gateway { prefix: route.prefix, gateway });
        }
    }
    Ok(())
}

/// The port whose link a route's gateway is on.
fn port_of(ports: &[PortSpec], route: &Route) -> Option<usize> {
    let gateway = route.gateway?;
    ports.iter().position(|port| port.addresses.iter().any(|address| address.contains(gateway)))
}

fn open_port(
    port: RouterPort,
    addresses: &[IpCidr],
    settings: &Settings,
    arena: &mut Arena,
) -> Result<Box<dyn Port>, RouterError> {
    Ok(match port {
        RouterPort::Xdp(mut xdp) => {
            not_the_kernels(&xdp.interface, addresses)?;
            xdp.steering.rules = vec![Rule::Everything];
            xdp.busy_poll = busy_poll(xdp.busy_poll, settings);
            Box::new(XdpPort::open(xdp, arena)?)
        }
        RouterPort::Packet(packet) => {
            not_the_kernels(&packet.interface, addresses)?;
            Box::new(PacketPort::open(&packet, arena)?)
        }
        RouterPort::Tap(tap) => Box::new(TapPort::open(&tap, arena)?),
        RouterPort::Dpdk(device) => dpdk::open(&device, arena)?,
        RouterPort::Mem(port) => port,
    })
}

/// Polls the card with the gate's quota. The old modes leave it to interrupts.
fn busy_poll(asked: Option<BusyPoll>, settings: &Settings) -> Option<BusyPoll> {
    let config = settings.config();
    if config.mode.has_input_queue() {
        return None;
    }
    let quota = match config.receive_quota {
        Quota::Packets(packets) => packets.min(POLL_BUDGET_MAX),
        Quota::Unlimited => POLL_BUDGET_MAX,
    };
    asked.map(|asked| BusyPoll { budget: quota as u16, ..asked })
}

/// Refuses an address that the kernel answers for too.
fn not_the_kernels(interface: &str, addresses: &[IpCidr]) -> Result<(), RouterError> {
    let interface = Interface::by_name(interface)?;
    for kernels in netlink::addresses(interface.index)? {
        if addresses.iter().any(|own| own.address() == kernels.address()) {
            let interface = interface.name;
            return Err(RouterError::KernelHasAddress { address: kernels, interface });
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
    fn a_port_is_read_from_its_description() {
        let spec: PortSpec = "xdp:eth0,10.0.0.1/24,fd00::1/64".parse().unwrap();
        assert!(matches!(&spec.port, RouterPort::Xdp(xdp) if xdp.interface == "eth0"));
        assert_eq!(spec.addresses.len(), 2);
        let memif = "net_memif0,role=client,socket=/run/memif,id=0";
        let spec: PortSpec = format!("dpdk:{memif},10.0.0.1/24,fd00::1/64").parse().unwrap();
        assert!(matches!(&spec.port, RouterPort::Dpdk(dpdk) if dpdk.device == memif));
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
            let error = text.parse::<PortSpec>().err().expect(text).to_string();
            assert!(error.contains(words), "{words:?} is not in: {error}");
        }
    }

    #[test]
    fn what_cannot_be_routed_is_refused() {
        let ports = |texts: [&str; 2]| texts.map(|text| text.parse().unwrap()).into();
        let refused = |config| check(&config).expect_err("must be refused").to_string();
        assert!(refused(RouterConfig::default()).contains("two ports"));
        let same = RouterConfig {
            ports: ports(["xdp:a,10.0.0.1/24", "xdp:b,10.0.0.2/24"]),
            ..RouterConfig::default()
        };
        assert!(refused(same).contains("same network"));
        let route = Route {
            prefix: "0.0.0.0/0".parse().unwrap(),
            gateway: Some("192.0.2.1".parse().unwrap()),
        };
        let nowhere = RouterConfig {
            ports: ports(["xdp:a,10.0.0.1/24", "xdp:b,10.0.1.1/24"]),
            routes: vec![route],
            ..RouterConfig::default()
        };
        assert!(refused(nowhere).contains("no network of this router"));
    }
}
