//! Fair shares between the sources of a class.

use super::bucket::Bucket;
use super::hash::{SourceId, SourceKey};

/// Number of buckets in each of the two rows.
pub const SOURCE_BUCKETS_PER_ROW: usize = 8192;

/// Rate limiter for each source, in constant memory.
///
/// This is a count-min sketch with conservative update (Cormode and Muthukrishnan 2005; Estan
/// and Varghese 2002), with a [`Bucket`] in place of each counter. No source exceeds its rate.
/// Sources that share both buckets share one rate. A source that shares only one bucket with
/// a loud source is not affected.
#[derive(Clone, Debug)]
pub struct SourceShare {
    key: SourceKey,
    /// Buckets of both rows, row after row.
    buckets: Box<[Bucket]>,
}

impl SourceShare {
    /// Creates the limiter with empty buckets.
    pub fn new(key: SourceKey) -> Self {
        Self { key, buckets: vec![Bucket::default(); 2 * SOURCE_BUCKETS_PER_ROW].into() }
    }

    /// Returns true if a packet of the source is within the rate of one packet per `interval_ns`
    /// with `burst_ns` of tolerance. Only packets within the rate are counted.
    #[inline]
    pub fn allow(
        &mut self,
        now_ns: u64,
        source: SourceId,
        class: usize,
        interval_ns: u64,
        burst_ns: u64,
    ) -> bool {
        let hash = self.key.hash_in_class(source, class);
        let indices = [
            hash as usize % SOURCE_BUCKETS_PER_ROW,
            SOURCE_BUCKETS_PER_ROW + (hash >> 32) as usize % SOURCE_BUCKETS_PER_ROW,
        ];
        let [one, other] = indices.map(|index| self.buckets[index]);
        let mut bucket = one.earlier(other, now_ns, interval_ns, burst_ns);
        if !bucket.allow(now_ns, interval_ns, burst_ns) {
            return false;
        }
        for index in indices {
            self.buckets[index] = self.buckets[index].later(bucket, now_ns, interval_ns, burst_ns);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    const MS: u64 = 1_000_000;

    fn source(n: u32) -> SourceId {
        SourceId::from_address(IpAddr::V4(Ipv4Addr::from_bits(n)))
    }

    #[test]
    fn limits_a_loud_source_and_no_quiet_one() {
        let mut share = SourceShare::new(SourceKey::new([1; 16]));
        let mut take =
            |now_ms: u64, n, class| share.allow(now_ms * MS, source(n), class, MS, 9 * MS);
        assert_eq!((0..1000).filter(|_| take(1000, 1, 0)).count(), 10);
        for n in 2..200 {
            assert!(take(1000, n, 0), "{n}");
        }
        assert!(take(1000, 1, 1), "each class has its own share");
        assert_eq!((0..1000).filter(|_| take(1005, 1, 0)).count(), 5, "one per millisecond");
        assert_eq!((0..1000).filter(|_| take(5, 1, 0)).count(), 10, "the clock jumped back");
    }

    #[test]
    fn sources_beyond_the_bucket_count_stay_within_their_rate() {
        let mut share = SourceShare::new(SourceKey::new([1; 16]));
        for n in 0..100_000 {
            let allowed = (0..3).filter(|_| share.allow(MS, source(n), 0, MS, 0)).count();
            assert!(allowed <= 1, "{n}");
        }
    }
}
