//! Fair shares between the sources of a class.

use super::bucket::Bucket;
use super::hash::{Source, SourceKey};

/// Buckets in each of the two rows.
pub const SOURCE_CELLS: usize = 8192;

/// Holds each source to a rate, in fixed memory.
///
/// This is a count-min sketch with conservative update (Cormode and
/// Muthukrishnan 2005; Estan and Varghese 2002) in which a cell is not a count
/// but a [`Bucket`]. No source gets more than its rate. Sources that share both
/// their buckets share one rate; who shares only one with a loud source is not
/// hurt by it.
#[derive(Clone, Debug)]
pub struct SourceShare {
    key: SourceKey,
    /// Two rows.
    cells: Box<[Bucket]>,
}

impl SourceShare {
    /// No source has sent anything.
    pub fn new(key: SourceKey) -> Self {
        Self { key, cells: vec![Bucket::default(); 2 * SOURCE_CELLS].into() }
    }

    /// Whether a packet of a source is within the rate of one packet per
    /// `interval_ns` with `burst_ns` of tolerance; it is counted if it is.
    #[inline]
    pub fn take(
        &mut self,
        now_ns: u64,
        source: Source,
        class: usize,
        interval_ns: u64,
        burst_ns: u64,
    ) -> bool {
        let hash = self.key.hash_in_class(source, class);
        let places =
            [hash as usize % SOURCE_CELLS, SOURCE_CELLS + (hash >> 32) as usize % SOURCE_CELLS];
        let [one, other] = places.map(|place| self.cells[place]);
        let mut bucket = one.earlier(other, now_ns, interval_ns, burst_ns);
        if !bucket.take(now_ns, interval_ns, burst_ns) {
            return false;
        }
        for place in places {
            self.cells[place] = self.cells[place].later(bucket, now_ns, interval_ns, burst_ns);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    const MS: u64 = 1_000_000;

    fn source(n: u32) -> Source {
        Source::of(IpAddr::V4(Ipv4Addr::from_bits(n)))
    }

    #[test]
    fn a_loud_source_is_held_and_a_quiet_one_is_not() {
        let mut share = SourceShare::new(SourceKey::new([1; 16]));
        let mut take =
            |now_ms: u64, n, class| share.take(now_ms * MS, source(n), class, MS, 9 * MS);
        assert_eq!((0..1000).filter(|_| take(1000, 1, 0)).count(), 10);
        for n in 2..200 {
            assert!(take(1000, n, 0), "{n}");
        }
        assert!(take(1000, 1, 1), "another class counts for itself");
        assert_eq!((0..1000).filter(|_| take(1005, 1, 0)).count(), 5, "one each millisecond");
        assert_eq!((0..1000).filter(|_| take(5, 1, 0)).count(), 10, "a clock that jumped back");
    }

    #[test]
    fn more_sources_than_buckets_never_get_more_than_their_rate() {
        let mut share = SourceShare::new(SourceKey::new([1; 16]));
        for n in 0..100_000 {
            let taken = (0..3).filter(|_| share.take(MS, source(n), 0, MS, 0)).count();
            assert!(taken <= 1, "{n}");
        }
    }
}
