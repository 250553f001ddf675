//! Messages of rtnetlink, as far as they are sent and read here.
//!
//! netlink-packet-route reads every attribute of every type of interface and of rules, queues and
//! filters too. That code would be a sixth of the library for unmodified programs, so the attributes of
//! interfaces and the list of messages are here.

use netlink_packet_core::{
    DecodeError, Emitable, NetlinkDeserializable, NetlinkHeader, NetlinkSerializable, Nla,
    NlaBuffer, NlasIterator, Parseable, emit_u32, parse_string, parse_u32,
};
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::LinkHeader;
use netlink_packet_route::neighbour::NeighbourMessage;
use netlink_packet_route::route::RouteMessage;

// Types of messages of linux/rtnetlink.h.
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const RTM_DELNEIGH: u16 = 29;
const RTM_GETNEIGH: u16 = 30;

// Attributes of interfaces of linux/if_link.h.
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NUM_TX_QUEUES: u16 = 31;
const IFLA_NUM_RX_QUEUES: u16 = 32;
const IFLA_GRO_MAX_SIZE: u16 = 58;
const IFLA_GRO_IPV4_MAX_SIZE: u16 = 64;
/// Attribute within IFLA_LINKINFO.
const IFLA_INFO_KIND: u16 = 1;

/// Attribute of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkAttribute {
    IfName(String),
    /// Hardware address.
    Address(Vec<u8>),
    Mtu(u32),
    NumRxQueues(u32),
    NumTxQueues(u32),
    /// Type of a virtual device: `veth`.
    InfoKind(String),
    GroMaxSize(u32),
    GroIpv4MaxSize(u32),
}

impl LinkAttribute {
    /// Parses an attribute; `None` for one that nothing here reads.
    fn parse(attribute: &NlaBuffer<&[u8]>) -> Result<Option<Self>, DecodeError> {
        let value = attribute.value();
        Ok(Some(match attribute.kind() {
            IFLA_IFNAME => Self::IfName(parse_string(value)?),
            IFLA_ADDRESS => Self::Address(value.to_vec()),
            IFLA_MTU => Self::Mtu(parse_u32(value)?),
            IFLA_NUM_RX_QUEUES => Self::NumRxQueues(parse_u32(value)?),
            IFLA_NUM_TX_QUEUES => Self::NumTxQueues(parse_u32(value)?),
            IFLA_GRO_MAX_SIZE => Self::GroMaxSize(parse_u32(value)?),
            IFLA_GRO_IPV4_MAX_SIZE => Self::GroIpv4MaxSize(parse_u32(value)?),
            IFLA_LINKINFO => {
                for info in NlasIterator::new(value) {
                    let info = info?;
                    if info.kind() == IFLA_INFO_KIND {
                        return Ok(Some(Self::InfoKind(parse_string(info.value())?)));
                    }
                }
                return Ok(None);
            }
            _ => return Ok(None),
        }))
    }
}

/// Interface: the header of a message and the attributes that are read here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkMessage {
    pub header: LinkHeader,
    pub attributes: Vec<LinkAttribute>,
}

impl Parseable<[u8]> for LinkMessage {
    fn parse(bytes: &[u8]) -> Result<Self, DecodeError> {
        let header = LinkHeader::parse(bytes)?;
        let attributes = bytes.get(header.buffer_len()..).unwrap_or(&[]);
        let attributes = NlasIterator::new(attributes)
            .filter_map(|attribute| {
                attribute.and_then(|attribute| LinkAttribute::parse(&attribute)).transpose()
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { header, attributes })
    }
}

/// Setting of an interface: the attribute and its number.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(any(feature = "packet", feature = "xdp")), allow(dead_code))]
pub enum LinkSetting {
    Mtu(u32),
    GroMaxSize(u32),
    GroIpv4MaxSize(u32),
}

impl LinkSetting {
    fn number(self) -> u32 {
        match self {
            Self::Mtu(number) | Self::GroMaxSize(number) | Self::GroIpv4MaxSize(number) => number,
        }
    }
}

impl Nla for LinkSetting {
    fn value_len(&self) -> usize {
        size_of::<u32>()
    }

    fn kind(&self) -> u16 {
        match self {
            Self::Mtu(_) => IFLA_MTU,
            Self::GroMaxSize(_) => IFLA_GRO_MAX_SIZE,
            Self::GroIpv4MaxSize(_) => IFLA_GRO_IPV4_MAX_SIZE,
        }
    }

    fn emit_value(&self, buffer: &mut [u8]) {
        // The buffer has `value_len` bytes.
        let _ = emit_u32(buffer, self.number());
    }
}

/// Message to the kernel.
#[derive(Clone, Debug)]
pub enum Request {
    GetLinks,
    SetLink(LinkHeader, Vec<LinkSetting>),
    GetAddress(AddressMessage),
    NewAddress(AddressMessage),
    GetRoute(RouteMessage),
    GetNeighbour(NeighbourMessage),
    NewNeighbour(NeighbourMessage),
}

impl NetlinkSerializable for Request {
    fn message_type(&self) -> u16 {
        match self {
            Self::GetLinks => RTM_GETLINK,
            Self::SetLink(..) => RTM_SETLINK,
            Self::GetAddress(_) => RTM_GETADDR,
            Self::NewAddress(_) => RTM_NEWADDR,
            Self::GetRoute(_) => RTM_GETROUTE,
            Self::GetNeighbour(_) => RTM_GETNEIGH,
            Self::NewNeighbour(_) => RTM_NEWNEIGH,
        }
    }

    fn buffer_len(&self) -> usize {
        match self {
            Self::GetLinks => LinkHeader::default().buffer_len(),
            Self::SetLink(header, settings) => {
                header.buffer_len() + settings.as_slice().buffer_len()
            }
            Self::GetAddress(message) | Self::NewAddress(message) => message.buffer_len(),
            Self::GetRoute(message) => message.buffer_len(),
            Self::GetNeighbour(message) | Self::NewNeighbour(message) => message.buffer_len(),
        }
    }

    fn serialize(&self, buffer: &mut [u8]) {
        match self {
            Self::GetLinks => LinkHeader::default().emit(buffer),
            Self::SetLink(header, settings) => {
                header.emit(buffer);
                settings.as_slice().emit(&mut buffer[header.buffer_len()..]);
            }
            Self::GetAddress(message) | Self::NewAddress(message) => message.emit(buffer),
            Self::GetRoute(message) => message.emit(buffer),
            Self::GetNeighbour(message) | Self::NewNeighbour(message) => message.emit(buffer),
        }
    }
}

/// Message of the kernel.
#[derive(Clone, Debug)]
pub enum Message {
    NewLink(LinkMessage),
    DelLink(LinkMessage),
    NewAddress(AddressMessage),
    DelAddress(AddressMessage),
    NewRoute(RouteMessage),
    DelRoute(RouteMessage),
    NewNeighbour(NeighbourMessage),
    DelNeighbour(NeighbourMessage),
    /// Message of a type that nothing here reads.
    Other,
}

impl NetlinkDeserializable for Message {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, body: &[u8]) -> Result<Self, DecodeError> {
        Ok(match header.message_type {
            RTM_NEWLINK => Self::NewLink(LinkMessage::parse(body)?),
            RTM_DELLINK => Self::DelLink(LinkMessage::parse(body)?),
            RTM_NEWADDR => Self::NewAddress(AddressMessage::parse(body)?),
            RTM_DELADDR => Self::DelAddress(AddressMessage::parse(body)?),
            RTM_NEWROUTE => Self::NewRoute(RouteMessage::parse(body)?),
            RTM_DELROUTE => Self::DelRoute(RouteMessage::parse(body)?),
            RTM_NEWNEIGH => Self::NewNeighbour(NeighbourMessage::parse(body)?),
            RTM_DELNEIGH => Self::DelNeighbour(NeighbourMessage::parse(body)?),
            _ => Self::Other,
        })
    }
}
