//! The kernel's interfaces, addresses, routes and neighbours.
//!
//! A stack that shares an interface with the kernel uses the kernel's addresses, routes and
//! neighbours instead of its own. The functions here read them (rtnetlink(7)), and a
//! [`Monitor`] reports changes.

mod change;
#[cfg(any(feature = "packet", feature = "xdp"))]
mod gro;
mod message;
mod monitor;
#[cfg(any(feature = "packet", feature = "xdp"))]
#[cfg_attr(not(feature = "xdp"), allow(dead_code))]
mod netdev;
mod socket;

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{LinkFlags, LinkLayerType};
use netlink_packet_route::neighbour::{
    self, NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteNextHopFlags,
    RouteType,
};
use tidegate_wire::{IpCidr, MacAddr, Medium};

pub use change::{add_address, set_down, set_mtu, set_up};
#[cfg(any(feature = "packet", feature = "xdp"))]
pub(crate) use gro::GroMaxSizes;
pub use monitor::{Change, Monitor};
#[cfg(any(feature = "packet", feature = "xdp"))]
pub use netdev::set_irq_suspend_timeout;
#[cfg(any(feature = "packet", feature = "xdp"))]
pub(crate) use netdev::{NapiSettings, NetdevSocket};
pub(crate) use socket::Socket;

use message::{LinkAttribute, LinkMessage, Message, Request};

/// Error of a netlink request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetlinkError {
    /// No interface has this name.
    #[error("there is no interface {name:?} here; there are: {}", existing.join(", "))]
    NoSuchInterface {
        /// Name that was asked for.
        name: String,
        /// Names that exist in this network namespace.
        existing: Vec<String>,
    },
    /// No interface has this index.
    #[error("there is no interface with the index {index}: it may have been deleted")]
    NoSuchIndex {
        /// Index that was asked for.
        index: u32,
    },
    /// The netlink socket could not be opened.
    #[error("cannot open a netlink socket: {source}")]
    Socket {
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel refused the request.
    #[error("cannot {what}: {source}{}", hint(source))]
    Request {
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => {
            "; it needs CAP_NET_ADMIN: run as root, or inside `unshare -rn` to try it out"
        }
        _ => "",
    }
}

/// One network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Interface index. A name can pass to another interface; an index cannot while its interface
    /// exists.
    pub index: u32,
    /// Interface name: `eth0`.
    pub name: String,
    /// Hardware address; all zero when there is none.
    pub mac: MacAddr,
    /// The largest IP packet in bytes.
    pub mtu: usize,
    /// Header that frames begin with; `None` when neither Ethernet nor bare IP.
    pub medium: Option<Medium>,
    /// True for the loopback interface.
    pub loopback: bool,
    /// Administrative state: true when set up.
    pub up: bool,
    /// True when the link is up: a cable is connected, or the peer is up.
    pub carrier: bool,
    /// Kind of a virtual device: `veth`, `tun`, `bridge`, `vlan`.
    pub kind: Option<String>,
    /// Number of receive queues.
    pub receive_queues: u32,
    /// Number of transmit queues.
    pub transmit_queues: u32,
}

impl Interface {
    /// Finds an interface by name.
    ///
    /// # Errors
    /// [`NetlinkError::NoSuchInterface`] with the names that do exist.
    pub fn by_name(name: &str) -> Result<Self, NetlinkError> {
        let mut all = Self::all()?;
        match all.iter().position(|interface| interface.name == name) {
            Some(at) => Ok(all.swap_remove(at)),
            None => Err(NetlinkError::NoSuchInterface {
                name: name.to_owned(),
                existing: all.into_iter().map(|interface| interface.name).collect(),
            }),
        }
    }

    /// Finds an interface by index.
    ///
    /// # Errors
    /// [`NetlinkError::NoSuchIndex`] when it is gone.
    pub fn by_index(index: u32) -> Result<Self, NetlinkError> {
        Self::all()?
            .into_iter()
            .find(|interface| interface.index == index)
            .ok_or(NetlinkError::NoSuchIndex { index })
    }

    /// Every interface of this network namespace.
    ///
    /// # Errors
    /// When netlink is not available.
    pub fn all() -> Result<Vec<Self>, NetlinkError> {
        let answer = Socket::open(0)?.dump("list the interfaces", Request::GetLinks)?;
        Ok(answer.into_iter().filter_map(Self::from_message).collect())
    }

    /// True if frames on this interface may come from this machine without passing a NIC: with an
    /// unfilled checksum, or with several packets in one frame.
    pub fn has_local_peers(&self) -> bool {
        let local = ["veth", "netkit", "tun", "bridge", "macvlan"];
        self.kind.as_deref().is_some_and(|kind| local.contains(&kind))
    }

    fn from_message(message: Message) -> Option<Self> {
        match message {
            Message::NewLink(link) => Self::from_link(&link),
            _ => None,
        }
    }

    fn from_link(link: &LinkMessage) -> Option<Self> {
        // Bridges report the state of their ports under an address family of their own.
        if link.header.interface_family != AddressFamily::Unspec {
            return None;
        }
        let flags = link.header.flags;
        let mut interface = Self {
            index: link.header.index,
            name: String::new(),
            mac: MacAddr::default(),
            mtu: 0,
            medium: match link.header.link_layer_type {
                LinkLayerType::Ether | LinkLayerType::Loopback => Some(Medium::Ethernet),
                LinkLayerType::None | LinkLayerType::Rawip => Some(Medium::Ip),
                _ => None,
            },
            loopback: flags.contains(LinkFlags::Loopback),
            up: flags.contains(LinkFlags::Up),
            carrier: flags.contains(LinkFlags::LowerUp),
            kind: None,
            receive_queues: 1,
            transmit_queues: 1,
        };
        for attribute in &link.attributes {
            match attribute {
                LinkAttribute::IfName(name) => interface.name.clone_from(name),
                LinkAttribute::Address(bytes) => {
                    interface.mac = mac_from(bytes).unwrap_or_default();
                }
                LinkAttribute::Mtu(mtu) => interface.mtu = *mtu as usize,
                LinkAttribute::NumRxQueues(queues) => interface.receive_queues = *queues,
                LinkAttribute::NumTxQueues(queues) => interface.transmit_queues = *queues,
                LinkAttribute::InfoKind(kind) => interface.kind = Some(kind.clone()),
                LinkAttribute::GroMaxSize(_) | LinkAttribute::GroIpv4MaxSize(_) => {}
            }
        }
        Some(interface)
    }
}

fn mac_from(bytes: &[u8]) -> Option<MacAddr> {
    <[u8; 6]>::try_from(bytes).ok().map(MacAddr)
}

/// The kernel's addresses on an interface, each with its prefix length. Both families.
///
/// # Errors
/// When netlink is not available.
pub fn addresses(index: u32) -> Result<Vec<IpCidr>, NetlinkError> {
    let request = Request::GetAddress(AddressMessage::default());
    let answer = Socket::open(0)?.dump("list the addresses", request)?;
    let found = answer.into_iter().filter_map(|message| match message {
        Message::NewAddress(address) => address_from(&address),
        _ => None,
    });
    Ok(found.filter(|&(at, _)| at == index).map(|(_, address)| address).collect())
}

fn address_from(message: &AddressMessage) -> Option<(u32, IpCidr)> {
    // On a point-to-point interface ADDRESS is the peer's and LOCAL is the own address.
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Address(address) => Some(*address),
        _ => None,
    });
    let cidr = IpCidr::new(local.or(address)?, message.header.prefix_len).ok()?;
    Some((message.header.index, cidr))
}

/// A route: one next hop to a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Destination network.
    pub destination: IpCidr,
    /// Next-hop router; `None` when the network is on the link.
    pub gateway: Option<IpAddr>,
    /// Source address that the kernel prefers.
    pub source: Option<IpAddr>,
    /// Metric: of two routes to the same network, the lower one is used.
    pub metric: u32,
}

/// The unicast routes of the main table that lead out of an interface.
///
/// # Errors
/// When netlink is not available.
pub fn routes(index: u32) -> Result<Vec<Route>, NetlinkError> {
    let mut socket = Socket::open(0)?;
    let mut found = Vec::new();
    // One dump per family: with the family unspecified the kernel also dumps multicast and MPLS
    // tables.
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        let answer = socket.dump("list the routes", Request::GetRoute(request))?;
        for message in &answer {
            if let Message::NewRoute(route) = message {
                found.extend(
                    routes_from(route).into_iter().filter(|hop| hop.0 == index).map(|hop| hop.1),
                );
            }
        }
    }
    Ok(found)
}

/// The next hops of one route, each with the index of its interface.
fn routes_from(message: &RouteMessage) -> Vec<(u32, Route)> {
    let mut table = u32::from(message.header.table);
    let mut destination = None;
    let (mut gateway, mut source, mut metric, mut index) = (None, None, 0, None);
    let mut hops: &[_] = &[];
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::Destination(address) => destination = ip_from(address),
            RouteAttribute::Gateway(address) => gateway = ip_from(address),
            RouteAttribute::PrefSource(address) => source = ip_from(address),
            RouteAttribute::Priority(priority) => metric = *priority,
            RouteAttribute::Oif(oif) => index = Some(*oif),
            RouteAttribute::MultiPath(list) => hops = list,
            _ => {}
        }
    }
    let unspecified = match message.header.address_family {
        AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        _ => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let prefix = message.header.destination_prefix_length;
    let usable = table == u32::from(RouteHeader::RT_TABLE_MAIN)
        && message.header.kind == RouteType::Unicast
        && !message.header.flags.contains(RouteFlags::Cloned);
    let Ok(destination) = IpCidr::new(destination.unwrap_or(unspecified), prefix) else {
        return Vec::new();
    };
    if !usable {
        return Vec::new();
    }
    let single = index.map(|index| (index, Route { destination, gateway, source, metric }));
    let several =
        hops.iter().filter(|hop| !hop.flags.contains(RouteNextHopFlags::Dead)).map(|hop| {
            let gateway = hop.attributes.iter().find_map(|attribute| match attribute {
                RouteAttribute::Gateway(address) => ip_from(address),
                _ => None,
            });
            (hop.interface_index, Route { destination, gateway, source, metric })
        });
    single.into_iter().chain(several).collect()
}

fn ip_from(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

/// State of a neighbour cache entry (RFC 4861 section 7.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeighbourState {
    /// Being resolved; no hardware address yet.
    Incomplete,
    /// Confirmed recently.
    Reachable,
    /// Known, but not confirmed recently.
    Stale,
    /// Known and in use; a probe follows soon.
    Delay,
    /// Known and being probed.
    Probe,
    /// Resolution failed.
    Failed,
    /// Configured by hand, never resolved.
    Permanent,
    /// A state that this version does not know.
    Other,
}

impl NeighbourState {
    /// Returns true when the hardware address may be used.
    pub fn is_usable(self) -> bool {
        !matches!(self, Self::Incomplete | Self::Failed | Self::Other)
    }
}

impl fmt::Display for NeighbourState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Incomplete => "incomplete",
            Self::Reachable => "reachable",
            Self::Stale => "stale",
            Self::Delay => "delay",
            Self::Probe => "probe",
            Self::Failed => "failed",
            Self::Permanent => "permanent",
            Self::Other => "other",
        })
    }
}

/// Entry of the kernel's neighbour cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// IP address of the neighbour.
    pub address: IpAddr,
    /// Hardware address, when known.
    pub mac: Option<MacAddr>,
    /// State of the entry.
    pub state: NeighbourState,
}

/// The kernel's neighbours on an interface, both families.
///
/// # Errors
/// When netlink is not available.
pub fn neighbours(index: u32) -> Result<Vec<Neighbour>, NetlinkError> {
    let request = Request::GetNeighbour(NeighbourMessage::default());
    let answer = Socket::open(0)?.dump("list the neighbours", request)?;
    let found = answer.into_iter().filter_map(|message| match message {
        Message::NewNeighbour(neighbour) => neighbour_from(&neighbour),
        _ => None,
    });
    Ok(found.filter(|&(at, _)| at == index).map(|(_, neighbour)| neighbour).collect())
}

/// The kernel's entry of one neighbour on an interface.
///
/// # Errors
/// When netlink is not available, or the kernel has no such entry, or is older than Linux 5.0.
pub fn neighbour(index: u32, address: IpAddr) -> Result<Option<Neighbour>, NetlinkError> {
    let request = Request::GetNeighbour(message_about(index, address));
    let answer = Socket::open(0)?.get("read a neighbour", request)?;
    Ok(answer.into_iter().find_map(|message| match message {
        Message::NewNeighbour(found) => neighbour_from(&found).map(|(_, found)| found),
        _ => None,
    }))
}

fn message_about(index: u32, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    message.header.ifindex = index;
    message.attributes.push(NeighbourAttribute::Destination(match address {
        IpAddr::V4(v4) => NeighbourAddress::Inet(v4),
        IpAddr::V6(v6) => NeighbourAddress::Inet6(v6),
    }));
    message
}

fn neighbour_from(message: &NeighbourMessage) -> Option<(u32, Neighbour)> {
    let mut address = None;
    let mut mac = None;
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => {
                address = Some(IpAddr::V4(*v4));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => {
                address = Some(IpAddr::V6(*v6));
            }
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = mac_from(bytes),
            _ => {}
        }
    }
    use neighbour::NeighbourState as Kernel;
    let state = match message.header.state {
        Kernel::Incomplete => NeighbourState::Incomplete,
        Kernel::Reachable => NeighbourState::Reachable,
        Kernel::Stale => NeighbourState::Stale,
        Kernel::Delay => NeighbourState::Delay,
        Kernel::Probe => NeighbourState::Probe,
        Kernel::Failed => NeighbourState::Failed,
        // NOARP entries are multicast groups and loopback addresses: always usable.
        Kernel::Permanent | Kernel::Noarp => NeighbourState::Permanent,
        _ => NeighbourState::Other,
    };
    Some((message.header.ifindex, Neighbour { address: address?, mac, state }))
}

/// Asks the kernel to resolve a neighbour's hardware address, as if it had a packet for the
/// neighbour. The answer shows up in [`neighbours`] and at a [`Monitor`]. For IPv6 the
/// interface must have a link-local address: the kernel solicits from that address, and does
/// not solicit without one.
///
/// # Errors
/// Without CAP_NET_ADMIN, or when the interface is gone or down.
pub fn resolve(index: u32, address: IpAddr) -> Result<(), NetlinkError> {
    let mut message = message_about(index, address);
    message.header.flags = NeighbourFlags::Use;
    Socket::open(0)?.command("resolve a neighbour", Request::NewNeighbour(message))
}
