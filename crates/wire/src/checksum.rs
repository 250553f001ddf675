//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624).
//!
//! A [`Sum`] is accumulated from parts of a packet and then converted: to the checksum field to
//! send ([`Sum::checksum`]), or to the verdict on a received packet ([`Sum::is_valid`]).
//!
//! A received packet is never verified by comparing its field with a recomputed field: one's
//! complement has two zeros, and only the sum treats the two zeros alike.

use core::net::{Ipv4Addr, Ipv6Addr};

use crate::Protocol;

/// Running one's complement sum.
///
/// The value is kept modulo 2^64 - 1 in the machine's byte order: by RFC 1071 section 2, neither
/// width nor byte order of the additions affects the result after the final fold and swap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    value: u64,
    /// True after an odd number of bytes: the next byte is the second byte of its 16-bit word.
    odd: bool,
}

impl Sum {
    /// Sum of no bytes.
    pub const ZERO: Sum = Sum { value: 0, odd: false };

    /// Returns the sum of `bytes`.
    #[inline(always)]
    pub fn of(bytes: &[u8]) -> Sum {
        Sum::ZERO.with(bytes)
    }

    /// Returns the sum of `words`, whose native byte representation is the packet's.
    #[inline(always)]
    pub fn of_words<const N: usize>(words: [u64; N]) -> Sum {
        Sum { value: add_words(0, &words.map(u64::to_ne_bytes)), odd: false }
    }

    /// Returns this sum extended by `bytes`, which follow the bytes added so far.
    #[inline(always)]
    #[must_use = "the sum is returned, not changed in place"]
    pub fn with(self, bytes: &[u8]) -> Sum {
        // After an odd number of bytes, every further byte falls into the other half of its 16-bit
        // word: a multiplication by 256, which is a rotation modulo 2^64 - 1.
        let value = if self.odd {
            add_end_around_carry(self.value, sum_native(0, bytes).rotate_left(8))
        } else {
            sum_native(self.value, bytes)
        };
        Sum { value, odd: self.odd ^ (bytes.len() % 2 == 1) }
    }

    /// Returns this sum plus a 16-bit number in a word of its own, as in a pseudo-header.
    ///
    /// The alignment of bytes added later does not change.
    #[inline]
    #[must_use = "the sum is returned, not changed in place"]
    pub fn with_u16(self, number: u16) -> Sum {
        Sum { value: add_end_around_carry(self.value, u64::from(number.to_be())), ..self }
    }

    /// Returns this sum plus a 32-bit number; otherwise as [`Sum::with_u16`].
    #[inline]
    #[must_use = "the sum is returned, not changed in place"]
    pub fn with_u32(self, number: u32) -> Sum {
        Sum { value: add_end_around_carry(self.value, u64::from(number.to_be())), ..self }
    }

    /// Returns the sum folded to 16 bits, not complemented.
    ///
    /// With checksum offload, the checksum field holds this sum of the pseudo-header.
    #[inline]
    pub fn fold(self) -> u16 {
        // Adding the halves in both orders leaves their sum, including the end-around carry, in
        // the high half.
        let sum = (self.value.wrapping_add(self.value.rotate_left(32)) >> 32) as u32;
        let sum = (sum.wrapping_add(sum.rotate_left(16)) >> 16) as u16;
        u16::from_be(sum)
    }

    /// Returns the checksum field for the bytes added, whose own checksum field was zero.
    #[inline]
    pub fn checksum(self) -> u16 {
        !self.fold()
    }

    /// Returns the UDP checksum field: zero is sent as all ones, because a zero field means that
    /// the datagram has no checksum (RFC 768).
    #[inline]
    pub fn udp_checksum(self) -> u16 {
        match self.checksum() {
            0 => 0xffff,
            checksum => checksum,
        }
    }

    /// Returns true if the bytes added, including their checksum field, have a valid checksum.
    #[inline]
    pub fn is_valid(self) -> bool {
        // The sum folds to all ones if it is a multiple of 65,535 other than zero: folding
        // subtracts multiples of 65,535, and so does the end-around carry.
        self.value != 0 && self.is_valid_nonzero()
    }

    /// Cheaper variant of [`Sum::is_valid`] for bytes of which at least one is not zero.
    #[inline]
    pub fn is_valid_nonzero(self) -> bool {
        // Multiplication by the inverse of 65,535 modulo 2^64 yields the quotient if 65,535 divides
        // the value, and a number above every possible quotient otherwise.
        const INVERSE: u64 = 0xfffe_fffe_fffe_ffff;
        self.value.wrapping_mul(INVERSE) <= u64::MAX / 0xffff
    }
}

/// Returns `a + b` modulo 2^64 - 1. The result is zero only if both summands are zero.
#[inline(always)]
fn add_end_around_carry(a: u64, b: u64) -> u64 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u64::from(carry)
}

/// Returns `total` plus `words`: one branch-free addition with carry for each word.
#[inline(always)]
fn add_words<const N: usize>(total: u64, words: &[[u8; 8]; N]) -> u64 {
    let (mut total, mut carry) = (total, false);
    for &word in words {
        let (sum, over) = total.overflowing_add(u64::from_ne_bytes(word));
        let (sum, again) = sum.overflowing_add(u64::from(carry));
        (total, carry) = (sum, over | again);
    }
    add_end_around_carry(total, u64::from(carry))
}

/// Sums the words of a short packet with unrolled code for each word count, without a loop:
/// floods consist of short packets.
macro_rules! short_sum {
    ($total:ident, $words:ident, $($count:literal)*) => {
        match $words.len() {
            $($count => $words.first_chunk::<$count>().map(|words| add_words($total, words)),)*
            _ => None,
        }
    };
}

/// Returns `total` plus `bytes` as native words, with a last odd byte padded with zero.
#[inline(always)]
fn sum_native(total: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let total = match short_sum!(total, words, 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16) {
        Some(total) => total,
        None => long_sum(total, words),
    };
    if rest.is_empty() { total } else { add_end_around_carry(total, last_word(rest)) }
}

#[inline(never)]
fn long_sum(total: u64, words: &[[u8; 8]]) -> u64 {
    // The carry is added at the end of each block.
    let (blocks, words) = words.as_chunks::<32>();
    let total = blocks.iter().fold(total, add_words);
    let (blocks, words) = words.as_chunks::<8>();
    let total = blocks.iter().fold(total, add_words);
    words.iter().fold(total, |total, &word| add_words(total, &[word]))
}

/// Returns the sum of at most seven bytes, padded with zeros.
#[inline]
fn last_word(bytes: &[u8]) -> u64 {
    // The parts add up to less than 2^34.
    let (mut last, mut rest) = (0, bytes);
    if let Some((&word, tail)) = rest.split_first_chunk::<4>() {
        last += u64::from(u32::from_ne_bytes(word));
        rest = tail;
    }
    if let Some((&word, tail)) = rest.split_first_chunk::<2>() {
        last += u64::from(u16::from_ne_bytes(word));
        rest = tail;
    }
    if let &[byte] = rest {
        last += u64::from(u16::from_ne_bytes([byte, 0]));
    }
    last
}

/// Returns the sum of the IPv4 pseudo-header (RFC 768, RFC 9293 section 3.1) for `bytes` bytes
/// of transport header and payload.
#[inline]
pub fn pseudo_header_v4(
    source: Ipv4Addr,
    destination: Ipv4Addr,
    protocol: Protocol,
    bytes: u16,
) -> Sum {
    // The sum of three 32-bit numbers fits into 64 bits without carry.
    let value = u64::from(u32::from_ne_bytes(source.octets()))
        + u64::from(u32::from_ne_bytes(destination.octets()))
        + u64::from((u32::from(protocol.0) << 16 | u32::from(bytes)).to_be());
    Sum { value, odd: false }
}

/// Returns the sum of the IPv6 pseudo-header (RFC 8200 section 8.1) for `bytes` bytes of
/// transport header and payload.
#[inline]
pub fn pseudo_header_v6(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    protocol: Protocol,
    bytes: u32,
) -> Sum {
    Sum::of(&source.octets())
        .with(&destination.octets())
        .with_u32(bytes)
        .with_u32(u32::from(protocol.0))
}

/// Updates a checksum field after a part of the packet changed from `old` to `new` (RFC 1624
/// equation 3).
///
/// Both parts must begin at an even offset in the packet.
///
/// After the change, at least one byte covered by the checksum must not be zero. Every header
/// and pseudo-header satisfies this. Over all-zero bytes the correct field is all ones, which
/// only a full recomputation finds; an echo reply can be such a case.
///
/// A UDP checksum field of zero means no checksum and must stay zero: do not call this function
/// for it. Send a UDP result of zero as all ones.
///
/// # Examples
/// ```
/// use tidegate_wire::{Sum, checksum};
///
/// let before = Sum::of(&[64, 17, 192, 168]).checksum();
/// let after = checksum::update(before, Sum::of(&[64, 17]), Sum::of(&[63, 17]));
/// assert_eq!(after, Sum::of(&[63, 17, 192, 168]).checksum());
/// ```
#[inline]
pub fn update(checksum: u16, old: Sum, new: Sum) -> u16 {
    Sum::ZERO.with_u16(!checksum).with_u16(!old.fold()).with_u16(new.fold()).checksum()
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    /// Literal RFC 1071 algorithm: one 16-bit word at a time.
    fn naive_fold(bytes: &[u8]) -> u16 {
        let mut sum = 0u64;
        for pair in bytes.chunks(2) {
            sum += u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0));
        }
        while sum > 0xffff {
            sum = (sum >> 16) + (sum & 0xffff);
        }
        sum as u16
    }

    proptest! {
        #[test]
        fn matches_naive_sum(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(Sum::of(&bytes).fold(), naive_fold(&bytes));
        }

        #[test]
        fn is_valid_only_if_fold_is_all_ones(value: u64, multiple in 0..=u64::MAX / 0xffff) {
            for value in [value, multiple * 0xffff, multiple * 0xffff + 1, 0, u64::MAX] {
                let sum = Sum { value, odd: false };
                prop_assert_eq!(sum.is_valid(), sum.fold() == 0xffff);
                prop_assert_eq!(sum.is_valid_nonzero(), sum.is_valid() || value == 0);
            }
        }

        #[test]
        fn sum_is_independent_of_split_points(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            a in 0usize..200,
            b in 0usize..200,
        ) {
            let (a, b) = (a.min(b).min(bytes.len()), a.max(b).min(bytes.len()));
            let pieces = Sum::of(&bytes[..a]).with(&bytes[a..b]).with(&bytes[b..]);
            prop_assert_eq!(pieces.fold(), naive_fold(&bytes));
        }

        #[test]
        fn update_matches_full_recomputation(
            mut bytes in prop::collection::vec(any::<u8>(), 20..100),
            at in 0usize..8,
            new in any::<[u8; 4]>(),
        ) {
            let at = at * 2;
            let before = Sum::of(&bytes).checksum();
            let old = Sum::of(&bytes[at..at + 4]);
            bytes[at..at + 4].copy_from_slice(&new);
            let after = update(before, old, Sum::of(&new));
            prop_assert!(Sum::of(&bytes).with_u16_at_even(bytes.len(), after).is_valid());
        }

        #[test]
        fn pseudo_header_sums_match_rfc_layouts(
            v4 in any::<([u8; 4], [u8; 4])>(),
            v6 in any::<([u8; 16], [u8; 16])>(),
            protocol in any::<u8>(),
            bytes in any::<u16>(),
        ) {
            let [high, low] = bytes.to_be_bytes();
            let header: Vec<u8> =
                [&v4.0[..], &v4.1, &[0, protocol, high, low]].concat();
            let sum = pseudo_header_v4(v4.0.into(), v4.1.into(), Protocol(protocol), bytes);
            prop_assert_eq!(sum.fold(), naive_fold(&header));
            let header: Vec<u8> =
                [&v6.0[..], &v6.1, &[0, 0, high, low, 0, 0, 0, protocol]].concat();
            let sum = pseudo_header_v6(v6.0.into(), v6.1.into(), Protocol(protocol), bytes.into());
            prop_assert_eq!(sum.fold(), naive_fold(&header));
        }
    }

    impl Sum {
        /// Adds a checksum field after `len` bytes, in a word of its own.
        fn with_u16_at_even(self, len: usize, field: u16) -> Sum {
            let padded = if len % 2 == 1 { self.with(&[0]) } else { self };
            padded.with(&field.to_be_bytes())
        }
    }

    #[test]
    fn sums_rfc_1071_example() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(Sum::of(&bytes).fold(), 0xddf2);
    }

    #[test]
    fn updates_rfc_1624_example() {
        // Section 4: equation 2 yields 0xffff here, equation 3 the correct 0x0000.
        let (old, new) = (Sum::ZERO.with_u16(0x5555), Sum::ZERO.with_u16(0x3285));
        assert_eq!(update(0xdd2f, old, new), 0x0000);
    }

    #[test]
    fn accepts_both_ones_complement_zeros() {
        let data = [0x12, 0x34, 0xed, 0xcb];
        assert_eq!(Sum::of(&data).checksum(), 0);
        assert_eq!(Sum::of(&data).udp_checksum(), 0xffff);
        assert!(Sum::of(&data).with_u16(0).is_valid());
        assert!(Sum::of(&data).with_u16(0xffff).is_valid());
        assert!(!Sum::of(&data).with_u16(1).is_valid());
    }

    #[test]
    fn rejects_all_zero_bytes() {
        assert!(!Sum::of(&[0; 64]).is_valid());
        assert_eq!(Sum::of(&[0; 64]).checksum(), 0xffff);
    }

    #[test]
    fn keeps_carry_caused_by_carry() {
        // The second word overflows. Its carry makes the third word overflow, which would not
        // overflow without the carry.
        let words = [u64::MAX, 1, u64::MAX, 7].map(u64::to_ne_bytes);
        let bytes = words.as_flattened();
        assert_eq!(Sum::of(bytes).fold(), naive_fold(bytes));
        assert_eq!(Sum::of(&bytes[..24]).fold(), naive_fold(&bytes[..24]));
    }

    #[test]
    fn keeps_carries_of_maximum_length_input() {
        let bytes = [0xff; 65_535];
        assert_eq!(Sum::of(&bytes).fold(), naive_fold(&bytes));
    }
}
