//! One socket.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_memory::fifo::{Run, Spare};
use tidegate_memory::{Arena, Fifo, Frame};
use tidegate_wire::DropReason;

use super::Datagram;
use super::datagram::{Payload, SavedDatagram, Waiting, ends_v4, ends_v6};
use crate::{Event, Limits, SocketError};

/// The name of a socket. Never used again for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UdpId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// How a socket shall behave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpOptions {
    /// A socket bound to the unspecified IPv6 address takes IPv4 too; those
    /// peers have IPv4-mapped addresses (RFC 4291 section 2.5.5.2).
    pub dual_stack: bool,
    /// Other sockets may be bound to the same port, if all say so and their addresses
    /// differ, also when one of them is the unspecified address, or if the others are
    /// connected. Those of one party may be bound to the very same address: the one
    /// that was bound last gets what comes.
    pub reuse_address: bool,
    /// Other sockets may be bound to the same address and port, if all say so and
    /// are of the same party. They share what comes: all datagrams between two ends
    /// go to one of them.
    pub reuse_port: bool,
    /// Whose socket it is, where one stack serves several parties: the number of a
    /// user, or of a program's sockets that have one port together.
    pub party: u64,
    /// Datagrams are never fragmented, neither here nor on the way: what is
    /// too long for the path is refused.
    pub dont_fragment: bool,
    /// An unconnected socket, too, is told of errors that come back. A
    /// connected one always is.
    pub report_errors: bool,
    /// The hop limit of what is sent; `None` for that of the interface.
    pub hop_limit: Option<u8>,
    /// The differentiated services code point of what is sent, as the whole
    /// byte (RFC 2474).
    pub traffic_class: u8,
    /// How many datagrams may wait to be read; `None` for that of the limits.
    pub queue_packets: Option<usize>,
    /// How many bytes may wait to be read; `None` for that of the limits.
    pub queue_bytes: Option<usize>,
}

impl UdpOptions {
    pub(crate) fn with_defaults(self, limits: &Limits) -> Self {
        Self {
            queue_packets: self.queue_packets.or(Some(limits.socket_queue_packets)),
            queue_bytes: self.queue_bytes.or(Some(limits.socket_queue_bytes)),
            ..self
        }
    }
}

pub(crate) struct Socket {
    /// As asked for in `bind`, with the port that was chosen.
    pub(crate) bound: SocketAddr,
    /// Where packets leave from when it is connected: `bound`, or the address
    /// chosen for the peer. Never mapped.
    pub(crate) local: SocketAddr,
    /// The peer, never mapped.
    pub(crate) remote: Option<SocketAddr>,
    pub(crate) options: UdpOptions,
    /// When it was bound, among the others of its table.
    pub(super) turn: u64,
    queue: Fifo<Waiting>,
    /// Those of the queue that cannot tell by themselves where they came from.
    described: VecDeque<Datagram>,
    /// How many more datagrams, and bytes of them, may wait.
    free_packets: usize,
    free_bytes: usize,
    pub(crate) error: Option<SocketError>,
    /// No option asks for headers other than the usual.
    pub(crate) sends_plainly: bool,
    /// Whether an event about an error waits to be taken.
    pub(crate) error_told: bool,
    /// Whether an event about readiness waits to be taken.
    pub(crate) readable_told: bool,
}

impl Socket {
    pub(crate) fn new(bound: SocketAddr, options: UdpOptions) -> Self {
        Self {
            bound,
            local: bound,
            remote: None,
            options,
            turn: 0,
            queue: Fifo::new(),
            described: VecDeque::new(),
            free_packets: options.queue_packets.unwrap_or(usize::MAX),
            free_bytes: options.queue_bytes.unwrap_or(usize::MAX),
            error: None,
            sends_plainly: options.hop_limit.is_none() && options.traffic_class == 0,
            error_told: false,
            readable_told: false,
        }
    }

    /// Whether the socket is bound to the unspecified IPv6 address and takes
    /// IPv4 as well.
    #[inline]
    pub(crate) fn is_dual(&self) -> bool {
        self.options.dual_stack && self.bound.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    }

    /// Whether the socket can have a peer with this address, which is not a
    /// mapped one.
    pub(crate) fn speaks_to(&self, peer: IpAddr) -> bool {
        self.bound.is_ipv6() == peer.is_ipv6() || self.is_dual()
    }

    /// An address as the application shall see it: IPv4 on an IPv6 socket is
    /// mapped.
    #[inline]
    pub(crate) fn present_ip(&self, ip: IpAddr) -> IpAddr {
        match ip {
            IpAddr::V4(v4) if self.bound.is_ipv6() => v4.to_ipv6_mapped().into(),
            _ => ip,
        }
    }

    /// Like [`Socket::present_ip`], with a port.
    #[inline]
    pub(crate) fn present(&self, address: SocketAddr) -> SocketAddr {
        SocketAddr::new(self.present_ip(address.ip()), address.port())
    }

    /// Whether a datagram of `len` bytes fits in the queue.
    ///
    /// # Errors
    /// [`DropReason::SocketQueueFull`].
    #[inline(always)]
    pub(crate) fn has_room(&self, len: usize) -> Result<(), DropReason> {
        let room = self.free_packets > 0 && len <= self.free_bytes;
        if room { Ok(()) } else { Err(DropReason::SocketQueueFull) }
    }

    /// The packets and bytes that wait to be read.
    pub(crate) fn held(&self) -> (usize, usize) {
        let (_, limit_bytes) = self.limits();
        (self.queue.len(), limit_bytes - self.free_bytes)
    }

    /// The most packets and bytes that may wait.
    pub(crate) fn limits(&self) -> (usize, usize) {
        let UdpOptions { queue_packets, queue_bytes, .. } = self.options;
        (queue_packets.unwrap_or(usize::MAX), queue_bytes.unwrap_or(usize::MAX))
    }

    /// Whether nothing waits.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// How many datagrams wait.
    #[inline]
    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Puts a datagram of `len` bytes at the end of the queue, with the headers
    /// that tell about it. Returns whether the queue was empty.
    #[inline(always)]
    pub(crate) fn push_plain(&mut self, datagram: Waiting, len: usize) -> bool {
        let was_empty = self.queue.is_empty();
        self.take_room(len);
        self.queue.push_back(datagram);
        was_empty
    }

    /// To put many datagrams of at most `longest` bytes at the end of the queue,
    /// with the headers that tell about them, one after the other: as many as
    /// there is room for whatever their length, and places side by side. Of
    /// these `wanted` are made at first. They are counted in `held`.
    #[inline(always)]
    pub(crate) fn fill<'a>(
        &'a mut self,
        wanted: usize,
        longest: usize,
        held: &'a mut u64,
    ) -> Filling<'a> {
        let Self { queue, free_packets, free_bytes, .. } = self;
        let room = (*free_packets).min(*free_bytes / longest.max(1));
        let places = queue.spare(queue.len() + room, wanted);
        Filling { places, bytes: 0, free_packets, free_bytes, held }
    }

    /// Puts any datagram at the end of the queue. Returns whether the queue was
    /// empty.
    pub(crate) fn push(&mut self, datagram: Datagram) -> bool {
        let len = datagram.len();
        self.described.push_back(datagram);
        self.push_plain(Waiting::Described, len)
    }

    /// Takes the datagram at the front. For one that is described elsewhere
    /// call [`Socket::take_described`] next.
    #[inline(always)]
    pub(crate) fn pop_waiting(&mut self) -> Option<Waiting> {
        let waiting = self.queue.pop_front()?;
        if let Waiting::V4(frame) | Waiting::V6(frame) = &waiting {
            self.give_room(frame.len());
        }
        Some(waiting)
    }

    /// To take many datagrams from the front, one after the other: at most
    /// `most`, and as many as lie side by side. They are counted from `held` to
    /// `delivered`.
    #[inline(always)]
    pub(crate) fn empty<'a>(
        &'a mut self,
        most: usize,
        held: &'a mut u64,
        delivered: &'a mut u64,
    ) -> Emptying<'a> {
        let Self { queue, free_packets, free_bytes, .. } = self;
        let run = queue.run_of(most);
        Emptying { count: run.len(), run, free_packets, free_bytes, held, delivered }
    }

    /// What waits at the front.
    #[inline]
    pub(crate) fn front(&self) -> Option<&Waiting> {
        self.queue.front()
    }

    #[inline(always)]
    fn take_room(&mut self, len: usize) {
        self.free_packets -= 1;
        self.free_bytes -= len;
    }

    #[inline(always)]
    fn give_room(&mut self, len: usize) {
        self.free_packets += 1;
        self.free_bytes += len;
    }

    /// Tells that the queue is no longer empty, unless it was told already.
    #[inline]
    pub(crate) fn tell_readable(&mut self, id: UdpId, events: &mut VecDeque<Event>) {
        if !self.readable_told {
            self.readable_told = true;
            events.push_back(Event::Readable(id));
        }
    }

    /// Takes the description of the datagram at the front, which waits as
    /// [`Waiting::Described`].
    #[inline(never)]
    pub(crate) fn take_described(&mut self) -> Option<Datagram> {
        let datagram = self.described.pop_front();
        debug_assert!(datagram.is_some(), "a datagram without its description");
        self.give_room(datagram.as_ref().map_or(0, Datagram::len));
        datagram
    }

    /// Takes the datagram at the front, with all that is known about it.
    #[inline]
    pub(crate) fn pop(&mut self, arena: &Arena) -> Option<Datagram> {
        let mut datagram = match self.pop_waiting()? {
            Waiting::V4(frame) => Datagram::plain_v4(frame, arena),
            Waiting::V6(frame) => Datagram::plain_v6(frame, arena),
            Waiting::Described => return self.take_described(),
        };
        datagram.remote = self.present(datagram.remote);
        datagram.local = self.present_ip(datagram.local);
        Some(datagram)
    }

    /// Shows the datagram at the front: who sent it, to which address of ours,
    /// and its bytes.
    pub(crate) fn peek<R>(
        &self,
        arena: &Arena,
        see: impl FnOnce(SocketAddr, IpAddr, &[u8]) -> R,
    ) -> Option<R> {
        let (remote, local, bytes) = match self.front()? {
            Waiting::V4(frame) => {
                let (remote, local) = ends_v4(arena.headers(frame)?);
                (remote, local, arena.bytes(frame))
            }
            Waiting::V6(frame) => {
                let (remote, local) = ends_v6(arena.headers(frame)?);
                (remote, local, arena.bytes(frame))
            }
            Waiting::Described => {
                let datagram = self.described.front()?;
                (datagram.remote, datagram.local, datagram.bytes(arena))
            }
        };
        Some(see(self.present(remote), self.present_ip(local), bytes))
    }

    /// Copies what waits into memory of its own, and gives the frames back.
    pub(crate) fn leave_arena(&mut self, arena: &mut Arena) {
        for _ in 0..self.queue.len() {
            let Some(datagram) = self.pop(arena) else { break };
            let payload = Payload::Owned(datagram.bytes(arena).into());
            let Datagram { remote, local, hop_limit, traffic_class, .. } = datagram;
            datagram.release(arena);
            let _ = self.push(Datagram { payload, remote, local, hop_limit, traffic_class });
        }
    }

    /// Every datagram that waits, in order, as the application would see it.
    pub(crate) fn datagrams<'a>(
        &'a self,
        arena: &'a Arena,
    ) -> impl Iterator<Item = SavedDatagram> + 'a {
        let mut described = self.described.iter();
        self.queue.iter().filter_map(move |waiting| match waiting {
            Waiting::V4(frame) => {
                let head = arena.headers(frame)?;
                Some(self.save(ends_v4(head), head[8], head[1], arena.bytes(frame)))
            }
            Waiting::V6(frame) => {
                let head = arena.headers(frame)?;
                let traffic_class = head[0] << 4 | head[1] >> 4;
                Some(self.save(ends_v6(head), head[7], traffic_class, arena.bytes(frame)))
            }
            Waiting::Described => {
                let datagram = described.next()?;
                let Datagram { remote, local, hop_limit, traffic_class, .. } = *datagram;
                let bytes = datagram.bytes(arena);
                Some(self.save((remote, local), hop_limit, traffic_class, bytes))
            }
        })
    }

    fn save(
        &self,
        (remote, local): (SocketAddr, IpAddr),
        hop_limit: u8,
        traffic_class: u8,
        bytes: &[u8],
    ) -> SavedDatagram {
        let (remote, local) = (self.present(remote), self.present_ip(local));
        SavedDatagram { remote, local, hop_limit, traffic_class, data: bytes.to_vec().into() }
    }

    /// Drops what has waited longest until `rest` datagrams wait at most, and returns
    /// how many were dropped.
    pub(crate) fn cut(&mut self, rest: usize, arena: &mut Arena) -> usize {
        let cut = self.queue.len().saturating_sub(rest);
        for _ in 0..cut {
            let Some(waiting) = self.pop_waiting() else { break };
            match waiting {
                Waiting::V4(frame) | Waiting::V6(frame) => arena.free(frame),
                Waiting::Described => {
                    let described = self.take_described();
                    described.into_iter().for_each(|datagram| datagram.release(arena));
                }
            }
        }
        cut
    }
}

/// Puts datagrams into a queue; made by [`Socket::fill`].
pub(crate) struct Filling<'a> {
    places: Spare<'a, Waiting>,
    /// The bytes of those that were put there.
    bytes: usize,
    free_packets: &'a mut usize,
    free_bytes: &'a mut usize,
    held: &'a mut u64,
}

impl Filling<'_> {
    /// Takes the frames at the front of a run, as long as there are places and
    /// `check` makes datagrams of them. They come with headers of so many bytes,
    /// and leave without.
    #[inline(always)]
    pub(crate) fn take_while(
        &mut self,
        run: &mut Run<'_, Frame>,
        headers_bytes: usize,
        mut check: impl FnMut(Frame) -> Result<Waiting, Frame>,
    ) {
        let (mut bytes, before) = (0, self.places.used());
        run.move_while(&mut self.places, |frame| {
            let len = frame.len();
            let datagram = check(frame)?;
            bytes += len;
            Ok(datagram)
        });
        self.bytes += bytes - (self.places.used() - before) * headers_bytes;
    }
}

impl Drop for Filling<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let count = self.places.used();
        *self.free_packets -= count;
        *self.free_bytes -= self.bytes;
        *self.held += count as u64;
    }
}

/// Takes datagrams out of a queue; made by [`Socket::empty`].
pub(crate) struct Emptying<'a> {
    run: Run<'a, Waiting>,
    /// The datagrams there were.
    count: usize,
    free_packets: &'a mut usize,
    free_bytes: &'a mut usize,
    held: &'a mut u64,
    delivered: &'a mut u64,
}

impl Emptying<'_> {
    /// The next datagram, if it is such a one and has a frame.
    #[inline(always)]
    pub(crate) fn next_if(&mut self, wanted: impl FnOnce(&Waiting) -> bool) -> Option<Waiting> {
        let waiting = self.run.next_if(wanted)?;
        if let Waiting::V4(frame) | Waiting::V6(frame) = &waiting {
            *self.free_bytes += frame.len();
        }
        Some(waiting)
    }

    /// How many were taken.
    #[inline(always)]
    pub(crate) fn taken(&self) -> usize {
        self.count - self.run.len()
    }
}

impl Drop for Emptying<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let taken = self.taken();
        *self.free_packets += taken;
        *self.held -= taken as u64;
        *self.delivered += taken as u64;
    }
}

/// The address that stands for every IPv4 address of ours.
pub(crate) const ANY_V4: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
/// The address that stands for every IPv6 address of ours.
pub(crate) const ANY_V6: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
