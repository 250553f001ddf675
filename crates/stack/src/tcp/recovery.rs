//! Loss detection and recovery from acknowledgements and time-outs: RFC 6298, RFC 5681,
//! RFC 6582, RFC 6675, RFC 6937, RFC 8985, RFC 3168.

pub(crate) use super::flight::{AckProgress, Flight, PrrState, SentSegment};

use serde::{Deserialize, Serialize};

use super::congestion::AckInfo;
use super::connection::{ConnFlags, Connection, NEVER, RtxTimer, TcpShared};
use super::segment::Segment;
use super::seq::Seq;
use super::socket::{Failure, TcpState};
use tidegate_wire::tcp::TcpFlags;

/// Duplicate acknowledgements that signal a loss (RFC 5681 section 3.2).
const DUP_ACK_THRESHOLD: u8 = 3;

/// Longest time that a peer may delay the acknowledgement of a single segment (RFC 8985
/// section 7.2, WCDelAckT).
const WORST_CASE_DELAYED_ACK_NS: u64 = 200_000_000;
/// Time-out of a tail probe before the first RTT sample (RFC 8985 section 7.2).
const INITIAL_TAIL_PROBE_NS: u64 = 1_000_000_000;
/// Maximum retransmissions of data (R2 of RFC 9293 section 3.8.3; about 15 minutes).
const MAX_DATA_RETRIES: u8 = 15;
/// Maximum retransmissions of a SYN: at least three minutes (RFC 9293 section 3.8.3).
const MAX_SYN_RETRIES: u8 = 7;
const MAX_SYN_ACK_RETRIES: u8 = 5;
/// Maximum time without progress for a connection that the application has closed.
const MAX_ORPHAN_STALL_NS: u64 = 120_000_000_000;
/// Consecutive time-outs after which the path is suspected to swallow large packets
/// (RFC 4821 section 7.7).
const BLACK_HOLE_RETRIES: u8 = 5;

/// Loss recovery state of the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RecoveryPhase {
    /// No segment is known to be lost.
    Open,
    /// Fast recovery with proportional rate reduction (RFC 6937).
    FastRecovery,
    /// Recovery after a retransmission time-out.
    Loss,
}

impl Connection {
    /// Estimate of the bytes in flight (RFC 6675, pipe).
    pub(crate) fn pipe(&self) -> u32 {
        let outstanding = self.nxt.since(self.una);
        let pipe = self.flight.as_ref().map_or(0, |flight| flight.pipe(outstanding));
        // Without SACK, each duplicate acknowledgement means that one segment has arrived
        // (RFC 6582 section 3.2 step 3).
        let arrived =
            if self.flags.contains(ConnFlags::SACK) { 0 } else { u32::from(self.duplicate_acks) };
        pipe.saturating_sub(arrived * u32::from(self.mss))
    }

    /// Processes the acknowledgement of a segment. The caller has checked that its number is
    /// between SND.UNA and SND.NXT.
    pub(crate) fn on_ack(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        duplicate: bool,
        shared: &mut TcpShared,
    ) {
        let outstanding = self.nxt.since(self.una);
        let mut progress = AckProgress::default();
        if self.flight.is_none() && segment.options.sack.is_none() {
            // Nothing is in flight, so the acknowledgement carries no information.
            self.duplicate_acks = 0;
            return self.after_ack(now_ns);
        }
        if let Some(flight) = &mut self.flight {
            flight.acknowledge(now_ns, segment.ack, &mut progress);
        }
        self.una = self.una.max(segment.ack);
        self.process_sack(now_ns, segment, &mut progress);
        if let Some(rtt_ns) = progress.rtt_ns {
            self.rtt.sample(now_ns, rtt_ns);
        } else if progress.acked > 0 {
            self.rtt.backoff = 0;
        }
        if progress.reordered {
            self.flags.insert(ConnFlags::REORDERING_SEEN);
        }
        if progress.acked > 0 {
            self.on_progress(now_ns, shared);
        }
        self.finish_tail_probe(segment.ack, outstanding, duplicate, &progress);
        if self.flags.contains(ConnFlags::SACK) {
            self.detect_lost(now_ns);
        } else {
            self.count_duplicate_acks(segment.ack, duplicate, &progress);
        }
        self.update_congestion_state(now_ns, segment, outstanding, &progress);
        self.finish_mtu_probe(now_ns);
        if self.flight.as_ref().is_some_and(|flight| flight.is_empty())
            && let Some(flight) = self.flight.take()
        {
            shared.recycle_flight(flight);
        }
        self.after_ack(now_ns);
    }

    /// Schedules output if there may be any; otherwise sets the timers.
    fn after_ack(&mut self, now_ns: u64) {
        if self.may_have_output() {
            self.flags.insert(ConnFlags::WANTS_OUTPUT);
        } else if !self.flags.contains(ConnFlags::WANTS_OUTPUT) {
            // With output scheduled, sending sets the timer.
            self.arm_timer(now_ns);
        }
    }

    /// Reacts to newly acknowledged data: removes it from the send queue and restarts the timers
    /// (RFC 6298 section 5.3).
    fn on_progress(&mut self, now_ns: u64, shared: &mut TcpShared) {
        let bytes = self.una.since(self.send_base).min(self.outgoing_bytes);
        if bytes > 0 {
            let had_space = self.has_send_space();
            self.outgoing_bytes -= bytes;
            self.send_base += bytes;
            if self.outgoing_bytes == 0 {
                self.outgoing.clear(&mut shared.pool);
            } else {
                self.outgoing.consume(&mut shared.pool, bytes as usize);
            }
            // Writers are woken when a large part of the buffer is free, not for each byte.
            // This includes applications that only polled for writability or wrote less.
            if (self.flags.contains(ConnFlags::WRITE_BLOCKED) || !had_space)
                && self.has_send_space()
            {
                self.flags.remove(ConnFlags::WRITE_BLOCKED);
                self.flags.insert(ConnFlags::NOTIFY_WRITABLE);
            }
        }
        self.retries = 0;
        self.soft_failure = None;
        (self.stalled_since_ns, self.rto_base_ns) = (now_ns, now_ns);
    }

    /// Processes the blocks of a SACK option. Invalid blocks are ignored (RFC 2018 section 5
    /// leaves no other use).
    fn process_sack(&mut self, now_ns: u64, segment: &Segment<'_>, progress: &mut AckProgress) {
        let Some(blocks) = segment.options.sack.filter(|_| self.flags.contains(ConnFlags::SACK))
        else {
            return;
        };
        let mut first = None;
        for (index, (start, end)) in blocks.enumerate() {
            let (start, end) = (Seq(start), Seq(end));
            if !start.is_before(end) || end.is_after(self.nxt) {
                continue;
            }
            // RFC 2883 section 4: the first block reports a duplicate if it lies below the
            // acknowledgement or inside the second block.
            match (index, first) {
                (0, _) if end.is_at_or_before(segment.ack) => {
                    progress.dsack = true;
                    continue;
                }
                (0, _) => first = Some((start, end)),
                (1, Some((inner_start, inner_end)))
                    if start.is_at_or_before(inner_start) && inner_end.is_at_or_before(end) =>
                {
                    progress.dsack = true;
                }
                _ => {}
            }
            if let Some(flight) = self.flight.as_mut().filter(|_| end.is_after(self.una)) {
                flight.sack(now_ns, start, end, progress);
            }
        }
        if progress.dsack {
            // RFC 8985 section 6.2 step 4: a duplicate range widens the reordering window.
            self.reordering_steps = self.reordering_steps.saturating_add(1).min(16);
        }
    }

    /// Reordering window in nanoseconds (RFC 8985 section 6.2 step 4).
    fn reordering_ns(&self) -> u64 {
        let sacked = self.flight.as_ref().map_or(0, |flight| flight.sacked_segments());
        if !self.flags.contains(ConnFlags::REORDERING_SEEN)
            && (self.phase != RecoveryPhase::Open || sacked >= u32::from(DUP_ACK_THRESHOLD))
        {
            return 0;
        }
        let window_ns = self.rtt.min_ns() / 4 * u64::from(self.reordering_steps);
        window_ns.min(self.rtt.smoothed_ns().unwrap_or(0))
    }

    pub(crate) fn detect_lost(&mut self, now_ns: u64) {
        if self.flight.as_ref().is_none_or(|flight| flight.is_empty()) {
            return;
        }
        let reordering_ns = self.reordering_ns();
        let Some(flight) = &mut self.flight else { return };
        flight.reorder_deadline_ns = flight.detect_lost(now_ns, reordering_ns).unwrap_or(0);
    }

    /// Counts duplicate acknowledgements of peers without SACK (RFC 6582).
    fn count_duplicate_acks(&mut self, ack: Seq, duplicate: bool, progress: &AckProgress) {
        let Some(flight) = &mut self.flight else {
            self.duplicate_acks = 0;
            return;
        };
        if duplicate {
            self.duplicate_acks = self.duplicate_acks.saturating_add(1);
            if self.duplicate_acks == DUP_ACK_THRESHOLD && self.phase == RecoveryPhase::Open {
                // Step 1: not for segments sent before the end of the last recovery.
                if !ack.is_before(self.recovery_end) {
                    flight.mark_first_lost();
                }
            }
        } else if progress.acked > 0 {
            match self.phase {
                // Step 3: a partial acknowledgement signals the next loss.
                RecoveryPhase::FastRecovery if ack.is_before(self.recovery_end) => {
                    flight.mark_first_lost();
                    let segments = progress.acked.div_ceil(self.mss.max(1).into());
                    let segments = u8::try_from(segments).unwrap_or(u8::MAX);
                    self.duplicate_acks =
                        self.duplicate_acks.saturating_sub(segments.saturating_sub(1));
                }
                _ => self.duplicate_acks = 0,
            }
        }
    }

    /// Updates the recovery phase and the congestion window after an acknowledgement.
    fn update_congestion_state(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        outstanding: u32,
        progress: &AckProgress,
    ) {
        let mss = u32::from(self.mss);
        let lost = self.flight.as_ref().map_or(0, |flight| flight.lost_bytes());
        let was_mtu_probe = lost > 0 && self.lost_only_mtu_probe();
        let marked = self.flags.contains(ConnFlags::ECN)
            && segment.flags.contains(TcpFlags::ECE)
            && !segment.is_syn()
            && self.phase == RecoveryPhase::Open
            && !self.una.is_before(self.cwr_end);
        match self.phase {
            RecoveryPhase::Open if lost > 0 && !was_mtu_probe => {
                self.enter_recovery(outstanding);
            }
            RecoveryPhase::Open if marked => {
                // RFC 3168 section 6.1.2: at most once per round trip, as for a loss.
                self.controller.on_congestion(outstanding, mss);
                self.controller.end_recovery();
                self.cwr_end = self.nxt;
                self.flags.insert(ConnFlags::SEND_CWR);
            }
            RecoveryPhase::Open | RecoveryPhase::Loss if progress.acked > 0 => {
                let acked = AckInfo {
                    bytes: progress.acked,
                    mss,
                    now_ns,
                    rtt_ns: self.rtt.smoothed_ns().unwrap_or(0),
                };
                let limited = self.flags.contains(ConnFlags::WINDOW_LIMITED)
                    || self.phase == RecoveryPhase::Loss;
                self.controller.on_ack(&acked, limited);
            }
            _ => {}
        }
        if self.phase != RecoveryPhase::Open && !self.una.is_before(self.recovery_end) {
            if self.phase == RecoveryPhase::FastRecovery {
                self.controller.end_recovery();
            }
            self.phase = RecoveryPhase::Open;
            self.duplicate_acks = 0;
        } else if self.phase == RecoveryPhase::FastRecovery {
            self.reduce_rate(progress, mss);
        }
    }

    /// True if there may be something to send: lost segments, unsent data or a FIN.
    pub(crate) fn may_have_output(&self) -> bool {
        let lost = self.flight.as_ref().is_some_and(|flight| flight.lost_bytes() > 0);
        lost || self.unsent() > 0
            || self.flags.contains(ConnFlags::FIN_QUEUED)
                && !self.flags.contains(ConnFlags::FIN_SENT)
    }

    fn enter_recovery(&mut self, outstanding: u32) {
        self.controller.on_congestion(outstanding, self.mss.into());
        self.phase = RecoveryPhase::FastRecovery;
        if let Some(flight) = &mut self.flight {
            flight.prr = PrrState { flight: outstanding.max(1), delivered: 0, sent: 0 };
        }
        self.recovery_end = self.nxt;
        self.flags.insert(ConnFlags::FORCE_RETRANSMISSION);
        self.flags.set(ConnFlags::SEND_CWR, self.flags.contains(ConnFlags::ECN));
        self.cwr_end = self.nxt;
    }

    /// Sets the congestion window by proportional rate reduction (RFC 6937 section 3.1).
    fn reduce_rate(&mut self, progress: &AckProgress, mss: u32) {
        let pipe = self.pipe();
        let ssthresh = self.controller.window.ssthresh;
        let Some(flight) = &mut self.flight else { return };
        let PrrState { flight, delivered, sent } = &mut flight.prr;
        let newly_delivered = match progress.acked + progress.sacked {
            0 if !self.flags.contains(ConnFlags::SACK) => mss,
            news => news,
        };
        *delivered = delivered.saturating_add(newly_delivered);
        let allowed = if pipe > ssthresh {
            let share = u64::from(*delivered) * u64::from(ssthresh);
            let share = share.div_ceil(u64::from((*flight).max(1)));
            (share as u32).saturating_sub(*sent)
        } else {
            let max_allowed = delivered.saturating_sub(*sent).max(newly_delivered) + mss;
            (ssthresh - pipe).min(max_allowed)
        };
        self.controller.window.cwnd = pipe.saturating_add(allowed).max(mss);
    }

    /// Counts `bytes` as sent, for the proportional rate reduction.
    pub(crate) fn count_sent(&mut self, bytes: u32) {
        if let Some(flight) = &mut self.flight {
            flight.prr.sent = flight.prr.sent.saturating_add(bytes);
        }
    }

    /// Evaluates the acknowledgement of a tail probe (RFC 8985 section 7.4).
    fn finish_tail_probe(
        &mut self,
        ack: Seq,
        outstanding: u32,
        duplicate: bool,
        progress: &AckProgress,
    ) {
        if !self.flags.contains(ConnFlags::TAIL_PROBE_SENT) || ack.is_before(self.probe_end) {
            return;
        }
        let repeated = self.flags.contains(ConnFlags::TAIL_PROBE_RETRANSMITS);
        if !repeated || progress.dsack || duplicate {
            // No loss: new data was acknowledged, or both copies arrived.
            self.flags.remove(ConnFlags::TAIL_PROBE_SENT);
        } else if progress.acked > 0 {
            // The probe repaired a loss that nothing else has detected.
            self.flags.remove(ConnFlags::TAIL_PROBE_SENT);
            if self.phase == RecoveryPhase::Open {
                self.controller.on_congestion(outstanding, self.mss.into());
                self.controller.end_recovery();
            }
        }
    }

    /// Sets the timer for the segments in flight (RFC 6298 section 5, RFC 8985 section 7.2).
    pub(crate) fn arm_timer(&mut self, now_ns: u64) {
        let Some(flight) = self.flight.as_ref().filter(|flight| !flight.is_empty()) else {
            return self.arm_window_probe(now_ns);
        };
        let rto_at_ns = self.rto_base_ns.saturating_add(self.rtt.rto_ns());
        if self.window == 0 && flight.len() == 1 && self.is_synchronized() {
            self.rtx_timer = RtxTimer::Persist;
            self.rtx_deadline_ns = rto_at_ns;
            return;
        }
        let user_timeout_at_ns = self.options.user_timeout_ms.map_or(NEVER, |limit_ms| {
            self.stalled_since_ns.saturating_add(u64::from(limit_ms) * 1_000_000)
        });
        let rto_at_ns = rto_at_ns.min(user_timeout_at_ns);
        (self.rtx_timer, self.rtx_deadline_ns) = (RtxTimer::Retransmission, rto_at_ns);
        if flight.reorder_deadline_ns != 0 && flight.reorder_deadline_ns < rto_at_ns {
            (self.rtx_timer, self.rtx_deadline_ns) =
                (RtxTimer::Reordering, flight.reorder_deadline_ns);
            return;
        }
        let may_probe = self.flags.contains(ConnFlags::SACK)
            && self.is_synchronized()
            && self.phase == RecoveryPhase::Open
            && !self.flags.contains(ConnFlags::TAIL_PROBE_SENT)
            && !flight.has_sacked()
            && flight.lost_bytes() == 0
            && self.rtt.backoff == 0;
        if may_probe {
            let delayed_ack_ns = if flight.len() == 1 { WORST_CASE_DELAYED_ACK_NS } else { 0 };
            let wait_ns = self
                .rtt
                .smoothed_ns()
                .map_or(INITIAL_TAIL_PROBE_NS, |rtt| 2 * rtt + delayed_ack_ns);
            let probe_at_ns = self.rto_base_ns.max(self.last_sent_ns).saturating_add(wait_ns);
            if probe_at_ns < rto_at_ns {
                (self.rtx_timer, self.rtx_deadline_ns) = (RtxTimer::TailProbe, probe_at_ns);
            }
        }
    }

    /// Sets the timer while nothing is in flight. If data waits for the peer's window, this is
    /// the time of the next window probe (RFC 9293 section 3.8.6.1).
    fn arm_window_probe(&mut self, now_ns: u64) {
        let fin_waits =
            self.flags.contains(ConnFlags::FIN_QUEUED) && !self.flags.contains(ConnFlags::FIN_SENT);
        if !self.can_transmit()
            || self.unsent() == 0 && !fin_waits
            || self.flags.contains(ConnFlags::WANTS_OUTPUT)
        {
            self.rtx_timer = RtxTimer::Off;
            self.rtx_deadline_ns = NEVER;
        } else if self.rtx_timer != RtxTimer::Persist {
            self.rtt.backoff = 0;
            self.stalled_since_ns = now_ns;
            self.rtx_timer = RtxTimer::Persist;
            self.rtx_deadline_ns = now_ns.saturating_add(self.rtt.rto_ns());
        } else if self.rtx_deadline_ns == NEVER {
            self.rtx_deadline_ns = now_ns.saturating_add(self.rtt.rto_ns());
        }
    }

    /// Handles expiry of the timer for segments in flight. The timer restarts only after the
    /// resulting output was sent: a full transmit queue says nothing about the peer.
    pub(crate) fn on_wait_expired(&mut self, now_ns: u64, shared: &mut TcpShared) {
        self.rtx_deadline_ns = NEVER;
        match self.rtx_timer {
            RtxTimer::Off => {}
            RtxTimer::Reordering => {
                let outstanding = self.nxt.since(self.una);
                self.detect_lost(now_ns);
                let lost = self.flight.as_ref().map_or(0, |flight| flight.lost_bytes());
                if lost > 0 && self.phase == RecoveryPhase::Open && !self.lost_only_mtu_probe() {
                    self.enter_recovery(outstanding);
                }
                self.flags.insert(ConnFlags::WANTS_OUTPUT);
            }
            RtxTimer::TailProbe => {
                self.flags.insert(ConnFlags::TAIL_PROBE_NOW);
                self.flags.insert(ConnFlags::TAIL_PROBE_SENT);
                self.probe_end = self.nxt;
                self.rto_base_ns = now_ns;
                self.flags.insert(ConnFlags::WANTS_OUTPUT);
            }
            RtxTimer::Persist => self.on_window_probe(now_ns, shared),
            RtxTimer::Retransmission => self.on_timeout(now_ns, shared),
        }
    }

    /// True if the user time-out has passed, or the time-out of a closed connection without
    /// progress.
    fn should_give_up(&self, now_ns: u64) -> bool {
        let stalled_ns = now_ns.saturating_sub(self.stalled_since_ns);
        let limit_ms = self.options.user_timeout_ms;
        limit_ms.is_some_and(|limit_ms| stalled_ns >= u64::from(limit_ms) * 1_000_000)
            || self.flags.contains(ConnFlags::ORPHAN)
                && self.is_synchronized()
                && stalled_ns >= MAX_ORPHAN_STALL_NS
    }

    fn give_up(&mut self, shared: &mut TcpShared) {
        let failure = self.soft_failure.unwrap_or(Failure::TimedOut);
        self.abort(shared, Some(failure), self.is_synchronized());
    }

    /// Sends a window probe, for as long as the peer answers (RFC 9293 section 3.8.6.1).
    fn on_window_probe(&mut self, now_ns: u64, shared: &mut TcpShared) {
        self.retries = self.retries.saturating_add(1);
        if self.retries > MAX_DATA_RETRIES || self.should_give_up(now_ns) {
            return self.give_up(shared);
        }
        self.rtt.back_off();
        self.rto_base_ns = now_ns;
        if let Some(flight) = &mut self.flight {
            flight.mark_first_lost();
            self.flags.insert(ConnFlags::FORCE_RETRANSMISSION);
        } else {
            self.flags.insert(ConnFlags::FORCE_WINDOW_PROBE);
        }
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
    }

    /// Handles a retransmission time-out (RFC 6298 sections 5.4 to 5.7).
    fn on_timeout(&mut self, now_ns: u64, shared: &mut TcpShared) {
        let max_retries = match self.state {
            TcpState::SynSent => MAX_SYN_RETRIES,
            TcpState::SynReceived => MAX_SYN_ACK_RETRIES,
            _ => MAX_DATA_RETRIES,
        };
        // An attempt to connect to a host reported unreachable ends with this time-out.
        let is_unreachable = self.state == TcpState::SynSent && self.soft_failure.is_some();
        self.retries = self.retries.saturating_add(1);
        if self.retries > max_retries || is_unreachable || self.should_give_up(now_ns) {
            return self.give_up(shared);
        }
        let mss = u32::from(self.mss);
        let outstanding = self.nxt.since(self.una);
        let Some(flight) = &mut self.flight else { return };
        flight.mark_all_lost(self.retries > 1);
        flight.reorder_deadline_ns = 0;
        if self.is_synchronized() {
            self.controller.on_timeout(outstanding, mss, self.phase != RecoveryPhase::Loss);
            self.on_mtu_probe_timeout();
            if self.retries == BLACK_HOLE_RETRIES {
                self.on_black_hole(now_ns);
            }
        } else {
            // RFC 5681 section 3.1: after a lost SYN, the initial window is one segment.
            self.controller.window.cwnd = mss;
            self.flags.insert(ConnFlags::SYN_RETRANSMITTED);
        }
        self.phase = RecoveryPhase::Loss;
        self.recovery_end = self.nxt;
        self.reordering_steps = 1;
        self.duplicate_acks = 0;
        self.flags.remove(ConnFlags::TAIL_PROBE_SENT);
        self.rtt.back_off();
        self.rto_base_ns = now_ns;
        self.flags.insert(ConnFlags::FORCE_RETRANSMISSION);
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
    }
}
