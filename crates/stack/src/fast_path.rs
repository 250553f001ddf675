//! The short way for the packet that there are most of: a whole UDP datagram
//! on plain Ethernet, in and out, without options, tags or fragments.
//!
//! It only ever says "this is plain and right, and goes there" or "look
//! closer". It drops nothing and answers nothing: whatever is not plain goes
//! through the parsers, which find the reason. So it could be left out without
//! a change in what the stack does.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_memory::fifo::Run;
use tidegate_memory::{Arena, Checksum, Fifo, Frame, PackedChecksum};
use tidegate_wire::{
    EtherType, EthernetHeader, Ipv4Header, Ipv6Header, MacAddr, Medium, Protocol, Sum, UdpHeader,
    checksum,
};

use crate::Stack;
use crate::address::Addresses;
use crate::udp::{Lookup, UdpId, Waiting, array_at};

const LINK_BYTES: usize = EthernetHeader::BYTES;
const UDP_BYTES: usize = UdpHeader::BYTES;
/// Version and header length of IPv4 without options.
const PLAIN_V4: u8 = 0x45;
/// Everything in front of the payload.
pub(crate) const HEADERS_V4_BYTES: usize = LINK_BYTES + Ipv4Header::BYTES + UDP_BYTES;
pub(crate) const HEADERS_V6_BYTES: usize = LINK_BYTES + Ipv6Header::BYTES + UDP_BYTES;

/// What the first eight bytes of a plain frame are: our hardware address and
/// the beginning of the sender's, of which only the group bit matters. That is
/// the lowest bit of its first byte, so what does not matter is shifted out.
#[derive(Clone, Copy)]
pub(crate) struct PlainLink(u64);

impl PlainLink {
    const IGNORED_BITS: u32 = 15;
    /// No frame is like this.
    const NONE: Self = Self(u64::MAX);

    pub(crate) fn new(medium: Medium, mac: MacAddr, vlan: Option<u16>) -> Self {
        match (medium, vlan) {
            (Medium::Ethernet, None) => {
                let [a, b, c, d, e, f] = mac.0;
                Self(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]) << Self::IGNORED_BITS)
            }
            _ => Self::NONE,
        }
    }

    /// Whether there are plain frames on the interface.
    pub(crate) fn is_plain(self) -> bool {
        self.0 != Self::NONE.0
    }

    #[inline(always)]
    pub(crate) fn is_front_of(self, head: &[u8; HEADERS_V4_BYTES]) -> bool {
        u64::from_le_bytes(array_at(head, 0)) << Self::IGNORED_BITS == self.0
    }
}

#[inline(always)]
pub(crate) fn put<const N: usize, const M: usize>(bytes: &mut [u8; N], at: usize, value: [u8; M]) {
    bytes[at..at + M].copy_from_slice(&value);
}

// The sums of headers are never of nothing but zeros: there is the version, and
// the protocol.

/// The sum of an IPv4 header of 20 bytes behind a link header.
#[inline(always)]
pub(crate) fn header_sum(head: &[u8; HEADERS_V4_BYTES]) -> Sum {
    let words = [u64::from_ne_bytes(array_at(head, 14)), u64::from_ne_bytes(array_at(head, 22))];
    let last = u32::from_ne_bytes(array_at(head, 30));
    Sum::of_words([words[0], words[1], u64::from(last)])
}

/// A sum in as few bits as it needs, so that adding a length to it cannot
/// carry.
#[inline(always)]
fn folded(sum: Sum) -> Sum {
    Sum::ZERO.with_u16(sum.fold())
}

/// Whether a packet can come from an IPv4 address. Says no to some that need a
/// closer look.
#[inline(always)]
pub(crate) fn is_plain_source_v4(source: [u8; 4]) -> bool {
    // 0/8 and 127/8 never leave a host; from 224/4 on there are groups, the
    // broadcast address, and addresses that nobody has yet.
    source[0].wrapping_sub(1) < 223 && source[0] != 127
}

/// Whether a packet can come from an IPv6 address. Says no to some that need a
/// closer look.
#[inline(always)]
pub(crate) fn is_plain_source_v6(source: [u8; 16]) -> bool {
    // The unspecified, the loopback and the IPv4-mapped addresses are in ::/64.
    source[0] != 0xff && source[..8] != [0; 8]
}

/// What is plain in one family of addresses.
trait Plain {
    /// Everything in front of the payload.
    const HEADERS_BYTES: usize;
    /// Addresses and ports as they stand in headers, the sender's first.
    type Ends: Copy + PartialEq;

    /// Between which ends a frame goes, if it is a datagram. `None` for a frame
    /// that is too short.
    fn ends(bytes: &[u8]) -> Option<Self::Ends>;

    /// The sum of the pseudo-header without the length.
    fn pseudo_sum(ends: &Self::Ends) -> Sum;

    /// Whether a frame is plain and right. `pseudo` is what
    /// [`Plain::pseudo_sum`] gives for its ends.
    fn is_right(link: PlainLink, pseudo: Sum, bytes: &[u8], unchecked: bool) -> bool;

    /// The place of the socket for a datagram, if its addresses are plain and
    /// its sender can be answered.
    fn find(addresses: &Addresses, lookup: &Lookup, ends: &Self::Ends) -> Option<u32>;

    /// A payload with its headers in front.
    fn waiting(frame: Frame) -> Waiting;
}

enum V4 {}

impl Plain for V4 {
    const HEADERS_BYTES: usize = HEADERS_V4_BYTES;
    /// Both addresses, and both ports.
    type Ends = (u64, u32);

    #[inline(always)]
    fn ends(bytes: &[u8]) -> Option<Self::Ends> {
        let head = bytes.first_chunk::<HEADERS_V4_BYTES>()?;
        let addresses = u64::from_ne_bytes(array_at(head, 26));
        Some((addresses, u32::from_ne_bytes(array_at(head, 34))))
    }

    #[inline(always)]
    fn pseudo_sum(ends: &Self::Ends) -> Sum {
        folded(Sum::of_words([ends.0]).with_u16(Protocol::UDP.0.into()))
    }

    #[inline(always)]
    fn is_right(link: PlainLink, pseudo: Sum, bytes: &[u8], unchecked: bool) -> bool {
        let Some(head) = bytes.first_chunk::<HEADERS_V4_BYTES>() else { return false };
        let packet_bytes = ((bytes.len() - LINK_BYTES) as u16).to_be_bytes();
        let udp_bytes = (bytes.len() - LINK_BYTES - Ipv4Header::BYTES) as u16;
        // Of the four bytes from the fragment's on, all but the time to live.
        let [a, b, _, protocol] = array_at(head, 20);
        let whole_udp = [a & 0x3f, b, 0, protocol] == [0, 0, 0, Protocol::UDP.0];
        // EtherType, version and header length; not a fragment, UDP; lengths.
        let plain = link.is_front_of(head)
            && array_at(head, 12) == EtherType::IPV4.0.to_be_bytes()
            && head[14] == PLAIN_V4
            && whole_udp
            && array_at(head, 16) == packet_bytes
            && array_at(head, 38) == udp_bytes.to_be_bytes();
        let filled = array_at(head, 40) != [0; 2];
        plain
            && header_sum(head).adds_up()
            && !(unchecked && filled && !pseudo.with_u16(udp_bytes).with(&bytes[34..]).adds_up())
    }

    #[inline(always)]
    fn find(addresses: &Addresses, lookup: &Lookup, ends: &Self::Ends) -> Option<u32> {
        let (both, ports) = (ends.0.to_ne_bytes(), ends.1.to_ne_bytes());
        let (from, to) = (array_at(&both, 0), array_at(&both, 4));
        let (from, to) = ((from, array_at(&ports, 0)), (to, array_at(&ports, 2)));
        let plain =
            is_plain_source_v4(from.0) && from.1 != [0; 2] && addresses.is_for_us_v4(from.0, to.0);
        plain.then(|| lookup.find_plain_v4(to, from))
    }

    #[inline(always)]
    fn waiting(frame: Frame) -> Waiting {
        Waiting::V4(frame)
    }
}

enum V6 {}

impl Plain for V6 {
    const HEADERS_BYTES: usize = HEADERS_V6_BYTES;
    /// Both addresses, and both ports.
    type Ends = (u128, u128, u32);

    #[inline(always)]
    fn ends(bytes: &[u8]) -> Option<Self::Ends> {
        let head = bytes.first_chunk::<HEADERS_V6_BYTES>()?;
        let address = |at| u128::from_ne_bytes(array_at(head, at));
        Some((address(22), address(38), u32::from_ne_bytes(array_at(head, 54))))
    }

    #[inline(always)]
    fn pseudo_sum(ends: &Self::Ends) -> Sum {
        let sum = Sum::of(&ends.0.to_ne_bytes()).with(&ends.1.to_ne_bytes());
        folded(sum.with_u16(Protocol::UDP.0.into()))
    }

    #[inline(always)]
    fn is_right(link: PlainLink, pseudo: Sum, bytes: &[u8], unchecked: bool) -> bool {
        let Some(head) = bytes.first_chunk::<HEADERS_V6_BYTES>() else { return false };
        let Some(front) = bytes.first_chunk() else { return false };
        let udp_bytes = (bytes.len() - LINK_BYTES - Ipv6Header::BYTES) as u16;
        // EtherType and version; UDP; lengths.
        let plain = link.is_front_of(front)
            && array_at(head, 12) == EtherType::IPV6.0.to_be_bytes()
            && head[14] >> 4 == 6
            && head[20] == Protocol::UDP.0
            && array_at(head, 18) == udp_bytes.to_be_bytes()
            && array_at(head, 58) == udp_bytes.to_be_bytes();
        let filled = array_at(head, 60) != [0; 2];
        plain && (!unchecked || filled && pseudo.with_u16(udp_bytes).with(&bytes[54..]).adds_up())
    }

    #[inline(always)]
    fn find(addresses: &Addresses, lookup: &Lookup, ends: &Self::Ends) -> Option<u32> {
        let (from, to, ports) = (ends.0.to_ne_bytes(), ends.1.to_ne_bytes(), ends.2.to_ne_bytes());
        let (from, to) = ((from, array_at(&ports, 0)), (to, array_at(&ports, 2)));
        let plain = is_plain_source_v6(from.0)
            && from.1 != [0; 2]
            && addresses.is_ours_v6(Ipv6Addr::from(to.0))
            && addresses.is_other_v6(Ipv6Addr::from(from.0));
        plain.then(|| lookup.find_plain_v6(to, from))
    }

    #[inline(always)]
    fn waiting(frame: Frame) -> Waiting {
        Waiting::V6(frame)
    }
}

impl Stack {
    /// Takes the frames at the front of a burst that are plain.
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

    // Functions of their own: so that all they need finds a place in registers.
    #[inline(never)]
    fn ingest_plain_v4(&mut self, burst: &mut Fifo<Frame>, arena: &Arena) {
        self.ingest_plain_of::<V4>(burst, arena);
    }

    #[inline(never)]
    fn ingest_plain_v6(&mut self, burst: &mut Fifo<Frame>, arena: &Arena) {
        self.ingest_plain_of::<V6>(burst, arena);
    }

    /// Takes the plain frames of one family, socket by socket: of one socket
    /// there are often many together, and often of one flow.
    #[inline(always)]
    fn ingest_plain_of<P: Plain>(&mut self, burst: &mut Fifo<Frame>, arena: &Arena) {
        let Self { plain_link, addresses, udp, counters, events, .. } = self;
        let link = *plain_link;
        let (sockets, lookup) = udp.parts();
        let mut run = burst.run();
        // Whose the next frame is, if it is a datagram and right.
        let next = |run: &Run<'_, Frame>| {
            let ends = P::ends(arena.bytes(run.first()?))?;
            P::find(addresses, lookup, &ends).map(|index| (index, ends))
        };
        let mut following = next(&run);
        while let Some((index, mut ends)) = following {
            let Some((id, socket)) = sockets.at(index) else { return };
            let (before, was_empty) = (run.len(), socket.is_empty());
            let mut queue = socket.fill(before, arena.frame_bytes(), &mut counters.held);
            loop {
                let before = run.len();
                let pseudo = P::pseudo_sum(&ends);
                queue.take_while(&mut run, P::HEADERS_BYTES, |frame| {
                    take_plain::<P>(link, arena, (ends, pseudo), frame)
                });
                following = if run.len() < before { next(&run) } else { None };
                match following {
                    Some((other, between)) if other == index => ends = between,
                    _ => break,
                }
            }
            drop(queue);
            if was_empty && run.len() < before {
                socket.tell_readable(id, events);
            }
        }
    }

    /// Takes a frame, if it is plain but for something behind its packet. Gives
    /// it back otherwise.
    pub(crate) fn ingest_padded(&mut self, mut frame: Frame, arena: &Arena) -> Option<Frame> {
        let (whole, bytes) = (frame.len(), arena.bytes(&frame));
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
            // Whoever looks closer sees it all.
            arena.set_len(&mut frame, whole);
            frame
        })
    }

    /// Takes a frame, if it is plain and its socket has room. Gives it back
    /// otherwise.
    fn ingest_plain_one<P: Plain>(&mut self, mut frame: Frame, arena: &Arena) -> Option<Frame> {
        let (sockets, lookup) = self.udp.parts();
        let bytes = arena.bytes(&frame);
        let (link, unchecked) = (self.plain_link, frame.is_unchecked());
        let ends =
            P::ends(bytes).filter(|ends| P::is_right(link, P::pseudo_sum(ends), bytes, unchecked));
        let index = ends.and_then(|ends| P::find(&self.addresses, lookup, &ends));
        let Some((id, socket)) = index.and_then(|index| sockets.at(index)) else {
            return Some(frame);
        };
        if socket.has_room(frame.len() - P::HEADERS_BYTES).is_err() {
            return Some(frame);
        }
        frame.advance(P::HEADERS_BYTES);
        let len = frame.len();
        self.counters.held += 1;
        if socket.push_plain(P::waiting(frame), len) {
            socket.tell_readable(id, &mut self.events);
        }
        None
    }
}

/// Makes a datagram of a frame between these ends if it is plain and right.
/// Gives it back otherwise.
#[inline(always)]
fn take_plain<P: Plain>(
    link: PlainLink,
    arena: &Arena,
    (ends, pseudo): (P::Ends, Sum),
    mut frame: Frame,
) -> Result<Waiting, Frame> {
    let Some(data) = arena.get(&frame) else { return Err(frame) };
    if P::ends(data) != Some(ends) || !P::is_right(link, pseudo, data, frame.is_unchecked()) {
        return Err(frame);
    }
    frame.advance(P::HEADERS_BYTES);
    Ok(P::waiting(frame))
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

/// Source and destination port as they stand in a header.
#[derive(Clone, Copy)]
pub(crate) struct Ports(u32);

impl Ports {
    /// Those of a header that begins with these bytes.
    #[inline(always)]
    pub(crate) fn of(bytes: [u8; 4]) -> Self {
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

    /// For the way back.
    #[inline(always)]
    pub(crate) fn swapped(self) -> Self {
        Self(self.0.rotate_left(16))
    }
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
        if !socket.sends_plainly || socket.bound.is_ipv4() != remote.is_ipv4() {
            return Some(frame);
        }
        let ports = Ports::new(socket.local.port(), remote.port());
        let partial = self.transmit_checksum;
        let len = frame.len();
        let mut frame = frame;
        let sent = match (remote.ip(), from) {
            (IpAddr::V4(remote), None | Some(IpAddr::V4(_))) => {
                let template = self.paths.plain_v4(now_ns, remote, len);
                let template = template.filter(|t| from.is_none_or(|from| from == t.source_v4()));
                let Some(template) = template else { return Some(frame) };
                let Some((head, room)) = arena.headers_mut(&mut frame) else { return Some(frame) };
                let checksum = template.emit_v4(head, &room[..len], ports, partial);
                finish::<HEADERS_V4_BYTES>(arena, &mut frame, len, checksum)
            }
            (IpAddr::V6(remote), None | Some(IpAddr::V6(_))) => {
                let template = self.paths.plain_v6(now_ns, remote, len);
                let template = template.filter(|t| from.is_none_or(|from| from == t.source_v6()));
                let Some(template) = template else { return Some(frame) };
                let Some((head, room)) = arena.headers_mut(&mut frame) else { return Some(frame) };
                let checksum = template.emit_v6(head, &room[..len], ports, partial);
                finish::<HEADERS_V6_BYTES>(arena, &mut frame, len, checksum)
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

/// Makes the headers part of a frame of which `len` bytes are payload.
#[inline(always)]
pub(crate) fn finish<const HEADERS: usize>(
    arena: &Arena,
    frame: &mut Frame,
    len: usize,
    checksum: PackedChecksum,
) -> bool {
    frame.set_packed_checksum(checksum);
    arena.prepend(frame, HEADERS, len + HEADERS)
}

impl Template {
    /// For a path that has none.
    pub(crate) const NONE: Template =
        Template { bytes: [0; LINK_BYTES + Ipv6Header::BYTES], header: 0, pseudo: 0 };

    /// Copies the front of it, as far as it goes.
    #[inline(always)]
    pub(crate) fn copy_to<const N: usize>(&self, head: &mut [u8; N]) {
        head.copy_from_slice(&self.bytes[..N]);
    }

    /// Whether packets made with it come from this address.
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

    /// Writes the headers in front of a payload. Returns what is to be noted
    /// about the checksum: of everything, or of the pseudo-header alone when
    /// the port completes it.
    #[inline(always)]
    pub(crate) fn emit_v4(
        &self,
        head: &mut [u8; HEADERS_V4_BYTES],
        payload: &[u8],
        ports: Ports,
        partial: bool,
    ) -> PackedChecksum {
        const PARTIAL: PackedChecksum =
            PackedChecksum::new(Checksum::Partial { start: 34, offset: 6 });
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        let total_bytes = udp_bytes + Ipv4Header::BYTES as u16;
        head[..34].copy_from_slice(&self.bytes[..34]);
        put(head, 16, total_bytes.to_be_bytes());
        put(head, 24, (!add(self.header, total_bytes.to_be())).to_ne_bytes());
        put(head, 34, ports.0.to_ne_bytes());
        put(head, 38, udp_bytes.to_be_bytes());
        put(head, 40, self.udp_checksum(ports, payload, partial));
        if partial { PARTIAL } else { PackedChecksum::new(Checksum::Unknown) }
    }

    /// As [`Template::emit_v4`].
    #[inline(always)]
    pub(crate) fn emit_v6(
        &self,
        head: &mut [u8; HEADERS_V6_BYTES],
        payload: &[u8],
        ports: Ports,
        partial: bool,
    ) -> PackedChecksum {
        const PARTIAL: PackedChecksum =
            PackedChecksum::new(Checksum::Partial { start: 54, offset: 6 });
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        head[..54].copy_from_slice(&self.bytes);
        put(head, 18, udp_bytes.to_be_bytes());
        put(head, 54, ports.0.to_ne_bytes());
        put(head, 58, udp_bytes.to_be_bytes());
        put(head, 60, self.udp_checksum(ports, payload, partial));
        if partial { PARTIAL } else { PackedChecksum::new(Checksum::Unknown) }
    }

    /// The field as it is sent.
    #[inline(always)]
    fn udp_checksum(&self, ports: Ports, payload: &[u8], partial: bool) -> [u8; 2] {
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        let pseudo = add(self.pseudo, udp_bytes.to_be());
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
