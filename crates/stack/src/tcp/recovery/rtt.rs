//! Round-trip time estimate and retransmission time-out (RFC 6298).

use crate::tcp::identity::whole_seconds;

/// Minimum retransmission time-out. RFC 6298 section 2.4 says one second; all major stacks use
/// less, because timers are finer now.
const MIN_RTO_US: u32 = 200_000;
/// Initial retransmission time-out (RFC 6298 section 2.1).
const INITIAL_RTO_US: u32 = 1_000_000;
/// Initial time-out for data after a retransmitted SYN (RFC 6298 section 5.7).
const INITIAL_RTO_AFTER_LOSS_US: u32 = 3_000_000;
/// Maximum time-out (RFC 6298 section 2.5 allows a maximum of 60 seconds or more).
const MAX_RTO_US: u32 = 120_000_000;
/// Lifetime of the minimum round-trip time.
const MIN_RTT_LIFETIME_S: u32 = 300;

/// Round-trip time estimate of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RttEstimator {
    /// Smoothed round-trip time (SRTT); 0 before the first sample.
    smoothed_us: u32,
    variation_us: u32,
    min_us: u32,
    min_since_s: u32,
    /// Number of times the time-out was doubled.
    pub(crate) backoff: u8,
    /// True if the SYN was retransmitted.
    pub(crate) lost_syn: bool,
}

/// Snapshot of a [`RttEstimator`].
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct RttSnapshot {
    smoothed_us: u32,
    variation_us: u32,
    min_us: u32,
    min_age_s: u32,
    backoff: u8,
    lost_syn: bool,
}

impl RttEstimator {
    /// Saves the estimate; times become relative to `now_ns`.
    pub(crate) fn save(&self, now_ns: u64) -> RttSnapshot {
        let Self { smoothed_us, variation_us, min_us, min_since_s, backoff, lost_syn } = *self;
        let min_age_s = whole_seconds(now_ns).wrapping_sub(min_since_s);
        RttSnapshot { smoothed_us, variation_us, min_us, min_age_s, backoff, lost_syn }
    }

    /// Continues a saved estimate.
    pub(crate) fn restore(now_ns: u64, saved: &RttSnapshot) -> Self {
        Self {
            smoothed_us: saved.smoothed_us.min(MAX_RTO_US),
            variation_us: saved.variation_us.min(MAX_RTO_US),
            min_us: saved.min_us.min(MAX_RTO_US),
            min_since_s: whole_seconds(now_ns).wrapping_sub(saved.min_age_s),
            backoff: saved.backoff,
            lost_syn: saved.lost_syn,
        }
    }

    /// Adds a sample, from a segment that was sent only once (Karn's algorithm, RFC 6298
    /// section 3).
    pub(crate) fn sample(&mut self, now_ns: u64, rtt_ns: u64) {
        let rtt_us = u32::try_from(rtt_ns / 1000).unwrap_or(u32::MAX).clamp(1, MAX_RTO_US);
        if self.smoothed_us == 0 {
            self.smoothed_us = rtt_us;
            self.variation_us = rtt_us / 2;
        } else {
            let error = self.smoothed_us.abs_diff(rtt_us);
            self.variation_us = self.variation_us - self.variation_us / 4 + error / 4;
            self.smoothed_us = (self.smoothed_us - self.smoothed_us / 8 + rtt_us / 8).max(1);
        }
        if self.min_us == 0
            || rtt_us <= self.min_us
            || whole_seconds(now_ns).wrapping_sub(self.min_since_s) > MIN_RTT_LIFETIME_S
        {
            (self.min_us, self.min_since_s) = (rtt_us, whole_seconds(now_ns));
        }
        self.backoff = 0;
    }

    /// Smoothed round-trip time; `None` before the first sample.
    pub(crate) fn smoothed_ns(&self) -> Option<u64> {
        (self.smoothed_us != 0).then_some(u64::from(self.smoothed_us) * 1000)
    }

    /// Mean deviation of the round-trip time (RTTVAR); 0 before the first sample.
    pub(crate) fn variation_ns(&self) -> u64 {
        u64::from(self.variation_us) * 1000
    }

    /// Minimum of the recent round-trip times; 0 before the first sample.
    pub(crate) fn min_ns(&self) -> u64 {
        u64::from(self.min_us) * 1000
    }

    /// Retransmission time-out, doubled once per consecutive expiry.
    pub(crate) fn rto_ns(&self) -> u64 {
        self.probe_wait_ns(0)
    }

    /// Time until the next window probe after `probes` probes: the retransmission time-out, doubled
    /// once per probe (RFC 9293 section 3.8.6.1).
    pub(crate) fn probe_wait_ns(&self, probes: u8) -> u64 {
        let rto_us = match self.smoothed_us {
            0 if self.lost_syn => INITIAL_RTO_AFTER_LOSS_US,
            0 => INITIAL_RTO_US,
            smoothed => (smoothed + (4 * self.variation_us).max(1000)).max(MIN_RTO_US),
        };
        let doubled = u64::from(rto_us) << self.backoff.saturating_add(probes).min(16);
        doubled.min(MAX_RTO_US.into()) * 1000
    }

    /// Doubles the time-out after an expiry (RFC 6298 section 5.5).
    pub(crate) fn back_off(&mut self) {
        self.backoff = self.backoff.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn rfc6298_section_2() {
        let mut rtt = RttEstimator::default();
        assert_eq!(rtt.rto_ns(), 1000 * MS, "2.1: one second before any sample");
        rtt.sample(0, 400 * MS);
        assert_eq!(rtt.smoothed_ns(), Some(400 * MS), "2.2");
        assert_eq!(rtt.rto_ns(), (400 + 4 * 200) * MS, "2.2");
        rtt.sample(0, 800 * MS);
        // 2.3: variation 3/4 * 200 + 1/4 * 400, smoothed 7/8 * 400 + 1/8 * 800.
        assert_eq!(rtt.smoothed_ns(), Some(450 * MS));
        assert_eq!(rtt.rto_ns(), (450 + 4 * 250) * MS);
    }

    #[test]
    fn timeout_doubles_up_to_limit_until_next_sample() {
        let mut rtt = RttEstimator::default();
        for expected in [1, 2, 4, 8, 16, 32, 64, 120, 120] {
            assert_eq!(rtt.rto_ns(), expected * 1000 * MS);
            rtt.back_off();
        }
        rtt.sample(0, MS);
        assert_eq!(rtt.rto_ns(), 200 * MS);
    }

    #[test]
    fn min_rtt_expires() {
        let mut rtt = RttEstimator::default();
        rtt.sample(0, 5 * MS);
        rtt.sample(MS, 9 * MS);
        assert_eq!(rtt.min_ns(), 5 * MS);
        rtt.sample((u64::from(MIN_RTT_LIFETIME_S) + 1) * 1000 * MS, 9 * MS);
        assert_eq!(rtt.min_ns(), 9 * MS);
    }
}
