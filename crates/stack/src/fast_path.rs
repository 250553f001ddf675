//! The short way for the packet that there are most of: a whole UDP datagram
//! on plain Ethernet, in and out, without options, tags or fragments.
//!
//! It only ever says "this is plain and right, and goes there" or "look
//! closer". It drops nothing and answers nothing: whatever is not plain goes
//! through the parsers, which find the reason. So it could be left out without
//! a change in what the stack does.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{
    EtherType, EthernetHeader, Ipv4Header, Ipv6Header, MacAddr, Medium, Protocol, Sum, UdpHeader,
    checksum,
};

use crate::address::can_be_source_v4;
use crate::ipv6::can_be_source_v6;
use crate::udp::{Datagram, Payload, UdpId};
use crate::{Event, Stack};

const LINK_BYTES: usize = EthernetHeader::BYTES;
const UDP_BYTES: usize = UdpHeader::BYTES;
/// Everything in front of the payload.
const HEADERS_V4_BYTES: usize = LINK_BYTES + Ipv4Header::BYTES + UDP_BYTES;
const HEADERS_V6_BYTES: usize = LINK_BYTES + Ipv6Header::BYTES + UDP_BYTES;

/// Ready-made headers of a datagram on a path: all but lengths, ports and
/// checksums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Template {
    bytes: [u8; LINK_BYTES + Ipv6Header::BYTES],
    /// The sum of the IPv4 header.
    header: Sum,
    /// The sum of the pseudo-header.
    pseudo: Sum,
}

#[inline(always)]
fn u16_at<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

#[inline(always)]
fn array_at<const M: usize, const N: usize>(bytes: &[u8; N], at: usize) -> [u8; M] {
    let mut part = [0; M];
    part.copy_from_slice(&bytes[at..at + M]);
    part
}

#[inline(always)]
fn put_u16<const N: usize>(bytes: &mut [u8; N], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// The sum of an IPv4 header of 20 bytes behind a link header.
#[inline(always)]
fn header_sum(head: &[u8; HEADERS_V4_BYTES]) -> Sum {
    let word = |at| u32::from_be_bytes(array_at(head, at));
    Sum::ZERO
        .with_u32(word(14))
        .with_u32(word(18))
        .with_u32(word(22))
        .with_u32(word(26))
        .with_u32(word(30))
}

/// A datagram that passed every check.
struct Plain {
    remote: SocketAddr,
    local: IpAddr,
    socket: u32,
    hop_limit: u8,
    traffic_class: u8,
    headers_bytes: usize,
    payload_bytes: usize,
}

impl Stack {
    /// Whether the interface is one that the short way knows.
    pub(crate) fn is_plain_interface(&self) -> bool {
        self.medium == Medium::Ethernet && self.vlan.is_none()
    }

    /// Takes a frame, if it is plain. Gives it back otherwise.
    #[inline(always)]
    pub(crate) fn ingest_plain(&mut self, frame: Frame, arena: &Arena) -> Option<Frame> {
        let bytes = arena.bytes(&frame);
        let Some(head) = bytes.first_chunk::<HEADERS_V4_BYTES>() else { return Some(frame) };
        if !self.plain_interface || head[..6] != self.mac.0 || head[6] & 1 != 0 {
            return Some(frame);
        }
        // EtherType, version and header length.
        let plain = match (u16_at(head, 12), head[14]) {
            (0x0800, 0x45) => self.recognize_v4(head, bytes, frame.checksum),
            (0x86dd, 0x60..=0x6f) => self.recognize_v6(bytes, frame.checksum),
            _ => None,
        };
        let Some(plain) = plain else { return Some(frame) };
        let Some((id, socket)) = self.udp.at(plain.socket) else { return Some(frame) };
        let mapped = socket.bound.is_ipv6() != plain.local.is_ipv6();
        if mapped || socket.has_room(plain.payload_bytes).is_err() {
            return Some(frame);
        }
        let mut frame = frame;
        frame.advance(plain.headers_bytes);
        frame.truncate(plain.payload_bytes);
        let was_empty = socket.push(Datagram {
            payload: Payload::Frame(frame),
            remote: plain.remote,
            local: plain.local,
            hop_limit: plain.hop_limit,
            traffic_class: plain.traffic_class,
        });
        self.counters.held += 1;
        if was_empty && !socket.readable_told {
            socket.readable_told = true;
            self.events.push_back(Event::Readable(id));
        }
        None
    }

    #[inline(always)]
    fn recognize_v4(
        &self,
        head: &[u8; HEADERS_V4_BYTES],
        frame: &[u8],
        known: Checksum,
    ) -> Option<Plain> {
        let (total_bytes, udp_bytes) = (usize::from(u16_at(head, 16)), u16_at(head, 38));
        let source = Ipv4Addr::from(array_at::<4, 42>(head, 26));
        let destination = Ipv4Addr::from(array_at::<4, 42>(head, 30));
        // Not a fragment, UDP, lengths that agree, addresses that can be.
        if u16_at(head, 20) & 0x3fff != 0
            || head[23] != Protocol::UDP.0
            || udp_bytes < UDP_BYTES as u16
            || total_bytes != usize::from(udp_bytes) + Ipv4Header::BYTES
            || !self.addresses.is_ours_v4(destination)
            || !can_be_source_v4(source)
            || !self.addresses.is_other_v4(source)
            || !header_sum(head).is_valid()
        {
            return None;
        }
        let datagram = frame.get(LINK_BYTES + Ipv4Header::BYTES..LINK_BYTES + total_bytes)?;
        if known == Checksum::Unknown && u16_at(head, 40) != 0 {
            let pseudo = checksum::pseudo_header_v4(source, destination, Protocol::UDP, udp_bytes);
            if !pseudo.with(datagram).is_valid() {
                return None;
            }
        }
        let (from_port, to_port) = (u16_at(head, 34), u16_at(head, 36));
        let remote = SocketAddr::new(IpAddr::V4(source), from_port);
        let local = IpAddr::V4(destination);
        let socket = self.udp.find_plain(SocketAddr::new(local, to_port), remote);
        Some(Plain {
            remote,
            local,
            socket: socket?,
            hop_limit: head[22],
            traffic_class: head[15],
            headers_bytes: HEADERS_V4_BYTES,
            payload_bytes: usize::from(udp_bytes) - UDP_BYTES,
        })
    }

    #[inline(always)]
    fn recognize_v6(&self, frame: &[u8], known: Checksum) -> Option<Plain> {
        let head = frame.first_chunk::<HEADERS_V6_BYTES>()?;
        let udp_bytes = u16_at(head, 58);
        let source = Ipv6Addr::from(array_at::<16, 62>(head, 22));
        let destination = Ipv6Addr::from(array_at::<16, 62>(head, 38));
        if head[20] != Protocol::UDP.0
            || udp_bytes < UDP_BYTES as u16
            || u16_at(head, 18) != udp_bytes
            || !self.addresses.is_ours_v6(destination)
            || !can_be_source_v6(source)
            || source.is_unspecified()
            || !self.addresses.is_other_v6(source)
        {
            return None;
        }
        let start = LINK_BYTES + Ipv6Header::BYTES;
        let datagram = frame.get(start..start + usize::from(udp_bytes))?;
        if known == Checksum::Unknown {
            let bytes = udp_bytes.into();
            let pseudo = checksum::pseudo_header_v6(source, destination, Protocol::UDP, bytes);
            if u16_at(head, 60) == 0 || !pseudo.with(datagram).is_valid() {
                return None;
            }
        }
        let (from_port, to_port) = (u16_at(head, 54), u16_at(head, 56));
        let remote = SocketAddr::new(IpAddr::V6(source), from_port);
        let local = IpAddr::V6(destination);
        let socket = self.udp.find_plain(SocketAddr::new(local, to_port), remote);
        Some(Plain {
            remote,
            local,
            socket: socket?,
            hop_limit: head[21],
            traffic_class: head[14] << 4 | head[15] >> 4,
            headers_bytes: HEADERS_V6_BYTES,
            payload_bytes: usize::from(udp_bytes) - UDP_BYTES,
        })
    }

    /// The headers of datagrams from `source` to `destination` by way of the
    /// station `mac`.
    pub(crate) fn template(
        &self,
        mac: MacAddr,
        source: IpAddr,
        destination: IpAddr,
    ) -> Option<Template> {
        let mut bytes = [0; LINK_BYTES + Ipv6Header::BYTES];
        let (ethertype, pseudo) = match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut header = Ipv4Header::new(source, destination, Protocol::UDP, 0)?;
                header.ttl = self.hop_limit;
                header.emit(&mut bytes[LINK_BYTES..])?;
                // Total length and checksum.
                bytes[LINK_BYTES + 2..LINK_BYTES + 4].fill(0);
                bytes[LINK_BYTES + 10..LINK_BYTES + 12].fill(0);
                let pseudo = checksum::pseudo_header_v4(source, destination, Protocol::UDP, 0);
                (EtherType::IPV4, pseudo)
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let mut header = Ipv6Header::new(source, destination, Protocol::UDP, 0)?;
                header.hop_limit = self.hop_limit;
                header.emit(&mut bytes[LINK_BYTES..])?;
                let pseudo = checksum::pseudo_header_v6(source, destination, Protocol::UDP, 0);
                (EtherType::IPV6, pseudo)
            }
            _ => return None,
        };
        self.emit_link(mac, ethertype, &mut bytes)?;
        let header = Sum::of(&bytes[LINK_BYTES..LINK_BYTES + Ipv4Header::BYTES]);
        Some(Template { bytes, header, pseudo })
    }

    /// Sends a frame that holds a payload, if that is plain: a path in the
    /// cache with headers ready, nothing to fragment, room for it. Gives it
    /// back otherwise.
    #[inline(always)]
    pub(crate) fn send_plain(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        to: Option<SocketAddr>,
        from: Option<IpAddr>,
        mut frame: Frame,
    ) -> Option<Frame> {
        let Some(socket) = self.udp.get(id) else { return Some(frame) };
        let Some(remote) = to.or(socket.remote) else { return Some(frame) };
        let Some(path) = self.paths.get(now_ns, remote.ip()) else { return Some(frame) };
        let Some(template) = &path.template else { return Some(frame) };
        let source = match from {
            Some(from) => from,
            None if socket.local.ip().is_unspecified() => path.source,
            None => socket.local.ip(),
        };
        let v4 = remote.is_ipv4();
        let headers_bytes = if v4 { HEADERS_V4_BYTES } else { HEADERS_V6_BYTES };
        let udp_bytes = frame.len() + UDP_BYTES;
        let plain = source == path.source
            && remote.port() != 0
            && socket.sends_plainly
            && socket.bound.is_ipv4() == v4
            && frame.len() + headers_bytes <= path.mtu + LINK_BYTES
            && frame.headroom() >= headers_bytes
            && self.transmit.len() < self.limits.transmit_frames;
        if !plain {
            return Some(frame);
        }
        frame.retreat(headers_bytes);
        let bytes = arena.bytes_mut(&mut frame);
        let ports = (socket.local.port(), remote.port());
        let written = if v4 {
            template.emit_v4(bytes, ports, udp_bytes as u16, self.transmit_checksum)
        } else {
            template.emit_v6(bytes, ports, udp_bytes as u16, self.transmit_checksum)
        };
        debug_assert!(written.is_some(), "the headroom was checked");
        frame.checksum = if self.transmit_checksum {
            Checksum::Partial { start: (headers_bytes - UDP_BYTES) as u16, offset: 6 }
        } else {
            Checksum::Unknown
        };
        self.counters.transmitted += 1;
        self.transmit.push_back(frame);
        None
    }
}

impl Template {
    #[inline(always)]
    fn emit_v4(&self, frame: &mut [u8], ports: (u16, u16), udp: u16, partial: bool) -> Option<()> {
        let (head, payload) = frame.split_first_chunk_mut::<HEADERS_V4_BYTES>()?;
        let total_bytes = udp + Ipv4Header::BYTES as u16;
        head[..34].copy_from_slice(&self.bytes[..34]);
        put_u16(head, 16, total_bytes);
        put_u16(head, 24, self.header.with_u16(total_bytes).checksum());
        put_u16(head, 34, ports.0);
        put_u16(head, 36, ports.1);
        put_u16(head, 38, udp);
        put_u16(head, 40, self.udp_checksum(ports, udp, partial, payload));
        Some(())
    }

    #[inline(always)]
    fn emit_v6(&self, frame: &mut [u8], ports: (u16, u16), udp: u16, partial: bool) -> Option<()> {
        let (head, payload) = frame.split_first_chunk_mut::<HEADERS_V6_BYTES>()?;
        head[..54].copy_from_slice(&self.bytes);
        put_u16(head, 18, udp);
        put_u16(head, 54, ports.0);
        put_u16(head, 56, ports.1);
        put_u16(head, 58, udp);
        put_u16(head, 60, self.udp_checksum(ports, udp, partial, payload));
        Some(())
    }

    /// The field as it is sent: of everything, or of the pseudo-header alone
    /// when the port completes it.
    #[inline(always)]
    fn udp_checksum(&self, ports: (u16, u16), udp: u16, partial: bool, payload: &[u8]) -> u16 {
        let pseudo = self.pseudo.with_u16(udp);
        if partial {
            return pseudo.fold();
        }
        let header = u32::from(ports.0) << 16 | u32::from(ports.1);
        pseudo.with_u32(header).with_u16(udp).with(payload).udp_checksum()
    }
}
