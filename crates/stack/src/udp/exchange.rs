//! Datagrams that are answered at once, many at a time.
//!
//! An answer goes back the way that the question came, from the address that
//! was asked, so most of what sending has to find out is known already.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_memory::{Arena, Frame};

use super::datagram::{PLAIN_V4_BYTES, PLAIN_V6_BYTES, Payload, Waiting, array_at};
use super::{Datagram, UdpId};
use crate::Stack;

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

/// The two ends of a datagram that waits, as its headers tell them.
#[derive(Clone, Copy)]
struct Ends<A> {
    remote: A,
    remote_port: u16,
    local: A,
    local_port: u16,
}

impl Ends<Ipv4Addr> {
    #[inline(always)]
    fn v4(arena: &Arena, frame: &Frame) -> Option<Self> {
        let head = arena.headers::<PLAIN_V4_BYTES>(frame)?;
        let address = |at| Ipv4Addr::from(array_at::<4, PLAIN_V4_BYTES>(head, at));
        let port = |at| u16::from_be_bytes(array_at(head, at));
        Some(Self {
            remote: address(12),
            remote_port: port(20),
            local: address(16),
            local_port: port(22),
        })
    }
}

impl Ends<Ipv6Addr> {
    #[inline(always)]
    fn v6(arena: &Arena, frame: &Frame) -> Option<Self> {
        let head = arena.headers::<PLAIN_V6_BYTES>(frame)?;
        let address = |at| Ipv6Addr::from(array_at::<16, PLAIN_V6_BYTES>(head, at));
        let port = |at| u16::from_be_bytes(array_at(head, at));
        Some(Self {
            remote: address(8),
            remote_port: port(40),
            local: address(24),
            local_port: port(42),
        })
    }
}

impl<A: Copy + Into<IpAddr>> Ends<A> {
    /// The two ends as the application shall see them: who sent it, and the
    /// address of ours. `mapped` says that IPv4 is mapped into IPv6.
    #[inline(always)]
    fn present(&self, mapped: bool) -> (SocketAddr, IpAddr) {
        let ip = |address: A| match address.into() {
            IpAddr::V4(v4) if mapped => v4.to_ipv6_mapped().into(),
            ip => ip,
        };
        (SocketAddr::new(ip(self.remote), self.remote_port), ip(self.local))
    }

    /// The ports of the answer.
    #[inline(always)]
    fn ports(&self) -> (u16, u16) {
        (self.local_port, self.remote_port)
    }
}

/// What the answers of one socket have in common.
#[derive(Clone, Copy)]
struct Manner {
    now_ns: u64,
    id: UdpId,
    /// The short way may be tried.
    plain: bool,
    /// The application sees IPv4 addresses mapped into IPv6.
    mapped: bool,
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
        mut answer: impl FnMut(Request<'_>, &mut [u8]) -> Option<usize>,
    ) -> usize {
        let Some(manner) = self.manner(now_ns, id) else { return 0 };
        let mut taken = 0;
        while taken < most {
            let Some(waiting) = self.take_waiting(id) else { break };
            taken += 1;
            let Some(mut reply) = arena.alloc() else {
                self.release_waiting(arena, id, waiting);
                continue;
            };
            let room = arena.frame_bytes() - reply.headroom();
            arena.set_len(&mut reply, room);
            match waiting {
                Waiting::V4(frame) => {
                    let Some(ends) = Ends::v4(arena, &frame) else { continue };
                    let (from, to) = ends.present(manner.mapped);
                    let (bytes, buffer) = arena.pair(&frame, &mut reply);
                    let len = answer(Request { bytes, from, to }, buffer);
                    arena.free(frame);
                    let Some(reply) = cut(arena, reply, len) else { continue };
                    self.answer_v4(arena, manner, &ends, reply);
                }
                Waiting::V6(frame) => {
                    let Some(ends) = Ends::v6(arena, &frame) else { continue };
                    let (from, to) = ends.present(manner.mapped);
                    let (bytes, buffer) = arena.pair(&frame, &mut reply);
                    let len = answer(Request { bytes, from, to }, buffer);
                    arena.free(frame);
                    let Some(reply) = cut(arena, reply, len) else { continue };
                    self.answer_v6(arena, manner, &ends, reply);
                }
                Waiting::Described => {
                    let Some(datagram) = self.take_described(id) else { continue };
                    let (from, to) = (datagram.remote, datagram.local);
                    let len = datagram.with_reply(arena, &mut reply, |bytes, buffer| {
                        answer(Request { bytes, from, to }, buffer)
                    });
                    datagram.release(arena);
                    let Some(reply) = cut(arena, reply, len) else { continue };
                    // A refusal is counted by the stack under its reason.
                    let _ = self.udp_send_frame(now_ns, arena, id, Some(from), Some(to), reply);
                }
            }
        }
        taken
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
        mut answer: impl FnMut(InPlace<'_>) -> Option<usize>,
    ) -> usize {
        let Some(manner) = self.manner(now_ns, id) else { return 0 };
        let mut taken = 0;
        while taken < most {
            let Some(waiting) = self.take_waiting(id) else { break };
            taken += 1;
            match waiting {
                Waiting::V4(mut frame) => {
                    let Some(ends) = Ends::v4(arena, &frame) else { continue };
                    let (from, to) = ends.present(manner.mapped);
                    let len = answer_over(arena, &mut frame, from, to, &mut answer);
                    let Some(frame) = cut(arena, frame, len) else { continue };
                    self.answer_v4(arena, manner, &ends, frame);
                }
                Waiting::V6(mut frame) => {
                    let Some(ends) = Ends::v6(arena, &frame) else { continue };
                    let (from, to) = ends.present(manner.mapped);
                    let len = answer_over(arena, &mut frame, from, to, &mut answer);
                    let Some(frame) = cut(arena, frame, len) else { continue };
                    self.answer_v6(arena, manner, &ends, frame);
                }
                Waiting::Described => {
                    let Some(datagram) = self.take_described(id) else { continue };
                    self.answer_described(arena, manner, datagram, &mut answer);
                }
            }
        }
        taken
    }

    fn manner(&self, now_ns: u64, id: UdpId) -> Option<Manner> {
        let socket = self.udp.get(id)?;
        let (plain, mapped) = (socket.sends_plainly, socket.bound.is_ipv6());
        Some(Manner { now_ns, id, plain, mapped })
    }

    #[inline(always)]
    fn take_waiting(&mut self, id: UdpId) -> Option<Waiting> {
        let waiting = self.udp.get_mut(id)?.pop_waiting()?;
        self.counters.held -= 1;
        self.counters.delivered += 1;
        Some(waiting)
    }

    fn take_described(&mut self, id: UdpId) -> Option<Datagram> {
        self.udp.get_mut(id)?.take_described()
    }

    #[cold]
    fn release_waiting(&mut self, arena: &mut Arena, id: UdpId, waiting: Waiting) {
        match waiting {
            Waiting::V4(frame) | Waiting::V6(frame) => arena.free(frame),
            Waiting::Described => {
                self.take_described(id).into_iter().for_each(|datagram| datagram.release(arena));
            }
        }
    }

    /// Sends an answer.
    #[inline(always)]
    fn answer_v4(
        &mut self,
        arena: &mut Arena,
        manner: Manner,
        ends: &Ends<Ipv4Addr>,
        reply: Frame,
    ) {
        let Manner { now_ns, plain, .. } = manner;
        let (ports, from) = (ends.ports(), Some(ends.local));
        let left = match plain {
            true => self.send_plain_v4(now_ns, arena, ports, ends.remote, from, reply),
            false => Some(reply),
        };
        if let Some(reply) = left {
            self.answer_any(arena, manner, ends.present(false), reply);
        }
    }

    /// As [`Stack::answer_v4`].
    #[inline(always)]
    fn answer_v6(
        &mut self,
        arena: &mut Arena,
        manner: Manner,
        ends: &Ends<Ipv6Addr>,
        reply: Frame,
    ) {
        let Manner { now_ns, plain, .. } = manner;
        let (ports, from) = (ends.ports(), Some(ends.local));
        let left = match plain {
            true => self.send_plain_v6(now_ns, arena, ports, ends.remote, from, reply),
            false => Some(reply),
        };
        if let Some(reply) = left {
            self.answer_any(arena, manner, ends.present(false), reply);
        }
    }

    #[inline(never)]
    fn answer_any(
        &mut self,
        arena: &mut Arena,
        manner: Manner,
        (from, to): (SocketAddr, IpAddr),
        reply: Frame,
    ) {
        // A refusal is counted by the stack under its reason.
        let _ = self.udp_send_frame(manner.now_ns, arena, manner.id, Some(from), Some(to), reply);
    }

    /// Answers a datagram that is not plain, where it lies.
    fn answer_described(
        &mut self,
        arena: &mut Arena,
        manner: Manner,
        datagram: Datagram,
        answer: &mut impl FnMut(InPlace<'_>) -> Option<usize>,
    ) {
        let (from, to) = (datagram.remote, datagram.local);
        match datagram.payload {
            Payload::Frame(mut frame) => {
                let len = answer_over(arena, &mut frame, from, to, answer);
                let Some(frame) = cut(arena, frame, len) else { return };
                self.answer_any(arena, manner, (from, to), frame);
            }
            Payload::Owned(mut bytes) => {
                let len = bytes.len();
                let len = answer(InPlace { buffer: &mut bytes, len, from, to });
                let Some(reply) = len.and_then(|len| bytes.get(..len)) else { return };
                // A refusal is counted by the stack under its reason.
                let _ = self.udp_send(manner.now_ns, arena, manner.id, Some(from), Some(to), reply);
            }
        }
    }
}

/// Asks for an answer in the frame of the datagram. Returns its length.
#[inline(always)]
fn answer_over(
    arena: &mut Arena,
    frame: &mut Frame,
    from: SocketAddr,
    to: IpAddr,
    answer: &mut impl FnMut(InPlace<'_>) -> Option<usize>,
) -> Option<usize> {
    let len = frame.len();
    let (_, buffer) = arena.headers_mut::<0>(frame)?;
    answer(InPlace { buffer, len, from, to })
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
