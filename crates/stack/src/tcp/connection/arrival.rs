//! Segment processing of a connection, in the order of RFC 9293 section 3.10.7,
//! with the checks of RFC 5961 and RFC 7323 in their places.

use tidegate_wire::DropReason;
use tidegate_wire::tcp::TcpFlags;

use super::Connection;
use crate::tcp::buffers::TcpShared;
use crate::tcp::flags::ConnFlags;
use crate::tcp::recovery::RecoveryPhase;
use crate::tcp::segment::{OutSegment, Segment};
use crate::tcp::seq::Seq;
use crate::tcp::socket::{Failure, TcpState};
use crate::tcp::timers::{NS_PER_MS, RtxTimer};

/// Effects of a segment outside the connection's own state.
#[derive(Debug, Default)]
pub(crate) struct SegmentOutcome {
    /// Reply that the connection does not send itself: a reset.
    pub(crate) reply: Option<OutSegment>,
    /// True when this segment established the connection.
    pub(crate) established: bool,
}

impl Connection {
    /// Processes a segment. `may_establish` is false when the listener's accept queue is full:
    /// then the connection is not established.
    ///
    /// Effects outside the connection are written to `outcome`, also when an error is returned.
    ///
    /// # Errors
    /// The drop reason, when the rest of the segment is not used.
    pub(crate) fn handle_segment(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        may_establish: bool,
        outcome: &mut SegmentOutcome,
        shared: &mut TcpShared,
    ) -> Result<(), DropReason> {
        self.traffic.received_segments = self.traffic.received_segments.wrapping_add(1);
        match self.state {
            TcpState::Closed => return Err(DropReason::TcpNoSocket),
            TcpState::SynSent => {
                if !self.handle_segment_in_syn_sent(now_ns, segment, outcome, shared)? {
                    return Ok(());
                }
            }
            _ => {
                let crossing;
                let mut segment = segment;
                // A SYN-ACK for our SYN after we answered the peer's SYN: simultaneous open.
                if self.state == TcpState::SynReceived
                    && segment.is_syn()
                    && segment.seq + 1 == self.receive.nxt
                {
                    self.restrict_ecn(segment);
                    if !segment.is_ack() {
                        // Our SYN-ACK was lost.
                        self.flags.insert(ConnFlags::SYN_ACK_NOW | ConnFlags::WANTS_OUTPUT);
                        return Ok(());
                    }
                    let flags = without_syn(segment);
                    crossing = Segment { seq: self.receive.nxt, flags, ..*segment };
                    segment = &crossing;
                }
                if !self.check_segment(now_ns, segment, shared)? {
                    return Ok(());
                }
                let in_syn_received = self.state == TcpState::SynReceived;
                if in_syn_received && !may_establish {
                    return Err(DropReason::TcpAcceptQueueFull);
                }
                let in_time_wait = self.state == TcpState::TimeWait;
                self.check_ack(now_ns, segment, outcome, shared)?;
                if in_time_wait && segment.end() != self.receive.nxt {
                    self.send_challenge_ack(now_ns, segment);
                }
                return self.process_payload(now_ns, segment, shared);
            }
        }
        let segment = Segment { seq: segment.seq + 1, flags: without_syn(segment), ..*segment };
        self.process_payload(now_ns, &segment, shared)
    }

    /// Processes a segment in SYN-SENT (RFC 9293 section 3.10.7.3). Returns true when its
    /// payload is to be processed too.
    fn handle_segment_in_syn_sent(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        outcome: &mut SegmentOutcome,
        shared: &mut TcpShared,
    ) -> Result<bool, DropReason> {
        let acceptable = segment.is_ack() && self.send.is_new_ack(segment.ack);
        if segment.is_ack() && !acceptable {
            outcome.reply = segment.reset(self.tuple);
            return if outcome.reply.is_some() {
                Ok(false)
            } else {
                Err(DropReason::TcpAckInvalid)
            };
        }
        if segment.is_rst() {
            if !acceptable {
                return Err(DropReason::TcpReset);
            }
            self.abort(shared, Some(Failure::Refused), false);
            return Ok(false);
        }
        if !segment.is_syn() {
            return Err(DropReason::TcpFlags);
        }
        self.receive.begin(segment.seq);
        // The window that our SYN announced.
        self.receive.edge += self.options.receive_buffer_bytes.min(u16::MAX.into());
        self.apply_syn_options(now_ns, segment);
        self.update_send_window(segment, false);
        self.timers.last_received_ns = now_ns;
        if !acceptable {
            // Simultaneous open (RFC 9293 section 3.5, figure 8).
            self.state = TcpState::SynReceived;
            self.restrict_ecn(segment);
            self.flags.insert(ConnFlags::SYN_ACK_NOW | ConnFlags::WANTS_OUTPUT);
            return Ok(false);
        }
        self.restrict_ecn(segment);
        self.on_ack(now_ns, segment, false, shared);
        self.establish(now_ns, outcome);
        self.acknowledge_now();
        Ok(true)
    }

    /// Ends ECN unless the SYN of the peer agrees: both bits of a SYN, only ECE of a SYN-ACK
    /// (RFC 3168 section 6.1.1).
    fn restrict_ecn(&mut self, syn: &Segment<'_>) {
        let bits = TcpFlags(syn.flags.0 & ECN_BITS.0);
        let expected = if syn.is_ack() { TcpFlags::ECE } else { ECN_BITS };
        if bits != expected {
            self.flags.remove(ConnFlags::ECN);
        }
    }

    /// Applies the options of a SYN (RFC 9293 section 3.7.1, RFC 7323 sections 2.2 and 3.2,
    /// RFC 2018 section 2).
    pub(crate) fn apply_syn_options(&mut self, now_ns: u64, segment: &Segment<'_>) {
        let options = &segment.options;
        self.send.set_peer_mss(options.mss, self.tuple.is_v4());
        self.flags.set(ConnFlags::SACK, options.sack_permitted);
        self.flags.set(ConnFlags::TIMESTAMPS, options.timestamps.is_some());
        if let Some((value, _)) = options.timestamps {
            self.receive.set_ts_recent(now_ns, value);
        }
        match options.window_shift {
            Some(shift) => self.receive.peer_window_shift = shift,
            None => (self.receive.peer_window_shift, self.receive.window_shift) = (0, 0),
        }
        self.set_mtu(usize::from(u16::MAX));
        self.recovery.controller.set_mss(self.send.mss.into());
        if self.flags.contains(ConnFlags::SYN_RETRANSMITTED) {
            // RFC 5681 section 3.1: after a lost SYN the initial window is one segment.
            self.recovery.controller.window.cwnd = self.send.mss.into();
        }
    }

    /// Enters ESTABLISHED, or FIN-WAIT-1 when a FIN is already queued.
    pub(crate) fn establish(&mut self, now_ns: u64, outcome: &mut SegmentOutcome) {
        self.state = TcpState::Established;
        self.recovery.phase = RecoveryPhase::Open;
        self.recovery.rtt.lost_syn = self.flags.contains(ConnFlags::SYN_RETRANSMITTED);
        self.recovery.rtt.backoff = 0;
        self.recovery.retries = 0;
        self.timers.rtx = RtxTimer::Off;
        self.flags.insert(ConnFlags::NOTIFY_WRITABLE);
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
        self.timers.start_keepalive(now_ns, self.options.keepalive);
        if self.flags.contains(ConnFlags::FIN_QUEUED) {
            self.state = TcpState::FinWait1;
        }
        outcome.established = true;
    }

    /// Applies PAWS and the first four checks of RFC 9293 section 3.10.7.4: sequence number, RST,
    /// security (none), SYN. Returns false when the segment needs no further processing.
    fn check_segment(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        shared: &mut TcpShared,
    ) -> Result<bool, DropReason> {
        if !segment.is_ack() && !segment.is_rst() && !segment.is_syn() {
            // No peer sends such a segment. The fifth check would drop the segment; a reply to one
            // out of sequence would only serve whoever forged it.
            return Err(DropReason::TcpFlags);
        }
        self.check_timestamps(now_ns, segment, shared)?;
        self.check_sequence(now_ns, segment, shared)?;
        if segment.is_rst() {
            return self.process_reset(now_ns, segment, shared).map(|()| false);
        }
        if segment.is_syn() {
            if self.state == TcpState::SynReceived && self.flags.contains(ConnFlags::PASSIVE) {
                // Fourth check, passive open: the connection returns to LISTEN.
                self.abort(shared, None, false);
                return Err(DropReason::TcpFlags);
            }
            // RFC 5961 section 4.2.
            self.send_challenge_ack(now_ns, segment);
            return Err(DropReason::TcpFlags);
        }
        if !segment.is_ack() {
            return Err(DropReason::TcpFlags);
        }
        Ok(true)
    }

    /// Rejects segments that PAWS or a missing time stamp forbids (RFC 7323 section 5.3, R1, and
    /// section 3.2).
    fn check_timestamps(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        shared: &TcpShared,
    ) -> Result<(), DropReason> {
        if !self.flags.contains(ConnFlags::TIMESTAMPS) || segment.is_rst() {
            return Ok(());
        }
        let Some((value, _)) = segment.options.timestamps else {
            return Err(DropReason::TcpTimestampMissing);
        };
        if self.receive.is_old_timestamp(now_ns, value) {
            self.acknowledge_unacceptable(now_ns, segment, shared);
            return Err(DropReason::TcpPaws);
        }
        Ok(())
    }

    /// Checks that the segment is acceptable (RFC 9293 section 3.10.7.4, first: table 6).
    fn check_sequence(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        shared: &TcpShared,
    ) -> Result<(), DropReason> {
        if self.receive.is_acceptable(segment) {
            return Ok(());
        }
        if segment.is_rst() {
            return Err(DropReason::TcpReset);
        }
        let is_old = segment.end().is_at_or_before(self.receive.nxt);
        self.acknowledge_unacceptable(now_ns, segment, shared);
        Err(if is_old { DropReason::TcpDuplicate } else { DropReason::TcpSequence })
    }

    /// Answers an unacceptable segment with the current acknowledgement. Duplicate data is
    /// acknowledged each time, since our acknowledgement may have been lost; anything else is
    /// rate-limited.
    fn acknowledge_unacceptable(&mut self, now_ns: u64, segment: &Segment<'_>, shared: &TcpShared) {
        if self.state == TcpState::TimeWait && segment.is_fin() {
            // A retransmitted FIN restarts TIME-WAIT (RFC 9293 section 3.10.7.4, eighth).
            self.timers.set_idle(now_ns, shared.time_wait_ns);
        }
        if self.state == TcpState::TimeWait || segment.len() > 0 {
            let end = segment.end().min(self.receive.nxt);
            if segment.end().is_at_or_before(self.receive.nxt) && !segment.payload.is_empty() {
                return self.record_dsack_range(segment.seq, end);
            }
            if segment.end().is_at_or_before(self.receive.nxt) {
                return self.acknowledge_now();
            }
        }
        // The sequence number of a keep-alive probe is RCV.NXT - 1.
        if segment.seq + 1 == self.receive.nxt {
            return self.acknowledge_now();
        }
        self.send_challenge_ack(now_ns, segment);
    }

    /// Queues a challenge ACK in reply to a segment, within the rate limit of the connection
    /// (RFC 5961 section 7).
    pub(crate) fn send_challenge_ack(&mut self, now_ns: u64, segment: &Segment<'_>) {
        if self.timers.take_challenge_ack(now_ns, !segment.payload.is_empty()) {
            self.acknowledge_now();
        }
    }

    /// Processes a RST (RFC 9293 section 3.10.7.4, second; RFC 5961 section 3.2).
    fn process_reset(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        shared: &mut TcpShared,
    ) -> Result<(), DropReason> {
        if segment.seq != self.receive.nxt {
            self.send_challenge_ack(now_ns, segment);
            return Err(DropReason::TcpReset);
        }
        if self.state == TcpState::TimeWait {
            // RFC 1337: a reset does not end TIME-WAIT early.
            return Err(DropReason::TcpReset);
        }
        let failure = match self.state {
            TcpState::SynReceived if !self.flags.contains(ConnFlags::PASSIVE) => Failure::Refused,
            TcpState::CloseWait if !self.flags.contains(ConnFlags::FIN_QUEUED) => {
                Failure::ResetAfterEnd
            }
            _ => Failure::Reset,
        };
        self.abort(shared, Some(failure), false);
        Ok(())
    }

    /// Processes the acknowledgement (RFC 9293 section 3.10.7.4, fifth; RFC 5961 section 5.2).
    fn check_ack(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        outcome: &mut SegmentOutcome,
        shared: &mut TcpShared,
    ) -> Result<(), DropReason> {
        if self.state == TcpState::SynReceived {
            if !self.send.is_new_ack(segment.ack) {
                outcome.reply = segment.reset(self.tuple);
                return Ok(());
            }
            self.update_send_window(segment, true);
            self.establish(now_ns, outcome);
            self.accept_timestamps(now_ns, segment);
            self.on_ack(now_ns, segment, false, shared);
            return Ok(());
        }
        if !self.send.is_acceptable_ack(segment.ack) {
            self.send_challenge_ack(now_ns, segment);
            return Err(DropReason::TcpAckInvalid);
        }
        self.accept_timestamps(now_ns, segment);
        self.timers.keepalive_probes_sent = 0;
        if segment.ack.is_before(self.send.una) {
            return Ok(());
        }
        let before = self.send.window;
        self.update_send_window(segment, true);
        // Duplicate acknowledgement as RFC 5681 section 2 defines it.
        let duplicate = segment.ack == self.send.una
            && self.send.una != self.send.nxt
            && segment.len() == 0
            && before == self.send.window
            // Answers to window probes do not signal loss.
            && self.send.window > 0;
        if self.timers.rtx == RtxTimer::Persist {
            // An answer shows that the peer is alive, however long its window stays closed.
            self.recovery.retries = 0;
        }
        if before == 0 && self.send.window > 0 && self.timers.rtx == RtxTimer::Persist {
            self.on_window_reopened(now_ns, segment.ack);
        }
        self.on_ack(now_ns, segment, duplicate, shared);
        self.on_fin_acknowledged(now_ns, shared);
        Ok(())
    }

    /// Notes the times of a segment from the real peer. Whoever only guesses sequence numbers must
    /// not set TS.Recent, or PAWS drops the peer's data (RFC 7323 section 5.3): so the
    /// acknowledgement is checked first.
    #[inline(always)]
    pub(super) fn accept_timestamps(&mut self, now_ns: u64, segment: &Segment<'_>) {
        self.timers.last_received_ns = now_ns;
        if self.flags.contains(ConnFlags::TIMESTAMPS) {
            self.receive.update_ts_recent(now_ns, segment);
        }
    }

    /// Ends window probes. What was in flight when the window closed is retransmitted at once if
    /// a probe was sent: the peer has had the time of the time-out to acknowledge it.
    fn on_window_reopened(&mut self, now_ns: u64, ack: Seq) {
        let has_probed = std::mem::take(&mut self.timers.window_probes_sent) > 0;
        self.timers.rto_base_ns = now_ns;
        self.timers.rtx = RtxTimer::Off;
        if has_probed && ack == self.send.una && self.recovery.mark_first_lost() {
            self.flags.insert(ConnFlags::FORCE_RETRANSMISSION);
        }
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
    }

    /// Updates SND.WND, only from newer segments (RFC 9293 section 3.10.7.4). The window of a SYN
    /// is not `scaled`.
    #[inline(always)]
    pub(super) fn update_send_window(&mut self, segment: &Segment<'_>, scaled: bool) {
        if scaled && self.is_synchronized() && !self.send.is_newer(segment) {
            return;
        }
        let shift = if scaled { self.receive.peer_window_shift } else { 0 };
        let window = u32::from(segment.window) << shift;
        if window > self.send.window && self.may_have_output() {
            self.flags.insert(ConnFlags::WANTS_OUTPUT);
        }
        self.send.set_window(window, segment);
    }

    /// Advances the state once our FIN is acknowledged.
    fn on_fin_acknowledged(&mut self, now_ns: u64, shared: &mut TcpShared) {
        if !self.fin_acknowledged() {
            return;
        }
        match self.state {
            TcpState::FinWait1 => {
                self.state = TcpState::FinWait2;
                if self.flags.contains(ConnFlags::ORPHAN) {
                    self.start_orphan_timer(now_ns, shared);
                }
            }
            TcpState::Closing => self.enter_time_wait(now_ns, shared),
            TcpState::LastAck => {
                self.state = TcpState::Closed;
                self.timers.clear();
            }
            _ => {}
        }
    }

    /// Limits FIN-WAIT-2 of an orphaned connection: no application is left to read what the peer
    /// sends.
    pub(crate) fn start_orphan_timer(&mut self, now_ns: u64, shared: &TcpShared) {
        let limit_ns = self.options.fin_wait_2_ms.map_or(u64::MAX, |ms| u64::from(ms) * NS_PER_MS);
        self.timers.set_idle(now_ns, shared.fin_wait_2_ns.min(limit_ns));
    }

    /// Processes payload and FIN (RFC 9293 section 3.10.7.4, sixth to eighth). Urgent data is
    /// delivered in line with the rest, as RFC 6093 section 6 advises.
    fn process_payload(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        shared: &mut TcpShared,
    ) -> Result<(), DropReason> {
        let receives =
            matches!(self.state, TcpState::Established | TcpState::FinWait1 | TcpState::FinWait2);
        if !receives {
            return Ok(());
        }
        if self.flags.contains(ConnFlags::ECN) {
            self.update_ecn_echo(segment);
        }
        let payload_end = segment.seq + segment.payload.len() as u32;
        if self.flags.contains(ConnFlags::ORPHAN)
            && self.listener.is_none()
            && !segment.payload.is_empty()
            && payload_end.is_after(self.receive.nxt)
        {
            // RFC 9293 section 3.10.4: data after close is answered with a reset.
            self.abort(shared, Some(Failure::Reset), true);
            return Ok(());
        }
        let window = self.receive.data_end().since(segment.seq) as usize;
        let fits = segment.payload.len().min(window);
        if fits > 0 && self.accept_payload(now_ns, segment.seq, &segment.payload[..fits], shared)? {
            self.accept_fin(now_ns, shared);
        } else if fits < segment.payload.len() {
            // The rest lies beyond the window.
            self.acknowledge_now();
        } else if segment.is_fin() && self.receive.nxt == payload_end {
            self.accept_fin(now_ns, shared);
        } else if segment.is_fin() && payload_end.is_after(self.receive.nxt) {
            self.receive.take_fin_out_of_order(payload_end, shared);
            self.acknowledge_now();
        }
        if self.flags.contains(ConnFlags::READ_SHUT) && self.readable() > 0 {
            let unread = self.readable() as usize;
            self.consume(unread, shared);
        }
        Ok(())
    }

    /// Records congestion marks to echo and the peer's CWR (RFC 3168 section 6.1.3).
    fn update_ecn_echo(&mut self, segment: &Segment<'_>) {
        if segment.flags.contains(TcpFlags::CWR) {
            self.flags.remove(ConnFlags::SEND_ECE);
        }
        if segment.congestion_experienced {
            self.flags.insert(ConnFlags::SEND_ECE);
        }
    }
}

/// Flags of a SYN by which both sides agree on ECN.
const ECN_BITS: TcpFlags = TcpFlags(TcpFlags::ECE.0 | TcpFlags::CWR.0);

/// The flags of a segment without SYN, and without the ECN bits, which say something else in other
/// segments.
fn without_syn(segment: &Segment<'_>) -> TcpFlags {
    TcpFlags(segment.flags.0 & !(TcpFlags::SYN.0 | ECN_BITS.0))
}
