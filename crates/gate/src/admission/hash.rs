//! Keyed hash of a packet source, identical to the BPF program's.

use std::net::IpAddr;

/// Secret hash key. Without it a sender cannot choose sources whose hashes collide.
///
/// The hash uses only operations that a BPF program has: 64-bit products and shifts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SourceKey {
    /// Value combined with the source by XOR.
    pub hash_seed: u64,
    /// Multiplier of the result; odd, so that distinct inputs stay distinct.
    pub hash_multiplier: u64,
}

/// Finalizer of SplitMix64: every input bit affects every output bit.
#[inline(always)]
const fn mix(mut word: u64) -> u64 {
    word ^= word >> 30;
    word = word.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word ^= word >> 27;
    word = word.wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

impl SourceKey {
    /// Derives the key from a seed.
    pub fn new(seed: [u8; 16]) -> Self {
        let seed = u128::from_le_bytes(seed);
        let (low, high) = (seed as u64, (seed >> 64) as u64);
        Self {
            hash_seed: mix(low ^ 0x9e37_79b9_7f4a_7c15),
            hash_multiplier: mix(high.wrapping_add(low)) | 1,
        }
    }

    /// Hashes a source.
    #[inline(always)]
    pub const fn hash(self, source: SourceId) -> u64 {
        mix((source.0 ^ self.hash_seed).wrapping_mul(self.hash_multiplier))
    }

    /// Hashes a source within a class.
    #[inline(always)]
    pub const fn hash_in_class(self, source: SourceId, class: usize) -> u64 {
        mix(self.hash(source) ^ (class as u64 + 1))
    }
}

// Does not print the key, which is secret.
impl std::fmt::Debug for SourceKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SourceKey(..)")
    }
}

/// Source identity: an IPv4 address, or the 64-bit prefix of an IPv6 address, within which a
/// host can choose any address (RFC 4291 section 2.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SourceId(u64);

impl SourceId {
    /// Identity of a packet without a source address.
    pub const NONE: Self = Self(0);

    /// Returns the identity of a source address.
    #[inline(always)]
    pub const fn from_address(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self(1 << 32 | v4.to_bits() as u64),
            IpAddr::V6(v6) => Self((v6.to_bits() >> 64) as u64),
        }
    }

    /// Returns the identity with this number: an IPv4 address with bit 32 set, or the upper half
    /// of an IPv6 address.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::net::{Ipv4Addr, Ipv6Addr};

    #[test]
    fn hash_depends_on_the_seed_and_spreads_adjacent_addresses() {
        let source =
            |n: u32| SourceId::from_address(IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + n)));
        let (one, two) = (SourceKey::new([1; 16]), SourceKey::new([2; 16]));
        assert_eq!(one, SourceKey::new([1; 16]));
        assert_ne!(one.hash(source(1)), two.hash(source(1)));
        assert_ne!(one.hash_in_class(source(1), 0), one.hash_in_class(source(1), 1));
        // 1000 hashes in 65536 buckets: 7.6 collisions on average.
        let buckets: HashSet<_> = (0..1000).map(|n| one.hash(source(n)) as u16).collect();
        assert!(buckets.len() > 970, "{}", buckets.len());
    }

    #[test]
    fn ipv6_addresses_of_one_64_bit_prefix_are_one_source() {
        let source = |bits| SourceId::from_address(IpAddr::V6(Ipv6Addr::from_bits(bits)));
        assert_eq!(source(7 << 64 | 1), source(7 << 64 | 2));
        assert_ne!(source(7 << 64), source(8 << 64));
    }
}
