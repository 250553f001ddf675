//! Fast path of plain UDP datagrams, received and sent.
//!
//! A packet is *plain* if it is a whole UDP datagram on untagged Ethernet, without IP options,
//! extension headers or fragments. The fast path only accepts plain and valid packets, or declines
//! them. It drops nothing and answers nothing: every declined packet goes through the parsers of
//! the slow path, which find the reason. Removing the fast path would not change the behaviour of
//! the stack.

use std::net::{IpAddr, Ipv6Addr};

use tidegate_memory::fifo::PopBatch;
use tidegate_memory::{Arena, Fifo, Frame};
use tidegate_wire::{EtherType, Ipv4Header, Ipv6Header, Protocol, Sum};

use super::plain::{
    HEADERS_V4_BYTES, HEADERS_V6_BYTES, IPV4_VERSION_AND_IHL, LINK_BYTES, PlainLink, array_at,
    ipv4_header_sum, is_plain_source_v4, is_plain_source_v6,
};
use super::template::{PortPair, prepend_headers};
use crate::interface::Interface;
use crate::ip::address::Addresses;
use crate::udp::{Lookup, QueuedDatagram, SendEnds, UdpId, UdpTable};

/// Folds a sum to 16 bits, so that adding a length to it cannot carry.
#[inline(always)]
fn folded(sum: Sum) -> Sum {
    Sum::ZERO.with_u16(sum.fold())
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

impl UdpTable {
    /// Accepts the plain frames at the front of a burst.
    #[inline]
    pub(crate) fn handle_plain(
        &mut self,
        interface: &mut Interface,
        burst: &mut Fifo<Frame>,
        arena: &Arena,
    ) {
        loop {
            let before = burst.len();
            self.handle_plain_v4(interface, burst, arena);
            if burst.is_empty() {
                return;
            }
            self.handle_plain_v6(interface, burst, arena);
            if burst.len() == before || burst.is_empty() {
                return;
            }
        }
    }

    // Separate functions keep all live values in registers.
    #[inline(never)]
    fn handle_plain_v4(
        &mut self,
        interface: &mut Interface,
        burst: &mut Fifo<Frame>,
        arena: &Arena,
    ) {
        self.handle_plain_family::<V4>(interface, burst, arena);
    }

    #[inline(never)]
    fn handle_plain_v6(
        &mut self,
        interface: &mut Interface,
        burst: &mut Fifo<Frame>,
        arena: &Arena,
    ) {
        self.handle_plain_family::<V6>(interface, burst, arena);
    }

    /// Accepts the plain frames of one family at the front of a burst, socket by socket: bursts
    /// often hold many frames for one socket, and often of one flow.
    #[inline(always)]
    fn handle_plain_family<P: PlainFamily>(
        &mut self,
        interface: &mut Interface,
        burst: &mut Fifo<Frame>,
        arena: &Arena,
    ) {
        let Interface { plain_link, addresses, counters, events, .. } = interface;
        let link = *plain_link;
        let (sockets, lookup) = self.sockets_and_lookup();
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
    pub(crate) fn handle_padded(
        &mut self,
        interface: &mut Interface,
        mut frame: Frame,
        arena: &Arena,
    ) -> Option<Frame> {
        let (frame_bytes, bytes) = (frame.len(), arena.bytes(&frame));
        let Some(head) = bytes.first_chunk::<HEADERS_V4_BYTES>() else { return Some(frame) };
        let length = |at| usize::from(u16::from_be_bytes(array_at(head, at)));
        let is_v4 = head[14] >> 4 == 4;
        let packet_bytes = if is_v4 { length(16) } else { length(18) + Ipv6Header::BYTES };
        frame.truncate(LINK_BYTES + packet_bytes);
        let frame = if is_v4 {
            self.handle_plain_one::<V4>(interface, frame, arena)
        } else {
            self.handle_plain_one::<V6>(interface, frame, arena)
        };
        frame.map(|mut frame| {
            // The slow path examines the whole frame.
            arena.set_len(&mut frame, frame_bytes);
            frame
        })
    }

    /// Accepts a frame that is plain and whose socket has queue space. Otherwise returns the frame.
    fn handle_plain_one<P: PlainFamily>(
        &mut self,
        interface: &mut Interface,
        mut frame: Frame,
        arena: &Arena,
    ) -> Option<Frame> {
        let (sockets, lookup) = self.sockets_and_lookup();
        let bytes = arena.bytes(&frame);
        let (link, unchecked) = (interface.plain_link, frame.is_unchecked());
        let tuple = P::raw_tuple(bytes)
            .filter(|ends| P::is_valid(link, P::pseudo_sum(ends), bytes, unchecked));
        let index = tuple.and_then(|ends| P::find_socket(&interface.addresses, lookup, &ends));
        let Some((id, socket)) = index.and_then(|index| sockets.by_index(index)) else {
            return Some(frame);
        };
        if socket.check_space(frame.len() - P::HEADERS_BYTES).is_err() {
            return Some(frame);
        }
        frame.advance(P::HEADERS_BYTES);
        let len = frame.len();
        interface.counters.held += 1;
        if socket.push_plain(P::queued(frame), len) {
            socket.notify_readable(id, &mut interface.events);
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

impl UdpTable {
    /// Sends a frame that holds a UDP payload by the fast path. This requires a cached path with a
    /// header template, a payload that needs no fragments, and space in the transmit queue.
    /// Otherwise returns the frame.
    #[inline(always)]
    pub(crate) fn send_plain(
        &self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        ends: SendEnds,
        frame: Frame,
    ) -> Option<Frame> {
        let Some(socket) = self.get(id) else { return Some(frame) };
        let Some(remote) = ends.to.or(socket.remote).filter(|to| to.port() != 0) else {
            return Some(frame);
        };
        if interface.transmit.len() >= interface.limits.transmit_frames {
            return Some(frame);
        }
        let from = match ends.from {
            None if !socket.local.ip().is_unspecified() => Some(socket.local.ip()),
            from => from,
        };
        if !socket.uses_default_headers || socket.bound.is_ipv4() != remote.is_ipv4() {
            return Some(frame);
        }
        let ports = PortPair::new(socket.local.port(), remote.port());
        let partial = interface.transmit_checksum;
        let len = frame.len();
        let mut frame = frame;
        let sent = match (remote.ip(), from) {
            (IpAddr::V4(remote), None | Some(IpAddr::V4(_))) => {
                let template = interface.paths.template_v4(now_ns, remote, len);
                let template = template.filter(|t| from.is_none_or(|from| from == t.source_v4()));
                let Some(template) = template else { return Some(frame) };
                let Some((head, payload)) = arena.headers_mut(&mut frame) else {
                    return Some(frame);
                };
                let checksum = template.emit_v4(head, &payload[..len], ports, partial);
                prepend_headers::<HEADERS_V4_BYTES>(arena, &mut frame, len, checksum)
            }
            (IpAddr::V6(remote), None | Some(IpAddr::V6(_))) => {
                let template = interface.paths.template_v6(now_ns, remote, len);
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
        interface.counters.transmitted += 1;
        interface.transmit.push_back(frame);
        None
    }
}
