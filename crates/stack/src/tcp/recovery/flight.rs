//! Scoreboard of sent and unacknowledged segments (RFC 2018, RFC 6675), with the transmission
//! times for RACK (RFC 8985).

use std::collections::VecDeque;

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

/// Effect of an acknowledgement on the scoreboard.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AckProgress {
    /// Sequence numbers newly acknowledged in order.
    pub(crate) acked: u32,
    /// Sequence numbers newly acknowledged out of order.
    pub(crate) sacked: u32,
    /// Round-trip sample, from a segment that was sent once.
    pub(crate) rtt_ns: Option<u64>,
    /// The acknowledgement reports duplicate data (D-SACK, RFC 2883).
    pub(crate) dsack: bool,
    /// A segment arrived after segments that were sent later: reordering.
    pub(crate) reordered: bool,
}

/// SACK blocks remembered, so that repeated blocks are not processed again.
const RECENT_SACK_BLOCKS: usize = 4;

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
    recent_sacks: [(Seq, Seq); RECENT_SACK_BLOCKS],
    /// RACK state: transmission time, end and round trip of the delivered segment that was sent
    /// last (RFC 8985 section 6.2 step 2). The time is 0 while there is none.
    rack_sent_ns: u64,
    rack_end: Seq,
    rack_rtt_ns: u64,
    /// Deadline of the reordering window; 0 for none.
    pub(crate) reorder_deadline_ns: u64,
    pub(crate) prr: PrrState,
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
            }
        }
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

    /// Empties the scoreboard for another connection. Returns true when it is small enough to keep.
    pub(crate) fn recycle(&mut self) -> bool {
        let mut sent = std::mem::take(&mut self.sent);
        sent.clear();
        let keep = sent.capacity() <= MAX_RECYCLED_RECORDS;
        *self = Self { sent, ..Self::default() };
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

    /// Records the retransmission of the segment that begins at `start`, up to `end`. A rest of the
    /// segment becomes a segment of its own.
    pub(crate) fn on_retransmitted(&mut self, now_ns: u64, start: Seq, end: Seq) {
        let at = self.sent.partition_point(|sent| sent.start.is_before(start));
        let Some(sent) = self.sent.get_mut(at) else { return };
        if end.is_before(sent.end) {
            let rest = SentSegment { start: end, syn: false, ..*sent };
            (sent.end, sent.fin) = (end, false);
            self.sent.insert(at + 1, rest);
        }
        let Some(sent) = self.sent.get_mut(at) else { return };
        if std::mem::take(&mut sent.lost) {
            self.lost_bytes -= sent.bytes();
        }
        (sent.sent_ns, sent.retransmitted) = (now_ns, true);
    }

    /// Applies a cumulative acknowledgement.
    pub(crate) fn acknowledge(&mut self, now_ns: u64, ack: Seq, progress: &mut AckProgress) {
        while let Some(front) = self.sent.front_mut() {
            if !front.start.is_before(ack) {
                break;
            }
            if ack.is_before(front.end) {
                let bytes = ack.since(front.start);
                progress.acked += bytes;
                self.lost_bytes -= if front.lost { bytes } else { 0 };
                self.sacked_bytes -= if front.sacked { bytes } else { 0 };
                (front.start, front.syn) = (ack, false);
                break;
            }
            let Some(sent) = self.sent.pop_front() else { break };
            self.first_lost = self.first_lost.saturating_sub(1);
            progress.acked += sent.bytes();
            if sent.lost {
                self.lost_bytes -= sent.bytes();
            }
            if sent.sacked {
                self.sacked_bytes -= sent.bytes();
                self.sacked_segments -= 1;
            } else {
                self.on_delivered(now_ns, &sent, progress);
            }
        }
    }

    /// Applies one SACK block, which must lie within what was sent.
    pub(crate) fn sack(&mut self, now_ns: u64, start: Seq, end: Seq, progress: &mut AckProgress) {
        // Blocks grow at their end: skip the part that an earlier block reported.
        let known = self.recent_sacks.iter().find(|known| {
            known.0 == start && known.1.is_after(start) && known.1.is_at_or_before(end)
        });
        let from = known.map_or(start, |known| known.1);
        self.recent_sacks.rotate_right(1);
        self.recent_sacks[0] = (start, end);
        let mut at = self.sent.partition_point(|sent| sent.start.is_before(from));
        while let Some(sent) = self.sent.get_mut(at) {
            if sent.end.is_after(end) {
                break;
            }
            if !sent.sacked {
                sent.sacked = true;
                if std::mem::take(&mut sent.lost) {
                    self.lost_bytes -= sent.bytes();
                }
                let sent = *sent;
                self.on_delivered(now_ns, &sent, progress);
                if self.sacked_segments == 0 || sent.end.is_after(self.highest_sacked) {
                    self.highest_sacked = sent.end;
                }
                self.sacked_bytes += sent.bytes();
                self.sacked_segments += 1;
                progress.sacked += sent.bytes();
            }
            at += 1;
        }
    }

    /// Updates RACK and the round trip for a delivered segment (RFC 8985 section 6.2, steps 1
    /// to 3).
    fn on_delivered(&mut self, now_ns: u64, sent: &SentSegment, progress: &mut AckProgress) {
        let rtt_ns = now_ns.saturating_sub(sent.sent_ns);
        if sent.retransmitted {
            // The acknowledgement may be for the original transmission (step 2).
            if self.rack_rtt_ns != 0 && rtt_ns < self.rack_rtt_ns / 2 {
                return;
            }
        } else {
            progress.rtt_ns = Some(progress.rtt_ns.map_or(rtt_ns, |known| known.max(rtt_ns)));
            if self.sacked_segments > 0 && sent.end.is_before(self.highest_sacked) {
                progress.reordered = true;
            }
        }
        if self.rack_sent_ns == 0
            || self.rack_sent_ns < sent.sent_ns
            || self.rack_sent_ns == sent.sent_ns && self.rack_end.is_before(sent.end)
        {
            (self.rack_sent_ns, self.rack_end, self.rack_rtt_ns) = (sent.sent_ns, sent.end, rtt_ns);
        }
    }

    /// Marks segments lost when segments sent later were delivered (RFC 8985 section 6.2 step 5).
    /// Returns the time of the next check, if segments may only be late.
    pub(crate) fn detect_lost(&mut self, now_ns: u64, reordering_ns: u64) -> Option<u64> {
        if self.rack_sent_ns == 0 {
            return None;
        }
        let mut reorder_deadline_ns = None;
        let horizon = match self.sacked_segments {
            0 => self.rack_end,
            _ => self.rack_end.max(self.highest_sacked),
        };
        for (at, sent) in self.sent.iter_mut().enumerate() {
            if !sent.start.is_before(horizon) {
                break;
            }
            if sent.sacked || sent.lost || !sent.sent_before(self.rack_sent_ns, self.rack_end) {
                continue;
            }
            let due_ns =
                sent.sent_ns.saturating_add(self.rack_rtt_ns).saturating_add(reordering_ns);
            if due_ns <= now_ns {
                sent.lost = true;
                self.lost_bytes += sent.bytes();
                self.first_lost = self.first_lost.min(at);
            } else {
                reorder_deadline_ns =
                    Some(reorder_deadline_ns.map_or(due_ns, |known: u64| known.max(due_ns)));
            }
        }
        reorder_deadline_ns
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
            self.recent_sacks = Default::default();
        }
        self.lost_bytes = 0;
        for sent in self.sent.iter_mut().filter(|sent| !sent.sacked) {
            sent.lost = true;
            self.lost_bytes += sent.bytes();
        }
        self.first_lost = 0;
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

    fn sack(flight: &mut Flight, now_ns: u64, start: u32, end: u32) -> AckProgress {
        let mut progress = AckProgress::default();
        flight.sack(now_ns, Seq(start), Seq(end), &mut progress);
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
        flight.acknowledge(40 * MS, Seq(450), &mut progress);
        assert_eq!((progress.acked, flight.pipe(550)), (450, 150));
    }

    #[test]
    fn rfc8985_6_2_marks_earlier_segments_lost_after_reordering_window() {
        let mut flight = flight(4);
        sack(&mut flight, 13 * MS, 200, 300);
        // The first two were sent at 1 and 2 ms; the third at 3 ms, with a round trip of 10 ms.
        let again = flight.detect_lost(13 * MS, 5 * MS);
        assert_eq!((flight.lost_bytes(), again), (0, Some(17 * MS)));
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
        flight.acknowledge(11 * MS, Seq(100), &mut progress);
        assert_eq!(progress.rtt_ns, None);
        flight.acknowledge(11 * MS, Seq(200), &mut progress);
        assert_eq!(progress.rtt_ns, Some(9 * MS));
    }
}
