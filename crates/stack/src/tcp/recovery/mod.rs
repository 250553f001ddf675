//! Loss detection and recovery of a connection: scoreboard, round trip, congestion window (RFC
//! 6298, RFC 5681, RFC 6582, RFC 6675, RFC 6937, RFC 8985).

mod delivery;
mod flight;
mod mtu_search;
mod pacing;
mod rtt;
mod sacked;
mod undo;

pub(crate) use flight::{AckArrival, AckProgress, Flight, FlightSnapshot, SentSegment};

use tidegate_wire::tcp::{SackBlocks, TcpFlags};

use flight::PrrState;
use mtu_search::MtuSearch;
use rtt::{RttEstimator, RttSnapshot};
use undo::Undo;

use super::buffers::TcpShared;
use super::congestion::{AckInfo, CongestionControl, CongestionController, ControllerSnapshot};
use super::flags::ConnFlags;
use super::segment::Segment;
use super::send::SendState;
use super::seq::Seq;
pub(crate) use super::socket::RecoveryPhase;
use super::timers::{Timers, age_ns};

/// Duplicate acknowledgements that signal a loss (RFC 5681 section 3.2).
const DUP_ACK_THRESHOLD: u8 = 3;

/// Recovery variables of a connection.
pub(crate) struct Recovery {
    /// Segments sent and not acknowledged; `None` when there are none.
    pub(crate) flight: Option<Box<Flight>>,
    /// State that is needed only after losses.
    after_loss: Option<Box<AfterLoss>>,
    pub(crate) rtt: RttEstimator,
    pub(crate) controller: CongestionController,
    pub(crate) phase: RecoveryPhase,
    pub(crate) duplicate_acks: u8,
    /// Multiplier of the reordering window; grows with each D-SACK (RFC 8985 section 6.2).
    reordering_steps: u8,
    /// Consecutive retransmissions without progress.
    pub(crate) retries: u8,
    /// Sequence number whose acknowledgement ends recovery.
    end: Seq,
    /// No further reduction for congestion marks until this number is acknowledged.
    cwr_end: Seq,
}

/// State of a connection that is needed only after losses.
#[derive(Debug, Default)]
struct AfterLoss {
    /// Search for a larger path MTU (PLPMTUD, RFC 4821).
    mtu_search: Option<MtuSearch>,
    /// State before the last recovery, which may turn out to be needless.
    undo: Option<Undo>,
}

/// Snapshot of a [`Recovery`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct RecoverySnapshot {
    pub(crate) flight: Option<FlightSnapshot>,
    pub(crate) searches_mtu: bool,
    rtt: RttSnapshot,
    controller: ControllerSnapshot,
    phase: RecoveryPhase,
    end: Seq,
    pub(crate) probe_end: Seq,
    cwr_end: Seq,
    duplicate_acks: u8,
    reordering_steps: u8,
    retries: u8,
    pub(crate) stalled_age_ns: u64,
    pub(crate) rto_base_age_ns: u64,
}

/// Effect of an acknowledgement on the congestion state that the connection acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CongestionChange {
    /// None beyond the window.
    None,
    /// Fast recovery begins: retransmit at once, and tell a peer with ECN.
    Recovery,
    /// A congestion mark reduced the window: tell the peer (RFC 3168 section 6.1.2).
    Marked,
}

impl Recovery {
    /// Nothing is sent yet; `iss` is the initial sequence number.
    pub(crate) fn new(kind: CongestionControl, default_mss: u16, iss: Seq) -> Self {
        Self {
            flight: None,
            after_loss: None,
            rtt: RttEstimator::default(),
            controller: CongestionController::new(kind, default_mss.into()),
            phase: RecoveryPhase::Open,
            duplicate_acks: 0,
            reordering_steps: 1,
            retries: 0,
            end: iss,
            cwr_end: iss,
        }
    }

    /// Bytes marked lost and not retransmitted since.
    #[inline]
    pub(crate) fn lost_bytes(&self) -> u32 {
        self.flight.as_ref().map_or(0, |flight| flight.lost_bytes())
    }

    /// True while segments are in flight.
    #[inline]
    pub(crate) fn has_flight(&self) -> bool {
        self.flight.as_ref().is_some_and(|flight| !flight.is_empty())
    }

    /// Time of transmission of the oldest segment in flight, when none was lost or sent again and no
    /// recovery is in progress or may be undone.
    #[inline(always)]
    pub(crate) fn undisturbed_since_ns(&self) -> Option<u64> {
        let flight = self.flight.as_ref()?;
        flight.undisturbed_since_ns().filter(|_| self.is_undisturbed())
    }

    /// True if no recovery is in progress or may be undone.
    #[inline]
    pub(crate) fn is_undisturbed(&self) -> bool {
        self.phase == RecoveryPhase::Open && self.after_loss.is_none()
    }

    /// Estimate of the bytes in flight (RFC 6675, pipe). `sack`: both sides use SACK.
    #[inline]
    pub(crate) fn pipe(&self, send: &SendState, sack: bool) -> u32 {
        let pipe = self.flight.as_ref().map_or(0, |flight| flight.pipe(send.outstanding()));
        // Without SACK, each duplicate acknowledgement means that one segment has arrived
        // (RFC 6582 section 3.2 step 3).
        let arrived = if sack { 0 } else { u32::from(self.duplicate_acks) };
        pipe.saturating_sub(arrived * u32::from(send.mss))
    }

    /// Marks the first segment in flight lost; false when there is none.
    pub(crate) fn mark_first_lost(&mut self) -> bool {
        let flight = self.flight.as_mut();
        flight.map(|flight| flight.mark_first_lost()).is_some()
    }

    /// Marks all segments lost that the peer is not known to have. After a second time-out its
    /// selective acknowledgements no longer count.
    pub(crate) fn mark_all_lost(&mut self) {
        let distrust = self.retries > 1;
        let Some(flight) = &mut self.flight else { return };
        let had_sacked = flight.has_sacked();
        flight.mark_all_lost(distrust);
        if had_sacked && !flight.has_sacked() {
            // What arrived before the time-out would look like late arrivals.
            self.end_frto();
        }
    }

    /// Processes the blocks of a SACK option that came with the acknowledgement `ack`. Invalid blocks are ignored (RFC 2018 section 5
    /// leaves no other use).
    pub(crate) fn process_sack(
        &mut self,
        arrival: &AckArrival,
        blocks: SackBlocks<'_>,
        ack: Seq,
        send: &SendState,
        progress: &mut AckProgress,
    ) {
        let mut first = None;
        for (index, (start, end)) in blocks.enumerate() {
            let (start, end) = (Seq(start), Seq(end));
            if !start.is_before(end) || end.is_after(send.nxt) {
                continue;
            }
            // RFC 2883 section 4: the first block reports a duplicate if it lies below the
            // acknowledgement or inside the second block.
            match (index, first) {
                (0, _) if end.is_at_or_before(ack) => {
                    progress.dsack = Some((start, end));
                    continue;
                }
                (0, _) => first = Some((start, end)),
                (1, Some((inner_start, inner_end)))
                    if start.is_at_or_before(inner_start) && inner_end.is_at_or_before(end) =>
                {
                    progress.dsack = Some((inner_start, inner_end));
                }
                _ => {}
            }
            if let Some(flight) = self.flight.as_mut().filter(|_| end.is_after(send.una)) {
                flight.sack(arrival, start, end, progress);
            }
        }
        if progress.dsack.is_some() {
            self.widen_reordering_window(send);
        }
    }

    /// Widens the reordering window after a duplicate range, at most once in a round trip
    /// (RFC 8985 section 6.2 step 4).
    fn widen_reordering_window(&mut self, send: &SendState) {
        if let Some(flight) = &mut self.flight {
            if flight.dsack_round_end.is_some_and(|end| send.una.is_before(end)) {
                return;
            }
            flight.dsack_round_end = Some(send.nxt);
        }
        self.reordering_steps = self.reordering_steps.saturating_add(1).min(16);
    }

    /// Reordering window in nanoseconds (RFC 8985 section 6.2 step 4).
    #[inline]
    fn reordering_ns(&self, reordering_seen: bool) -> u64 {
        let sacked = self.flight.as_ref().map_or(0, |flight| flight.sacked_segments());
        if !reordering_seen
            && (self.phase != RecoveryPhase::Open || sacked >= u32::from(DUP_ACK_THRESHOLD))
        {
            return 0;
        }
        let window_ns = self.rtt.min_ns() / 4 * u64::from(self.reordering_steps);
        window_ns.min(self.rtt.smoothed_ns().unwrap_or(0))
    }

    /// Marks segments lost by RACK (RFC 8985 section 6.2 step 5).
    #[inline]
    pub(crate) fn detect_lost(&mut self, now_ns: u64, reordering_seen: bool) {
        if !self.has_flight() {
            return;
        }
        let reordering_ns = self.reordering_ns(reordering_seen);
        let Some(flight) = &mut self.flight else { return };
        flight.reorder_deadline_ns = flight.detect_lost(now_ns, reordering_ns).unwrap_or(0);
    }

    /// Counts duplicate acknowledgements of peers without SACK (RFC 6582). Each means that a
    /// segment was delivered, so the acknowledgement of that segment counts no second time.
    pub(crate) fn count_duplicate_acks(
        &mut self,
        ack: Seq,
        duplicate: bool,
        mss: u16,
        progress: &mut AckProgress,
    ) {
        progress.delivered = match duplicate {
            true => mss.into(),
            false => progress.acked.saturating_sub(u32::from(self.duplicate_acks) * u32::from(mss)),
        };
        let Some(flight) = &mut self.flight else {
            self.duplicate_acks = 0;
            return;
        };
        if duplicate {
            self.duplicate_acks = self.duplicate_acks.saturating_add(1);
            if self.duplicate_acks == DUP_ACK_THRESHOLD && self.phase == RecoveryPhase::Open {
                // Step 1: not for segments sent before the end of the last recovery.
                if !ack.is_before(self.end) {
                    flight.mark_first_lost();
                }
            }
        } else if progress.acked > 0 {
            match self.phase {
                // Step 3: a partial acknowledgement signals the next loss.
                RecoveryPhase::FastRecovery if ack.is_before(self.end) => {
                    flight.mark_first_lost();
                    let segments = progress.acked.div_ceil(mss.max(1).into());
                    let segments = u8::try_from(segments).unwrap_or(u8::MAX);
                    self.duplicate_acks =
                        self.duplicate_acks.saturating_sub(segments.saturating_sub(1));
                }
                _ => self.duplicate_acks = 0,
            }
        }
    }

    /// Updates phase and congestion window after an acknowledgement. `outstanding` sequence numbers
    /// were in flight before it.
    #[inline]
    pub(crate) fn update_congestion_state(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        send: &SendState,
        flags: ConnFlags,
        outstanding: u32,
        progress: &AckProgress,
    ) -> CongestionChange {
        let mss = u32::from(send.mss);
        let has_loss = self.lost_bytes() > 0 && !self.lost_only_mtu_probe();
        let marked = flags.contains(ConnFlags::ECN)
            && segment.flags.contains(TcpFlags::ECE)
            && !segment.is_syn()
            && self.phase == RecoveryPhase::Open
            && !send.una.is_before(self.cwr_end);
        let mut change = CongestionChange::None;
        match self.phase {
            RecoveryPhase::Open if has_loss => {
                self.enter_fast_recovery(send, outstanding);
                change = CongestionChange::Recovery;
            }
            RecoveryPhase::Open if marked => {
                // RFC 3168 section 6.1.2: at most once per round trip, as for a loss.
                self.controller.on_congestion(outstanding, mss);
                self.controller.end_recovery();
                self.cwr_end = send.nxt;
                // What the mark asks for must not be undone (RFC 4015 section 3).
                self.forget_undo();
                change = CongestionChange::Marked;
            }
            RecoveryPhase::Open | RecoveryPhase::Loss if progress.acked > 0 => {
                let limited =
                    flags.contains(ConnFlags::WINDOW_LIMITED) || self.phase == RecoveryPhase::Loss;
                self.grow_window(now_ns, send, progress.acked, progress.rtt_ns, limited);
            }
            _ => {}
        }
        if self.phase != RecoveryPhase::Open && !send.una.is_before(self.end) {
            if self.phase == RecoveryPhase::FastRecovery {
                self.controller.end_recovery();
            }
            self.phase = RecoveryPhase::Open;
            self.duplicate_acks = 0;
        } else if self.phase == RecoveryPhase::FastRecovery {
            self.reduce_rate(send, flags.contains(ConnFlags::SACK), progress);
        }
        change
    }

    /// Grows the window after an acknowledgement of `bytes` new bytes outside of fast recovery,
    /// unless it did not limit transmission. `sample_ns`: round-trip time of the acknowledged
    /// segment, if it was sent once.
    #[inline(always)]
    pub(crate) fn grow_window(
        &mut self,
        now_ns: u64,
        send: &SendState,
        bytes: u32,
        sample_ns: Option<u64>,
        limited: bool,
    ) {
        if !limited {
            return self.controller.pause_growth();
        }
        let mss = u32::from(send.mss);
        // RFC 3465 section 2.3: after a time-out, one segment for each acknowledgement.
        let limit = if self.phase == RecoveryPhase::Loss { mss } else { u32::MAX };
        self.controller.on_ack(&AckInfo {
            bytes: bytes.min(limit),
            mss,
            now_ns,
            rtt_ns: self.rtt.smoothed_ns().unwrap_or(0),
            sample_ns,
            una: send.una,
            nxt: send.nxt,
        });
    }

    /// Begins fast recovery, with `outstanding` sequence numbers in flight.
    pub(crate) fn enter_fast_recovery(&mut self, send: &SendState, outstanding: u32) {
        self.begin_undo(send.una, send.nxt);
        self.controller.on_congestion(outstanding, send.mss.into());
        self.phase = RecoveryPhase::FastRecovery;
        if let Some(flight) = &mut self.flight {
            flight.prr = PrrState { flight: outstanding.max(1), delivered: 0, sent: 0 };
        }
        self.end = send.nxt;
        self.cwr_end = send.nxt;
    }

    /// Begins recovery after a time-out, with `outstanding` sequence numbers in flight. Returns to
    /// slow start. `sack`: both sides use SACK.
    pub(crate) fn enter_loss(&mut self, send: &SendState, outstanding: u32, sack: bool) {
        if self.phase == RecoveryPhase::Open {
            self.begin_undo(send.una, send.nxt);
            if sack && !self.has_mtu_probe() {
                self.begin_frto();
            }
        } else if self.prefers_new_data() {
            // RFC 5682 section 3.1 step 1: a second time-out is no longer watched.
            self.end_frto();
        }
        let is_first = self.phase != RecoveryPhase::Loss;
        self.controller.on_timeout(outstanding, send.mss.into(), is_first);
        self.on_mtu_probe_timeout();
        self.begin_loss_phase(send);
    }

    /// Begins the phase after a time-out: of a handshake, without congestion response.
    pub(crate) fn begin_loss_phase(&mut self, send: &SendState) {
        self.phase = RecoveryPhase::Loss;
        self.end = send.nxt;
        self.reordering_steps = 1;
        self.duplicate_acks = 0;
    }

    /// Sets the congestion window by proportional rate reduction (RFC 6937 section 3.1).
    fn reduce_rate(&mut self, send: &SendState, sack: bool, progress: &AckProgress) {
        let pipe = self.pipe(send, sack);
        let mss = u32::from(send.mss);
        let ssthresh = self.controller.window.ssthresh;
        let Some(flight) = &mut self.flight else { return };
        let PrrState { flight, delivered, sent } = &mut flight.prr;
        let newly_delivered = progress.delivered;
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
    #[inline]
    pub(crate) fn count_sent(&mut self, bytes: u32) {
        if let Some(flight) = &mut self.flight {
            flight.prr.sent = flight.prr.sent.saturating_add(bytes);
        }
    }

    /// A tail probe has repaired a loss that nothing else has detected.
    pub(crate) fn on_tail_probe_repair(&mut self, outstanding: u32, mss: u16) {
        if self.phase == RecoveryPhase::Open {
            self.forget_undo();
            self.controller.on_congestion(outstanding, mss.into());
            self.controller.end_recovery();
        }
    }

    /// Returns an empty scoreboard for reuse.
    #[inline]
    pub(crate) fn recycle_empty_flight(&mut self, shared: &mut TcpShared) {
        if self.flight.as_ref().is_some_and(|flight| flight.is_empty()) {
            self.release(shared);
        }
    }

    /// Returns the scoreboard for reuse.
    pub(crate) fn release(&mut self, shared: &mut TcpShared) {
        if let Some(flight) = self.flight.take() {
            shared.recycle_flight(flight);
        }
    }

    /// Takes a snapshot.
    pub(crate) fn save(&self, now_ns: u64, send: &SendState, timers: &Timers) -> RecoverySnapshot {
        let in_flight = self.flight.as_ref().filter(|flight| !flight.is_empty());
        RecoverySnapshot {
            flight: in_flight.map(|flight| flight.save(now_ns)),
            searches_mtu: self.mtu_search().is_some(),
            rtt: self.rtt.save(now_ns),
            controller: self.controller.save(),
            phase: self.phase,
            end: self.end,
            probe_end: send.tail_probe_end,
            cwr_end: self.cwr_end,
            duplicate_acks: self.duplicate_acks,
            reordering_steps: self.reordering_steps,
            retries: self.retries,
            stalled_age_ns: age_ns(now_ns, timers.stalled_since_ns),
            rto_base_age_ns: age_ns(now_ns, timers.rto_base_ns),
        }
    }

    /// Restores a snapshot, except for its scoreboard.
    pub(crate) fn restore(
        now_ns: u64,
        saved: &RecoverySnapshot,
        kind: CongestionControl,
        send: &SendState,
    ) -> Self {
        let mut recovery = Self {
            flight: None,
            after_loss: None,
            rtt: RttEstimator::restore(now_ns, &saved.rtt),
            controller: CongestionController::restore(kind, send.mss.into(), &saved.controller),
            phase: saved.phase,
            duplicate_acks: saved.duplicate_acks,
            reordering_steps: saved.reordering_steps.clamp(1, 16),
            retries: saved.retries,
            end: saved.end,
            cwr_end: saved.cwr_end,
        };
        if saved.searches_mtu {
            recovery.begin_mtu_search(now_ns, send.una);
        }
        recovery
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::options::ParsedOptions;

    const MS: u64 = 1_000_000;

    /// Ten segments of 1000 bytes in flight, sent one a millisecond from 1 ms on.
    fn in_flight() -> (Recovery, SendState) {
        let mut send = SendState::new(Seq(999), 0, 1000);
        (send.una, send.nxt, send.mss) = (Seq(1000), Seq(11_000), 1000);
        let mut recovery = Recovery::new(CongestionControl::NewReno, 1000, Seq(999));
        let mut flight = Box::<Flight>::default();
        for n in 0..10 {
            let (start, sent_ns) = (Seq(1000 + n * 1000), u64::from(n + 1) * MS);
            flight.push(SentSegment::new(start, start + 1000, sent_ns, false, false));
        }
        recovery.flight = Some(flight);
        (recovery, send)
    }

    fn ack(number: u32, flags: TcpFlags) -> Segment<'static> {
        Segment {
            seq: Seq(0),
            ack: Seq(number),
            flags,
            window: 0,
            options: ParsedOptions::default(),
            payload: &[],
            congestion_experienced: false,
        }
    }

    #[test]
    fn rfc6582_the_third_duplicate_acknowledgement_begins_recovery_once() {
        let (mut recovery, send) = in_flight();
        let segment = ack(1000, TcpFlags::ACK);
        let mut changes = Vec::new();
        for _ in 0..5 {
            let mut progress = AckProgress::default();
            recovery.count_duplicate_acks(segment.ack, true, send.mss, &mut progress);
            let outstanding = send.outstanding();
            let flags = ConnFlags::empty();
            changes.push(recovery.update_congestion_state(
                20 * MS,
                &segment,
                &send,
                flags,
                outstanding,
                &progress,
            ));
        }
        let began = changes.iter().position(|&change| change == CongestionChange::Recovery);
        assert_eq!((began, recovery.phase), (Some(2), RecoveryPhase::FastRecovery));
        assert_eq!(changes.iter().filter(|&&change| change != CongestionChange::None).count(), 1);
        assert_eq!(recovery.lost_bytes(), 1000);
    }

    #[test]
    fn recovery_ends_when_all_that_was_in_flight_is_acknowledged() {
        let (mut recovery, mut send) = in_flight();
        recovery.enter_fast_recovery(&send, send.outstanding());
        let progress = AckProgress { acked: 9000, ..AckProgress::default() };
        for (una, phase) in [(10_000, RecoveryPhase::FastRecovery), (11_000, RecoveryPhase::Open)] {
            send.una = Seq(una);
            let segment = ack(una, TcpFlags::ACK);
            recovery.update_congestion_state(
                20 * MS,
                &segment,
                &send,
                ConnFlags::SACK,
                1000,
                &progress,
            );
            assert_eq!(recovery.phase, phase, "{una}");
        }
    }

    #[test]
    fn rfc7661_only_a_window_that_limits_transmission_grows() {
        for (limited, cwnd) in [(false, 10_000), (true, 20_000)] {
            let (mut recovery, send) = in_flight();
            recovery.grow_window(20 * MS, &send, 10_000, None, limited);
            assert_eq!(recovery.controller.window.cwnd, cwnd, "limited: {limited}");
        }
    }

    #[test]
    fn rfc3168_6_1_2_a_congestion_mark_counts_once_per_round_trip() {
        let (mut recovery, mut send) = in_flight();
        let marked = ack(2000, TcpFlags::ACK | TcpFlags::ECE);
        let progress = AckProgress { acked: 1000, ..AckProgress::default() };
        let mut changes = Vec::new();
        for una in [2000, 3000, 11_000] {
            send.una = Seq(una);
            changes.push(recovery.update_congestion_state(
                20 * MS,
                &marked,
                &send,
                ConnFlags::ECN,
                9000,
                &progress,
            ));
        }
        let [first, same_round_trip, next_round_trip] = changes[..] else { panic!() };
        assert_eq!(first, CongestionChange::Marked);
        assert_eq!(same_round_trip, CongestionChange::None);
        assert_eq!(next_round_trip, CongestionChange::Marked);
    }

    #[test]
    fn rfc8985_6_2_the_reordering_window_widens_once_per_round_trip() {
        let (mut recovery, mut send) = in_flight();
        let dsack = [0, 0, 0, 1, 0, 0, 0, 2];
        let mut steps = Vec::new();
        for una in [1000, 1000, 9000, 11_000] {
            send.una = Seq(una);
            let blocks = SackBlocks::parse(&dsack).unwrap();
            let mut progress = AckProgress::default();
            recovery.process_sack(&AckArrival::default(), blocks, send.una, &send, &mut progress);
            assert_eq!(progress.dsack, Some((Seq(1), Seq(2))));
            steps.push(recovery.reordering_steps);
        }
        assert_eq!(steps, [2, 2, 2, 3]);
    }

    #[test]
    fn rfc3465_2_3_an_acknowledgement_after_a_time_out_is_worth_one_segment() {
        let (mut recovery, mut send) = in_flight();
        recovery.enter_loss(&send, send.outstanding(), true);
        send.una = Seq(9000);
        let progress = AckProgress { acked: 8000, delivered: 8000, ..AckProgress::default() };
        let segment = ack(9000, TcpFlags::ACK);
        recovery.update_congestion_state(
            20 * MS,
            &segment,
            &send,
            ConnFlags::SACK,
            10_000,
            &progress,
        );
        assert_eq!(recovery.controller.window.cwnd, 2000);
    }

    #[test]
    fn rfc6582_3_2_each_duplicate_acknowledgement_takes_a_segment_off_the_pipe() {
        let (mut recovery, send) = in_flight();
        recovery.duplicate_acks = 2;
        assert_eq!((recovery.pipe(&send, false), recovery.pipe(&send, true)), (8000, 10_000));
    }
}
