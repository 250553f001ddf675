//! Latencies in a high dynamic range histogram.

use hdrhistogram::Histogram;
use serde::Serialize;

/// Largest value of the histogram: one minute. Longer latencies count as one minute.
const MAX_LATENCY_NS: u64 = 60_000_000_000;

/// Histogram of latencies from 1 ns to one minute, with three significant digits.
#[derive(Clone)]
pub struct LatencyHistogram {
    histogram: Histogram<u64>,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, MAX_LATENCY_NS, 3);
        Self { histogram: histogram.expect("1 to a minute with three digits is within bounds") }
    }
}

impl LatencyHistogram {
    /// Adds one latency.
    #[inline]
    pub fn record(&mut self, latency_ns: u64) {
        self.histogram.saturating_record(latency_ns.max(1));
    }

    /// Adds the same latency `count` times.
    pub fn record_many(&mut self, latency_ns: u64, count: u64) {
        self.histogram.saturating_record_n(latency_ns.max(1), count);
    }

    /// Adds all latencies of another histogram.
    pub fn merge(&mut self, other: &Self) {
        // Both have the same bounds, so every value fits.
        let merged = self.histogram.add(&other.histogram);
        debug_assert!(merged.is_ok());
    }

    /// Removes all latencies.
    pub fn clear(&mut self) {
        self.histogram.reset();
    }

    /// Returns the number of latencies.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Returns the latency that `percentile` percent do not exceed, in microseconds.
    pub fn percentile_us(&self, percentile: f64) -> f64 {
        self.histogram.value_at_percentile(percentile) as f64 / 1e3
    }

    /// Returns the summary for reports.
    pub fn summary(&self) -> LatencySummary {
        LatencySummary {
            count: self.count(),
            mean_us: self.histogram.mean() / 1e3,
            p50_us: self.percentile_us(50.0),
            p90_us: self.percentile_us(90.0),
            p95_us: self.percentile_us(95.0),
            p99_us: self.percentile_us(99.0),
            p999_us: self.percentile_us(99.9),
            max_us: self.histogram.max() as f64 / 1e3,
        }
    }
}

/// Percentiles of latency, in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct LatencySummary {
    /// Number of latencies.
    pub count: u64,
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 95th percentile.
    pub p95_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// Maximum.
    pub max_us: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_equals_recording_in_one_histogram() {
        let (mut one, mut two, mut all) =
            (LatencyHistogram::default(), LatencyHistogram::default(), LatencyHistogram::default());
        for i in 1..=1000u64 {
            if i % 3 == 0 {
                one.record(i * 1000);
            } else {
                two.record(i * 1000);
            }
            all.record(i * 1000);
        }
        one.merge(&two);
        assert_eq!(one.count(), 1000);
        for p in [1.0, 50.0, 99.0, 100.0] {
            assert_eq!(one.percentile_us(p), all.percentile_us(p));
        }
        let p50 = one.summary().p50_us;
        assert!((499.0..=501.0).contains(&p50), "{p50}");
    }

    #[test]
    fn clamps_latencies_to_the_bounds() {
        let mut latencies = LatencyHistogram::default();
        latencies.record(0);
        latencies.record(u64::MAX);
        assert_eq!(latencies.count(), 2);
        assert!(latencies.summary().max_us >= 59e6);
        latencies.clear();
        assert_eq!(latencies.summary().count, 0);
    }
}
