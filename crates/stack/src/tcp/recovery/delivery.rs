//! Rate at which the peer acknowledges data, measured once in each round trip.

use crate::tcp::seq::Seq;
use crate::tcp::timers::NS_PER_MS;

/// Round trip in which acknowledged data is counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeliveryRound {
    /// Start of the round; 0 while there is none.
    began_ns: u64,
    /// First number that counts, and the number whose acknowledgement ends the round.
    start: Seq,
    end: Seq,
}

impl DeliveryRound {
    /// Begins with the segment `start..end`, sent now, when nothing was in flight.
    #[inline]
    pub(crate) fn begin(&mut self, now_ns: u64, start: Seq, end: Seq) {
        *self = Self { began_ns: now_ns.max(1), start, end };
    }

    /// Ends the round if all before its end is acknowledged, and begins the next one. Returns bytes
    /// in a millisecond. A round is no shorter than `min_rtt_ns`: acknowledgements of one burst
    /// come at once.
    #[inline]
    pub(crate) fn finish_round(
        &mut self,
        now_ns: u64,
        una: Seq,
        nxt: Seq,
        min_rtt_ns: u64,
    ) -> Option<u32> {
        let Self { began_ns, start, end } = *self;
        if began_ns != 0 && una.is_before(end) {
            return None;
        }
        self.begin(now_ns, una, nxt);
        if began_ns == 0 || una == start {
            return None;
        }
        let took_ns = now_ns.saturating_sub(began_ns).max(min_rtt_ns).max(1);
        let rate = u64::from(una.since(start)) * NS_PER_MS / took_ns;
        Some(u32::try_from(rate).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = NS_PER_MS;

    #[test]
    fn a_rate_covers_a_round_trip() {
        let mut round = DeliveryRound::default();
        round.begin(MS, Seq(0), Seq(1000));
        // Ten segments left at once; the first acknowledgement comes after 10 ms.
        assert_eq!(round.finish_round(11 * MS, Seq(1000), Seq(10_000), 10 * MS), Some(100));
        assert_eq!(round.finish_round(11 * MS + 1, Seq(5000), Seq(20_000), 10 * MS), None);
        // The others come right after it.
        assert_eq!(round.finish_round(12 * MS, Seq(10_000), Seq(20_000), 10 * MS), Some(900));
        assert_eq!(round.finish_round(22 * MS, Seq(20_000), Seq(20_000), 10 * MS), Some(1000));
    }

    #[test]
    fn a_restored_flight_begins_with_the_next_acknowledgement() {
        let mut round = DeliveryRound::default();
        assert_eq!(round.finish_round(MS, Seq(1000), Seq(2000), 0), None);
        assert_eq!(round.finish_round(2 * MS, Seq(2000), Seq(2000), 0), Some(1000));
    }
}
