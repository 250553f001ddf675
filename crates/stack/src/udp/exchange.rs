//! Request and reply exchange: received datagrams are answered at once, many per call.
//!
//! A reply returns to the sender of the request, from the address that received the request. So
//! most of what sending has to look up is known already.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_memory::arena::FreeBatch;
use tidegate_memory::fifo::PushBatch;
use tidegate_memory::{Arena, Frame, PackedChecksum};

use super::socket::Socket;
use super::{Datagram, Payload, QueuedDatagram, SendEnds, UdpId, UdpTable};
use crate::Counters;
use crate::fast_path::plain::{HEADERS_V4_BYTES, HEADERS_V6_BYTES, array_at};
use crate::fast_path::template::{HeaderTemplate, PortPair};
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

/// Four-tuple of a queued datagram in header byte order. `A` is the length of an address in bytes,
/// `B` is twice that length.
#[derive(Clone, Copy)]
struct RawFourTuple<const A: usize, const B: usize> {
    /// Remote address, then local address.
    addresses: [u8; B],
    /// Remote port, then local port.
    ports: PortPair,
}

impl RawFourTuple<4, 8> {
    #[inline(always)]
    fn from_headers_v4(head: &[u8; HEADERS_V4_BYTES]) -> Self {
        Self { addresses: array_at(head, 26), ports: PortPair::from_header(array_at(head, 34)) }
    }
}

impl RawFourTuple<16, 32> {
    #[inline(always)]
    fn from_headers_v6(head: &[u8; HEADERS_V6_BYTES]) -> Self {
        Self { addresses: array_at(head, 22), ports: PortPair::from_header(array_at(head, 54)) }
    }
}

impl<const A: usize, const B: usize> RawFourTuple<A, B> {
    /// Remote and local address.
    #[inline(always)]
    fn split_addresses(&self) -> ([u8; A], [u8; A]) {
        (array_at(&self.addresses, 0), array_at(&self.addresses, A))
    }

    /// Sender and local address in the form that the application sees. `mapped` selects IPv4-mapped
    /// IPv6 addresses (RFC 4291 section 2.5.5.2).
    #[inline(always)]
    fn app_addresses(&self, mapped: bool) -> (SocketAddr, IpAddr)
    where
        IpAddr: From<[u8; A]>,
    {
        let ip = |address: [u8; A]| match IpAddr::from(address) {
            IpAddr::V4(v4) if mapped => v4.to_ipv6_mapped().into(),
            ip => ip,
        };
        let (remote, local) = self.split_addresses();
        (SocketAddr::new(ip(remote), self.ports.source()), ip(local))
    }
}

/// Path state of the replies of one socket.
struct ReplyPath<'a, const N: usize> {
    now_ns: u64,
    paths: &'a PathCache,
    /// The application sees IPv4-mapped IPv6 addresses.
    mapped: bool,
    /// Route of the previous reply.
    cached: CachedRoute<'a, N>,
}

/// Route of a reply, cached because the next reply often has the same destination.
struct CachedRoute<'a, const N: usize> {
    /// Remote address, then local address.
    addresses: [u8; N],
    template: &'a HeaderTemplate,
    /// Largest payload in bytes that can take the fast path.
    max_bytes: usize,
}

impl<const N: usize> CachedRoute<'_, N> {
    const NONE: Self = Self { addresses: [0xff; N], template: &HeaderTemplate::NONE, max_bytes: 0 };
}

impl<'a> ReplyPath<'a, 8> {
    /// True if a reply of `len` bytes can take the fast path. Its route is in `cached` then.
    #[inline(always)]
    fn has_fast_path_v4(&mut self, tuple: &RawFourTuple<4, 8>, len: usize) -> bool {
        if self.cached.addresses != tuple.addresses {
            let (remote, local) = tuple.split_addresses();
            let path = self.paths.get(self.now_ns, Ipv4Addr::from(remote).into());
            let Some(path) = path else { return false };
            if path.template.source_v4() != Ipv4Addr::from(local) {
                return false;
            }
            let Some(max_bytes) = path.max_plain_frame_bytes.checked_sub(HEADERS_V4_BYTES) else {
                return false;
            };
            self.cached =
                CachedRoute { addresses: tuple.addresses, template: &path.template, max_bytes };
        }
        len <= self.cached.max_bytes
    }
}

impl<'a> ReplyPath<'a, 32> {
    /// True if a reply of `len` bytes can take the fast path. Its route is in `cached` then.
    #[inline(always)]
    fn has_fast_path_v6(&mut self, tuple: &RawFourTuple<16, 32>, len: usize) -> bool {
        if self.cached.addresses != tuple.addresses {
            let (remote, local) = tuple.split_addresses();
            let path = self.paths.get(self.now_ns, Ipv6Addr::from(remote).into());
            let Some(path) = path else { return false };
            if path.template.source_v6() != Ipv6Addr::from(local) {
                return false;
            }
            let Some(max_bytes) = path.max_plain_frame_bytes.checked_sub(HEADERS_V6_BYTES) else {
                return false;
            };
            self.cached =
                CachedRoute { addresses: tuple.addresses, template: &path.template, max_bytes };
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

/// Frame memory in which replies are written: the operations on the arena that both strategies
/// need.
trait ReplyBuffer {
    fn free(&mut self, frame: Frame);

    fn set_len(&self, frame: &mut Frame, len: usize) -> bool;
}

impl ReplyBuffer for &mut Arena {
    #[inline(always)]
    fn free(&mut self, frame: Frame) {
        Arena::free(self, frame);
    }

    #[inline(always)]
    fn set_len(&self, frame: &mut Frame, len: usize) -> bool {
        Arena::set_len(self, frame, len)
    }
}

impl ReplyBuffer for FreeBatch<'_> {
    #[inline(always)]
    fn free(&mut self, frame: Frame) {
        FreeBatch::free(self, frame);
    }

    #[inline(always)]
    fn set_len(&self, frame: &mut Frame, len: usize) -> bool {
        FreeBatch::set_len(self, frame, len)
    }
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
    fn push<const HEADERS: usize>(
        &mut self,
        buffers: &mut impl ReplyBuffer,
        mut frame: Frame,
        len: usize,
        checksum: PackedChecksum,
    ) {
        if !buffers.set_len(&mut frame, len) {
            return free_malformed(buffers, frame);
        }
        frame.retreat(HEADERS);
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
    type Buffers<'a>: ReplyBuffer;

    fn buffers(arena: &mut Arena) -> Self::Buffers<'_>;

    /// Passes a [`QueuedDatagram::V4`] entry to the callback and queues the reply. Returns a reply
    /// that cannot take the fast path.
    fn respond_v4<const PARTIAL: bool>(
        &mut self,
        reply_path: &mut ReplyPath<'_, 8>,
        replies: &mut ReplyQueue<'_>,
        buffers: &mut Self::Buffers<'_>,
        frame: Frame,
    ) -> Option<SlowPathReply>;

    /// As [`ReplyStrategy::respond_v4`], for [`QueuedDatagram::V6`].
    fn respond_v6<const PARTIAL: bool>(
        &mut self,
        reply_path: &mut ReplyPath<'_, 32>,
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
struct InPlace<F>(F);

impl<F: FnMut(InPlaceRequest<'_>) -> Option<usize>> ReplyStrategy for InPlace<F> {
    type Buffers<'a> = FreeBatch<'a>;

    #[inline(always)]
    fn buffers(arena: &mut Arena) -> FreeBatch<'_> {
        arena.free_batch()
    }

    #[inline(always)]
    fn respond_v4<const PARTIAL: bool>(
        &mut self,
        reply_path: &mut ReplyPath<'_, 8>,
        replies: &mut ReplyQueue<'_>,
        buffers: &mut FreeBatch<'_>,
        mut frame: Frame,
    ) -> Option<SlowPathReply> {
        let request_bytes = frame.len();
        let Some((head, buffer)) = buffers.headers_mut(&mut frame) else {
            free_malformed(buffers, frame);
            return None;
        };
        let tuple = RawFourTuple::from_headers_v4(head);
        let (from, to) = tuple.app_addresses(reply_path.mapped);
        let len = (self.0)(InPlaceRequest { buffer: &mut *buffer, len: request_bytes, from, to });
        let Some(payload) = len.and_then(|len| buffer.get(..len)) else {
            buffers.free(frame);
            return None;
        };
        let len = payload.len();
        if replies.queue.is_full() || !reply_path.has_fast_path_v4(&tuple, len) {
            return Some(slow_path_reply(buffers, frame, len, tuple.app_addresses(false)));
        }
        let ports = tuple.ports.swapped();
        let checksum = reply_path.cached.template.emit_v4(head, payload, ports, PARTIAL);
        replies.push::<HEADERS_V4_BYTES>(buffers, frame, len, checksum);
        None
    }

    #[inline(always)]
    fn respond_v6<const PARTIAL: bool>(
        &mut self,
        reply_path: &mut ReplyPath<'_, 32>,
        replies: &mut ReplyQueue<'_>,
        buffers: &mut FreeBatch<'_>,
        mut frame: Frame,
    ) -> Option<SlowPathReply> {
        let request_bytes = frame.len();
        let Some((head, buffer)) = buffers.headers_mut(&mut frame) else {
            free_malformed(buffers, frame);
            return None;
        };
        let tuple = RawFourTuple::from_headers_v6(head);
        let (from, to) = tuple.app_addresses(reply_path.mapped);
        let len = (self.0)(InPlaceRequest { buffer: &mut *buffer, len: request_bytes, from, to });
        let Some(payload) = len.and_then(|len| buffer.get(..len)) else {
            buffers.free(frame);
            return None;
        };
        let len = payload.len();
        if replies.queue.is_full() || !reply_path.has_fast_path_v6(&tuple, len) {
            return Some(slow_path_reply(buffers, frame, len, tuple.app_addresses(false)));
        }
        let ports = tuple.ports.swapped();
        let checksum = reply_path.cached.template.emit_v6(head, payload, ports, PARTIAL);
        replies.push::<HEADERS_V6_BYTES>(buffers, frame, len, checksum);
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
struct Separate<F>(F);

impl<F: FnMut(UdpRequest<'_>, &mut [u8]) -> Option<usize>> Separate<F> {
    /// Passes a request to the callback and frees the request. Returns the reply without headers.
    #[inline(always)]
    fn respond(
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

impl<F: FnMut(UdpRequest<'_>, &mut [u8]) -> Option<usize>> ReplyStrategy for Separate<F> {
    type Buffers<'a> = &'a mut Arena;

    #[inline(always)]
    fn buffers(arena: &mut Arena) -> &mut Arena {
        arena
    }

    #[inline(always)]
    fn respond_v4<const PARTIAL: bool>(
        &mut self,
        reply_path: &mut ReplyPath<'_, 8>,
        replies: &mut ReplyQueue<'_>,
        buffers: &mut &mut Arena,
        frame: Frame,
    ) -> Option<SlowPathReply> {
        let Some(tuple) = buffers.headers(&frame).map(RawFourTuple::from_headers_v4) else {
            free_malformed(buffers, frame);
            return None;
        };
        let mut reply = self.respond(buffers, frame, tuple.app_addresses(reply_path.mapped))?;
        let len = reply.len();
        if replies.queue.is_full() || !reply_path.has_fast_path_v4(&tuple, len) {
            return Some(slow_path_reply(buffers, reply, len, tuple.app_addresses(false)));
        }
        let Some((head, buffer)) = buffers.headers_mut(&mut reply) else {
            free_malformed(buffers, reply);
            return None;
        };
        let ports = tuple.ports.swapped();
        let checksum = reply_path.cached.template.emit_v4(head, &buffer[..len], ports, PARTIAL);
        replies.push::<HEADERS_V4_BYTES>(buffers, reply, len, checksum);
        None
    }

    #[inline(always)]
    fn respond_v6<const PARTIAL: bool>(
        &mut self,
        reply_path: &mut ReplyPath<'_, 32>,
        replies: &mut ReplyQueue<'_>,
        buffers: &mut &mut Arena,
        frame: Frame,
    ) -> Option<SlowPathReply> {
        let Some(tuple) = buffers.headers(&frame).map(RawFourTuple::from_headers_v6) else {
            free_malformed(buffers, frame);
            return None;
        };
        let mut reply = self.respond(buffers, frame, tuple.app_addresses(reply_path.mapped))?;
        let len = reply.len();
        if replies.queue.is_full() || !reply_path.has_fast_path_v6(&tuple, len) {
            return Some(slow_path_reply(buffers, reply, len, tuple.app_addresses(false)));
        }
        let Some((head, buffer)) = buffers.headers_mut(&mut reply) else {
            free_malformed(buffers, reply);
            return None;
        };
        let ports = tuple.ports.swapped();
        let checksum = reply_path.cached.template.emit_v6(head, &buffer[..len], ports, PARTIAL);
        replies.push::<HEADERS_V6_BYTES>(buffers, reply, len, checksum);
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
            let (count, slow_path) = match self.get(id).and_then(Socket::front) {
                Some(QueuedDatagram::V4(_)) => {
                    let (count, reply) = if interface.transmit_checksum {
                        self.exchange_v4::<_, true>(
                            interface, now_ns, arena, id, remaining, strategy,
                        )
                    } else {
                        self.exchange_v4::<_, false>(
                            interface, now_ns, arena, id, remaining, strategy,
                        )
                    };
                    (count, reply.map(SlowPath::Reply))
                }
                Some(QueuedDatagram::V6(_)) => {
                    let (count, reply) = if interface.transmit_checksum {
                        self.exchange_v6::<_, true>(
                            interface, now_ns, arena, id, remaining, strategy,
                        )
                    } else {
                        self.exchange_v6::<_, false>(
                            interface, now_ns, arena, id, remaining, strategy,
                        )
                    };
                    (count, reply.map(SlowPath::Reply))
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

    /// Answers IPv4 datagrams at the front of the queue, up to the first that needs the slow path.
    /// Returns the number of datagrams taken, at least 1, and the slow-path reply of the last.
    // A separate function, so that all its variables fit in registers.
    #[inline(never)]
    fn exchange_v4<P: ReplyStrategy, const PARTIAL: bool>(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        max_datagrams: usize,
        strategy: &mut P,
    ) -> (usize, Option<SlowPathReply>) {
        let Some(socket) = self.get_mut(id) else { return (0, None) };
        let limit = if socket.uses_default_headers { interface.limits.transmit_frames } else { 0 };
        let Counters { held, delivered, transmitted, .. } = &mut interface.counters;
        let mut reply_path = ReplyPath {
            now_ns,
            paths: &interface.paths,
            mapped: socket.bound.is_ipv6(),
            cached: CachedRoute::NONE,
        };
        let mut replies = ReplyQueue::new(interface.transmit.push_batch(limit, 0), transmitted);
        let mut queue = socket.pop_batch(max_datagrams, held, delivered);
        let mut buffers = P::buffers(arena);
        while let Some(QueuedDatagram::V4(frame)) =
            queue.next_if(|waiting| matches!(waiting, QueuedDatagram::V4(_)))
        {
            if let Some(reply) =
                strategy.respond_v4::<PARTIAL>(&mut reply_path, &mut replies, &mut buffers, frame)
            {
                return (queue.taken(), Some(reply));
            }
        }
        (queue.taken(), None)
    }

    /// Answers IPv6 datagrams at the front of the queue, up to the first that needs the slow path.
    /// Returns the number of datagrams taken, at least 1, and the slow-path reply of the last.
    // A separate function, so that all its variables fit in registers.
    #[inline(never)]
    fn exchange_v6<P: ReplyStrategy, const PARTIAL: bool>(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        max_datagrams: usize,
        strategy: &mut P,
    ) -> (usize, Option<SlowPathReply>) {
        let Some(socket) = self.get_mut(id) else { return (0, None) };
        let limit = if socket.uses_default_headers { interface.limits.transmit_frames } else { 0 };
        let Counters { held, delivered, transmitted, .. } = &mut interface.counters;
        let mut reply_path = ReplyPath {
            now_ns,
            paths: &interface.paths,
            mapped: socket.bound.is_ipv6(),
            cached: CachedRoute::NONE,
        };
        let mut replies = ReplyQueue::new(interface.transmit.push_batch(limit, 0), transmitted);
        let mut queue = socket.pop_batch(max_datagrams, held, delivered);
        let mut buffers = P::buffers(arena);
        while let Some(QueuedDatagram::V6(frame)) =
            queue.next_if(|waiting| matches!(waiting, QueuedDatagram::V6(_)))
        {
            if let Some(reply) =
                strategy.respond_v6::<PARTIAL>(&mut reply_path, &mut replies, &mut buffers, frame)
            {
                return (queue.taken(), Some(reply));
            }
        }
        (queue.taken(), None)
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
        let ends = SendEnds { to: Some(to), from: Some(from) };
        // The stack counts a failure under its drop reason.
        let _ = match payload {
            Payload::Frame(frame) => self.send_frame(interface, now_ns, arena, id, ends, frame),
            Payload::Owned(bytes) => self.send(interface, now_ns, arena, id, ends, &bytes),
        };
    }
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
    buffers: &impl ReplyBuffer,
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
fn free_malformed(buffers: &mut impl ReplyBuffer, frame: Frame) {
    debug_assert!(false, "a queued datagram has no headers, or a reply no space");
    buffers.free(frame);
}
