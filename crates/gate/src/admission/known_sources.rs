//! Known sources: Bloom filters of sources seen before.

use super::hash::{SourceId, SourceKey};

/// Maximum number of bits of a filter.
pub const MAX_KNOWN_BITS: usize = 1 << 20;

/// Bits that each source sets in a filter.
const HASH_COUNT: u64 = 4;
/// Filter size in bits per source. At most one bit in eight is then set, so an unknown source
/// matches with probability 1/4,096.
const BITS_PER_SOURCE: usize = 32;

/// Bloom filter with a count of its set bits.
#[derive(Clone, Debug)]
struct BloomFilter {
    words: Box<[u64]>,
    set_bits: u32,
}

impl BloomFilter {
    fn new(bits: usize) -> Self {
        Self { words: vec![0; bits / 64].into(), set_bits: 0 }
    }

    fn bits(&self) -> u64 {
        self.words.len() as u64 * 64
    }

    fn bit_positions(&self, hash: u64) -> impl Iterator<Item = (usize, u64)> + use<> {
        let (low, step, mask) = (hash & 0xffff_ffff, hash >> 32 | 1, self.bits() - 1);
        (0..HASH_COUNT).map(move |n| {
            let bit = low.wrapping_add(n * step) & mask;
            ((bit / 64) as usize, 1 << (bit % 64))
        })
    }

    fn contains(&self, hash: u64) -> bool {
        self.bit_positions(hash).all(|(word, bit)| self.words[word] & bit != 0)
    }

    /// Inserts a hash; returns the number of bits that were not set before.
    fn insert(&mut self, hash: u64) -> u32 {
        let before = self.set_bits;
        for (word, bit) in self.bit_positions(hash) {
            self.set_bits += u32::from(self.words[word] & bit == 0);
            self.words[word] |= bit;
        }
        self.set_bits - before
    }

    fn clear(&mut self) {
        self.words.fill(0);
        self.set_bits = 0;
    }
}

/// Set of known sources in constant memory.
///
/// A source is learned when seen in two consecutive learning periods, so a single packet does
/// not suffice. It is forgotten when unseen for one to two lifetimes. Only calm time counts, so
/// a flood neither adds nor expires sources. A filter takes no more sources
/// than it can tell apart, so unknown sources cannot displace known ones.
#[derive(Clone, Debug)]
pub struct KnownSources {
    key: SourceKey,
    /// Known sources seen in this lifetime and in the previous lifetime.
    this_lifetime: BloomFilter,
    last_lifetime: BloomFilter,
    /// Sources seen in this learning period and in the previous period.
    seen_this_period: BloomFilter,
    seen_last_period: BloomFilter,
    /// Bits set in this lifetime by sources that were not known in the previous lifetime.
    new_bits: u32,
    period_ns: u64,
    lifetime_ns: u64,
    period_left_ns: u64,
    lifetime_left_ns: u64,
}

impl KnownSources {
    /// Creates an empty set for `sources`, rounded up to a power of two and at most 32,768.
    pub fn new(key: SourceKey, sources: u32, period_ns: u64, lifetime_ns: u64) -> Self {
        let bits = (sources as usize)
            .saturating_mul(BITS_PER_SOURCE)
            .clamp(1 << 10, MAX_KNOWN_BITS)
            .next_power_of_two();
        let filter = || BloomFilter::new(bits);
        Self {
            key,
            this_lifetime: filter(),
            last_lifetime: filter(),
            seen_this_period: filter(),
            seen_last_period: filter(),
            new_bits: 0,
            period_ns,
            lifetime_ns,
            period_left_ns: period_ns,
            lifetime_left_ns: lifetime_ns,
        }
    }

    /// Returns true if a source is known. False positives have a small probability; there are no
    /// false negatives.
    #[inline]
    pub fn contains(&self, source: SourceId) -> bool {
        self.contains_hash(self.key.hash(source))
    }

    fn contains_hash(&self, hash: u64) -> bool {
        self.this_lifetime
            .bit_positions(hash)
            .all(|(n, bit)| (self.this_lifetime.words[n] | self.last_lifetime.words[n]) & bit != 0)
    }

    /// Records a source that was seen in a calm time. Returns true if the source is newly known.
    pub fn learn(&mut self, source: SourceId) -> bool {
        let hash = self.key.hash(source);
        let is_usual = self.seen_last_period.contains(hash) || self.last_lifetime.contains(hash);
        let is_new = is_usual && self.insert(hash);
        // A full filter would give false positives, so no further source is recorded.
        if u64::from(self.seen_this_period.set_bits) * 4 < self.seen_this_period.bits() {
            self.seen_this_period.insert(hash);
        }
        is_new
    }

    /// Keeps a known source for another lifetime. An unknown one stays unknown.
    pub fn refresh(&mut self, source: SourceId) {
        let hash = self.key.hash(source);
        if self.last_lifetime.contains(hash) {
            self.this_lifetime.insert(hash);
        }
    }

    /// Adds a source that has proven to own its address by completing a handshake. Returns true
    /// if the source is newly known; false if it was known before or the filter is full.
    pub fn confirm(&mut self, source: SourceId) -> bool {
        self.insert(self.key.hash(source))
    }

    /// Adds a source. Known sources are always kept; new sources are added only while at most
    /// one bit in eight is set in both lifetimes together. Returns true if it is newly known.
    fn insert(&mut self, hash: u64) -> bool {
        let is_new = !self.contains_hash(hash);
        if self.last_lifetime.contains(hash) {
            self.this_lifetime.insert(hash);
        } else if u64::from(self.last_lifetime.set_bits + self.new_bits) * 8
            < self.last_lifetime.bits()
        {
            self.new_bits += self.this_lifetime.insert(hash);
        }
        is_new && self.contains_hash(hash)
    }

    /// Advances the learning period and the lifetime by a calm time.
    pub fn on_calm(&mut self, elapsed_ns: u64) {
        self.period_left_ns = self.period_left_ns.saturating_sub(elapsed_ns);
        if self.period_left_ns == 0 {
            self.period_left_ns = self.period_ns;
            std::mem::swap(&mut self.seen_this_period, &mut self.seen_last_period);
            self.seen_this_period.clear();
        }
        self.lifetime_left_ns = self.lifetime_left_ns.saturating_sub(elapsed_ns);
        if self.lifetime_left_ns == 0 {
            self.lifetime_left_ns = self.lifetime_ns;
            std::mem::swap(&mut self.this_lifetime, &mut self.last_lifetime);
            self.this_lifetime.clear();
            self.new_bits = 0;
        }
    }

    /// Number of bits of the filter, a power of two.
    pub fn bits(&self) -> usize {
        self.this_lifetime.words.len() * 64
    }

    /// Returns the filter of all known sources: bit `n` is bit `n % 64` of word `n / 64`. A
    /// source is in the filter if the bits at `low + n * (high | 1)`, modulo
    /// [`KnownSources::bits`], are set for `n` from 0 to 3. `low` and `high` are the halves of
    /// the source's hash.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        self.this_lifetime
            .words
            .iter()
            .zip(&self.last_lifetime.words)
            .map(|(young, old)| young | old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    const PERIOD_NS: u64 = 1_000;
    const LIFETIME_NS: u64 = 10_000;

    fn known_sources(sources: u32) -> KnownSources {
        KnownSources::new(SourceKey::new([7; 16]), sources, PERIOD_NS, LIFETIME_NS)
    }

    fn source(n: u32) -> SourceId {
        SourceId::from_address(IpAddr::V4(Ipv4Addr::from_bits(n)))
    }

    #[test]
    fn learns_a_source_seen_in_two_consecutive_periods() {
        let mut known = known_sources(100);
        known.learn(source(1));
        known.learn(source(1));
        known.on_calm(PERIOD_NS);
        assert!(!known.contains(source(1)), "seen in one period only");
        known.learn(source(1));
        assert!(known.contains(source(1)));
        // Not consecutive: an occasional packet does not make a source known.
        known.learn(source(2));
        known.on_calm(PERIOD_NS);
        known.on_calm(PERIOD_NS);
        known.learn(source(2));
        assert!(!known.contains(source(2)));
        assert!(known.confirm(source(3)));
        assert!(known.contains(source(3)), "a handshake suffices");
        assert!(!known.confirm(source(3)), "already known");
    }

    #[test]
    fn forgets_a_source_unseen_for_two_lifetimes() {
        let mut known = known_sources(100);
        known.confirm(source(1));
        known.confirm(source(2));
        known.on_calm(LIFETIME_NS);
        assert!(known.contains(source(1)));
        known.learn(source(1));
        known.on_calm(LIFETIME_NS);
        assert!(known.contains(source(1)), "seen in between");
        assert!(!known.contains(source(2)));
    }

    #[test]
    fn refreshing_keeps_a_known_source_and_adds_none() {
        let mut known = known_sources(100);
        known.confirm(source(1));
        for _ in 0..3 {
            known.on_calm(LIFETIME_NS);
            for n in [1, 2] {
                known.refresh(source(n));
                known.refresh(source(n));
            }
        }
        assert!(known.contains(source(1)));
        assert!(!known.contains(source(2)));
    }

    #[test]
    fn unknown_sources_do_not_displace_known_ones() {
        let mut known = known_sources(1000);
        for n in 0..500 {
            known.confirm(source(n));
        }
        // More unknown sources than the filter holds, slowly enough not to start limiting.
        for _ in 0..20 {
            for n in 0..200_000 {
                known.learn(source(0x5000_0000 + n));
            }
            for n in 0..500 {
                known.learn(source(n));
            }
            known.on_calm(PERIOD_NS);
        }
        assert!((0..500).all(|n| known.contains(source(n))));
        let false_positives = (0..100_000).filter(|n| known.contains(source(0x7000_0000 + n)));
        let count = false_positives.count();
        assert!(count < 200, "{count} false positives among 100,000 unknown sources");
    }

    #[test]
    fn exported_filter_agrees_with_lookups() {
        let mut known = known_sources(100);
        assert!((0..50).all(|n| known.confirm(source(n))));
        known.on_calm(LIFETIME_NS);
        assert!((50..90).all(|n| known.confirm(source(n))));
        let words: Vec<_> = known.words().collect();
        assert_eq!(words.len() * 64, known.bits());
        let merged = BloomFilter { words: words.into(), set_bits: 0 };
        let key = SourceKey::new([7; 16]);
        assert!((0..90).all(|n| merged.contains(key.hash(source(n)))));
        assert!(!merged.contains(key.hash(source(1000))));
    }
}
