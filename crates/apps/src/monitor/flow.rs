//! Flows: packets of one VLAN between the same addresses, by the same protocol and ports.

use std::net::IpAddr;

use tidegate_device::packet::PassiveFrame;
use tidegate_wire::ipv6_extension::Extension;
use tidegate_wire::{
    DropReason, EtherType, EthernetHeader, ExtensionWalk, Ipv4Header, Ipv6Header, Protocol,
    TcpHeader, UdpHeader, VlanTag,
};

/// Maximum number of VLAN tags of a frame that are looked through.
const MAX_VLAN_TAGS: usize = 4;

/// Values below this in place of an EtherType are the length of an IEEE 802.3 frame.
const MIN_ETHERTYPE: u16 = 0x600;

/// Identity of a flow, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// Identifier of the outermost VLAN tag; 0 without a VLAN.
    pub vlan: u16,
    /// Protocol, and endpoints of IP packets.
    pub kind: FlowKind,
}

/// Protocol and endpoints of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlowKind {
    /// IP packets.
    Ip(IpFlow),
    /// Frames that are not IP. The type is 0 for IEEE 802.3 frames, which have a length instead.
    Other(EtherType),
}

/// Protocol and endpoints of a flow of IP packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpFlow {
    /// Source address.
    pub source: IpAddr,
    /// Destination address, of the same family.
    pub destination: IpAddr,
    /// Protocol above IP, behind extension headers.
    pub protocol: Protocol,
    /// Source port of TCP and UDP; otherwise 0.
    pub source_port: u16,
    /// Destination port of TCP and UDP; type and code of ICMP, in the upper and the lower byte;
    /// otherwise 0.
    pub destination_port: u16,
    /// True for fragments. Only a first fragment has ports, so the flows of fragments have none.
    pub fragment: bool,
}

impl IpFlow {
    /// True if the destination port is the type and code of ICMP or ICMPv6.
    pub fn is_icmp(&self) -> bool {
        matches!(self.protocol, Protocol::ICMPV4 | Protocol::ICMPV6)
    }
}

/// Traffic of a frame, and the flow that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The flow.
    pub key: FlowKey,
    /// Packets and bytes of the frame.
    pub traffic: Traffic,
    /// Flags of a TCP segment; otherwise 0.
    pub tcp_flags: u8,
}

/// Number of packets and bytes. Bytes are those of IP packets, with their headers; of other frames
/// those of the frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Traffic {
    /// Adds other traffic.
    #[inline]
    pub fn add(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
    }

    /// Traffic of this count that an earlier value of the count does not have.
    #[inline]
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self { packets: self.packets - earlier.packets, bytes: self.bytes - earlier.bytes }
    }
}

impl FlowKey {
    /// Passes the key to `read` as bytes, different for different keys; those of an IPv4 flow are 16.
    ///
    /// Bytes are written as words: the processor could not read bytes as a word right after.
    #[inline]
    pub fn with_bytes<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        let vlan = u64::from(self.vlan) << 48;
        let flow = match self.kind {
            FlowKind::Other(ethertype) => {
                return read(&(vlan | u64::from(ethertype.0)).to_be_bytes());
            }
            FlowKind::Ip(flow) => flow,
        };
        let ports = u64::from(flow.source_port) << 16 | u64::from(flow.destination_port);
        let protocol = u64::from(flow.fragment) << 40 | u64::from(flow.protocol.0) << 32;
        let fields = (vlan | protocol | ports).to_be_bytes();
        match (flow.source, flow.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let addresses =
                    u64::from(source.to_bits()) << 32 | u64::from(destination.to_bits());
                read([fields, addresses.to_be_bytes()].as_flattened())
            }
            (source, destination) => {
                let [source, destination] = [source, destination].map(address_bits);
                let words = [source >> 64, source, destination >> 64, destination];
                let [a, b, c, d] = words.map(|word| (word as u64).to_be_bytes());
                read([fields, a, b, c, d].as_flattened())
            }
        }
    }
}

/// Bits of an address; those of an IPv4 address as of an IPv6 one.
#[inline]
fn address_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

impl Observation {
    /// Parses a frame. Checksums are not verified. An IP packet whose upper layers cannot be read
    /// has no ports.
    ///
    /// # Errors
    /// The reason for which the frame has no flow: its Ethernet or IP header is malformed.
    pub fn parse(frame: &PassiveFrame<'_>) -> Result<Self, DropReason> {
        let mut rest = frame.data;
        let (header, payload) = rest
            .split_first_chunk::<{ EthernetHeader::BYTES }>()
            .ok_or(DropReason::EthernetTruncated)?;
        let mut ethertype = EtherType(u16::from_be_bytes([header[12], header[13]]));
        rest = payload;
        let mut vlan = frame.vlan.map_or(0, |(_, tag)| VlanTag(tag).id());
        for _ in 0..MAX_VLAN_TAGS {
            if !matches!(ethertype, EtherType::VLAN | EtherType::SERVICE_VLAN) {
                break;
            }
            let (tag, payload) =
                rest.split_first_chunk::<{ VlanTag::BYTES }>().ok_or(DropReason::VlanTruncated)?;
            if vlan == 0 {
                vlan = VlanTag(u16::from_be_bytes([tag[0], tag[1]])).id();
            }
            ethertype = EtherType(u16::from_be_bytes([tag[2], tag[3]]));
            rest = payload;
        }
        let link_bytes = frame.data.len() - rest.len();
        let packet = CapturedPacket {
            bytes: rest,
            wire_bytes: frame.frame_bytes.saturating_sub(link_bytes),
            segment_bytes: frame.segment_bytes,
        };
        match ethertype {
            EtherType::IPV4 => packet.parse_ipv4(vlan),
            EtherType::IPV6 => packet.parse_ipv6(vlan),
            _ => {
                let is_length = ethertype.0 < MIN_ETHERTYPE;
                let kind = FlowKind::Other(if is_length { EtherType(0) } else { ethertype });
                let traffic = Traffic { packets: 1, bytes: frame.frame_bytes as u64 };
                Ok(Self { key: FlowKey { vlan, kind }, traffic, tcp_flags: 0 })
            }
        }
    }
}

/// First bytes of an IP packet.
struct CapturedPacket<'a> {
    bytes: &'a [u8],
    /// Bytes behind the link header of the whole frame, with its padding.
    wire_bytes: usize,
    segment_bytes: u16,
}

impl CapturedPacket<'_> {
    fn parse_ipv4(&self, vlan: u16) -> Result<Observation, DropReason> {
        let (header, payload) = Ipv4Header::parse_quoted(self.bytes)?;
        let header_bytes = usize::from(header.header_bytes);
        let total_bytes = usize::from(header.total_bytes);
        if self.segment_bytes == 0 && !(header_bytes..=self.wire_bytes).contains(&total_bytes) {
            return Err(DropReason::Ipv4TotalLength);
        }
        let fragment = header.is_fragment();
        let upper = Upper::parse(header.protocol, payload, fragment);
        let flow = IpFlow {
            source: header.source.into(),
            destination: header.destination.into(),
            protocol: header.protocol,
            source_port: upper.source_port,
            destination_port: upper.destination_port,
            fragment,
        };
        Ok(self.observation(vlan, flow, total_bytes, header_bytes, &upper))
    }

    fn parse_ipv6(&self, vlan: u16) -> Result<Observation, DropReason> {
        let (header, payload) = Ipv6Header::parse_quoted(self.bytes)?;
        let total_bytes = Ipv6Header::BYTES + usize::from(header.payload_bytes);
        if self.segment_bytes == 0 && total_bytes > self.wire_bytes {
            return Err(DropReason::Ipv6PayloadLength);
        }
        let mut walk = ExtensionWalk::new(header.next_header, payload);
        let mut fragment = false;
        let mut is_readable = true;
        for extension in &mut walk {
            match extension {
                Ok(Extension::Fragment(part)) => {
                    fragment = !part.is_atomic();
                    // Headers behind the fragment header are in the first fragment only.
                    if fragment {
                        break;
                    }
                }
                Ok(_) => {}
                Err(_) => is_readable = false,
            }
        }
        let rest = walk.remainder();
        let (protocol, upper) = match is_readable {
            true => (rest.protocol, Upper::parse(rest.protocol, rest.payload, fragment)),
            false => (header.next_header, Upper::default()),
        };
        let flow = IpFlow {
            source: header.source.into(),
            destination: header.destination.into(),
            protocol,
            source_port: upper.source_port,
            destination_port: upper.destination_port,
            fragment,
        };
        let header_bytes = if is_readable { rest.offset_bytes } else { Ipv6Header::BYTES };
        Ok(self.observation(vlan, flow, total_bytes, header_bytes, &upper))
    }

    /// Observation of a packet of `total_bytes`, whose IP headers have `header_bytes`.
    fn observation(
        &self,
        vlan: u16,
        flow: IpFlow,
        total_bytes: usize,
        header_bytes: usize,
        upper: &Upper,
    ) -> Observation {
        let traffic = match usize::from(self.segment_bytes) {
            0 => Traffic { packets: 1, bytes: total_bytes as u64 },
            segment_bytes => {
                // Each packet has the headers of the frame.
                let header_bytes = header_bytes + upper.header_bytes;
                let payload_bytes = self.wire_bytes.saturating_sub(header_bytes);
                let packets = payload_bytes.div_ceil(segment_bytes).max(1);
                let bytes = self.wire_bytes + (packets - 1) * header_bytes;
                Traffic { packets: packets as u64, bytes: bytes as u64 }
            }
        };
        let key = FlowKey { vlan, kind: FlowKind::Ip(flow) };
        Observation { key, traffic, tcp_flags: upper.tcp_flags }
    }
}

/// Fields of the header above IP.
#[derive(Default)]
struct Upper {
    source_port: u16,
    destination_port: u16,
    tcp_flags: u8,
    header_bytes: usize,
}

impl Upper {
    /// Parses the header; a header that cannot be read has no fields.
    fn parse(protocol: Protocol, payload: &[u8], fragment: bool) -> Self {
        if fragment {
            return Self::default();
        }
        match protocol {
            Protocol::TCP => TcpHeader::parse_quoted(payload).map_or_else(
                |_| Self::default(),
                |tcp| Self {
                    source_port: tcp.source_port,
                    destination_port: tcp.destination_port,
                    tcp_flags: tcp.flags.0,
                    header_bytes: tcp.header_bytes.into(),
                },
            ),
            Protocol::UDP => UdpHeader::parse_quoted(payload).map_or_else(
                |_| Self::default(),
                |udp| Self {
                    source_port: udp.source_port,
                    destination_port: udp.destination_port,
                    tcp_flags: 0,
                    header_bytes: UdpHeader::BYTES,
                },
            ),
            Protocol::ICMPV4 | Protocol::ICMPV6 => match payload {
                [kind, code, ..] => {
                    Self { destination_port: u16::from_be_bytes([*kind, *code]), ..Self::default() }
                }
                _ => Self::default(),
            },
            _ => Self::default(),
        }
    }
}

#[cfg(test)]
mod tests;
