//! How long a round trip takes, and how long to wait for one (RFC 6298).

use serde::{Deserialize, Serialize};

use super::arrival::seconds;

/// The least retransmission time-out. RFC 6298 section 2.4 says one second;
/// every large stack waits less, since timers are finer now.
const MIN_RTO_US: u32 = 200_000;
/// The first retransmission time-out (RFC 6298 section 2.1).
const INITIAL_RTO_US: u32 = 1_000_000;
/// The same for data, when the SYN had to be sent again (RFC 6298 section 5.7).
const INITIAL_RTO_AFTER_LOSS_US: u32 = 3_000_000;
/// The longest (RFC 6298 section 2.5 allows a limit of 60 seconds or more).
const MAX_RTO_US: u32 = 120_000_000;
/// How long the least round trip is believed.
const MIN_WINDOW_S: u32 = 300;

/// The estimate of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RoundTrip {
    /// Smoothed; 0 before the first sample.
    smoothed_us: u32,
    variation_us: u32,
    min_us: u32,
    min_since_s: u32,
    /// How often the time-out was doubled.
    pub(crate) backoff: u8,
    /// The SYN had to be sent again.
    pub(crate) lost_syn: bool,
}

/// A [`RoundTrip`] as plain data.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SavedRoundTrip {
    smoothed_us: u32,
    variation_us: u32,
    min_us: u32,
    min_age_s: u32,
    backoff: u8,
    lost_syn: bool,
}

impl RoundTrip {
    /// What there is to know about it.
    pub(crate) fn save(&self, now_ns: u64) -> SavedRoundTrip {
        let Self { smoothed_us, variation_us, min_us, min_since_s, backoff, lost_syn } = *self;
        let min_age_s = seconds(now_ns).wrapping_sub(min_since_s);
        SavedRoundTrip { smoothed_us, variation_us, min_us, min_age_s, backoff, lost_syn }
    }

    /// One that goes on where another was saved.
    pub(crate) fn restore(now_ns: u64, saved: &SavedRoundTrip) -> Self {
        Self {
            smoothed_us: saved.smoothed_us.min(MAX_RTO_US),
            variation_us: saved.variation_us.min(MAX_RTO_US),
            min_us: saved.min_us.min(MAX_RTO_US),
            min_since_s: seconds(now_ns).wrapping_sub(saved.min_age_s),
            backoff: saved.backoff,
            lost_syn: saved.lost_syn,
        }
    }

    /// Takes a sample, which must be of a segment that was sent once (Karn's
    /// algorithm, RFC 6298 section 3).
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
            || seconds(now_ns).wrapping_sub(self.min_since_s) > MIN_WINDOW_S
        {
            (self.min_us, self.min_since_s) = (rtt_us, seconds(now_ns));
        }
        self.backoff = 0;
    }

    /// The smoothed round trip, once there was a sample.
    pub(crate) fn smoothed_ns(&self) -> Option<u64> {
        (self.smoothed_us != 0).then_some(u64::from(self.smoothed_us) * 1000)
    }

    /// The shortest round trip of late; 0 before the first sample.
    pub(crate) fn min_ns(&self) -> u64 {
        u64::from(self.min_us) * 1000
    }

    /// The retransmission time-out, doubled as often as it has run out.
    pub(crate) fn rto_ns(&self) -> u64 {
        let rto_us = match self.smoothed_us {
            0 if self.lost_syn => INITIAL_RTO_AFTER_LOSS_US,
            0 => INITIAL_RTO_US,
            smoothed => (smoothed + (4 * self.variation_us).max(1000)).max(MIN_RTO_US),
        };
        let doubled = u64::from(rto_us) << self.backoff.min(16);
        doubled.min(MAX_RTO_US.into()) * 1000
    }

    /// The time-out ran out (RFC 6298 section 5.5).
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
        let mut rtt = RoundTrip::default();
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
    fn the_time_out_doubles_up_to_a_limit_and_a_sample_ends_that() {
        let mut rtt = RoundTrip::default();
        for expected in [1, 2, 4, 8, 16, 32, 64, 120, 120] {
            assert_eq!(rtt.rto_ns(), expected * 1000 * MS);
            rtt.back_off();
        }
        rtt.sample(0, MS);
        assert_eq!(rtt.rto_ns(), 200 * MS);
    }

    #[test]
    fn the_least_round_trip_is_forgotten_in_time() {
        let mut rtt = RoundTrip::default();
        rtt.sample(0, 5 * MS);
        rtt.sample(MS, 9 * MS);
        assert_eq!(rtt.min_ns(), 5 * MS);
        rtt.sample((u64::from(MIN_WINDOW_S) + 1) * 1000 * MS, 9 * MS);
        assert_eq!(rtt.min_ns(), 9 * MS);
    }
}
