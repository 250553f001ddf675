//! Segment processing of a connection, in the order of RFC 9293 section 3.10.7,
//! with the checks of RFC 5961 and RFC 7323 in their places.

use tidegate_wire::DropReason;
use tidegate_wire::tcp::TcpFlags;

use super::connection::{ConnFlags, Connection, NEVER, RtxTimer, TcpShared};
use super::recovery::RecoveryPhase;
use super::segment::{OutSegment, Segment};
use super::seq::Seq;
use super::socket::{Failure, TcpState};

/// Rate limit of challenge ACKs: burst size, and milliseconds for each in the long run
/// (RFC 5961 section 7: ten in five seconds).
///
/// The limit is per connection: a shared counter would let an attacker learn about other
/// connections.
const CHALLENGE_BURST: u32 = 10;
const CHALLENGE_INTERVAL_MS: u32 = 500;

/// Age in seconds from which TS.Recent is no longer valid (RFC 7323 section 5.5).
const MAX_TS_RECENT_AGE_S: u32 = 24 * 24 * 3600;

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
    pub(crate) fn on_segment(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        may_establish: bool,
        outcome: &mut SegmentOutcome,
        shared: &mut TcpShared,
    ) -> Result<(), DropReason> {
        match self.state {
            TcpState::Closed => return Err(DropReason::TcpNoSocket),
            TcpState::SynSent => {
                if !self.on_segment_in_syn_sent(now_ns, segment, outcome, shared)? {
                    return Ok(());
                }
            }
            _ => {
                let Some(segment) = self.check_segment(now_ns, segment, shared)? else {
                    return Ok(());
                };
                let in_syn_received = self.state == TcpState::SynReceived;
                if in_syn_received && !may_establish {
                    return Err(DropReason::TcpAcceptQueueFull);
                }
                self.check_ack(now_ns, &segment, outcome, shared)?;
                return self.process_payload(now_ns, &segment, shared);
            }
        }
        let segment = Segment { seq: segment.seq + 1, flags: without_syn(segment), ..*segment };
        self.process_payload(now_ns, &segment, shared)
    }

    /// Processes a segment in SYN-SENT (RFC 9293 section 3.10.7.3). Returns true when its
    /// payload is to be processed too.
    fn on_segment_in_syn_sent(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        outcome: &mut SegmentOutcome,
        shared: &mut TcpShared,
    ) -> Result<bool, DropReason> {
        let acceptable = segment.is_ack()
            && segment.ack.is_after(self.una)
            && segment.ack.is_at_or_before(self.nxt);
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
        self.begin_receiving(segment.seq);
        // The window that our SYN announced.
        self.rcv_edge += self.options.receive_buffer_bytes.min(u16::MAX.into());
        self.apply_syn_options(now_ns, segment);
        self.update_send_window(segment, false);
        self.last_received_ns = now_ns;
        if !acceptable {
            // Simultaneous open (RFC 9293 section 3.5, figure 8).
            self.state = TcpState::SynReceived;
            self.flags.remove(ConnFlags::ECN);
            self.acknowledge_now();
            return Ok(false);
        }
        self.flags.set(
            ConnFlags::ECN,
            self.flags.contains(ConnFlags::ECN)
                && segment.flags.contains(TcpFlags::ECE)
                && !segment.flags.contains(TcpFlags::CWR),
        );
        self.on_ack(now_ns, segment, false, shared);
        self.establish(now_ns, outcome);
        self.acknowledge_now();
        Ok(true)
    }

    /// Applies the options of a SYN (RFC 9293 section 3.7.1, RFC 7323 sections 2.2 and 3.2,
    /// RFC 2018 section 2).
    pub(crate) fn apply_syn_options(&mut self, now_ns: u64, segment: &Segment<'_>) {
        let options = &segment.options;
        self.set_peer_mss(options.mss);
        self.flags.set(ConnFlags::SACK, options.sack_permitted);
        self.flags.set(ConnFlags::TIMESTAMPS, options.timestamps.is_some());
        if let Some((value, _)) = options.timestamps {
            (self.ts_recent, self.ts_recent_s) = (value, whole_seconds(now_ns));
        }
        match options.window_shift {
            Some(shift) => self.peer_window_shift = shift,
            None => (self.peer_window_shift, self.own_window_shift) = (0, 0),
        }
        self.set_mtu(usize::from(u16::MAX));
        self.controller.set_mss(self.mss.into());
        if self.flags.contains(ConnFlags::SYN_RETRANSMITTED) {
            // RFC 5681 section 3.1: after a lost SYN the initial window is one segment.
            self.controller.window.cwnd = self.mss.into();
        }
    }

    /// Enters ESTABLISHED, or FIN-WAIT-1 when a FIN is already queued.
    pub(crate) fn establish(&mut self, now_ns: u64, outcome: &mut SegmentOutcome) {
        self.state = TcpState::Established;
        self.phase = RecoveryPhase::Open;
        self.rtt.lost_syn = self.flags.contains(ConnFlags::SYN_RETRANSMITTED);
        self.retries = 0;
        self.rtx_timer = RtxTimer::Off;
        self.flags.insert(ConnFlags::NOTIFY_WRITABLE);
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
        self.start_keepalive(now_ns);
        if self.flags.contains(ConnFlags::FIN_QUEUED) {
            self.state = TcpState::FinWait1;
        }
        outcome.established = true;
    }

    /// Starts the keep-alive timer, if keep-alive is enabled (RFC 9293 section 3.8.4).
    pub(crate) fn start_keepalive(&mut self, now_ns: u64) {
        if let Some(keepalive) = self.options.keepalive {
            self.idle_deadline_ns = now_ns.saturating_add(u64::from(keepalive.idle_ms) * 1_000_000);
        }
    }

    /// Applies PAWS and the first four checks of RFC 9293 section 3.10.7.4: sequence number, RST,
    /// security (none), SYN. Returns the segment to go on with; `None` when it needs no further
    /// processing.
    fn check_segment<'s>(
        &mut self,
        now_ns: u64,
        segment: &Segment<'s>,
        shared: &mut TcpShared,
    ) -> Result<Option<Segment<'s>>, DropReason> {
        let mut segment = *segment;
        // A SYN-ACK for our SYN after we answered the peer's SYN: simultaneous open.
        if self.state == TcpState::SynReceived
            && segment.is_syn()
            && segment.seq + 1 == self.rcv_nxt
        {
            if !segment.is_ack() {
                // Our SYN-ACK was lost.
                self.acknowledge_now();
                return Ok(None);
            }
            (segment.seq, segment.flags) = (self.rcv_nxt, without_syn(&segment));
        }
        self.check_timestamps(now_ns, &segment, shared)?;
        self.check_sequence(now_ns, &segment, shared)?;
        if segment.is_rst() {
            return self.process_reset(now_ns, &segment, shared).map(|()| None);
        }
        if segment.is_syn() {
            if self.state == TcpState::SynReceived && self.flags.contains(ConnFlags::PASSIVE) {
                // Fourth check, passive open: the connection returns to LISTEN.
                self.abort(shared, None, false);
                return Err(DropReason::TcpFlags);
            }
            // RFC 5961 section 4.2.
            self.send_challenge_ack(now_ns);
            return Err(DropReason::TcpFlags);
        }
        if !segment.is_ack() {
            return Err(DropReason::TcpFlags);
        }
        self.update_ts_recent(now_ns, &segment);
        Ok(Some(segment))
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
        let is_old = Seq(value).is_before(Seq(self.ts_recent));
        if is_old && whole_seconds(now_ns).wrapping_sub(self.ts_recent_s) < MAX_TS_RECENT_AGE_S {
            self.acknowledge_unacceptable(now_ns, segment, shared);
            return Err(DropReason::TcpPaws);
        }
        Ok(())
    }

    /// Updates TS.Recent (RFC 7323 section 4.3, (2)).
    fn update_ts_recent(&mut self, now_ns: u64, segment: &Segment<'_>) {
        if let Some((value, _)) =
            segment.options.timestamps.filter(|_| self.flags.contains(ConnFlags::TIMESTAMPS))
            && segment.seq.is_at_or_before(self.last_ack_sent)
            && Seq(self.ts_recent).is_at_or_before(Seq(value))
        {
            (self.ts_recent, self.ts_recent_s) = (value, whole_seconds(now_ns));
        }
    }

    /// Checks that the segment is acceptable (RFC 9293 section 3.10.7.4, first: table 6).
    fn check_sequence(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        shared: &TcpShared,
    ) -> Result<(), DropReason> {
        let edge = self.rcv_edge;
        let first_in = self.rcv_nxt.is_at_or_before(segment.seq) && segment.seq.is_before(edge);
        let len = segment.len();
        let acceptable = if len == 0 {
            // RFC 9293 allows the number right behind the window too when the window is closed.
            // Peers also use that number when the window is open and full.
            first_in || segment.seq == self.rcv_nxt || segment.seq == edge
        } else {
            let last = segment.end() - 1;
            let last_in = self.rcv_nxt.is_at_or_before(last) && last.is_before(edge);
            // Data at the edge of a closed window is not accepted, but its acknowledgement is
            // (section 3.10.7.4: "special allowance").
            first_in
                || last_in
                || segment.seq == self.rcv_nxt
                || segment.seq.is_before(self.rcv_nxt) && !segment.end().is_before(edge)
        };
        if acceptable {
            return Ok(());
        }
        if segment.is_rst() {
            return Err(DropReason::TcpReset);
        }
        let is_old = segment.end().is_at_or_before(self.rcv_nxt);
        self.acknowledge_unacceptable(now_ns, segment, shared);
        Err(if is_old { DropReason::TcpDuplicate } else { DropReason::TcpSequence })
    }

    /// Answers an unacceptable segment with the current acknowledgement. Duplicate data is
    /// acknowledged each time, since our acknowledgement may have been lost; anything else is
    /// rate-limited.
    fn acknowledge_unacceptable(&mut self, now_ns: u64, segment: &Segment<'_>, shared: &TcpShared) {
        if self.state == TcpState::TimeWait && segment.is_fin() {
            // A retransmitted FIN restarts TIME-WAIT (RFC 9293 section 3.10.7.4, eighth).
            self.idle_deadline_ns = now_ns.saturating_add(shared.time_wait_ns);
        }
        if self.state == TcpState::TimeWait || segment.len() > 0 {
            let end = segment.end().min(self.rcv_nxt);
            if segment.end().is_at_or_before(self.rcv_nxt) && !segment.payload.is_empty() {
                return self.record_dsack_range(segment.seq, end);
            }
            if segment.end().is_at_or_before(self.rcv_nxt) {
                return self.acknowledge_now();
            }
        }
        // The sequence number of a keep-alive probe is RCV.NXT - 1.
        if segment.seq + 1 == self.rcv_nxt {
            return self.acknowledge_now();
        }
        self.send_challenge_ack(now_ns);
    }

    /// Queues a challenge ACK, within the rate limit of the connection (RFC 5961 section 7).
    pub(crate) fn send_challenge_ack(&mut self, now_ns: u64) {
        // Each challenge ACK moves the due time of the next one by the interval. The due time may
        // lie ahead of now by at most the burst.
        let now_ms = (now_ns / 1_000_000) as u32;
        let ahead_ms = self.challenge_due_ms.wrapping_sub(now_ms);
        let is_ahead = ahead_ms <= CHALLENGE_BURST * CHALLENGE_INTERVAL_MS;
        let ahead_ms = if is_ahead { ahead_ms } else { 0 };
        if ahead_ms + CHALLENGE_INTERVAL_MS <= CHALLENGE_BURST * CHALLENGE_INTERVAL_MS {
            self.challenge_due_ms = now_ms.wrapping_add(ahead_ms + CHALLENGE_INTERVAL_MS);
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
        if segment.seq != self.rcv_nxt {
            self.send_challenge_ack(now_ns);
            return Err(DropReason::TcpReset);
        }
        if self.state == TcpState::TimeWait {
            // RFC 1337: a reset does not end TIME-WAIT early.
            return Err(DropReason::TcpReset);
        }
        let failure = match self.state {
            TcpState::SynReceived if !self.flags.contains(ConnFlags::PASSIVE) => Failure::Refused,
            TcpState::Closing | TcpState::LastAck => Failure::AlreadyClosed,
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
            let acceptable =
                segment.ack.is_after(self.una) && segment.ack.is_at_or_before(self.nxt);
            if !acceptable {
                outcome.reply = segment.reset(self.tuple);
                return Ok(());
            }
            self.update_send_window(segment, true);
            self.establish(now_ns, outcome);
            self.last_received_ns = now_ns;
            self.on_ack(now_ns, segment, false, shared);
            return Ok(());
        }
        let oldest = self.una - self.max_window;
        if segment.ack.is_before(oldest) || segment.ack.is_after(self.nxt) {
            self.send_challenge_ack(now_ns);
            return Err(DropReason::TcpAckInvalid);
        }
        self.last_received_ns = now_ns;
        self.keepalive_probes_sent = 0;
        if segment.ack.is_before(self.una) {
            return Ok(());
        }
        let before = self.window;
        self.update_send_window(segment, true);
        // Duplicate acknowledgement as RFC 5681 section 2 defines it.
        let duplicate = segment.ack == self.una
            && self.una != self.nxt
            && segment.len() == 0
            && before == self.window
            // Answers to window probes do not signal loss.
            && self.window > 0;
        if self.rtx_timer == RtxTimer::Persist {
            // An answer shows that the peer is alive, however long its window stays closed.
            self.retries = 0;
        }
        if before == 0 && self.window > 0 && self.rtx_timer == RtxTimer::Persist {
            self.on_window_reopened(segment.ack);
        }
        self.on_ack(now_ns, segment, duplicate, shared);
        self.on_fin_acknowledged(now_ns, shared);
        Ok(())
    }

    /// Retransmits at once the segment that was sent into the closed window.
    fn on_window_reopened(&mut self, ack: Seq) {
        self.rtt.backoff = 0;
        self.rtx_timer = RtxTimer::Off;
        if ack == self.una
            && let Some(flight) = &mut self.flight
        {
            flight.mark_first_lost();
            self.flags.insert(ConnFlags::FORCE_RETRANSMISSION);
        }
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
    }

    /// Updates SND.WND, only from newer segments (RFC 9293 section 3.10.7.4). The window of a SYN
    /// is not `scaled`.
    fn update_send_window(&mut self, segment: &Segment<'_>, scaled: bool) {
        let is_newer = self.window_seq.is_before(segment.seq)
            || self.window_seq == segment.seq && self.window_ack.is_at_or_before(segment.ack);
        if scaled && !is_newer && self.is_synchronized() {
            return;
        }
        let shift = if scaled { self.peer_window_shift } else { 0 };
        let window = u32::from(segment.window) << shift;
        if window > self.window && self.may_have_output() {
            self.flags.insert(ConnFlags::WANTS_OUTPUT);
        }
        self.window = window;
        self.max_window = self.max_window.max(window);
        (self.window_seq, self.window_ack) = (segment.seq, segment.ack);
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
                (self.rtx_deadline_ns, self.ack_deadline_ns, self.idle_deadline_ns) =
                    (NEVER, NEVER, NEVER);
            }
            _ => {}
        }
    }

    /// Limits FIN-WAIT-2 of an orphaned connection: no application is left to read what the peer
    /// sends.
    pub(crate) fn start_orphan_timer(&mut self, now_ns: u64, shared: &TcpShared) {
        self.idle_deadline_ns = now_ns.saturating_add(shared.fin_wait_2_ns);
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
            && payload_end.is_after(self.rcv_nxt)
        {
            // RFC 9293 section 3.10.4: data after close is answered with a reset.
            self.abort(shared, Some(Failure::Reset), true);
            return Ok(());
        }
        let window = self.rcv_edge.since(segment.seq) as usize;
        let fits = segment.payload.len().min(window);
        if fits > 0 {
            self.accept_payload(now_ns, segment.seq, &segment.payload[..fits], shared)?;
        }
        if fits < segment.payload.len() {
            // The rest lies beyond the window.
            self.acknowledge_now();
        } else if segment.is_fin() && self.rcv_nxt == payload_end {
            self.accept_fin(now_ns, shared);
        } else if segment.is_fin() && payload_end.is_after(self.rcv_nxt) {
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

/// The time in whole seconds, wrapping: precise enough for the age of time stamps.
pub(crate) fn whole_seconds(now_ns: u64) -> u32 {
    (now_ns / 1_000_000_000) as u32
}

/// The flags of a segment without SYN.
fn without_syn(segment: &Segment<'_>) -> TcpFlags {
    TcpFlags(segment.flags.0 & !TcpFlags::SYN.0)
}
