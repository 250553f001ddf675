//! UDP socket: options, receive queue and pending error.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_memory::fifo::{PopBatch, PushBatch};
use tidegate_memory::{Arena, Fifo, Frame};
use tidegate_wire::DropReason;

use super::Datagram;
use super::bind_terms::BindTerms;
use super::datagram::{DatagramInfo, DatagramSnapshot, Payload};
use super::error_report::{MAX_REPORTS, UdpErrorReport};
use super::family::QueuedDatagram;
use super::id::UdpId;
use crate::fast_path::family::{V4, V6};
use crate::{Event, Limits, SocketError};

/// Options of a UDP socket.
///
/// # Examples
/// ```
/// use tidegate_stack::UdpOptions;
///
/// let options = UdpOptions::default().reuse_port(true).queue_packets(512);
/// assert_eq!(options.hop_limit, None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
#[must_use]
pub struct UdpOptions {
    /// A socket bound to the unspecified IPv6 address also receives IPv4. Its IPv4 peers have
    /// IPv4-mapped addresses (RFC 4291 section 2.5.5.2).
    pub dual_stack: bool,
    /// Shares the port with other sockets that set this option. Their addresses must differ, where
    /// the unspecified address differs from specific ones, or the other sockets must be connected.
    /// Sockets of one owner may also bind the same address; the one bound last receives.
    pub reuse_address: bool,
    /// Shares address and port with other sockets of the same owner that set this option. The
    /// sockets divide incoming flows: all datagrams between two addresses go to one socket.
    pub reuse_port: bool,
    /// Owner of the socket, where one stack serves several owners: the number of a user, or of a
    /// set of sockets of one application that share a port.
    pub owner: u64,
    /// Never fragments datagrams, neither here nor on the path. Sending a datagram that exceeds the
    /// path MTU fails.
    pub dont_fragment: bool,
    /// Reports ICMP errors on an unconnected socket too, and an exceeded hop limit. A connected
    /// socket always reports the other errors. Also queues each error with the datagram that it
    /// quotes, see [`crate::Stack::udp_take_error_report`].
    pub report_errors: bool,
    /// Hop limit of sent packets; `None` selects that of the interface.
    pub hop_limit: Option<u8>,
    /// Differentiated services code point of sent packets, as the whole byte (RFC 2474).
    pub traffic_class: u8,
    /// Receive queue limit in datagrams; `None` selects that of [`Limits`].
    pub queue_packets: Option<usize>,
    /// Receive queue limit in payload bytes; `None` selects that of [`Limits`].
    pub queue_bytes: Option<usize>,
}

impl UdpOptions {
    /// Sets whether a socket on the unspecified IPv6 address also receives IPv4.
    pub fn dual_stack(self, dual_stack: bool) -> Self {
        Self { dual_stack, ..self }
    }

    /// Sets whether the port is shared with other sockets that set this option.
    pub fn reuse_address(self, reuse_address: bool) -> Self {
        Self { reuse_address, ..self }
    }

    /// Sets whether sockets of one owner share address and port.
    pub fn reuse_port(self, reuse_port: bool) -> Self {
        Self { reuse_port, ..self }
    }

    /// Sets the owner of the socket.
    pub fn owner(self, owner: u64) -> Self {
        Self { owner, ..self }
    }

    /// Sets whether datagrams are never fragmented.
    pub fn dont_fragment(self, dont_fragment: bool) -> Self {
        Self { dont_fragment, ..self }
    }

    /// Sets whether an unconnected socket reports ICMP errors too.
    pub fn report_errors(self, report_errors: bool) -> Self {
        Self { report_errors, ..self }
    }

    /// Sets the hop limit of sent packets; `None` selects that of the interface.
    pub fn hop_limit(self, hop_limit: impl Into<Option<u8>>) -> Self {
        Self { hop_limit: hop_limit.into(), ..self }
    }

    /// Sets the traffic class byte.
    pub fn traffic_class(self, traffic_class: u8) -> Self {
        Self { traffic_class, ..self }
    }

    /// Sets the receive queue limit in datagrams; `None` selects that of [`Limits`].
    pub fn queue_packets(self, queue_packets: impl Into<Option<usize>>) -> Self {
        Self { queue_packets: queue_packets.into(), ..self }
    }

    /// Sets the receive queue limit in payload bytes; `None` selects that of [`Limits`].
    pub fn queue_bytes(self, queue_bytes: impl Into<Option<usize>>) -> Self {
        Self { queue_bytes: queue_bytes.into(), ..self }
    }

    fn uses_default_headers(&self) -> bool {
        self.hop_limit.is_none() && self.traffic_class == 0
    }

    pub(crate) fn with_defaults(self, limits: &Limits) -> Self {
        Self {
            queue_packets: self.queue_packets.or(Some(limits.socket_queue_packets)),
            queue_bytes: self.queue_bytes.or(Some(limits.socket_queue_bytes)),
            ..self
        }
    }
}

/// UDP socket: addresses, options, receive queue and pending error.
pub(crate) struct Socket {
    /// Address requested in `bind`, with the selected port.
    pub(crate) bound: SocketAddr,
    /// Source address when connected: `bound`, or the address selected for the peer. Never an
    /// IPv4-mapped address.
    pub(crate) local: SocketAddr,
    /// Peer; never an IPv4-mapped address.
    pub(crate) remote: Option<SocketAddr>,
    pub(crate) options: UdpOptions,
    /// Position in the bind order of the table.
    pub(super) bind_order: u64,
    queue: Fifo<QueuedDatagram>,
    /// Datagrams of the queue that do not carry their metadata in plain headers.
    metadata_queue: VecDeque<Datagram>,
    /// Remaining space of the receive queue, in datagrams and in bytes. An empty queue takes a
    /// datagram of any length, so the bytes may be negative.
    free_packets: usize,
    free_bytes: isize,
    pub(crate) error: Option<SocketError>,
    /// Errors about sent datagrams, oldest first. A snapshot leaves them out.
    error_reports: VecDeque<UdpErrorReport>,
    /// No option changes the default header fields.
    pub(crate) uses_default_headers: bool,
    /// An error event is queued and not taken yet.
    pub(crate) error_notified: bool,
    /// A readiness event is queued and not taken yet.
    pub(crate) readable_notified: bool,
}

impl Socket {
    pub(crate) fn new(bound: SocketAddr, options: UdpOptions) -> Self {
        Self {
            bound,
            local: bound,
            remote: None,
            options,
            bind_order: 0,
            queue: Fifo::new(),
            metadata_queue: VecDeque::new(),
            free_packets: options.queue_packets.unwrap_or(usize::MAX),
            free_bytes: signed(options.queue_bytes.unwrap_or(usize::MAX)),
            error: None,
            error_reports: VecDeque::new(),
            uses_default_headers: options.uses_default_headers(),
            error_notified: false,
            readable_notified: false,
        }
    }

    /// True if the socket is bound to the unspecified IPv6 address and receives IPv4 as well.
    #[inline]
    pub(crate) fn is_dual_stack(&self) -> bool {
        self.options.dual_stack && self.bound.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    }

    /// Address of the socket, and the terms on which others may have it too.
    pub(super) fn bind_terms(&self) -> BindTerms {
        let UdpOptions { reuse_port, reuse_address, owner, .. } = self.options;
        let (ip, is_dual_stack) = (self.bound.ip(), self.is_dual_stack());
        BindTerms { ip, is_dual_stack, reuse_port, reuse_address, owner }
    }

    /// True if the socket can have a peer with this address, which is not IPv4-mapped.
    pub(crate) fn accepts_peer(&self, peer: IpAddr) -> bool {
        self.bound.is_ipv6() == peer.is_ipv6() || self.is_dual_stack()
    }

    /// Converts an address to the form that the application sees: IPv4-mapped on an IPv6 socket.
    #[inline]
    pub(crate) fn to_app_ip(&self, ip: IpAddr) -> IpAddr {
        match ip {
            IpAddr::V4(v4) if self.bound.is_ipv6() => v4.to_ipv6_mapped().into(),
            _ => ip,
        }
    }

    /// As [`Socket::to_app_ip`], with a port.
    #[inline]
    pub(crate) fn to_app_address(&self, address: SocketAddr) -> SocketAddr {
        SocketAddr::new(self.to_app_ip(address.ip()), address.port())
    }

    /// Checks that a datagram of `len` bytes fits in the queue. The first one always does, as at the
    /// kernel: a small buffer only keeps what is not read.
    ///
    /// # Errors
    /// [`DropReason::SocketQueueFull`].
    #[inline(always)]
    pub(crate) fn check_space(&self, len: usize) -> Result<(), DropReason> {
        let fits = signed(len) <= self.free_bytes || self.queue.is_empty();
        let has_space = self.free_packets > 0 && fits;
        if has_space { Ok(()) } else { Err(DropReason::SocketQueueFull) }
    }

    /// Number of datagrams and bytes in the receive queue.
    pub(crate) fn queued(&self) -> (usize, usize) {
        let (_, limit_bytes) = self.queue_limits();
        (self.queue.len(), (signed(limit_bytes) - self.free_bytes) as usize)
    }

    /// Receive queue limits in datagrams and bytes.
    pub(crate) fn queue_limits(&self) -> (usize, usize) {
        let UdpOptions { queue_packets, queue_bytes, .. } = self.options;
        (queue_packets.unwrap_or(usize::MAX), queue_bytes.unwrap_or(usize::MAX))
    }

    /// True if the receive queue is empty.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Number of datagrams in the receive queue.
    #[inline]
    pub(crate) fn queue_len(&self) -> usize {
        self.queue.len()
    }

    /// Queues a datagram of `len` bytes whose headers carry its metadata. Returns true if the queue
    /// was empty.
    #[inline(always)]
    pub(crate) fn push_plain(&mut self, datagram: QueuedDatagram, len: usize) -> bool {
        let was_empty = self.queue.is_empty();
        self.reserve_space(len);
        self.queue.push_back(datagram);
        was_empty
    }

    /// Begins a batch of plain datagrams of at most `max_datagram_bytes` each. The batch has as
    /// many contiguous slots as the queue limits allow for datagrams of that size. A full queue,
    /// or a small empty one, first grows by `wanted` slots. The datagrams are added to `held`.
    #[inline(always)]
    pub(crate) fn push_batch<'a>(
        &'a mut self,
        wanted: usize,
        max_datagram_bytes: usize,
        held: &'a mut u64,
    ) -> QueuePushBatch<'a> {
        let Self { queue, free_packets, free_bytes, .. } = self;
        let space = (*free_packets).min((*free_bytes).max(0) as usize / max_datagram_bytes.max(1));
        let slots = queue.push_batch(queue.len() + space, wanted);
        QueuePushBatch { slots, bytes: 0, free_packets, free_bytes, held }
    }

    /// Queues any datagram. Returns true if the queue was empty.
    pub(crate) fn push(&mut self, datagram: Datagram) -> bool {
        let len = datagram.len();
        self.metadata_queue.push_back(datagram);
        self.push_plain(QueuedDatagram::WithMetadata, len)
    }

    /// Removes the entry at the front. After a [`QueuedDatagram::WithMetadata`] entry, the caller
    /// must call [`Socket::pop_with_metadata`].
    #[inline(always)]
    pub(crate) fn pop_queued(&mut self) -> Option<QueuedDatagram> {
        let queued = self.queue.pop_front()?;
        if let QueuedDatagram::V4(frame) | QueuedDatagram::V6(frame) = &queued {
            self.release_space(frame.len());
        }
        Some(queued)
    }

    /// Begins to remove a batch of at most `max` entries that are contiguous at the front. The
    /// datagrams move from the counter `held` to `delivered`.
    #[inline(always)]
    pub(crate) fn pop_batch<'a>(
        &'a mut self,
        max: usize,
        held: &'a mut u64,
        delivered: &'a mut u64,
    ) -> QueuePopBatch<'a> {
        let Self { queue, free_packets, free_bytes, .. } = self;
        let batch = queue.pop_batch_up_to(max);
        QueuePopBatch { initial_len: batch.len(), batch, free_packets, free_bytes, held, delivered }
    }

    /// Entry at the front of the queue.
    #[inline]
    pub(crate) fn front(&self) -> Option<&QueuedDatagram> {
        self.queue.front()
    }

    #[inline(always)]
    fn reserve_space(&mut self, len: usize) {
        self.free_packets -= 1;
        self.free_bytes -= signed(len);
    }

    #[inline(always)]
    fn release_space(&mut self, len: usize) {
        self.free_packets += 1;
        self.free_bytes += signed(len);
    }

    /// Changes the options, but not those of address sharing. The limits of the queue become no
    /// lower than what the queue holds.
    pub(crate) fn set_options(&mut self, options: UdpOptions) {
        let UdpOptions { dual_stack, reuse_address, reuse_port, owner, .. } = self.options;
        let (held_packets, held_bytes) = self.queued();
        let packets = options.queue_packets.unwrap_or(usize::MAX).max(held_packets);
        let bytes = options.queue_bytes.unwrap_or(usize::MAX).max(held_bytes);
        (self.free_packets, self.free_bytes) =
            (packets - held_packets, signed(bytes) - signed(held_bytes));
        self.uses_default_headers = options.uses_default_headers();
        self.options = UdpOptions { dual_stack, reuse_address, reuse_port, owner, ..options }
            .queue_packets(packets)
            .queue_bytes(bytes);
    }

    /// Queues an error about a sent datagram, unless too many are queued.
    pub(super) fn push_error_report(&mut self, report: UdpErrorReport) {
        if self.error_reports.len() < MAX_REPORTS {
            self.error_reports.push_back(report);
        }
    }

    /// Takes the oldest error about a sent datagram.
    #[inline]
    pub(super) fn pop_error_report(&mut self) -> Option<UdpErrorReport> {
        self.error_reports.pop_front()
    }

    /// Queues a readiness event, unless one is queued already.
    #[inline]
    pub(crate) fn notify_readable(&mut self, id: UdpId, events: &mut VecDeque<Event>) {
        if !self.readable_notified {
            self.readable_notified = true;
            events.push_back(Event::UdpReadable(id));
        }
    }

    /// Removes the datagram of the [`QueuedDatagram::WithMetadata`] entry that was just popped.
    #[inline(never)]
    pub(crate) fn pop_with_metadata(&mut self) -> Option<Datagram> {
        let datagram = self.metadata_queue.pop_front();
        debug_assert!(datagram.is_some(), "a queue entry has no datagram with metadata");
        self.release_space(datagram.as_ref().map_or(0, Datagram::len));
        datagram
    }

    /// Removes the datagram at the front, with its metadata.
    #[inline]
    pub(crate) fn pop(&mut self, arena: &Arena) -> Option<Datagram> {
        let mut datagram = match self.pop_queued()? {
            QueuedDatagram::V4(frame) => Datagram::from_plain::<V4>(frame, arena),
            QueuedDatagram::V6(frame) => Datagram::from_plain::<V6>(frame, arena),
            QueuedDatagram::WithMetadata => return self.pop_with_metadata(),
        };
        datagram.remote = self.to_app_address(datagram.remote);
        datagram.local = self.to_app_ip(datagram.local);
        Some(datagram)
    }

    /// Passes header fields and payload of the datagram at the front to `inspect`.
    pub(crate) fn peek<R>(
        &self,
        arena: &Arena,
        inspect: impl FnOnce(DatagramInfo, &[u8]) -> R,
    ) -> Option<R> {
        let (fields, bytes) = match self.front()? {
            QueuedDatagram::V4(frame) => {
                (DatagramInfo::of_plain::<V4>(frame, arena)?, arena.bytes(frame))
            }
            QueuedDatagram::V6(frame) => {
                (DatagramInfo::of_plain::<V6>(frame, arena)?, arena.bytes(frame))
            }
            QueuedDatagram::WithMetadata => {
                let datagram = self.metadata_queue.front()?;
                (datagram.info(), datagram.bytes(arena))
            }
        };
        let remote = self.to_app_address(fields.remote);
        let local = self.to_app_ip(fields.local);
        Some(inspect(DatagramInfo { remote, local, ..fields }, bytes))
    }

    /// Copies the queued datagrams out of the arena, and frees their frames.
    pub(crate) fn copy_out_of_arena(&mut self, arena: &mut Arena) {
        for _ in 0..self.queue.len() {
            let Some(datagram) = self.pop(arena) else { break };
            let payload = Payload::Owned(datagram.bytes(arena).into());
            let Datagram { remote, local, hop_limit, traffic_class, .. } = datagram;
            datagram.release(arena);
            let _ = self.push(Datagram { payload, remote, local, hop_limit, traffic_class });
        }
    }

    /// Snapshots of the queued datagrams, in order, with the addresses that the application sees.
    pub(crate) fn snapshot_datagrams<'a>(
        &'a self,
        arena: &'a Arena,
    ) -> impl Iterator<Item = DatagramSnapshot<'static>> + 'a {
        let mut with_metadata = self.metadata_queue.iter();
        self.queue.iter().filter_map(move |waiting| {
            let (fields, bytes) = match waiting {
                QueuedDatagram::V4(frame) => {
                    (DatagramInfo::of_plain::<V4>(frame, arena)?, arena.bytes(frame))
                }
                QueuedDatagram::V6(frame) => {
                    (DatagramInfo::of_plain::<V6>(frame, arena)?, arena.bytes(frame))
                }
                QueuedDatagram::WithMetadata => {
                    let datagram = with_metadata.next()?;
                    (datagram.info(), datagram.bytes(arena))
                }
            };
            Some(DatagramSnapshot {
                remote: self.to_app_address(fields.remote),
                local: self.to_app_ip(fields.local),
                hop_limit: fields.hop_limit,
                traffic_class: fields.traffic_class,
                data: bytes.to_vec().into(),
            })
        })
    }

    /// Drops the oldest datagrams until at most `keep` are queued. Returns the number dropped.
    pub(crate) fn drop_oldest(&mut self, keep: usize, arena: &mut Arena) -> usize {
        let excess = self.queue.len().saturating_sub(keep);
        for _ in 0..excess {
            let Some(queued) = self.pop_queued() else { break };
            match queued {
                QueuedDatagram::V4(frame) | QueuedDatagram::V6(frame) => arena.free(frame),
                QueuedDatagram::WithMetadata => {
                    let dropped = self.pop_with_metadata();
                    dropped.into_iter().for_each(|datagram| datagram.release(arena));
                }
            }
        }
        excess
    }
}

/// Batch of datagrams being queued; made by [`Socket::push_batch`].
pub(crate) struct QueuePushBatch<'a> {
    slots: PushBatch<'a, QueuedDatagram>,
    /// Payload bytes of the datagrams queued by this batch.
    bytes: usize,
    free_packets: &'a mut usize,
    free_bytes: &'a mut isize,
    held: &'a mut u64,
}

impl QueuePushBatch<'_> {
    /// Moves frames from the front of `frames` to the queue, while slots are free and `check`
    /// accepts them. A frame enters with `headers_bytes` of headers and `check` strips them.
    #[inline(always)]
    pub(crate) fn push_while(
        &mut self,
        frames: &mut PopBatch<'_, Frame>,
        headers_bytes: usize,
        mut check: impl FnMut(Frame) -> Result<QueuedDatagram, Frame>,
    ) {
        let (mut bytes, before) = (0, self.slots.pushed());
        frames.move_while(&mut self.slots, |frame| {
            let len = frame.len();
            let datagram = check(frame)?;
            bytes += len;
            Ok(datagram)
        });
        self.bytes += bytes - (self.slots.pushed() - before) * headers_bytes;
    }
}

impl Drop for QueuePushBatch<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let count = self.slots.pushed();
        *self.free_packets -= count;
        *self.free_bytes -= signed(self.bytes);
        *self.held += count as u64;
    }
}

/// Batch of datagrams being removed; made by [`Socket::pop_batch`].
pub(crate) struct QueuePopBatch<'a> {
    batch: PopBatch<'a, QueuedDatagram>,
    /// Length of the batch at its start.
    initial_len: usize,
    free_packets: &'a mut usize,
    free_bytes: &'a mut isize,
    held: &'a mut u64,
    delivered: &'a mut u64,
}

impl QueuePopBatch<'_> {
    /// Removes the next datagram if `accept` returns true.
    #[inline(always)]
    pub(crate) fn next_if(
        &mut self,
        accept: impl FnOnce(&QueuedDatagram) -> bool,
    ) -> Option<QueuedDatagram> {
        let queued = self.batch.next_if(accept)?;
        if let QueuedDatagram::V4(frame) | QueuedDatagram::V6(frame) = &queued {
            *self.free_bytes += signed(frame.len());
        }
        Some(queued)
    }

    /// Number of datagrams removed so far.
    #[inline(always)]
    pub(crate) fn taken(&self) -> usize {
        self.initial_len - self.batch.len()
    }
}

impl Drop for QueuePopBatch<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let taken = self.taken();
        *self.free_packets += taken;
        *self.held -= taken as u64;
        *self.delivered += taken as u64;
    }
}

/// Number of bytes for a difference that may be negative.
#[inline(always)]
fn signed(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap_or(isize::MAX)
}

/// Unspecified IPv4 address: all local IPv4 addresses.
pub(crate) const ANY_V4: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
/// Unspecified IPv6 address: all local IPv6 addresses.
pub(crate) const ANY_V6: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
