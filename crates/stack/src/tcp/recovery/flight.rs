//! Scoreboard of sent and unacknowledged segments (RFC 2018, RFC 6675), with the transmission
//! times for RACK (RFC 8985).

use std::collections::VecDeque;

use super::delivery::DeliveryRound;
use super::pacing::Pacing;
use super::sacked::SackedRanges;
use crate::tcp::identity::milliseconds;
use crate::tcp::seq::Seq;

/// Segment that is in flight or lost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentSegment {
    pub(crate) start: Seq,
    pub(crate) end: Seq,
    /// Time of the last transmission.
    pub(crate) sent_ns: u64,
    pub(crate) syn: bool,
    pub(crate) fin: bool,
    /// Selectively acknowledged by the peer.
    pub(crate) sacked: bool,
    /// Marked lost and not retransmitted since.
    pub(crate) lost: bool,
    /// Sent more than once.
    pub(crate) retransmitted: bool,
}

impl SentSegment {
    /// Segment that was sent once, at `sent_ns`.
    pub(crate) fn new(start: Seq, end: Seq, sent_ns: u64, syn: bool, fin: bool) -> Self {
        Self { start, end, sent_ns, syn, fin, sacked: false, lost: false, retransmitted: false }
    }

    pub(crate) fn bytes(&self) -> u32 {
        self.end.since(self.start)
    }

    /// Transmission order of RACK: by time, then by sequence number (RFC 8985 section 6.2 step 2).
    fn sent_before(&self, at_ns: u64, end: Seq) -> bool {
        self.sent_ns < at_ns || self.sent_ns == at_ns && self.end.is_before(end)
    }
}

/// Arrival of an acknowledgement.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AckArrival {
    pub(crate) now_ns: u64,
    /// Smallest recent round-trip time; 0 before the first sample.
    pub(crate) min_rtt_ns: u64,
    /// Time of transmission that the acknowledgement echoes, in milliseconds of the clock of
    /// `now_ns` (RFC 7323 section 3.2).
    pub(crate) echoed_ms: Option<u32>,
}

impl AckArrival {
    /// True when the acknowledgement cannot be for a retransmission at `sent_ns`, but for the
    /// original transmission (RFC 8985 section 6.2 step 2).
    fn is_for_original(&self, sent_ns: u64) -> bool {
        let is_echo_older =
            self.echoed_ms.is_some_and(|echoed| Seq(echoed).is_before(Seq(milliseconds(sent_ns))));
        is_echo_older || self.now_ns.saturating_sub(sent_ns) < self.min_rtt_ns
    }

    /// Round-trip time by the time stamp, at a precision of a millisecond (RFC 7323 section 4.1).
    pub(crate) fn echoed_rtt_ns(&self) -> Option<u64> {
        let elapsed_ms = milliseconds(self.now_ns).wrapping_sub(self.echoed_ms?);
        (elapsed_ms <= MAX_ECHOED_RTT_MS).then_some(u64::from(elapsed_ms.max(1)) * 1_000_000)
    }
}

/// Longest round-trip time that a time stamp may tell. Larger differences are echoes of numbers
/// never sent.
const MAX_ECHOED_RTT_MS: u32 = 120_000;

/// Effect of an acknowledgement on the scoreboard.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AckProgress {
    /// Sequence numbers newly acknowledged in order.
    pub(crate) acked: u32,
    /// Sequence numbers newly acknowledged out of order.
    pub(crate) sacked: u32,
    /// Sequence numbers newly acknowledged, in order or not, each counted once.
    pub(crate) delivered: u32,
    /// Round-trip sample, from a segment that was sent once.
    pub(crate) rtt_ns: Option<u64>,
    /// Duplicate data that the acknowledgement reports (D-SACK, RFC 2883).
    pub(crate) dsack: Option<(Seq, Seq)>,
    /// A segment arrived after segments that were sent later: reordering.
    pub(crate) reordered: bool,
    /// Start of the first newly acknowledged segment that was sent once.
    pub(crate) first_original: Option<Seq>,
}

/// Judgement of RACK about a segment in flight.
enum Judgement {
    /// No segment that was sent later has arrived.
    NotOvertaken,
    /// The segment may only be late until this time.
    MayBeLate {
        until_ns: u64,
    },
    Lost,
}

/// Largest record capacity that is kept for reuse by another connection.
const MAX_RECYCLED_RECORDS: usize = 1024;

/// Scoreboard of a connection.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    sent: VecDeque<SentSegment>,
    sacked_bytes: u32,
    sacked_segments: u32,
    lost_bytes: u32,
    /// Lower bound of the index of the first lost record.
    first_lost: usize,
    highest_sacked: Seq,
    /// Ranges of the records that are selectively acknowledged.
    sacked: SackedRanges,
    /// Index from which on records may be in flight for the first time, in the order of their
    /// transmission. All records before were retransmitted, marked lost or acknowledged.
    first_original: usize,
    /// Retransmissions in their order: time, and start of the record. Entries may be stale.
    resent: VecDeque<(u64, Seq)>,
    /// Number whose acknowledgement ends the round trip in which a D-SACK arrived.
    pub(super) dsack_round_end: Option<Seq>,
    /// RACK state: transmission time and end of the delivered segment that was sent last, and round
    /// trip of the one that was delivered last (RFC 8985 section 6.2 step 2). The time is 0 while
    /// there is none.
    rack_sent_ns: u64,
    rack_end: Seq,
    rack_rtt_ns: u64,
    /// Deadline of the reordering window; 0 for none.
    pub(crate) reorder_deadline_ns: u64,
    pub(crate) prr: PrrState,
    pub(super) pacing: Pacing,
    pub(crate) delivery: DeliveryRound,
}

/// Proportional rate reduction (RFC 6937 section 3): bytes in flight when recovery began
/// (RecoverFS), bytes delivered since (prr_delivered) and bytes sent since (prr_out).
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct PrrState {
    pub(crate) flight: u32,
    pub(crate) delivered: u32,
    pub(crate) sent: u32,
}

/// Snapshot of a [`SentSegment`].
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct SentSegmentSnapshot {
    start: Seq,
    end: Seq,
    /// Age of the last transmission.
    age_ns: u64,
    syn: bool,
    fin: bool,
    sacked: bool,
    lost: bool,
}

/// Snapshot of a [`Flight`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct FlightSnapshot {
    sent: Vec<SentSegmentSnapshot>,
    prr: PrrState,
    /// RACK state: age of the transmission, end, round trip.
    rack: Option<(u64, Seq, u64)>,
    reorder_deadline_in_ns: Option<u64>,
}

/// Upper bound of a flight: the largest window (RFC 7323 section 2.3).
const MAX_IN_FLIGHT_BYTES: u32 = 1 << 30;

impl Flight {
    /// Takes a snapshot.
    pub(crate) fn save(&self, now_ns: u64) -> FlightSnapshot {
        let sent = self.sent.iter().map(|sent| SentSegmentSnapshot {
            start: sent.start,
            end: sent.end,
            age_ns: now_ns.saturating_sub(sent.sent_ns),
            syn: sent.syn,
            fin: sent.fin,
            sacked: sent.sacked,
            lost: sent.lost,
        });
        let rack_age_ns = now_ns.saturating_sub(self.rack_sent_ns);
        let reorder_in_ns = self.reorder_deadline_ns.saturating_sub(now_ns);
        FlightSnapshot {
            sent: sent.collect(),
            prr: self.prr,
            rack: (self.rack_sent_ns != 0).then_some((
                rack_age_ns,
                self.rack_end,
                self.rack_rtt_ns,
            )),
            reorder_deadline_in_ns: (self.reorder_deadline_ns != 0).then_some(reorder_in_ns),
        }
    }

    /// Restores a snapshot into an empty scoreboard. Returns false unless the records are one
    /// contiguous range of sequence numbers. The records give no round-trip sample, as they count
    /// as retransmitted: the time in between was not spent in the network (Karn's algorithm).
    #[must_use = "the snapshot may be damaged"]
    pub(crate) fn restore(&mut self, now_ns: u64, saved: &FlightSnapshot) -> bool {
        let Some(first) = saved.sent.first() else { return false };
        // 0 means that there is no time.
        let past_ns = |age_ns: u64| now_ns.saturating_sub(age_ns).max(1);
        let (mut end, mut bytes) = (first.start, 0_u32);
        for (at, sent) in saved.sent.iter().enumerate() {
            bytes = bytes.saturating_add(sent.end.since(sent.start));
            let is_last = at + 1 == saved.sent.len();
            let is_right = sent.start == end
                && sent.start.is_before(sent.end)
                && bytes <= MAX_IN_FLIGHT_BYTES
                && !(sent.sacked && sent.lost)
                && !(sent.syn && sent.fin)
                && (is_last || !sent.fin);
            if !is_right {
                return false;
            }
            end = sent.end;
            self.sent.push_back(SentSegment {
                start: sent.start,
                end: sent.end,
                sent_ns: past_ns(sent.age_ns),
                syn: sent.syn,
                fin: sent.fin,
                sacked: sent.sacked,
                lost: sent.lost,
                retransmitted: true,
            });
            self.lost_bytes += if sent.lost { sent.end.since(sent.start) } else { 0 };
            if sent.sacked {
                self.sacked_bytes += sent.end.since(sent.start);
                self.sacked_segments += 1;
                self.highest_sacked = sent.end;
                self.sacked.insert(sent.start, sent.end);
            } else if !sent.lost {
                self.resent.push_back((past_ns(sent.age_ns), sent.start));
            }
        }
        self.first_original = self.sent.len();
        self.resent.make_contiguous().sort_by_key(|entry| entry.0);
        if let Some((age_ns, end, rtt_ns)) = saved.rack {
            (self.rack_sent_ns, self.rack_end, self.rack_rtt_ns) = (past_ns(age_ns), end, rtt_ns);
        }
        let reorder_deadline_ns =
            saved.reorder_deadline_in_ns.map(|in_ns| now_ns.saturating_add(in_ns).max(1));
        self.reorder_deadline_ns = reorder_deadline_ns.unwrap_or(0);
        let clamp = |bytes: u32| bytes.min(MAX_IN_FLIGHT_BYTES);
        let PrrState { flight, delivered, sent } = saved.prr;
        self.prr =
            PrrState { flight: clamp(flight), delivered: clamp(delivered), sent: clamp(sent) };
        true
    }

    /// Returns the oldest unacknowledged segment.
    pub(crate) fn first(&self) -> Option<&SentSegment> {
        self.sent.front()
    }

    /// Time of transmission of the oldest segment, when each was sent once and none was lost or
    /// selectively acknowledged.
    #[inline(always)]
    pub(super) fn undisturbed_since_ns(&self) -> Option<u64> {
        let is_undisturbed =
            self.lost_bytes == 0 && self.sacked_segments == 0 && self.resent.is_empty();
        self.sent.front().filter(|_| is_undisturbed).map(|first| first.sent_ns)
    }

    /// Empties the scoreboard for another connection. Returns true when it is small enough to keep.
    pub(crate) fn recycle(&mut self) -> bool {
        // Field by field: this runs once per request, and the queues keep their memory.
        let Self {
            sent,
            sacked_bytes,
            sacked_segments,
            lost_bytes,
            first_lost,
            highest_sacked,
            sacked,
            first_original,
            resent,
            dsack_round_end,
            rack_sent_ns,
            rack_end,
            rack_rtt_ns,
            reorder_deadline_ns,
            prr,
            pacing,
            delivery,
        } = self;
        let keep = sent.capacity().max(resent.capacity()) <= MAX_RECYCLED_RECORDS;
        if !sent.is_empty() {
            sent.clear();
        }
        if !resent.is_empty() {
            resent.clear();
        }
        sacked.clear();
        (*sacked_bytes, *sacked_segments, *lost_bytes) = (0, 0, 0);
        (*first_lost, *first_original, *highest_sacked) = (0, 0, Seq(0));
        (*rack_sent_ns, *rack_end, *rack_rtt_ns) = (0, Seq(0), 0);
        (*reorder_deadline_ns, *dsack_round_end) = (0, None);
        (*prr, *pacing) = (PrrState::default(), Pacing::default());
        *delivery = DeliveryRound::default();
        keep
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.sent.len()
    }

    pub(crate) fn has_sacked(&self) -> bool {
        self.sacked_segments > 0
    }

    pub(crate) fn sacked_segments(&self) -> u32 {
        self.sacked_segments
    }

    pub(crate) fn lost_bytes(&self) -> u32 {
        self.lost_bytes
    }

    /// Estimated bytes in the network, of `outstanding` bytes (RFC 6675 section 4, SetPipe).
    pub(crate) fn pipe(&self, outstanding: u32) -> u32 {
        outstanding.saturating_sub(self.sacked_bytes + self.lost_bytes)
    }

    /// Records a segment that was sent for the first time.
    #[inline(always)]
    pub(crate) fn push(&mut self, sent: SentSegment) {
        self.sent.push_back(sent);
    }

    /// Returns the first segment that is marked lost and was not retransmitted since.
    pub(crate) fn first_lost(&mut self) -> Option<&SentSegment> {
        if self.lost_bytes == 0 {
            return None;
        }
        let rest = self.sent.range(self.first_lost.min(self.sent.len())..);
        let found = rest.into_iter().position(|sent| sent.lost)?;
        self.first_lost += found;
        self.sent.get(self.first_lost)
    }

    /// Returns the segment with the highest sequence number.
    pub(crate) fn last(&self) -> Option<&SentSegment> {
        self.sent.back()
    }

    /// Bytes of retransmissions that are in flight.
    pub(super) fn resent_bytes(&self) -> u32 {
        let in_flight =
            self.sent.iter().filter(|sent| sent.retransmitted && !sent.sacked && !sent.lost);
        in_flight.map(SentSegment::bytes).sum()
    }

    /// Records the retransmission of the segment that begins at `start`, up to `end`. A rest of the
    /// segment becomes a segment of its own.
    pub(crate) fn on_retransmitted(&mut self, now_ns: u64, start: Seq, end: Seq) {
        let at = self.sent.partition_point(|sent| sent.start.is_before(start));
        let Some(sent) = self.sent.get_mut(at) else { return };
        if end.is_before(sent.end) {
            let rest = SentSegment { start: end, syn: false, ..*sent };
            (sent.end, sent.fin) = (end, false);
            self.sent.insert(at + 1, rest);
            self.first_original += usize::from(at < self.first_original);
            if rest.retransmitted && !rest.lost {
                self.resent.push_back((rest.sent_ns, rest.start));
            }
        }
        let Some(sent) = self.sent.get_mut(at) else { return };
        if std::mem::take(&mut sent.lost) {
            self.lost_bytes -= sent.bytes();
        }
        (sent.sent_ns, sent.retransmitted) = (now_ns, true);
        self.resent.push_back((now_ns, start));
    }

    /// Applies a cumulative acknowledgement.
    pub(crate) fn acknowledge(
        &mut self,
        arrival: &AckArrival,
        ack: Seq,
        progress: &mut AckProgress,
    ) {
        while let Some(front) = self.sent.front_mut() {
            if !front.start.is_before(ack) {
                break;
            }
            if ack.is_before(front.end) {
                let bytes = ack.since(front.start);
                progress.acked += bytes;
                progress.delivered += if front.sacked { 0 } else { bytes };
                self.lost_bytes -= if front.lost { bytes } else { 0 };
                self.sacked_bytes -= if front.sacked { bytes } else { 0 };
                (front.start, front.syn) = (ack, false);
                break;
            }
            let Some(sent) = self.sent.pop_front() else { break };
            self.first_lost = self.first_lost.saturating_sub(1);
            self.first_original = self.first_original.saturating_sub(1);
            progress.acked += sent.bytes();
            if sent.lost {
                self.lost_bytes -= sent.bytes();
            }
            if sent.sacked {
                self.sacked_bytes -= sent.bytes();
                self.sacked_segments -= 1;
            } else {
                progress.delivered += sent.bytes();
                self.on_delivered(arrival, &sent, progress);
            }
        }
        if !self.sacked.is_empty() {
            self.sacked.advance(ack);
        }
    }

    /// Applies one SACK block, which must lie within what was sent. Visits only records that no
    /// earlier block covered.
    pub(crate) fn sack(
        &mut self,
        arrival: &AckArrival,
        start: Seq,
        end: Seq,
        progress: &mut AckProgress,
    ) {
        let mut from = start;
        while let Some((gap_start, gap_end)) = self.sacked.first_gap(from, end) {
            self.sack_gap(arrival, gap_start, gap_end, progress);
            from = gap_end;
        }
    }

    /// Marks the records within `start..end` as selectively acknowledged; none of them is yet.
    fn sack_gap(&mut self, arrival: &AckArrival, start: Seq, end: Seq, progress: &mut AckProgress) {
        let first = self.sent.partition_point(|sent| sent.start.is_before(start));
        let mut at = first;
        while let Some(sent) = self.sent.get_mut(at).filter(|sent| !sent.end.is_after(end)) {
            sent.sacked = true;
            if std::mem::take(&mut sent.lost) {
                self.lost_bytes -= sent.bytes();
            }
            let sent = *sent;
            self.on_delivered(arrival, &sent, progress);
            if self.sacked_segments == 0 || sent.end.is_after(self.highest_sacked) {
                self.highest_sacked = sent.end;
            }
            self.sacked_bytes += sent.bytes();
            self.sacked_segments += 1;
            progress.sacked += sent.bytes();
            progress.delivered += sent.bytes();
            at += 1;
        }
        if at > first {
            self.sacked.insert(self.sent[first].start, self.sent[at - 1].end);
        }
    }

    /// Updates RACK and the round trip for a delivered segment (RFC 8985 section 6.2, steps 1
    /// to 3).
    fn on_delivered(
        &mut self,
        arrival: &AckArrival,
        sent: &SentSegment,
        progress: &mut AckProgress,
    ) {
        let rtt_ns = arrival.now_ns.saturating_sub(sent.sent_ns);
        if sent.retransmitted {
            if arrival.is_for_original(sent.sent_ns) {
                return;
            }
        } else {
            progress.rtt_ns = Some(progress.rtt_ns.map_or(rtt_ns, |known| known.max(rtt_ns)));
            let first = progress.first_original.map_or(sent.start, |known| known.min(sent.start));
            progress.first_original = Some(first);
            if self.sacked_segments > 0 && sent.end.is_before(self.highest_sacked) {
                progress.reordered = true;
            }
        }
        self.rack_rtt_ns = rtt_ns;
        if self.rack_sent_ns == 0
            || self.rack_sent_ns < sent.sent_ns
            || self.rack_sent_ns == sent.sent_ns && self.rack_end.is_before(sent.end)
        {
            (self.rack_sent_ns, self.rack_end) = (sent.sent_ns, sent.end);
        }
    }

    /// Marks segments lost when segments sent later were delivered (RFC 8985 section 6.2 step 5).
    /// Returns the time of the next check, if segments may only be late. Visits the segments in
    /// the order of their transmission, each once.
    pub(crate) fn detect_lost(&mut self, now_ns: u64, reordering_ns: u64) -> Option<u64> {
        if self.rack_sent_ns == 0 {
            return None;
        }
        let originals_ns = self.detect_lost_originals(now_ns, reordering_ns);
        let resent_ns = self.detect_lost_resent(now_ns, reordering_ns);
        originals_ns.into_iter().chain(resent_ns).min()
    }

    /// Judges a segment in flight by RACK.
    fn judge(&self, now_ns: u64, reordering_ns: u64, sent: &SentSegment) -> Judgement {
        // Nothing is lost at the moment at which it is sent: on a path without delay, it would be
        // sent again and again.
        let rtt_ns = self.rack_rtt_ns.max(1);
        let due_ns = sent.sent_ns.saturating_add(rtt_ns).saturating_add(reordering_ns);
        match () {
            () if !sent.sent_before(self.rack_sent_ns, self.rack_end) => Judgement::NotOvertaken,
            () if due_ns > now_ns => Judgement::MayBeLate { until_ns: due_ns },
            () => Judgement::Lost,
        }
    }

    fn mark_lost(&mut self, at: usize) {
        if let Some(sent) = self.sent.get_mut(at) {
            sent.lost = true;
            self.lost_bytes += sent.bytes();
            self.first_lost = self.first_lost.min(at);
        }
    }

    /// [`Flight::detect_lost`] for segments that were sent once.
    fn detect_lost_originals(&mut self, now_ns: u64, reordering_ns: u64) -> Option<u64> {
        while let Some(sent) = self.sent.get(self.first_original).copied() {
            if !(sent.sacked || sent.lost || sent.retransmitted) {
                match self.judge(now_ns, reordering_ns, &sent) {
                    Judgement::NotOvertaken => return None,
                    Judgement::MayBeLate { until_ns } => return Some(until_ns),
                    Judgement::Lost => self.mark_lost(self.first_original),
                }
            }
            self.first_original += 1;
        }
        None
    }

    /// [`Flight::detect_lost`] for retransmissions.
    fn detect_lost_resent(&mut self, now_ns: u64, reordering_ns: u64) -> Option<u64> {
        while let Some(&(sent_ns, start)) = self.resent.front() {
            let at = self.sent.partition_point(|sent| sent.end.is_at_or_before(start));
            let is_current = |sent: &&SentSegment| {
                sent.sent_ns == sent_ns && sent.retransmitted && !sent.sacked && !sent.lost
            };
            if let Some(sent) = self.sent.get(at).filter(is_current).copied() {
                match self.judge(now_ns, reordering_ns, &sent) {
                    Judgement::NotOvertaken => return None,
                    Judgement::MayBeLate { until_ns } => return Some(until_ns),
                    Judgement::Lost => self.mark_lost(at),
                }
            }
            self.resent.pop_front();
        }
        None
    }

    /// Takes back the losses that a needless time-out has assumed. RACK begins anew: what arrived
    /// was the original, not the retransmission.
    pub(super) fn unmark_lost(&mut self) {
        for sent in self.sent.iter_mut().filter(|sent| sent.lost) {
            sent.lost = false;
            if sent.retransmitted {
                self.resent.push_back((sent.sent_ns, sent.start));
            }
        }
        self.resent.make_contiguous().sort_by_key(|entry| entry.0);
        (self.lost_bytes, self.first_original) = (0, 0);
        (self.rack_sent_ns, self.rack_rtt_ns) = (0, 0);
    }

    /// Marks the first segment lost, for peers without SACK (RFC 6582).
    pub(crate) fn mark_first_lost(&mut self) {
        if let Some(sent) = self.sent.front_mut()
            && !sent.lost
            && !sent.sacked
        {
            sent.lost = true;
            self.lost_bytes += sent.bytes();
            self.first_lost = 0;
        }
    }

    /// Marks all segments lost that the peer is not known to have (RFC 6675 section 5.1).
    /// `distrust` discards the selective acknowledgements: the peer may have reneged (RFC 2018
    /// section 8).
    pub(crate) fn mark_all_lost(&mut self, distrust: bool) {
        let front_sacked = self.sent.front().is_some_and(|front| front.sacked);
        if distrust || front_sacked {
            self.sent.iter_mut().for_each(|sent| sent.sacked = false);
            (self.sacked_bytes, self.sacked_segments) = (0, 0);
            self.sacked.clear();
        }
        self.lost_bytes = 0;
        for sent in self.sent.iter_mut().filter(|sent| !sent.sacked) {
            sent.lost = true;
            self.lost_bytes += sent.bytes();
        }
        self.first_lost = 0;
        self.first_original = self.sent.len();
        self.resent.clear();
        (self.rack_sent_ns, self.rack_rtt_ns) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn flight(segments: u32) -> Flight {
        let mut flight = Flight::default();
        for n in 0..segments {
            let (start, sent_ns) = (Seq(n * 100), u64::from(n + 1) * MS);
            flight.push(SentSegment::new(start, start + 100, sent_ns, false, false));
        }
        flight
    }

    fn at(now_ns: u64) -> AckArrival {
        AckArrival { now_ns, min_rtt_ns: 5 * MS, echoed_ms: None }
    }

    #[test]
    fn nothing_is_lost_at_the_moment_at_which_it_is_sent() {
        let mut flight = flight(2);
        flight.on_retransmitted(2 * MS, Seq(0), Seq(100));
        let arrival = AckArrival { now_ns: 2 * MS, ..AckArrival::default() };
        flight.sack(&arrival, Seq(100), Seq(200), &mut AckProgress::default());
        assert_eq!(flight.detect_lost(2 * MS, 0), Some(2 * MS + 1));
        assert_eq!(flight.lost_bytes(), 0);
    }

    fn sack(flight: &mut Flight, now_ns: u64, start: u32, end: u32) -> AckProgress {
        let mut progress = AckProgress::default();
        flight.sack(&at(now_ns), Seq(start), Seq(end), &mut progress);
        progress
    }

    #[test]
    fn rfc6675_pipe_excludes_sacked_and_lost() {
        let mut flight = flight(10);
        assert_eq!(flight.pipe(1000), 1000);
        assert_eq!(sack(&mut flight, 20 * MS, 500, 800).sacked, 300);
        assert_eq!(
            sack(&mut flight, 20 * MS, 500, 900).sacked,
            100,
            "only newly acknowledged bytes count"
        );
        assert_eq!(flight.pipe(1000), 600);
        flight.mark_first_lost();
        assert_eq!(flight.pipe(1000), 500);
        flight.on_retransmitted(30 * MS, Seq(0), Seq(100));
        assert_eq!(flight.pipe(1000), 600);
        let mut progress = AckProgress::default();
        flight.acknowledge(&at(40 * MS), Seq(450), &mut progress);
        assert_eq!((progress.acked, flight.pipe(550)), (450, 150));
    }

    #[test]
    fn rfc8985_6_2_marks_earlier_segments_lost_after_reordering_window() {
        let mut flight = flight(4);
        sack(&mut flight, 13 * MS, 200, 300);
        // The first two were sent at 1 and 2 ms; the third at 3 ms, with a round trip of 10 ms.
        let again = flight.detect_lost(13 * MS, 5 * MS);
        assert_eq!((flight.lost_bytes(), again), (0, Some(16 * MS)));
        assert_eq!(flight.detect_lost(16 * MS, 5 * MS), Some(17 * MS));
        assert_eq!(flight.lost_bytes(), 100);
        assert_eq!(flight.detect_lost(17 * MS, 5 * MS), None);
        assert_eq!(flight.first_lost().unwrap().start, Seq(0));
        assert_eq!(flight.lost_bytes(), 200, "the fourth segment was sent after the delivered one");
    }

    #[test]
    fn detects_a_lost_retransmission() {
        let mut flight = flight(10);
        sack(&mut flight, 15 * MS, 100, 200);
        flight.detect_lost(15 * MS, 0);
        flight.on_retransmitted(15 * MS, Seq(0), Seq(100));
        sack(&mut flight, 20 * MS, 200, 1000);
        assert_eq!(flight.detect_lost(20 * MS, 0), None);
        assert_eq!(flight.lost_bytes(), 0, "the retransmission was sent last");
        flight.push(SentSegment {
            start: Seq(1000),
            end: Seq(1100),
            sent_ns: 16 * MS,
            ..*flight.last().unwrap()
        });
        flight.sent.back_mut().unwrap().sacked = false;
        sack(&mut flight, 40 * MS, 1000, 1100);
        flight.detect_lost(40 * MS, 0);
        assert_eq!(flight.lost_bytes(), 100);
    }

    #[test]
    fn rfc2018_8_peer_may_renege_on_sack() {
        let mut flight = flight(3);
        sack(&mut flight, 9 * MS, 100, 300);
        flight.mark_all_lost(false);
        assert_eq!(flight.lost_bytes(), 100);
        flight.mark_all_lost(true);
        assert_eq!((flight.lost_bytes(), flight.has_sacked()), (300, false));
    }

    #[test]
    fn retransmission_splits_a_segment_for_a_smaller_path_mtu() {
        let mut flight = flight(2);
        flight.mark_all_lost(false);
        flight.on_retransmitted(9 * MS, Seq(0), Seq(60));
        assert_eq!((flight.len(), flight.lost_bytes()), (3, 140));
        let lost = *flight.first_lost().unwrap();
        assert_eq!((lost.start, lost.end), (Seq(60), Seq(100)));
    }

    #[test]
    fn karn_retransmitted_segment_gives_no_rtt_sample() {
        let mut flight = flight(2);
        flight.mark_first_lost();
        flight.on_retransmitted(9 * MS, Seq(0), Seq(100));
        let mut progress = AckProgress::default();
        flight.acknowledge(&at(11 * MS), Seq(100), &mut progress);
        assert_eq!(progress.rtt_ns, None);
        flight.acknowledge(&at(11 * MS), Seq(200), &mut progress);
        assert_eq!(progress.rtt_ns, Some(9 * MS));
    }

    #[test]
    fn rfc8985_6_2_goes_by_time_of_transmission_not_by_number() {
        let mut flight = flight(6);
        flight.mark_first_lost();
        flight.on_retransmitted(9 * MS, Seq(0), Seq(100));
        let mut progress = AckProgress::default();
        flight.acknowledge(&at(19 * MS), Seq(100), &mut progress);
        assert_eq!(flight.detect_lost(19 * MS, 0), None);
        assert_eq!(flight.lost_bytes(), 500, "all others were sent before the retransmission");
    }

    #[test]
    fn rfc8985_6_2_an_original_that_was_late_overtakes_nothing() {
        let mut flight = flight(6);
        flight.mark_first_lost();
        flight.on_retransmitted(9 * MS, Seq(0), Seq(100));
        let mut progress = AckProgress::default();
        flight.acknowledge(&at(13 * MS), Seq(100), &mut progress);
        assert_eq!(flight.detect_lost(99 * MS, 0), None, "sooner than any round trip");
    }

    #[test]
    fn a_record_that_two_reports_cover_is_not_resent() {
        let mut flight = flight(6);
        assert_eq!(sack(&mut flight, 20 * MS, 100, 250).sacked, 100);
        assert_eq!(sack(&mut flight, 20 * MS, 100, 400).sacked, 200);
    }

    #[test]
    fn each_delivered_byte_counts_once() {
        let mut flight = flight(6);
        assert_eq!(sack(&mut flight, 20 * MS, 100, 400).delivered, 300);
        let mut progress = AckProgress::default();
        flight.acknowledge(&at(21 * MS), Seq(500), &mut progress);
        assert_eq!((progress.acked, progress.delivered), (500, 200));
    }
}
