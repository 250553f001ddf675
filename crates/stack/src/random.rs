//! Keyed hashes and secret random numbers, all derived from the seed.
//!
//! Tables are hashed with a secret key, so that a peer cannot choose addresses that collide. The
//! hash is a folded multiplication, far cheaper than SipHash. Peers never see a hash value; random
//! numbers that peers do see come from a separate ChaCha stream ([`SecretRng`]).

use std::hash::{BuildHasher, Hasher};
use std::net::IpAddr;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Secret key of a hash function.
#[derive(Clone, Copy)]
pub(crate) struct HashKey {
    start: u64,
    factor: u64,
}

/// High and low halves of a 64 by 64 bit product, combined by exclusive or.
#[inline(always)]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

impl HashKey {
    /// Hash of an IP address.
    #[inline(always)]
    pub(crate) fn hash_address(&self, address: IpAddr) -> u64 {
        match address {
            IpAddr::V4(v4) => {
                let bits = u32::from_ne_bytes(v4.octets());
                fold(u64::from(bits) ^ self.start, self.factor)
            }
            IpAddr::V6(v6) => {
                let bits = u128::from_ne_bytes(v6.octets());
                let high = fold((bits >> 64) as u64 ^ self.start, self.factor);
                fold(high ^ bits as u64, self.factor)
            }
        }
    }
}

impl BuildHasher for HashKey {
    type Hasher = FoldHasher;

    #[inline]
    fn build_hasher(&self) -> FoldHasher {
        FoldHasher { state: self.start, factor: self.factor }
    }
}

/// Hasher of the keyed tables.
pub(crate) struct FoldHasher {
    state: u64,
    factor: u64,
}

impl Hasher for FoldHasher {
    #[inline]
    fn finish(&self) -> u64 {
        fold(self.state, self.factor.rotate_left(32))
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    #[inline]
    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    #[inline]
    fn write_u16(&mut self, value: u16) {
        self.write_u64(u64::from(value));
    }

    #[inline]
    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    #[inline]
    fn write_u64(&mut self, value: u64) {
        self.state = fold(self.state ^ value, self.factor);
    }

    #[inline]
    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }
}

/// Source of unpredictable numbers and hash keys: a ChaCha8 stream.
pub(crate) struct SecretRng {
    rng: ChaCha8Rng,
}

impl SecretRng {
    pub(crate) fn new(seed: [u8; 16]) -> Self {
        let mut key = [0; 32];
        key[..16].copy_from_slice(&seed);
        Self { rng: ChaCha8Rng::from_seed(key) }
    }

    /// Generates a hash key.
    pub(crate) fn hash_key(&mut self) -> HashKey {
        // An even factor would lose the top bit of its operand.
        HashKey { start: self.rng.next_u64(), factor: self.rng.next_u64() | 1 }
    }

    /// Returns a uniform 32-bit random number.
    pub(crate) fn next_u32(&mut self) -> u32 {
        self.rng.next_u32()
    }

    /// Returns a random number below `bound`, which must not be zero. The bias is negligible for
    /// bounds far below 2^32.
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        ((u64::from(self.next_u32()) * u64::from(bound)) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn same_seed_gives_same_sequence() {
        let draw = |seed| {
            let mut rng = SecretRng::new([seed; 16]);
            let key = rng.hash_key();
            (key.hash_one(7_u64), key.hash_address(Ipv4Addr::LOCALHOST.into()), rng.next_u32())
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn below_stays_under_the_bound() {
        let mut rng = SecretRng::new([3; 16]);
        let seen: std::collections::HashSet<_> = (0..200).map(|_| rng.below(5)).collect();
        assert_eq!(seen, (0..5).collect());
    }
}
