//! The engine's side of the sockets that have several readers.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tidegate_engine::Engine;
use tidegate_memory::{Doorbell, spsc};
use tidegate_stack::{SendError, UdpId};

use super::lane::{Lane, Outbox, ReaderEnd, Slot, lane};
use super::{Distribution, ReadersConfig};

/// All sockets that have several readers.
pub(crate) struct Groups {
    groups: HashMap<UdpId, Group>,
    pub(crate) outbox: Arc<Outbox>,
    /// Sockets that the stack has something for.
    readable: Vec<UdpId>,
    /// Lanes with replies; kept for its memory.
    listed: Vec<(UdpId, u64)>,
    /// Sockets with datagrams that no reader had room for when theirs left.
    left_behind: usize,
    /// Receiving is held back, perhaps because of a reader.
    held: bool,
}

/// The readers of one socket.
struct Group {
    config: ReadersConfig,
    lanes: Vec<Lane>,
    /// The number of the next lane.
    number: u64,
    /// Where round robin goes on.
    next: usize,
    hash: RandomState,
    /// What readers that left had not read and the others had no room for.
    left_behind: VecDeque<(SocketAddr, IpAddr, Box<[u8]>)>,
}

impl Groups {
    pub(crate) fn new(bell: Option<Arc<Doorbell>>) -> Self {
        Self {
            groups: HashMap::new(),
            outbox: Arc::new(Outbox::new(bell)),
            readable: Vec::new(),
            listed: Vec::new(),
            left_behind: 0,
            held: false,
        }
    }

    /// Whether receiving is held back; then readers say when they have made
    /// room.
    pub(crate) fn set_held(&mut self, held: bool) {
        self.held = held;
        self.outbox.set_wants_room(held || self.left_behind > 0);
    }

    /// From now on this socket may have several readers.
    pub(crate) fn open(&mut self, id: UdpId, config: ReadersConfig) -> io::Result<()> {
        if self.groups.contains_key(&id) {
            let what = "the socket has readers already: clone or add to those";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        let group = Group {
            config,
            lanes: Vec::new(),
            number: 0,
            next: 0,
            hash: RandomState::new(),
            left_behind: VecDeque::new(),
        };
        self.groups.insert(id, group);
        Ok(())
    }

    /// The socket is closed.
    pub(crate) fn close(&mut self, id: UdpId) {
        if let Some(group) = self.groups.remove(&id) {
            self.left_behind -= usize::from(!group.left_behind.is_empty());
        }
    }

    /// How many readers a socket has.
    pub(crate) fn count(&self, id: UdpId) -> usize {
        self.groups.get(&id).map_or(0, |group| group.lanes.len())
    }

    /// Adds a reader; what waits is distributed anew from here on.
    pub(crate) fn add(&mut self, id: UdpId, engine: &mut Engine) -> Option<(u64, ReaderEnd)> {
        let group = self.groups.get_mut(&id)?;
        let number = group.number;
        let (lane, end) = lane(number, &group.config);
        group.number += 1;
        group.lanes.push(lane);
        self.distribute(id, engine);
        Some((number, end))
    }

    /// Removes a reader. Its replies are sent, and what it had not read goes to
    /// the others.
    pub(crate) fn remove(
        &mut self,
        id: UdpId,
        number: u64,
        unread: &mut spsc::Consumer<Slot>,
        engine: &mut Engine,
    ) {
        self.send_replies(id, number, engine);
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.lanes.retain(|lane| lane.number != number);
        let had_left = !group.left_behind.is_empty();
        let mut refused = 0;
        unread.release_each(usize::MAX, |slot| {
            let (remote, local, bytes) = (slot.remote, slot.local, slot.bytes());
            if group.put(remote, local, bytes) {
                return;
            }
            if group.left_behind.len() < group.config.queue_packets {
                group.left_behind.push_back((remote, local, bytes.into()));
            } else {
                refused += 1;
            }
        });
        group.publish();
        self.left_behind += usize::from(!had_left && !group.left_behind.is_empty());
        engine.parts().0.udp_refused(refused);
    }

    /// The stack has something for this socket. Says whether it has readers.
    pub(crate) fn on_readable(&mut self, id: UdpId) -> bool {
        let has_readers = self.groups.get(&id).is_some_and(|group| !group.lanes.is_empty());
        if has_readers {
            self.readable.push(id);
        }
        has_readers
    }

    /// Gives readers what the stack has for them, and the stack what they have
    /// for it.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub(crate) fn serve(&mut self, engine: &mut Engine) -> io::Result<()> {
        if self.groups.is_empty() {
            return Ok(());
        }
        while let Some(id) = self.readable.pop() {
            self.distribute(id, engine);
        }
        if self.left_behind > 0 {
            let has_left =
                |(&id, group): (&UdpId, &Group)| (!group.left_behind.is_empty()).then_some(id);
            let ids: Vec<UdpId> = self.groups.iter().filter_map(has_left).collect();
            ids.into_iter().for_each(|id| self.distribute(id, engine));
        }
        self.outbox.set_wants_room(self.held || self.left_behind > 0);
        let mut listed = std::mem::take(&mut self.listed);
        self.outbox.take(&mut listed);
        let any = !listed.is_empty();
        for (id, number) in listed.drain(..) {
            self.send_replies(id, number, engine);
        }
        self.listed = listed;
        if any { engine.flush() } else { Ok(()) }
    }

    /// Whether there is work that an engine that sleeps would not do.
    pub(crate) fn has_work(&self) -> bool {
        self.outbox.has_any()
    }

    /// How full the reader is that is least so: as long as one can take more,
    /// one that does not read is no reason to hold receiving back. `None`
    /// without readers.
    pub(crate) fn fill(&mut self, id: UdpId) -> Option<u32> {
        self.groups.get_mut(&id)?.lanes.iter_mut().map(Lane::fill).min()
    }

    /// Wakes every reader, since the engine has ended.
    pub(crate) fn fail(&self) {
        self.outbox.fail();
        self.groups.values().flat_map(|group| &group.lanes).for_each(Lane::wake);
    }

    /// Hands what waits in a socket to its readers.
    fn distribute(&mut self, id: UdpId, engine: &mut Engine) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if group.lanes.is_empty() {
            return;
        }
        let had_left = !group.left_behind.is_empty();
        while let Some((remote, local, bytes)) = group.left_behind.pop_front() {
            if !group.put(remote, local, &bytes) {
                group.left_behind.push_front((remote, local, bytes));
                break;
            }
        }
        self.left_behind -= usize::from(had_left && group.left_behind.is_empty());
        let (stack, arena, _) = engine.parts();
        let mut refused = 0;
        while let Some(datagram) = stack.udp_receive(arena, id) {
            if !group.put(datagram.remote, datagram.local, datagram.bytes(arena)) {
                refused += 1;
            }
            datagram.release(arena);
        }
        stack.udp_refused(refused);
        group.publish();
    }

    /// Sends what a reader has answered, as far as there is room.
    fn send_replies(&mut self, id: UdpId, number: u64, engine: &mut Engine) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(lane) = group.lanes.iter_mut().find(|lane| lane.number == number) else { return };
        lane.unlist();
        let mut flushed = false;
        while lane.replies.ready(1) > 0 {
            let sent = lane.replies.slot(0, |slot| send(engine, id, slot));
            match sent {
                Err(SendError::WouldBlock) if !flushed => {
                    // A port that fails says so to whoever runs the engine next.
                    flushed = engine.flush().is_ok();
                    if flushed {
                        continue;
                    }
                    break;
                }
                Err(SendError::WouldBlock) => {
                    lane.list(&self.outbox, id);
                    break;
                }
                // What cannot be sent is lost, as on any network.
                Ok(()) | Err(_) => {
                    lane.replies.release(1);
                    flushed = false;
                }
            }
        }
    }
}

fn send(engine: &mut Engine, id: UdpId, slot: &Slot) -> Result<(), SendError> {
    let (stack, arena, now_ns) = engine.parts();
    let sent = stack.udp_send(now_ns, arena, id, Some(slot.remote), Some(slot.local), slot.bytes());
    match sent {
        // What was sent to a group or to everybody is answered from the
        // address of the interface.
        Err(SendError::SourceNotOurs(_)) => {
            stack.udp_send(now_ns, arena, id, Some(slot.remote), None, slot.bytes())
        }
        sent => sent,
    }
}

impl Group {
    /// Puts a datagram into the queue of the reader that it is for. Returns
    /// whether there was room.
    fn put(&mut self, remote: SocketAddr, local: IpAddr, bytes: &[u8]) -> bool {
        let count = self.lanes.len();
        if count == 0 {
            return false;
        }
        let chosen = match self.config.distribution {
            Distribution::FlowHash => {
                let hash = self.hash.hash_one((remote, local));
                let lane = ((u128::from(hash) * count as u128) >> 64) as usize;
                self.lanes[lane].has_room(bytes.len()).then_some(lane)
            }
            Distribution::RoundRobin => {
                let first = self.next;
                self.next = if first + 1 >= count { 0 } else { first + 1 };
                let mut order = (0..count).map(|ahead| (first + ahead) % count);
                order.find(|&lane| self.lanes[lane].has_room(bytes.len()))
            }
            Distribution::LeastLoaded => {
                let loads = self.lanes.iter_mut().map(Lane::waiting).enumerate();
                let least = loads.min_by_key(|&(_, waiting)| waiting);
                least.map(|(lane, _)| lane).filter(|&lane| self.lanes[lane].has_room(bytes.len()))
            }
        };
        if let Some(lane) = chosen {
            self.lanes[lane].put(remote, local, bytes);
        }
        chosen.is_some()
    }

    fn publish(&mut self) {
        self.lanes.iter_mut().for_each(Lane::publish);
    }
}
