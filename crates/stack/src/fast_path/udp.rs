//! Fast path of plain UDP datagrams, received and sent.
//!
//! A packet is *plain* if it is a whole UDP datagram on untagged Ethernet, without IP options,
//! extension headers or fragments. The fast path only accepts plain and valid packets, or declines
//! them. It drops nothing and answers nothing: every declined packet goes through the parsers of
//! the slow path, which find the reason. Removing the fast path would not change the behaviour of
//! the stack.

use std::net::IpAddr;

use tidegate_memory::fifo::PopBatch;
use tidegate_memory::{Arena, Fifo, Frame};
use tidegate_wire::{Protocol, Sum};

use super::family::{Family, PortPair, RawTuple, V4, V6};
use super::plain::{LINK_BYTES, PlainLink, array_at};
use super::template::prepend_headers;
use crate::interface::Interface;
use crate::ip::address::Addresses;
use crate::udp::{DatagramFamily, Lookup, QueuedDatagram, SendTarget, UdpId, UdpTable};

/// Sum of the pseudo-header without the length, folded to 16 bits, so that adding a length to it
/// cannot carry.
#[inline(always)]
fn pseudo_sum<F: Family>(tuple: &RawTuple<F>) -> Sum {
    let sum = F::address_sum(tuple.addresses).with_u16(Protocol::UDP.0.into());
    Sum::ZERO.with_u16(sum.fold())
}

/// Reads addresses and ports of a frame, taken to be a plain datagram. `None` for a frame that is
/// too short.
#[inline(always)]
fn raw_tuple<F: Family>(bytes: &[u8]) -> Option<RawTuple<F>> {
    bytes.get(..F::UDP_HEADERS_BYTES).map(RawTuple::from_head)
}

/// True if a frame is plain and valid. `pseudo` is the result of [`pseudo_sum`] for the frame's
/// addresses. `unchecked`: the device has not verified the UDP checksum.
#[inline(always)]
fn is_valid<F: Family>(link: PlainLink, pseudo: Sum, bytes: &[u8], unchecked: bool) -> bool {
    let Some(head) = bytes.get(..F::UDP_HEADERS_BYTES) else { return false };
    let at = F::TRANSPORT_OFFSET;
    let has_checksum = array_at(head, at + 6) != [0; 2];
    link.matches(head)
        && F::is_plain_udp(head, bytes.len())
        && !(unchecked && !F::UDP_CHECKSUM_IS_OPTIONAL && !has_checksum)
        && !(unchecked && has_checksum && {
            let udp_bytes = (bytes.len() as u16).wrapping_sub(at as u16);
            !pseudo.with_u16(udp_bytes).with(&bytes[at..]).is_valid_nonzero()
        })
}

/// Index of the socket for a datagram, if the addresses are plain and the sender can be answered.
#[inline(always)]
fn find_socket<F: DatagramFamily>(
    addresses: &Addresses,
    lookup: &Lookup,
    tuple: &RawTuple<F>,
) -> Option<u32> {
    let plain = F::is_for_us(addresses, tuple.addresses) && tuple.ports.split().0 != [0; 2];
    plain.then(|| F::find_socket(lookup, tuple.addresses, tuple.ports))
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
    fn handle_plain_family<F: DatagramFamily>(
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
            let tuple = raw_tuple::<F>(arena.bytes(run.first()?))?;
            find_socket::<F>(addresses, lookup, &tuple).map(|index| (index, tuple))
        };
        let mut following = next(&run);
        while let Some((index, mut tuple)) = following {
            let Some((id, socket)) = sockets.by_index(index) else { return };
            let (before, was_empty) = (run.len(), socket.is_empty());
            let mut queue = socket.push_batch(before, arena.frame_bytes(), &mut counters.held);
            loop {
                let before = run.len();
                let pseudo = pseudo_sum::<F>(&tuple);
                queue.push_while(&mut run, F::UDP_HEADERS_BYTES, |frame| {
                    accept_plain::<F>(link, arena, (tuple, pseudo), frame)
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
        let Some(head) = bytes.get(..V4::UDP_HEADERS_BYTES) else { return Some(frame) };
        let frame = if head[LINK_BYTES] >> 4 == 4 {
            frame.truncate(V4::packet_end(head));
            self.handle_plain_one::<V4>(interface, frame, arena)
        } else {
            frame.truncate(V6::packet_end(head));
            self.handle_plain_one::<V6>(interface, frame, arena)
        };
        frame.map(|mut frame| {
            // The slow path examines the whole frame.
            arena.set_len(&mut frame, frame_bytes);
            frame
        })
    }

    /// Accepts a frame that is plain and whose socket has queue space. Otherwise returns the frame.
    fn handle_plain_one<F: DatagramFamily>(
        &mut self,
        interface: &mut Interface,
        mut frame: Frame,
        arena: &Arena,
    ) -> Option<Frame> {
        let (sockets, lookup) = self.sockets_and_lookup();
        let bytes = arena.bytes(&frame);
        let (link, unchecked) = (interface.plain_link, frame.is_unchecked());
        let tuple = raw_tuple::<F>(bytes)
            .filter(|ends| is_valid::<F>(link, pseudo_sum::<F>(ends), bytes, unchecked));
        let index = tuple.and_then(|ends| find_socket::<F>(&interface.addresses, lookup, &ends));
        let Some((id, socket)) = index.and_then(|index| sockets.by_index(index)) else {
            return Some(frame);
        };
        if socket.check_space(frame.len() - F::UDP_HEADERS_BYTES).is_err() {
            return Some(frame);
        }
        frame.advance(F::UDP_HEADERS_BYTES);
        let len = frame.len();
        interface.counters.held += 1;
        if socket.push_plain(F::queued(frame), len) {
            socket.notify_readable(id, &mut interface.events);
        }
        None
    }
}

/// Turns a frame with the given addresses and ports into a queued datagram if the frame is plain
/// and valid. Otherwise returns the frame.
#[inline(always)]
fn accept_plain<F: DatagramFamily>(
    link: PlainLink,
    arena: &Arena,
    (tuple, pseudo): (RawTuple<F>, Sum),
    mut frame: Frame,
) -> Result<QueuedDatagram, Frame> {
    let Some(data) = arena.get(&frame) else { return Err(frame) };
    if raw_tuple::<F>(data) != Some(tuple)
        || !is_valid::<F>(link, pseudo, data, frame.is_unchecked())
    {
        return Err(frame);
    }
    frame.advance(F::UDP_HEADERS_BYTES);
    Ok(F::queued(frame))
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
        target: SendTarget,
        frame: Frame,
    ) -> Option<Frame> {
        let Some(socket) = self.get(id) else { return Some(frame) };
        let Some(remote) = target.to.or(socket.remote).filter(|to| to.port() != 0) else {
            return Some(frame);
        };
        if interface.transmit.len() >= interface.limits.transmit_frames {
            return Some(frame);
        }
        let from = match target.options.from {
            None if !socket.local.ip().is_unspecified() => Some(socket.local.ip()),
            from => from,
        };
        if !socket.uses_default_headers
            || !target.options.has_socket_headers()
            || socket.bound.is_ipv4() != remote.is_ipv4()
        {
            return Some(frame);
        }
        let ports = PortPair::new(socket.local.port(), remote.port());
        let mut frame = frame;
        let sent = match (remote.ip(), from) {
            (IpAddr::V4(remote), None | Some(IpAddr::V4(_))) => {
                put_headers::<V4>(interface, now_ns, arena, (remote, from), ports, &mut frame)
            }
            (IpAddr::V6(remote), None | Some(IpAddr::V6(_))) => {
                put_headers::<V6>(interface, now_ns, arena, (remote, from), ports, &mut frame)
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

/// Writes the headers in front of a payload, if a template for `to` with the source address `from`
/// exists. Returns true if it did.
#[inline(always)]
fn put_headers<F: DatagramFamily>(
    interface: &Interface,
    now_ns: u64,
    mut arena: &mut Arena,
    (to, from): (F::Address, Option<IpAddr>),
    ports: PortPair,
    frame: &mut Frame,
) -> bool {
    let len = frame.len();
    let Some(template) = interface.paths.template::<F>(now_ns, to, len) else { return false };
    if from.is_some_and(|from| from != template.source::<F>().into()) {
        return false;
    }
    let Some((head, payload)) = F::head_mut(&mut arena, frame) else { return false };
    let partial = interface.transmit_checksum;
    let checksum = template.emit_udp::<F>(head, &payload[..len], ports, partial);
    prepend_headers::<F>(arena, frame, len, checksum)
}
