//! Distribution of durations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::ServiceTimes;

/// Upper bounds of the buckets in nanoseconds; one more bucket has no bound.
const BOUNDS_NS: [u64; 20] = [
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
];

/// Counts of durations in buckets, which any thread may add to.
#[derive(Debug, Default)]
pub struct DurationCounts {
    counts: [AtomicU64; BOUNDS_NS.len() + 1],
    sum_ns: AtomicU64,
}

impl DurationCounts {
    /// Counts `count` times the same duration.
    pub(crate) fn record(&self, count: u64, duration: Duration) {
        let ns = duration.as_nanos() as u64;
        let bucket = BOUNDS_NS.partition_point(|bound| *bound < ns);
        self.counts[bucket].fetch_add(count, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns.saturating_mul(count), Ordering::Relaxed);
    }

    /// Counts the service times of the last exchange.
    #[inline]
    pub fn record_last(&self, times: &ServiceTimes) {
        for &(count, time) in times.last() {
            self.record(count as u64, time);
        }
    }

    /// Upper bounds in seconds, the last infinite, each with the number of durations above the bound
    /// before.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = BOUNDS_NS.iter().map(|ns| *ns as f64 / 1e9).chain([f64::INFINITY]);
        bounds.zip(self.counts.iter().map(|count| count.load(Ordering::Relaxed))).collect()
    }

    /// Sum of all durations in seconds.
    pub fn sum_seconds(&self) -> f64 {
        self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_the_bucket_of_their_bound() {
        let durations = DurationCounts::default();
        for us in [0, 1, 2, 2_500_000, 2_500_001, 90_000_000] {
            durations.record(1, Duration::from_micros(us));
        }
        durations.record(64, Duration::from_nanos(2_501));
        let buckets = durations.buckets();
        assert_eq!(buckets[..3], [(1e-6, 2), (2.5e-6, 1), (5e-6, 64)]);
        assert_eq!(buckets[19..], [(2.5, 1), (f64::INFINITY, 2)]);
        assert!((durations.sum_seconds() - 95.000_164_064).abs() < 1e-6, "{durations:?}");
    }
}
