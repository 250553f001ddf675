//! Fast path of the most frequent packets: plain UDP datagrams, received and sent.
//!
//! A packet is *plain* if it is a whole UDP datagram on untagged Ethernet, without IP options,
//! extension headers or fragments. The fast path only accepts plain and valid packets, or declines
//! them. It drops nothing and answers nothing: every declined packet goes through the parsers of
//! the slow path, which find the reason. Removing the fast path would not change the behaviour of
//! the stack.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_memory::fifo::PopBatch;
use tidegate_memory::{Arena, Checksum, Fifo, Frame, PackedChecksum};
use tidegate_wire::{
    EtherType, EthernetHeader, Ipv4Header, Ipv6Header, MacAddr, Medium, Protocol, Sum, UdpHeader,
    checksum,
};

use crate::Stack;
use crate::address::Addresses;
use crate::udp::{Lookup, QueuedDatagram, UdpId, array_at};

const LINK_BYTES: usize = EthernetHeader::BYTES;
const UDP_BYTES: usize = UdpHeader::BYTES;
/// First byte of an IPv4 header without options: version and header length.
const IPV4_VERSION_AND_IHL: u8 = 0x45;
/// Length of the headers in front of the payload: Ethernet, IPv4 and UDP.
pub(crate) const HEADERS_V4_BYTES: usize = LINK_BYTES + Ipv4Header::BYTES + UDP_BYTES;
pub(crate) const HEADERS_V6_BYTES: usize = LINK_BYTES + Ipv6Header::BYTES + UDP_BYTES;

/// Expected first eight bytes of a plain frame: the interface's hardware address and the start of
/// the sender's. Of the sender's address only the group bit matters, the lowest bit of its first
/// byte; a shift removes the other bits.
#[derive(Clone, Copy)]
pub(crate) struct PlainLink(u64);

impl PlainLink {
    const MASK_SHIFT_BITS: u32 = 15;
    /// Matches no frame.
    const NONE: Self = Self(u64::MAX);

    pub(crate) fn new(medium: Medium, mac: MacAddr, vlan: Option<u16>) -> Self {
        match (medium, vlan) {
            (Medium::Ethernet, None) => {
                let [a, b, c, d, e, f] = mac.0;
                Self(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]) << Self::MASK_SHIFT_BITS)
            }
            _ => Self::NONE,
        }
    }

    /// True if the interface can receive plain frames.
    pub(crate) fn has_plain_frames(self) -> bool {
        self.0 != Self::NONE.0
    }

    #[inline(always)]
    pub(crate) fn matches(self, head: &[u8; HEADERS_V4_BYTES]) -> bool {
        u64::from_le_bytes(array_at(head, 0)) << Self::MASK_SHIFT_BITS == self.0
    }
}

#[inline(always)]
pub(crate) fn write_at<const N: usize, const M: usize>(
    bytes: &mut [u8; N],
    at: usize,
    value: [u8; M],
) {
    bytes[at..at + M].copy_from_slice(&value);
}

// A sum over a header is never a sum of zeros only: version and protocol are not zero.

/// Checksum of an IPv4 header of 20 bytes behind an Ethernet header.
#[inline(always)]
pub(crate) fn ipv4_header_sum(head: &[u8; HEADERS_V4_BYTES]) -> Sum {
    let words = [u64::from_ne_bytes(array_at(head, 14)), u64::from_ne_bytes(array_at(head, 22))];
    let last = u32::from_ne_bytes(array_at(head, 30));
    Sum::of_words([words[0], words[1], u64::from(last)])
}

/// Folds a sum to 16 bits, so that adding a length to it cannot carry.
#[inline(always)]
fn folded(sum: Sum) -> Sum {
    Sum::ZERO.with_u16(sum.fold())
}

/// True if `source` is a possible IPv4 source address. False for a few valid addresses, which the
/// slow path checks.
#[inline(always)]
pub(crate) fn is_plain_source_v4(source: [u8; 4]) -> bool {
    // 0/8 and 127/8 never leave a host. From 224/4 on there are multicast groups, reserved
    // addresses and the broadcast address.
    source[0].wrapping_sub(1) < 223 && source[0] != 127
}

/// True if `source` is a possible IPv6 source address. False for a few valid addresses, which the
/// slow path checks.
#[inline(always)]
pub(crate) fn is_plain_source_v6(source: [u8; 16]) -> bool {
    // The unspecified, loopback and IPv4-mapped addresses are in ::/64.
    source[0] != 0xff && source[..8] != [0; 8]
}

/// Header layout and checks of plain packets of one address family.
trait PlainFamily {
    /// Length of the headers in front of the payload.
    const HEADERS_BYTES: usize;
    /// Addresses and ports in header byte order, the sender's first.
    type RawTuple: Copy + PartialEq;

    /// Reads addresses and ports of a frame, taken to be a plain datagram. `None` for a frame that
    /// is too short.
    fn raw_tuple(bytes: &[u8]) -> Option<Self::RawTuple>;

    /// Sum of the pseudo-header without the length.
    fn pseudo_sum(tuple: &Self::RawTuple) -> Sum;

    /// True if a frame is plain and valid. `pseudo` is the result of [`PlainFamily::pseudo_sum`]
    /// for the frame's addresses. `unchecked`: the device has not verified the UDP checksum.
    fn is_valid(link: PlainLink, pseudo: Sum, bytes: &[u8], unchecked: bool) -> bool;

    /// Index of the socket for a datagram, if the addresses are plain and the sender can be
    /// answered.
    fn find_socket(addresses: &Addresses, lookup: &Lookup, tuple: &Self::RawTuple) -> Option<u32>;

    /// Queue entry of a payload whose frame still has the headers in front.
    fn queued(frame: Frame) -> QueuedDatagram;
}

enum V4 {}

impl PlainFamily for V4 {
    const HEADERS_BYTES: usize = HEADERS_V4_BYTES;
    /// Both addresses, and both ports.
    type RawTuple = (u64, u32);

    #[inline(always)]
    fn raw_tuple(bytes: &[u8]) -> Option<Self::RawTuple> {
        let head = bytes.first_chunk::<HEADERS_V4_BYTES>()?;
        let addresses = u64::from_ne_bytes(array_at(head, 26));
        Some((addresses, u32::from_ne_bytes(array_at(head, 34))))
    }

    #[inline(always)]
    fn pseudo_sum(tuple: &Self::RawTuple) -> Sum {
        folded(Sum::of_words([tuple.0]).with_u16(Protocol::UDP.0.into()))
    }

    #[inline(always)]
    fn is_valid(link: PlainLink, pseudo: Sum, bytes: &[u8], unchecked: bool) -> bool {
        let Some(head) = bytes.first_chunk::<HEADERS_V4_BYTES>() else { return false };
        let total_length = ((bytes.len() - LINK_BYTES) as u16).to_be_bytes();
        let udp_bytes = (bytes.len() - LINK_BYTES - Ipv4Header::BYTES) as u16;
        // The four bytes from the fragment field on, except the time to live.
        let [a, b, _, protocol] = array_at(head, 20);
        let whole_udp = [a & 0x3f, b, 0, protocol] == [0, 0, 0, Protocol::UDP.0];
        // Checks EtherType, version and header length, "not a fragment", UDP, and both lengths.
        let plain = link.matches(head)
            && array_at(head, 12) == EtherType::IPV4.0.to_be_bytes()
            && head[14] == IPV4_VERSION_AND_IHL
            && whole_udp
            && array_at(head, 16) == total_length
            && array_at(head, 38) == udp_bytes.to_be_bytes();
        let has_checksum = array_at(head, 40) != [0; 2];
        plain
            && ipv4_header_sum(head).is_valid_nonzero()
            && !(unchecked
                && has_checksum
                && !pseudo.with_u16(udp_bytes).with(&bytes[34..]).is_valid_nonzero())
    }

    #[inline(always)]
    fn find_socket(addresses: &Addresses, lookup: &Lookup, tuple: &Self::RawTuple) -> Option<u32> {
        let (both, ports) = (tuple.0.to_ne_bytes(), tuple.1.to_ne_bytes());
        let (from, to) = (array_at(&both, 0), array_at(&both, 4));
        let (from, to) = ((from, array_at(&ports, 0)), (to, array_at(&ports, 2)));
        let plain =
            is_plain_source_v4(from.0) && from.1 != [0; 2] && addresses.is_for_us_v4(from.0, to.0);
        plain.then(|| lookup.find_plain_v4(to, from))
    }

    #[inline(always)]
    fn queued(frame: Frame) -> QueuedDatagram {
        QueuedDatagram::V4(frame)
    }
}

enum V6 {}

impl PlainFamily for V6 {
    const HEADERS_BYTES: usize = HEADERS_V6_BYTES;
    /// Both addresses, and both ports.
    type RawTuple = (u128, u128, u32);

    #[inline(always)]
    fn raw_tuple(bytes: &[u8]) -> Option<Self::RawTuple> {
        let head = bytes.first_chunk::<HEADERS_V6_BYTES>()?;
        let address = |at| u128::from_ne_bytes(array_at(head, at));
        Some((address(22), address(38), u32::from_ne_bytes(array_at(head, 54))))
    }

    #[inline(always)]
    fn pseudo_sum(tuple: &Self::RawTuple) -> Sum {
        let sum = Sum::of(&tuple.0.to_ne_bytes()).with(&tuple.1.to_ne_bytes());
        folded(sum.with_u16(Protocol::UDP.0.into()))
    }

    #[inline(always)]
    fn is_valid(link: PlainLink, pseudo: Sum, bytes: &[u8], unchecked: bool) -> bool {
        let Some(head) = bytes.first_chunk::<HEADERS_V6_BYTES>() else { return false };
        let Some(front) = bytes.first_chunk() else { return false };
        let udp_bytes = (bytes.len() - LINK_BYTES - Ipv6Header::BYTES) as u16;
        // Checks EtherType, version, UDP, and both lengths.
        let plain = link.matches(front)
            && array_at(head, 12) == EtherType::IPV6.0.to_be_bytes()
            && head[14] >> 4 == 6
            && head[20] == Protocol::UDP.0
            && array_at(head, 18) == udp_bytes.to_be_bytes()
            && array_at(head, 58) == udp_bytes.to_be_bytes();
        let has_checksum = array_at(head, 60) != [0; 2];
        plain
            && (!unchecked
                || has_checksum && pseudo.with_u16(udp_bytes).with(&bytes[54..]).is_valid_nonzero())
    }

    #[inline(always)]
    fn find_socket(addresses: &Addresses, lookup: &Lookup, tuple: &Self::RawTuple) -> Option<u32> {
        let (from, to, ports) =
            (tuple.0.to_ne_bytes(), tuple.1.to_ne_bytes(), tuple.2.to_ne_bytes());
        let (from, to) = ((from, array_at(&ports, 0)), (to, array_at(&ports, 2)));
        let plain = is_plain_source_v6(from.0)
            && from.1 != [0; 2]
            && addresses.is_local_v6(Ipv6Addr::from(to.0))
            && addresses.is_other_v6(Ipv6Addr::from(from.0));
        plain.then(|| lookup.find_plain_v6(to, from))
    }

    #[inline(always)]
    fn queued(frame: Frame) -> QueuedDatagram {
        QueuedDatagram::V6(frame)
    }
}

impl Stack {
    /// Accepts the plain frames at the front of a burst.
    #[inline]
    pub(crate) fn ingest_plain(&mut self, burst: &mut Fifo<Frame>, arena: &Arena) {
        loop {
            let before = burst.len();
            self.ingest_plain_v4(burst, arena);
            if burst.is_empty() {
                return;
            }
            self.ingest_plain_v6(burst, arena);
            if burst.len() == before || burst.is_empty() {
                return;
            }
        }
    }

    // Separate functions keep all live values in registers.
    #[inline(never)]
    fn ingest_plain_v4(&mut self, burst: &mut Fifo<Frame>, arena: &Arena) {
        self.ingest_plain_family::<V4>(burst, arena);
    }

    #[inline(never)]
    fn ingest_plain_v6(&mut self, burst: &mut Fifo<Frame>, arena: &Arena) {
        self.ingest_plain_family::<V6>(burst, arena);
    }

    /// Accepts the plain frames of one family at the front of a burst, socket by socket: bursts
    /// often hold many frames for one socket, and often of one flow.
    #[inline(always)]
    fn ingest_plain_family<P: PlainFamily>(&mut self, burst: &mut Fifo<Frame>, arena: &Arena) {
        let Self { plain_link, addresses, udp, counters, events, .. } = self;
        let link = *plain_link;
        let (sockets, lookup) = udp.sockets_and_lookup();
        let mut run = burst.pop_batch();
        // Socket index and addresses of the next frame, taken to be a plain datagram.
        let next = |run: &PopBatch<'_, Frame>| {
            let tuple = P::raw_tuple(arena.bytes(run.first()?))?;
            P::find_socket(addresses, lookup, &tuple).map(|index| (index, tuple))
        };
        let mut following = next(&run);
        while let Some((index, mut tuple)) = following {
            let Some((id, socket)) = sockets.by_index(index) else { return };
            let (before, was_empty) = (run.len(), socket.is_empty());
            let mut queue = socket.push_batch(before, arena.frame_bytes(), &mut counters.held);
            loop {
                let before = run.len();
                let pseudo = P::pseudo_sum(&tuple);
                queue.push_while(&mut run, P::HEADERS_BYTES, |frame| {
                    accept_plain::<P>(link, arena, (tuple, pseudo), frame)
                });
                following = if run.len() < before { next(&run) } else { None };
                match following {
                    Some((other, next_tuple)) if other == index => tuple = next_tuple,
                    _ => break,
                }
            }
            drop(queue);
            if was_empty && run.len() < before {
                socket.notify_readable(id, events);
            }
        }
    }

    /// Accepts a frame that is plain except for padding behind the packet. Otherwise returns the
    /// frame.
    pub(crate) fn ingest_padded(&mut self, mut frame: Frame, arena: &Arena) -> Option<Frame> {
        let (frame_bytes, bytes) = (frame.len(), arena.bytes(&frame));
        let Some(head) = bytes.first_chunk::<HEADERS_V4_BYTES>() else { return Some(frame) };
        let length = |at| usize::from(u16::from_be_bytes(array_at(head, at)));
        let is_v4 = head[14] >> 4 == 4;
        let packet_bytes = if is_v4 { length(16) } else { length(18) + Ipv6Header::BYTES };
        frame.truncate(LINK_BYTES + packet_bytes);
        let frame = if is_v4 {
            self.ingest_plain_one::<V4>(frame, arena)
        } else {
            self.ingest_plain_one::<V6>(frame, arena)
        };
        frame.map(|mut frame| {
            // The slow path examines the whole frame.
            arena.set_len(&mut frame, frame_bytes);
            frame
        })
    }

    /// Accepts a frame that is plain and whose socket has queue space. Otherwise returns the frame.
    fn ingest_plain_one<P: PlainFamily>(
        &mut self,
        mut frame: Frame,
        arena: &Arena,
    ) -> Option<Frame> {
        let (sockets, lookup) = self.udp.sockets_and_lookup();
        let bytes = arena.bytes(&frame);
        let (link, unchecked) = (self.plain_link, frame.is_unchecked());
        let tuple = P::raw_tuple(bytes)
            .filter(|ends| P::is_valid(link, P::pseudo_sum(ends), bytes, unchecked));
        let index = tuple.and_then(|ends| P::find_socket(&self.addresses, lookup, &ends));
        let Some((id, socket)) = index.and_then(|index| sockets.by_index(index)) else {
            return Some(frame);
        };
        if socket.check_space(frame.len() - P::HEADERS_BYTES).is_err() {
            return Some(frame);
        }
        frame.advance(P::HEADERS_BYTES);
        let len = frame.len();
        self.counters.held += 1;
        if socket.push_plain(P::queued(frame), len) {
            socket.notify_readable(id, &mut self.events);
        }
        None
    }
}

/// Turns a frame with the given addresses and ports into a queued datagram if the frame is plain
/// and valid. Otherwise returns the frame.
#[inline(always)]
fn accept_plain<P: PlainFamily>(
    link: PlainLink,
    arena: &Arena,
    (tuple, pseudo): (P::RawTuple, Sum),
    mut frame: Frame,
) -> Result<QueuedDatagram, Frame> {
    let Some(data) = arena.get(&frame) else { return Err(frame) };
    if P::raw_tuple(data) != Some(tuple) || !P::is_valid(link, pseudo, data, frame.is_unchecked()) {
        return Err(frame);
    }
    frame.advance(P::HEADERS_BYTES);
    Ok(P::queued(frame))
}

/// Precomputed headers of the datagrams on a path: complete except for lengths, ports and
/// checksums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeaderTemplate {
    bytes: [u8; LINK_BYTES + Ipv6Header::BYTES],
    /// Folded sum of the IPv4 header in header byte order.
    header_sum: u16,
    /// Folded sum of the pseudo-header in header byte order.
    pseudo_sum: u16,
}

/// Source and destination port in header byte order.
#[derive(Clone, Copy)]
pub(crate) struct PortPair(u32);

impl PortPair {
    /// Ports of a transport header that begins with `bytes`.
    #[inline(always)]
    pub(crate) fn from_header(bytes: [u8; 4]) -> Self {
        Self(u32::from_ne_bytes(bytes))
    }

    #[inline(always)]
    pub(crate) fn new(source: u16, destination: u16) -> Self {
        Self((u32::from(source) << 16 | u32::from(destination)).to_be())
    }

    #[inline(always)]
    pub(crate) fn source(self) -> u16 {
        (u32::from_be(self.0) >> 16) as u16
    }

    /// Source and destination exchanged, for replies.
    #[inline(always)]
    pub(crate) fn swapped(self) -> Self {
        Self(self.0.rotate_left(16))
    }
}

/// One's complement sum of two numbers (RFC 1071).
#[inline(always)]
fn ones_complement_add(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u16::from(carry)
}

impl Stack {
    /// Builds the headers of datagrams from `source` to `destination`, addressed to the hardware
    /// address `mac`.
    pub(crate) fn header_template(
        &self,
        mac: MacAddr,
        source: IpAddr,
        destination: IpAddr,
    ) -> Option<HeaderTemplate> {
        let mut bytes = [0; LINK_BYTES + Ipv6Header::BYTES];
        let (ethertype, pseudo) = match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut header = Ipv4Header::new(source, destination, Protocol::UDP, 0)?;
                header.ttl = self.hop_limit;
                header.emit(&mut bytes[LINK_BYTES..])?;
                // Clears total length and checksum.
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
        self.emit_link_header(mac, ethertype, &mut bytes)?;
        let header = Sum::of(&bytes[LINK_BYTES..LINK_BYTES + Ipv4Header::BYTES]);
        let (header_sum, pseudo_sum) = (header.fold().to_be(), pseudo.fold().to_be());
        Some(HeaderTemplate { bytes, header_sum, pseudo_sum })
    }

    /// Sends a frame that holds a UDP payload by the fast path. This requires a cached path with a
    /// header template, a payload that needs no fragments, and space in the transmit queue.
    /// Otherwise returns the frame.
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
        let Some(remote) = to.or(socket.remote).filter(|to| to.port() != 0) else {
            return Some(frame);
        };
        if self.transmit.len() >= self.limits.transmit_frames {
            return Some(frame);
        }
        let from = match from {
            None if !socket.local.ip().is_unspecified() => Some(socket.local.ip()),
            from => from,
        };
        if !socket.uses_default_headers || socket.bound.is_ipv4() != remote.is_ipv4() {
            return Some(frame);
        }
        let ports = PortPair::new(socket.local.port(), remote.port());
        let partial = self.transmit_checksum;
        let len = frame.len();
        let mut frame = frame;
        let sent = match (remote.ip(), from) {
            (IpAddr::V4(remote), None | Some(IpAddr::V4(_))) => {
                let template = self.paths.template_v4(now_ns, remote, len);
                let template = template.filter(|t| from.is_none_or(|from| from == t.source_v4()));
                let Some(template) = template else { return Some(frame) };
                let Some((head, payload)) = arena.headers_mut(&mut frame) else {
                    return Some(frame);
                };
                let checksum = template.emit_v4(head, &payload[..len], ports, partial);
                prepend_headers::<HEADERS_V4_BYTES>(arena, &mut frame, len, checksum)
            }
            (IpAddr::V6(remote), None | Some(IpAddr::V6(_))) => {
                let template = self.paths.template_v6(now_ns, remote, len);
                let template = template.filter(|t| from.is_none_or(|from| from == t.source_v6()));
                let Some(template) = template else { return Some(frame) };
                let Some((head, payload)) = arena.headers_mut(&mut frame) else {
                    return Some(frame);
                };
                let checksum = template.emit_v6(head, &payload[..len], ports, partial);
                prepend_headers::<HEADERS_V6_BYTES>(arena, &mut frame, len, checksum)
            }
            _ => false,
        };
        if !sent {
            return Some(frame);
        }
        self.counters.transmitted += 1;
        self.transmit.push_back(frame);
        None
    }
}

/// Extends a frame with `len` bytes of payload over the headers that were written in front.
#[inline(always)]
pub(crate) fn prepend_headers<const HEADERS: usize>(
    arena: &Arena,
    frame: &mut Frame,
    len: usize,
    checksum: PackedChecksum,
) -> bool {
    frame.set_packed_checksum(checksum);
    arena.prepend(frame, HEADERS, len + HEADERS)
}

impl HeaderTemplate {
    /// Template of a path without precomputed headers.
    pub(crate) const NONE: HeaderTemplate =
        HeaderTemplate { bytes: [0; LINK_BYTES + Ipv6Header::BYTES], header_sum: 0, pseudo_sum: 0 };

    /// Copies the first `N` bytes.
    #[inline(always)]
    pub(crate) fn copy_to<const N: usize>(&self, head: &mut [u8; N]) {
        head.copy_from_slice(&self.bytes[..N]);
    }

    /// True if packets made from the template have this source address.
    #[inline(always)]
    pub(crate) fn is_from(&self, source: IpAddr) -> bool {
        match source {
            IpAddr::V4(v4) => self.source_v4() == v4,
            IpAddr::V6(v6) => self.source_v6() == v6,
        }
    }

    #[inline(always)]
    pub(crate) fn source_v4(&self) -> Ipv4Addr {
        array_at::<4, 54>(&self.bytes, LINK_BYTES + 12).into()
    }

    #[inline(always)]
    pub(crate) fn source_v6(&self) -> Ipv6Addr {
        array_at::<16, 54>(&self.bytes, LINK_BYTES + 8).into()
    }

    /// Writes the headers of a datagram in front of its payload. Returns the checksum state of the
    /// frame: complete, or only the pseudo-header's sum when the device completes the checksum
    /// (`partial`).
    #[inline(always)]
    pub(crate) fn emit_v4(
        &self,
        head: &mut [u8; HEADERS_V4_BYTES],
        payload: &[u8],
        ports: PortPair,
        partial: bool,
    ) -> PackedChecksum {
        const PARTIAL: PackedChecksum =
            PackedChecksum::new(Checksum::Partial { start: 34, offset: 6 });
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        let total_bytes = udp_bytes + Ipv4Header::BYTES as u16;
        head[..34].copy_from_slice(&self.bytes[..34]);
        write_at(head, 16, total_bytes.to_be_bytes());
        write_at(
            head,
            24,
            (!ones_complement_add(self.header_sum, total_bytes.to_be())).to_ne_bytes(),
        );
        write_at(head, 34, ports.0.to_ne_bytes());
        write_at(head, 38, udp_bytes.to_be_bytes());
        write_at(head, 40, self.udp_checksum(ports, payload, partial));
        if partial { PARTIAL } else { PackedChecksum::new(Checksum::Unknown) }
    }

    /// IPv6 counterpart of [`HeaderTemplate::emit_v4`].
    #[inline(always)]
    pub(crate) fn emit_v6(
        &self,
        head: &mut [u8; HEADERS_V6_BYTES],
        payload: &[u8],
        ports: PortPair,
        partial: bool,
    ) -> PackedChecksum {
        const PARTIAL: PackedChecksum =
            PackedChecksum::new(Checksum::Partial { start: 54, offset: 6 });
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        head[..54].copy_from_slice(&self.bytes);
        write_at(head, 18, udp_bytes.to_be_bytes());
        write_at(head, 54, ports.0.to_ne_bytes());
        write_at(head, 58, udp_bytes.to_be_bytes());
        write_at(head, 60, self.udp_checksum(ports, payload, partial));
        if partial { PARTIAL } else { PackedChecksum::new(Checksum::Unknown) }
    }

    /// Value of the UDP checksum field.
    #[inline(always)]
    fn udp_checksum(&self, ports: PortPair, payload: &[u8], partial: bool) -> [u8; 2] {
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        let pseudo = ones_complement_add(self.pseudo_sum, udp_bytes.to_be());
        if partial {
            return pseudo.to_ne_bytes();
        }
        Sum::of_words([u64::from(pseudo), u64::from(ports.0)])
            .with_u16(udp_bytes)
            .with(payload)
            .udp_checksum()
            .to_be_bytes()
    }
}
