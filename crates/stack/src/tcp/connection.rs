//! State of one connection (RFC 9293 section 3.3).

use std::sync::Arc;

use bitflags::bitflags;
use serde::{Deserialize, Serialize};

use super::buffer_pool::{BufferPool, ByteQueue};
use super::congestion::CongestionController;
use super::mtu_search::MtuSearch;
use super::options::TIMESTAMPS_BYTES;
use super::receive::OutOfOrderQueue;
use super::recovery::{Flight, RecoveryPhase};
use super::rtt::RttEstimator;
use super::segment::FourTuple;
use super::seq::Seq;
use super::socket::{Failure, TcpListenerId, TcpOptions, TcpState};
use super::timer_wheel::tick_of;

/// No deadline.
pub(crate) const NEVER: u64 = u64::MAX;

/// Null table index.
pub(crate) const NO_INDEX: u32 = u32::MAX;

/// Default MSS for IPv4 and for IPv6: every host accepts it (RFC 9293 section 3.7.1).
pub(crate) const DEFAULT_MSS: [u16; 2] = [536, 1220];

/// Lower bound of the peer's MSS: smaller segments would be mostly headers.
pub(crate) const MIN_MSS: u16 = 64;

/// Links of a connection in the hash table and in the timer wheel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableLinks {
    pub(crate) hash: u32,
    /// Next connection in the same hash bucket.
    pub(crate) hash_next: u32,
    pub(crate) timer_previous: u32,
    pub(crate) timer_next: u32,
    /// Slot of the timer wheel; [`NO_INDEX`] when no timer is set.
    pub(crate) timer_slot: u32,
    /// Tick for which the timer is set.
    pub(crate) timer_tick: u64,
}

impl TableLinks {
    /// True when the timer wheel would fire later than `at_ns`, or not at all.
    #[inline]
    pub(crate) fn fires_later_than(&self, at_ns: u64) -> bool {
        self.timer_slot == NO_INDEX || tick_of(at_ns) < self.timer_tick
    }
}

/// Purpose of the retransmission timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RtxTimer {
    /// The timer is not needed.
    Off,
    /// Retransmission time-out (RFC 6298).
    Retransmission,
    /// Tail loss probe (RFC 8985 section 7).
    TailProbe,
    /// Reordering window of RACK: segments may only be late (RFC 8985 section 6.2).
    Reordering,
    /// Zero-window probe (RFC 9293 section 3.8.6.1).
    Persist,
}

/// Resources and settings that all connections of a table share.
pub(crate) struct TcpShared {
    pub(crate) pool: BufferPool,
    /// Options interned last: most connections have equal ones.
    last_options: Arc<TcpOptions>,
    /// Unused scoreboards and out-of-order queues, kept for reuse.
    #[expect(clippy::vec_box, reason = "connections hold the boxes and return them here")]
    spare_flights: Vec<Box<Flight>>,
    #[expect(clippy::vec_box, reason = "connections hold the boxes and return them here")]
    spare_out_of_order: Vec<Box<OutOfOrderQueue>>,
    /// Largest payload that the link carries, without options, on IPv4.
    pub(crate) link_mss: u16,
    /// Duration of TIME-WAIT, and of FIN-WAIT-2 after the application has closed.
    pub(crate) time_wait_ns: u64,
    pub(crate) fin_wait_2_ns: u64,
}

/// Most scoreboards, and most out-of-order queues, that are kept for reuse.
const MAX_SPARES: usize = 256;

impl TcpShared {
    pub(crate) fn new(limit_bytes: usize, time_wait_ns: u64, link_mss: u16) -> Self {
        Self {
            link_mss,
            pool: BufferPool::new(limit_bytes),
            last_options: Arc::default(),
            spare_flights: Vec::new(),
            spare_out_of_order: Vec::new(),
            time_wait_ns,
            fin_wait_2_ns: time_wait_ns,
        }
    }

    /// Limits `options` to valid values and interns them: connections with equal options share one
    /// allocation.
    pub(crate) fn intern_options(&mut self, options: TcpOptions) -> Arc<TcpOptions> {
        let options = options.within_limits();
        if *self.last_options != options {
            self.last_options = Arc::new(options);
        }
        Arc::clone(&self.last_options)
    }

    pub(crate) fn acquire_flight(&mut self) -> Box<Flight> {
        self.spare_flights.pop().unwrap_or_default()
    }

    pub(crate) fn recycle_flight(&mut self, mut flight: Box<Flight>) {
        if self.spare_flights.len() < MAX_SPARES && flight.recycle() {
            self.spare_flights.push(flight);
        }
    }

    pub(crate) fn acquire_out_of_order(&mut self) -> Box<OutOfOrderQueue> {
        self.spare_out_of_order.pop().unwrap_or_default()
    }

    pub(crate) fn recycle_out_of_order(&mut self, mut queue: Box<OutOfOrderQueue>) {
        if self.spare_out_of_order.len() < MAX_SPARES {
            queue.clear();
            self.spare_out_of_order.push(queue);
        }
    }
}

/// One connection. Fields are grouped by the module that uses them.
pub(crate) struct Connection {
    pub(crate) tuple: FourTuple,
    pub(crate) links: TableLinks,
    /// Listener that created the connection, until it is accepted.
    pub(crate) listener: Option<TcpListenerId>,
    pub(crate) state: TcpState,
    pub(crate) options: Arc<TcpOptions>,
    /// Reason of the end, until it was reported to the application.
    pub(crate) failure: Option<Failure>,
    /// Last ICMP error of the path; reported when the connection gives up (soft error of RFC 1122
    /// section 4.2.3.9).
    pub(crate) soft_failure: Option<Failure>,

    // Sending.
    /// Oldest unacknowledged sequence number (SND.UNA).
    pub(crate) una: Seq,
    /// Next sequence number to send (SND.NXT).
    pub(crate) nxt: Seq,
    /// Sequence number of the first byte of `outgoing`.
    pub(crate) send_base: Seq,
    pub(crate) outgoing: ByteQueue,
    pub(crate) outgoing_bytes: u32,
    /// Peer's window in bytes (SND.WND), its maximum so far, and the segment of its last update
    /// (SND.WL1, SND.WL2).
    pub(crate) window: u32,
    pub(crate) max_window: u32,
    pub(crate) window_seq: Seq,
    pub(crate) window_ack: Seq,
    /// Peer's MSS: its largest payload, without options.
    pub(crate) peer_mss: u16,
    /// Largest payload to send now, with the bytes of options taken off.
    pub(crate) mss: u16,
    /// Limit that path MTU discovery found when nothing larger came through.
    pub(crate) mss_limit: u16,
    /// Largest payload that peer and link accept, with the bytes of options.
    pub(crate) max_mss: u16,
    /// End of the last segment below the MSS (Minshall's variant of Nagle).
    pub(crate) small_segment_end: Seq,
    pub(crate) last_sent_ns: u64,

    // Receiving.
    /// Next expected sequence number (RCV.NXT).
    pub(crate) rcv_nxt: Seq,
    /// Right edge of the window: the peer may send up to the number before.
    pub(crate) rcv_edge: Seq,
    /// Sequence number of the first byte of `incoming`.
    pub(crate) read_seq: Seq,
    pub(crate) incoming: ByteQueue,
    pub(crate) out_of_order: Option<Box<OutOfOrderQueue>>,
    /// Duplicate data to report by D-SACK (RFC 2883); empty when there is none.
    pub(crate) dsack_range: (Seq, Seq),
    /// Bytes received since the last acknowledgement was sent.
    pub(crate) received_since_ack: u32,
    /// Bytes read by the application since the last acknowledgement was sent.
    pub(crate) read_since_ack: u32,
    /// Largest payload received in one segment.
    pub(crate) rcv_mss: u16,
    /// Duplicate acknowledgements owed to a peer without SACK.
    pub(crate) acks_owed: u8,
    pub(crate) last_ack_sent: Seq,
    /// Time of the last acceptable segment.
    pub(crate) last_received_ns: u64,

    // Options (RFC 7323).
    /// Window scale of the peer (for SND.WND) and our own.
    pub(crate) peer_window_shift: u8,
    pub(crate) own_window_shift: u8,
    /// TS.Recent, the second it was updated, and the offset of our time stamp clock.
    pub(crate) ts_recent: u32,
    pub(crate) ts_recent_s: u32,
    pub(crate) ts_offset: u32,

    // Recovery.
    pub(crate) flight: Option<Box<Flight>>,
    /// Search for a larger path MTU (PLPMTUD, RFC 4821).
    pub(crate) mtu_search: Option<Box<MtuSearch>>,
    pub(crate) rtt: RttEstimator,
    pub(crate) controller: CongestionController,
    pub(crate) phase: RecoveryPhase,
    /// Sequence number whose acknowledgement ends recovery.
    pub(crate) recovery_end: Seq,
    /// End of the last tail loss probe.
    pub(crate) probe_end: Seq,
    /// No further reduction for congestion marks until this number is acknowledged.
    pub(crate) cwr_end: Seq,
    pub(crate) duplicate_acks: u8,
    /// Multiplier of the reordering window; grows with each D-SACK (RFC 8985 section 6.2).
    pub(crate) reordering_steps: u8,
    /// Consecutive retransmissions without progress.
    pub(crate) retries: u8,
    /// Time since which nothing was acknowledged.
    pub(crate) stalled_since_ns: u64,

    // Timers.
    pub(crate) rtx_timer: RtxTimer,
    /// Deadlines: retransmission timer and delayed acknowledgement.
    pub(crate) rtx_deadline_ns: u64,
    pub(crate) ack_deadline_ns: u64,
    /// Deadline of keep-alive, FIN-WAIT-2 or TIME-WAIT.
    pub(crate) idle_deadline_ns: u64,
    /// Start of the retransmission time-out.
    pub(crate) rto_base_ns: u64,
    /// Due time of the next challenge ACK: rate limit of RFC 5961 section 7.
    pub(crate) challenge_due_ms: u32,
    /// Keep-alive probes sent since the last segment of the peer.
    pub(crate) keepalive_probes_sent: u8,

    pub(crate) flags: ConnFlags,
}

bitflags! {
    /// Connection flags.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct ConnFlags: u64 {
        /// Passive open: the connection came through a listener.
        const PASSIVE = 1 << 0;
        /// No handle: the application has closed it, or has not accepted the connection yet.
        const ORPHAN = 1 << 1;
        const IN_ACCEPT_QUEUE = 1 << 2;
        /// In the hash table of four-tuples.
        const INDEXED = 1 << 3;
        /// Counted as a connection in TIME-WAIT.
        const IN_TIME_WAIT = 1 << 4;
        /// Counted in the SYN queue of the listener.
        const IN_SYN_QUEUE = 1 << 5;
        /// In the queue of connections with something to send.
        const PENDING = 1 << 6;
        const WANTS_OUTPUT = 1 << 7;
        const TIMESTAMPS = 1 << 8;
        const SACK = 1 << 9;
        const ECN = 1 << 10;
        /// Send ECE until the peer answers with CWR (RFC 3168).
        const SEND_ECE = 1 << 11;
        /// Send CWR: the congestion window was reduced.
        const SEND_CWR = 1 << 12;
        /// The application has shut down sending: a FIN follows the data.
        const FIN_QUEUED = 1 << 13;
        const FIN_SENT = 1 << 14;
        const FIN_RECEIVED = 1 << 15;
        const READ_SHUT = 1 << 16;
        const ACK_NOW = 1 << 17;
        const RESET_NOW = 1 << 18;
        const KEEPALIVE_NOW = 1 << 19;
        /// Retransmit one segment regardless of the congestion window.
        const FORCE_RETRANSMISSION = 1 << 20;
        /// Send one segment regardless of the peer's window (zero-window probe).
        const FORCE_WINDOW_PROBE = 1 << 21;
        const TAIL_PROBE_NOW = 1 << 22;
        /// A tail loss probe is in flight.
        const TAIL_PROBE_SENT = 1 << 23;
        /// The tail loss probe retransmits data sent before.
        const TAIL_PROBE_RETRANSMITS = 1 << 24;
        const REORDERING_SEEN = 1 << 25;
        /// Our SYN was sent more than once.
        const SYN_RETRANSMITTED = 1 << 26;
        /// The congestion window limited transmission.
        const WINDOW_LIMITED = 1 << 27;
        /// A write was cut short for lack of space.
        const WRITE_BLOCKED = 1 << 28;
        /// In the queue of writers that wait for memory.
        const WAITS_FOR_MEMORY = 1 << 29;
        /// Notify the application of readiness with the next update.
        const NOTIFY_READABLE = 1 << 30;
        const NOTIFY_WRITABLE = 1 << 31;
        /// The application was notified and has not taken the event yet.
        const READABLE_NOTIFIED = 1 << 32;
        const WRITABLE_NOTIFIED = 1 << 33;
    }
}

impl ConnFlags {
    /// Clears `flags`; returns true when they were set.
    pub(crate) fn take(&mut self, flags: Self) -> bool {
        let was = self.contains(flags);
        self.remove(flags);
        was
    }

    /// Sets `flags`; returns true when they were not set.
    pub(crate) fn set_new(&mut self, flags: Self) -> bool {
        let was = self.contains(flags);
        self.insert(flags);
        !was
    }
}

impl Connection {
    /// Connection in CLOSED that has sent and received nothing.
    pub(crate) fn new(
        now_ns: u64,
        tuple: FourTuple,
        options: Arc<TcpOptions>,
        iss: Seq,
        ts_offset: u32,
    ) -> Self {
        let default_mss = DEFAULT_MSS[usize::from(!tuple.is_v4())];
        Self {
            tuple,
            links: TableLinks {
                hash: 0,
                hash_next: NO_INDEX,
                timer_previous: NO_INDEX,
                timer_next: NO_INDEX,
                timer_slot: NO_INDEX,
                timer_tick: 0,
            },
            listener: None,
            state: TcpState::Closed,
            own_window_shift: options.window_shift(),
            controller: CongestionController::new(options.congestion_control, default_mss.into()),
            options,
            failure: None,
            soft_failure: None,
            una: iss,
            nxt: iss,
            send_base: iss + 1,
            outgoing: ByteQueue::EMPTY,
            outgoing_bytes: 0,
            window: 0,
            max_window: 0,
            window_seq: Seq(0),
            window_ack: Seq(0),
            peer_mss: default_mss,
            mss: default_mss,
            mss_limit: u16::MAX,
            max_mss: default_mss,
            small_segment_end: iss,
            last_sent_ns: now_ns,
            rcv_nxt: Seq(0),
            rcv_edge: Seq(0),
            read_seq: Seq(0),
            incoming: ByteQueue::EMPTY,
            out_of_order: None,
            dsack_range: (Seq(0), Seq(0)),
            received_since_ack: 0,
            read_since_ack: 0,
            rcv_mss: DEFAULT_MSS[0],
            acks_owed: 0,
            last_ack_sent: Seq(0),
            last_received_ns: now_ns,
            peer_window_shift: 0,
            ts_recent: 0,
            ts_recent_s: 0,
            ts_offset,
            flight: None,
            mtu_search: None,
            rtt: RttEstimator::default(),
            phase: RecoveryPhase::Open,
            recovery_end: iss,
            probe_end: iss,
            cwr_end: iss,
            duplicate_acks: 0,
            reordering_steps: 1,
            retries: 0,
            stalled_since_ns: now_ns,
            rtx_timer: RtxTimer::Off,
            rtx_deadline_ns: NEVER,
            ack_deadline_ns: NEVER,
            idle_deadline_ns: NEVER,
            rto_base_ns: now_ns,
            challenge_due_ms: 0,
            keepalive_probes_sent: 0,
            flags: ConnFlags::empty(),
        }
    }

    /// Sets the peer's MSS from the option it announced, or to the default.
    pub(crate) fn set_peer_mss(&mut self, announced: Option<u16>) {
        let default = DEFAULT_MSS[usize::from(!self.tuple.is_v4())];
        self.peer_mss = announced.unwrap_or(default).max(MIN_MSS);
    }

    /// Sets the MSS for a path MTU of `mtu` bytes.
    pub(crate) fn set_mtu(&mut self, mtu: usize) {
        let headers = if self.tuple.is_v4() { 40 } else { 60 };
        let fits = u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX);
        self.set_max_mss(fits.min(self.peer_mss).max(MIN_MSS));
    }

    /// Sets the largest payload that peer and link accept, in bytes with options.
    pub(crate) fn set_max_mss(&mut self, bytes: u16) {
        let options =
            if self.flags.contains(ConnFlags::TIMESTAMPS) { TIMESTAMPS_BYTES as u16 } else { 0 };
        self.max_mss = bytes;
        self.mss = self.max_mss.min(self.mss_limit) - options;
    }

    /// True while the connection holds its four-tuple, by which segments find it.
    pub(crate) fn holds_tuple(&self) -> bool {
        self.state != TcpState::Closed || self.flags.contains(ConnFlags::RESET_NOW)
    }

    /// True while the connection may send segments of its own from its local address; answers are
    /// not counted.
    pub(crate) fn uses_local_address(&self) -> bool {
        !matches!(self.state, TcpState::Closed | TcpState::TimeWait)
    }

    /// Bytes that the application can read.
    #[inline]
    pub(crate) fn readable(&self) -> u32 {
        (self.rcv_nxt - u32::from(self.flags.contains(ConnFlags::FIN_RECEIVED)))
            .since(self.read_seq)
    }

    /// Bytes that the application has written and that were never sent.
    #[inline]
    pub(crate) fn unsent(&self) -> u32 {
        self.outgoing_bytes.saturating_sub(self.nxt.since(self.send_base))
    }

    /// Free bytes of the send buffer.
    #[inline]
    pub(crate) fn writable(&self) -> u32 {
        self.options.send_buffer_bytes.saturating_sub(self.outgoing_bytes)
    }

    /// True when more than a third of the send buffer is free: the threshold of writability.
    pub(crate) fn has_send_space(&self) -> bool {
        self.writable() > self.options.send_buffer_bytes / 3
    }

    /// Bytes that can be appended now: free in the send buffer and backed by memory.
    pub(crate) fn appendable_bytes(&self, pool: &BufferPool) -> usize {
        let end = self.outgoing_bytes as usize;
        let allowed = pool.allowance_bytes().saturating_sub(end);
        (self.writable() as usize).min(allowed).min(self.outgoing.appendable_bytes(pool, end))
    }

    /// True when everything sent is acknowledged, including our FIN.
    pub(crate) fn fin_acknowledged(&self) -> bool {
        self.flags.contains(ConnFlags::FIN_SENT) && self.una == self.nxt
    }

    /// True in the synchronized states of RFC 9293 section 3.3.2 (from ESTABLISHED on).
    pub(crate) fn is_synchronized(&self) -> bool {
        !matches!(self.state, TcpState::Closed | TcpState::SynSent | TcpState::SynReceived)
    }

    /// True when the application may still send.
    pub(crate) fn can_send(&self) -> bool {
        matches!(self.state, TcpState::Established | TcpState::CloseWait)
            && !self.flags.contains(ConnFlags::FIN_QUEUED)
    }

    /// True in states in which data or a FIN may still have to be delivered to the peer.
    pub(crate) fn can_transmit(&self) -> bool {
        matches!(
            self.state,
            TcpState::Established
                | TcpState::CloseWait
                | TcpState::FinWait1
                | TcpState::Closing
                | TcpState::LastAck
        )
    }

    /// Earliest deadline of the connection's timers.
    pub(crate) fn deadline_ns(&self) -> u64 {
        self.rtx_deadline_ns.min(self.ack_deadline_ns).min(self.idle_deadline_ns)
    }

    /// Ends the connection at once. Sends a RST if `reset`.
    pub(crate) fn abort(&mut self, shared: &mut TcpShared, failure: Option<Failure>, reset: bool) {
        if self.state == TcpState::Closed {
            return;
        }
        // No RST in SYN-SENT: the peer does not know the connection.
        self.flags.set(ConnFlags::RESET_NOW, reset && self.state != TcpState::SynSent);
        if self.flags.contains(ConnFlags::RESET_NOW) {
            self.flags.insert(ConnFlags::WANTS_OUTPUT);
        }
        self.state = TcpState::Closed;
        if self.failure.is_none() {
            self.failure = failure;
        }
        self.release_sending(shared);
        self.release_out_of_order(shared);
        self.rtx_timer = RtxTimer::Off;
        (self.rtx_deadline_ns, self.ack_deadline_ns, self.idle_deadline_ns) = (NEVER, NEVER, NEVER);
        self.flags.insert(ConnFlags::NOTIFY_READABLE);
        self.flags.insert(ConnFlags::NOTIFY_WRITABLE);
    }

    /// Frees the send buffer and the scoreboard.
    pub(crate) fn release_sending(&mut self, shared: &mut TcpShared) {
        self.outgoing.clear(&mut shared.pool);
        self.outgoing_bytes = 0;
        if let Some(flight) = self.flight.take() {
            shared.recycle_flight(flight);
        }
    }

    /// Returns the out-of-order queue for reuse.
    pub(crate) fn release_out_of_order(&mut self, shared: &mut TcpShared) {
        if let Some(queue) = self.out_of_order.take() {
            shared.recycle_out_of_order(queue);
        }
    }

    /// Shuts down sending: a FIN follows the written data (RFC 9293 section 3.10.4).
    pub(crate) fn queue_fin(&mut self) {
        if self.flags.contains(ConnFlags::FIN_QUEUED) || self.state == TcpState::Closed {
            return;
        }
        self.flags.insert(ConnFlags::FIN_QUEUED);
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
        self.flags.insert(ConnFlags::NOTIFY_WRITABLE);
        match self.state {
            TcpState::Established => self.state = TcpState::FinWait1,
            TcpState::CloseWait => self.state = TcpState::LastAck,
            _ => {}
        }
    }

    /// Frees all memory, before the connection is removed.
    pub(crate) fn release(&mut self, shared: &mut TcpShared) {
        self.release_sending(shared);
        self.release_out_of_order(shared);
        self.incoming.clear(&mut shared.pool);
    }

    /// Current value of the time stamp clock: milliseconds from a secret offset (RFC 7323
    /// section 5.4).
    pub(crate) fn ts_now(&self, now_ns: u64) -> u32 {
        ((now_ns / 1_000_000) as u32).wrapping_add(self.ts_offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slot and the share of the hash table come on top.
    #[test]
    fn an_idle_connection_is_small() {
        let bytes = size_of::<Connection>();
        assert!(bytes <= 392, "{bytes} bytes");
    }
}
