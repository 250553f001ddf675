//! The short way for the packet that there are most of: a whole UDP datagram
//! on plain Ethernet, in and out, without options, tags or fragments.
//!
//! It only ever says "this is plain and right, and goes there" or "look
//! closer". It drops nothing and answers nothing: whatever is not plain goes
//! through the parsers, which find the reason. So it could be left out without
//! a change in what the stack does.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_memory::fifo::Run;
use tidegate_memory::{Arena, Checksum, Frame, PackedChecksum};
use tidegate_wire::{
    EtherType, EthernetHeader, Ipv4Header, Ipv6Header, MacAddr, Medium, Protocol, Sum, UdpHeader,
    checksum,
};

use crate::Stack;
use crate::udp::{NO_SOCKET, UdpId, Waiting, array_at};

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
fn put<const N: usize, const M: usize>(bytes: &mut [u8; N], at: usize, value: [u8; M]) {
    bytes[at..at + M].copy_from_slice(&value);
}

/// The sum of an IPv4 header of 20 bytes behind a link header.
#[inline(always)]
fn header_sum(head: &[u8; HEADERS_V4_BYTES]) -> Sum {
    let words = [u64::from_ne_bytes(array_at(head, 14)), u64::from_ne_bytes(array_at(head, 22))];
    Sum::of_words(words).with_u32(u32::from_be_bytes(array_at(head, 30)))
}

/// The sum of a datagram with its pseudo-header, of which `bytes` is all but
/// protocol and length: the addresses stand right in front of the datagram.
#[inline(always)]
fn datagram_sum(bytes: &[u8], udp_bytes: [u8; 2]) -> Sum {
    let [high, low] = udp_bytes;
    let rest = u32::from_ne_bytes([0, Protocol::UDP.0, high, low]);
    Sum::of_words([rest.into()]).with(bytes)
}

/// Whether a packet can come from an IPv4 address. Says no to some that need a
/// closer look.
#[inline(always)]
fn is_plain_source_v4(source: [u8; 4]) -> bool {
    // 0/8 and 127/8 never leave a host; from 224/4 on there are groups, the
    // broadcast address, and addresses that nobody has yet.
    source[0].wrapping_sub(1) < 223 && source[0] != 127
}

/// Whether a packet can come from an IPv6 address. Says no to some that need a
/// closer look.
#[inline(always)]
fn is_plain_source_v6(source: [u8; 16]) -> bool {
    // The unspecified, the loopback and the IPv4-mapped addresses are in ::/64.
    source[0] != 0xff && source[..8] != [0; 8]
}

/// From where to where the last plain datagram went, and into which socket:
/// packets of one flow often come together. Good as long as nothing but plain
/// datagrams is taken.
struct Memo<const N: usize> {
    /// Addresses and ports, as they stand in headers.
    ends: [u8; N],
    socket: u32,
}

impl<const N: usize> Memo<N> {
    /// Nothing came yet. No packet comes from a broadcast or group address.
    const NONE: Self = Self { ends: [0xff; N], socket: NO_SOCKET };
}

impl Stack {
    /// Takes the frames at the front of a run that are plain.
    #[inline]
    pub(crate) fn ingest_plain(&mut self, run: &mut Run<'_, Frame>, arena: &Arena) {
        loop {
            let before = run.len();
            self.ingest_plain_v4(run, arena);
            self.ingest_plain_v6(run, arena);
            if run.len() == before {
                return;
            }
        }
    }

    // Functions of their own: so that all they need finds a place in registers.
    #[inline(never)]
    fn ingest_plain_v4(&mut self, run: &mut Run<'_, Frame>, arena: &Arena) {
        let mut memo = Memo::NONE;
        while let Some(mut frame) = run.next_if(|frame| self.is_plain_v4(frame, arena, &mut memo)) {
            frame.advance(HEADERS_V4_BYTES);
            let len = frame.len();
            self.enqueue_plain(memo.socket, Waiting::V4(frame), len);
        }
    }

    #[inline(never)]
    fn ingest_plain_v6(&mut self, run: &mut Run<'_, Frame>, arena: &Arena) {
        let mut memo = Memo::NONE;
        while let Some(mut frame) = run.next_if(|frame| self.is_plain_v6(frame, arena, &mut memo)) {
            frame.advance(HEADERS_V6_BYTES);
            let len = frame.len();
            self.enqueue_plain(memo.socket, Waiting::V6(frame), len);
        }
    }

    /// Takes a frame, if it is plain but for something behind its packet. Gives
    /// it back otherwise.
    pub(crate) fn ingest_padded(&mut self, mut frame: Frame, arena: &Arena) -> Option<Frame> {
        let (whole, bytes) = (frame.len(), arena.bytes(&frame));
        let Some(head) = bytes.first_chunk::<HEADERS_V4_BYTES>() else { return Some(frame) };
        let length = |at| usize::from(u16::from_be_bytes(array_at(head, at)));
        let packet_bytes =
            if head[14] >> 4 == 4 { length(16) } else { length(18) + Ipv6Header::BYTES };
        frame.truncate(LINK_BYTES + packet_bytes);
        let (mut v4, mut v6) = (Memo::NONE, Memo::NONE);
        let (headers_bytes, is_v4) = if self.is_plain_v4(&frame, arena, &mut v4) {
            (HEADERS_V4_BYTES, true)
        } else if self.is_plain_v6(&frame, arena, &mut v6) {
            (HEADERS_V6_BYTES, false)
        } else {
            // Whoever looks closer sees it all.
            arena.set_len(&mut frame, whole);
            return Some(frame);
        };
        frame.advance(headers_bytes);
        let len = frame.len();
        if is_v4 {
            self.enqueue_plain(v4.socket, Waiting::V4(frame), len);
        } else {
            self.enqueue_plain(v6.socket, Waiting::V6(frame), len);
        }
        None
    }

    /// Whether a frame is plain and goes to the socket that the memo then says,
    /// which has room for it.
    #[inline(always)]
    fn is_plain_v4(&self, frame: &Frame, arena: &Arena, memo: &mut Memo<12>) -> bool {
        let bytes = arena.bytes(frame);
        let Some(head) = bytes.first_chunk::<HEADERS_V4_BYTES>() else { return false };
        let packet_bytes = ((bytes.len() - LINK_BYTES) as u16).to_be_bytes();
        let udp_bytes = ((bytes.len() - LINK_BYTES - Ipv4Header::BYTES) as u16).to_be_bytes();
        // EtherType, version and header length; not a fragment, UDP; lengths.
        let plain = self.plain_link.is_front_of(head)
            && is_at(head, 12, [0xff, 0xff, 0xff, 0], [0x08, 0x00, 0x45, 0])
            && is_at(head, 20, [0x3f, 0xff, 0, 0xff], [0, 0, 0, Protocol::UDP.0])
            && array_at(head, 16) == packet_bytes
            && array_at(head, 38) == udp_bytes;
        if !plain || !header_sum(head).is_valid() {
            return false;
        }
        let filled = array_at(head, 40) != [0; 2];
        if frame.is_unchecked() && filled && !datagram_sum(&bytes[26..], udp_bytes).is_valid() {
            return false;
        }
        let ends = array_at(head, 26);
        if ends != memo.ends {
            let Some(socket) = self.find_plain_v4(&ends) else { return false };
            *memo = Memo { ends, socket };
        }
        self.has_room(memo.socket, bytes.len() - HEADERS_V4_BYTES)
    }

    /// As [`Stack::is_plain_v4`].
    #[inline(always)]
    fn is_plain_v6(&self, frame: &Frame, arena: &Arena, memo: &mut Memo<36>) -> bool {
        let bytes = arena.bytes(frame);
        let Some(head) = bytes.first_chunk::<HEADERS_V6_BYTES>() else { return false };
        let Some(front) = bytes.first_chunk() else { return false };
        let udp_bytes = ((bytes.len() - LINK_BYTES - Ipv6Header::BYTES) as u16).to_be_bytes();
        // EtherType and version; UDP; lengths.
        let plain = self.plain_link.is_front_of(front)
            && is_at(head, 12, [0xff, 0xff, 0xf0, 0], [0x86, 0xdd, 0x60, 0])
            && head[20] == Protocol::UDP.0
            && array_at(head, 18) == udp_bytes
            && array_at(head, 58) == udp_bytes;
        if !plain {
            return false;
        }
        let filled = array_at(head, 60) != [0; 2];
        if frame.is_unchecked() && !(filled && datagram_sum(&bytes[22..], udp_bytes).is_valid()) {
            return false;
        }
        let ends = array_at(head, 22);
        if ends != memo.ends {
            let Some(socket) = self.find_plain_v6(&ends) else { return false };
            *memo = Memo { ends, socket };
        }
        self.has_room(memo.socket, bytes.len() - HEADERS_V6_BYTES)
    }

    /// The socket for a datagram, if its addresses are plain.
    #[inline(always)]
    fn find_plain_v4(&self, ends: &[u8; 12]) -> Option<u32> {
        let (from, to) = (array_at(ends, 0), array_at(ends, 4));
        let plain = is_plain_source_v4(from) && self.addresses.is_for_us_v4(from, to);
        let (from, to) = ((from, array_at(ends, 8)), (to, array_at(ends, 10)));
        plain.then(|| self.udp.find_plain_v4(to, from))
    }

    /// As [`Stack::find_plain_v4`].
    #[inline(always)]
    fn find_plain_v6(&self, ends: &[u8; 36]) -> Option<u32> {
        let (from, to) = (array_at(ends, 0), array_at(ends, 16));
        let plain = is_plain_source_v6(from)
            && self.addresses.is_ours_v6(Ipv6Addr::from(to))
            && self.addresses.is_other_v6(Ipv6Addr::from(from));
        let (from, to) = ((from, array_at(ends, 32)), (to, array_at(ends, 34)));
        plain.then(|| self.udp.find_plain_v6(to, from))
    }

    #[inline(always)]
    fn has_room(&self, index: u32, len: usize) -> bool {
        self.udp.look_at(index).is_some_and(|socket| socket.has_room(len).is_ok())
    }

    /// Puts a datagram into the queue of a socket that has room for it.
    #[inline(always)]
    fn enqueue_plain(&mut self, index: u32, datagram: Waiting, len: usize) {
        let Some((_, socket)) = self.udp.at(index) else { return };
        self.counters.held += 1;
        if socket.push_plain(datagram, len) {
            self.on_readable(index);
        }
    }

    #[inline(never)]
    fn on_readable(&mut self, index: u32) {
        if let Some((id, _)) = self.udp.at(index) {
            self.tell_readable(id);
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
        let ports = [socket.local.port().to_be_bytes(), remote.port().to_be_bytes()];
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

    #[inline(always)]
    pub(crate) fn source_v4(&self) -> Ipv4Addr {
        array_at::<4, 54>(&self.bytes, LINK_BYTES + 12).into()
    }

    #[inline(always)]
    pub(crate) fn source_v6(&self) -> Ipv6Addr {
        array_at::<16, 54>(&self.bytes, LINK_BYTES + 8).into()
    }

    /// Writes the headers in front of a payload, with the ports as they shall
    /// stand there: ours and the peer's. Returns what is to be noted
    /// about the checksum: of everything, or of the pseudo-header alone when
    /// the port completes it.
    #[inline(always)]
    pub(crate) fn emit_v4(
        &self,
        head: &mut [u8; HEADERS_V4_BYTES],
        payload: &[u8],
        ports: [[u8; 2]; 2],
        partial: bool,
    ) -> PackedChecksum {
        const PARTIAL: PackedChecksum =
            PackedChecksum::new(Checksum::Partial { start: 34, offset: 6 });
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        let total_bytes = udp_bytes + Ipv4Header::BYTES as u16;
        put(head, 0, array_at::<34, 54>(&self.bytes, 0));
        put(head, 16, total_bytes.to_be_bytes());
        put(head, 24, (!add(self.header, total_bytes.to_be())).to_ne_bytes());
        put(head, 34, ports[0]);
        put(head, 36, ports[1]);
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
        ports: [[u8; 2]; 2],
        partial: bool,
    ) -> PackedChecksum {
        const PARTIAL: PackedChecksum =
            PackedChecksum::new(Checksum::Partial { start: 54, offset: 6 });
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        put(head, 0, self.bytes);
        put(head, 18, udp_bytes.to_be_bytes());
        put(head, 54, ports[0]);
        put(head, 56, ports[1]);
        put(head, 58, udp_bytes.to_be_bytes());
        put(head, 60, self.udp_checksum(ports, payload, partial));
        if partial { PARTIAL } else { PackedChecksum::new(Checksum::Unknown) }
    }

    /// The field as it is sent.
    #[inline(always)]
    fn udp_checksum(&self, ports: [[u8; 2]; 2], payload: &[u8], partial: bool) -> [u8; 2] {
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        let pseudo = add(self.pseudo, udp_bytes.to_be());
        if partial {
            return pseudo.to_ne_bytes();
        }
        let [[a, b], [c, d]] = ports;
        Sum::of_words([u64::from(pseudo), u32::from_ne_bytes([a, b, c, d]).into()])
            .with_u16(udp_bytes)
            .with(payload)
            .udp_checksum()
            .to_be_bytes()
    }
}
