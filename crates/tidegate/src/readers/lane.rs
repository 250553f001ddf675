//! The rings between the thread that runs the engine and one reader.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use tidegate_memory::{Doorbell, spsc};
use tidegate_stack::{FULL, UdpId};

use super::ReadersConfig;

/// A datagram on its way to or from a reader. The memory is used again and
/// again.
pub(crate) struct Slot {
    /// The other host.
    pub(crate) remote: SocketAddr,
    /// The address of ours that it was sent to, and is to leave from.
    pub(crate) local: IpAddr,
    bytes: Vec<u8>,
    len: usize,
}

impl Slot {
    fn empty() -> Self {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Self { remote: SocketAddr::new(nowhere, 0), local: nowhere, bytes: Vec::new(), len: 0 }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Takes a copy of a datagram. Memory is taken only by the longest so far.
    pub(crate) fn fill(&mut self, remote: SocketAddr, local: IpAddr, bytes: &[u8]) {
        (self.remote, self.local) = (remote, local);
        if self.bytes.len() < bytes.len() {
            self.bytes.resize(bytes.len(), 0);
        }
        self.bytes[..bytes.len()].copy_from_slice(bytes);
        self.len = bytes.len();
    }

    /// Room for up to `most` bytes, to be told the length of by
    /// [`Slot::set_len`].
    pub(crate) fn room(&mut self, most: usize) -> &mut [u8] {
        if self.bytes.len() < most {
            self.bytes.resize(most, 0);
        }
        &mut self.bytes[..most]
    }

    pub(crate) fn set_len(&mut self, len: usize) {
        self.len = len.min(self.bytes.len());
    }
}

/// What both ends of a lane see besides the rings.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct LaneShared {
    /// Bytes read since the lane was made; written by the reader.
    read_bytes: AtomicU64,
    /// The reader sleeps or is about to.
    asleep: AtomicBool,
    bell: Mutex<Option<Arc<Doorbell>>>,
    /// The lane stands in the [`Outbox`].
    listed: AtomicBool,
}

/// The reader's end.
pub(crate) struct ReaderEnd {
    pub(crate) requests: spsc::Consumer<Slot>,
    pub(crate) replies: spsc::Producer<Slot>,
    pub(crate) shared: Arc<LaneShared>,
    read_bytes: u64,
}

/// The engine's end.
pub(crate) struct Lane {
    pub(crate) number: u64,
    requests: spsc::Producer<Slot>,
    pub(crate) replies: spsc::Consumer<Slot>,
    shared: Arc<LaneShared>,
    capacity: usize,
    packet_limit: usize,
    byte_limit: u64,
    /// Bytes written since the lane was made.
    written_bytes: u64,
    read_bytes_seen: u64,
    /// Slots that are written and not yet published.
    written: usize,
}

/// Makes both ends.
pub(crate) fn lane(number: u64, config: &ReadersConfig) -> (Lane, ReaderEnd) {
    let capacity = config.queue_packets.next_power_of_two();
    let (to_reader, requests) = spsc::ring(capacity, Slot::empty);
    let (replies, from_reader) = spsc::ring(capacity, Slot::empty);
    let shared = Arc::new(LaneShared::default());
    let lane = Lane {
        number,
        requests: to_reader,
        replies: from_reader,
        shared: Arc::clone(&shared),
        capacity,
        packet_limit: config.queue_packets,
        byte_limit: config.queue_bytes as u64,
        written_bytes: 0,
        read_bytes_seen: 0,
        written: 0,
    };
    (lane, ReaderEnd { requests, replies, shared, read_bytes: 0 })
}

impl Lane {
    /// Datagrams that wait for the reader.
    pub(crate) fn waiting(&mut self) -> usize {
        self.capacity - self.requests.free(self.capacity) + self.written
    }

    /// Whether a datagram of `len` bytes is within the limits.
    #[inline]
    pub(crate) fn has_room(&mut self, len: usize) -> bool {
        let below_limit = self.capacity - self.packet_limit;
        if self.requests.free(self.written + below_limit + 1) <= self.written + below_limit {
            return false;
        }
        let after = self.written_bytes + len as u64;
        if after - self.read_bytes_seen > self.byte_limit {
            self.read_bytes_seen = self.shared.read_bytes.load(Ordering::Acquire);
        }
        after - self.read_bytes_seen <= self.byte_limit
    }

    /// Writes a datagram for which there is room. The reader sees it after
    /// [`Lane::publish`].
    #[inline]
    pub(crate) fn put(&mut self, remote: SocketAddr, local: IpAddr, bytes: &[u8]) {
        self.requests.slot(self.written, |slot| slot.fill(remote, local, bytes));
        self.written += 1;
        self.written_bytes += bytes.len() as u64;
    }

    /// Shows the reader what was written, and wakes it.
    #[inline]
    pub(crate) fn publish(&mut self) {
        if self.written > 0 {
            self.requests.publish(std::mem::take(&mut self.written));
            self.shared.wake();
        }
    }

    /// How full it is, in parts of [`FULL`]: by packets or by bytes, whichever
    /// is nearer to its limit.
    pub(crate) fn fill(&mut self) -> u32 {
        self.read_bytes_seen = self.shared.read_bytes.load(Ordering::Acquire);
        let bytes = self.written_bytes - self.read_bytes_seen;
        let part = |held: u64, limit: u64| {
            (held * u64::from(FULL) / limit.max(1)).min(u64::from(FULL)) as u32
        };
        let packets = self.waiting() as u64;
        part(packets, self.packet_limit as u64).max(part(bytes, self.byte_limit))
    }

    pub(crate) fn wake(&self) {
        self.shared.wake();
    }

    /// Before looking at the replies: from now on the reader lists the lane
    /// again.
    pub(crate) fn unlist(&self) {
        self.shared.listed.store(false, Ordering::Relaxed);
        // Pairs with the fence in `Outbox::list`.
        fence(Ordering::SeqCst);
    }

    pub(crate) fn list(&self, outbox: &Outbox, id: UdpId) {
        outbox.list(&self.shared, id, self.number);
    }
}

impl LaneShared {
    /// Before sleeping: from now on new datagrams ring `bell`. Look once more
    /// after this.
    pub(crate) fn arm(&self, bell: &Arc<Doorbell>) {
        let mut ours = self.bell.lock().unwrap_or_else(PoisonError::into_inner);
        if !ours.as_ref().is_some_and(|ours| Arc::ptr_eq(ours, bell)) {
            *ours = Some(Arc::clone(bell));
        }
        drop(ours);
        self.asleep.store(true, Ordering::Relaxed);
        // Pairs with the fence in `wake`: either the engine sees the reader
        // asleep, or the reader's next look sees what was published.
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
    /// Gives the oldest `count` slots back, which held `bytes` bytes.
    #[inline]
    pub(crate) fn release(&mut self, count: usize, bytes: usize) {
        self.requests.release(count);
        self.read_bytes += bytes as u64;
        self.shared.read_bytes.store(self.read_bytes, Ordering::Release);
    }
}

/// Which lanes have something for the engine.
#[derive(Default)]
pub(crate) struct Outbox {
    any: AtomicBool,
    lanes: Mutex<Vec<(UdpId, u64)>>,
    /// Rung to wake the thread that runs the engine.
    bell: Option<Arc<Doorbell>>,
    /// The engine waits for readers to make room.
    wants_room: AtomicBool,
    /// The engine has ended: nobody serves the rings.
    failed: AtomicBool,
}

impl Outbox {
    pub(crate) fn new(bell: Option<Arc<Doorbell>>) -> Self {
        Self { bell, ..Self::default() }
    }

    /// After publishing replies: the engine will look at this lane.
    pub(crate) fn list(&self, lane: &LaneShared, id: UdpId, number: u64) {
        // Pairs with the fence in `Lane::unlist`: either the engine sees the
        // replies that were published before, or the lane is listed again.
        fence(Ordering::SeqCst);
        if !lane.listed.load(Ordering::Relaxed) && !lane.listed.swap(true, Ordering::AcqRel) {
            let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
            lanes.push((id, number));
            self.any.store(true, Ordering::Release);
        }
        self.ring();
    }

    /// Wakes the thread that runs the engine, if it sleeps.
    pub(crate) fn ring(&self) {
        self.bell.iter().for_each(|bell| bell.ring());
    }

    /// Exchanges the lanes that are listed for the empty `lanes`.
    pub(crate) fn take(&self, lanes: &mut Vec<(UdpId, u64)>) {
        if self.any.load(Ordering::Relaxed) {
            let mut listed = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::swap(lanes, &mut listed);
            self.any.store(false, Ordering::Relaxed);
        }
    }

    /// Whether lanes are listed.
    pub(crate) fn has_any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    pub(crate) fn set_wants_room(&self, wants: bool) {
        if self.wants_room.load(Ordering::Relaxed) != wants {
            self.wants_room.store(wants, Ordering::Release);
        }
    }

    pub(crate) fn wants_room(&self) -> bool {
        self.wants_room.load(Ordering::Acquire)
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
        let (mut lane, mut reader) = lane(0, &config);
        let (remote, local) = address();
        assert!(!lane.has_room(101));
        assert!(lane.has_room(100));
        for _ in 0..3 {
            assert!(lane.has_room(10));
            lane.put(remote, local, &[7; 10]);
        }
        assert!(!lane.has_room(0), "three packets are the limit");
        assert_eq!(lane.fill(), FULL);
        lane.publish();
        assert_eq!(reader.requests.ready(4), 3);
        reader.requests.slot(0, |slot| assert_eq!(slot.bytes(), [7; 10]));
        reader.release(1, 10);
        assert!(lane.has_room(80) && !lane.has_room(81), "20 of 100 bytes wait");
        assert_eq!(lane.fill(), FULL * 2 / 3);
    }

    #[test]
    fn a_lane_is_listed_once_until_it_was_looked_at() {
        let (lane, reader) = lane(5, &ReadersConfig::default());
        let outbox = Outbox::new(None);
        let (port, _peer) = crate::mem::wire(&Default::default()).unwrap();
        let config = NetConfig::new(port).address("192.0.2.2/24".parse().unwrap());
        let net = Net::open(config.hugepages(false).frames(64, FrameSize::K2)).unwrap();
        let id = UdpSocket::bind(&net, "192.0.2.2:7").unwrap().udp_id();
        let mut lanes = Vec::new();
        outbox.take(&mut lanes);
        assert!(lanes.is_empty() && !outbox.has_any());
        outbox.list(&reader.shared, id, 5);
        outbox.list(&reader.shared, id, 5);
        assert!(outbox.has_any());
        outbox.take(&mut lanes);
        assert_eq!(lanes, [(id, 5)]);
        lane.unlist();
        lane.list(&outbox, id);
        assert!(outbox.has_any());
    }
}
