//! The keyed hash of a source, the same here and in the BPF program.

use std::net::IpAddr;

/// A secret key. Who does not know it cannot choose sources that fall together.
///
/// The arithmetic is what a BPF program can do too: 64-bit products, shifts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SourceKey {
    /// Is added to what is hashed.
    pub start: u64,
    /// Multiplies it; odd, so that nothing is lost.
    pub factor: u64,
}

/// The finisher of SplitMix64: every bit of the input moves every bit of the
/// output.
#[inline(always)]
const fn mix(mut word: u64) -> u64 {
    word ^= word >> 30;
    word = word.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word ^= word >> 27;
    word = word.wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

impl SourceKey {
    /// The key that a seed gives.
    pub fn new(seed: [u8; 16]) -> Self {
        let seed = u128::from_le_bytes(seed);
        let (low, high) = (seed as u64, (seed >> 64) as u64);
        Self { start: mix(low ^ 0x9e37_79b9_7f4a_7c15), factor: mix(high.wrapping_add(low)) | 1 }
    }

    /// The hash of a source.
    #[inline(always)]
    pub const fn hash(self, source: Source) -> u64 {
        mix((source.0 ^ self.start).wrapping_mul(self.factor))
    }

    /// The hash of a source in a class.
    #[inline(always)]
    pub const fn hash_in_class(self, source: Source, class: usize) -> u64 {
        mix(self.hash(source) ^ (class as u64 + 1))
    }
}

// The key is a secret.
impl std::fmt::Debug for SourceKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SourceKey(..)")
    }
}

/// Who sent a packet, as far as we tell senders apart: an IPv4 address, or the
/// network of 64 bits of an IPv6 address, in which a host can have any address
/// (RFC 4291 section 2.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source(u64);

impl Source {
    /// Nobody: the packet does not say.
    pub const NONE: Self = Self(0);

    /// The sender with this address.
    #[inline(always)]
    pub const fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self(1 << 32 | v4.to_bits() as u64),
            IpAddr::V6(v6) => Self((v6.to_bits() >> 64) as u64),
        }
    }

    /// The sender with this number: an IPv4 address with bit 32 set, or the
    /// upper half of an IPv6 address.
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
    fn the_seed_decides_and_neighbours_fall_apart() {
        let source = |n: u32| Source::of(IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + n)));
        let (one, two) = (SourceKey::new([1; 16]), SourceKey::new([2; 16]));
        assert_eq!(one, SourceKey::new([1; 16]));
        assert_ne!(one.hash(source(1)), two.hash(source(1)));
        assert_ne!(one.hash_in_class(source(1), 0), one.hash_in_class(source(1), 1));
        // 1000 balls in 65536 boxes: 7.6 collisions on average.
        let boxes: HashSet<_> = (0..1000).map(|n| one.hash(source(n)) as u16).collect();
        assert!(boxes.len() > 970, "{}", boxes.len());
    }

    #[test]
    fn an_ipv6_network_is_one_source() {
        let source = |bits| Source::of(IpAddr::V6(Ipv6Addr::from_bits(bits)));
        assert_eq!(source(7 << 64 | 1), source(7 << 64 | 2));
        assert_ne!(source(7 << 64), source(8 << 64));
    }
}
