//! HyStart++: leaves slow start when the round trip grows, before the queue of the bottleneck
//! overflows (RFC 9406).

use super::AckInfo;
use crate::tcp::seq::Seq;

/// Bounds of the growth of the round trip that ends slow start, in microseconds
/// (MIN_RTT_THRESH and MAX_RTT_THRESH).
const MIN_GROWTH_US: u32 = 4_000;
const MAX_GROWTH_US: u32 = 16_000;
/// Fraction of the round trip that ends slow start within these bounds (MIN_RTT_DIVISOR).
const GROWTH_DIVISOR: u32 = 8;
/// Samples from which on the minimum of a round counts (N_RTT_SAMPLE).
const MIN_SAMPLES: u8 = 8;
/// Divisor of the window's growth in conservative slow start (CSS_GROWTH_DIVISOR).
const CAUTIOUS_DIVISOR: u32 = 4;
/// Rounds of conservative slow start (CSS_ROUNDS).
const CAUTIOUS_ROUNDS: u8 = 5;

/// No sample yet.
const NONE_US: u32 = u32::MAX;

/// State of the initial slow start: minimum round trips of its rounds, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct HyStart {
    /// SND.NXT at the start of the round: its acknowledgement ends the round.
    round_end: Seq,
    last_min_us: u32,
    current_min_us: u32,
    /// Minimum at the start of conservative slow start (cssBaselineMinRtt).
    baseline_us: u32,
    samples: u8,
    /// Rounds of conservative slow start that are left, this one included; 0 in standard slow
    /// start.
    cautious_rounds: u8,
    /// The first round has begun: `round_end` is set.
    has_begun: bool,
}

/// Growth of the window after an acknowledgement in slow start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlowStartStep {
    /// The window grows by these bytes.
    Grow(u32),
    /// Slow start ends at the present window.
    End,
}

impl HyStart {
    /// Nothing was sent yet.
    pub(super) const fn new() -> Self {
        Self {
            round_end: Seq(0),
            last_min_us: NONE_US,
            current_min_us: NONE_US,
            baseline_us: NONE_US,
            samples: 0,
            cautious_rounds: 0,
            has_begun: false,
        }
    }

    /// Processes an acknowledgement of new data in slow start (section 4.2).
    pub(super) fn on_ack(&mut self, acked: &AckInfo) -> SlowStartStep {
        let is_over = !self.has_begun || !acked.una.is_before(self.round_end);
        if is_over && self.begin_round(acked) {
            return SlowStartStep::End;
        }
        if let Some(rtt_ns) = acked.sample_ns {
            let rtt_us = u32::try_from(rtt_ns / 1000).unwrap_or(NONE_US - 1);
            self.current_min_us = self.current_min_us.min(rtt_us);
            self.samples = self.samples.saturating_add(1);
        }
        if self.samples >= MIN_SAMPLES {
            self.judge_round();
        }
        let divisor = if self.cautious_rounds > 0 { CAUTIOUS_DIVISOR } else { 1 };
        // The limit L is that of senders with pacing: none.
        SlowStartStep::Grow(acked.bytes / divisor)
    }

    /// Begins a round; returns true when that ends the last round of conservative slow start.
    fn begin_round(&mut self, acked: &AckInfo) -> bool {
        (self.round_end, self.has_begun) = (acked.nxt, true);
        self.last_min_us = self.current_min_us;
        (self.current_min_us, self.samples) = (NONE_US, 0);
        let was_last = self.cautious_rounds == 1;
        self.cautious_rounds = self.cautious_rounds.saturating_sub(1);
        was_last
    }

    /// Enters conservative slow start when the round trip has grown, and leaves it when it has
    /// fallen again.
    fn judge_round(&mut self) {
        if self.cautious_rounds > 0 {
            if self.current_min_us < self.baseline_us {
                (self.cautious_rounds, self.baseline_us) = (0, NONE_US);
            }
        } else if self.last_min_us != NONE_US && self.current_min_us != NONE_US {
            let growth_us = (self.last_min_us / GROWTH_DIVISOR).clamp(MIN_GROWTH_US, MAX_GROWTH_US);
            if self.current_min_us >= self.last_min_us.saturating_add(growth_us) {
                self.baseline_us = self.current_min_us;
                self.cautious_rounds = CAUTIOUS_ROUNDS;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1000;

    /// Acknowledges `samples` segments of round `round` with one round trip each; returns the steps.
    fn round(hystart: &mut HyStart, round: u32, samples: u32, rtt_ms: u64) -> Vec<SlowStartStep> {
        // The numbers begin in the upper half of the circle.
        let start = Seq(3_000_000_000) + 1_000_000 * round;
        let ack = |n: u32| AckInfo {
            bytes: MSS,
            mss: MSS,
            now_ns: 0,
            rtt_ns: 0,
            sample_ns: Some(rtt_ms * 1_000_000),
            una: start + n,
            nxt: start + 1_000_000,
        };
        (0..samples).map(|n| hystart.on_ack(&ack(n))).collect()
    }

    #[test]
    fn rfc9406_4_2_slow_start_becomes_cautious_and_ends_after_five_rounds() {
        let mut hystart = HyStart::new();
        for number in 1..3 {
            assert_eq!(round(&mut hystart, number, 20, 40), [SlowStartStep::Grow(MSS); 20]);
        }
        // An eighth of 40 ms.
        assert_eq!(round(&mut hystart, 3, 20, 44), [SlowStartStep::Grow(MSS); 20]);
        let steps = round(&mut hystart, 4, 20, 50);
        assert_eq!(steps[..7], [SlowStartStep::Grow(MSS); 7]);
        assert_eq!(steps[7..], [SlowStartStep::Grow(MSS / 4); 13]);
        for number in 5..9 {
            assert_eq!(round(&mut hystart, number, 20, 50), [SlowStartStep::Grow(MSS / 4); 20]);
        }
        assert_eq!(round(&mut hystart, 9, 1, 50), [SlowStartStep::End]);
    }

    #[test]
    fn rfc9406_4_2_slow_start_goes_on_when_the_round_trip_falls_again() {
        let mut hystart = HyStart::new();
        for (number, rtt_ms) in [(1, 10), (2, 16)] {
            round(&mut hystart, number, 10, rtt_ms);
        }
        let steps = round(&mut hystart, 3, 10, 15);
        assert_eq!((steps[0], steps[9]), (SlowStartStep::Grow(MSS / 4), SlowStartStep::Grow(MSS)));
    }

    #[test]
    fn rfc9406_4_2_few_samples_do_not_count() {
        let mut hystart = HyStart::new();
        for number in 1..6 {
            let steps = round(&mut hystart, number, 7, u64::from(10 * number));
            assert_eq!(steps, [SlowStartStep::Grow(MSS); 7]);
        }
    }
}
