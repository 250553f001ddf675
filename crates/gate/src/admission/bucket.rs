//! A rate limit in one number.

/// Holds something to a rate.
///
/// This is the generic cell rate algorithm (ITU-T I.371): the one number is
/// when the next packet is due. A packet may come before that by the burst
/// tolerance. It is a token bucket without tokens to refill, and the BPF
/// program does the same on the same number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    due_ns: u64,
}

impl Bucket {
    /// Whether a packet at `now_ns` is within the rate of one packet per
    /// `interval_ns` with `burst_ns` of tolerance; it is counted if it is.
    #[inline(always)]
    pub fn take(&mut self, now_ns: u64, interval_ns: u64, burst_ns: u64) -> bool {
        let due_ns = self.due_ns(now_ns, interval_ns, burst_ns);
        if due_ns > now_ns.saturating_add(burst_ns) {
            return false;
        }
        self.due_ns = due_ns.max(now_ns).saturating_add(interval_ns);
        true
    }

    /// When the next packet is due. A time that no packet can have made comes
    /// of a clock that jumped back or a rate that was raised: the bucket starts
    /// anew.
    #[inline(always)]
    fn due_ns(self, now_ns: u64, interval_ns: u64, burst_ns: u64) -> u64 {
        let latest_ns = now_ns.saturating_add(burst_ns).saturating_add(interval_ns);
        if self.due_ns > latest_ns { 0 } else { self.due_ns }
    }

    /// The one of two buckets whose next packet is due earlier.
    #[inline(always)]
    pub(super) fn earlier(self, other: Self, now_ns: u64, interval_ns: u64, burst_ns: u64) -> Self {
        let due_ns = |bucket: Self| bucket.due_ns(now_ns, interval_ns, burst_ns);
        Self { due_ns: due_ns(self).min(due_ns(other)) }
    }

    /// The one of two buckets whose next packet is due later.
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
    fn a_burst_passes_and_then_the_rate() {
        let mut bucket = Bucket::default();
        let taken = (0..100).filter(|_| bucket.take(S, 1000, 10_000)).count();
        assert_eq!(taken, 11);
        let taken = (0..100).filter(|n| bucket.take(S + n * 500, 1000, 10_000)).count();
        assert_eq!(taken, 49, "half of the packets come in time, less the one taken before");
    }

    #[test]
    fn a_clock_that_jumps_does_not_close_it() {
        let mut bucket = Bucket::default();
        assert!(bucket.take(5000 * S, 1000, 0));
        assert!(!bucket.take(5000 * S, 1000, 0));
        assert!(bucket.take(S, 1000, 0), "hours back");
        assert!(!bucket.take(S, 1000, 0));
        assert!(bucket.take(9000 * S, 1000, 0), "hours forth");
        assert!(!bucket.take(9000 * S, 1000, 0), "no more than one was saved up");
        assert!(bucket.take(u64::MAX, u64::MAX, u64::MAX));
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
                taken += u64::from(bucket.take(now_ns, interval_ns, burst_ns));
            }
            prop_assert!(taken >= 1);
            prop_assert!((taken - 1) * interval_ns <= now_ns - S + burst_ns);
        }
    }
}
