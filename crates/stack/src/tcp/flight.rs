//! What was sent and not acknowledged yet: the scoreboard (RFC 2018, RFC 6675)
//! with the times that RACK needs (RFC 8985).

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::seq::Seq;

/// A segment on its way, or lost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    pub(crate) start: Seq,
    pub(crate) end: Seq,
    /// When it was sent last.
    pub(crate) at_ns: u64,
    pub(crate) syn: bool,
    pub(crate) fin: bool,
    /// The peer has it, by a selective acknowledgement.
    pub(crate) sacked: bool,
    /// It is believed lost and was not sent again yet.
    pub(crate) lost: bool,
    /// It was sent more than once.
    pub(crate) repeated: bool,
}

impl Sent {
    pub(crate) fn bytes(&self) -> u32 {
        self.end.since(self.start)
    }

    fn sent_before(&self, at_ns: u64, end: Seq) -> bool {
        self.at_ns < at_ns || self.at_ns == at_ns && self.end.is_before(end)
    }
}

/// What an acknowledgement brought.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    /// Numbers newly acknowledged in order.
    pub(crate) acked: u32,
    /// Numbers newly acknowledged out of order.
    pub(crate) sacked: u32,
    /// A round trip, of a segment that was sent once.
    pub(crate) rtt_ns: Option<u64>,
    /// It tells of something that came twice (RFC 2883).
    pub(crate) duplicate: bool,
    /// Something arrived before what was sent earlier.
    pub(crate) reordered: bool,
}

/// How many blocks of an acknowledgement are remembered, so that what they said
/// already is not looked at again.
const REMEMBERED_BLOCKS: usize = 4;

/// Room for records that is kept for the next connection.
const KEPT_RECORDS: usize = 1024;

/// The scoreboard.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    sent: VecDeque<Sent>,
    sacked_bytes: u32,
    sacked_segments: u32,
    lost_bytes: u32,
    /// Nothing before this record is lost.
    first_lost: usize,
    highest_sacked: Seq,
    remembered: [(Seq, Seq); REMEMBERED_BLOCKS],
    /// Of all that arrived, what was sent last (RFC 8985 section 6.2 step 2).
    rack_at_ns: u64,
    rack_end: Seq,
    rack_rtt_ns: u64,
    /// When to look again at what may only be late; 0 for never.
    pub(crate) look_again_ns: u64,
    pub(crate) reduction: Reduction,
}

/// Proportional rate reduction (RFC 6937 section 3): the flight when recovery
/// began, what was delivered and what was sent since, in bytes.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Reduction {
    pub(crate) flight: u32,
    pub(crate) delivered: u32,
    pub(crate) sent: u32,
}

/// A [`Sent`] as plain data.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SavedSent {
    start: Seq,
    end: Seq,
    /// How long ago it was sent last.
    age_ns: u64,
    syn: bool,
    fin: bool,
    sacked: bool,
    lost: bool,
}

/// A [`Flight`] as plain data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedFlight {
    sent: Vec<SavedSent>,
    reduction: Reduction,
    /// Of all that arrived, what was sent last: how long ago, its end, its round
    /// trip.
    rack: Option<(u64, Seq, u64)>,
    look_again_in_ns: Option<u64>,
}

/// No flight is longer than the largest window.
const MOST_IN_FLIGHT_BYTES: u32 = 1 << 30;

impl Flight {
    /// What there is to know about it.
    pub(crate) fn save(&self, now_ns: u64) -> SavedFlight {
        let sent = self.sent.iter().map(|sent| SavedSent {
            start: sent.start,
            end: sent.end,
            age_ns: now_ns.saturating_sub(sent.at_ns),
            syn: sent.syn,
            fin: sent.fin,
            sacked: sent.sacked,
            lost: sent.lost,
        });
        let rack_age_ns = now_ns.saturating_sub(self.rack_at_ns);
        let look_again_in_ns = self.look_again_ns.saturating_sub(now_ns);
        SavedFlight {
            sent: sent.collect(),
            reduction: self.reduction,
            rack: (self.rack_at_ns != 0).then_some((rack_age_ns, self.rack_end, self.rack_rtt_ns)),
            look_again_in_ns: (self.look_again_ns != 0).then_some(look_again_in_ns),
        }
    }

    /// Takes up what was saved of another, if it is empty and that is one
    /// stretch of numbers without gaps. Nothing of it gives a round trip any
    /// more: the time in between was not the network's (Karn's algorithm).
    #[must_use = "it may be damaged"]
    pub(crate) fn restore(&mut self, now_ns: u64, saved: &SavedFlight) -> bool {
        let Some(first) = saved.sent.first() else { return false };
        // 0 would be never.
        let past_ns = |age_ns: u64| now_ns.saturating_sub(age_ns).max(1);
        let (mut end, mut bytes) = (first.start, 0_u32);
        for (at, sent) in saved.sent.iter().enumerate() {
            bytes = bytes.saturating_add(sent.end.since(sent.start));
            let is_last = at + 1 == saved.sent.len();
            let is_right = sent.start == end
                && sent.start.is_before(sent.end)
                && bytes <= MOST_IN_FLIGHT_BYTES
                && !(sent.sacked && sent.lost)
                && !(sent.syn && sent.fin)
                && (is_last || !sent.fin);
            if !is_right {
                return false;
            }
            end = sent.end;
            self.sent.push_back(Sent {
                start: sent.start,
                end: sent.end,
                at_ns: past_ns(sent.age_ns),
                syn: sent.syn,
                fin: sent.fin,
                sacked: sent.sacked,
                lost: sent.lost,
                repeated: true,
            });
            self.lost_bytes += if sent.lost { sent.end.since(sent.start) } else { 0 };
            if sent.sacked {
                self.sacked_bytes += sent.end.since(sent.start);
                self.sacked_segments += 1;
                self.highest_sacked = sent.end;
            }
        }
        if let Some((age_ns, end, rtt_ns)) = saved.rack {
            (self.rack_at_ns, self.rack_end, self.rack_rtt_ns) = (past_ns(age_ns), end, rtt_ns);
        }
        let look_again_ns = saved.look_again_in_ns.map(|in_ns| now_ns.saturating_add(in_ns).max(1));
        self.look_again_ns = look_again_ns.unwrap_or(0);
        let least = |bytes: u32| bytes.min(MOST_IN_FLIGHT_BYTES);
        let Reduction { flight, delivered, sent } = saved.reduction;
        self.reduction =
            Reduction { flight: least(flight), delivered: least(delivered), sent: least(sent) };
        true
    }

    /// The oldest segment that was not acknowledged.
    pub(crate) fn first(&self) -> Option<&Sent> {
        self.sent.front()
    }

    /// Empties it for another connection. Returns whether it is worth keeping.
    pub(crate) fn recycle(&mut self) -> bool {
        let mut sent = std::mem::take(&mut self.sent);
        sent.clear();
        let keep = sent.capacity() <= KEPT_RECORDS;
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

    /// Bytes that are in the network, as far as we know, of `outstanding`
    /// (RFC 6675 section 4, SetPipe).
    pub(crate) fn pipe(&self, outstanding: u32) -> u32 {
        outstanding.saturating_sub(self.sacked_bytes + self.lost_bytes)
    }

    /// Notes a segment that was sent for the first time.
    pub(crate) fn push(&mut self, sent: Sent) {
        self.sent.push_back(sent);
    }

    /// The first segment that is lost and was not sent again.
    pub(crate) fn first_lost(&mut self) -> Option<&Sent> {
        if self.lost_bytes == 0 {
            return None;
        }
        let rest = self.sent.range(self.first_lost.min(self.sent.len())..);
        let found = rest.into_iter().position(|sent| sent.lost)?;
        self.first_lost += found;
        self.sent.get(self.first_lost)
    }

    /// The segment that was sent last in order.
    pub(crate) fn last(&self) -> Option<&Sent> {
        self.sent.back()
    }

    /// The segment that begins at `start` was sent again at `now_ns`, up to
    /// `end`: the rest of it, if any, is a segment of its own from now on.
    pub(crate) fn resent(&mut self, now_ns: u64, start: Seq, end: Seq) {
        let at = self.sent.partition_point(|sent| sent.start.is_before(start));
        let Some(sent) = self.sent.get_mut(at) else { return };
        if end.is_before(sent.end) {
            let rest = Sent { start: end, syn: false, ..*sent };
            (sent.end, sent.fin) = (end, false);
            self.sent.insert(at + 1, rest);
        }
        let Some(sent) = self.sent.get_mut(at) else { return };
        if std::mem::take(&mut sent.lost) {
            self.lost_bytes -= sent.bytes();
        }
        (sent.at_ns, sent.repeated) = (now_ns, true);
    }

    /// Takes a cumulative acknowledgement.
    pub(crate) fn acknowledge(&mut self, now_ns: u64, ack: Seq, progress: &mut Progress) {
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
                self.arrived(now_ns, &sent, progress);
            }
        }
    }

    /// Takes one block of a selective acknowledgement, which lies within what
    /// was sent.
    pub(crate) fn sack(&mut self, now_ns: u64, start: Seq, end: Seq, progress: &mut Progress) {
        // Blocks grow at their end: what an earlier one said is not news.
        let known = self
            .remembered
            .iter()
            .find(|known| known.0 == start && known.1.is_after(start) && known.1.is_up_to(end));
        let from = known.map_or(start, |known| known.1);
        self.remembered.rotate_right(1);
        self.remembered[0] = (start, end);
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
                self.arrived(now_ns, &sent, progress);
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

    /// RFC 8985 section 6.2, steps 1 to 3.
    fn arrived(&mut self, now_ns: u64, sent: &Sent, progress: &mut Progress) {
        let rtt_ns = now_ns.saturating_sub(sent.at_ns);
        if sent.repeated {
            // It may be the first that arrived (step 2).
            if self.rack_rtt_ns != 0 && rtt_ns < self.rack_rtt_ns / 2 {
                return;
            }
        } else {
            progress.rtt_ns = Some(progress.rtt_ns.map_or(rtt_ns, |known| known.max(rtt_ns)));
            if self.sacked_segments > 0 && sent.end.is_before(self.highest_sacked) {
                progress.reordered = true;
            }
        }
        if self.rack_at_ns == 0
            || self.rack_at_ns < sent.at_ns
            || self.rack_at_ns == sent.at_ns && self.rack_end.is_before(sent.end)
        {
            (self.rack_at_ns, self.rack_end, self.rack_rtt_ns) = (sent.at_ns, sent.end, rtt_ns);
        }
    }

    /// Marks what must be lost, because what was sent later has arrived
    /// (RFC 8985 section 6.2 step 5). Returns when to look again, if something
    /// may only be late.
    pub(crate) fn detect_lost(&mut self, now_ns: u64, reordering_ns: u64) -> Option<u64> {
        if self.rack_at_ns == 0 {
            return None;
        }
        let mut look_again = None;
        let horizon = match self.sacked_segments {
            0 => self.rack_end,
            _ => self.rack_end.max(self.highest_sacked),
        };
        for (at, sent) in self.sent.iter_mut().enumerate() {
            if !sent.start.is_before(horizon) {
                break;
            }
            if sent.sacked || sent.lost || !sent.sent_before(self.rack_at_ns, self.rack_end) {
                continue;
            }
            let due_ns = sent.at_ns.saturating_add(self.rack_rtt_ns).saturating_add(reordering_ns);
            if due_ns <= now_ns {
                sent.lost = true;
                self.lost_bytes += sent.bytes();
                self.first_lost = self.first_lost.min(at);
            } else {
                look_again = Some(look_again.map_or(due_ns, |known: u64| known.max(due_ns)));
            }
        }
        look_again
    }

    /// Marks the first segment, for peers that cannot say more than "one is
    /// missing" (RFC 6582).
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

    /// Marks everything that the peer is not known to have (RFC 6675 section
    /// 5.1). `distrust` takes back what selective acknowledgements said: the
    /// peer may have thrown it away (RFC 2018 section 8).
    pub(crate) fn mark_all_lost(&mut self, distrust: bool) {
        let front_sacked = self.sent.front().is_some_and(|front| front.sacked);
        if distrust || front_sacked {
            self.sent.iter_mut().for_each(|sent| sent.sacked = false);
            (self.sacked_bytes, self.sacked_segments) = (0, 0);
            self.remembered = Default::default();
        }
        self.lost_bytes = 0;
        for sent in self.sent.iter_mut().filter(|sent| !sent.sacked) {
            sent.lost = true;
            self.lost_bytes += sent.bytes();
        }
        self.first_lost = 0;
        (self.rack_at_ns, self.rack_rtt_ns) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn flight(segments: u32) -> Flight {
        let mut flight = Flight::default();
        for n in 0..segments {
            flight.push(Sent {
                start: Seq(n * 100),
                end: Seq(n * 100 + 100),
                at_ns: u64::from(n + 1) * MS,
                syn: false,
                fin: false,
                sacked: false,
                lost: false,
                repeated: false,
            });
        }
        flight
    }

    fn sack(flight: &mut Flight, now_ns: u64, start: u32, end: u32) -> Progress {
        let mut progress = Progress::default();
        flight.sack(now_ns, Seq(start), Seq(end), &mut progress);
        progress
    }

    #[test]
    fn rfc6675_the_pipe_counts_neither_sacked_nor_lost() {
        let mut flight = flight(10);
        assert_eq!(flight.pipe(1000), 1000);
        assert_eq!(sack(&mut flight, 20 * MS, 500, 800).sacked, 300);
        assert_eq!(sack(&mut flight, 20 * MS, 500, 900).sacked, 100, "only what is new");
        assert_eq!(flight.pipe(1000), 600);
        flight.mark_first_lost();
        assert_eq!(flight.pipe(1000), 500);
        flight.resent(30 * MS, Seq(0), Seq(100));
        assert_eq!(flight.pipe(1000), 600);
        let mut progress = Progress::default();
        flight.acknowledge(40 * MS, Seq(450), &mut progress);
        assert_eq!((progress.acked, flight.pipe(550)), (450, 150));
    }

    #[test]
    fn rfc8985_6_2_what_was_sent_before_what_arrived_is_lost_after_a_while() {
        let mut flight = flight(4);
        sack(&mut flight, 13 * MS, 200, 300);
        // Sent at 1 and 2 ms, the third at 3 ms with a round trip of 10 ms.
        let again = flight.detect_lost(13 * MS, 5 * MS);
        assert_eq!((flight.lost_bytes(), again), (0, Some(17 * MS)));
        assert_eq!(flight.detect_lost(16 * MS, 5 * MS), Some(17 * MS));
        assert_eq!(flight.lost_bytes(), 100);
        assert_eq!(flight.detect_lost(17 * MS, 5 * MS), None);
        assert_eq!(flight.first_lost().unwrap().start, Seq(0));
        assert_eq!(flight.lost_bytes(), 200, "the fourth was sent later");
    }

    #[test]
    fn a_retransmission_that_is_lost_too_is_found() {
        let mut flight = flight(10);
        sack(&mut flight, 15 * MS, 100, 200);
        flight.detect_lost(15 * MS, 0);
        flight.resent(15 * MS, Seq(0), Seq(100));
        sack(&mut flight, 20 * MS, 200, 1000);
        assert_eq!(flight.detect_lost(20 * MS, 0), None);
        assert_eq!(flight.lost_bytes(), 0, "the retransmission was sent last");
        flight.push(Sent {
            start: Seq(1000),
            end: Seq(1100),
            at_ns: 16 * MS,
            ..*flight.last().unwrap()
        });
        flight.sent.back_mut().unwrap().sacked = false;
        sack(&mut flight, 40 * MS, 1000, 1100);
        flight.detect_lost(40 * MS, 0);
        assert_eq!(flight.lost_bytes(), 100);
    }

    #[test]
    fn rfc2018_8_a_peer_may_go_back_on_its_word() {
        let mut flight = flight(3);
        sack(&mut flight, 9 * MS, 100, 300);
        flight.mark_all_lost(false);
        assert_eq!(flight.lost_bytes(), 100);
        flight.mark_all_lost(true);
        assert_eq!((flight.lost_bytes(), flight.has_sacked()), (300, false));
    }

    #[test]
    fn a_segment_can_be_cut_for_a_smaller_path() {
        let mut flight = flight(2);
        flight.mark_all_lost(false);
        flight.resent(9 * MS, Seq(0), Seq(60));
        assert_eq!((flight.len(), flight.lost_bytes()), (3, 140));
        let lost = *flight.first_lost().unwrap();
        assert_eq!((lost.start, lost.end), (Seq(60), Seq(100)));
    }

    #[test]
    fn karn_a_segment_sent_twice_gives_no_round_trip() {
        let mut flight = flight(2);
        flight.mark_first_lost();
        flight.resent(9 * MS, Seq(0), Seq(100));
        let mut progress = Progress::default();
        flight.acknowledge(11 * MS, Seq(100), &mut progress);
        assert_eq!(progress.rtt_ns, None);
        flight.acknowledge(11 * MS, Seq(200), &mut progress);
        assert_eq!(progress.rtt_ns, Some(9 * MS));
    }
}
