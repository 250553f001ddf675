//! Datagrams that are answered at once, many at a time.
//!
//! An answer goes back the way that the question came, from the address that
//! was asked, so most of what sending has to find out is known already.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_memory::{Arena, Frame, PackedChecksum};

use super::socket::Socket;
use super::{Datagram, Payload, UdpId, Waiting, array_at};
use crate::fast_path::{HEADERS_V4_BYTES, HEADERS_V6_BYTES, Template};
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
    /// As they stand in the answer: ours and the peer's.
    ports: [[u8; 2]; 2],
}

impl Ends<4, 8> {
    #[inline(always)]
    fn v4(head: &[u8; HEADERS_V4_BYTES]) -> Self {
        Self { addresses: array_at(head, 26), ports: [array_at(head, 36), array_at(head, 34)] }
    }
}

impl Ends<16, 32> {
    #[inline(always)]
    fn v6(head: &[u8; HEADERS_V6_BYTES]) -> Self {
        Self { addresses: array_at(head, 22), ports: [array_at(head, 56), array_at(head, 54)] }
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
        (SocketAddr::new(ip(remote), u16::from_be_bytes(self.ports[1])), ip(local))
    }

    /// Whether the peer can be answered.
    #[inline(always)]
    fn has_peer(&self) -> bool {
        self.ports[1] != [0; 2]
    }
}

/// How one socket sends its answers.
struct Way<'a, const N: usize> {
    now_ns: u64,
    paths: &'a Paths,
    /// The port completes checksums.
    partial: bool,
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
    /// The longest frame that can go the short way.
    plain_bytes: usize,
}

impl<const N: usize> Last<'_, N> {
    const NONE: Self = Self { addresses: [0xff; N], template: &Template::NONE, plain_bytes: 0 };
}

impl<'a> Way<'a, 8> {
    /// The headers for an answer, if it can go the short way.
    #[inline(always)]
    fn template_v4(&mut self, ends: &Ends<4, 8>, len: usize) -> Option<&'a Template> {
        if self.last.addresses != ends.addresses {
            let (remote, local) = ends.split();
            let path = self.paths.get(self.now_ns, Ipv4Addr::from(remote).into())?;
            let (template, plain_bytes) = (&path.template, path.plain_bytes);
            if template.source_v4() != Ipv4Addr::from(local) {
                return None;
            }
            self.last = Last { addresses: ends.addresses, template, plain_bytes };
        }
        let fits = len + HEADERS_V4_BYTES <= self.last.plain_bytes;
        (fits && ends.has_peer()).then_some(self.last.template)
    }
}

impl<'a> Way<'a, 32> {
    /// The headers for an answer, if it can go the short way.
    #[inline(always)]
    fn template_v6(&mut self, ends: &Ends<16, 32>, len: usize) -> Option<&'a Template> {
        if self.last.addresses != ends.addresses {
            let (remote, local) = ends.split();
            let path = self.paths.get(self.now_ns, Ipv6Addr::from(remote).into())?;
            let (template, plain_bytes) = (&path.template, path.plain_bytes);
            if template.source_v6() != Ipv6Addr::from(local) {
                return None;
            }
            self.last = Last { addresses: ends.addresses, template, plain_bytes };
        }
        let fits = len + HEADERS_V6_BYTES <= self.last.plain_bytes;
        (fits && ends.has_peer()).then_some(self.last.template)
    }
}

/// What became of a datagram that was to be answered.
enum Answered {
    /// There is nothing to send.
    No,
    /// The answer, ready to be sent.
    Ready(Frame),
    /// The answer, to be sent some longer way.
    Long(Long),
}

/// What does not go the short way.
enum Long {
    /// An answer, where it goes, and from where.
    Answer(Frame, SocketAddr, IpAddr),
    /// A datagram that was not answered yet.
    Datagram(Datagram),
}

/// Where answers are written.
trait Place {
    /// Has a datagram answered that waits as [`Waiting::V4`].
    fn answer_v4(
        &mut self,
        way: &mut Way<'_, 8>,
        arena: &mut Arena,
        frame: Frame,
        open: bool,
    ) -> Answered;

    /// Has a datagram answered that waits as [`Waiting::V6`].
    fn answer_v6(
        &mut self,
        way: &mut Way<'_, 32>,
        arena: &mut Arena,
        frame: Frame,
        open: bool,
    ) -> Answered;

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
    #[inline(always)]
    fn answer_v4(
        &mut self,
        way: &mut Way<'_, 8>,
        arena: &mut Arena,
        mut frame: Frame,
        open: bool,
    ) -> Answered {
        let asked = frame.len();
        let Some((head, room)) = arena.headers_mut(&mut frame) else { return lost(arena, frame) };
        let ends = Ends::v4(head);
        let (from, to) = ends.present(way.mapped);
        let len = (self.0)(InPlace { buffer: &mut *room, len: asked, from, to });
        let Some(payload) = len.and_then(|len| room.get(..len)) else {
            arena.free(frame);
            return Answered::No;
        };
        let len = payload.len();
        let template = way.template_v4(&ends, len).filter(|_| open);
        let Some(template) = template else {
            return long(arena, frame, len, ends.present(false));
        };
        let checksum = template.emit_v4(head, payload, ends.ports, way.partial);
        ready::<HEADERS_V4_BYTES>(arena, frame, len, checksum)
    }

    #[inline(always)]
    fn answer_v6(
        &mut self,
        way: &mut Way<'_, 32>,
        arena: &mut Arena,
        mut frame: Frame,
        open: bool,
    ) -> Answered {
        let asked = frame.len();
        let Some((head, room)) = arena.headers_mut(&mut frame) else { return lost(arena, frame) };
        let ends = Ends::v6(head);
        let (from, to) = ends.present(way.mapped);
        let len = (self.0)(InPlace { buffer: &mut *room, len: asked, from, to });
        let Some(payload) = len.and_then(|len| room.get(..len)) else {
            arena.free(frame);
            return Answered::No;
        };
        let len = payload.len();
        let template = way.template_v6(&ends, len).filter(|_| open);
        let Some(template) = template else {
            return long(arena, frame, len, ends.present(false));
        };
        let checksum = template.emit_v6(head, payload, ends.ports, way.partial);
        ready::<HEADERS_V6_BYTES>(arena, frame, len, checksum)
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
    #[inline(always)]
    fn answer_v4(
        &mut self,
        way: &mut Way<'_, 8>,
        arena: &mut Arena,
        frame: Frame,
        open: bool,
    ) -> Answered {
        let Some(ends) = arena.headers(&frame).map(Ends::v4) else { return lost(arena, frame) };
        let reply = self.answer(arena, frame, ends.present(way.mapped));
        let Some(mut reply) = reply else { return Answered::No };
        let len = reply.len();
        let template = way.template_v4(&ends, len).filter(|_| open);
        let Some(template) = template else {
            return long(arena, reply, len, ends.present(false));
        };
        let Some((head, room)) = arena.headers_mut(&mut reply) else { return lost(arena, reply) };
        let checksum = template.emit_v4(head, &room[..len], ends.ports, way.partial);
        ready::<HEADERS_V4_BYTES>(arena, reply, len, checksum)
    }

    #[inline(always)]
    fn answer_v6(
        &mut self,
        way: &mut Way<'_, 32>,
        arena: &mut Arena,
        frame: Frame,
        open: bool,
    ) -> Answered {
        let Some(ends) = arena.headers(&frame).map(Ends::v6) else { return lost(arena, frame) };
        let reply = self.answer(arena, frame, ends.present(way.mapped));
        let Some(mut reply) = reply else { return Answered::No };
        let len = reply.len();
        let template = way.template_v6(&ends, len).filter(|_| open);
        let Some(template) = template else {
            return long(arena, reply, len, ends.present(false));
        };
        let Some((head, room)) = arena.headers_mut(&mut reply) else { return lost(arena, reply) };
        let checksum = template.emit_v6(head, &room[..len], ends.ports, way.partial);
        ready::<HEADERS_V6_BYTES>(arena, reply, len, checksum)
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
                Some(Waiting::V4(_)) => self.exchange_v4(now_ns, arena, id, left, place),
                Some(Waiting::V6(_)) => self.exchange_v6(now_ns, arena, id, left, place),
                Some(Waiting::Described) => (1, self.udp_receive(arena, id).map(Long::Datagram)),
                None => break,
            };
            taken += count;
            match long {
                Some(Long::Answer(frame, to, from)) => {
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
    fn exchange_v4<P: Place>(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        most: usize,
        place: &mut P,
    ) -> (usize, Option<Long>) {
        let Some(socket) = self.udp.get_mut(id) else { return (0, None) };
        let limit = if socket.sends_plainly { self.limits.transmit_frames } else { 0 };
        let Counters { held, delivered, transmitted, .. } = &mut self.counters;
        let mut tally = Tally { held, delivered, transmitted, taken: 0, sent: 0 };
        let mut way = Way {
            now_ns,
            paths: &self.paths,
            partial: self.transmit_checksum,
            mapped: socket.bound.is_ipv6(),
            last: Last::NONE,
        };
        let mut queue = self.transmit.spare(limit, 0);
        let (mut run, mut room) = socket.run();
        while tally.taken < most {
            let next = run.next_if(|waiting| matches!(waiting, Waiting::V4(_)));
            let Some(Waiting::V4(frame)) = next else { break };
            tally.taken += 1;
            room.give(frame.len());
            match place.answer_v4(&mut way, arena, frame, !queue.is_full()) {
                Answered::No => {}
                Answered::Ready(frame) => match queue.push(frame) {
                    Ok(()) => tally.sent += 1,
                    Err(frame) => arena.free(frame),
                },
                Answered::Long(long) => return (tally.taken, Some(long)),
            }
        }
        (tally.taken, None)
    }

    /// Has IPv6 datagrams at the front answered, up to the first that does not
    /// go the short way. Returns how many were taken, at least one, and what to
    /// do for the last of them.
    // A function of its own: so that all it needs finds a place in registers.
    #[inline(never)]
    fn exchange_v6<P: Place>(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        most: usize,
        place: &mut P,
    ) -> (usize, Option<Long>) {
        let Some(socket) = self.udp.get_mut(id) else { return (0, None) };
        let limit = if socket.sends_plainly { self.limits.transmit_frames } else { 0 };
        let Counters { held, delivered, transmitted, .. } = &mut self.counters;
        let mut tally = Tally { held, delivered, transmitted, taken: 0, sent: 0 };
        let mut way = Way {
            now_ns,
            paths: &self.paths,
            partial: self.transmit_checksum,
            mapped: socket.bound.is_ipv6(),
            last: Last::NONE,
        };
        let mut queue = self.transmit.spare(limit, 0);
        let (mut run, mut room) = socket.run();
        while tally.taken < most {
            let next = run.next_if(|waiting| matches!(waiting, Waiting::V6(_)));
            let Some(Waiting::V6(frame)) = next else { break };
            tally.taken += 1;
            room.give(frame.len());
            match place.answer_v6(&mut way, arena, frame, !queue.is_full()) {
                Answered::No => {}
                Answered::Ready(frame) => match queue.push(frame) {
                    Ok(()) => tally.sent += 1,
                    Err(frame) => arena.free(frame),
                },
                Answered::Long(long) => return (tally.taken, Some(long)),
            }
        }
        (tally.taken, None)
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

/// Counts what was exchanged, whatever ends the exchange.
struct Tally<'a> {
    held: &'a mut u64,
    delivered: &'a mut u64,
    transmitted: &'a mut u64,
    taken: usize,
    sent: usize,
}

impl Drop for Tally<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.held -= self.taken as u64;
        *self.delivered += self.taken as u64;
        *self.transmitted += self.sent as u64;
    }
}

/// A frame to write an answer to.
#[inline(always)]
fn blank(arena: &mut Arena) -> Option<Frame> {
    let mut frame = arena.alloc()?;
    let room = arena.frame_bytes() - frame.headroom();
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
fn long(arena: &Arena, mut frame: Frame, len: usize, (to, from): (SocketAddr, IpAddr)) -> Answered {
    let fits = arena.set_len(&mut frame, len);
    debug_assert!(fits, "an answer lies in its room");
    Answered::Long(Long::Answer(frame, to, from))
}

/// What waits in a queue has headers in front.
#[cold]
fn lost(arena: &mut Arena, frame: Frame) -> Answered {
    debug_assert!(false, "a datagram lost its headers");
    arena.free(frame);
    Answered::No
}

/// An answer of `len` bytes whose headers are in place.
#[inline(always)]
fn ready<const HEADERS: usize>(
    arena: &mut Arena,
    mut frame: Frame,
    len: usize,
    checksum: PackedChecksum,
) -> Answered {
    if !arena.set_len(&mut frame, len) {
        return lost(arena, frame);
    }
    frame.retreat(HEADERS);
    frame.set_packed_checksum(checksum);
    Answered::Ready(frame)
}
