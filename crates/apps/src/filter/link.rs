//! The router's side of a packet filter.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use tidegate::{Arena, DropReason};
use tidegate_stack::TransitPacket;

use super::Verdict;
use super::message::{MAX_VERDICTS_BYTES, QUEUE_PACKETS, put_request, verdicts};

/// Time limit for a verdict.
const VERDICT_TIMEOUT_NS: u64 = 1_000_000_000;
/// Shortest interval between two attempts to connect to an absent filter.
const RECONNECT_NS: u64 = 100_000_000;

/// Configuration of the link to a packet filter.
#[derive(Clone, Debug)]
pub struct FilterConfig {
    /// Path of the Unix socket that the filter listens on.
    pub path: PathBuf,
    /// Most packets in one request message. 1 means one system call for each packet, as in the
    /// paper.
    pub batch: usize,
}

impl FilterConfig {
    /// Configuration for a filter at `path`, with one message for each packet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), batch: 1 }
    }
}

/// Counters of the link to a packet filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FilterCounters {
    /// Packets sent to the filter for a verdict.
    pub requests: u64,
    /// Packets that the filter passed.
    pub passed: u64,
    /// Packets that the filter refused.
    pub refused: u64,
    /// Connections made to the filter.
    pub connections: u64,
    /// Verdicts on packets that waited for none.
    pub stray_verdicts: u64,
}

/// Slot of a packet that waits for its verdict, or a free slot.
#[derive(Default)]
struct QueueSlot {
    transit: Option<TransitPacket>,
    requested_ns: u64,
    /// Number of packets that have used this slot. A late verdict on an earlier packet is thus
    /// not taken for a verdict on the current packet.
    generation: u32,
}

/// Connection to a packet filter, with the packets that wait for verdicts.
pub struct FilterLink {
    config: FilterConfig,
    socket: Option<OwnedFd>,
    connect_at_ns: u64,
    slots: Box<[QueueSlot; QUEUE_PACKETS]>,
    free: Vec<usize>,
    /// Requests that are not sent yet; `unsent` lists their slots.
    message: Vec<u8>,
    unsent: Vec<usize>,
    buffer: Box<[u8; MAX_VERDICTS_BYTES]>,
    counters: FilterCounters,
}

impl FilterLink {
    /// Creates a link that connects when the first packet arrives.
    pub fn new(config: FilterConfig) -> Self {
        Self {
            config,
            socket: None,
            connect_at_ns: 0,
            slots: Box::new(std::array::from_fn(|_| QueueSlot::default())),
            free: (0..QUEUE_PACKETS).rev().collect(),
            message: Vec::new(),
            unsent: Vec::new(),
            buffer: Box::new([0; MAX_VERDICTS_BYTES]),
            counters: FilterCounters::default(),
        }
    }

    /// Number of packets that wait for a verdict.
    #[inline]
    pub fn waiting(&self) -> usize {
        QUEUE_PACKETS - self.free.len()
    }

    /// Counters so far.
    pub fn counters(&self) -> FilterCounters {
        self.counters
    }

    /// True while connected to a filter.
    pub fn is_connected(&self) -> bool {
        self.socket.is_some()
    }

    /// File descriptor that is readable when verdicts have arrived; `None` while disconnected.
    pub fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Queues a packet and a request for its verdict. [`FilterLink::flush`] sends the queued
    /// requests.
    ///
    /// # Errors
    /// Returns the packet with the drop reason: the queue is full, or no filter is connected.
    pub fn request_verdict(
        &mut self,
        now_ns: u64,
        transit: TransitPacket,
        arena: &Arena,
    ) -> Result<(), (TransitPacket, DropReason)> {
        if self.socket.is_none() && !self.connect(now_ns) {
            return Err((transit, DropReason::FilterGone));
        }
        let Some(index) = self.free.pop() else {
            return Err((transit, DropReason::FilterQueueFull));
        };
        let slot = &mut self.slots[index];
        slot.generation = slot.generation.wrapping_add(1);
        slot.requested_ns = now_ns;
        put_request(&mut self.message, request_id(index, slot.generation), transit.bytes(arena));
        slot.transit = Some(transit);
        self.unsent.push(index);
        self.counters.requests += 1;
        Ok(())
    }

    /// True when the queued requests fill one message.
    #[inline]
    pub fn is_batch_full(&self) -> bool {
        self.unsent.len() >= self.config.batch.max(1)
    }

    /// Sends the queued requests. Calls `on_drop` with each packet that can get no verdict any
    /// more, and with the drop reason.
    pub fn flush(&mut self, on_drop: &mut impl FnMut(TransitPacket, DropReason)) {
        if self.unsent.is_empty() {
            return;
        }
        let sent = match &self.socket {
            Some(socket) => send(socket, &self.message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
            None => Err(Errno::PIPE),
        };
        self.message.clear();
        match sent {
            Ok(_) => self.unsent.clear(),
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => {
                for index in std::mem::take(&mut self.unsent) {
                    self.drop_packet(index, DropReason::FilterQueueFull, on_drop);
                }
            }
            Err(_) => self.disconnect(on_drop),
        }
    }

    /// Reads verdict messages until `quota` packets have verdicts; returns how many have. Calls
    /// `on_verdict` with each packet and its verdict, and `on_drop` with each packet that can get
    /// no verdict any more. Reads at most [`QUEUE_PACKETS`] messages, so that a filter that floods
    /// the link does not stall the router.
    pub fn collect(
        &mut self,
        quota: usize,
        on_verdict: &mut impl FnMut(TransitPacket, Verdict),
        on_drop: &mut impl FnMut(TransitPacket, DropReason),
    ) -> usize {
        let mut count = 0;
        for _ in 0..QUEUE_PACKETS {
            if count >= quota {
                break;
            }
            let Some(socket) = &self.socket else { break };
            match recv(socket, &mut self.buffer[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => self.disconnect(on_drop),
                Ok((len, _)) => count += self.apply_verdicts(len, on_verdict),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => self.disconnect(on_drop),
            }
        }
        count
    }

    /// Drops packets whose verdicts are overdue, so that a stopped filter does not hold them
    /// forever. To be called periodically.
    pub fn expire(&mut self, now_ns: u64, on_drop: &mut impl FnMut(TransitPacket, DropReason)) {
        for index in 0..QUEUE_PACKETS {
            let slot = &self.slots[index];
            let is_overdue = now_ns.saturating_sub(slot.requested_ns) >= VERDICT_TIMEOUT_NS;
            if slot.transit.is_some() && is_overdue {
                self.drop_packet(index, DropReason::FilterGone, on_drop);
            }
        }
    }

    /// Applies the verdicts in the first `len` bytes of the buffer, whose content is untrusted.
    fn apply_verdicts(
        &mut self,
        len: usize,
        on_verdict: &mut impl FnMut(TransitPacket, Verdict),
    ) -> usize {
        let mut count = 0;
        let message = self.buffer.get(..len).unwrap_or(&self.buffer[..]);
        for (id, verdict) in verdicts(message) {
            let index = id as usize % QUEUE_PACKETS;
            let slot = &mut self.slots[index];
            let is_current = request_id(index, slot.generation) == id;
            let Some(transit) = slot.transit.take_if(|_| is_current) else {
                self.counters.stray_verdicts += 1;
                continue;
            };
            self.free.push(index);
            count += 1;
            match verdict {
                Verdict::Pass => self.counters.passed += 1,
                Verdict::Refuse => self.counters.refused += 1,
            }
            on_verdict(transit, verdict);
        }
        count
    }

    fn drop_packet(
        &mut self,
        index: usize,
        reason: DropReason,
        on_drop: &mut impl FnMut(TransitPacket, DropReason),
    ) {
        if let Some(transit) = self.slots[index].transit.take() {
            self.free.push(index);
            on_drop(transit, reason);
        }
    }

    /// Closes the connection and drops all packets that wait for a verdict.
    fn disconnect(&mut self, on_drop: &mut impl FnMut(TransitPacket, DropReason)) {
        self.socket = None;
        self.unsent.clear();
        self.message.clear();
        for index in 0..QUEUE_PACKETS {
            self.drop_packet(index, DropReason::FilterGone, on_drop);
        }
    }

    #[cold]
    fn connect(&mut self, now_ns: u64) -> bool {
        if now_ns < self.connect_at_ns {
            return false;
        }
        self.connect_at_ns = now_ns.saturating_add(RECONNECT_NS);
        self.socket = open(&self.config.path).ok();
        self.counters.connections += u64::from(self.socket.is_some());
        self.socket.is_some()
    }

    /// Drops all waiting packets when the router is taken down.
    pub fn release(&mut self, on_drop: &mut impl FnMut(TransitPacket, DropReason)) {
        self.disconnect(on_drop);
    }
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Identifier of a request: the slot's generation and index.
fn request_id(index: usize, generation: u32) -> u32 {
    generation.wrapping_mul(QUEUE_PACKETS as u32).wrapping_add(index as u32)
}
