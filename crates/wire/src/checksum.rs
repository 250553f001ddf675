//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624).
//!
//! A [`Sum`] is built from pieces and asked at the end: for the field to send
//! ([`Sum::checksum`]) or whether what arrived adds up ([`Sum::is_valid`]).
//! What arrived is never checked by comparing its field with a recomputed one:
//! one's complement has two zeros, and only the sum treats them alike.

use core::net::{Ipv4Addr, Ipv6Addr};

use crate::Protocol;

/// A one's complement sum in the making.
///
/// The value is kept modulo 2^64 - 1 in the byte order of this machine: RFC
/// 1071 section 2 shows that neither the width nor the byte order of the
/// addition matters until the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    value: u64,
    /// Whether an odd number of bytes was added, so that the next byte is the
    /// low half of its 16-bit word.
    odd: bool,
}

impl Sum {
    /// The sum of nothing.
    pub const ZERO: Sum = Sum { value: 0, odd: false };

    /// The sum of some bytes.
    #[inline(always)]
    pub fn of(bytes: &[u8]) -> Sum {
        Sum::ZERO.with(bytes)
    }

    /// The sum of words as they stand in memory.
    #[inline(always)]
    pub fn of_words<const N: usize>(words: [u64; N]) -> Sum {
        Sum { value: add_words(0, &words.map(u64::to_ne_bytes)), odd: false }
    }

    /// This sum with more bytes behind those added so far.
    #[inline(always)]
    #[must_use = "the sum is returned, not changed in place"]
    pub fn with(self, bytes: &[u8]) -> Sum {
        // A piece that begins in the middle of a word has its bytes in the
        // other halves: times 256, which is a rotation modulo 2^64 - 1.
        let value = if self.odd {
            add_with_end_around(self.value, sum_native(0, bytes).rotate_left(8))
        } else {
            sum_native(self.value, bytes)
        };
        Sum { value, odd: self.odd ^ (bytes.len() % 2 == 1) }
    }

    /// This sum with a number of two bytes added in a word of its own, as
    /// in a pseudo-header: it does not move the place of the next byte.
    #[inline]
    #[must_use = "the sum is returned, not changed in place"]
    pub fn with_u16(self, number: u16) -> Sum {
        Sum { value: add_with_end_around(self.value, u64::from(number.to_be())), ..self }
    }

    /// Like [`Sum::with_u16`] for a number of four bytes.
    #[inline]
    #[must_use = "the sum is returned, not changed in place"]
    pub fn with_u32(self, number: u32) -> Sum {
        Sum { value: add_with_end_around(self.value, u64::from(number.to_be())), ..self }
    }

    /// The sum folded to 16 bits, not complemented: what stands in the field
    /// of a packet whose checksum is left to the card.
    #[inline]
    pub fn fold(self) -> u16 {
        // Adding the halves in both orders puts their sum, with its own carry
        // added at the end, in the high half.
        let sum = (self.value.wrapping_add(self.value.rotate_left(32)) >> 32) as u32;
        let sum = (sum.wrapping_add(sum.rotate_left(16)) >> 16) as u16;
        u16::from_be(sum)
    }

    /// The checksum field for the bytes added, which had zero in its place.
    #[inline]
    pub fn checksum(self) -> u16 {
        !self.fold()
    }

    /// The checksum field of UDP: a sum of zero is sent as all ones, because
    /// zero means that there is no checksum (RFC 768).
    #[inline]
    pub fn udp_checksum(self) -> u16 {
        match self.checksum() {
            0 => 0xffff,
            checksum => checksum,
        }
    }

    /// Whether the bytes added, their checksum field included, add up.
    #[inline]
    pub fn is_valid(self) -> bool {
        // The sum folds to all ones if it is a multiple of 65,535 other than
        // zero: folding takes away multiples of it, and so does the carry that
        // was added at the end.
        self.value != 0 && self.adds_up()
    }

    /// As [`Sum::is_valid`], for less, of bytes of which at least one is not
    /// zero.
    #[inline]
    pub fn adds_up(self) -> bool {
        // Multiplying by the inverse of 65,535 modulo 2^64 divides if that
        // leaves no rest, and gives more than any quotient otherwise.
        const INVERSE: u64 = 0xfffe_fffe_fffe_ffff;
        self.value.wrapping_mul(INVERSE) <= u64::MAX / 0xffff
    }
}

/// `a + b` modulo 2^64 - 1. Only zero plus zero gives zero.
#[inline(always)]
fn add_with_end_around(a: u64, b: u64) -> u64 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u64::from(carry)
}

/// `total` plus some words: one addition with carry for each, with no branch.
#[inline(always)]
fn add_words<const N: usize>(total: u64, words: &[[u8; 8]; N]) -> u64 {
    let (mut total, mut carry) = (total, false);
    for &word in words {
        let (sum, over) = total.overflowing_add(u64::from_ne_bytes(word));
        let (sum, again) = sum.overflowing_add(u64::from(carry));
        (total, carry) = (sum, over | again);
    }
    add_with_end_around(total, u64::from(carry))
}

/// The sum of the words of a short packet, each number of them with a way of
/// its own that has no loop: floods are made of short packets.
macro_rules! short_sum {
    ($total:ident, $words:ident, $($count:literal)*) => {
        match $words.len() {
            $($count => $words.first_chunk::<$count>().map(|words| add_words($total, words)),)*
            _ => None,
        }
    };
}

/// `total` plus `bytes` as native words, a last odd byte padded with zero.
#[inline(always)]
fn sum_native(total: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let total = match short_sum!(total, words, 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16) {
        Some(total) => total,
        None => long_sum(total, words),
    };
    if rest.is_empty() { total } else { add_with_end_around(total, last_word(rest)) }
}

#[inline(never)]
fn long_sum(total: u64, words: &[[u8; 8]]) -> u64 {
    let (blocks, words) = words.as_chunks::<8>();
    let total = blocks.iter().fold(total, add_words);
    words.iter().fold(total, |total, &word| add_words(total, &[word]))
}

/// Up to seven bytes, padded with zeros.
#[inline]
fn last_word(bytes: &[u8]) -> u64 {
    // Less than 2^34 when added up.
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

/// The sum of the IPv4 pseudo-header (RFC 768, RFC 9293 section 3.1) for
/// `bytes` bytes of transport header and payload.
#[inline]
pub fn pseudo_header_v4(
    source: Ipv4Addr,
    destination: Ipv4Addr,
    protocol: Protocol,
    bytes: u16,
) -> Sum {
    // Three numbers of 32 bits cannot carry out of 64.
    let value = u64::from(u32::from_ne_bytes(source.octets()))
        + u64::from(u32::from_ne_bytes(destination.octets()))
        + u64::from((u32::from(protocol.0) << 16 | u32::from(bytes)).to_be());
    Sum { value, odd: false }
}

/// The sum of the IPv6 pseudo-header (RFC 8200 section 8.1) for `bytes` bytes
/// of transport header and payload.
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

/// The checksum field after a part of the packet changed from `old` to `new`
/// (RFC 1624 equation 3). Both parts begin at an even place of the packet.
///
/// Part of the packet must be other than zero after the change, as every header
/// and pseudo-header is: over nothing but zeros the right field is all ones,
/// which only summing again can tell. An echo reply is such a case.
///
/// A UDP field of zero means that there is none and must stay zero: do not
/// call this for it, and send a result of zero as all ones.
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

    /// RFC 1071 as it is written: one word at a time.
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
        fn equals_the_naive_sum(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(Sum::of(&bytes).fold(), naive_fold(&bytes));
        }

        #[test]
        fn is_valid_exactly_when_it_folds_to_all_ones(value: u64, multiple in 0..=u64::MAX / 0xffff) {
            for value in [value, multiple * 0xffff, multiple * 0xffff + 1, 0, u64::MAX] {
                let sum = Sum { value, odd: false };
                prop_assert_eq!(sum.is_valid(), sum.fold() == 0xffff);
                prop_assert_eq!(sum.adds_up(), sum.is_valid() || value == 0);
            }
        }

        #[test]
        fn may_be_cut_anywhere(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            a in 0usize..200,
            b in 0usize..200,
        ) {
            let (a, b) = (a.min(b).min(bytes.len()), a.max(b).min(bytes.len()));
            let pieces = Sum::of(&bytes[..a]).with(&bytes[a..b]).with(&bytes[b..]);
            prop_assert_eq!(pieces.fold(), naive_fold(&bytes));
        }

        #[test]
        fn update_equals_summing_again(
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
        fn the_pseudo_headers_are_those_of_the_rfcs(
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
        /// Adds a checksum field behind `len` bytes, in a word of its own.
        fn with_u16_at_even(self, len: usize, field: u16) -> Sum {
            let padded = if len % 2 == 1 { self.with(&[0]) } else { self };
            padded.with(&field.to_be_bytes())
        }
    }

    #[test]
    fn the_example_of_rfc_1071() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(Sum::of(&bytes).fold(), 0xddf2);
    }

    #[test]
    fn the_example_of_rfc_1624() {
        // Section 4: equation 2 gives 0xffff here, equation 3 the right 0x0000.
        let (old, new) = (Sum::ZERO.with_u16(0x5555), Sum::ZERO.with_u16(0x3285));
        assert_eq!(update(0xdd2f, old, new), 0x0000);
    }

    #[test]
    fn both_zeros_are_valid_in_the_field_when_the_data_sums_to_all_ones() {
        let data = [0x12, 0x34, 0xed, 0xcb];
        assert_eq!(Sum::of(&data).checksum(), 0);
        assert_eq!(Sum::of(&data).udp_checksum(), 0xffff);
        assert!(Sum::of(&data).with_u16(0).is_valid());
        assert!(Sum::of(&data).with_u16(0xffff).is_valid());
        assert!(!Sum::of(&data).with_u16(1).is_valid());
    }

    #[test]
    fn nothing_but_zero_bytes_is_not_valid() {
        assert!(!Sum::of(&[0; 64]).is_valid());
        assert_eq!(Sum::of(&[0; 64]).checksum(), 0xffff);
    }

    #[test]
    fn a_carry_that_carries_again_is_not_lost() {
        // The second word overflows; its carry makes the third overflow, which
        // without it would just not.
        let words = [u64::MAX, 1, u64::MAX, 7].map(u64::to_ne_bytes);
        let bytes = words.as_flattened();
        assert_eq!(Sum::of(bytes).fold(), naive_fold(bytes));
        assert_eq!(Sum::of(&bytes[..24]).fold(), naive_fold(&bytes[..24]));
    }

    #[test]
    fn carries_of_a_long_run_are_not_lost() {
        let bytes = [0xff; 65_535];
        assert_eq!(Sum::of(&bytes).fold(), naive_fold(&bytes));
    }
}
