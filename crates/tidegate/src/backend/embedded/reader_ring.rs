//! Rings between the thread that runs the engine and one reader.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use tidegate_memory::{Doorbell, spsc};
use tidegate_stack::{QUEUE_FILL_SCALE, UdpId};

use crate::types::readers::ReadersConfig;

/// Datagram on its way to or from a reader. The buffer is reused.
pub(crate) struct DatagramSlot {
    /// Address of the peer.
    pub(crate) remote: SocketAddr,
    /// Local address that the datagram was sent to, or will leave from.
    pub(crate) local: IpAddr,
    /// Arrival of a request in the core; `None` if that was not measured.
    pub(crate) arrival_ns: Option<u64>,
    bytes: Vec<u8>,
    len: usize,
}

impl DatagramSlot {
    fn empty() -> Self {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Self {
            remote: SocketAddr::new(nowhere, 0),
            local: nowhere,
            arrival_ns: None,
            bytes: Vec::new(),
            len: 0,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Stores a copy of a datagram. The buffer grows to the longest datagram so far.
    pub(crate) fn fill(&mut self, remote: SocketAddr, local: IpAddr, bytes: &[u8]) {
        (self.remote, self.local) = (remote, local);
        if self.bytes.len() < bytes.len() {
            self.bytes.resize(bytes.len(), 0);
        }
        self.bytes[..bytes.len()].copy_from_slice(bytes);
        self.len = bytes.len();
    }

    /// Buffer of `max` bytes to write to; [`DatagramSlot::set_len`] sets the length written.
    pub(crate) fn buffer_mut(&mut self, max: usize) -> &mut [u8] {
        if self.bytes.len() < max {
            self.bytes.resize(max, 0);
        }
        &mut self.bytes[..max]
    }

    pub(crate) fn set_len(&mut self, len: usize) {
        self.len = len.min(self.bytes.len());
    }
}

/// State shared by both ends besides the rings.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct ReaderRingShared {
    /// Bytes read since the ring was created; written by the reader.
    read_bytes: AtomicU64,
    /// The reader sleeps or is about to.
    asleep: AtomicBool,
    bell: Mutex<Option<Arc<Doorbell>>>,
    /// The reader is marked in [`PendingReplies`].
    is_pending: AtomicBool,
}

/// Reader's end.
pub(crate) struct ReaderEnd {
    pub(crate) requests: spsc::Consumer<DatagramSlot>,
    pub(crate) replies: spsc::Producer<DatagramSlot>,
    pub(crate) shared: Arc<ReaderRingShared>,
    read_bytes: u64,
}

/// Engine's end.
pub(crate) struct ReaderRing {
    pub(crate) number: u64,
    requests: spsc::Producer<DatagramSlot>,
    pub(crate) replies: spsc::Consumer<DatagramSlot>,
    shared: Arc<ReaderRingShared>,
    capacity: usize,
    packet_limit: usize,
    byte_limit: u64,
    /// Bytes written since the ring was created.
    written_bytes: u64,
    read_bytes_seen: u64,
    /// Written slots that are not yet published.
    unpublished: usize,
}

/// Creates both ends.
pub(crate) fn reader_ring(number: u64, config: &ReadersConfig) -> (ReaderRing, ReaderEnd) {
    let capacity = config.queue_packets.next_power_of_two();
    let (to_reader, requests) = spsc::ring(capacity, DatagramSlot::empty);
    let (replies, from_reader) = spsc::ring(capacity, DatagramSlot::empty);
    let shared = Arc::new(ReaderRingShared::default());
    let ring = ReaderRing {
        number,
        requests: to_reader,
        replies: from_reader,
        shared: Arc::clone(&shared),
        capacity,
        packet_limit: config.queue_packets,
        byte_limit: config.queue_bytes as u64,
        written_bytes: 0,
        read_bytes_seen: 0,
        unpublished: 0,
    };
    (ring, ReaderEnd { requests, replies, shared, read_bytes: 0 })
}

impl ReaderRing {
    /// Datagrams queued for the reader.
    pub(crate) fn queued(&mut self) -> usize {
        self.capacity - self.requests.free_slots(self.capacity) + self.unpublished
    }

    /// True if a datagram of `len` bytes is within the packet and byte limits.
    #[inline]
    pub(crate) fn has_space(&mut self, len: usize) -> bool {
        let below_limit = self.capacity - self.packet_limit;
        if self.requests.free_slots(self.unpublished + below_limit + 1)
            <= self.unpublished + below_limit
        {
            return false;
        }
        let after = self.written_bytes + len as u64;
        if after - self.read_bytes_seen > self.byte_limit {
            self.read_bytes_seen = self.shared.read_bytes.load(Ordering::Acquire);
        }
        after - self.read_bytes_seen <= self.byte_limit
    }

    /// Writes a datagram; there must be space. The reader sees it after [`ReaderRing::publish`].
    #[inline]
    pub(crate) fn push(
        &mut self,
        remote: SocketAddr,
        local: IpAddr,
        arrival_ns: Option<u64>,
        bytes: &[u8],
    ) {
        self.requests.slot(self.unpublished, |slot| {
            slot.fill(remote, local, bytes);
            slot.arrival_ns = arrival_ns;
        });
        self.unpublished += 1;
        self.written_bytes += bytes.len() as u64;
    }

    /// Publishes the written datagrams to the reader, and wakes the reader.
    #[inline]
    pub(crate) fn publish(&mut self) {
        if self.unpublished > 0 {
            self.requests.publish(std::mem::take(&mut self.unpublished));
            self.shared.wake();
        }
    }

    /// Fill level in parts of [`BUSY_HIGH_PERMILLE`]: by packets or by bytes, whichever is nearer to its
    /// limit.
    pub(crate) fn fill_level(&mut self) -> u32 {
        self.read_bytes_seen = self.shared.read_bytes.load(Ordering::Acquire);
        let bytes = self.written_bytes - self.read_bytes_seen;
        let scaled = |held: u64, limit: u64| {
            (held * u64::from(QUEUE_FILL_SCALE) / limit.max(1)).min(u64::from(QUEUE_FILL_SCALE))
                as u32
        };
        let packets = self.queued() as u64;
        scaled(packets, self.packet_limit as u64).max(scaled(bytes, self.byte_limit))
    }

    pub(crate) fn wake(&self) {
        self.shared.wake();
    }

    /// Called before the replies are read: later replies mark the reader as pending again.
    pub(crate) fn clear_pending(&self) {
        self.shared.is_pending.store(false, Ordering::Relaxed);
        // Pairs with the fence in `PendingReplies::mark_pending`.
        fence(Ordering::SeqCst);
    }

    pub(crate) fn mark_pending(&self, pending: &PendingReplies, id: UdpId) {
        pending.mark_pending(&self.shared, id, self.number);
    }
}

impl ReaderRingShared {
    /// Called before the reader sleeps: new datagrams ring `bell` from now on. The reader must
    /// check its ring once more after this.
    pub(crate) fn arm(&self, bell: &Arc<Doorbell>) {
        let mut ours = self.bell.lock().unwrap_or_else(PoisonError::into_inner);
        if !ours.as_ref().is_some_and(|ours| Arc::ptr_eq(ours, bell)) {
            *ours = Some(Arc::clone(bell));
        }
        drop(ours);
        self.asleep.store(true, Ordering::Relaxed);
        // Pairs with the fence in `wake`: either the engine sees the reader asleep, or the
        // reader's next check sees the published datagrams.
        fence(Ordering::SeqCst);
    }

    pub(crate) fn disarm(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    #[inline]
    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            self.ring();
        }
    }

    #[cold]
    fn ring(&self) {
        if self.asleep.swap(false, Ordering::Relaxed) {
            let bell = self.bell.lock().unwrap_or_else(PoisonError::into_inner);
            bell.iter().for_each(|bell| bell.ring());
        }
    }
}

impl ReaderEnd {
    /// Releases the oldest `count` slots, which held `bytes` bytes.
    #[inline]
    pub(crate) fn release(&mut self, count: usize, bytes: usize) {
        self.requests.release(count);
        self.read_bytes += bytes as u64;
        self.shared.read_bytes.store(self.read_bytes, Ordering::Release);
    }
}

/// Readers with replies for the engine.
#[derive(Default)]
pub(crate) struct PendingReplies {
    has_any: AtomicBool,
    readers: Mutex<Vec<(UdpId, u64)>>,
    /// Wakes the thread that runs the engine.
    bell: Option<Arc<Doorbell>>,
    /// The engine waits for readers to free space.
    wants_space: AtomicBool,
    /// The engine has failed: the rings are not served any more.
    failed: AtomicBool,
}

impl PendingReplies {
    pub(crate) fn new(bell: Option<Arc<Doorbell>>) -> Self {
        Self { bell, ..Self::default() }
    }

    /// Called after replies are published: the engine will read this reader's ring.
    pub(crate) fn mark_pending(&self, ring: &ReaderRingShared, id: UdpId, number: u64) {
        // Pairs with the fence in `ReaderRing::clear_pending`: either the engine sees the
        // replies that were published before, or the reader is marked again.
        fence(Ordering::SeqCst);
        if !ring.is_pending.load(Ordering::Relaxed) && !ring.is_pending.swap(true, Ordering::AcqRel)
        {
            let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
            readers.push((id, number));
            self.has_any.store(true, Ordering::Release);
        }
        self.ring();
    }

    /// Wakes the thread that runs the engine, if it sleeps.
    pub(crate) fn ring(&self) {
        self.bell.iter().for_each(|bell| bell.ring());
    }

    /// Swaps the marked readers for the empty vector `readers`.
    pub(crate) fn take(&self, readers: &mut Vec<(UdpId, u64)>) {
        if self.has_any.load(Ordering::Relaxed) {
            let mut listed = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::swap(readers, &mut listed);
            self.has_any.store(false, Ordering::Relaxed);
        }
    }

    /// True if readers are marked.
    pub(crate) fn has_any(&self) -> bool {
        self.has_any.load(Ordering::Acquire)
    }

    pub(crate) fn set_wants_space(&self, wants: bool) {
        if self.wants_space.load(Ordering::Relaxed) != wants {
            self.wants_space.store(wants, Ordering::Release);
        }
    }

    pub(crate) fn wants_space(&self) -> bool {
        self.wants_space.load(Ordering::Acquire)
    }

    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FrameSize, Net, NetConfig, UdpSocket};

    fn address() -> (SocketAddr, IpAddr) {
        ("192.0.2.1:53".parse().unwrap(), "192.0.2.2".parse().unwrap())
    }

    #[test]
    fn limits_in_packets_and_bytes_are_exact() {
        let config = ReadersConfig { queue_packets: 3, queue_bytes: 100, ..Default::default() };
        let (mut ring, mut reader) = reader_ring(0, &config);
        let (remote, local) = address();
        assert!(!ring.has_space(101));
        assert!(ring.has_space(100));
        for _ in 0..3 {
            assert!(ring.has_space(10));
            ring.push(remote, local, Some(1), &[7; 10]);
        }
        assert!(!ring.has_space(0), "three packets are the limit");
        assert_eq!(ring.fill_level(), QUEUE_FILL_SCALE);
        ring.publish();
        assert_eq!(reader.requests.ready_slots(4), 3);
        reader.requests.slot(0, |slot| {
            assert_eq!((slot.bytes(), slot.arrival_ns), (&[7; 10][..], Some(1)));
        });
        reader.release(1, 10);
        assert!(ring.has_space(80) && !ring.has_space(81), "20 of 100 bytes wait");
        assert_eq!(ring.fill_level(), QUEUE_FILL_SCALE * 2 / 3);
    }

    #[test]
    fn marks_reader_once_until_taken() {
        let (ring, reader) = reader_ring(5, &ReadersConfig::default());
        let pending = PendingReplies::new(None);
        let (port, _peer) = crate::mem::wire(&Default::default()).unwrap();
        let config = NetConfig::new(port).address("192.0.2.2/24".parse().unwrap());
        let net = Net::open(config.hugepages(false).frames(64, FrameSize::K2)).unwrap();
        let id = UdpSocket::bind(&net, "192.0.2.2:7").unwrap().udp_id();
        let mut readers = Vec::new();
        pending.take(&mut readers);
        assert!(readers.is_empty() && !pending.has_any());
        pending.mark_pending(&reader.shared, id, 5);
        pending.mark_pending(&reader.shared, id, 5);
        assert!(pending.has_any());
        pending.take(&mut readers);
        assert_eq!(readers, [(id, 5)]);
        ring.clear_pending();
        ring.mark_pending(&pending, id);
        assert!(pending.has_any());
    }
}
