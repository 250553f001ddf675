//! All of TCP on one interface: connections, listeners, timers, and what is to
//! be sent. Pure: it is given segments and calls, and gives segments back.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use tidegate_wire::DropReason;

use super::arrival::Arrived;
use super::connection::{Connection, Is, NEVER, NOWHERE, Shared};
pub(crate) use super::connections::Connections;
use super::connections::Index;
use super::isn;
use super::listener::Listeners;
use super::peer_clock::PeerClock;
use super::prf::Secret;
use super::segment::{Ends, Out, Segment};
use super::seq::Seq;
use super::socket::{TcpId, TcpState};
use super::timers::Wheel;
use crate::chance::Chance;
use crate::port_groups::{PortGroups, Told};
use crate::rate::TokenBucket;
use crate::{Event, Limits, Transport};

/// Answers that wait to be sent, at most: what is beyond is lost.
const MOST_REPLIES: usize = 256;

/// When something could not be sent because queues were full.
const RETRY_NS: u64 = 1_000_000;

/// Between two looks at memory that is not needed any more.
const TRIM_NS: u64 = 100_000_000;

pub(crate) struct TcpTable {
    pub(crate) connections: Connections,
    pub(crate) index: Index,
    pub(crate) listeners: Listeners,
    pub(crate) shared: Shared,
    pub(crate) secret: Secret,
    pub(crate) clock: PeerClock,
    wheel: Wheel,
    /// Connections with something to send, in turn.
    pending: VecDeque<u32>,
    /// Segments of no connection.
    pub(crate) replies: Vec<Out>,
    resets: TokenBucket,
    pub(crate) events: VecDeque<Event>,
    /// Who hears of connections on ports that are shared.
    pub(super) told: Told,
    /// Finished handshakes are events too.
    pub(crate) tells_confirmed: bool,
    /// Those who found no memory to write to, in turn.
    starved: VecDeque<TcpId>,
    /// Connections in TIME-WAIT, oldest first; some have left it.
    time_waits: VecDeque<TcpId>,
    time_wait_count: usize,
    time_wait_limit: usize,
    pub(crate) half_open_limit: usize,
    /// Until when acknowledgements may bring a cookie.
    pub(crate) cookies_until_ns: u64,
    /// The largest payload that the link takes: for IPv4 and for IPv6.
    pub(crate) link_mss: [u16; 2],
    retry_at_ns: u64,
    /// When to look for memory that is not needed any more.
    trim_at_ns: u64,
}

impl TcpTable {
    pub(crate) fn new(chance: &mut Chance, limits: &Limits, mtu: usize, now_ns: u64) -> Self {
        let fits = |headers| u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX);
        Self {
            connections: Connections::new(limits.tcp_connections),
            index: Index::new(chance.hash_key()),
            listeners: Listeners::new(chance.hash_key(), limits.sockets),
            shared: Shared::new(limits.tcp_buffer_bytes, limits.tcp_time_wait_ns, fits(40)),
            secret: Secret::new(chance),
            clock: PeerClock::default(),
            wheel: Wheel::new(now_ns),
            pending: VecDeque::new(),
            replies: Vec::new(),
            resets: TokenBucket::new(now_ns, limits.tcp_resets_pps),
            events: VecDeque::new(),
            told: Told::default(),
            tells_confirmed: false,
            starved: VecDeque::new(),
            time_waits: VecDeque::new(),
            time_wait_count: 0,
            time_wait_limit: limits.tcp_time_waits,
            half_open_limit: limits.tcp_half_open,
            cookies_until_ns: 0,
            link_mss: [fits(40), fits(60)],
            retry_at_ns: NEVER,
            trim_at_ns: now_ns,
        }
    }

    /// The connection with this name that the application still has.
    pub(crate) fn get(&self, id: TcpId) -> Option<&Connection> {
        self.connections.get(id).filter(|connection| !connection.is.contains(Is::ORPHAN))
    }

    /// As [`TcpTable::get`], with what connections share.
    pub(crate) fn get_mut(&mut self, id: TcpId) -> Option<(&mut Connection, &mut Shared)> {
        if self.connections.id(id.index) != id {
            return None;
        }
        let connection = self.connections.at_mut(id.index)?;
        (!connection.is.contains(Is::ORPHAN)).then_some((connection, &mut self.shared))
    }

    /// The number that a new connection begins with.
    pub(crate) fn initial_seq(&self, now_ns: u64, ends: &Ends) -> Seq {
        isn::initial(&self.secret, self.clock.ns(now_ns), ends)
    }

    /// What is added to the caller's clock for the time stamps of a new
    /// connection.
    pub(crate) fn timestamp_offset(&self, ends: &Ends) -> u32 {
        isn::timestamp_offset(&self.secret, ends).wrapping_add(self.clock.ahead_ms())
    }

    /// As [`crate::Stack::set_port_groups`].
    pub(crate) fn set_port_groups(&mut self, told: Told) {
        let is_found = |known: &&Connection| known.is.contains(Is::INDEXED);
        for connection in self.connections.iter().filter(is_found) {
            tell_flow(&told, connection, |groups, transport, local, remote| {
                groups.take_over(transport, local, remote);
            });
        }
        self.listeners.set_port_groups(told.clone());
        self.told = told;
    }

    /// A connection of another table is in this one now.
    pub(super) fn tell_taken_over(&self, connection: &Connection) {
        tell_flow(&self.told, connection, |groups, transport, local, remote| {
            groups.take_over(transport, local, remote);
        });
    }

    /// Takes a new connection in.
    pub(crate) fn enter(&mut self, now_ns: u64, connection: Connection) -> u32 {
        let Some(id) = self.connections.insert(connection) else {
            debug_assert!(false, "it was asked whether there is room");
            return NOWHERE;
        };
        self.index.insert(&mut self.connections, id.index);
        self.settle(now_ns, id.index);
        id.index
    }

    /// A segment has come.
    ///
    /// # Errors
    /// Why it is of no use.
    #[inline]
    pub(crate) fn arrival(
        &mut self,
        now_ns: u64,
        ends: Ends,
        segment: &Segment<'_>,
        may_reset: bool,
    ) -> Result<(), DropReason> {
        let mut replaces = None;
        if let Some(index) = self.index.find(&self.connections, &ends) {
            let gives_way = self.connections.at(index).is_some_and(|old| {
                old.state == TcpState::TimeWait
                    && old.gives_way_to(segment)
                    && self.listeners.has_port(ends.local())
            });
            if !gives_way {
                return self.connection_arrival(now_ns, index, segment);
            }
            replaces = self.replace_time_wait(now_ns, &ends);
        }
        if let Some(listener) = self.listeners.find(&ends) {
            return self.listen_arrival(now_ns, ends, segment, listener, replaces);
        }
        if may_reset {
            self.reply_reset(now_ns, ends, segment);
        }
        Err(DropReason::TcpNoSocket)
    }

    /// A segment for a connection that there is.
    pub(crate) fn connection_arrival(
        &mut self,
        now_ns: u64,
        index: u32,
        segment: &Segment<'_>,
    ) -> Result<(), DropReason> {
        let Some(connection) = self.connections.at_mut(index) else {
            return Err(DropReason::TcpNoSocket);
        };
        let mut listener = connection.listener.and_then(|id| self.listeners.get_mut(id));
        if connection.listener.is_some() && listener.is_none() {
            // Nobody will accept it any more.
            connection.abort(&mut self.shared, None, true);
            self.settle(now_ns, index);
            return Ok(());
        }
        let may_establish = listener.as_ref().is_none_or(|listener| !listener.is_full());
        let mut arrived = Arrived::default();
        let result =
            connection.arrival(now_ns, segment, may_establish, &mut arrived, &mut self.shared);
        if arrived.established && self.tells_confirmed {
            self.events.push_back(Event::PeerConfirmed(connection.ends.remote_ip()));
        }
        if arrived.established
            && let Some(listener) = &mut listener
        {
            listener.half_open -= usize::from(connection.is.contains(Is::IN_SYN_QUEUE));
            connection.is.remove(Is::IN_SYN_QUEUE);
            connection.is.insert(Is::IN_ACCEPT_QUEUE);
            listener.push(index);
            if !std::mem::replace(&mut listener.told, true) {
                self.events.extend(connection.listener.map(Event::TcpAcceptable));
            }
        }
        arrived.answer.into_iter().for_each(|out| self.reply(out));
        self.settle(now_ns, index);
        result
    }

    /// Answers a segment that is for no connection.
    pub(crate) fn reply_reset(&mut self, now_ns: u64, ends: Ends, segment: &Segment<'_>) {
        if let Some(reset) = segment.reset(ends)
            && self.resets.take(now_ns)
        {
            self.reply(reset);
        }
    }

    pub(crate) fn reply(&mut self, out: Out) {
        if self.replies.len() < MOST_REPLIES {
            self.replies.push(out);
        }
    }

    /// Draws the consequences of whatever was done with a connection: events,
    /// output, timers, its end.
    pub(crate) fn settle(&mut self, now_ns: u64, index: u32) {
        let Some((connection, id)) = self.connections.at_mut_with_id(index) else { return };
        if connection.is.contains(Is::WANTS_OUTPUT) && !connection.is.contains(Is::PENDING) {
            connection.is.insert(Is::PENDING);
            self.pending.push_back(index);
        }
        if connection.is.contains(Is::TELL_READABLE) || connection.is.contains(Is::TELL_WRITABLE) {
            Self::tell(connection, id, &mut self.events);
        }
        if matches!(connection.state, TcpState::TimeWait | TcpState::Closed) {
            return self.settle_ended(now_ns, id);
        }
        let deadline_ns = connection.deadline_ns();
        if deadline_ns != NEVER && connection.links.is_later_than(deadline_ns) {
            self.wheel.set(&mut self.connections, index, deadline_ns);
        }
    }

    /// As [`TcpTable::settle`], for what has ended or is in TIME-WAIT.
    #[cold]
    fn settle_ended(&mut self, now_ns: u64, id: TcpId) {
        let Some(connection) = self.connections.at_mut(id.index) else { return };
        if connection.state == TcpState::TimeWait && !connection.is.contains(Is::IN_TIME_WAIT) {
            connection.is.insert(Is::IN_TIME_WAIT);
            self.time_wait_count += 1;
            self.time_waits.push_back(id);
            self.limit_time_waits(now_ns);
        }
        let Some(connection) = self.connections.at_mut(id.index) else { return };
        if connection.state == TcpState::Closed && !connection.is.contains(Is::RESET_NOW) {
            return self.bury(id.index);
        }
        let deadline_ns = connection.deadline_ns();
        if deadline_ns != NEVER {
            self.wheel.set(&mut self.connections, id.index, deadline_ns);
        }
    }

    fn tell(connection: &mut Connection, id: TcpId, events: &mut VecDeque<Event>) {
        let readable = connection.is.take(Is::TELL_READABLE);
        let writable = connection.is.take(Is::TELL_WRITABLE);
        if connection.is.contains(Is::ORPHAN) {
            return;
        }
        if readable && connection.is.newly(Is::READABLE_TOLD) {
            events.push_back(Event::TcpReadable(id));
        }
        if writable && connection.is.newly(Is::WRITABLE_TOLD) {
            events.push_back(Event::TcpWritable(id));
        }
    }

    /// A connection is over: its ends are free, and when nobody has a name for
    /// it any more, so is its place.
    fn bury(&mut self, index: u32) {
        if let Some(connection) = self.connections.at(index)
            && connection.is.contains(Is::INDEXED)
        {
            tell_flow(&self.told, connection, |groups, transport, local, remote| {
                groups.end(transport, local, remote);
            });
        }
        self.unlink(index);
        let Some(connection) = self.connections.at_mut(index) else { return };
        if connection.is.take(Is::IN_SYN_QUEUE)
            && let Some(listener) = connection.listener.and_then(|id| self.listeners.get_mut(id))
        {
            listener.half_open -= 1;
        }
        if !connection.is.contains(Is::ORPHAN) || connection.is.contains(Is::IN_ACCEPT_QUEUE) {
            return;
        }
        if let Some(mut connection) = self.connections.remove(index) {
            connection.release(&mut self.shared);
        }
    }

    /// Takes a connection out of what finds it, wakes it and counts it.
    fn unlink(&mut self, index: u32) {
        self.index.remove(&mut self.connections, index);
        self.wheel.clear(&mut self.connections, index);
        if let Some(connection) = self.connections.at_mut(index) {
            self.time_wait_count -= usize::from(connection.is.take(Is::IN_TIME_WAIT));
        }
    }

    /// Takes a connection out as it is, for another table.
    pub(super) fn remove(&mut self, index: u32) -> Option<Connection> {
        self.unlink(index);
        self.connections.remove(index)
    }

    /// Ends a connection without a word.
    pub(crate) fn end(&mut self, now_ns: u64, index: u32) {
        if let Some(connection) = self.connections.at_mut(index) {
            connection.abort(&mut self.shared, None, false);
            self.settle(now_ns, index);
        }
    }

    /// Whether a new connection may have these ends.
    pub(crate) fn are_free(&self, now_ns: u64, ends: &Ends) -> bool {
        let Some(index) = self.index.find(&self.connections, ends) else { return true };
        let old = self.connections.at(index);
        old.is_none_or(|old| old.may_be_replaced(now_ns, &self.shared))
    }

    /// What is in TIME-WAIT between these ends is forgotten, for a new
    /// connection between them. Returns the least number to begin with.
    pub(crate) fn replace_time_wait(&mut self, now_ns: u64, ends: &Ends) -> Option<Seq> {
        let index = self.index.find(&self.connections, ends)?;
        let proposed = self.initial_seq(now_ns, ends);
        let iss = self.connections.at(index).map(|old| old.next_iss(proposed));
        self.end(now_ns, index);
        iss
    }

    /// The oldest in TIME-WAIT give way when there are too many, and those that
    /// left it early do not make the queue longer without end.
    fn limit_time_waits(&mut self, now_ns: u64) {
        while let Some(&oldest) = self.time_waits.front() {
            let state = self.connections.get(oldest).map(|connection| connection.state);
            let is_waiting = state == Some(TcpState::TimeWait);
            let few = self.time_wait_count <= self.time_wait_limit
                && self.time_waits.len() <= 2 * self.time_wait_limit;
            if is_waiting && few {
                return;
            }
            self.time_waits.pop_front();
            if is_waiting {
                self.end(now_ns, oldest.index);
            }
        }
    }

    /// A writer waits for memory.
    pub(crate) fn starve(&mut self, id: TcpId) {
        if let Some((connection, _)) = self.get_mut(id)
            && connection.is.newly(Is::STARVED)
        {
            self.starved.push_back(id);
        }
    }

    /// Memory came back: those who waited for it may write.
    #[inline]
    pub(crate) fn feed_starved(&mut self, now_ns: u64) {
        if !self.starved.is_empty() {
            self.feed(now_ns);
        }
    }

    fn feed(&mut self, now_ns: u64) {
        while self.shared.chunks.has_reserve()
            && let Some(id) = self.starved.pop_front()
        {
            if let Some((connection, _)) = self.get_mut(id) {
                connection.is.remove(Is::STARVED);
                connection.is.insert(Is::TELL_WRITABLE);
                self.settle(now_ns, id.index);
            }
        }
    }

    /// The next connection with something to send, and where its far end is.
    pub(crate) fn next_pending(&mut self) -> Option<(u32, IpAddr)> {
        while let Some(index) = self.pending.pop_front() {
            if let Some(connection) = self.connections.at_mut(index)
                && connection.is.contains(Is::PENDING)
            {
                connection.is.remove(Is::PENDING);
                return Some((index, connection.ends.remote_ip()));
            }
        }
        None
    }

    /// It is not done yet: it has another turn after the others.
    pub(crate) fn put_back(&mut self, index: u32) {
        if let Some(connection) = self.connections.at_mut(index)
            && connection.is.newly(Is::PENDING)
        {
            self.pending.push_back(index);
        }
    }

    /// Queues are full: the rest goes out a little later.
    pub(crate) fn retry_later(&mut self, now_ns: u64) {
        self.retry_at_ns = now_ns.saturating_add(RETRY_NS);
    }

    /// When [`TcpTable::expire`] has something to do.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        let retry = (self.retry_at_ns != NEVER).then_some(self.retry_at_ns);
        // Also when nothing else happens any more: what a peak took goes back.
        let trim = self.shared.chunks.is_slack().then_some(self.trim_at_ns);
        self.wheel.next_timeout().into_iter().chain(retry).chain(trim).min()
    }

    /// Does what is due.
    pub(crate) fn expire(&mut self, now_ns: u64) {
        if self.retry_at_ns <= now_ns {
            self.retry_at_ns = NEVER;
        }
        if self.trim_at_ns <= now_ns {
            self.trim_at_ns = now_ns.saturating_add(TRIM_NS);
            self.shared.chunks.trim();
        }
        while let Some(index) = self.wheel.expire(&mut self.connections, now_ns) {
            if let Some(connection) = self.connections.at_mut(index) {
                connection.on_timers(now_ns, &mut self.shared);
            }
            self.settle(now_ns, index);
        }
    }

    /// Lets the same thing be told again.
    pub(crate) fn on_taken(&mut self, event: Event) {
        match event {
            Event::TcpReadable(id) => {
                if let Some((connection, _)) = self.get_mut(id) {
                    connection.is.remove(Is::READABLE_TOLD);
                }
            }
            Event::TcpWritable(id) => {
                if let Some((connection, _)) = self.get_mut(id) {
                    connection.is.remove(Is::WRITABLE_TOLD);
                }
            }
            Event::TcpAcceptable(id) => {
                if let Some(listener) = self.listeners.get_mut(id) {
                    listener.told = false;
                }
            }
            _ => {}
        }
    }
}

/// Tells of a connection, if it may have its port with others.
#[inline]
fn tell_flow(
    told: &Told,
    connection: &Connection,
    what: impl FnOnce(&dyn PortGroups, Transport, SocketAddr, SocketAddr),
) {
    if connection.options.reuse_port {
        let (local, remote) = (connection.ends.local(), connection.ends.remote());
        told.tell(|groups| what(groups, Transport::Tcp, local, remote));
    }
}
