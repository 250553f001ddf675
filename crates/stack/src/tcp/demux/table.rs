//! All TCP state of one interface: connections, listeners, timers and pending output. Free of
//! I/O: segments and calls come in, segments and events go out.

use std::collections::VecDeque;
use std::net::SocketAddr;

use tidegate_memory::probes;
use tidegate_wire::DropReason;

use super::pending::{PendingOutput, Turn};
use super::slots::{Connections, TupleIndex};
use super::stalled::StallQueue;
use super::timer_wheel::TimerWheel;
use crate::ports::{PortGroups, PortGroupsHandle};
use crate::random::SecretRng;
use crate::rate_limit::TokenBucket;
use crate::tcp::buffers::TcpShared;
use crate::tcp::connection::{Connection, SegmentOutcome};
use crate::tcp::flags::ConnFlags;
use crate::tcp::identity::{self, PeerClock, Secret, TcpSecrets};
use crate::tcp::listener::{Listener, Listeners};
use crate::tcp::segment::{FourTuple, OutSegment, Segment};
use crate::tcp::send::mss_of_mtu;
use crate::tcp::seq::Seq;
use crate::tcp::socket::{TcpId, TcpState};
use crate::tcp::timers::{NEVER, NO_INDEX};
use crate::{Event, Limits, Transport};

/// Maximum number of queued replies; further replies are dropped.
const MAX_REPLIES: usize = 256;

/// Delay before the next attempt to send after queues were full.
const RETRY_INTERVAL_NS: u64 = 1_000_000;

/// Delay before the next attempt to accept a connection that was deferred, after the accept queue
/// was full.
const DEFERRAL_RETRY_NS: u64 = 1_000_000_000;

/// Interval between checks for unused memory.
const TRIM_INTERVAL_NS: u64 = 100_000_000;

pub(crate) struct TcpTable {
    pub(crate) connections: Connections,
    pub(crate) by_tuple: TupleIndex,
    pub(crate) listeners: Listeners,
    pub(crate) shared: TcpShared,
    pub(crate) secret: Secret,
    pub(crate) clock: PeerClock,
    wheel: TimerWheel,
    /// Connections with pending output.
    pub(crate) pending: PendingOutput,
    /// Segments to send that belong to no connection.
    pub(crate) replies: Vec<OutSegment>,
    reset_limiter: TokenBucket,
    pub(crate) events: VecDeque<Event>,
    /// Notified of connections on shared ports.
    pub(crate) port_groups: PortGroupsHandle,
    /// True if finished handshakes are also reported as events.
    pub(crate) reports_confirmed_peers: bool,
    /// Connections whose writer waits for memory, first come first served.
    pub(super) memory_waiters: VecDeque<TcpId>,
    pub(super) stalled: StallQueue,
    /// Connections in TIME-WAIT, oldest first; may contain stale entries.
    time_waits: VecDeque<TcpId>,
    time_wait_count: usize,
    time_wait_limit: usize,
    pub(crate) half_open_limit: usize,
    /// Time until which acknowledgements may carry a SYN cookie.
    pub(crate) cookies_until_ns: u64,
    /// Largest payload of the link in bytes: for IPv4 and for IPv6.
    pub(crate) link_mss: [u16; 2],
    retry_at_ns: u64,
    /// Cost of what the current flush has sent.
    pub(super) flush_cost: usize,
    /// Time of the next check for unused memory.
    trim_at_ns: u64,
}

impl TcpTable {
    pub(crate) fn new(chance: &mut SecretRng, limits: &Limits, mtu: usize, now_ns: u64) -> Self {
        let link_mss = [mss_of_mtu(mtu, true), mss_of_mtu(mtu, false)];
        Self {
            connections: Connections::new(limits.tcp_connections),
            by_tuple: TupleIndex::new(chance.hash_key()),
            listeners: Listeners::new(chance.hash_key(), limits.sockets),
            shared: TcpShared::new(limits.tcp_buffer_bytes, limits.tcp_time_wait_ns, link_mss[0]),
            secret: Secret::new(chance),
            clock: PeerClock::default(),
            wheel: TimerWheel::new(now_ns),
            pending: PendingOutput::default(),
            replies: Vec::new(),
            reset_limiter: TokenBucket::new(now_ns, limits.tcp_resets_pps),
            events: VecDeque::new(),
            port_groups: PortGroupsHandle::default(),
            reports_confirmed_peers: false,
            memory_waiters: VecDeque::new(),
            stalled: StallQueue::default(),
            time_waits: VecDeque::new(),
            time_wait_count: 0,
            time_wait_limit: limits.tcp_time_waits,
            half_open_limit: limits.tcp_half_open,
            cookies_until_ns: 0,
            link_mss,
            retry_at_ns: NEVER,
            flush_cost: 0,
            trim_at_ns: now_ns,
        }
    }

    /// Returns the connection `id`, if the application still holds its handle.
    pub(crate) fn get(&self, id: TcpId) -> Option<&Connection> {
        self.connections.get(id).filter(|connection| !connection.flags.contains(ConnFlags::ORPHAN))
    }

    /// As [`TcpTable::get`], with the state that connections share.
    pub(crate) fn get_mut(&mut self, id: TcpId) -> Option<(&mut Connection, &mut TcpShared)> {
        self.connections.held_mut(id).map(|connection| (connection, &mut self.shared))
    }

    /// Initial sequence number of a new connection.
    pub(crate) fn initial_seq(&self, now_ns: u64, tuple: &FourTuple) -> Seq {
        identity::initial_seq(&self.secret, self.clock.ns(now_ns), tuple)
    }

    /// Time stamp offset of a new connection, relative to the caller's clock in milliseconds.
    pub(crate) fn timestamp_offset(&self, tuple: &FourTuple) -> u32 {
        identity::timestamp_offset(&self.secret, tuple).wrapping_add(self.clock.offset_ms())
    }

    /// Implements [`crate::Stack::tcp_secrets`].
    pub(crate) fn secrets(&self) -> TcpSecrets {
        TcpSecrets { secret: self.secret, clock: self.clock }
    }

    /// Implements [`crate::Stack::set_tcp_secrets`].
    pub(crate) fn set_secrets(&mut self, secrets: TcpSecrets) {
        (self.secret, self.clock) = (secrets.secret, secrets.clock);
    }

    /// Implements [`crate::Stack::set_port_groups`].
    pub(crate) fn set_port_groups(&mut self, port_groups: PortGroupsHandle) {
        let is_indexed = |known: &&Connection| known.flags.contains(ConnFlags::INDEXED);
        for connection in self.connections.iter().filter(is_indexed) {
            notify_flow(&port_groups, connection, |groups, transport, local, remote| {
                groups.take_over_flow(transport, local, remote);
            });
        }
        self.listeners.set_port_groups(port_groups.clone());
        // Other stacks may get connections of this one.
        self.connections.index_ports();
        self.port_groups = port_groups;
    }

    /// Notifies the port groups that a connection came from another table.
    pub(super) fn notify_taken_over(&self, connection: &Connection) {
        notify_flow(&self.port_groups, connection, |groups, transport, local, remote| {
            groups.take_over_flow(transport, local, remote);
        });
    }

    /// Inserts a new connection; returns its index. The caller has checked that there is space.
    pub(crate) fn insert(&mut self, now_ns: u64, connection: Connection) -> u32 {
        let Some(id) = self.connections.insert(connection) else {
            debug_assert!(false, "the caller checks that there is space");
            return NO_INDEX;
        };
        self.by_tuple.insert(&mut self.connections, id.index);
        self.update(now_ns, id.index);
        id.index
    }

    /// Processes a received segment. `may_reset`: a segment without a socket is answered with a
    /// reset.
    ///
    /// # Errors
    /// The drop reason of a segment that was of no use.
    #[inline(never)]
    pub(crate) fn handle_segment(
        &mut self,
        now_ns: u64,
        tuple: FourTuple,
        segment: &Segment<'_>,
        may_reset: bool,
    ) -> Result<(), DropReason> {
        let found = self.by_tuple.find(&self.connections, &tuple);
        if let Some(index) = found
            && let Some(connection) = self.connections.at_mut(index)
            && let Some(result) = connection.handle_predicted(now_ns, segment, &mut self.shared)
        {
            self.update(now_ns, index);
            return result;
        }
        let mut min_iss = None;
        if let Some(index) = found {
            let is_replaced = self.connections.at(index).is_some_and(|old| {
                old.state == TcpState::TimeWait
                    && old.can_be_replaced_by(segment)
                    && self.listeners.has_port(tuple.local())
            });
            if !is_replaced {
                return self.handle_connection_segment(now_ns, index, segment);
            }
            min_iss = self.replace_time_wait(now_ns, &tuple);
        }
        if let Some(listener) = self.listeners.find(&tuple) {
            return self.handle_listener_segment(now_ns, tuple, segment, listener, min_iss);
        }
        Err(match may_reset {
            true => self.reply_reset(now_ns, tuple, segment),
            false => DropReason::TcpNoSocket,
        })
    }

    /// Processes a segment of an existing connection.
    pub(crate) fn handle_connection_segment(
        &mut self,
        now_ns: u64,
        index: u32,
        segment: &Segment<'_>,
    ) -> Result<(), DropReason> {
        let Some(connection) = self.connections.at_mut(index) else {
            return Err(DropReason::TcpNoSocket);
        };
        let listener = connection.listener.and_then(|id| self.listeners.get(id));
        if connection.listener.is_some() && listener.is_none() {
            // The listener is closed: the connection will never be accepted.
            connection.abort(&mut self.shared, None, true);
            self.update(now_ns, index);
            return Ok(());
        }
        let is_queue_full = listener.is_some_and(Listener::is_full);
        let brings_data = !segment.payload.is_empty() || segment.is_fin();
        if is_queue_full && brings_data && connection.is_deferred() {
            // The peer retransmits what makes the connection acceptable.
            return Err(DropReason::TcpAcceptQueueFull);
        }
        let mut outcome = SegmentOutcome::default();
        let result = connection.handle_segment(
            now_ns,
            segment,
            !is_queue_full,
            &mut outcome,
            &mut self.shared,
        );
        if outcome.established && self.reports_confirmed_peers {
            self.events.push_back(Event::PeerConfirmed(connection.tuple.remote_ip()));
        }
        let is_acceptable = match outcome.established {
            true => !connection.defer_accept(now_ns),
            false => connection.is_deferred() && connection.has_input(),
        };
        if is_acceptable {
            self.queue_for_accept(index);
        }
        if let Some(out) = outcome.reply {
            self.reply(out);
        }
        self.update(now_ns, index);
        result
    }

    /// Moves a connection from the SYN queue of its listener to the accept queue.
    fn queue_for_accept(&mut self, index: u32) {
        let Some(connection) = self.connections.at_mut(index) else { return };
        let Some(id) = connection.listener else { return };
        let Some(listener) = self.listeners.get_mut(id) else { return };
        listener.half_open -= usize::from(connection.flags.take(ConnFlags::IN_SYN_QUEUE));
        connection.flags.insert(ConnFlags::IN_ACCEPT_QUEUE);
        listener.push(index);
        if !std::mem::replace(&mut listener.notified, true) {
            self.events.push_back(Event::TcpAcceptable(id));
        }
    }

    /// Makes a connection acceptable whose peer has sent nothing for as long as the listener defers
    /// it. A full accept queue takes it later.
    fn end_deferral(&mut self, now_ns: u64, index: u32) {
        let Some(connection) = self.connections.at_mut(index) else { return };
        if !connection.is_deferred() {
            return;
        }
        match connection.listener.and_then(|id| self.listeners.get(id)) {
            Some(listener) if listener.is_full() => {
                connection.timers.set_idle(now_ns, DEFERRAL_RETRY_NS);
            }
            Some(_) => self.queue_for_accept(index),
            // The listener is closed: the connection will never be accepted.
            None => connection.abort(&mut self.shared, None, true),
        }
    }

    /// Answers a segment without a connection with a reset, within the rate limit. Returns the drop
    /// reason of the segment.
    pub(crate) fn reply_reset(
        &mut self,
        now_ns: u64,
        tuple: FourTuple,
        segment: &Segment<'_>,
    ) -> DropReason {
        let Some(reset) = segment.reset(tuple) else { return DropReason::TcpNoSocket };
        match self.reset_limiter.take(now_ns) && self.reply(reset) {
            true => DropReason::TcpNoSocket,
            false => DropReason::TcpResetRateLimited,
        }
    }

    /// Queues a reply; false when the queue is full.
    pub(crate) fn reply(&mut self, out: OutSegment) -> bool {
        let has_space = self.replies.len() < MAX_REPLIES;
        if has_space {
            self.replies.push(out);
        }
        has_space
    }

    /// Updates the table after any change of a connection: output queue, events, timers, release
    /// after its end.
    pub(crate) fn update(&mut self, now_ns: u64, index: u32) {
        self.update_for_turn(now_ns, index, Turn::First);
    }

    /// As [`TcpTable::update`]. What the connection has to send waits for `turn`.
    #[inline(always)]
    pub(super) fn update_for_turn(&mut self, now_ns: u64, index: u32, turn: Turn) {
        let Some((connection, id)) = self.connections.at_mut_with_id(index) else { return };
        self.pending.schedule(connection, index, turn);
        if connection.flags.intersects(ConnFlags::NOTIFY_READABLE | ConnFlags::NOTIFY_WRITABLE) {
            Self::push_readiness_events(connection, id, &mut self.events);
        }
        if matches!(connection.state, TcpState::TimeWait | TcpState::Closed) {
            return self.update_ended(now_ns, id);
        }
        self.update_timer(index);
    }

    /// The part of [`TcpTable::update`] that concerns timers: all that sending a segment changes.
    #[inline]
    pub(super) fn update_timer(&mut self, index: u32) {
        let Some(connection) = self.connections.at(index) else { return };
        let deadline_ns = connection.timers.deadline_ns();
        if deadline_ns != NEVER && connection.links.fires_later_than(deadline_ns) {
            self.wheel.set(&mut self.connections, index, deadline_ns);
        }
    }

    /// As [`TcpTable::update`], for connections that have ended or are in TIME-WAIT.
    #[cold]
    fn update_ended(&mut self, now_ns: u64, id: TcpId) {
        let Some(connection) = self.connections.at_mut(id.index) else { return };
        if connection.state == TcpState::TimeWait
            && !connection.flags.contains(ConnFlags::IN_TIME_WAIT)
        {
            connection.flags.insert(ConnFlags::IN_TIME_WAIT);
            self.time_wait_count += 1;
            self.time_waits.push_back(id);
            self.limit_time_waits(now_ns);
        }
        let Some(connection) = self.connections.at_mut(id.index) else { return };
        if connection.state == TcpState::Closed && !connection.flags.contains(ConnFlags::RESET_NOW)
        {
            return self.release(id.index);
        }
        let deadline_ns = connection.timers.deadline_ns();
        if deadline_ns != NEVER {
            self.wheel.set(&mut self.connections, id.index, deadline_ns);
        }
    }

    #[inline(always)]
    fn push_readiness_events(connection: &mut Connection, id: TcpId, events: &mut VecDeque<Event>) {
        let readable = connection.flags.take(ConnFlags::NOTIFY_READABLE);
        let writable = connection.flags.take(ConnFlags::NOTIFY_WRITABLE);
        if connection.flags.contains(ConnFlags::ORPHAN) {
            return;
        }
        if readable && connection.flags.set_new(ConnFlags::READABLE_NOTIFIED) {
            events.push_back(Event::TcpReadable(id));
        }
        if writable && connection.flags.set_new(ConnFlags::WRITABLE_NOTIFIED) {
            events.push_back(Event::TcpWritable(id));
        }
    }

    /// Releases the address and port tuple of a closed connection. Also frees its slot, unless an
    /// application or an accept queue still refers to the connection.
    fn release(&mut self, index: u32) {
        if let Some(connection) = self.connections.at(index)
            && connection.flags.contains(ConnFlags::INDEXED)
        {
            notify_flow(&self.port_groups, connection, |groups, transport, local, remote| {
                groups.end_flow(transport, local, remote);
            });
        }
        self.unlink(index);
        let Some(connection) = self.connections.at_mut(index) else { return };
        if connection.flags.take(ConnFlags::IN_SYN_QUEUE)
            && let Some(listener) = connection.listener.and_then(|id| self.listeners.get_mut(id))
        {
            listener.half_open -= 1;
        }
        if !connection.flags.contains(ConnFlags::ORPHAN)
            || connection.flags.contains(ConnFlags::IN_ACCEPT_QUEUE)
        {
            return;
        }
        let id = self.connections.id(index);
        if let Some(mut connection) = self.connections.remove(index) {
            let (local, remote) = (connection.tuple.local(), connection.tuple.remote());
            probes::on_close(local.port(), remote.port());
            if connection.flags.contains(ConnFlags::REPORT_END) {
                self.events.push_back(Event::TcpEnded(id));
            }
            connection.release(&mut self.shared);
        }
    }

    /// Removes a connection from the lookup table, the timer wheel and the TIME-WAIT count.
    fn unlink(&mut self, index: u32) {
        self.by_tuple.remove(&mut self.connections, index);
        self.wheel.clear(&mut self.connections, index);
        if let Some(connection) = self.connections.at_mut(index) {
            self.time_wait_count -= usize::from(connection.flags.take(ConnFlags::IN_TIME_WAIT));
        }
    }

    /// Removes a connection unchanged, for another table.
    pub(super) fn remove(&mut self, index: u32) -> Option<Connection> {
        self.unlink(index);
        self.connections.remove(index)
    }

    /// Ends a connection without sending a segment.
    pub(crate) fn abort_silently(&mut self, now_ns: u64, index: u32) {
        if let Some(connection) = self.connections.at_mut(index) {
            connection.abort(&mut self.shared, None, false);
            self.update(now_ns, index);
        }
    }

    /// True if a new connection may use this address and port tuple.
    pub(crate) fn is_tuple_free(&self, now_ns: u64, tuple: &FourTuple) -> bool {
        let Some(index) = self.by_tuple.find(&self.connections, tuple) else { return true };
        let old = self.connections.at(index);
        old.is_none_or(|old| old.can_be_replaced(now_ns, &self.shared))
    }

    /// Ends a connection in TIME-WAIT in favor of a new connection with the same tuple. Returns
    /// the lowest initial sequence number for the new connection.
    pub(crate) fn replace_time_wait(&mut self, now_ns: u64, tuple: &FourTuple) -> Option<Seq> {
        let index = self.by_tuple.find(&self.connections, tuple)?;
        let proposed = self.initial_seq(now_ns, tuple);
        let iss = self.connections.at(index).map(|old| old.next_iss(proposed));
        self.abort_silently(now_ns, index);
        iss
    }

    /// Ends the oldest connections in TIME-WAIT above the limit. Removes stale entries, so that
    /// the queue cannot grow without bound.
    fn limit_time_waits(&mut self, now_ns: u64) {
        while let Some(&oldest) = self.time_waits.front() {
            let state = self.connections.get(oldest).map(|connection| connection.state);
            let is_waiting = state == Some(TcpState::TimeWait);
            let is_within_limits = self.time_wait_count <= self.time_wait_limit
                && self.time_waits.len() <= 2 * self.time_wait_limit;
            if is_waiting && is_within_limits {
                return;
            }
            self.time_waits.pop_front();
            if is_waiting {
                self.abort_silently(now_ns, oldest.index);
            }
        }
    }

    /// Takes the next connection with pending output: its slot and its turn.
    #[inline]
    pub(super) fn next_pending(&mut self) -> Option<(u32, Turn)> {
        while let Some((index, turn)) = self.pending.pop() {
            if let Some(connection) = self.connections.at_mut(index)
                && connection.flags.contains(ConnFlags::PENDING)
            {
                connection.flags.remove(ConnFlags::PENDING);
                return Some((index, turn));
            }
        }
        None
    }

    /// Returns a connection that was taken and has not had its turn.
    pub(super) fn put_pending_back(&mut self, index: u32, turn: Turn) {
        if let Some(connection) = self.connections.at_mut(index)
            && connection.flags.set_new(ConnFlags::PENDING)
        {
            self.pending.put_back(index, turn);
        }
    }

    /// Schedules another attempt to send, after queues were full.
    pub(crate) fn retry_later(&mut self, now_ns: u64) {
        self.retry_at_ns = now_ns.saturating_add(RETRY_INTERVAL_NS);
    }

    /// Schedules the rest of the output for the next reading of the clock.
    pub(super) fn go_on_later(&mut self, now_ns: u64) {
        self.retry_at_ns = now_ns.saturating_add(1);
    }

    /// Time of the next call of [`TcpTable::expire`], if any.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        self.earliest(self.wheel.next_timeout())
    }

    /// Time until which a sleep may last, if it is limited: without the deadlines that have moved
    /// back.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.earliest(self.wheel.next_deadline(&self.connections))
    }

    /// Earliest of the time of a connection and those of the table.
    fn earliest(&self, of_connection_ns: Option<u64>) -> Option<u64> {
        let retry = (self.retry_at_ns != NEVER).then_some(self.retry_at_ns);
        // Also without further traffic, the memory of a load peak is freed.
        let trim = self.shared.pool.has_excess_spare().then_some(self.trim_at_ns);
        of_connection_ns.into_iter().chain(retry).chain(trim).min()
    }

    /// Handles all expired timers.
    pub(crate) fn expire(&mut self, now_ns: u64) {
        if self.retry_at_ns <= now_ns {
            self.retry_at_ns = NEVER;
        }
        if self.trim_at_ns <= now_ns {
            self.trim_at_ns = now_ns.saturating_add(TRIM_INTERVAL_NS);
            self.shared.pool.trim();
        }
        while let Some(index) = self.wheel.expire(&mut self.connections, now_ns) {
            if let Some(connection) = self.connections.at_mut(index) {
                let ends_deferral =
                    connection.is_deferred() && connection.timers.idle_deadline_ns <= now_ns;
                connection.on_timers(now_ns, &mut self.shared);
                if ends_deferral {
                    self.end_deferral(now_ns, index);
                }
            }
            self.note_stall(now_ns, index);
            self.update(now_ns, index);
        }
    }

    /// Allows an event to be queued again after the application has taken it.
    pub(crate) fn rearm_event(&mut self, event: Event) {
        match event {
            Event::TcpReadable(id) => {
                if let Some((connection, _)) = self.get_mut(id) {
                    connection.flags.remove(ConnFlags::READABLE_NOTIFIED);
                }
            }
            Event::TcpWritable(id) => {
                if let Some((connection, _)) = self.get_mut(id) {
                    connection.flags.remove(ConnFlags::WRITABLE_NOTIFIED);
                }
            }
            Event::TcpAcceptable(id) => {
                if let Some(listener) = self.listeners.get_mut(id) {
                    listener.notified = false;
                }
            }
            _ => {}
        }
    }
}

/// Notifies the port groups of a connection whose port may be shared.
#[inline]
fn notify_flow(
    port_groups: &PortGroupsHandle,
    connection: &Connection,
    notify: impl FnOnce(&dyn PortGroups, Transport, SocketAddr, SocketAddr),
) {
    if connection.options.reuse_port {
        let (local, remote) = (connection.tuple.local(), connection.tuple.remote());
        port_groups.notify(|groups| notify(groups, Transport::Tcp, local, remote));
    }
}
