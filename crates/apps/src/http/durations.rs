//! Distribution of the time that responses took to make.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets in microseconds; one more bucket has no bound.
const BOUNDS_US: [u64; 17] = [
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000, 2_500_000,
];

/// Counts of durations in buckets, which any thread may add to.
#[derive(Debug, Default)]
pub struct DurationCounts {
    counts: [AtomicU64; BOUNDS_US.len() + 1],
    sum_ns: AtomicU64,
}

impl DurationCounts {
    /// Counts a duration.
    pub(super) fn record(&self, duration: Duration) {
        let us = duration.as_micros() as u64;
        let bucket = BOUNDS_US.partition_point(|bound| *bound < us);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(duration.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Upper bounds in seconds, the last infinite, each with the number of durations above the bound
    /// before.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = BOUNDS_US.iter().map(|us| *us as f64 / 1e6).chain([f64::INFINITY]);
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
        for us in [0, 10, 11, 2_500_000, 2_500_001, 90_000_000] {
            durations.record(Duration::from_micros(us));
        }
        let buckets = durations.buckets();
        assert_eq!(buckets[0], (1e-5, 2));
        assert_eq!(buckets[1], (2.5e-5, 1));
        assert_eq!(buckets[16], (2.5, 1));
        assert_eq!(buckets[17], (f64::INFINITY, 2));
        assert!((durations.sum_seconds() - 95.000_022).abs() < 1e-6, "{durations:?}");
    }
}
