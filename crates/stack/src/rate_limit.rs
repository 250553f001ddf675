//! Rate limits of ICMP messages.

use std::hash::BuildHasher;
use std::net::IpAddr;

use crate::random::{HashKey, SecretRng};

const SECOND_NS: u64 = 1_000_000_000;
const BUCKETS: usize = 256;

/// Token bucket with a capacity of one second's tokens.
#[derive(Clone, Copy)]
pub(crate) struct TokenBucket {
    rate_pps: u32,
    /// Tokens in units of 1/`SECOND_NS`, so that rounding loses nothing.
    level_token_ns: u64,
    refilled_ns: u64,
}

impl TokenBucket {
    /// Creates a full bucket for `rate_pps` tokens per second.
    pub(crate) fn new(now_ns: u64, rate_pps: u32) -> Self {
        Self { rate_pps, level_token_ns: u64::from(rate_pps) * SECOND_NS, refilled_ns: now_ns }
    }

    /// Takes a token; false if there is none.
    pub(crate) fn take(&mut self, now_ns: u64) -> bool {
        self.refill(now_ns);
        let has_token = self.level_token_ns >= SECOND_NS;
        if has_token {
            self.level_token_ns -= SECOND_NS;
        }
        has_token
    }

    fn refill(&mut self, now_ns: u64) {
        let rate = u64::from(self.rate_pps);
        let elapsed_ns = now_ns.saturating_sub(self.refilled_ns).min(SECOND_NS);
        self.level_token_ns = (self.level_token_ns + elapsed_ns * rate).min(rate * SECOND_NS);
        self.refilled_ns = self.refilled_ns.max(now_ns);
    }
}

/// Rate limits of ICMP errors (RFC 4443 section 2.4 (f)): a global limit, and a limit per hash
/// bucket of destinations. A flood with one forged source cannot suppress the errors to others.
pub(crate) struct IcmpErrorLimiter {
    global: TokenBucket,
    per_destination: Box<[TokenBucket]>,
    key: HashKey,
}

impl IcmpErrorLimiter {
    pub(crate) fn new(
        now_ns: u64,
        key: HashKey,
        global_pps: u32,
        per_destination_pps: u32,
    ) -> Self {
        let per_destination = vec![TokenBucket::new(now_ns, per_destination_pps); BUCKETS].into();
        Self { global: TokenBucket::new(now_ns, global_pps), per_destination, key }
    }

    /// Takes the tokens for an error to `destination`; false if a limit is reached.
    pub(crate) fn allow(&mut self, now_ns: u64, rng: &mut SecretRng, destination: IpAddr) -> bool {
        let bucket = self.key.hash_one(destination) as usize % BUCKETS;
        if !self.per_destination[bucket].take(now_ns) || !self.global.take(now_ns) {
            return false;
        }
        // An observer counting replies could infer from the global limit whether this host
        // answered others, and so find open ports (SAD DNS, CVE-2020-25705). Randomly discarded
        // tokens prevent that.
        if rng.below(8) == 0 {
            self.global.take(now_ns);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_bucket_enforces_its_rate() {
        let mut bucket = TokenBucket::new(0, 10);
        assert_eq!((0..50).filter(|_| bucket.take(0)).count(), 10);
        assert!(!bucket.take(SECOND_NS / 10 - 1));
        assert!(bucket.take(SECOND_NS / 10));
        let later = 100 * SECOND_NS;
        assert_eq!((0..50).filter(|_| bucket.take(later)).count(), 10);
        assert!(!bucket.take(0), "time going backwards adds no tokens");
    }

    #[test]
    fn one_destination_cannot_exhaust_the_global_limit() {
        let mut rng = SecretRng::new([9; 16]);
        let key = rng.hash_key();
        let mut limiter = IcmpErrorLimiter::new(0, key, 1000, 10);
        let flooded = "192.0.2.1".parse().unwrap();
        assert_eq!((0..5000).filter(|_| limiter.allow(0, &mut rng, flooded)).count(), 10);
        let others = (2..100)
            .filter(|&n| limiter.allow(0, &mut rng, std::net::Ipv4Addr::new(192, 0, 2, n).into()));
        assert!(others.count() > 90);
    }
}
