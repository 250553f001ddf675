//! Listeners: SYN queue, accept queue, and SYN cookies when the first is full.
//! Several may share an address, each with its own queues
//! (RFC 9293 section 3.10.7.2, RFC 4987).

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU32;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tidegate_wire::DropReason;
use tidegate_wire::tcp::TcpFlags;

use super::arrival::seconds;
use super::connection::{Connection, Is, Shared};
use super::cookie;
use super::segment::{Ends, Out, Segment};
use super::seq::Seq;
use super::socket::{TcpError, TcpListenerId, TcpOptions, TcpState};
use super::table::TcpTable;
use crate::chance::HashKey;
use crate::port_groups::Told;
use crate::{RestoreError, Transport};

/// For so long after the last cookie went out, acknowledgements may bring one.
const COOKIES_NS: u64 = 2 << 36;

/// What the answer with a cookie offers as a window.
fn cookie_window(options: &TcpOptions) -> u16 {
    u16::try_from(options.receive_buffer_bytes).unwrap_or(u16::MAX)
}

/// A listener.
pub(crate) struct Listener {
    pub(crate) local: SocketAddr,
    pub(crate) options: Arc<TcpOptions>,
    backlog: usize,
    /// Established and not accepted.
    queue: VecDeque<u32>,
    /// How many are being established.
    pub(crate) half_open: usize,
    pub(crate) told: bool,
}

impl Listener {
    pub(crate) fn is_full(&self) -> bool {
        self.queue.len() >= self.backlog
    }

    pub(crate) fn push(&mut self, index: u32) {
        self.queue.push_back(index);
    }

    pub(crate) fn pop(&mut self) -> Option<u32> {
        self.queue.pop_front()
    }

    /// Those established and not accepted, oldest first.
    pub(crate) fn queued(&self) -> impl Iterator<Item = u32> + '_ {
        self.queue.iter().copied()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Gives those in the queue the places that they have in another table.
    pub(crate) fn rename_queued(&mut self, renamed: impl FnMut(u32) -> Option<u32>) {
        let queue = std::mem::take(&mut self.queue);
        self.queue = queue.into_iter().filter_map(renamed).collect();
    }
}

/// A [`Listener`] as plain data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedListener {
    local: SocketAddr,
    options: TcpOptions,
    backlog: u64,
    queue: Vec<u32>,
}

/// A place for a listener: its generation and who is there.
pub(crate) type SavedPlace = (NonZeroU32, Option<SavedListener>);

/// All listeners.
pub(crate) struct Listeners {
    slots: Vec<(NonZeroU32, Option<Listener>)>,
    free: Vec<u32>,
    /// Those of one address are a group.
    by_address: HashMap<SocketAddr, Vec<u32>, HashKey>,
    limit: usize,
    /// Who hears of those that share their port.
    told: Told,
}

impl Listeners {
    pub(crate) fn new(key: HashKey, limit: usize) -> Self {
        let by_address = HashMap::with_hasher(key);
        let told = Told::default();
        Self { slots: Vec::new(), free: Vec::new(), by_address, limit, told }
    }

    /// As [`crate::Stack::set_port_groups`].
    pub(super) fn set_port_groups(&mut self, told: Told) {
        self.told = told;
        self.slots.iter().filter_map(|(_, there)| there.as_ref()).for_each(|l| self.tell_joined(l));
    }

    fn tell_joined(&self, listener: &Listener) {
        if listener.options.reuse_port {
            for key in Self::keys(listener.local, &listener.options) {
                let party = listener.options.party;
                self.told.tell(|groups| groups.join(Transport::Tcp, key, party));
            }
        }
    }

    /// All of them as plain data, place by place.
    pub(crate) fn save(&self) -> Vec<SavedPlace> {
        let save = |listener: &Listener| SavedListener {
            local: listener.local,
            options: *listener.options,
            backlog: listener.backlog as u64,
            queue: listener.queue.iter().copied().collect(),
        };
        let place = |slot: &(NonZeroU32, Option<Listener>)| (slot.0, slot.1.as_ref().map(save));
        self.slots.iter().map(place).collect()
    }

    /// Adds the next place, with who was there. Whether those in its queue can
    /// be there is checked elsewhere.
    ///
    /// # Errors
    /// When there are too many, or two cannot have one address.
    pub(crate) fn add_place(
        &mut self,
        (generation, saved): SavedPlace,
        shared: &mut Shared,
    ) -> Result<(), RestoreError> {
        let index = self.slots.len() as u32;
        self.slots.push((generation, None));
        let Some(saved) = saved else {
            self.free.push(index);
            return Ok(());
        };
        let options = shared.options(saved.options);
        let local = SocketAddr::new(saved.local.ip(), saved.local.port());
        let has_room = Self::keys(local, &options).all(|key| self.may_have(key, &options));
        if local.port() == 0 || !has_room {
            return Err(RestoreError::Damaged("two listeners have one address"));
        }
        for key in Self::keys(local, &options) {
            self.by_address.entry(key).or_default().push(index);
        }
        self.slots[index as usize].1 = Some(Listener {
            local,
            options,
            backlog: usize::try_from(saved.backlog).unwrap_or(usize::MAX).max(1),
            queue: saved.queue.into(),
            half_open: 0,
            told: false,
        });
        Ok(())
    }

    /// How many places were ever used.
    pub(crate) fn places(&self) -> u32 {
        self.slots.len() as u32
    }

    /// How many there may be.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    pub(crate) fn at(&self, index: u32) -> Option<&Listener> {
        self.slots.get(index as usize)?.1.as_ref()
    }

    pub(crate) fn at_mut(&mut self, index: u32) -> Option<&mut Listener> {
        self.slots.get_mut(index as usize)?.1.as_mut()
    }

    pub(crate) fn id(&self, index: u32) -> TcpListenerId {
        let generation = self.slots.get(index as usize).map_or(NonZeroU32::MIN, |slot| slot.0);
        TcpListenerId { index, generation }
    }

    pub(crate) fn get(&self, id: TcpListenerId) -> Option<&Listener> {
        self.at(id.index).filter(|_| self.id(id.index) == id)
    }

    pub(crate) fn get_mut(&mut self, id: TcpListenerId) -> Option<&mut Listener> {
        if self.id(id.index) == id { self.at_mut(id.index) } else { None }
    }

    /// The listeners that a segment to `local` may be for.
    fn group(&self, local: SocketAddr) -> Option<&[u32]> {
        let any: IpAddr = match local {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let exact = self.by_address.get(&local);
        let group = exact.or_else(|| self.by_address.get(&SocketAddr::new(any, local.port())));
        group.map(Vec::as_slice)
    }

    /// The listener for a segment between these ends. Of several the ends say
    /// which, unless that one is full and another is not.
    pub(crate) fn find(&self, ends: &Ends) -> Option<u32> {
        let group = self.group(ends.local())?;
        if let [only] = group {
            return Some(*only);
        }
        let start = self.by_address.hasher().hash_one(ends) as usize % group.len().max(1);
        let (before, behind) = group.split_at_checked(start)?;
        let mut in_turn = behind.iter().chain(before).copied();
        let has_room = |&index: &u32| self.at(index).is_some_and(|listener| !listener.is_full());
        in_turn.clone().find(has_room).or_else(|| in_turn.next())
    }

    /// Whether a listener has this port.
    pub(crate) fn has_port(&self, local: SocketAddr) -> bool {
        self.group(local).is_some()
    }

    /// Whether another listener may have an address: nobody has it, or everybody
    /// agrees to share it.
    fn may_have(&self, address: SocketAddr, options: &TcpOptions) -> bool {
        let shares = |index: &u32| {
            let other = self.at(*index).map(|other| &other.options);
            other.is_some_and(|other| other.reuse_port && other.party == options.party)
        };
        let group = self.by_address.get(&address);
        group.is_none_or(|group| options.reuse_port && group.iter().all(shares))
    }

    /// The addresses that a listener is found by.
    fn keys(local: SocketAddr, options: &TcpOptions) -> impl Iterator<Item = SocketAddr> + use<> {
        let is_dual = options.dual_stack && local.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        let v4 = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), local.port());
        [Some(local), is_dual.then_some(v4)].into_iter().flatten()
    }

    pub(crate) fn add(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: Arc<TcpOptions>,
    ) -> Result<TcpListenerId, TcpError> {
        if !Self::keys(local, &options).all(|key| self.may_have(key, &options)) {
            return Err(TcpError::AddressInUse(local));
        }
        if !self.has_room_for(1) {
            return Err(TcpError::TooMany("listeners"));
        }
        Ok(self.enter(Listener {
            local,
            options,
            backlog: backlog.max(1),
            queue: VecDeque::new(),
            half_open: 0,
            told: false,
        }))
    }

    /// Whether there may be so many more.
    pub(crate) fn has_room_for(&self, more: usize) -> bool {
        self.slots.len() - self.free.len() + more <= self.limit
    }

    /// Whether a listener may be here, beside those who are.
    pub(crate) fn may_enter(&self, listener: &Listener) -> bool {
        let options = &listener.options;
        Self::keys(listener.local, options).all(|key| self.may_have(key, options))
    }

    /// Gives a place to a listener who may be here.
    pub(crate) fn enter(&mut self, listener: Listener) -> TcpListenerId {
        self.tell_joined(&listener);
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push((NonZeroU32::MIN, None));
            (self.slots.len() - 1) as u32
        });
        for key in Self::keys(listener.local, &listener.options) {
            self.by_address.entry(key).or_default().push(index);
        }
        self.slots[index as usize].1 = Some(listener);
        self.id(index)
    }

    pub(crate) fn remove(&mut self, id: TcpListenerId) -> Option<Listener> {
        self.get(id)?;
        let slot = &mut self.slots[id.index as usize];
        let listener = slot.1.take()?;
        slot.0 = slot.0.checked_add(1).unwrap_or(NonZeroU32::MIN);
        self.free.push(id.index);
        for key in Self::keys(listener.local, &listener.options) {
            if listener.options.reuse_port {
                let party = listener.options.party;
                self.told.tell(|groups| groups.leave(Transport::Tcp, key, party));
            }
            if let Entry::Occupied(mut group) = self.by_address.entry(key) {
                group.get_mut().retain(|&index| index != id.index);
                if group.get().is_empty() {
                    group.remove();
                }
            }
        }
        Some(listener)
    }
}

/// Whether a listener may have a connection between these ends: no other stack that has
/// the port, too, has one.
fn may_begin(told: &Told, options: &TcpOptions, ends: &Ends) -> bool {
    !options.reuse_port || told.begin(Transport::Tcp, ends.local(), ends.remote())
}

impl TcpTable {
    /// A segment for a listener (RFC 9293 section 3.10.7.2). `replaces` is the
    /// first number that may be used when an old connection gave way.
    ///
    /// # Errors
    /// Why it is of no use.
    pub(crate) fn listen_arrival(
        &mut self,
        now_ns: u64,
        ends: Ends,
        segment: &Segment<'_>,
        listener_index: u32,
        replaces: Option<Seq>,
    ) -> Result<(), DropReason> {
        if segment.is_rst() {
            return Err(DropReason::TcpReset);
        }
        if segment.is_ack() {
            return self.cookie_arrival(now_ns, ends, segment, listener_index);
        }
        if !segment.is_syn() || segment.is_fin() {
            return Err(DropReason::TcpFlags);
        }
        let id = self.listeners.id(listener_index);
        let is_full = self.connections.is_full();
        let half_open_limit = self.half_open_limit;
        let Some(listener) = self.listeners.at_mut(listener_index) else {
            return Err(DropReason::TcpNoSocket);
        };
        if listener.is_full() {
            return Err(DropReason::TcpAcceptQueueFull);
        }
        if listener.half_open >= half_open_limit {
            let options = Arc::clone(&listener.options);
            self.cookies_until_ns = now_ns.saturating_add(COOKIES_NS);
            self.answer_with_cookie(now_ns, ends, segment, &options);
            return Ok(());
        }
        if is_full {
            return Err(DropReason::TcpTableFull);
        }
        if !may_begin(&self.told, &listener.options, &ends) {
            return Err(DropReason::TcpNoSocket);
        }
        listener.half_open += 1;
        let options = Arc::clone(&listener.options);
        let iss = replaces.unwrap_or_else(|| self.initial_seq(now_ns, &ends));
        let offset = self.timestamp_offset(&ends);
        let mut connection = Connection::new(now_ns, ends, options, iss, offset);
        connection.state = TcpState::SynReceived;
        connection.listener = Some(id);
        connection.is.insert(Is::PASSIVE);
        connection.is.insert(Is::ORPHAN);
        connection.is.insert(Is::IN_SYN_QUEUE);
        connection.begin_receiving(segment.seq);
        connection.learn_options(now_ns, segment);
        // RFC 3168 section 6.1.1: a SYN that offers it has both bits.
        let offer = TcpFlags::ECE | TcpFlags::CWR;
        connection
            .is
            .set(Is::ECN, segment.flags.contains(offer) && !segment.congestion_experienced);
        connection.window = segment.window.into();
        connection.max_window = connection.window;
        (connection.window_seq, connection.window_ack) = (segment.seq, iss);
        connection.is.insert(Is::WANTS_OUTPUT);
        self.enter(now_ns, connection);
        Ok(())
    }

    /// Answers a SYN without remembering it.
    fn answer_with_cookie(
        &mut self,
        now_ns: u64,
        ends: Ends,
        segment: &Segment<'_>,
        options: &TcpOptions,
    ) {
        let mut out = Out::bare(ends, TcpFlags::SYN | TcpFlags::ACK);
        out.seq = cookie::make(&self.secret, self.clock.ns(now_ns), &ends, segment);
        out.ack = segment.seq + 1;
        out.window = cookie_window(options);
        out.options.mss(self.link_mss[usize::from(!ends.is_v4())]);
        if let Some((value, _)) = segment.options.timestamps {
            // Without time stamps there is no place to keep the others in.
            if segment.options.sack_permitted {
                out.options.sack_permitted();
            }
            let offset = self.timestamp_offset(&ends);
            let now = ((now_ns / 1_000_000) as u32).wrapping_add(offset);
            out.options.timestamps(cookie::timestamp(now, segment), value);
            if segment.options.window_shift.is_some() {
                out.options.window_shift(options.window_shift());
            }
        }
        self.reply(out);
    }

    /// An acknowledgement for no connection: it may bring a cookie back.
    fn cookie_arrival(
        &mut self,
        now_ns: u64,
        ends: Ends,
        segment: &Segment<'_>,
        listener_index: u32,
    ) -> Result<(), DropReason> {
        let id = self.listeners.id(listener_index);
        let Some(listener) = self.listeners.at(listener_index) else {
            return Err(DropReason::TcpNoSocket);
        };
        // Another stack on the port may have sent it.
        let shares = listener.options.reuse_port && self.told.is_anybody();
        let is_time = now_ns < self.cookies_until_ns || shares;
        let expects = is_time && !segment.is_syn() && !segment.is_fin();
        let kept = match expects {
            true => cookie::open(&self.secret, self.clock.ns(now_ns), &ends, segment),
            false => None,
        };
        let Some(kept) = kept else {
            // RFC 9293 section 3.10.7.2, second.
            self.reply_reset(now_ns, ends, segment);
            return Err(DropReason::TcpNoSocket);
        };
        if listener.is_full() {
            return Err(DropReason::TcpAcceptQueueFull);
        }
        if self.connections.is_full() {
            return Err(DropReason::TcpTableFull);
        }
        if !may_begin(&self.told, &listener.options, &ends) {
            return Err(DropReason::TcpNoSocket);
        }
        let offset = self.timestamp_offset(&ends);
        let iss = segment.ack - 1;
        let mut connection =
            Connection::new(now_ns, ends, Arc::clone(&listener.options), iss, offset);
        connection.listener = Some(id);
        connection.is.insert(Is::PASSIVE);
        connection.is.insert(Is::ORPHAN);
        connection.state = TcpState::SynReceived;
        connection.nxt = segment.ack;
        connection.begin_receiving(segment.seq - 1);
        connection.rcv_edge = connection.rcv_nxt + u32::from(cookie_window(&connection.options));
        connection.set_peer_mss(Some(kept.mss));
        connection.is.set(Is::SACK, kept.sack);
        connection.is.set(Is::TIMESTAMPS, segment.options.timestamps.is_some());
        if let Some((value, _)) = segment.options.timestamps {
            (connection.ts_recent, connection.ts_recent_s) = (value, seconds(now_ns));
        }
        match kept.window_shift {
            Some(shift) => connection.shift_in = shift,
            None => (connection.shift_in, connection.shift_out) = (0, 0),
        }
        connection.set_mtu(usize::from(u16::MAX));
        connection.controller.set_mss(connection.mss.into());
        let index = self.enter(now_ns, connection);
        self.connection_arrival(now_ns, index, segment)
    }
}
