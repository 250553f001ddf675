//! Plain packets: whole packets on untagged Ethernet, without IP options, extension headers or
//! fragments. The checks that UDP and TCP share.

use tidegate_wire::{EthernetHeader, MacAddr, Medium, Sum};

pub(crate) const LINK_BYTES: usize = EthernetHeader::BYTES;
/// First byte of an IPv4 header without options: version 4, header length 5 words.
pub(crate) const IPV4_VERSION_AND_IHL: u8 = 0x45;

/// Copies the `M` bytes at offset `at`.
#[inline(always)]
pub(crate) fn array_at<const M: usize>(bytes: &[u8], at: usize) -> [u8; M] {
    let mut part = [0; M];
    part.copy_from_slice(&bytes[at..at + M]);
    part
}

/// Expected first eight bytes of a plain frame: the interface's hardware address and the start of
/// the sender's. Of the sender's address only the group bit matters, the lowest bit of its first
/// byte; a shift removes the other bits.
#[derive(Clone, Copy)]
pub(crate) struct PlainLink(u64);

impl PlainLink {
    const MASK_SHIFT_BITS: u32 = 15;
    /// Matches no frame.
    const NONE: Self = Self(u64::MAX);

    pub(crate) fn new(medium: Medium, mac: MacAddr, vlan: Option<u16>) -> Self {
        match (medium, vlan) {
            (Medium::Ethernet, None) => {
                let [a, b, c, d, e, f] = mac.0;
                Self(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]) << Self::MASK_SHIFT_BITS)
            }
            _ => Self::NONE,
        }
    }

    /// True if the interface can receive plain frames.
    pub(crate) fn has_plain_frames(self) -> bool {
        self.0 != Self::NONE.0
    }

    #[inline(always)]
    pub(crate) fn matches(self, head: &[u8]) -> bool {
        u64::from_le_bytes(array_at(head, 0)) << Self::MASK_SHIFT_BITS == self.0
    }
}

#[inline(always)]
pub(crate) fn write_at<const M: usize>(bytes: &mut [u8], at: usize, value: [u8; M]) {
    bytes[at..at + M].copy_from_slice(&value);
}

// A sum over a header is never a sum of zeros only: version and protocol are not zero.

/// Checksum of an IPv4 header of 20 bytes behind an Ethernet header.
#[inline(always)]
pub(crate) fn ipv4_header_sum(head: &[u8]) -> Sum {
    let words = [u64::from_ne_bytes(array_at(head, 14)), u64::from_ne_bytes(array_at(head, 22))];
    let last = u32::from_ne_bytes(array_at(head, 30));
    Sum::of_words([words[0], words[1], u64::from(last)])
}

/// True if `source` is a possible IPv4 source address. False for a few valid addresses, which the
/// slow path checks.
#[inline(always)]
pub(crate) fn is_plain_source_v4(source: [u8; 4]) -> bool {
    // 0/8 and 127/8 never leave a host. From 224/4 on there are multicast groups, reserved
    // addresses and the broadcast address.
    source[0].wrapping_sub(1) < 223 && source[0] != 127
}

/// True if `source` is a possible IPv6 source address. False for a few valid addresses, which the
/// slow path checks.
#[inline(always)]
pub(crate) fn is_plain_source_v6(source: [u8; 16]) -> bool {
    // The unspecified, loopback and IPv4-mapped addresses are in ::/64.
    source[0] != 0xff && source[..8] != [0; 8]
}
