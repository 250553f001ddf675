//! Datagrams that are answered at once, many at a time.
//!
//! An answer goes back the way that the question came, from the address that
//! was asked, so most of what sending has to find out is known already.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_memory::arena::GiveBack;
use tidegate_memory::fifo::Spare;
use tidegate_memory::{Arena, Frame, PackedChecksum};

use super::socket::Socket;
use super::{Datagram, Payload, UdpId, Waiting, array_at};
use crate::fast_path::{HEADERS_V4_BYTES, HEADERS_V6_BYTES, Ports, Template};
use crate::path::Paths;
use crate::{Counters, Stack};

/// A datagram to be answered.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The datagram.
    pub bytes: &'a [u8],
    /// Who sent it.
    pub from: SocketAddr,
    /// The address of ours that it was sent to.
    pub to: IpAddr,
}

/// A datagram to be answered where it lies.
#[derive(Debug)]
pub struct InPlace<'a> {
    /// The datagram, and behind it room for an answer that is longer. The
    /// answer is written over it from the start.
    pub buffer: &'a mut [u8],
    /// How many bytes of the buffer are the datagram.
    pub len: usize,
    /// Who sent it.
    pub from: SocketAddr,
    /// The address of ours that it was sent to.
    pub to: IpAddr,
}

/// The two ends of a datagram that waits, as its headers tell them: `B` is twice
/// the length `A` of an address.
#[derive(Clone, Copy)]
struct Ends<const A: usize, const B: usize> {
    /// The peer's and ours.
    addresses: [u8; B],
    /// The peer's and ours.
    ports: Ports,
}

impl Ends<4, 8> {
    #[inline(always)]
    fn v4(head: &[u8; HEADERS_V4_BYTES]) -> Self {
        Self { addresses: array_at(head, 26), ports: Ports::of(array_at(head, 34)) }
    }
}

impl Ends<16, 32> {
    #[inline(always)]
    fn v6(head: &[u8; HEADERS_V6_BYTES]) -> Self {
        Self { addresses: array_at(head, 22), ports: Ports::of(array_at(head, 54)) }
    }
}

impl<const A: usize, const B: usize> Ends<A, B> {
    /// The addresses of the peer and ours.
    #[inline(always)]
    fn split(&self) -> ([u8; A], [u8; A]) {
        (array_at(&self.addresses, 0), array_at(&self.addresses, A))
    }

    /// The two ends as the application shall see them: who sent it, and the
    /// address of ours. `mapped` says that IPv4 is mapped into IPv6.
    #[inline(always)]
    fn present(&self, mapped: bool) -> (SocketAddr, IpAddr)
    where
        IpAddr: From<[u8; A]>,
    {
        let ip = |address: [u8; A]| match IpAddr::from(address) {
            IpAddr::V4(v4) if mapped => v4.to_ipv6_mapped().into(),
            ip => ip,
        };
        let (remote, local) = self.split();
        (SocketAddr::new(ip(remote), self.ports.source()), ip(local))
    }
}

/// How one socket sends its answers.
struct Way<'a, const N: usize> {
    now_ns: u64,
    paths: &'a Paths,
    /// The application sees IPv4 addresses mapped into IPv6.
    mapped: bool,
    /// Whom the last answer went to, and the way there.
    last: Last<'a, N>,
}

/// The way that an answer went: the next one often goes there, too.
struct Last<'a, const N: usize> {
    /// The addresses, the peer's first.
    addresses: [u8; N],
    template: &'a Template,
    /// The longest answer that can go the short way.
    most_bytes: usize,
}

impl<const N: usize> Last<'_, N> {
    const NONE: Self = Self { addresses: [0xff; N], template: &Template::NONE, most_bytes: 0 };
}

impl<'a> Way<'a, 8> {
    /// Whether an answer of `len` bytes can go the short way; `last` is that
    /// way then.
    #[inline(always)]
    fn is_short_v4(&mut self, ends: &Ends<4, 8>, len: usize) -> bool {
        if self.last.addresses != ends.addresses {
            let (remote, local) = ends.split();
            let path = self.paths.get(self.now_ns, Ipv4Addr::from(remote).into());
            let Some(path) = path else { return false };
            if path.template.source_v4() != Ipv4Addr::from(local) {
                return false;
            }
            let Some(most_bytes) = path.plain_bytes.checked_sub(HEADERS_V4_BYTES) else {
                return false;
            };
            self.last = Last { addresses: ends.addresses, template: &path.template, most_bytes };
        }
        len <= self.last.most_bytes
    }
}

impl<'a> Way<'a, 32> {
    /// Whether an answer of `len` bytes can go the short way; `last` is that
    /// way then.
    #[inline(always)]
    fn is_short_v6(&mut self, ends: &Ends<16, 32>, len: usize) -> bool {
        if self.last.addresses != ends.addresses {
            let (remote, local) = ends.split();
            let path = self.paths.get(self.now_ns, Ipv6Addr::from(remote).into());
            let Some(path) = path else { return false };
            if path.template.source_v6() != Ipv6Addr::from(local) {
                return false;
            }
            let Some(most_bytes) = path.plain_bytes.checked_sub(HEADERS_V6_BYTES) else {
                return false;
            };
            self.last = Last { addresses: ends.addresses, template: &path.template, most_bytes };
        }
        len <= self.last.most_bytes
    }
}

/// An answer that does not go the short way.
struct Answer {
    frame: Frame,
    to: SocketAddr,
    from: IpAddr,
}

/// What does not go the short way.
enum Long {
    /// An answer.
    Answer(Answer),
    /// A datagram that was not answered yet.
    Datagram(Datagram),
}

/// What is needed of an arena to answer in it.
trait Desk {
    fn free(&mut self, frame: Frame);

    fn set_len(&self, frame: &mut Frame, len: usize) -> bool;
}

impl Desk for &mut Arena {
    #[inline(always)]
    fn free(&mut self, frame: Frame) {
        Arena::free(self, frame);
    }

    #[inline(always)]
    fn set_len(&self, frame: &mut Frame, len: usize) -> bool {
        Arena::set_len(self, frame, len)
    }
}

impl Desk for GiveBack<'_> {
    #[inline(always)]
    fn free(&mut self, frame: Frame) {
        GiveBack::free(self, frame);
    }

    #[inline(always)]
    fn set_len(&self, frame: &mut Frame, len: usize) -> bool {
        GiveBack::set_len(self, frame, len)
    }
}

/// Answers that are ready to be sent.
struct Ready<'a> {
    queue: Spare<'a, Frame>,
    transmitted: &'a mut u64,
}

impl<'a> Ready<'a> {
    fn new(queue: Spare<'a, Frame>, transmitted: &'a mut u64) -> Self {
        Self { queue, transmitted }
    }

    /// Queues a frame of which `len` bytes are the answer and whose headers are
    /// in place, in front of it. There is room.
    #[inline(always)]
    fn push<const HEADERS: usize>(
        &mut self,
        desk: &mut impl Desk,
        mut frame: Frame,
        len: usize,
        checksum: PackedChecksum,
    ) {
        if !desk.set_len(&mut frame, len) {
            return lost(desk, frame);
        }
        frame.retreat(HEADERS);
        frame.set_packed_checksum(checksum);
        if let Err(frame) = self.queue.push(frame) {
            lost(desk, frame);
        }
    }
}

impl Drop for Ready<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.transmitted += self.queue.used() as u64;
    }
}

/// Where answers are written. `PARTIAL` says that the port completes checksums.
trait Place {
    /// The arena, as it is needed for that.
    type Desk<'a>: Desk;

    fn desk(arena: &mut Arena) -> Self::Desk<'_>;

    /// Has a datagram answered that waits as [`Waiting::V4`]. Returns what does
    /// not go the short way.
    fn answer_v4<const PARTIAL: bool>(
        &mut self,
        way: &mut Way<'_, 8>,
        ready: &mut Ready<'_>,
        desk: &mut Self::Desk<'_>,
        frame: Frame,
    ) -> Option<Answer>;

    /// Has a datagram answered that waits as [`Waiting::V6`], as
    /// [`Place::answer_v4`].
    fn answer_v6<const PARTIAL: bool>(
        &mut self,
        way: &mut Way<'_, 32>,
        ready: &mut Ready<'_>,
        desk: &mut Self::Desk<'_>,
        frame: Frame,
    ) -> Option<Answer>;

    /// Has any datagram answered. `send` takes the answer.
    fn answer_any(
        &mut self,
        arena: &mut Arena,
        datagram: Datagram,
        send: impl FnOnce(&mut Arena, Payload),
    );
}

/// Each answer is written over its datagram.
struct Over<F>(F);

impl<F: FnMut(InPlace<'_>) -> Option<usize>> Place for Over<F> {
    type Desk<'a> = GiveBack<'a>;

    #[inline(always)]
    fn desk(arena: &mut Arena) -> GiveBack<'_> {
        arena.give_back()
    }

    #[inline(always)]
    fn answer_v4<const PARTIAL: bool>(
        &mut self,
        way: &mut Way<'_, 8>,
        ready: &mut Ready<'_>,
        desk: &mut GiveBack<'_>,
        mut frame: Frame,
    ) -> Option<Answer> {
        let asked = frame.len();
        let Some((head, room)) = desk.headers_mut(&mut frame) else {
            lost(desk, frame);
            return None;
        };
        let ends = Ends::v4(head);
        let (from, to) = ends.present(way.mapped);
        let len = (self.0)(InPlace { buffer: &mut *room, len: asked, from, to });
        let Some(payload) = len.and_then(|len| room.get(..len)) else {
            desk.free(frame);
            return None;
        };
        let len = payload.len();
        if ready.queue.is_full() || !way.is_short_v4(&ends, len) {
            return Some(long(desk, frame, len, ends.present(false)));
        }
        let ports = ends.ports.swapped();
        let checksum = way.last.template.emit_v4(head, payload, ports, PARTIAL);
        ready.push::<HEADERS_V4_BYTES>(desk, frame, len, checksum);
        None
    }

    #[inline(always)]
    fn answer_v6<const PARTIAL: bool>(
        &mut self,
        way: &mut Way<'_, 32>,
        ready: &mut Ready<'_>,
        desk: &mut GiveBack<'_>,
        mut frame: Frame,
    ) -> Option<Answer> {
        let asked = frame.len();
        let Some((head, room)) = desk.headers_mut(&mut frame) else {
            lost(desk, frame);
            return None;
        };
        let ends = Ends::v6(head);
        let (from, to) = ends.present(way.mapped);
        let len = (self.0)(InPlace { buffer: &mut *room, len: asked, from, to });
        let Some(payload) = len.and_then(|len| room.get(..len)) else {
            desk.free(frame);
            return None;
        };
        let len = payload.len();
        if ready.queue.is_full() || !way.is_short_v6(&ends, len) {
            return Some(long(desk, frame, len, ends.present(false)));
        }
        let ports = ends.ports.swapped();
        let checksum = way.last.template.emit_v6(head, payload, ports, PARTIAL);
        ready.push::<HEADERS_V6_BYTES>(desk, frame, len, checksum);
        None
    }

    fn answer_any(
        &mut self,
        arena: &mut Arena,
        datagram: Datagram,
        send: impl FnOnce(&mut Arena, Payload),
    ) {
        let (from, to) = (datagram.remote, datagram.local);
        match datagram.payload {
            Payload::Frame(mut frame) => {
                let len = frame.len();
                let answered = arena
                    .headers_mut::<0>(&mut frame)
                    .and_then(|(_, buffer)| (self.0)(InPlace { buffer, len, from, to }));
                if answered.is_some_and(|len| arena.set_len(&mut frame, len)) {
                    send(arena, Payload::Frame(frame));
                } else {
                    arena.free(frame);
                }
            }
            Payload::Owned(bytes) => {
                let mut bytes = bytes.into_vec();
                let len = bytes.len();
                let answered = (self.0)(InPlace { buffer: &mut bytes, len, from, to });
                if let Some(len) = answered.filter(|&len| len <= bytes.len()) {
                    bytes.truncate(len);
                    send(arena, Payload::Owned(bytes.into()));
                }
            }
        }
    }
}

/// Each answer is written to a frame of its own.
struct Apart<F>(F);

impl<F: FnMut(Request<'_>, &mut [u8]) -> Option<usize>> Apart<F> {
    /// Has a datagram answered. Returns the answer without headers.
    #[inline(always)]
    fn answer(
        &mut self,
        arena: &mut Arena,
        frame: Frame,
        (from, to): (SocketAddr, IpAddr),
    ) -> Option<Frame> {
        let mut reply = blank(arena);
        let len = reply.as_mut().and_then(|reply| {
            let (bytes, buffer) = arena.pair(&frame, reply);
            (self.0)(Request { bytes, from, to }, buffer)
        });
        arena.free(frame);
        cut(arena, reply?, len)
    }
}

impl<F: FnMut(Request<'_>, &mut [u8]) -> Option<usize>> Place for Apart<F> {
    type Desk<'a> = &'a mut Arena;

    #[inline(always)]
    fn desk(arena: &mut Arena) -> &mut Arena {
        arena
    }

    #[inline(always)]
    fn answer_v4<const PARTIAL: bool>(
        &mut self,
        way: &mut Way<'_, 8>,
        ready: &mut Ready<'_>,
        desk: &mut &mut Arena,
        frame: Frame,
    ) -> Option<Answer> {
        let Some(ends) = desk.headers(&frame).map(Ends::v4) else {
            lost(desk, frame);
            return None;
        };
        let mut reply = self.answer(desk, frame, ends.present(way.mapped))?;
        let len = reply.len();
        if ready.queue.is_full() || !way.is_short_v4(&ends, len) {
            return Some(long(desk, reply, len, ends.present(false)));
        }
        let Some((head, room)) = desk.headers_mut(&mut reply) else {
            lost(desk, reply);
            return None;
        };
        let ports = ends.ports.swapped();
        let checksum = way.last.template.emit_v4(head, &room[..len], ports, PARTIAL);
        ready.push::<HEADERS_V4_BYTES>(desk, reply, len, checksum);
        None
    }

    #[inline(always)]
    fn answer_v6<const PARTIAL: bool>(
        &mut self,
        way: &mut Way<'_, 32>,
        ready: &mut Ready<'_>,
        desk: &mut &mut Arena,
        frame: Frame,
    ) -> Option<Answer> {
        let Some(ends) = desk.headers(&frame).map(Ends::v6) else {
            lost(desk, frame);
            return None;
        };
        let mut reply = self.answer(desk, frame, ends.present(way.mapped))?;
        let len = reply.len();
        if ready.queue.is_full() || !way.is_short_v6(&ends, len) {
            return Some(long(desk, reply, len, ends.present(false)));
        }
        let Some((head, room)) = desk.headers_mut(&mut reply) else {
            lost(desk, reply);
            return None;
        };
        let ports = ends.ports.swapped();
        let checksum = way.last.template.emit_v6(head, &room[..len], ports, PARTIAL);
        ready.push::<HEADERS_V6_BYTES>(desk, reply, len, checksum);
        None
    }

    fn answer_any(
        &mut self,
        arena: &mut Arena,
        datagram: Datagram,
        send: impl FnOnce(&mut Arena, Payload),
    ) {
        let (from, to) = (datagram.remote, datagram.local);
        let mut reply = blank(arena);
        let len = reply.as_mut().and_then(|reply| {
            datagram.with_reply(arena, reply, |bytes, buffer| {
                (self.0)(Request { bytes, from, to }, buffer)
            })
        });
        datagram.release(arena);
        if let Some(reply) = reply.and_then(|reply| cut(arena, reply, len)) {
            send(arena, Payload::Frame(reply));
        }
    }
}

impl Stack {
    /// Hands the datagrams that wait in a socket to `answer`, at most `most` of
    /// them, with the payload of a frame to write the answer to, and sends as
    /// many bytes of it as `answer` says; `None` sends nothing. Returns how many
    /// datagrams were taken.
    ///
    /// An answer leaves from the address that was asked. It is lost, and
    /// counted, when there is no room to send it.
    #[inline]
    pub fn udp_exchange(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        most: usize,
        answer: impl FnMut(Request<'_>, &mut [u8]) -> Option<usize>,
    ) -> usize {
        self.exchange(now_ns, arena, id, most, &mut Apart(answer))
    }

    /// As [`Stack::udp_exchange`], but each answer is written over its
    /// datagram: no second frame is needed, and what stays the same need not be
    /// copied.
    #[inline]
    pub fn udp_exchange_in_place(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        most: usize,
        answer: impl FnMut(InPlace<'_>) -> Option<usize>,
    ) -> usize {
        self.exchange(now_ns, arena, id, most, &mut Over(answer))
    }

    #[inline]
    fn exchange(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        most: usize,
        place: &mut impl Place,
    ) -> usize {
        let mut taken = 0;
        while taken < most {
            let left = most - taken;
            let (count, long) = match self.udp.get(id).and_then(Socket::front) {
                Some(Waiting::V4(_)) => {
                    let (count, answer) = if self.transmit_checksum {
                        self.exchange_v4::<_, true>(now_ns, arena, id, left, place)
                    } else {
                        self.exchange_v4::<_, false>(now_ns, arena, id, left, place)
                    };
                    (count, answer.map(Long::Answer))
                }
                Some(Waiting::V6(_)) => {
                    let (count, answer) = if self.transmit_checksum {
                        self.exchange_v6::<_, true>(now_ns, arena, id, left, place)
                    } else {
                        self.exchange_v6::<_, false>(now_ns, arena, id, left, place)
                    };
                    (count, answer.map(Long::Answer))
                }
                Some(Waiting::Described) => (1, self.udp_receive(arena, id).map(Long::Datagram)),
                None => break,
            };
            taken += count;
            match long {
                Some(Long::Answer(Answer { frame, to, from })) => {
                    self.send_long(now_ns, arena, id, (to, from), Payload::Frame(frame));
                }
                Some(Long::Datagram(datagram)) => {
                    let ends = (datagram.remote, datagram.local);
                    place.answer_any(arena, datagram, |arena, payload| {
                        self.send_long(now_ns, arena, id, ends, payload);
                    });
                }
                None if count == 0 => break,
                None => {}
            }
        }
        taken
    }

    /// Has IPv4 datagrams at the front answered, up to the first that does not
    /// go the short way. Returns how many were taken, at least one, and what to
    /// do for the last of them.
    // A function of its own: so that all it needs finds a place in registers.
    #[inline(never)]
    fn exchange_v4<P: Place, const PARTIAL: bool>(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        most: usize,
        place: &mut P,
    ) -> (usize, Option<Answer>) {
        let Some(socket) = self.udp.get_mut(id) else { return (0, None) };
        let limit = if socket.sends_plainly { self.limits.transmit_frames } else { 0 };
        let Counters { held, delivered, transmitted, .. } = &mut self.counters;
        let mut way =
            Way { now_ns, paths: &self.paths, mapped: socket.bound.is_ipv6(), last: Last::NONE };
        let mut ready = Ready::new(self.transmit.spare(limit, 0), transmitted);
        let mut queue = socket.empty(most, held, delivered);
        let mut desk = P::desk(arena);
        while let Some(Waiting::V4(frame)) =
            queue.next_if(|waiting| matches!(waiting, Waiting::V4(_)))
        {
            if let Some(answer) = place.answer_v4::<PARTIAL>(&mut way, &mut ready, &mut desk, frame)
            {
                return (queue.taken(), Some(answer));
            }
        }
        (queue.taken(), None)
    }

    /// Has IPv6 datagrams at the front answered, up to the first that does not
    /// go the short way. Returns how many were taken, at least one, and what to
    /// do for the last of them.
    // A function of its own: so that all it needs finds a place in registers.
    #[inline(never)]
    fn exchange_v6<P: Place, const PARTIAL: bool>(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        most: usize,
        place: &mut P,
    ) -> (usize, Option<Answer>) {
        let Some(socket) = self.udp.get_mut(id) else { return (0, None) };
        let limit = if socket.sends_plainly { self.limits.transmit_frames } else { 0 };
        let Counters { held, delivered, transmitted, .. } = &mut self.counters;
        let mut way =
            Way { now_ns, paths: &self.paths, mapped: socket.bound.is_ipv6(), last: Last::NONE };
        let mut ready = Ready::new(self.transmit.spare(limit, 0), transmitted);
        let mut queue = socket.empty(most, held, delivered);
        let mut desk = P::desk(arena);
        while let Some(Waiting::V6(frame)) =
            queue.next_if(|waiting| matches!(waiting, Waiting::V6(_)))
        {
            if let Some(answer) = place.answer_v6::<PARTIAL>(&mut way, &mut ready, &mut desk, frame)
            {
                return (queue.taken(), Some(answer));
            }
        }
        (queue.taken(), None)
    }

    #[inline(never)]
    fn send_long(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        (to, from): (SocketAddr, IpAddr),
        payload: Payload,
    ) {
        // A refusal is counted by the stack under its reason.
        let _ = match payload {
            Payload::Frame(frame) => {
                self.udp_send_frame(now_ns, arena, id, Some(to), Some(from), frame)
            }
            Payload::Owned(bytes) => self.udp_send(now_ns, arena, id, Some(to), Some(from), &bytes),
        };
    }
}

/// A frame to write an answer to.
#[inline(always)]
fn blank(arena: &mut Arena) -> Option<Frame> {
    let mut frame = arena.alloc()?;
    let room = arena.room(&frame);
    arena.set_len(&mut frame, room);
    Some(frame)
}

/// A frame cut to the length of the answer; given back when there is none, or
/// it is longer than its room.
#[inline(always)]
fn cut(arena: &mut Arena, mut frame: Frame, len: Option<usize>) -> Option<Frame> {
    if len.is_some_and(|len| arena.set_len(&mut frame, len)) {
        return Some(frame);
    }
    arena.free(frame);
    None
}

#[inline(always)]
fn long(
    desk: &impl Desk,
    mut frame: Frame,
    len: usize,
    (to, from): (SocketAddr, IpAddr),
) -> Answer {
    let fits = desk.set_len(&mut frame, len);
    debug_assert!(fits, "an answer lies in its room");
    Answer { frame, to, from }
}

/// What waits in a queue has headers in front, and an answer has a place.
#[cold]
fn lost(desk: &mut impl Desk, frame: Frame) {
    debug_assert!(false, "a datagram lost its headers or its place");
    desk.free(frame);
}
