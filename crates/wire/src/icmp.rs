//! Functions shared by ICMPv4 and ICMPv6.

use crate::field::{append, put_u16};

/// Returns the packet quoted in an ICMP error, without the extensions that may follow the quote.
///
/// `length` is the quote's length in units of `unit_bytes`; zero means that the quote is all of
/// `data` (RFC 4884 section 5.1).
pub(crate) fn quote_without_extensions(data: &[u8], length: u8, unit_bytes: usize) -> &[u8] {
    match usize::from(length) * unit_bytes {
        0 => data,
        bytes => data.get(..bytes).unwrap_or(data),
    }
}

/// Header of an ICMPv4 or ICMPv6 message: type, code, checksum, and for most types further
/// fields of fixed length.
pub(crate) struct IcmpHeader {
    /// Space for the longest header, that of an NDP redirect.
    bytes: [u8; 40],
    len: usize,
}

impl IcmpHeader {
    /// Creates a header of type, code and checksum only.
    pub(crate) fn type_code_only(kind: u8, code: u8) -> Self {
        let mut bytes = [0; 40];
        (bytes[0], bytes[1]) = (kind, code);
        Self { bytes, len: 4 }
    }

    /// Creates a header with one 32-bit field after the checksum.
    pub(crate) fn with_u32(kind: u8, code: u8, word: u32) -> Self {
        let mut head = Self::type_code_only(kind, code);
        head.push(&word.to_be_bytes());
        head
    }

    /// Appends a field.
    pub(crate) fn push(&mut self, field: &[u8]) {
        let end = self.len + field.len();
        debug_assert!(end <= self.bytes.len(), "an ICMP header of {end} bytes exceeds the buffer");
        if let Some(slot) = self.bytes.get_mut(self.len..end) {
            slot.copy_from_slice(field);
            self.len = end;
        }
    }

    /// Creates a header with two 16-bit fields after the checksum.
    pub(crate) fn with_u16_pair(kind: u8, code: u8, high: u16, low: u16) -> Self {
        Self::with_u32(kind, code, u32::from(high) << 16 | u32::from(low))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&self.bytes)
    }

    pub(crate) fn set_checksum(&mut self, checksum: u16) {
        put_u16(&mut self.bytes, 2, checksum);
    }

    /// Writes the header and `body` to the front of `buf` and returns the rest of `buf`; `None`,
    /// with nothing written, when the message does not fit.
    pub(crate) fn emit<'b>(&self, body: &[u8], buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let (message, rest) = buf.split_at_mut_checked(self.len.checked_add(body.len())?)?;
        append(append(message, self.as_bytes())?, body)?;
        Some(rest)
    }
}
