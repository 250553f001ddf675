//! Response rate limiting: bounds the responses to one network that have one and the same content.
//!
//! Queries over UDP have sources that can be forged, so a name server can be made to flood a
//! victim. A flood repeats itself: one name, or random names that all get the zone's one negative
//! answer. The limit counts responses by the client's network and by the prepared answer. So a
//! client that asks for many different names is not limited.
//!
//! A response over the limit is dropped, or replaced by an empty one with the TC bit: a real client
//! then repeats its query over TCP. Sources that have proved their address are exempt.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use super::splitmix64::SplitMix64;

/// Number of sets of the table; each set is one half of a cache line.
const SETS: usize = 1 << 16;

/// Entries of a set.
const WAYS: usize = 4;

/// Nanoseconds of one tick, as a shift.
const TICK_SHIFT: u32 = 10;

/// Bits of an entry that hold its due time in ticks; the others hold its tag.
const DUE_BITS: u32 = 40;
const DUE_MASK: u64 = (1 << DUE_BITS) - 1;

/// Bytes of a response that count as one: a longer response counts as several.
const COUNTED_BYTES: usize = 512;

/// Response rate limit of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// Responses per second with one content to one network: 24 bits of an IPv4 address, 64 bits
    /// of an IPv6 address. A response counts once for each 512 bytes begun. At least 1.
    pub responses_per_second: u32,
    /// Every `slip`-th response over the limit, on average, is sent empty and truncated instead of
    /// dropped; 0 drops all.
    pub slip: u32,
}

impl Default for RateLimit {
    fn default() -> Self {
        RateLimit { responses_per_second: 200, slip: 2 }
    }
}

/// Decision on one response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Send,
    /// Send an empty response with the TC bit.
    Truncate,
    Drop,
}

/// Identity of a response: responses with the same content have the same identity.
pub(super) type ContentId = u64;

/// Limiter that several threads share.
pub(super) struct RateLimiter {
    ticks_per_response: u64,
    slip: u32,
    /// Secret keys of the hash over network and content.
    keys: [u128; 3],
    sets: Box<[[AtomicU64; WAYS]]>,
}

impl RateLimiter {
    pub(super) fn new(limit: RateLimit, seed: u64) -> Self {
        let mut random = SplitMix64::new(seed ^ 0x5bd1_e995_9bd1_e995);
        let mut key = || u128::from(random.next()) << 64 | u128::from(random.next());
        let second_ticks = 1_000_000_000 >> TICK_SHIFT;
        RateLimiter {
            ticks_per_response: (second_ticks / u64::from(limit.responses_per_second.max(1)))
                .max(1),
            slip: limit.slip,
            keys: [key(), key(), key()],
            sets: (0..SETS).map(|_| [const { AtomicU64::new(0) }; WAYS]).collect(),
        }
    }

    /// Decides on a response of `len` bytes to `client`. `random` chooses which of the responses
    /// over the limit are sent truncated.
    #[inline]
    pub(super) fn check(
        &self,
        client: IpAddr,
        content: ContentId,
        len: usize,
        now_ns: u64,
        random: &mut SplitMix64,
    ) -> Verdict {
        let cost = (1 + len / COUNTED_BYTES) as u64 * self.ticks_per_response;
        if self.take(client, content, cost, now_ns >> TICK_SHIFT) {
            return Verdict::Send;
        }
        if self.slip > 0 && random.below(self.slip.into()) == 0 {
            Verdict::Truncate
        } else {
            Verdict::Drop
        }
    }

    /// Takes `cost` from the budget of a content and a network, which is one second long. Returns
    /// false when the budget is used up.
    ///
    /// Each entry holds the time at which its budget is whole again. Threads that take from one
    /// entry at the same time may both succeed.
    #[inline]
    fn take(&self, client: IpAddr, content: ContentId, cost: u64, now: u64) -> bool {
        let second = self.second();
        let hash = self.hash(client, content);
        let set = &self.sets[(hash as usize) % SETS];
        let tag = hash >> DUE_BITS;
        let mut chosen = &set[0];
        let mut least = u64::MAX;
        for entry in set {
            let value = entry.load(Ordering::Relaxed);
            let mut missing = (value & DUE_MASK).wrapping_sub(now) & DUE_MASK;
            // Past, or so far ahead that the clock was set back: the budget is whole.
            if missing > second + MAX_COST_RESPONSES * self.ticks_per_response {
                missing = 0;
            }
            if value >> DUE_BITS == tag && value != 0 {
                chosen = entry;
                least = missing;
                break;
            }
            // A new entry replaces the one that is nearest to a whole budget.
            if missing < least {
                chosen = entry;
                least = missing;
            }
        }
        let is_own = chosen.load(Ordering::Relaxed) >> DUE_BITS == tag;
        let missing = if is_own { least } else { 0 };
        if missing > second {
            return false;
        }
        let due = (now + missing + cost) & DUE_MASK;
        chosen.store(tag << DUE_BITS | due, Ordering::Relaxed);
        true
    }

    /// Ticks of the budget: one second, but at least one response.
    fn second(&self) -> u64 {
        (1_000_000_000 >> TICK_SHIFT) - self.ticks_per_response
    }

    /// Keyed hash: a multilinear sum, of which the top half is the hash.
    #[inline]
    fn hash(&self, client: IpAddr, content: ContentId) -> u64 {
        let [first, second, third] = self.keys;
        let (addend, network) = match client.to_canonical() {
            IpAddr::V4(address) => (third, u64::from(address.to_bits() >> 8)),
            IpAddr::V6(address) => (0, (address.to_bits() >> 64) as u64),
        };
        let sum = addend
            .wrapping_add(first.wrapping_mul(network.into()))
            .wrapping_add(second.wrapping_mul(content.into()));
        (sum >> 64) as u64
    }
}

/// Largest cost of one response: a message of 65,535 bytes.
const MAX_COST_RESPONSES: u64 = 1 + (u16::MAX as usize / COUNTED_BYTES) as u64;

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;
    const START_NS: u64 = 1_700_000_000 * SECOND_NS;

    fn limiter(responses_per_second: u32, slip: u32) -> RateLimiter {
        RateLimiter::new(RateLimit { responses_per_second, slip }, 7)
    }

    fn sent(limiter: &RateLimiter, client: &str, content: ContentId, times_ns: &[u64]) -> usize {
        let client = client.parse().unwrap();
        let mut random = SplitMix64::new(1);
        let mut verdict = |now_ns| limiter.check(client, content, 100, now_ns, &mut random);
        times_ns.iter().filter(|&&now_ns| verdict(now_ns) == Verdict::Send).count()
    }

    fn every(interval_ns: u64, seconds: u64) -> Vec<u64> {
        let count = seconds * SECOND_NS / interval_ns;
        (0..count).map(|index| START_NS + index * interval_ns).collect()
    }

    #[test]
    fn limits_one_content_to_the_rate() {
        for client in ["192.0.2.1", "2001:db8::1"] {
            let flood = every(10_000, 10);
            let passed = sent(&limiter(200, 2), client, 5, &flood);
            assert!((2190..=2210).contains(&passed), "{client}: {passed}");
            let within = every(5_100_000, 10);
            assert_eq!(sent(&limiter(200, 2), client, 5, &within), within.len(), "{client}");
        }
    }

    #[test]
    fn networks_and_contents_have_their_own_budgets() {
        let limiter = limiter(10, 0);
        let burst = [START_NS; 10];
        for (client, other) in [("192.0.2.1", "192.0.3.1"), ("2001:db8::1", "2001:db8:0:1::1")] {
            assert_eq!(sent(&limiter, client, 1, &burst), 10);
            assert_eq!(sent(&limiter, client, 1, &burst), 0);
            assert_eq!(sent(&limiter, client, 2, &burst), 10, "another content");
            assert_eq!(sent(&limiter, other, 1, &burst), 10, "another network");
        }
        assert_eq!(sent(&limiter, "192.0.2.255", 1, &burst), 0, "the same network");
        assert_eq!(sent(&limiter, "::ffff:192.0.2.7", 1, &burst), 0, "a mapped address");
        assert_eq!(sent(&limiter, "2001:db8::ffff", 1, &burst), 0, "the same network");
    }

    #[test]
    fn a_clock_set_back_does_not_block() {
        let limiter = limiter(10, 0);
        assert_eq!(sent(&limiter, "192.0.2.1", 1, &[START_NS; 10]), 10);
        assert_eq!(sent(&limiter, "192.0.2.1", 1, &[START_NS - 86_400 * SECOND_NS]), 1);
    }

    #[test]
    fn a_slip_of_one_truncates_and_of_zero_drops_all() {
        for (slip, expected) in [(1, Verdict::Truncate), (0, Verdict::Drop)] {
            let limiter = limiter(1, slip);
            let mut random = SplitMix64::new(1);
            let mut check =
                || limiter.check("192.0.2.1".parse().unwrap(), 1, 100, START_NS, &mut random);
            assert_eq!(check(), Verdict::Send);
            assert!((0..100).all(|_| check() == expected));
        }
    }

    /// A full table forgets the budgets that are nearest to whole, not those of a flood.
    #[test]
    fn many_contents_do_not_free_a_flooded_one() {
        let limiter = limiter(200, 0);
        assert_eq!(sent(&limiter, "192.0.2.1", 1, &[START_NS; 1000]), 200);
        for content in 2..100_000 {
            assert_eq!(sent(&limiter, "192.0.2.1", content, &[START_NS]), 1);
        }
        assert_eq!(sent(&limiter, "192.0.2.1", 1, &[START_NS; 1000]), 0);
    }
}
