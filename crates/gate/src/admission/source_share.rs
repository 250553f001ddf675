//! Fair shares between the sources of a class.

use super::bucket::Bucket;
use super::class::PacketRate;
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

    /// True if a packet of the source is within the rate.
    #[inline]
    pub(crate) fn has_room(
        &self,
        now_ns: u64,
        source: SourceId,
        class: usize,
        rate: PacketRate,
    ) -> bool {
        self.bucket(now_ns, self.indices(source, class), rate).has_room(now_ns, rate)
    }

    /// Counts a packet of the source.
    #[inline]
    pub(crate) fn charge(&mut self, now_ns: u64, source: SourceId, class: usize, rate: PacketRate) {
        let indices = self.indices(source, class);
        let PacketRate { interval_ns, burst_ns } = rate;
        let mut bucket = self.bucket(now_ns, indices, rate);
        bucket.charge(now_ns, rate);
        for index in indices {
            self.buckets[index] = self.buckets[index].later(bucket, now_ns, interval_ns, burst_ns);
        }
    }

    #[inline]
    fn indices(&self, source: SourceId, class: usize) -> [usize; 2] {
        let hash = self.key.hash_in_class(source, class);
        [
            hash as usize % SOURCE_BUCKETS_PER_ROW,
            SOURCE_BUCKETS_PER_ROW + (hash >> 32) as usize % SOURCE_BUCKETS_PER_ROW,
        ]
    }

    #[inline]
    fn bucket(&self, now_ns: u64, indices: [usize; 2], rate: PacketRate) -> Bucket {
        let [one, other] = indices.map(|index| self.buckets[index]);
        one.earlier(other, now_ns, rate.interval_ns, rate.burst_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    const MS: u64 = 1_000_000;

    fn allow(
        share: &mut SourceShare,
        now_ns: u64,
        source: SourceId,
        class: usize,
        rate: PacketRate,
    ) -> bool {
        let allowed = share.has_room(now_ns, source, class, rate);
        if allowed {
            share.charge(now_ns, source, class, rate);
        }
        allowed
    }

    fn source(n: u32) -> SourceId {
        SourceId::from_address(IpAddr::V4(Ipv4Addr::from_bits(n)))
    }

    #[test]
    fn limits_a_loud_source_and_no_quiet_one() {
        let mut share = SourceShare::new(SourceKey::new([1; 16]));
        let rate = PacketRate { interval_ns: MS, burst_ns: 9 * MS };
        let mut take =
            |now_ms: u64, n, class| allow(&mut share, now_ms * MS, source(n), class, rate);
        assert_eq!((0..1000).filter(|_| take(1000, 1, 0)).count(), 10);
        for n in 2..200 {
            assert!(take(1000, n, 0), "{n}");
        }
        assert!(take(1000, 1, 1), "each class has its own share");
        assert_eq!((0..1000).filter(|_| take(1005, 1, 0)).count(), 5, "one per millisecond");
        assert_eq!((0..1000).filter(|_| take(5, 1, 0)).count(), 1, "the clock jumped back");
    }

    #[test]
    fn sources_beyond_the_bucket_count_stay_within_their_rate() {
        let mut share = SourceShare::new(SourceKey::new([1; 16]));
        let rate = PacketRate { interval_ns: MS, burst_ns: 0 };
        for n in 0..100_000 {
            let allowed = (0..3).filter(|_| allow(&mut share, MS, source(n), 0, rate)).count();
            assert!(allowed <= 1, "{n}");
        }
    }
}
