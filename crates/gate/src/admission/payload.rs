//! Conditions on the first bytes of a payload.

use std::fmt;
use std::str::FromStr;

/// Bytes from the start of a payload that rules can compare.
pub const PAYLOAD_WINDOW: usize = 48;

/// Bytes of a payload: printable ASCII, `\xNN` for any byte, and `\\` for a backslash.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PayloadBytes {
    bytes: [u8; PAYLOAD_WINDOW],
    len: u8,
}

impl PayloadBytes {
    /// The bytes, at least one.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len.into()]
    }

    /// True if whatever matches `other` matches `self`.
    pub(super) fn covers(self, other: Self) -> bool {
        other.as_slice().get(..self.len.into()).is_some_and(|start| {
            start.iter().zip(self.as_slice()).all(|(a, b)| a.eq_ignore_ascii_case(b))
        })
    }
}

impl FromStr for PayloadBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut found = Self { bytes: [0; PAYLOAD_WINDOW], len: 0 };
        let mut rest = text;
        while let Some(first) = rest.bytes().next() {
            let (byte, len) = match first {
                b'\\' => escaped(rest).ok_or_else(|| {
                    format!("payload {text:?}: write \\\\ for a backslash and \\x07 for the byte 7")
                })?,
                b' '..=b'~' => (first, 1),
                _ => return Err(format!("payload {text:?}: write \\xNN for bytes beyond ASCII")),
            };
            let place = found.bytes.get_mut(usize::from(found.len)).ok_or_else(|| {
                format!("payload {text:?} is too long: at most {PAYLOAD_WINDOW} bytes")
            })?;
            *place = byte;
            found.len += 1;
            rest = &rest[len..];
        }
        if found.len == 0 {
            return Err("payload is empty: leave it out, or give at least a byte".to_owned());
        }
        Ok(found)
    }
}

/// Byte of the escape sequence at the start of a text, and the length of the sequence.
fn escaped(text: &str) -> Option<(u8, usize)> {
    match text.as_bytes().get(1)? {
        b'\\' => Some((b'\\', 2)),
        b'x' => {
            let digits = text.get(2..4).filter(|digits| !digits.starts_with('+'))?;
            Some((u8::from_str_radix(digits, 16).ok()?, 4))
        }
        _ => None,
    }
}

impl fmt::Display for PayloadBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().iter().try_for_each(|byte| match byte {
            b'\\' => f.write_str("\\\\"),
            b' '..=b'~' => write!(f, "{}", char::from(*byte)),
            _ => write!(f, "\\x{byte:02x}"),
        })
    }
}

impl fmt::Debug for PayloadBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// Compiled form of a condition: a window from the start of the payload, as the BPF program compares
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompiledPayload {
    /// Bytes to compare with.
    pub bytes: [u8; PAYLOAD_WINDOW],
    /// Bits of each byte that are compared: none before the condition's place and after its end, and
    /// of letters all but the one that tells upper from lower case.
    pub mask: [u8; PAYLOAD_WINDOW],
    /// Number of bytes that a payload must have at least; 0 matches every packet.
    pub end: u8,
}

impl CompiledPayload {
    /// Matches every packet.
    pub(super) const ANY: Self =
        Self { bytes: [0; PAYLOAD_WINDOW], mask: [0; PAYLOAD_WINDOW], end: 0 };

    /// Matches payloads with `wanted` at the offset `at`; offset and length are within the window.
    pub(super) fn new(at: usize, wanted: PayloadBytes) -> Self {
        let mut compiled = Self::ANY;
        for (offset, &byte) in wanted.as_slice().iter().enumerate() {
            compiled.mask[at + offset] = if byte.is_ascii_alphabetic() { !0x20 } else { 0xff };
            compiled.bytes[at + offset] = byte;
        }
        compiled.end = (at + wanted.as_slice().len()) as u8;
        compiled
    }

    /// True if a payload matches.
    #[inline]
    pub(super) fn matches(&self, payload: &[u8]) -> bool {
        self.end == 0
            || payload.get(..self.end.into()).is_some_and(|start| {
                let wanted = self.bytes.iter().zip(&self.mask);
                start.iter().zip(wanted).all(|(byte, (wanted, mask))| (byte ^ wanted) & mask == 0)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_trip_as_text() {
        for text in ["GET /search", "\\x07example\\x03org\\x00", "\\\\", "\\xff"] {
            let bytes: PayloadBytes = text.parse().unwrap();
            assert_eq!(bytes.to_string(), text);
        }
        assert_eq!("\\x41\\x00".parse::<PayloadBytes>().unwrap().as_slice(), b"A\0");
        let long = "x".repeat(PAYLOAD_WINDOW);
        assert!(long.parse::<PayloadBytes>().is_ok());
        for text in ["", "\\", "\\y", "\\x0", "\\x+1", "\\xé", "é", "a\nb", &(long + "x")] {
            assert!(text.parse::<PayloadBytes>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn payload_matches_at_its_place_in_both_cases() {
        let compiled = |at, text: &str| CompiledPayload::new(at, text.parse().unwrap());
        assert!(compiled(0, "GET /").matches(b"GET / HTTP/1.1"));
        assert!(compiled(0, "get /").matches(b"GET /"), "letters match in both cases");
        assert!(!compiled(0, "GET /").matches(b"GET "), "too short");
        assert!(!compiled(0, "@").matches(b"`"), "other bytes do not");
        assert!(compiled(2, "b").matches(b"xxB") && !compiled(2, "b").matches(b"bxx"));
        assert!(CompiledPayload::ANY.matches(b""));
        let (start, whole): (PayloadBytes, _) = ("ge".parse().unwrap(), "GET".parse().unwrap());
        assert!(start.covers(whole) && !whole.covers(start));
    }
}
