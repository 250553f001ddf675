//! Snapshots of connections and listeners, for a takeover by another process.
//!
//! Everything that a peer could notice continues: sequence numbers, windows, time stamps,
//! secrets, segments in flight. Times are relative to the moment of saving. A snapshot is
//! fully validated here, so that the rest of TCP can rely on its own invariants.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use super::arrival::whole_seconds;
use super::buffer_pool::{BUFFER_BYTES, BufferPool, ByteQueue};
use super::congestion::{CongestionController, ControllerSnapshot};
use super::connection::{ConnFlags, Connection, MIN_MSS, NEVER, RtxTimer, TcpShared};
use super::flight::FlightSnapshot;
use super::listener::ListenerSlotSnapshot;
use super::options::MAX_WINDOW_SHIFT;
use super::peer_clock::{PeerClock, PeerTime, milliseconds};
use super::prf::Secret;
use super::recovery::RecoveryPhase;
use super::rtt::{RttEstimator, RttSnapshot};
use super::segment::FourTuple;
use super::seq::Seq;
use super::socket::{Failure, TcpListenerId, TcpOptions, TcpState};
use super::table::TcpTable;
use crate::{Event, RestoreError};

/// Maximum size of windows and buffers, in bytes (RFC 7323 section 2.3).
const MAX_WINDOW_BYTES: u32 = 1 << 30;

/// Flags that are kept in another stack. The other flags follow from the rest of the state.
pub(super) const PERSISTENT_FLAGS: ConnFlags = ConnFlags::PASSIVE
    .union(ConnFlags::ORPHAN)
    .union(ConnFlags::IN_SYN_QUEUE)
    .union(ConnFlags::WANTS_OUTPUT)
    .union(ConnFlags::TIMESTAMPS)
    .union(ConnFlags::SACK)
    .union(ConnFlags::ECN)
    .union(ConnFlags::SEND_ECE)
    .union(ConnFlags::SEND_CWR)
    .union(ConnFlags::FIN_QUEUED)
    .union(ConnFlags::FIN_SENT)
    .union(ConnFlags::FIN_RECEIVED)
    .union(ConnFlags::READ_SHUT)
    .union(ConnFlags::ACK_NOW)
    .union(ConnFlags::RESET_NOW)
    .union(ConnFlags::KEEPALIVE_NOW)
    .union(ConnFlags::FORCE_RETRANSMISSION)
    .union(ConnFlags::FORCE_WINDOW_PROBE)
    .union(ConnFlags::TAIL_PROBE_NOW)
    .union(ConnFlags::TAIL_PROBE_SENT)
    .union(ConnFlags::TAIL_PROBE_RETRANSMITS)
    .union(ConnFlags::REORDERING_SEEN)
    .union(ConnFlags::SYN_RETRANSMITTED)
    .union(ConnFlags::WINDOW_LIMITED)
    .union(ConnFlags::WRITE_BLOCKED)
    .union(ConnFlags::WAITS_FOR_MEMORY);

/// Snapshot of all TCP state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TcpSnapshot {
    secret: Secret,
    peer_time: PeerTime,
    /// Remaining time in which acknowledgements may carry a SYN cookie.
    cookies_valid_for_ns: u64,
    reports_confirmed_peers: bool,
    /// Peers with a finished handshake that no event has reported yet.
    confirmed_peers: Vec<IpAddr>,
    listeners: Vec<ListenerSlotSnapshot>,
    /// All slots ever used: generation and connection.
    connections: Vec<(u32, Option<ConnectionSnapshot>)>,
}

/// Snapshot of one connection. Times are relative to the moment of saving: `_age_` fields lie
/// in the past, `_in_` fields in the future.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ConnectionSnapshot {
    tuple: FourTuple,
    state: TcpState,
    flags: u64,
    listener: Option<TcpListenerId>,
    options: TcpOptions,
    failure: Option<Failure>,
    soft_failure: Option<Failure>,
    sending: SendSnapshot,
    receiving: ReceiveSnapshot,
    recovery: RecoverySnapshot,
    timers: TimerSnapshot,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct SendSnapshot {
    una: Seq,
    nxt: Seq,
    base: Seq,
    /// Data written by the application and not acknowledged.
    data: ByteBuf,
    window: u32,
    max_window: u32,
    window_seq: Seq,
    window_ack: Seq,
    peer_mss: u16,
    mss_limit: u16,
    max_mss: u16,
    small_end: Seq,
    sent_age_ns: u64,
    own_window_shift: u8,
    /// Reading of the connection's time stamp clock.
    timestamp: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct ReceiveSnapshot {
    nxt: Seq,
    edge: Seq,
    read: Seq,
    /// In-order data not yet read.
    data: ByteBuf,
    /// Out-of-order data with its start; most recently updated last.
    out_of_order: Vec<(Seq, ByteBuf)>,
    dsack_range: (Seq, Seq),
    received_since_ack: u32,
    read_since_ack: u32,
    rcv_mss: u16,
    acks_owed: u8,
    last_ack_sent: Seq,
    last_received_age_ns: u64,
    peer_window_shift: u8,
    ts_recent: u32,
    ts_recent_age_s: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct RecoverySnapshot {
    flight: Option<FlightSnapshot>,
    searches_mtu: bool,
    rtt: RttSnapshot,
    controller: ControllerSnapshot,
    phase: RecoveryPhase,
    end: Seq,
    probe_end: Seq,
    cwr_end: Seq,
    duplicate_acks: u8,
    reordering_steps: u8,
    retries: u8,
    stalled_age_ns: u64,
    rto_base_age_ns: u64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct TimerSnapshot {
    wait: RtxTimer,
    wait_in_ns: Option<u64>,
    ack_in_ns: Option<u64>,
    idle_in_ns: Option<u64>,
    keepalives: u8,
    /// Time until the next challenge ACK is due at the latest; wraps.
    challenge_in_ms: u32,
}

/// Time from `now_ns` until a deadline; `None` without a deadline.
fn remaining_ns(now_ns: u64, at_ns: u64) -> Option<u64> {
    (at_ns != NEVER).then_some(at_ns.saturating_sub(now_ns))
}

fn deadline_ns(now_ns: u64, remaining_ns: Option<u64>) -> u64 {
    remaining_ns.map_or(NEVER, |left_ns| now_ns.saturating_add(left_ns))
}

/// Copies `bytes` bytes of a queue, starting at offset `at`.
fn copy_bytes(mut queue: ByteQueue, pool: &BufferPool, at: u32, bytes: u32) -> ByteBuf {
    let mut copy = vec![0; bytes as usize];
    queue.read(pool, at as usize, &mut copy);
    ByteBuf::from(copy)
}

/// Creates a queue that holds `data`.
fn queue_from(pool: &mut BufferPool, data: &[u8]) -> Result<ByteQueue, RestoreError> {
    let mut queue = ByteQueue::EMPTY;
    if !queue.reserve(pool, 0, data.len()) {
        return Err(RestoreError::TooMany {
            what: "bytes of TCP data",
            found: data.len(),
            limit: pool.available() * BUFFER_BYTES,
        });
    }
    queue.write(pool, 0, data);
    Ok(queue)
}

fn ensure_valid(is_valid: bool, what: &'static str) -> Result<(), RestoreError> {
    if is_valid { Ok(()) } else { Err(RestoreError::Damaged(what)) }
}

impl Connection {
    fn save(&self, now_ns: u64, pool: &BufferPool) -> ConnectionSnapshot {
        let age_ns = |at_ns: u64| now_ns.saturating_sub(at_ns);
        let in_flight = self.flight.as_ref().filter(|flight| !flight.is_empty());
        let copy_range = |(start, end): (Seq, Seq)| {
            let at = start.since(self.read_seq);
            (start, copy_bytes(self.incoming, pool, at, end.since(start)))
        };
        ConnectionSnapshot {
            tuple: self.tuple,
            state: self.state,
            flags: (self.flags & PERSISTENT_FLAGS).bits(),
            listener: self.listener,
            options: *self.options,
            failure: self.failure,
            soft_failure: self.soft_failure,
            sending: SendSnapshot {
                una: self.una,
                nxt: self.nxt,
                base: self.send_base,
                data: copy_bytes(self.outgoing, pool, 0, self.outgoing_bytes),
                window: self.window,
                max_window: self.max_window,
                window_seq: self.window_seq,
                window_ack: self.window_ack,
                peer_mss: self.peer_mss,
                mss_limit: self.mss_limit,
                max_mss: self.max_mss,
                small_end: self.small_segment_end,
                sent_age_ns: age_ns(self.last_sent_ns),
                own_window_shift: self.own_window_shift,
                timestamp: self.ts_now(now_ns),
            },
            receiving: ReceiveSnapshot {
                nxt: self.rcv_nxt,
                edge: self.rcv_edge,
                read: self.read_seq,
                data: copy_bytes(self.incoming, pool, 0, self.readable()),
                out_of_order: self
                    .out_of_order
                    .iter()
                    .flat_map(|g| g.ranges_by_recency().map(copy_range))
                    .collect(),
                dsack_range: self.dsack_range,
                received_since_ack: self.received_since_ack,
                read_since_ack: self.read_since_ack,
                rcv_mss: self.rcv_mss,
                acks_owed: self.acks_owed,
                last_ack_sent: self.last_ack_sent,
                last_received_age_ns: age_ns(self.last_received_ns),
                peer_window_shift: self.peer_window_shift,
                ts_recent: self.ts_recent,
                ts_recent_age_s: whole_seconds(now_ns).wrapping_sub(self.ts_recent_s),
            },
            recovery: RecoverySnapshot {
                flight: in_flight.map(|flight| flight.save(now_ns)),
                searches_mtu: self.mtu_search.is_some(),
                rtt: self.rtt.save(now_ns),
                controller: self.controller.save(),
                phase: self.phase,
                end: self.recovery_end,
                probe_end: self.probe_end,
                cwr_end: self.cwr_end,
                duplicate_acks: self.duplicate_acks,
                reordering_steps: self.reordering_steps,
                retries: self.retries,
                stalled_age_ns: age_ns(self.stalled_since_ns),
                rto_base_age_ns: age_ns(self.rto_base_ns),
            },
            timers: TimerSnapshot {
                wait: self.rtx_timer,
                wait_in_ns: remaining_ns(now_ns, self.rtx_deadline_ns),
                ack_in_ns: remaining_ns(now_ns, self.ack_deadline_ns),
                idle_in_ns: remaining_ns(now_ns, self.idle_deadline_ns),
                keepalives: self.keepalive_probes_sent,
                challenge_in_ms: self.challenge_due_ms.wrapping_sub(milliseconds(now_ns)),
            },
        }
    }

    /// Restores a connection, except for its out-of-order data.
    fn restore(
        now_ns: u64,
        saved: &ConnectionSnapshot,
        shared: &mut TcpShared,
    ) -> Result<Self, RestoreError> {
        saved.check()?;
        let ConnectionSnapshot { sending, receiving, recovery, timers, .. } = saved;
        let past_ns = |age_ns: u64| now_ns.saturating_sub(age_ns);
        let options = shared.intern_options(saved.options);
        let kind = options.congestion_control;
        let mut connection = Connection::new(now_ns, saved.tuple, options, sending.una, 0);
        let conn = &mut connection;
        conn.listener = saved.listener;
        conn.state = saved.state;
        conn.flags = ConnFlags::from_bits_truncate(saved.flags) & PERSISTENT_FLAGS;
        (conn.failure, conn.soft_failure) = (saved.failure, saved.soft_failure);

        (conn.una, conn.nxt, conn.send_base) = (sending.una, sending.nxt, sending.base);
        conn.outgoing = queue_from(&mut shared.pool, &sending.data)?;
        conn.outgoing_bytes = sending.data.len() as u32;
        (conn.window, conn.max_window) =
            (sending.window.min(MAX_WINDOW_BYTES), sending.max_window.min(MAX_WINDOW_BYTES));
        (conn.window_seq, conn.window_ack) = (sending.window_seq, sending.window_ack);
        (conn.peer_mss, conn.mss_limit) = (sending.peer_mss, sending.mss_limit);
        conn.set_max_mss(sending.max_mss);
        conn.small_segment_end = sending.small_end;
        conn.last_sent_ns = past_ns(sending.sent_age_ns);
        conn.own_window_shift = sending.own_window_shift;
        conn.ts_offset = sending.timestamp.wrapping_sub(conn.ts_now(now_ns));

        (conn.rcv_nxt, conn.rcv_edge) = (receiving.nxt, receiving.edge);
        conn.read_seq = receiving.read;
        conn.incoming = queue_from(&mut shared.pool, &receiving.data)?;
        conn.dsack_range = receiving.dsack_range;
        (conn.received_since_ack, conn.read_since_ack) =
            (receiving.received_since_ack, receiving.read_since_ack);
        (conn.rcv_mss, conn.acks_owed) = (receiving.rcv_mss, receiving.acks_owed);
        conn.last_ack_sent = receiving.last_ack_sent;
        conn.last_received_ns = past_ns(receiving.last_received_age_ns);
        conn.peer_window_shift = receiving.peer_window_shift;
        conn.ts_recent = receiving.ts_recent;
        conn.ts_recent_s = whole_seconds(now_ns).wrapping_sub(receiving.ts_recent_age_s);

        conn.rtt = RttEstimator::restore(now_ns, &recovery.rtt);
        conn.controller =
            CongestionController::restore(kind, conn.mss.into(), &recovery.controller);
        conn.phase = recovery.phase;
        (conn.recovery_end, conn.probe_end) = (recovery.end, recovery.probe_end);
        conn.cwr_end = recovery.cwr_end;
        conn.duplicate_acks = recovery.duplicate_acks;
        conn.reordering_steps = recovery.reordering_steps.clamp(1, 16);
        conn.retries = recovery.retries;
        conn.stalled_since_ns = past_ns(recovery.stalled_age_ns);
        conn.rto_base_ns = past_ns(recovery.rto_base_age_ns);
        conn.restore_flight(now_ns, recovery.flight.as_ref(), shared)?;
        if recovery.searches_mtu {
            conn.begin_mtu_search(now_ns);
        }

        conn.rtx_timer = timers.wait;
        conn.rtx_deadline_ns = deadline_ns(now_ns, timers.wait_in_ns);
        conn.ack_deadline_ns = deadline_ns(now_ns, timers.ack_in_ns);
        conn.idle_deadline_ns = deadline_ns(now_ns, timers.idle_in_ns);
        conn.keepalive_probes_sent = timers.keepalives;
        conn.challenge_due_ms = milliseconds(now_ns).wrapping_add(timers.challenge_in_ms);
        if conn.state == TcpState::TimeWait {
            conn.idle_deadline_ns =
                conn.idle_deadline_ns.min(now_ns.saturating_add(shared.time_wait_ns));
        }
        conn.refresh_pending_flags();
        Ok(connection)
    }

    /// Restores the segments in flight. They must match the data sent and not acknowledged.
    fn restore_flight(
        &mut self,
        now_ns: u64,
        saved: Option<&FlightSnapshot>,
        shared: &mut TcpShared,
    ) -> Result<(), RestoreError> {
        const FLIGHT_MISMATCH: &str = "the segments in flight do not match the data sent";
        // The SYN-ACK of a connection from a SYN cookie was never recorded as in flight.
        let is_cookie = self.flags.contains(ConnFlags::PASSIVE) && self.una + 1 == self.send_base;
        let Some(saved) = saved else {
            let is_idle = self.una == self.nxt
                || self.state == TcpState::Closed
                || is_cookie && self.nxt == self.send_base;
            return ensure_valid(is_idle, FLIGHT_MISMATCH);
        };
        let mut flight = shared.acquire_flight();
        ensure_valid(flight.restore(now_ns, saved), FLIGHT_MISMATCH)?;
        let (Some(first), Some(last)) = (flight.first(), flight.last()) else {
            return Err(RestoreError::Damaged(FLIGHT_MISMATCH));
        };
        let begins =
            first.start == self.una || is_cookie && first.start == self.send_base && !first.syn;
        let matches_state = match self.is_synchronized() {
            true => {
                !first.syn
                    && self.send_base.is_at_or_before(first.start)
                    && last.fin == self.flags.contains(ConnFlags::FIN_SENT)
            }
            false => first.syn && flight.len() == 1,
        };
        let is_open = self.state != TcpState::Closed;
        ensure_valid(is_open && begins && matches_state && last.end == self.nxt, FLIGHT_MISMATCH)?;
        self.flight = Some(flight);
        Ok(())
    }

    /// Sets the flags for pending output and readiness events from the state of the connection.
    /// A superfluous flag is harmless; a missing flag would stall the connection.
    pub(super) fn refresh_pending_flags(&mut self) {
        let is_finished = match self.state {
            TcpState::Closed => !self.flags.contains(ConnFlags::RESET_NOW),
            TcpState::TimeWait => !self.flags.contains(ConnFlags::ACK_NOW),
            _ => false,
        };
        // Pending work without a running timer would be forgotten.
        let needs_timer = self.flight.is_some() || self.may_have_output();
        if is_finished {
            self.flags.remove(ConnFlags::WANTS_OUTPUT);
        } else if needs_timer && self.rtx_deadline_ns == NEVER
            || self.flags.contains(ConnFlags::RESET_NOW)
        {
            self.flags.insert(ConnFlags::WANTS_OUTPUT);
        }
        let is_closed = self.state == TcpState::Closed;
        let at_eof = self.flags.contains(ConnFlags::FIN_RECEIVED)
            || self.flags.contains(ConnFlags::READ_SHUT);
        let can_write = self.can_send()
            && self.has_send_space()
            && !self.flags.contains(ConnFlags::WAITS_FOR_MEMORY);
        let fin_queued = self.flags.contains(ConnFlags::FIN_QUEUED);
        self.flags.set(ConnFlags::NOTIFY_READABLE, self.readable() > 0 || at_eof || is_closed);
        self.flags.set(ConnFlags::NOTIFY_WRITABLE, can_write || fin_queued || is_closed);
    }
}

impl ConnectionSnapshot {
    fn has_flags(&self, flags: ConnFlags) -> bool {
        ConnFlags::from_bits_truncate(self.flags).contains(flags)
    }

    fn is_synchronized(&self) -> bool {
        !matches!(self.state, TcpState::Closed | TcpState::SynSent | TcpState::SynReceived)
    }

    fn check(&self) -> Result<(), RestoreError> {
        let (local, remote) = (self.tuple.local(), self.tuple.remote());
        let is_valid = local.is_ipv4() == remote.is_ipv4()
            && local.port() != 0
            && remote.port() != 0
            && !remote.ip().is_unspecified()
            && !remote.ip().is_multicast();
        ensure_valid(is_valid, "a connection has an impossible address or port")?;
        self.check_sending()?;
        self.check_receiving()
    }

    fn check_sending(&self) -> Result<(), RestoreError> {
        let SendSnapshot { una, nxt, base, ref data, .. } = self.sending;
        let sizes = self.sending.own_window_shift <= MAX_WINDOW_SHIFT
            && self.sending.peer_mss >= MIN_MSS
            && self.sending.mss_limit >= MIN_MSS
            && (MIN_MSS..=self.sending.peer_mss).contains(&self.sending.max_mss);
        ensure_valid(sizes, "a connection has an impossible window shift or segment size")?;
        let bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
        ensure_valid(
            bytes <= MAX_WINDOW_BYTES,
            "a connection has more data to send than a window can hold",
        )?;
        let end = base + bytes;
        let fin = self.has_flags(ConnFlags::FIN_SENT);
        let is_valid = match self.state {
            TcpState::Closed => bytes == 0,
            TcpState::SynSent | TcpState::SynReceived => {
                base == una + 1 && (nxt == una || nxt == base) && bytes == 0 && !fin
            }
            _ => {
                let una_is_valid =
                    una == base || una + 1 == base || fin && una == end + 1 && bytes == 0;
                let nxt_is_valid = if fin {
                    nxt == end + 1
                } else {
                    base.is_at_or_before(nxt) && nxt.is_at_or_before(end)
                };
                una_is_valid && nxt_is_valid
            }
        };
        ensure_valid(is_valid, "the send sequence numbers of a connection do not match its data")
    }

    fn check_receiving(&self) -> Result<(), RestoreError> {
        let ReceiveSnapshot { nxt, edge, read, ref data, .. } = self.receiving;
        let bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let fin = u32::from(self.has_flags(ConnFlags::FIN_RECEIVED));
        let is_valid = bytes <= MAX_WINDOW_BYTES
            && read + bytes + fin == nxt
            && nxt.is_at_or_before(edge)
            && edge.since(nxt) <= MAX_WINDOW_BYTES
            && self.receiving.peer_window_shift <= MAX_WINDOW_SHIFT
            && (self.is_synchronized() || self.state == TcpState::Closed || bytes + fin == 0);
        ensure_valid(is_valid, "the receive sequence numbers of a connection do not match its data")
    }
}

impl TcpTable {
    pub(crate) fn save(&self, now_ns: u64) -> TcpSnapshot {
        let confirmed = self.events.iter().filter_map(|event| match event {
            Event::PeerConfirmed(peer) => Some(*peer),
            _ => None,
        });
        let pool = &self.shared.pool;
        let save_slot = |(generation, connection): (u32, Option<&Connection>)| {
            (generation, connection.map(|connection| connection.save(now_ns, pool)))
        };
        TcpSnapshot {
            secret: self.secret,
            peer_time: self.clock.peer_time(now_ns),
            cookies_valid_for_ns: self.cookies_until_ns.saturating_sub(now_ns),
            reports_confirmed_peers: self.reports_confirmed_peers,
            confirmed_peers: confirmed.collect(),
            listeners: self.listeners.save(),
            connections: self.connections.slots().map(save_slot).collect(),
        }
    }

    /// Local addresses of listeners and of connections that may still send.
    pub(crate) fn local_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let listeners =
            (0..self.listeners.slot_count()).filter_map(|index| self.listeners.at(index));
        let connections = self.connections.iter().filter(|c| c.uses_local_address());
        listeners.map(|listener| listener.local.ip()).chain(connections.map(|c| c.tuple.local_ip()))
    }

    /// Restores a snapshot into an empty table.
    ///
    /// # Errors
    /// When the snapshot is damaged or exceeds the limits.
    pub(crate) fn restore(&mut self, now_ns: u64, saved: TcpSnapshot) -> Result<(), RestoreError> {
        self.secret = saved.secret;
        self.clock = PeerClock::starting_at(saved.peer_time, now_ns);
        self.cookies_until_ns = now_ns.saturating_add(saved.cookies_valid_for_ns);
        self.reports_confirmed_peers = saved.reports_confirmed_peers;
        self.events.extend(saved.confirmed_peers.into_iter().map(Event::PeerConfirmed));
        self.restore_listeners(saved.listeners)?;
        let mut restored = Vec::new();
        let mut out_of_order = Vec::new();
        let found = saved.connections.len();
        for (generation, saved) in saved.connections {
            let connection = match &saved {
                Some(saved) => Some(Connection::restore(now_ns, saved, &mut self.shared)?),
                None => None,
            };
            let Some(index) = self.connections.add_slot(generation, connection) else {
                let limit = self.connections.limit();
                return Err(RestoreError::TooMany { what: "connections", found, limit });
            };
            let Some(saved) = saved else { continue };
            if self.connections.at(index).is_some_and(Connection::holds_tuple) {
                let existing = self.by_tuple.find(&self.connections, &saved.tuple);
                ensure_valid(
                    existing.is_none(),
                    "two connections have the same addresses and ports",
                )?;
                self.by_tuple.insert(&mut self.connections, index);
            }
            restored.push(index);
            if !saved.receiving.out_of_order.is_empty() {
                out_of_order.push((index, saved.receiving.out_of_order));
            }
        }
        self.restore_queues()?;
        // Out-of-order data comes last: the peer can retransmit it if memory runs out.
        for (index, stretches) in out_of_order {
            let Some(connection) = self.connections.at_mut(index) else { continue };
            for (start, data) in stretches {
                connection.restore_out_of_order(start, &data, &mut self.shared);
            }
        }
        self.resume_all(now_ns, restored);
        Ok(())
    }

    /// Resumes connections that come from a snapshot or from another table.
    pub(super) fn resume_all(&mut self, now_ns: u64, mut indices: Vec<u32>) {
        // The TIME-WAIT queue is ordered by age.
        indices.sort_by_key(|&index| match self.connections.at(index) {
            Some(connection) if connection.state == TcpState::TimeWait => {
                connection.idle_deadline_ns
            }
            _ => NEVER,
        });
        indices.into_iter().for_each(|index| self.resume(now_ns, index));
    }

    fn resume(&mut self, now_ns: u64, index: u32) {
        let Some((connection, id)) = self.connections.at_mut_with_id(index) else { return };
        if connection.flags.take(ConnFlags::WAITS_FOR_MEMORY) {
            self.wait_for_memory(id);
        }
        self.update(now_ns, index);
    }

    fn restore_listeners(&mut self, saved: Vec<ListenerSlotSnapshot>) -> Result<(), RestoreError> {
        let (found, limit) = (saved.len(), self.listeners.limit());
        if found > limit {
            return Err(RestoreError::TooMany { what: "listeners", found, limit });
        }
        saved.into_iter().try_for_each(|slot| self.listeners.add_slot(slot, &mut self.shared))
    }

    /// Restores the accept queues, and the SYN queue counters of listeners.
    fn restore_queues(&mut self) -> Result<(), RestoreError> {
        for index in 0..self.listeners.slot_count() {
            let id = self.listeners.id(index);
            let Some(listener) = self.listeners.get_mut(id) else { continue };
            for queued in listener.queued() {
                let is_acceptable = self.connections.at_mut(queued).is_some_and(|connection| {
                    connection.listener == Some(id)
                        && connection.flags.contains(ConnFlags::ORPHAN)
                        && !matches!(connection.state, TcpState::SynSent | TcpState::SynReceived)
                        && connection.flags.set_new(ConnFlags::IN_ACCEPT_QUEUE)
                });
                ensure_valid(
                    is_acceptable,
                    "an accept queue holds a connection that cannot be accepted",
                )?;
            }
            if listener.accept_queue_len() > 0 {
                listener.notified = true;
                self.events.push_back(Event::TcpAcceptable(id));
            }
        }
        for connection in self.connections.iter_mut() {
            let listener = connection.listener.and_then(|id| self.listeners.get_mut(id));
            match listener {
                Some(listener) if connection.flags.contains(ConnFlags::IN_SYN_QUEUE) => {
                    listener.half_open += 1;
                }
                Some(_) => {}
                None => connection.flags.remove(ConnFlags::IN_SYN_QUEUE),
            }
        }
        Ok(())
    }
}
