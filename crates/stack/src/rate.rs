//! Rates of what we send unasked.

use std::hash::BuildHasher;
use std::net::IpAddr;

use crate::chance::{Chance, HashKey};

const SECOND_NS: u64 = 1_000_000_000;
const BUCKETS: usize = 256;

/// A token bucket that holds the tokens of one second.
#[derive(Clone, Copy)]
pub(crate) struct TokenBucket {
    rate_pps: u32,
    /// Tokens, each worth `SECOND_NS`, so that none is lost by rounding.
    level: u64,
    filled_ns: u64,
}

impl TokenBucket {
    /// A full bucket.
    pub(crate) fn new(now_ns: u64, rate_pps: u32) -> Self {
        Self { rate_pps, level: u64::from(rate_pps) * SECOND_NS, filled_ns: now_ns }
    }

    /// Takes a token, if there is one.
    pub(crate) fn take(&mut self, now_ns: u64) -> bool {
        self.fill(now_ns);
        let enough = self.level >= SECOND_NS;
        if enough {
            self.level -= SECOND_NS;
        }
        enough
    }

    fn fill(&mut self, now_ns: u64) {
        let rate = u64::from(self.rate_pps);
        let passed_ns = now_ns.saturating_sub(self.filled_ns).min(SECOND_NS);
        self.level = (self.level + passed_ns * rate).min(rate * SECOND_NS);
        self.filled_ns = self.filled_ns.max(now_ns);
    }
}

/// The limits on ICMP errors (RFC 4443 section 2.4 f): one for all, and one
/// for each group of destinations, so that a flood with one forged source does
/// not silence us towards others.
pub(crate) struct ErrorLimits {
    all: TokenBucket,
    each: Box<[TokenBucket]>,
    key: HashKey,
}

impl ErrorLimits {
    pub(crate) fn new(now_ns: u64, key: HashKey, all_pps: u32, each_pps: u32) -> Self {
        let each = vec![TokenBucket::new(now_ns, each_pps); BUCKETS].into();
        Self { all: TokenBucket::new(now_ns, all_pps), each, key }
    }

    /// Whether an error may be sent to `destination` now.
    pub(crate) fn allow(&mut self, now_ns: u64, chance: &mut Chance, destination: IpAddr) -> bool {
        let bucket = self.key.hash_one(destination) as usize % BUCKETS;
        if !self.each[bucket].take(now_ns) || !self.all.take(now_ns) {
            return false;
        }
        // An observer who counts answers could otherwise tell from the common
        // limit whether we answered somebody else, and so find open ports
        // (SAD DNS, CVE-2020-25705). Some tokens are lost at random.
        if chance.below(8) == 0 {
            self.all.take(now_ns);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_rate_and_no_more() {
        let mut bucket = TokenBucket::new(0, 10);
        assert_eq!((0..50).filter(|_| bucket.take(0)).count(), 10);
        assert!(!bucket.take(SECOND_NS / 10 - 1));
        assert!(bucket.take(SECOND_NS / 10));
        let later = 100 * SECOND_NS;
        assert_eq!((0..50).filter(|_| bucket.take(later)).count(), 10);
        assert!(!bucket.take(0), "time that runs backwards gives nothing");
    }

    #[test]
    fn one_destination_cannot_use_up_the_limit_of_all() {
        let mut chance = Chance::new([9; 16]);
        let key = chance.hash_key();
        let mut limits = ErrorLimits::new(0, key, 1000, 10);
        let loud = "192.0.2.1".parse().unwrap();
        assert_eq!((0..5000).filter(|_| limits.allow(0, &mut chance, loud)).count(), 10);
        let quiet = (2..100).filter(|&n| {
            limits.allow(0, &mut chance, std::net::Ipv4Addr::new(192, 0, 2, n).into())
        });
        assert!(quiet.count() > 90);
    }
}
