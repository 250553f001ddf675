//! Header fields in network byte order at fixed offsets.
//!
//! Every header takes its fixed part as an array once (`split_first_chunk`). The offsets below
//! are then constants inside an array of constant length, and the compiler removes the bounds
//! checks.

use core::net::{Ipv4Addr, Ipv6Addr};

use crate::MacAddr;

/// Returns the `N` bytes at offset `at`.
#[inline(always)]
fn array_at<const N: usize, const LEN: usize>(header: &[u8; LEN], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&header[at..at + N]);
    bytes
}

#[inline(always)]
pub(crate) fn u16_at<const LEN: usize>(header: &[u8; LEN], at: usize) -> u16 {
    u16::from_be_bytes(array_at(header, at))
}

#[inline(always)]
pub(crate) fn u32_at<const LEN: usize>(header: &[u8; LEN], at: usize) -> u32 {
    u32::from_be_bytes(array_at(header, at))
}

#[inline(always)]
pub(crate) fn ipv4_at<const LEN: usize>(header: &[u8; LEN], at: usize) -> Ipv4Addr {
    Ipv4Addr::from(array_at::<4, LEN>(header, at))
}

#[inline(always)]
pub(crate) fn ipv6_at<const LEN: usize>(header: &[u8; LEN], at: usize) -> Ipv6Addr {
    Ipv6Addr::from(array_at::<16, LEN>(header, at))
}

#[inline(always)]
pub(crate) fn mac_at<const LEN: usize>(header: &[u8; LEN], at: usize) -> MacAddr {
    MacAddr(array_at(header, at))
}

/// Writes `bytes` at offset `at`.
#[inline(always)]
pub(crate) fn put<const LEN: usize>(header: &mut [u8; LEN], at: usize, bytes: &[u8]) {
    header[at..at + bytes.len()].copy_from_slice(bytes);
}

#[inline(always)]
pub(crate) fn put_u16<const LEN: usize>(header: &mut [u8; LEN], at: usize, value: u16) {
    put(header, at, &value.to_be_bytes());
}

#[inline(always)]
pub(crate) fn put_u32<const LEN: usize>(header: &mut [u8; LEN], at: usize, value: u32) {
    put(header, at, &value.to_be_bytes());
}

/// Copies `bytes` to the front of `buf` and returns the rest of `buf`; `None`, with nothing
/// written, when the bytes do not fit.
#[inline]
pub(crate) fn append<'b>(buf: &'b mut [u8], bytes: &[u8]) -> Option<&'b mut [u8]> {
    let (front, rest) = buf.split_at_mut_checked(bytes.len())?;
    front.copy_from_slice(bytes);
    Some(rest)
}
