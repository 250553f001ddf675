//! Acknowledgements of sent data: the send buffer, loss detection and the congestion window move
//! on (RFC 9293 section 3.10.7.4, fifth; RFC 5681, RFC 6675, RFC 8985, RFC 3168).

use tidegate_wire::tcp::TcpFlags;

use super::Connection;
use crate::tcp::buffers::TcpShared;
use crate::tcp::flags::ConnFlags;
use crate::tcp::recovery::{AckArrival, AckProgress, CongestionChange};
use crate::tcp::segment::Segment;
use crate::tcp::seq::Seq;

impl Connection {
    /// Processes the acknowledgement of a segment. The caller has checked that its number is
    /// between SND.UNA and SND.NXT.
    pub(crate) fn on_ack(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        duplicate: bool,
        shared: &mut TcpShared,
    ) {
        let outstanding = self.send.outstanding();
        let mut progress = AckProgress::default();
        if self.recovery.flight.is_none() && segment.options.sack.is_none() {
            // Nothing is in flight, so the acknowledgement carries no information.
            self.recovery.duplicate_acks = 0;
            return self.after_ack(now_ns);
        }
        if segment.ack == self.send.nxt
            && segment.options.sack.is_none()
            && let Some(sent_ns) = self.recovery.undisturbed_since_ns()
        {
            self.on_ack_of_all(now_ns, segment, now_ns.saturating_sub(sent_ns), shared);
            return self.after_ack(now_ns);
        }
        let arrival = self.ack_arrival(now_ns, segment);
        if let Some(flight) = &mut self.recovery.flight {
            flight.acknowledge(&arrival, segment.ack, &mut progress);
        }
        self.send.una = self.send.una.max(segment.ack);
        let sack = self.flags.contains(ConnFlags::SACK);
        if let Some(blocks) = segment.options.sack.filter(|_| sack) {
            self.recovery.process_sack(&arrival, blocks, segment.ack, &self.send, &mut progress);
        }
        self.sample_rtt(&arrival, &progress);
        if progress.reordered {
            self.flags.insert(ConnFlags::REORDERING_SEEN);
        }
        if progress.acked > 0 {
            self.on_progress(now_ns, shared);
        }
        self.finish_tail_probe(segment.ack, outstanding, duplicate, &progress);
        if self.recovery.may_undo() {
            self.undo_if_needless(&arrival, segment, &progress, duplicate);
        }
        if sack {
            self.detect_lost(now_ns);
        } else {
            let mss = self.send.mss;
            self.recovery.count_duplicate_acks(segment.ack, duplicate, mss, &mut progress);
        }
        self.update_congestion_state(now_ns, segment, outstanding, &progress);
        self.recovery.finish_mtu_probe(now_ns, &mut self.send);
        self.recovery.recycle_empty_flight(shared);
        self.after_ack(now_ns);
    }

    /// [`Connection::on_ack`] for the usual case: the acknowledgement is for everything in flight,
    /// nothing of which was lost or sent again. `rtt_ns` is the age of the oldest segment.
    #[inline(always)]
    pub(super) fn on_ack_of_all(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        rtt_ns: u64,
        shared: &mut TcpShared,
    ) {
        let outstanding = self.send.outstanding();
        self.send.una = segment.ack;
        self.recovery.rtt.sample(now_ns, rtt_ns);
        self.recovery.duplicate_acks = 0;
        self.on_progress(now_ns, shared);
        if self.flags.intersects(ConnFlags::ECN | ConnFlags::TAIL_PROBE_SENT) {
            let progress = AckProgress {
                acked: outstanding,
                delivered: outstanding,
                rtt_ns: Some(rtt_ns),
                ..AckProgress::default()
            };
            self.finish_tail_probe(segment.ack, outstanding, false, &progress);
            self.update_congestion_state(now_ns, segment, outstanding, &progress);
        } else {
            let limited = self.flags.contains(ConnFlags::WINDOW_LIMITED);
            self.recovery.grow_window(now_ns, &self.send, outstanding, Some(rtt_ns), limited);
        }
        self.recovery.release(shared);
    }

    /// Updates the congestion state, and acts on its change.
    #[inline]
    fn update_congestion_state(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        outstanding: u32,
        progress: &AckProgress,
    ) {
        let (send, flags) = (&self.send, self.flags);
        let change = self.recovery.update_congestion_state(
            now_ns,
            segment,
            send,
            flags,
            outstanding,
            progress,
        );
        match change {
            CongestionChange::None => {}
            CongestionChange::Recovery => self.on_recovery_entered(),
            CongestionChange::Marked => self.flags.insert(ConnFlags::SEND_CWR),
        }
    }

    /// Arrival of a segment as loss detection sees it.
    #[inline]
    fn ack_arrival(&self, now_ns: u64, segment: &Segment<'_>) -> AckArrival {
        let timestamps =
            segment.options.timestamps.filter(|_| self.flags.contains(ConnFlags::TIMESTAMPS));
        let echoed_ms = timestamps.map(|(_, echo)| echo.wrapping_sub(self.send.ts_offset));
        AckArrival { now_ns, min_rtt_ns: self.recovery.rtt.min_ns(), echoed_ms }
    }

    /// Takes a round-trip sample: from a segment that was sent once, or else from the time stamp.
    /// Without a sample the time-out stays backed off (RFC 6298 section 5.7).
    #[inline]
    fn sample_rtt(&mut self, arrival: &AckArrival, progress: &AckProgress) {
        let by_timestamp = || arrival.echoed_rtt_ns().filter(|_| progress.acked > 0);
        if let Some(rtt_ns) = progress.rtt_ns.or_else(by_timestamp) {
            self.recovery.rtt.sample(arrival.now_ns, rtt_ns);
        }
    }

    /// Returns to the state before a recovery that was needless. A peer that reports congestion
    /// has a reason for the recovery (RFC 4015 section 3).
    fn undo_if_needless(
        &mut self,
        arrival: &AckArrival,
        segment: &Segment<'_>,
        progress: &AckProgress,
        duplicate: bool,
    ) {
        if segment.flags.contains(TcpFlags::ECE) {
            return;
        }
        let (recovery, send, ack) = (&mut self.recovery, &self.send, segment.ack);
        if recovery.undo_if_needless(arrival, ack, send, progress, duplicate) {
            self.flags.remove(ConnFlags::FORCE_RETRANSMISSION);
        }
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
    #[inline(always)]
    fn on_progress(&mut self, now_ns: u64, shared: &mut TcpShared) {
        let had_space = self.has_send_space();
        let bytes = self.send.remove_acknowledged(&mut shared.pool);
        let acknowledged = &mut self.traffic.acknowledged_bytes;
        *acknowledged = acknowledged.wrapping_add(bytes.into());
        self.measure_delivery(now_ns);
        // Only here, so that a writer is woken whatever makes the buffer larger.
        let cwnd = self.recovery.controller.window.cwnd;
        self.send_growth = self.options.send_growth(cwnd, || shared.pool.max_queue_bytes());
        // Writers are woken when a large part of the buffer is free, not for each byte.
        // This includes applications that only polled for writability or wrote less.
        if bytes > 0
            && (self.flags.contains(ConnFlags::WRITE_BLOCKED) || !had_space)
            && self.has_send_space()
        {
            self.flags.remove(ConnFlags::WRITE_BLOCKED);
            self.flags.insert(ConnFlags::NOTIFY_WRITABLE);
        }
        self.recovery.retries = 0;
        self.soft_failure = None;
        (self.timers.stalled_since_ns, self.timers.rto_base_ns) = (now_ns, now_ns);
    }

    /// Updates the rate at which the peer acknowledges data, once in each round trip.
    #[inline]
    fn measure_delivery(&mut self, now_ns: u64) {
        let Some(flight) = &mut self.recovery.flight else { return };
        let (una, nxt, min_rtt_ns) = (self.send.una, self.send.nxt, self.recovery.rtt.min_ns());
        let rate = flight.delivery.finish_round(now_ns, una, nxt, min_rtt_ns);
        let known = &mut self.traffic.delivery_bytes_per_ms;
        if let Some(rate) = rate
            && (rate >= *known || self.flags.contains(ConnFlags::WINDOW_LIMITED))
        {
            *known = rate;
        }
    }

    /// True if there may be something to send: lost segments, unsent data or a FIN.
    pub(crate) fn may_have_output(&self) -> bool {
        self.recovery.lost_bytes() > 0
            || self.send.unsent() > 0
            || self.flags.contains(ConnFlags::FIN_QUEUED)
                && !self.flags.contains(ConnFlags::FIN_SENT)
    }

    /// Evaluates the acknowledgement of a tail probe (RFC 8985 section 7.4).
    fn finish_tail_probe(
        &mut self,
        ack: Seq,
        outstanding: u32,
        duplicate: bool,
        progress: &AckProgress,
    ) {
        if !self.flags.contains(ConnFlags::TAIL_PROBE_SENT)
            || ack.is_before(self.send.tail_probe_end)
        {
            return;
        }
        let repeated = self.flags.contains(ConnFlags::TAIL_PROBE_RETRANSMITS);
        if !repeated || progress.dsack.is_some() || duplicate {
            // No loss: new data was acknowledged, or both copies arrived.
            self.flags.remove(ConnFlags::TAIL_PROBE_SENT);
        } else if progress.acked > 0 {
            // The probe repaired a loss that nothing else has detected.
            self.flags.remove(ConnFlags::TAIL_PROBE_SENT);
            self.recovery.on_tail_probe_repair(outstanding, self.send.mss);
        }
    }

    /// Marks segments lost that are too late by the measure of RACK.
    pub(super) fn detect_lost(&mut self, now_ns: u64) {
        let reordering_seen = self.flags.contains(ConnFlags::REORDERING_SEEN);
        self.recovery.detect_lost(now_ns, reordering_seen);
    }

    /// Retransmits at once, and tells a peer with ECN that the window was reduced.
    pub(super) fn on_recovery_entered(&mut self) {
        self.flags.insert(ConnFlags::FORCE_RETRANSMISSION);
        self.flags.set(ConnFlags::SEND_CWR, self.flags.contains(ConnFlags::ECN));
    }
}
