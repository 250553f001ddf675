//! Who was seen before.

use super::hash::{Source, SourceKey};

/// The most bits of a filter.
pub const KNOWN_BITS_MAX: usize = 1 << 20;

/// Places in the filter for each source.
const PLACES: u64 = 4;
/// Bits of the filter for each source that it is to hold, so that no more than
/// one bit in eight is set: a stranger is then taken for a known source once in
/// 4,096 times.
const BITS_PER_SOURCE: usize = 32;

/// A Bloom filter that does not take more than it is good for.
#[derive(Clone, Debug)]
struct Filter {
    words: Box<[u64]>,
    ones: u32,
}

impl Filter {
    fn new(bits: usize) -> Self {
        Self { words: vec![0; bits / 64].into(), ones: 0 }
    }

    fn bits(&self) -> u64 {
        self.words.len() as u64 * 64
    }

    fn places(&self, hash: u64) -> impl Iterator<Item = (usize, u64)> + use<> {
        let (low, step, mask) = (hash & 0xffff_ffff, hash >> 32 | 1, self.bits() - 1);
        (0..PLACES).map(move |n| {
            let bit = low.wrapping_add(n * step) & mask;
            ((bit / 64) as usize, 1 << (bit % 64))
        })
    }

    fn contains(&self, hash: u64) -> bool {
        self.places(hash).all(|(word, bit)| self.words[word] & bit != 0)
    }

    /// Returns how many bits were not set before.
    fn insert(&mut self, hash: u64) -> u32 {
        let before = self.ones;
        for (word, bit) in self.places(hash) {
            self.ones += u32::from(self.words[word] & bit == 0);
            self.words[word] |= bit;
        }
        self.ones - before
    }

    fn clear(&mut self) {
        self.words.fill(0);
        self.ones = 0;
    }
}

/// The sources that were seen before, in a fixed amount of memory.
///
/// A source is learnt when it is seen in two learning periods in a row, so one
/// packet makes no friend. It is forgotten when it was not seen for a lifetime
/// or two. Only calm time counts, so a flood neither teaches nor makes forget;
/// and a filter takes no more sources than it can tell apart, so strangers
/// cannot wash the known ones out.
#[derive(Clone, Debug)]
pub struct Known {
    key: SourceKey,
    /// Seen in this lifetime, and in the one before.
    young: Filter,
    old: Filter,
    /// Seen in this learning period, and in the one before.
    seen: Filter,
    seen_before: Filter,
    /// Bits that sources set which the lifetime before did not know.
    new_ones: u32,
    period_ns: u64,
    lifetime_ns: u64,
    period_left_ns: u64,
    lifetime_left_ns: u64,
}

impl Known {
    /// Room for `sources`, rounded up to a power of two and at most 32,768.
    pub fn new(key: SourceKey, sources: u32, period_ns: u64, lifetime_ns: u64) -> Self {
        let bits = (sources as usize)
            .saturating_mul(BITS_PER_SOURCE)
            .clamp(1 << 10, KNOWN_BITS_MAX)
            .next_power_of_two();
        let filter = || Filter::new(bits);
        Self {
            key,
            young: filter(),
            old: filter(),
            seen: filter(),
            seen_before: filter(),
            new_ones: 0,
            period_ns,
            lifetime_ns,
            period_left_ns: period_ns,
            lifetime_left_ns: lifetime_ns,
        }
    }

    /// Whether a source is known. Strangers may be taken for known ones, with
    /// a small chance; known ones never for strangers.
    #[inline]
    pub fn contains(&self, source: Source) -> bool {
        self.contains_hash(self.key.hash(source))
    }

    fn contains_hash(&self, hash: u64) -> bool {
        self.young.places(hash).all(|(n, bit)| (self.young.words[n] | self.old.words[n]) & bit != 0)
    }

    /// A source was seen in calm time.
    pub fn learn(&mut self, source: Source) {
        let hash = self.key.hash(source);
        if self.seen_before.contains(hash) || self.old.contains(hash) {
            self.insert(hash);
        }
        // A full filter takes strangers for candidates: rather learn nobody.
        if u64::from(self.seen.ones) * 4 < self.seen.bits() {
            self.seen.insert(hash);
        }
    }

    /// A source has proven that it gets what is sent to its address: a
    /// handshake was completed. It is known at once. Returns whether it was
    /// not before, and there was room for it.
    pub fn confirm(&mut self, source: Source) -> bool {
        let hash = self.key.hash(source);
        let is_new = !self.contains_hash(hash);
        self.insert(hash);
        is_new && self.contains_hash(hash)
    }

    /// Who is known stays so. New ones come in while both lifetimes together
    /// have no more than one bit in eight.
    fn insert(&mut self, hash: u64) {
        if self.old.contains(hash) {
            self.young.insert(hash);
        } else if u64::from(self.old.ones + self.new_ones) * 8 < self.old.bits() {
            self.new_ones += self.young.insert(hash);
        }
    }

    /// So much calm time has passed.
    pub fn on_calm(&mut self, elapsed_ns: u64) {
        self.period_left_ns = self.period_left_ns.saturating_sub(elapsed_ns);
        if self.period_left_ns == 0 {
            self.period_left_ns = self.period_ns;
            std::mem::swap(&mut self.seen, &mut self.seen_before);
            self.seen.clear();
        }
        self.lifetime_left_ns = self.lifetime_left_ns.saturating_sub(elapsed_ns);
        if self.lifetime_left_ns == 0 {
            self.lifetime_left_ns = self.lifetime_ns;
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
            self.new_ones = 0;
        }
    }

    /// The number of bits of the filter, a power of two.
    pub fn bits(&self) -> usize {
        self.young.words.len() * 64
    }

    /// The filter of all known sources: bit `n` is bit `n % 64` of word
    /// `n / 64`. A source is in it when the bits at `low + n * (high | 1)`
    /// (modulo [`Known::bits`], for `n` from 0 to 3) are set, `low` and `high`
    /// being the halves of its hash.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        self.young.words.iter().zip(&self.old.words).map(|(young, old)| young | old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    const PERIOD_NS: u64 = 1_000;
    const LIFETIME_NS: u64 = 10_000;

    fn known(sources: u32) -> Known {
        Known::new(SourceKey::new([7; 16]), sources, PERIOD_NS, LIFETIME_NS)
    }

    fn source(n: u32) -> Source {
        Source::of(IpAddr::V4(Ipv4Addr::from_bits(n)))
    }

    #[test]
    fn a_source_is_known_after_two_periods() {
        let mut known = known(100);
        known.learn(source(1));
        known.learn(source(1));
        known.on_calm(PERIOD_NS);
        assert!(!known.contains(source(1)), "seen in one period only");
        known.learn(source(1));
        assert!(known.contains(source(1)));
        // Not in a row: a visit now and then is no acquaintance.
        known.learn(source(2));
        known.on_calm(PERIOD_NS);
        known.on_calm(PERIOD_NS);
        known.learn(source(2));
        assert!(!known.contains(source(2)));
        assert!(known.confirm(source(3)));
        assert!(known.contains(source(3)), "a handshake is proof enough");
        assert!(!known.confirm(source(3)), "it is not new any more");
    }

    #[test]
    fn who_stays_away_for_two_lifetimes_is_forgotten() {
        let mut known = known(100);
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
    fn strangers_do_not_wash_the_known_out() {
        let mut known = known(1000);
        for n in 0..500 {
            known.confirm(source(n));
        }
        // More strangers than there is room for, slow enough to be called calm.
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
        let taken_for_known = (0..100_000).filter(|n| known.contains(source(0x7000_0000 + n)));
        let count = taken_for_known.count();
        assert!(count < 200, "{count} of 100,000 that never came are taken for known");
    }

    #[test]
    fn the_filter_that_is_handed_out_says_the_same() {
        let mut known = known(100);
        assert!((0..50).all(|n| known.confirm(source(n))));
        known.on_calm(LIFETIME_NS);
        assert!((50..90).all(|n| known.confirm(source(n))));
        let words: Vec<_> = known.words().collect();
        assert_eq!(words.len() * 64, known.bits());
        let merged = Filter { words: words.into(), ones: 0 };
        let key = SourceKey::new([7; 16]);
        assert!((0..90).all(|n| merged.contains(key.hash(source(n)))));
        assert!(!merged.contains(key.hash(source(1000))));
    }
}
