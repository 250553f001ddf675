//! Request and reply exchange: received datagrams are answered at once, many per call.
//!
//! A reply returns to the sender of the request, from the address that received the request. So
//! most of what sending has to look up is known already.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::arena::FreeBatch;
use tidegate_memory::fifo::PushBatch;
use tidegate_memory::{Arena, Frame, PackedChecksum};

use super::family::{DatagramFamily, ReplyBuffers};
use super::socket::Socket;
use super::{Datagram, Payload, QueuedDatagram, SendTarget, UdpId, UdpTable};
use crate::Counters;
use crate::fast_path::family::{Family, RawTuple, V4, V6};
use crate::fast_path::template::HeaderTemplate;
use crate::interface::Interface;
use crate::ip::path::PathCache;

/// Received datagram, passed to the callback of [`crate::Stack::udp_exchange`].
#[derive(Clone, Copy, Debug)]
pub struct UdpRequest<'a> {
    /// Payload.
    pub bytes: &'a [u8],
    /// Sender.
    pub from: SocketAddr,
    /// Local address that the datagram was sent to.
    pub to: IpAddr,
}

/// Received datagram, passed to the callback of [`crate::Stack::udp_exchange_in_place`].
#[derive(Debug)]
pub struct InPlaceRequest<'a> {
    /// Payload, followed by spare space for a longer reply. The callback writes the reply over the
    /// payload, from the start of the buffer.
    pub buffer: &'a mut [u8],
    /// Length of the received payload in bytes.
    pub len: usize,
    /// Sender.
    pub from: SocketAddr,
    /// Local address that the datagram was sent to.
    pub to: IpAddr,
}

/// Path state of the replies of one socket.
struct ReplyPath<'a, F: Family> {
    now_ns: u64,
    paths: &'a PathCache,
    /// The application sees IPv4-mapped IPv6 addresses.
    mapped: bool,
    /// Route of the previous reply.
    cached: CachedRoute<'a, F>,
}

/// Route of a reply, cached because the next reply often has the same destination.
struct CachedRoute<'a, F: Family> {
    /// Addresses of the request.
    addresses: F::AddressPair,
    template: &'a HeaderTemplate,
    /// Largest payload in bytes that can take the fast path.
    max_bytes: usize,
}

impl<'a, F: Family> ReplyPath<'a, F> {
    fn new(now_ns: u64, paths: &'a PathCache, mapped: bool) -> Self {
        let template = &HeaderTemplate::NONE;
        let cached = CachedRoute { addresses: F::NO_ADDRESSES, template, max_bytes: 0 };
        Self { now_ns, paths, mapped, cached }
    }

    /// True if a reply of `len` bytes can take the fast path. Its route is in `cached` then.
    #[inline(always)]
    fn has_fast_path(&mut self, addresses: F::AddressPair, len: usize) -> bool {
        if self.cached.addresses != addresses {
            let (remote, local) = F::split(addresses);
            let Some(path) = self.paths.get(self.now_ns, remote.into()) else { return false };
            if path.template.source::<F>() != local {
                return false;
            }
            let max_bytes = path.max_plain_frame_bytes.checked_sub(F::UDP_HEADERS_BYTES);
            let Some(max_bytes) = max_bytes else { return false };
            self.cached = CachedRoute { addresses, template: &path.template, max_bytes };
        }
        len <= self.cached.max_bytes
    }
}

/// Reply that takes the slow path.
struct SlowPathReply {
    frame: Frame,
    to: SocketAddr,
    from: IpAddr,
}

/// Work that takes the slow path.
enum SlowPath {
    /// Finished reply.
    Reply(SlowPathReply),
    /// Request that was not passed to the callback yet.
    Datagram(Datagram),
}

/// Batch of finished replies in the transmit queue.
struct ReplyQueue<'a> {
    queue: PushBatch<'a, Frame>,
    transmitted: &'a mut u64,
}

impl<'a> ReplyQueue<'a> {
    fn new(queue: PushBatch<'a, Frame>, transmitted: &'a mut u64) -> Self {
        Self { queue, transmitted }
    }

    /// Queues a frame whose first `len` bytes are the reply. The headers are in the headroom
    /// already. The queue must have space.
    #[inline(always)]
    fn push<F: Family>(
        &mut self,
        buffers: &mut impl ReplyBuffers,
        mut frame: Frame,
        len: usize,
        checksum: PackedChecksum,
    ) {
        if !buffers.set_len(&mut frame, len) {
            return free_malformed(buffers, frame);
        }
        frame.retreat(F::UDP_HEADERS_BYTES);
        frame.set_packed_checksum(checksum);
        if let Err(frame) = self.queue.push(frame) {
            free_malformed(buffers, frame);
        }
    }
}

impl Drop for ReplyQueue<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.transmitted += self.queue.pushed() as u64;
    }
}

/// Strategy for where replies are written. `PARTIAL`: the device completes checksums.
trait ReplyStrategy {
    /// Form of access to the arena that the strategy needs.
    type Buffers<'a>: ReplyBuffers;

    fn buffers(arena: &mut Arena) -> Self::Buffers<'_>;

    /// Passes a plain datagram to the callback and queues the reply. Returns a reply that cannot
    /// take the fast path.
    fn respond<F: DatagramFamily, const PARTIAL: bool>(
        &mut self,
        reply_path: &mut ReplyPath<'_, F>,
        replies: &mut ReplyQueue<'_>,
        buffers: &mut Self::Buffers<'_>,
        frame: Frame,
    ) -> Option<SlowPathReply>;

    /// Passes any datagram to the callback. `send` receives the reply, if there is one.
    fn respond_slow(
        &mut self,
        arena: &mut Arena,
        datagram: Datagram,
        send: impl FnOnce(&mut Arena, Payload),
    );
}

/// Strategy that writes each reply over its request.
struct InPlace<R>(R);

impl<R: FnMut(InPlaceRequest<'_>) -> Option<usize>> ReplyStrategy for InPlace<R> {
    type Buffers<'a> = FreeBatch<'a>;

    #[inline(always)]
    fn buffers(arena: &mut Arena) -> FreeBatch<'_> {
        arena.free_batch()
    }

    #[inline(always)]
    fn respond<F: DatagramFamily, const PARTIAL: bool>(
        &mut self,
        reply_path: &mut ReplyPath<'_, F>,
        replies: &mut ReplyQueue<'_>,
        buffers: &mut FreeBatch<'_>,
        mut frame: Frame,
    ) -> Option<SlowPathReply> {
        let request_bytes = frame.len();
        let Some((head, buffer)) = F::head_mut(buffers, &mut frame) else {
            free_malformed(buffers, frame);
            return None;
        };
        let tuple = RawTuple::<F>::from_head(head.as_ref());
        let (from, to) = tuple.app_addresses(reply_path.mapped);
        let len = (self.0)(InPlaceRequest { buffer: &mut *buffer, len: request_bytes, from, to });
        let Some(payload) = len.and_then(|len| buffer.get(..len)) else {
            buffers.free(frame);
            return None;
        };
        let len = payload.len();
        if replies.queue.is_full() || !reply_path.has_fast_path(tuple.addresses, len) {
            return Some(slow_path_reply(buffers, frame, len, tuple.app_addresses(false)));
        }
        let (template, ports) = (reply_path.cached.template, tuple.ports.swapped());
        let checksum = template.emit_udp::<F>(head, payload, ports, PARTIAL);
        replies.push::<F>(buffers, frame, len, checksum);
        None
    }

    fn respond_slow(
        &mut self,
        arena: &mut Arena,
        datagram: Datagram,
        send: impl FnOnce(&mut Arena, Payload),
    ) {
        let (from, to) = (datagram.remote, datagram.local);
        match datagram.payload {
            Payload::Frame(mut frame) => {
                let len = frame.len();
                let reply_len = arena
                    .headers_mut::<0>(&mut frame)
                    .and_then(|(_, buffer)| (self.0)(InPlaceRequest { buffer, len, from, to }));
                if reply_len.is_some_and(|len| arena.set_len(&mut frame, len)) {
                    send(arena, Payload::Frame(frame));
                } else {
                    arena.free(frame);
                }
            }
            Payload::Owned(bytes) => {
                let mut bytes = bytes.into_vec();
                let len = bytes.len();
                let reply_len = (self.0)(InPlaceRequest { buffer: &mut bytes, len, from, to });
                if let Some(len) = reply_len.filter(|&len| len <= bytes.len()) {
                    bytes.truncate(len);
                    send(arena, Payload::Owned(bytes.into()));
                }
            }
        }
    }
}

/// Strategy that writes each reply to a separate frame.
struct Separate<R>(R);

impl<R: FnMut(UdpRequest<'_>, &mut [u8]) -> Option<usize>> Separate<R> {
    /// Passes a request to the callback and frees the request. Returns the reply without headers.
    #[inline(always)]
    fn write_reply(
        &mut self,
        arena: &mut Arena,
        frame: Frame,
        (from, to): (SocketAddr, IpAddr),
    ) -> Option<Frame> {
        let mut reply = alloc_reply(arena);
        let len = reply.as_mut().and_then(|reply| {
            let (bytes, buffer) = arena.read_and_write(&frame, reply);
            (self.0)(UdpRequest { bytes, from, to }, buffer)
        });
        arena.free(frame);
        truncate_reply(arena, reply?, len)
    }
}

impl<R: FnMut(UdpRequest<'_>, &mut [u8]) -> Option<usize>> ReplyStrategy for Separate<R> {
    type Buffers<'a> = &'a mut Arena;

    #[inline(always)]
    fn buffers(arena: &mut Arena) -> &mut Arena {
        arena
    }

    #[inline(always)]
    fn respond<F: DatagramFamily, const PARTIAL: bool>(
        &mut self,
        reply_path: &mut ReplyPath<'_, F>,
        replies: &mut ReplyQueue<'_>,
        buffers: &mut &mut Arena,
        frame: Frame,
    ) -> Option<SlowPathReply> {
        let Some(head) = F::head(buffers, &frame) else {
            free_malformed(buffers, frame);
            return None;
        };
        let tuple = RawTuple::<F>::from_head(head.as_ref());
        let mut reply = self.write_reply(buffers, frame, tuple.app_addresses(reply_path.mapped))?;
        let len = reply.len();
        if replies.queue.is_full() || !reply_path.has_fast_path(tuple.addresses, len) {
            return Some(slow_path_reply(buffers, reply, len, tuple.app_addresses(false)));
        }
        let Some((head, buffer)) = F::head_mut(buffers, &mut reply) else {
            free_malformed(buffers, reply);
            return None;
        };
        let (template, ports) = (reply_path.cached.template, tuple.ports.swapped());
        let checksum = template.emit_udp::<F>(head, &buffer[..len], ports, PARTIAL);
        replies.push::<F>(buffers, reply, len, checksum);
        None
    }

    fn respond_slow(
        &mut self,
        arena: &mut Arena,
        datagram: Datagram,
        send: impl FnOnce(&mut Arena, Payload),
    ) {
        let (from, to) = (datagram.remote, datagram.local);
        let mut reply = alloc_reply(arena);
        let len = reply.as_mut().and_then(|reply| {
            datagram.with_reply(arena, reply, |bytes, buffer| {
                (self.0)(UdpRequest { bytes, from, to }, buffer)
            })
        });
        datagram.release(arena);
        if let Some(reply) = reply.and_then(|reply| truncate_reply(arena, reply, len)) {
            send(arena, Payload::Frame(reply));
        }
    }
}

impl UdpTable {
    /// Implements [`crate::Stack::udp_exchange`].
    #[inline]
    pub(crate) fn exchange(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        max_datagrams: usize,
        respond: impl FnMut(UdpRequest<'_>, &mut [u8]) -> Option<usize>,
    ) -> usize {
        self.exchange_by(interface, now_ns, arena, id, max_datagrams, &mut Separate(respond))
    }

    /// Implements [`crate::Stack::udp_exchange_in_place`].
    #[inline]
    pub(crate) fn exchange_in_place(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        max_datagrams: usize,
        respond: impl FnMut(InPlaceRequest<'_>) -> Option<usize>,
    ) -> usize {
        self.exchange_by(interface, now_ns, arena, id, max_datagrams, &mut InPlace(respond))
    }

    #[inline]
    fn exchange_by(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        max_datagrams: usize,
        strategy: &mut impl ReplyStrategy,
    ) -> usize {
        let mut taken = 0;
        while taken < max_datagrams {
            let remaining = max_datagrams - taken;
            let Some(socket) = self.get_mut(id) else { break };
            let (count, slow_path) = match socket.front() {
                Some(QueuedDatagram::V4(_)) => {
                    exchange_plain::<V4>(socket, interface, now_ns, arena, remaining, strategy)
                }
                Some(QueuedDatagram::V6(_)) => {
                    exchange_plain::<V6>(socket, interface, now_ns, arena, remaining, strategy)
                }
                Some(QueuedDatagram::WithMetadata) => {
                    (1, self.recv(interface, arena, id).map(SlowPath::Datagram))
                }
                None => break,
            };
            taken += count;
            match slow_path {
                Some(SlowPath::Reply(SlowPathReply { frame, to, from })) => {
                    self.reply_slow(
                        interface,
                        now_ns,
                        arena,
                        id,
                        (to, from),
                        Payload::Frame(frame),
                    );
                }
                Some(SlowPath::Datagram(datagram)) => {
                    let addresses = (datagram.remote, datagram.local);
                    strategy.respond_slow(arena, datagram, |arena, payload| {
                        self.reply_slow(interface, now_ns, arena, id, addresses, payload);
                    });
                }
                None if count == 0 => break,
                None => {}
            }
        }
        taken
    }

    #[inline(never)]
    fn reply_slow(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        (to, from): (SocketAddr, IpAddr),
        payload: Payload,
    ) {
        let target = SendTarget { to: Some(to), options: Some(from).into() };
        // The stack counts a failure under its drop reason.
        let _ = match payload {
            Payload::Frame(frame) => self.send_frame(interface, now_ns, arena, id, target, frame),
            Payload::Owned(bytes) => self.send(interface, now_ns, arena, id, target, &bytes),
        };
    }
}

/// Calls [`exchange_burst`] for a device that completes checksums, or for one that does not.
#[inline]
fn exchange_plain<F: DatagramFamily>(
    socket: &mut Socket,
    interface: &mut Interface,
    now_ns: u64,
    arena: &mut Arena,
    max_datagrams: usize,
    strategy: &mut impl ReplyStrategy,
) -> (usize, Option<SlowPath>) {
    let (count, reply) = match interface.transmit_checksum {
        true => {
            exchange_burst::<F, _, true>(socket, interface, now_ns, arena, max_datagrams, strategy)
        }
        false => {
            exchange_burst::<F, _, false>(socket, interface, now_ns, arena, max_datagrams, strategy)
        }
    };
    (count, reply.map(SlowPath::Reply))
}

/// Answers datagrams of one family at the front of the queue, up to the first that needs the slow
/// path. Returns the number of datagrams taken, at least 1, and the slow-path reply of the last.
// A separate function, so that all its variables fit in registers.
#[inline(never)]
fn exchange_burst<F: DatagramFamily, S: ReplyStrategy, const PARTIAL: bool>(
    socket: &mut Socket,
    interface: &mut Interface,
    now_ns: u64,
    arena: &mut Arena,
    max_datagrams: usize,
    strategy: &mut S,
) -> (usize, Option<SlowPathReply>) {
    let limit = if socket.uses_default_headers { interface.limits.transmit_frames } else { 0 };
    let Counters { held, delivered, transmitted, .. } = &mut interface.counters;
    let mut reply_path = ReplyPath::<F>::new(now_ns, &interface.paths, socket.bound.is_ipv6());
    let mut replies = ReplyQueue::new(interface.transmit.push_batch(limit, 0), transmitted);
    let mut queue = socket.pop_batch(max_datagrams, held, delivered);
    let mut buffers = S::buffers(arena);
    while let Some(QueuedDatagram::V4(frame) | QueuedDatagram::V6(frame)) =
        queue.next_if(F::has_queued)
    {
        if let Some(reply) =
            strategy.respond::<F, PARTIAL>(&mut reply_path, &mut replies, &mut buffers, frame)
        {
            return (queue.taken(), Some(reply));
        }
    }
    (queue.taken(), None)
}

/// Allocates a frame for a reply, with all its space as data.
#[inline(always)]
fn alloc_reply(arena: &mut Arena) -> Option<Frame> {
    let mut frame = arena.alloc()?;
    let space = arena.space(&frame);
    arena.set_len(&mut frame, space);
    Some(frame)
}

/// Truncates a frame to the length of the reply. Frees the frame if there is no reply, or the
/// reply is longer than the frame.
#[inline(always)]
fn truncate_reply(arena: &mut Arena, mut frame: Frame, len: Option<usize>) -> Option<Frame> {
    if len.is_some_and(|len| arena.set_len(&mut frame, len)) {
        return Some(frame);
    }
    arena.free(frame);
    None
}

#[inline(always)]
fn slow_path_reply(
    buffers: &impl ReplyBuffers,
    mut frame: Frame,
    len: usize,
    (to, from): (SocketAddr, IpAddr),
) -> SlowPathReply {
    let fits = buffers.set_len(&mut frame, len);
    debug_assert!(fits, "the reply fits in its buffer");
    SlowPathReply { frame, to, from }
}

/// Frees a frame that breaks an invariant: queued frames have headers, and replies have space.
#[cold]
fn free_malformed(buffers: &mut impl ReplyBuffers, frame: Frame) {
    debug_assert!(false, "a queued datagram has no headers, or a reply no space");
    buffers.free(frame);
}
