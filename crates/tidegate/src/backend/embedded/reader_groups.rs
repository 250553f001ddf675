//! Engine side of the sockets that have several readers.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tidegate_engine::Engine;
use tidegate_memory::{Doorbell, spsc};
use tidegate_stack::{SendError, UdpId};

use super::reader_ring::{DatagramSlot, PendingReplies, ReaderEnd, ReaderRing, reader_ring};
use crate::types::readers::{Distribution, ReadersConfig};

/// All sockets that have several readers.
pub(crate) struct ReaderGroups {
    groups: HashMap<UdpId, ReaderGroup>,
    pub(crate) pending_replies: Arc<PendingReplies>,
    /// Sockets with datagrams to distribute.
    readable: Vec<UdpId>,
    /// Readers with pending replies; kept to reuse the allocation.
    replying: Vec<(UdpId, u64)>,
    /// Number of sockets with orphaned datagrams: unread datagrams of removed readers that no
    /// other reader has space for.
    orphaned_sockets: usize,
    /// True while receiving is paused, perhaps because of a reader.
    is_receive_paused: bool,
}

/// Readers of one socket.
struct ReaderGroup {
    config: ReadersConfig,
    rings: Vec<ReaderRing>,
    /// Number of the next reader.
    next_number: u64,
    /// Index of the next reader in round robin.
    round_robin_next: usize,
    flow_hasher: RandomState,
    /// Unread datagrams of removed readers that the other readers had no space for.
    orphaned: VecDeque<(Arrived, Box<[u8]>)>,
}

/// Origin of a request.
#[derive(Clone, Copy)]
struct Arrived {
    remote: SocketAddr,
    local: IpAddr,
    /// Time of the arrival; `None` if that was not measured.
    at_ns: Option<u64>,
}

impl ReaderGroups {
    pub(crate) fn new(bell: Option<Arc<Doorbell>>) -> Self {
        Self {
            groups: HashMap::new(),
            pending_replies: Arc::new(PendingReplies::new(bell)),
            readable: Vec::new(),
            replying: Vec::new(),
            orphaned_sockets: 0,
            is_receive_paused: false,
        }
    }

    /// Sets the paused state of receiving. While paused, readers report freed space.
    pub(crate) fn set_receive_paused(&mut self, paused: bool) {
        self.is_receive_paused = paused;
        self.pending_replies.set_wants_space(paused || self.orphaned_sockets > 0);
    }

    /// Allows several readers on a socket.
    pub(crate) fn open(&mut self, id: UdpId, config: ReadersConfig) -> io::Result<()> {
        if self.groups.contains_key(&id) {
            let what =
                "the socket already has readers: clone its UdpReaders, or add a reader there";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        let group = ReaderGroup {
            config,
            rings: Vec::new(),
            next_number: 0,
            round_robin_next: 0,
            flow_hasher: RandomState::new(),
            orphaned: VecDeque::new(),
        };
        self.groups.insert(id, group);
        Ok(())
    }

    /// Removes a closed socket.
    pub(crate) fn close(&mut self, id: UdpId) {
        if let Some(group) = self.groups.remove(&id) {
            self.orphaned_sockets -= usize::from(!group.orphaned.is_empty());
        }
    }

    /// Number of readers of a socket.
    pub(crate) fn count(&self, id: UdpId) -> usize {
        self.groups.get(&id).map_or(0, |group| group.rings.len())
    }

    /// Adds a reader; datagrams that arrive from now on are distributed over it as well.
    pub(crate) fn add(&mut self, id: UdpId, engine: &mut Engine) -> Option<(u64, ReaderEnd)> {
        let group = self.groups.get_mut(&id)?;
        let number = group.next_number;
        let (ring, end) = reader_ring(number, &group.config);
        group.next_number += 1;
        group.rings.push(ring);
        self.distribute(id, engine);
        Some((number, end))
    }

    /// Removes a reader. Its replies are sent, and its unread datagrams go to the others.
    pub(crate) fn remove(
        &mut self,
        id: UdpId,
        number: u64,
        unread: &mut spsc::Consumer<DatagramSlot>,
        engine: &mut Engine,
    ) {
        self.send_replies(id, number, engine);
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.rings.retain(|ring| ring.number != number);
        let had_orphans = !group.orphaned.is_empty();
        let mut dropped = 0;
        unread.release_each(usize::MAX, |slot| {
            let arrived =
                Arrived { remote: slot.remote, local: slot.local, at_ns: slot.arrival_ns };
            if group.push(arrived, slot.bytes()) {
                return;
            }
            if group.orphaned.len() < group.config.queue_packets {
                group.orphaned.push_back((arrived, slot.bytes().into()));
            } else {
                dropped += 1;
            }
        });
        group.publish();
        self.orphaned_sockets += usize::from(!had_orphans && !group.orphaned.is_empty());
        engine.parts().0.udp_count_as_dropped(dropped);
    }

    /// Queues a readable socket for distribution. Returns true if it has readers.
    pub(crate) fn on_readable(&mut self, id: UdpId) -> bool {
        let has_readers = self.groups.get(&id).is_some_and(|group| !group.rings.is_empty());
        if has_readers {
            self.readable.push(id);
        }
        has_readers
    }

    /// Distributes datagrams to readers, and sends the readers' replies.
    ///
    /// # Errors
    /// When the device has failed.
    pub(crate) fn serve(&mut self, engine: &mut Engine) -> io::Result<()> {
        if self.groups.is_empty() {
            return Ok(());
        }
        while let Some(id) = self.readable.pop() {
            self.distribute(id, engine);
        }
        if self.orphaned_sockets > 0 {
            let has_orphans =
                |(&id, group): (&UdpId, &ReaderGroup)| (!group.orphaned.is_empty()).then_some(id);
            let ids: Vec<UdpId> = self.groups.iter().filter_map(has_orphans).collect();
            ids.into_iter().for_each(|id| self.distribute(id, engine));
        }
        self.pending_replies.set_wants_space(self.is_receive_paused || self.orphaned_sockets > 0);
        let mut replying = std::mem::take(&mut self.replying);
        self.pending_replies.take(&mut replying);
        let has_replies = !replying.is_empty();
        for (id, number) in replying.drain(..) {
            self.send_replies(id, number, engine);
        }
        self.replying = replying;
        if has_replies { engine.flush() } else { Ok(()) }
    }

    /// True if there is work that a sleeping engine would leave undone.
    pub(crate) fn has_work(&self) -> bool {
        self.pending_replies.has_any()
    }

    /// Fill level of the least loaded reader: as long as one reader has space, another reader
    /// that does not read is no reason to pause receiving. `None` without readers.
    pub(crate) fn fill_level(&mut self, id: UdpId) -> Option<u32> {
        self.groups.get_mut(&id)?.rings.iter_mut().map(ReaderRing::fill_level).min()
    }

    /// Wakes every reader after the engine has failed.
    pub(crate) fn fail(&self) {
        self.pending_replies.fail();
        self.groups.values().flat_map(|group| &group.rings).for_each(ReaderRing::wake);
    }

    /// Distributes a socket's queued datagrams to its readers.
    fn distribute(&mut self, id: UdpId, engine: &mut Engine) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if group.rings.is_empty() {
            return;
        }
        let had_orphans = !group.orphaned.is_empty();
        while let Some((arrived, bytes)) = group.orphaned.pop_front() {
            if !group.push(arrived, &bytes) {
                group.orphaned.push_front((arrived, bytes));
                break;
            }
        }
        self.orphaned_sockets -= usize::from(had_orphans && group.orphaned.is_empty());
        let at_ns = engine.arrival_ns();
        let (stack, arena, _) = engine.parts();
        let mut dropped = 0;
        while let Some(datagram) = stack.udp_recv(arena, id) {
            let arrived = Arrived { remote: datagram.remote, local: datagram.local, at_ns };
            if !group.push(arrived, datagram.bytes(arena)) {
                dropped += 1;
            }
            datagram.release(arena);
        }
        stack.udp_count_as_dropped(dropped);
        group.publish();
    }

    /// Sends a reader's replies, as far as there is transmit space.
    fn send_replies(&mut self, id: UdpId, number: u64, engine: &mut Engine) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(ring) = group.rings.iter_mut().find(|lane| lane.number == number) else { return };
        ring.clear_pending();
        let mut flushed = false;
        while ring.replies.ready_slots(1) > 0 {
            let sent = ring.replies.slot(0, |slot| send(engine, id, slot));
            match sent {
                Err(SendError::WouldBlock) if !flushed => {
                    // A device error is reported by the engine's next run.
                    flushed = engine.flush().is_ok();
                    if flushed {
                        continue;
                    }
                    break;
                }
                Err(SendError::WouldBlock) => {
                    ring.mark_pending(&self.pending_replies, id);
                    break;
                }
                // Replies that cannot be sent are lost, as on any network.
                Ok(()) | Err(_) => {
                    ring.replies.release(1);
                    flushed = false;
                }
            }
        }
    }
}

fn send(engine: &mut Engine, id: UdpId, slot: &DatagramSlot) -> Result<(), SendError> {
    let (stack, arena, now_ns) = engine.parts();
    let sent = stack.udp_send(now_ns, arena, id, Some(slot.remote), Some(slot.local), slot.bytes());
    match sent {
        // Datagrams sent to a multicast or broadcast address are answered from the interface's
        // address.
        Err(SendError::SourceNotLocal(_)) => {
            stack.udp_send(now_ns, arena, id, Some(slot.remote), None, slot.bytes())
        }
        sent => sent,
    }
}

impl ReaderGroup {
    /// Pushes a datagram into the queue of its reader. Returns false if there is no space.
    fn push(&mut self, arrived: Arrived, bytes: &[u8]) -> bool {
        let Arrived { remote, local, at_ns } = arrived;
        let count = self.rings.len();
        if count == 0 {
            return false;
        }
        let chosen = match self.config.distribution {
            Distribution::FlowHash => {
                let hash = self.flow_hasher.hash_one((remote, local));
                let index = ((u128::from(hash) * count as u128) >> 64) as usize;
                self.rings[index].has_space(bytes.len()).then_some(index)
            }
            Distribution::RoundRobin => {
                let first = self.round_robin_next;
                self.round_robin_next = if first + 1 >= count { 0 } else { first + 1 };
                let mut order = (0..count).map(|ahead| (first + ahead) % count);
                order.find(|&index| self.rings[index].has_space(bytes.len()))
            }
            Distribution::LeastLoaded => {
                let backlogs = self.rings.iter_mut().map(ReaderRing::queued).enumerate();
                let shortest = backlogs.min_by_key(|&(_, waiting)| waiting);
                shortest
                    .map(|(lane, _)| lane)
                    .filter(|&lane| self.rings[lane].has_space(bytes.len()))
            }
        };
        if let Some(index) = chosen {
            self.rings[index].push(remote, local, at_ns, bytes);
        }
        chosen.is_some()
    }

    fn publish(&mut self) {
        self.rings.iter_mut().for_each(ReaderRing::publish);
    }
}
