//! Snapshot of one connection.
//!
//! Everything that a peer could notice continues: sequence numbers, windows, time stamps,
//! segments in flight. A snapshot is fully validated here, so that the rest of TCP can rely on
//! its own invariants.

use super::Connection;
use crate::RestoreError;
use crate::tcp::buffers::{BUFFER_BYTES, BufferPool, ByteQueue, TcpShared};
use crate::tcp::flags::{ConnFlags, PERSISTENT_FLAGS};
use crate::tcp::options::MAX_WINDOW_SHIFT;
use crate::tcp::receive::{ReceiveSnapshot, ReceiveState};
use crate::tcp::recovery::{FlightSnapshot, Recovery, RecoverySnapshot};
use crate::tcp::segment::FourTuple;
use crate::tcp::send::{MAX_WINDOW_BYTES, SendSnapshot, SendState};
use crate::tcp::socket::{Failure, TcpListenerId, TcpOptions, TcpState, TcpTraffic};
use crate::tcp::timers::{NEVER, TableLinks, TimeAges, TimerSnapshot, Timers, age_ns};

/// Snapshot of one connection. Times are relative to the moment of saving: `_age_` fields lie
/// in the past, `_in_` fields in the future.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct ConnectionSnapshot<'a> {
    pub(crate) tuple: FourTuple,
    state: TcpState,
    flags: u64,
    listener: Option<TcpListenerId>,
    options: TcpOptions,
    failure: Option<Failure>,
    soft_failure: Option<Failure>,
    #[cfg_attr(feature = "serde", serde(borrow))]
    sending: SendSnapshot<'a>,
    #[cfg_attr(feature = "serde", serde(borrow))]
    pub(crate) receiving: ReceiveSnapshot<'a>,
    recovery: RecoverySnapshot,
    timers: TimerSnapshot,
    traffic: TcpTraffic,
}

/// Creates a queue that holds `data`.
fn queue_from(pool: &mut BufferPool, data: &[u8]) -> Result<ByteQueue, RestoreError> {
    ByteQueue::holding(pool, data).ok_or_else(|| RestoreError::TooMany {
        what: "bytes of TCP data",
        found: data.len(),
        limit: pool.available() * BUFFER_BYTES,
    })
}

/// Fails unless `is_valid`; `what` is wrong then.
pub(crate) fn ensure_valid(is_valid: bool, what: &'static str) -> Result<(), RestoreError> {
    if is_valid { Ok(()) } else { Err(RestoreError::Damaged(what)) }
}

impl Connection {
    /// Takes a snapshot.
    pub(crate) fn save(&self, now_ns: u64, pool: &BufferPool) -> ConnectionSnapshot<'static> {
        let (send, receive, timers) = (&self.send, &self.receive, &self.timers);
        let sent_age_ns = age_ns(now_ns, timers.last_sent_ns);
        let received_age_ns = age_ns(now_ns, timers.last_received_ns);
        ConnectionSnapshot {
            tuple: self.tuple,
            state: self.state,
            flags: (self.flags & PERSISTENT_FLAGS).bits(),
            listener: self.listener,
            options: *self.options,
            failure: self.failure,
            soft_failure: self.soft_failure,
            sending: send.save(now_ns, sent_age_ns, receive.window_shift, pool),
            receiving: receive.save(now_ns, received_age_ns, self.readable(), pool),
            recovery: self.recovery.save(now_ns, send, timers),
            timers: timers.save(now_ns),
            traffic: self.traffic,
        }
    }

    /// Restores a connection, except for its out-of-order data.
    ///
    /// # Errors
    /// When the snapshot is inconsistent, or its data exceeds the memory.
    pub(crate) fn restore(
        now_ns: u64,
        saved: &ConnectionSnapshot<'_>,
        shared: &mut TcpShared,
    ) -> Result<Self, RestoreError> {
        saved.check()?;
        let ConnectionSnapshot { sending, receiving, recovery, timers, .. } = saved;
        let options = shared.intern_options(saved.options);
        let flags = ConnFlags::from_bits_truncate(saved.flags) & PERSISTENT_FLAGS;
        let outgoing = queue_from(&mut shared.pool, &sending.data)?;
        let incoming = queue_from(&mut shared.pool, &receiving.data)?;
        let timestamps = flags.contains(ConnFlags::TIMESTAMPS);
        let send = SendState::restore(now_ns, sending, outgoing, recovery.probe_end, timestamps);
        let ages = TimeAges {
            rto_base_ns: recovery.rto_base_age_ns,
            sent_ns: sending.sent_age_ns,
            received_ns: receiving.last_received_age_ns,
            stalled_ns: recovery.stalled_age_ns,
        };
        let mut connection = Self {
            tuple: saved.tuple,
            links: TableLinks::default(),
            listener: saved.listener,
            state: saved.state,
            send_growth: 0,
            recovery: Recovery::restore(now_ns, recovery, options.congestion_control, &send),
            options,
            failure: saved.failure,
            soft_failure: saved.soft_failure,
            send,
            receive: ReceiveState::restore(now_ns, receiving, incoming, sending.own_window_shift),
            timers: Timers::restore(now_ns, timers, &ages),
            flags,
            traffic: saved.traffic,
        };
        connection.restore_flight(now_ns, recovery.flight.as_ref(), shared)?;
        if connection.state == TcpState::TimeWait {
            let latest_ns = now_ns.saturating_add(shared.time_wait_ns);
            let timers = &mut connection.timers;
            timers.idle_deadline_ns = timers.idle_deadline_ns.min(latest_ns);
        }
        connection.refresh_pending_flags();
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
        let is_cookie =
            self.flags.contains(ConnFlags::PASSIVE) && self.send.una + 1 == self.send.base;
        let Some(saved) = saved else {
            let is_idle = self.send.una == self.send.nxt
                || self.state == TcpState::Closed
                || is_cookie && self.send.nxt == self.send.base;
            return ensure_valid(is_idle, FLIGHT_MISMATCH);
        };
        let mut flight = shared.acquire_flight();
        ensure_valid(flight.restore(now_ns, saved), FLIGHT_MISMATCH)?;
        let (Some(first), Some(last)) = (flight.first(), flight.last()) else {
            return Err(RestoreError::Damaged(FLIGHT_MISMATCH));
        };
        let begins = first.start == self.send.una
            || is_cookie && first.start == self.send.base && !first.syn;
        let matches_state = match self.is_synchronized() {
            true => {
                !first.syn
                    && self.send.base.is_at_or_before(first.start)
                    && last.fin == self.flags.contains(ConnFlags::FIN_SENT)
            }
            false => first.syn && flight.len() == 1,
        };
        let is_open = self.state != TcpState::Closed;
        ensure_valid(
            is_open && begins && matches_state && last.end == self.send.nxt,
            FLIGHT_MISMATCH,
        )?;
        self.recovery.flight = Some(flight);
        Ok(())
    }

    /// Sets the flags for pending output and readiness events from the state of the connection.
    /// A superfluous flag is harmless; a missing flag would stall the connection.
    pub(crate) fn refresh_pending_flags(&mut self) {
        let is_finished = match self.state {
            TcpState::Closed => !self.flags.contains(ConnFlags::RESET_NOW),
            TcpState::TimeWait => !self.flags.contains(ConnFlags::ACK_NOW),
            _ => false,
        };
        // Pending work without a running timer would be forgotten.
        let needs_timer = self.recovery.flight.is_some() || self.may_have_output();
        if is_finished {
            self.flags.remove(ConnFlags::WANTS_OUTPUT);
        } else if needs_timer && self.timers.rtx_deadline_ns == NEVER
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

impl ConnectionSnapshot<'_> {
    fn has_flags(&self, flags: ConnFlags) -> bool {
        ConnFlags::from_bits_truncate(self.flags).contains(flags)
    }

    fn is_synchronized(&self) -> bool {
        !matches!(self.state, TcpState::Closed | TcpState::SynSent | TcpState::SynReceived)
    }

    /// Checks what no other part of TCP checks again.
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
        ensure_valid(
            self.sending.has_valid_sizes(),
            "a connection has an impossible window shift or segment size",
        )?;
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
