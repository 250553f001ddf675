//! The short way for the packet that there are most of: a whole UDP datagram
//! on plain Ethernet, in and out, without options, tags or fragments.
//!
//! It only ever says "this is plain and right, and goes there" or "look
//! closer". It drops nothing and answers nothing: whatever is not plain goes
//! through the parsers, which find the reason. So it could be left out without
//! a change in what the stack does.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_memory::{Arena, Checksum, Frame, PackedChecksum};
use tidegate_wire::{
    EtherType, EthernetHeader, Ipv4Header, Ipv6Header, MacAddr, Medium, Protocol, Sum, UdpHeader,
    checksum,
};

use crate::address::can_be_source_v4;
use crate::ipv6::can_be_source_v6;
use crate::udp::{UdpId, Waiting, array_at};
use crate::{Event, Stack};

const LINK_BYTES: usize = EthernetHeader::BYTES;
const UDP_BYTES: usize = UdpHeader::BYTES;
/// Everything in front of the payload.
pub(crate) const HEADERS_V4_BYTES: usize = LINK_BYTES + Ipv4Header::BYTES + UDP_BYTES;
pub(crate) const HEADERS_V6_BYTES: usize = LINK_BYTES + Ipv6Header::BYTES + UDP_BYTES;

/// What the first eight bytes of a plain frame are: our hardware address and
/// the beginning of the sender's, of which only the group bit matters.
#[derive(Clone, Copy)]
pub(crate) struct PlainLink(u64);

impl PlainLink {
    const COMPARED: u64 = u64::from_ne_bytes([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0]);

    pub(crate) fn new(medium: Medium, mac: MacAddr, vlan: Option<u16>) -> Self {
        match (medium, vlan) {
            (Medium::Ethernet, None) => {
                let [a, b, c, d, e, f] = mac.0;
                Self(u64::from_ne_bytes([a, b, c, d, e, f, 0, 0]))
            }
            // No frame is like this.
            _ => Self(u64::MAX),
        }
    }

    /// Whether there are plain frames on the interface.
    pub(crate) fn is_plain(self) -> bool {
        self.0 != u64::MAX
    }

    #[inline(always)]
    fn is_front_of(self, head: &[u8; HEADERS_V4_BYTES]) -> bool {
        u64::from_ne_bytes(array_at(head, 0)) & Self::COMPARED == self.0
    }
}

/// Whether the four bytes at `at` are `expected`, where `compared` says so.
#[inline(always)]
fn is_at<const N: usize>(bytes: &[u8; N], at: usize, compared: [u8; 4], expected: [u8; 4]) -> bool {
    u32::from_ne_bytes(array_at(bytes, at)) & u32::from_ne_bytes(compared)
        == u32::from_ne_bytes(expected)
}

#[inline(always)]
fn u16_at<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes(array_at(bytes, at))
}

#[inline(always)]
fn put<const N: usize, const M: usize>(bytes: &mut [u8; N], at: usize, value: [u8; M]) {
    bytes[at..at + M].copy_from_slice(&value);
}

/// The sum of 20 bytes from `at`.
#[inline(always)]
fn header_sum<const N: usize>(head: &[u8; N], at: usize) -> Sum {
    Sum::of_words([
        u64::from_ne_bytes(array_at(head, at)),
        u64::from_ne_bytes(array_at(head, at + 8)),
    ])
    .with_u32(u32::from_be_bytes(array_at(head, at + 16)))
}

impl Stack {
    /// Takes a frame, if it is plain. Gives it back otherwise.
    #[inline(always)]
    pub(crate) fn ingest_plain(&mut self, frame: Frame, arena: &Arena) -> Option<Frame> {
        let bytes = arena.bytes(&frame);
        let Some(head) = bytes.first_chunk::<HEADERS_V4_BYTES>() else { return Some(frame) };
        if !self.plain_link.is_front_of(head) {
            return Some(frame);
        }
        // EtherType, version and header length.
        if is_at(head, 12, [0xff, 0xff, 0xff, 0], [0x08, 0x00, 0x45, 0]) {
            self.ingest_plain_v4(frame, head, bytes)
        } else if is_at(head, 12, [0xff, 0xff, 0xf0, 0], [0x86, 0xdd, 0x60, 0]) {
            self.ingest_plain_v6(frame, bytes)
        } else {
            Some(frame)
        }
    }

    #[inline(always)]
    fn ingest_plain_v4(
        &mut self,
        mut frame: Frame,
        head: &[u8; HEADERS_V4_BYTES],
        bytes: &[u8],
    ) -> Option<Frame> {
        let (total_bytes, udp_bytes) =
            (usize::from(u16_at(head, 16)), usize::from(u16_at(head, 38)));
        let (source, destination) = (array_at::<4, 42>(head, 26), array_at::<4, 42>(head, 30));
        let (from_port, to_port) = (array_at(head, 34), array_at(head, 36));
        // Not a fragment, UDP, lengths that agree, addresses that can be.
        let plain = is_at(head, 20, [0x3f, 0xff, 0, 0xff], [0, 0, 0, Protocol::UDP.0])
            && udp_bytes >= UDP_BYTES
            && total_bytes == udp_bytes + Ipv4Header::BYTES
            && bytes.len() >= total_bytes + LINK_BYTES
            && self.addresses.is_ours_v4(Ipv4Addr::from(destination))
            && can_be_source_v4(Ipv4Addr::from(source))
            && self.addresses.is_other_v4(Ipv4Addr::from(source))
            && header_sum(head, 14).is_valid();
        if !plain {
            return Some(frame);
        }
        if frame.checksum() == Checksum::Unknown && u16_at(head, 40) != 0 {
            let pseudo = checksum::pseudo_header_v4(
                source.into(),
                destination.into(),
                Protocol::UDP,
                udp_bytes as u16,
            );
            let Some(datagram) =
                bytes.get(LINK_BYTES + Ipv4Header::BYTES..LINK_BYTES + total_bytes)
            else {
                return Some(frame);
            };
            if !pseudo.with(datagram).is_valid() {
                return Some(frame);
            }
        }
        let Some(index) = self.udp.find_plain_v4((destination, to_port), (source, from_port))
        else {
            return Some(frame);
        };
        let payload_bytes = udp_bytes - UDP_BYTES;
        if !self.has_room(index, payload_bytes) {
            return Some(frame);
        }
        frame.advance(HEADERS_V4_BYTES);
        frame.truncate(payload_bytes);
        self.enqueue_plain(index, Waiting::V4(frame), payload_bytes);
        None
    }

    #[inline(always)]
    fn ingest_plain_v6(&mut self, mut frame: Frame, bytes: &[u8]) -> Option<Frame> {
        let Some(head) = bytes.first_chunk::<HEADERS_V6_BYTES>() else { return Some(frame) };
        let udp_bytes = usize::from(u16_at(head, 58));
        let (source, destination) = (array_at::<16, 62>(head, 22), array_at::<16, 62>(head, 38));
        let (from_port, to_port) = (array_at(head, 54), array_at(head, 56));
        let from = Ipv6Addr::from(source);
        let start = LINK_BYTES + Ipv6Header::BYTES;
        let plain = head[20] == Protocol::UDP.0
            && udp_bytes >= UDP_BYTES
            && head[18..20] == head[58..60]
            && bytes.len() >= start + udp_bytes
            && self.addresses.is_ours_v6(Ipv6Addr::from(destination))
            && can_be_source_v6(from)
            && !from.is_unspecified()
            && self.addresses.is_other_v6(from);
        if !plain {
            return Some(frame);
        }
        if frame.checksum() == Checksum::Unknown {
            let Some(datagram) = bytes.get(start..start + udp_bytes) else { return Some(frame) };
            let pseudo = checksum::pseudo_header_v6(
                from,
                destination.into(),
                Protocol::UDP,
                udp_bytes as u32,
            );
            if u16_at(head, 60) == 0 || !pseudo.with(datagram).is_valid() {
                return Some(frame);
            }
        }
        let Some(index) = self.udp.find_plain_v6((destination, to_port), (source, from_port))
        else {
            return Some(frame);
        };
        let payload_bytes = udp_bytes - UDP_BYTES;
        if !self.has_room(index, payload_bytes) {
            return Some(frame);
        }
        frame.advance(HEADERS_V6_BYTES);
        frame.truncate(payload_bytes);
        self.enqueue_plain(index, Waiting::V6(frame), payload_bytes);
        None
    }

    #[inline(always)]
    fn has_room(&mut self, index: u32, payload_bytes: usize) -> bool {
        self.udp.at(index).is_some_and(|(_, socket)| socket.has_room(payload_bytes).is_ok())
    }

    #[inline(always)]
    fn enqueue_plain(&mut self, index: u32, datagram: Waiting, payload_bytes: usize) {
        let Some((id, socket)) = self.udp.at(index) else { return };
        self.counters.held += 1;
        if socket.push_plain(datagram, payload_bytes) && !socket.readable_told {
            socket.readable_told = true;
            self.events.push_back(Event::Readable(id));
        }
    }
}

/// Ready-made headers of a datagram on a path: all but lengths, ports and
/// checksums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Template {
    bytes: [u8; LINK_BYTES + Ipv6Header::BYTES],
    /// The sum of the IPv4 header, folded, as it stands in memory.
    header: u16,
    /// The sum of the pseudo-header, the same way.
    pseudo: u16,
}

/// The one's complement sum of two numbers.
#[inline(always)]
fn add(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u16::from(carry)
}

impl Stack {
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
        let (header, pseudo) = (header.fold().to_be(), pseudo.fold().to_be());
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
        frame: Frame,
    ) -> Option<Frame> {
        let Some(socket) = self.udp.get(id) else { return Some(frame) };
        let Some(remote) = to.or(socket.remote) else { return Some(frame) };
        let from = match from {
            None if !socket.local.ip().is_unspecified() => Some(socket.local.ip()),
            from => from,
        };
        if !socket.sends_plainly || socket.bound.is_ipv4() != remote.is_ipv4() {
            return Some(frame);
        }
        let ports = (socket.local.port(), remote.port());
        match (remote.ip(), from) {
            (IpAddr::V4(remote), Some(IpAddr::V4(from))) => {
                self.send_plain_v4(now_ns, arena, ports, remote, Some(from), frame)
            }
            (IpAddr::V4(remote), None) => {
                self.send_plain_v4(now_ns, arena, ports, remote, None, frame)
            }
            (IpAddr::V6(remote), Some(IpAddr::V6(from))) => {
                self.send_plain_v6(now_ns, arena, ports, remote, Some(from), frame)
            }
            (IpAddr::V6(remote), None) => {
                self.send_plain_v6(now_ns, arena, ports, remote, None, frame)
            }
            _ => Some(frame),
        }
    }

    /// Sends a frame that holds a payload from `from`, or from the best of our
    /// addresses, if that is plain. Gives it back otherwise.
    #[inline(always)]
    pub(crate) fn send_plain_v4(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        ports: (u16, u16),
        remote: Ipv4Addr,
        from: Option<Ipv4Addr>,
        mut frame: Frame,
    ) -> Option<Frame> {
        let Some(path) = self.paths.get(now_ns, remote.into()) else { return Some(frame) };
        let template = &path.template;
        let plain = frame.len() + HEADERS_V4_BYTES <= path.plain_bytes
            && from.is_none_or(|from| from == template.source_v4())
            && ports.1 != 0
            && self.transmit.len() < self.limits.transmit_frames;
        if !plain {
            return Some(frame);
        }
        let payload_bytes = frame.len();
        let Some((head, room)) = arena.headers_mut(&mut frame) else { return Some(frame) };
        let checksum =
            template.emit_v4(head, &room[..payload_bytes], ports, self.transmit_checksum);
        frame.retreat(HEADERS_V4_BYTES);
        frame.set_packed_checksum(checksum);
        self.counters.transmitted += 1;
        self.transmit.push_back(frame);
        None
    }

    /// As [`Stack::send_plain_v4`].
    #[inline(always)]
    pub(crate) fn send_plain_v6(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        ports: (u16, u16),
        remote: Ipv6Addr,
        from: Option<Ipv6Addr>,
        mut frame: Frame,
    ) -> Option<Frame> {
        let Some(path) = self.paths.get(now_ns, remote.into()) else { return Some(frame) };
        let template = &path.template;
        let plain = frame.len() + HEADERS_V6_BYTES <= path.plain_bytes
            && from.is_none_or(|from| from == template.source_v6())
            && ports.1 != 0
            && self.transmit.len() < self.limits.transmit_frames;
        if !plain {
            return Some(frame);
        }
        let payload_bytes = frame.len();
        let Some((head, room)) = arena.headers_mut(&mut frame) else { return Some(frame) };
        let checksum =
            template.emit_v6(head, &room[..payload_bytes], ports, self.transmit_checksum);
        frame.retreat(HEADERS_V6_BYTES);
        frame.set_packed_checksum(checksum);
        self.counters.transmitted += 1;
        self.transmit.push_back(frame);
        None
    }
}

impl Template {
    /// For a path that has none.
    pub(crate) const NONE: Template =
        Template { bytes: [0; LINK_BYTES + Ipv6Header::BYTES], header: 0, pseudo: 0 };

    #[inline(always)]
    fn source_v4(&self) -> Ipv4Addr {
        array_at::<4, 54>(&self.bytes, LINK_BYTES + 12).into()
    }

    #[inline(always)]
    fn source_v6(&self) -> Ipv6Addr {
        array_at::<16, 54>(&self.bytes, LINK_BYTES + 8).into()
    }

    /// Writes the headers in front of a payload. Returns what is to be noted
    /// about the checksum: of everything, or of the pseudo-header alone when
    /// the port completes it.
    #[inline(always)]
    fn emit_v4(
        &self,
        head: &mut [u8; HEADERS_V4_BYTES],
        payload: &[u8],
        ports: (u16, u16),
        partial: bool,
    ) -> PackedChecksum {
        const PARTIAL: PackedChecksum =
            PackedChecksum::new(Checksum::Partial { start: 34, offset: 6 });
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        let total_bytes = udp_bytes + Ipv4Header::BYTES as u16;
        put(head, 0, array_at::<34, 54>(&self.bytes, 0));
        put(head, 16, total_bytes.to_be_bytes());
        put(head, 24, (!add(self.header, total_bytes.to_be())).to_ne_bytes());
        put(head, 34, ports.0.to_be_bytes());
        put(head, 36, ports.1.to_be_bytes());
        put(head, 38, udp_bytes.to_be_bytes());
        put(head, 40, self.udp_checksum(ports, payload, partial));
        if partial { PARTIAL } else { PackedChecksum::new(Checksum::Unknown) }
    }

    /// As [`Template::emit_v4`].
    #[inline(always)]
    fn emit_v6(
        &self,
        head: &mut [u8; HEADERS_V6_BYTES],
        payload: &[u8],
        ports: (u16, u16),
        partial: bool,
    ) -> PackedChecksum {
        const PARTIAL: PackedChecksum =
            PackedChecksum::new(Checksum::Partial { start: 54, offset: 6 });
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        put(head, 0, self.bytes);
        put(head, 18, udp_bytes.to_be_bytes());
        put(head, 54, ports.0.to_be_bytes());
        put(head, 56, ports.1.to_be_bytes());
        put(head, 58, udp_bytes.to_be_bytes());
        put(head, 60, self.udp_checksum(ports, payload, partial));
        if partial { PARTIAL } else { PackedChecksum::new(Checksum::Unknown) }
    }

    /// The field as it is sent.
    #[inline(always)]
    fn udp_checksum(&self, ports: (u16, u16), payload: &[u8], partial: bool) -> [u8; 2] {
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        let pseudo = add(self.pseudo, udp_bytes.to_be());
        if partial {
            return pseudo.to_ne_bytes();
        }
        let header = u32::from(ports.0) << 16 | u32::from(ports.1);
        Sum::of_words([u64::from(pseudo)])
            .with_u32(header)
            .with_u16(udp_bytes)
            .with(payload)
            .udp_checksum()
            .to_be_bytes()
    }
}
