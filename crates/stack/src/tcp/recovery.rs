//! What acknowledgements say about loss, and what runs out when none come:
//! RFC 6298, RFC 5681, RFC 6582, RFC 6675, RFC 6937, RFC 8985, RFC 3168.

pub(crate) use super::flight::{Flight, Progress, Reduction, Sent};

use serde::{Deserialize, Serialize};

use super::congestion::Acked;
use super::connection::{Connection, Is, NEVER, Shared, Wait};
use super::segment::Segment;
use super::seq::Seq;
use super::socket::{Failure, TcpState};
use tidegate_wire::tcp::TcpFlags;

/// Duplicate acknowledgements that tell of a loss (RFC 5681 section 3.2).
const DUPLICATES: u8 = 3;

/// The longest that a peer may wait before it acknowledges a lone segment
/// (RFC 8985 section 7.2, WCDelAckT).
const WORST_DELAYED_ACK_NS: u64 = 200_000_000;
/// A tail probe before there is a round trip to go by (RFC 8985 section 7.2).
const FIRST_PROBE_NS: u64 = 1_000_000_000;
/// How often to try (R2 of RFC 9293 section 3.8.3; about 15 minutes for data).
const DATA_RETRIES: u8 = 15;
/// At least three minutes for a SYN (RFC 9293 section 3.8.3).
const SYN_RETRIES: u8 = 7;
const SYN_ACK_RETRIES: u8 = 5;
/// How long what the application has closed may go without progress.
const ORPHAN_STALL_NS: u64 = 120_000_000_000;
/// After so many time-outs in a row the path may swallow large packets
/// (RFC 4821 section 7.7).
const BLACK_HOLE_RETRIES: u8 = 5;

/// Where the sender is in getting over a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// Nothing is missing.
    Open,
    /// Fast recovery, by proportional rate reduction (RFC 6937).
    Fast,
    /// The time-out ran out.
    Loss,
}

impl Connection {
    /// Bytes on their way.
    pub(crate) fn pipe(&self) -> u32 {
        let outstanding = self.nxt.since(self.una);
        let pipe = self.flight.as_ref().map_or(0, |flight| flight.pipe(outstanding));
        // Without SACK each duplicate says that one segment has arrived
        // (RFC 6582 section 3.2 step 3).
        let arrived = if self.is.contains(Is::SACK) { 0 } else { u32::from(self.duplicate_acks) };
        pipe.saturating_sub(arrived * u32::from(self.mss))
    }

    /// Takes the acknowledgement of a segment, whose number is known to be
    /// between SND.UNA and SND.NXT.
    pub(crate) fn acknowledged(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        duplicate: bool,
        shared: &mut Shared,
    ) {
        let outstanding = self.nxt.since(self.una);
        let mut progress = Progress::default();
        if self.flight.is_none() && segment.options.sack.is_none() {
            // Nothing is on its way, so nothing can be learnt.
            self.duplicate_acks = 0;
            return self.after_acknowledgement(now_ns);
        }
        if let Some(flight) = &mut self.flight {
            flight.acknowledge(now_ns, segment.ack, &mut progress);
        }
        self.una = self.una.max(segment.ack);
        self.take_sack(now_ns, segment, &mut progress);
        if let Some(rtt_ns) = progress.rtt_ns {
            self.rtt.sample(now_ns, rtt_ns);
        } else if progress.acked > 0 {
            self.rtt.backoff = 0;
        }
        if progress.reordered {
            self.is.insert(Is::REORDERING_SEEN);
        }
        if progress.acked > 0 {
            self.on_progress(now_ns, shared);
        }
        self.end_tail_probe(segment.ack, outstanding, duplicate, &progress);
        if self.is.contains(Is::SACK) {
            self.detect_lost(now_ns);
        } else {
            self.count_duplicates(segment.ack, duplicate, &progress);
        }
        self.react(now_ns, segment, outstanding, &progress);
        self.end_path_probe(now_ns);
        if self.flight.as_ref().is_some_and(|flight| flight.is_empty())
            && let Some(flight) = self.flight.take()
        {
            shared.give_flight(flight);
        }
        self.after_acknowledgement(now_ns);
    }

    /// Lets go out what may go out now, and sets the timers.
    fn after_acknowledgement(&mut self, now_ns: u64) {
        if self.may_have_output() {
            self.is.insert(Is::WANTS_OUTPUT);
        } else if !self.is.contains(Is::WANTS_OUTPUT) {
            // What goes out sets the timer by itself.
            self.arm(now_ns);
        }
    }

    /// Something new was acknowledged in order: drops it from the queue and
    /// starts the timers again (RFC 6298 section 5.3).
    fn on_progress(&mut self, now_ns: u64, shared: &mut Shared) {
        let bytes = self.una.since(self.send_base).min(self.outgoing_bytes);
        if bytes > 0 {
            let had_room = self.has_room();
            self.outgoing_bytes -= bytes;
            self.send_base += bytes;
            if self.outgoing_bytes == 0 {
                self.outgoing.clear(&mut shared.chunks);
            } else {
                self.outgoing.consume(&mut shared.chunks, bytes as usize);
            }
            // Writers are woken when a good part is free, not for each byte;
            // also those who only asked whether there is room, and wrote less.
            if (self.is.contains(Is::WRITE_BLOCKED) || !had_room) && self.has_room() {
                self.is.remove(Is::WRITE_BLOCKED);
                self.is.insert(Is::TELL_WRITABLE);
            }
        }
        self.retries = 0;
        self.soft_failure = None;
        (self.stalled_ns, self.rto_base_ns) = (now_ns, now_ns);
    }

    /// Reads the blocks of a selective acknowledgement. Those that cannot be
    /// are ignored (RFC 2018 section 5 leaves no other use).
    fn take_sack(&mut self, now_ns: u64, segment: &Segment<'_>, progress: &mut Progress) {
        let Some(blocks) = segment.options.sack.filter(|_| self.is.contains(Is::SACK)) else {
            return;
        };
        let mut first = None;
        for (index, (start, end)) in blocks.enumerate() {
            let (start, end) = (Seq(start), Seq(end));
            if !start.is_before(end) || end.is_after(self.nxt) {
                continue;
            }
            // RFC 2883 section 4: the first block lies below the
            // acknowledgement or inside the second.
            match (index, first) {
                (0, _) if end.is_up_to(segment.ack) => {
                    progress.duplicate = true;
                    continue;
                }
                (0, _) => first = Some((start, end)),
                (1, Some((inner_start, inner_end)))
                    if start.is_up_to(inner_start) && inner_end.is_up_to(end) =>
                {
                    progress.duplicate = true;
                }
                _ => {}
            }
            if let Some(flight) = self.flight.as_mut().filter(|_| end.is_after(self.una)) {
                flight.sack(now_ns, start, end, progress);
            }
        }
        if progress.duplicate {
            // RFC 8985 section 6.2 step 4.
            self.reordering_steps = self.reordering_steps.saturating_add(1).min(16);
        }
    }

    /// RFC 8985 section 6.2 step 4.
    fn reordering_ns(&self) -> u64 {
        let sacked = self.flight.as_ref().map_or(0, |flight| flight.sacked_segments());
        if !self.is.contains(Is::REORDERING_SEEN)
            && (self.phase != Phase::Open || sacked >= u32::from(DUPLICATES))
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
        flight.look_again_ns = flight.detect_lost(now_ns, reordering_ns).unwrap_or(0);
    }

    /// RFC 6582, for peers without SACK.
    fn count_duplicates(&mut self, ack: Seq, duplicate: bool, progress: &Progress) {
        let Some(flight) = &mut self.flight else {
            self.duplicate_acks = 0;
            return;
        };
        if duplicate {
            self.duplicate_acks = self.duplicate_acks.saturating_add(1);
            if self.duplicate_acks == DUPLICATES && self.phase == Phase::Open {
                // Step 1: not for what was sent before the last recovery.
                if !ack.is_before(self.recovery_end) {
                    flight.mark_first_lost();
                }
            }
        } else if progress.acked > 0 {
            match self.phase {
                // Step 3: a partial acknowledgement tells of the next loss.
                Phase::Fast if ack.is_before(self.recovery_end) => {
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

    /// Moves between the phases and moves the window.
    fn react(&mut self, now_ns: u64, segment: &Segment<'_>, outstanding: u32, progress: &Progress) {
        let mss = u32::from(self.mss);
        let lost = self.flight.as_ref().map_or(0, |flight| flight.lost_bytes());
        let was_probe = lost > 0 && self.lost_only_a_path_probe();
        let marked = self.is.contains(Is::ECN)
            && segment.flags.contains(TcpFlags::ECE)
            && !segment.is_syn()
            && self.phase == Phase::Open
            && !self.una.is_before(self.cwr_end);
        match self.phase {
            Phase::Open if lost > 0 && !was_probe => {
                self.enter_recovery(outstanding);
            }
            Phase::Open if marked => {
                // RFC 3168 section 6.1.2: once a round trip, as for a loss.
                self.controller.on_congestion(outstanding, mss);
                self.controller.end_recovery();
                self.cwr_end = self.nxt;
                self.is.insert(Is::TELL_REDUCED);
            }
            Phase::Open | Phase::Loss if progress.acked > 0 => {
                let acked = Acked {
                    bytes: progress.acked,
                    mss,
                    now_ns,
                    rtt_ns: self.rtt.smoothed_ns().unwrap_or(0),
                };
                let limited = self.is.contains(Is::WINDOW_LIMITED) || self.phase == Phase::Loss;
                self.controller.on_ack(&acked, limited);
            }
            _ => {}
        }
        if self.phase != Phase::Open && !self.una.is_before(self.recovery_end) {
            if self.phase == Phase::Fast {
                self.controller.end_recovery();
            }
            self.phase = Phase::Open;
            self.duplicate_acks = 0;
        } else if self.phase == Phase::Fast {
            self.reduce_rate(progress, mss);
        }
    }

    /// Whether the acknowledgement that has come may let something go out.
    pub(crate) fn may_have_output(&self) -> bool {
        let lost = self.flight.as_ref().is_some_and(|flight| flight.lost_bytes() > 0);
        lost || self.unsent() > 0
            || self.is.contains(Is::FIN_QUEUED) && !self.is.contains(Is::FIN_SENT)
    }

    fn enter_recovery(&mut self, outstanding: u32) {
        self.controller.on_congestion(outstanding, self.mss.into());
        self.phase = Phase::Fast;
        if let Some(flight) = &mut self.flight {
            flight.reduction = Reduction { flight: outstanding.max(1), delivered: 0, sent: 0 };
        }
        self.recovery_end = self.nxt;
        self.is.insert(Is::FORCE_RETRANSMISSION);
        self.is.set(Is::TELL_REDUCED, self.is.contains(Is::ECN));
        self.cwr_end = self.nxt;
    }

    /// Proportional rate reduction (RFC 6937 section 3.1).
    fn reduce_rate(&mut self, progress: &Progress, mss: u32) {
        let pipe = self.pipe();
        let ssthresh = self.controller.window.ssthresh;
        let Some(flight) = &mut self.flight else { return };
        let Reduction { flight, delivered, sent } = &mut flight.reduction;
        let news = match progress.acked + progress.sacked {
            0 if !self.is.contains(Is::SACK) => mss,
            news => news,
        };
        *delivered = delivered.saturating_add(news);
        let allowed = if pipe > ssthresh {
            let share = u64::from(*delivered) * u64::from(ssthresh);
            let share = share.div_ceil(u64::from((*flight).max(1)));
            (share as u32).saturating_sub(*sent)
        } else {
            let most = delivered.saturating_sub(*sent).max(news) + mss;
            (ssthresh - pipe).min(most)
        };
        self.controller.window.cwnd = pipe.saturating_add(allowed).max(mss);
    }

    /// `bytes` were sent.
    pub(crate) fn count_sent(&mut self, bytes: u32) {
        if let Some(flight) = &mut self.flight {
            flight.reduction.sent = flight.reduction.sent.saturating_add(bytes);
        }
    }

    /// RFC 8985 section 7.4: what a tail probe showed.
    fn end_tail_probe(&mut self, ack: Seq, outstanding: u32, duplicate: bool, progress: &Progress) {
        if !self.is.contains(Is::TAIL_PROBED) || ack.is_before(self.probe_end) {
            return;
        }
        let repeated = self.is.contains(Is::TAIL_PROBE_REPEATS);
        if !repeated || progress.duplicate || duplicate {
            // Nothing was lost: new data arrived, or both copies did.
            self.is.remove(Is::TAIL_PROBED);
        } else if progress.acked > 0 {
            // The probe made good a loss that nobody else saw.
            self.is.remove(Is::TAIL_PROBED);
            if self.phase == Phase::Open {
                self.controller.on_congestion(outstanding, self.mss.into());
                self.controller.end_recovery();
            }
        }
    }

    /// Sets the timer for what is on its way (RFC 6298 section 5, RFC 8985
    /// section 7.2).
    pub(crate) fn arm(&mut self, now_ns: u64) {
        let Some(flight) = self.flight.as_ref().filter(|flight| !flight.is_empty()) else {
            return self.arm_window_probe(now_ns);
        };
        let rto_at_ns = self.rto_base_ns.saturating_add(self.rtt.rto_ns());
        if self.window == 0 && flight.len() == 1 && self.is_synchronized() {
            self.wait = Wait::Window;
            self.wait_until_ns = rto_at_ns;
            return;
        }
        let give_up_ns = self.options.user_timeout_ms.map_or(NEVER, |limit_ms| {
            self.stalled_ns.saturating_add(u64::from(limit_ms) * 1_000_000)
        });
        let rto_at_ns = rto_at_ns.min(give_up_ns);
        (self.wait, self.wait_until_ns) = (Wait::Retransmission, rto_at_ns);
        if flight.look_again_ns != 0 && flight.look_again_ns < rto_at_ns {
            (self.wait, self.wait_until_ns) = (Wait::Reordering, flight.look_again_ns);
            return;
        }
        let may_probe = self.is.contains(Is::SACK)
            && self.is_synchronized()
            && self.phase == Phase::Open
            && !self.is.contains(Is::TAIL_PROBED)
            && !flight.has_sacked()
            && flight.lost_bytes() == 0
            && self.rtt.backoff == 0;
        if may_probe {
            let lone = if flight.len() == 1 { WORST_DELAYED_ACK_NS } else { 0 };
            let wait_ns = self.rtt.smoothed_ns().map_or(FIRST_PROBE_NS, |rtt| 2 * rtt + lone);
            let probe_at_ns = self.rto_base_ns.max(self.last_sent_ns).saturating_add(wait_ns);
            if probe_at_ns < rto_at_ns {
                (self.wait, self.wait_until_ns) = (Wait::TailProbe, probe_at_ns);
            }
        }
    }

    /// Nothing is on its way. If data waits for the peer's window, asks for it
    /// in time (RFC 9293 section 3.8.6.1).
    fn arm_window_probe(&mut self, now_ns: u64) {
        let fin_waits = self.is.contains(Is::FIN_QUEUED) && !self.is.contains(Is::FIN_SENT);
        if !self.sends() || self.unsent() == 0 && !fin_waits || self.is.contains(Is::WANTS_OUTPUT) {
            self.wait = Wait::Nothing;
            self.wait_until_ns = NEVER;
        } else if self.wait != Wait::Window {
            self.rtt.backoff = 0;
            self.stalled_ns = now_ns;
            self.wait = Wait::Window;
            self.wait_until_ns = now_ns.saturating_add(self.rtt.rto_ns());
        } else if self.wait_until_ns == NEVER {
            self.wait_until_ns = now_ns.saturating_add(self.rtt.rto_ns());
        }
    }

    /// The timer for what is on its way has run out. It runs again when what
    /// is to be sent has been sent: a full transmit queue is no sign that the
    /// peer is silent.
    pub(crate) fn on_wait_over(&mut self, now_ns: u64, shared: &mut Shared) {
        self.wait_until_ns = NEVER;
        match self.wait {
            Wait::Nothing => {}
            Wait::Reordering => {
                let outstanding = self.nxt.since(self.una);
                self.detect_lost(now_ns);
                let lost = self.flight.as_ref().map_or(0, |flight| flight.lost_bytes());
                if lost > 0 && self.phase == Phase::Open && !self.lost_only_a_path_probe() {
                    self.enter_recovery(outstanding);
                }
                self.is.insert(Is::WANTS_OUTPUT);
            }
            Wait::TailProbe => {
                self.is.insert(Is::TAIL_PROBE_NOW);
                self.is.insert(Is::TAIL_PROBED);
                self.probe_end = self.nxt;
                self.rto_base_ns = now_ns;
                self.is.insert(Is::WANTS_OUTPUT);
            }
            Wait::Window => self.on_window_probe(now_ns, shared),
            Wait::Retransmission => self.on_timeout(now_ns, shared),
        }
    }

    /// Whether the connection has waited long enough for its peer.
    fn is_given_up(&self, now_ns: u64) -> bool {
        let stalled_ns = now_ns.saturating_sub(self.stalled_ns);
        let limit_ms = self.options.user_timeout_ms;
        limit_ms.is_some_and(|limit_ms| stalled_ns >= u64::from(limit_ms) * 1_000_000)
            || self.is.contains(Is::ORPHAN)
                && self.is_synchronized()
                && stalled_ns >= ORPHAN_STALL_NS
    }

    fn give_up(&mut self, shared: &mut Shared) {
        let failure = self.soft_failure.unwrap_or(Failure::TimedOut);
        self.abort(shared, Some(failure), self.is_synchronized());
    }

    /// RFC 9293 section 3.8.6.1: the peer is asked for its window, for as long
    /// as it answers.
    fn on_window_probe(&mut self, now_ns: u64, shared: &mut Shared) {
        self.retries = self.retries.saturating_add(1);
        if self.retries > DATA_RETRIES || self.is_given_up(now_ns) {
            return self.give_up(shared);
        }
        self.rtt.back_off();
        self.rto_base_ns = now_ns;
        if let Some(flight) = &mut self.flight {
            flight.mark_first_lost();
            self.is.insert(Is::FORCE_RETRANSMISSION);
        } else {
            self.is.insert(Is::FORCE_WINDOW);
        }
        self.is.insert(Is::WANTS_OUTPUT);
    }

    /// RFC 6298 sections 5.4 to 5.7.
    fn on_timeout(&mut self, now_ns: u64, shared: &mut Shared) {
        let most = match self.state {
            TcpState::SynSent => SYN_RETRIES,
            TcpState::SynReceived => SYN_ACK_RETRIES,
            _ => DATA_RETRIES,
        };
        // A host that cannot be reached is waited for only once more.
        let hopeless = self.state == TcpState::SynSent && self.soft_failure.is_some();
        self.retries = self.retries.saturating_add(1);
        if self.retries > most || hopeless || self.is_given_up(now_ns) {
            return self.give_up(shared);
        }
        let mss = u32::from(self.mss);
        let outstanding = self.nxt.since(self.una);
        let Some(flight) = &mut self.flight else { return };
        flight.mark_all_lost(self.retries > 1);
        flight.look_again_ns = 0;
        if self.is_synchronized() {
            self.controller.on_timeout(outstanding, mss, self.phase != Phase::Loss);
            self.on_path_probe_timeout();
            if self.retries == BLACK_HOLE_RETRIES {
                self.on_black_hole(now_ns);
            }
        } else {
            // RFC 5681 section 3.1: a lost SYN means one segment to begin with.
            self.controller.window.cwnd = mss;
            self.is.insert(Is::SYN_REPEATED);
        }
        self.phase = Phase::Loss;
        self.recovery_end = self.nxt;
        self.reordering_steps = 1;
        self.duplicate_acks = 0;
        self.is.remove(Is::TAIL_PROBED);
        self.rtt.back_off();
        self.rto_base_ns = now_ns;
        self.is.insert(Is::FORCE_RETRANSMISSION);
        self.is.insert(Is::WANTS_OUTPUT);
    }
}
