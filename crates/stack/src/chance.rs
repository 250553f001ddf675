//! Keyed hashes and random choices, all from the seed.
//!
//! Tables are hashed with a secret key, so that a peer cannot choose addresses
//! that fall together. The hash is a folded multiplication: far cheaper than
//! SipHash, and nothing that it gives is ever shown to a peer, except through
//! [`Chance::random`], which is a ChaCha stream of its own.

use std::hash::{BuildHasher, Hasher};
use std::net::IpAddr;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// A secret key for hashes.
#[derive(Clone, Copy)]
pub(crate) struct HashKey {
    start: u64,
    factor: u64,
}

/// The high and low halves of a 64 by 64 bit product, folded.
#[inline(always)]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

impl HashKey {
    /// The hash of an address.
    #[inline(always)]
    pub(crate) fn address(&self, address: IpAddr) -> u64 {
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

/// The hasher of the tables.
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

/// Every choice that must not be guessed.
pub(crate) struct Chance {
    stream: ChaCha8Rng,
}

impl Chance {
    pub(crate) fn new(seed: [u8; 16]) -> Self {
        let mut key = [0; 32];
        key[..16].copy_from_slice(&seed);
        Self { stream: ChaCha8Rng::from_seed(key) }
    }

    /// A new key for hashes.
    pub(crate) fn hash_key(&mut self) -> HashKey {
        // An even factor would lose the top bit of what it multiplies.
        HashKey { start: self.stream.next_u64(), factor: self.stream.next_u64() | 1 }
    }

    /// A random number.
    pub(crate) fn random(&mut self) -> u32 {
        self.stream.next_u32()
    }

    /// A random number under `bound`, which must not be zero. The tiny bias
    /// does no harm for bounds far under 2^32.
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        ((u64::from(self.random()) * u64::from(bound)) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn the_seed_decides_everything() {
        let draw = |seed| {
            let mut chance = Chance::new([seed; 16]);
            let key = chance.hash_key();
            (key.hash_one(7_u64), key.address(Ipv4Addr::LOCALHOST.into()), chance.random())
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn bounds_hold() {
        let mut chance = Chance::new([3; 16]);
        let seen: std::collections::HashSet<_> = (0..200).map(|_| chance.below(5)).collect();
        assert_eq!(seen, (0..5).collect());
    }
}
