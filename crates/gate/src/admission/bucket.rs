//! Rate limiter with a single number of state (GCRA).

use super::class::PacketRate;

/// Rate limiter: the generic cell rate algorithm (ITU-T I.371).
///
/// The state is the time at which the next packet is due. A packet may arrive earlier than
/// that by at most the burst tolerance. This is equivalent to a token bucket, without tokens
/// to refill. The BPF program runs the same algorithm on the same state.
///
/// # Examples
///
/// ```
/// use tidegate_gate::admission::Bucket;
///
/// let mut bucket = Bucket::default();
/// // One packet per microsecond, with a tolerance of two microseconds.
/// let allowed = (0..10).filter(|_| bucket.allow(1_000_000, 1_000, 2_000)).count();
/// assert_eq!(allowed, 3);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    due_ns: u64,
}

impl Bucket {
    /// Returns true if a packet at `now_ns` is within the rate of one packet per `interval_ns`
    /// with `burst_ns` of tolerance. Only packets within the rate are counted.
    #[inline(always)]
    pub fn allow(&mut self, now_ns: u64, interval_ns: u64, burst_ns: u64) -> bool {
        let due_ns = self.due_ns(now_ns, interval_ns, burst_ns);
        if due_ns > now_ns.saturating_add(burst_ns) {
            return false;
        }
        self.due_ns = due_ns.max(now_ns).saturating_add(interval_ns);
        true
    }

    /// True if a packet at `now_ns` is within the rate and its burst tolerance.
    #[inline(always)]
    pub(crate) fn has_room(self, now_ns: u64, rate: PacketRate) -> bool {
        let PacketRate { interval_ns, burst_ns } = rate;
        self.due_ns(now_ns, interval_ns, burst_ns) <= now_ns.saturating_add(burst_ns)
    }

    /// True if a packet at `now_ns` is within the rate and half of its burst tolerance.
    #[inline(always)]
    pub(super) fn is_half_free(self, now_ns: u64, rate: PacketRate) -> bool {
        let PacketRate { interval_ns, burst_ns } = rate;
        self.due_ns(now_ns, interval_ns, burst_ns) <= now_ns.saturating_add(burst_ns / 2)
    }

    /// Counts a packet. A packet above the rate leaves the bucket full.
    #[inline(always)]
    pub(crate) fn charge(&mut self, now_ns: u64, rate: PacketRate) {
        let PacketRate { interval_ns, burst_ns } = rate;
        let due_ns = self.due_ns(now_ns, interval_ns, burst_ns).max(now_ns);
        let latest_ns = now_ns.saturating_add(burst_ns);
        self.due_ns = due_ns.min(latest_ns).saturating_add(interval_ns);
    }

    /// Time at which the next packet is due. A stored time later than any packet can have set
    /// means that the clock jumped back or the rate was raised: the bucket is then full.
    #[inline(always)]
    fn due_ns(self, now_ns: u64, interval_ns: u64, burst_ns: u64) -> u64 {
        let latest_ns = now_ns.saturating_add(burst_ns).saturating_add(interval_ns);
        if self.due_ns > latest_ns { now_ns.saturating_add(burst_ns) } else { self.due_ns }
    }

    /// Returns the bucket whose next packet is due earlier.
    #[inline(always)]
    pub(super) fn earlier(self, other: Self, now_ns: u64, interval_ns: u64, burst_ns: u64) -> Self {
        let due_ns = |bucket: Self| bucket.due_ns(now_ns, interval_ns, burst_ns);
        Self { due_ns: due_ns(self).min(due_ns(other)) }
    }

    /// Returns the bucket whose next packet is due later.
    #[inline(always)]
    pub(super) fn later(self, other: Self, now_ns: u64, interval_ns: u64, burst_ns: u64) -> Self {
        let due_ns = |bucket: Self| bucket.due_ns(now_ns, interval_ns, burst_ns);
        Self { due_ns: due_ns(self).max(due_ns(other)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn allows_a_burst_then_the_rate() {
        let mut bucket = Bucket::default();
        let allowed = (0..100).filter(|_| bucket.allow(S, 1000, 10_000)).count();
        assert_eq!(allowed, 11);
        let allowed = (0..100).filter(|n| bucket.allow(S + n * 500, 1000, 10_000)).count();
        assert_eq!(allowed, 49, "half of the packets come in time, less the one taken before");
    }

    #[test]
    fn recovers_from_clock_jumps() {
        let mut bucket = Bucket::default();
        assert!(bucket.allow(5000 * S, 1000, 0));
        assert!(!bucket.allow(5000 * S, 1000, 0));
        assert!(bucket.allow(S, 1000, 0), "hours back");
        assert!(!bucket.allow(S, 1000, 0));
        assert!(bucket.allow(9000 * S, 1000, 0), "hours forward");
        assert!(!bucket.allow(9000 * S, 1000, 0), "no burst accumulates");
        assert!(bucket.allow(u64::MAX, u64::MAX, u64::MAX));
    }

    proptest! {
        #[test]
        fn no_more_than_rate_and_burst_pass(
            interval_ns in 1_u64..10_000,
            burst_ns in 0_u64..100_000,
            steps in proptest::collection::vec(0_u64..5_000, 1..500),
        ) {
            let (mut bucket, mut now_ns, mut taken) = (Bucket::default(), S, 0);
            for step in steps {
                now_ns += step;
                taken += u64::from(bucket.allow(now_ns, interval_ns, burst_ns));
            }
            prop_assert!(taken >= 1);
            prop_assert!((taken - 1) * interval_ns <= now_ns - S + burst_ns);
        }
    }
}
