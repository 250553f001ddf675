//! What the ICMP of IPv4 and that of IPv6 have in common.

use crate::field::{append, put_u16};

/// The quoted packet in an error, without the extensions that may follow it:
/// its length is told in units of `unit_bytes`, or is zero and the quote is all
/// (RFC 4884 section 5.1).
pub(crate) fn quote_of(data: &[u8], length: u8, unit_bytes: usize) -> &[u8] {
    match usize::from(length) * unit_bytes {
        0 => data,
        bytes => data.get(..bytes).unwrap_or(data),
    }
}

/// The first bytes of a message of either ICMP: type, code, checksum, and for
/// most types more fields of fixed length.
pub(crate) struct IcmpHead {
    /// Room for the longest, a redirect of neighbour discovery.
    bytes: [u8; 40],
    len: usize,
}

impl IcmpHead {
    /// A head of only type, code and checksum.
    pub(crate) fn short(kind: u8, code: u8) -> Self {
        let mut bytes = [0; 40];
        (bytes[0], bytes[1]) = (kind, code);
        Self { bytes, len: 4 }
    }

    /// A head with a word of 32 bits.
    pub(crate) fn word(kind: u8, code: u8, word: u32) -> Self {
        let mut head = Self::short(kind, code);
        head.push(&word.to_be_bytes());
        head
    }

    /// Puts one more field behind.
    pub(crate) fn push(&mut self, field: &[u8]) {
        let end = self.len + field.len();
        debug_assert!(end <= self.bytes.len(), "an ICMP head of {end} bytes");
        if let Some(place) = self.bytes.get_mut(self.len..end) {
            place.copy_from_slice(field);
            self.len = end;
        }
    }

    /// A head with two numbers of 16 bits.
    pub(crate) fn halves(kind: u8, code: u8, high: u16, low: u16) -> Self {
        Self::word(kind, code, u32::from(high) << 16 | u32::from(low))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&self.bytes)
    }

    pub(crate) fn set_checksum(&mut self, checksum: u16) {
        put_u16(&mut self.bytes, 2, checksum);
    }

    /// Writes the head and `body` to the front of `buf`, or nothing.
    pub(crate) fn emit<'b>(&self, body: &[u8], buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let (message, rest) = buf.split_at_mut_checked(self.len.checked_add(body.len())?)?;
        append(append(message, self.bytes())?, body)?;
        Some(rest)
    }
}
