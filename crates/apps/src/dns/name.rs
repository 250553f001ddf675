//! Domain names in wire format: labels with length octets, ended by the root label (RFC 1035
//! section 3.1).
//!
//! A length octet is at most 63 and upper-case letters begin at 65. So a whole name can be
//! lower-cased without finding its label boundaries.

use std::fmt;

/// Longest name in octets, including length octets and the root (RFC 1035 section 2.3.4).
pub const MAX_NAME_BYTES: usize = 255;

/// Longest label in octets, without the length octet (RFC 1035 section 2.3.4).
pub const MAX_LABEL_BYTES: usize = 63;

/// Well-formed domain name in wire format.
///
/// # Examples
/// ```
/// use tidegate_apps::dns::Name;
///
/// let name = Name::from_text("www.Example.com").unwrap();
/// assert_eq!(name.wire(), b"\x03www\x07Example\x03com\0");
/// assert_eq!(name.to_lower().to_string(), "www.example.com.");
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Name(Box<[u8]>);

impl Name {
    /// Returns the name of the root.
    pub fn root() -> Self {
        Name([0].into())
    }

    /// Copies an uncompressed name in wire format; `None` unless `wire` is exactly one well-formed
    /// name.
    pub fn from_wire(wire: &[u8]) -> Option<Self> {
        (wire_len(wire)? == wire.len()).then(|| Name(wire.into()))
    }

    /// Parses a name in presentation format, such as `www.example.com`, with or without the final
    /// dot. Escapes `\DDD` and `\X` are allowed (RFC 1035 section 5.1). Returns `None` for an
    /// invalid name.
    pub fn from_text(text: &str) -> Option<Self> {
        let mut wire = Vec::with_capacity(text.len() + 2);
        let mut label = Vec::new();
        let mut bytes = text.strip_suffix('.').unwrap_or(text).bytes();
        if bytes.len() == 0 {
            return Some(Name::root());
        }
        loop {
            let byte = bytes.next();
            match byte {
                Some(b'.') | None => {
                    if label.is_empty() || label.len() > MAX_LABEL_BYTES {
                        return None;
                    }
                    wire.push(label.len() as u8);
                    wire.append(&mut label);
                    if byte.is_none() {
                        break;
                    }
                }
                Some(b'\\') => label.push(unescape(&mut bytes)?),
                Some(byte) => label.push(byte),
            }
        }
        wire.push(0);
        Name::from_wire(&wire)
    }

    /// Octets of the name in wire format.
    pub fn wire(&self) -> &[u8] {
        &self.0
    }

    /// Returns the name in lower case.
    pub fn to_lower(&self) -> Name {
        Name(self.0.to_ascii_lowercase().into())
    }
}

/// Parses a name of a zone file: `@` is the origin, and a name without a final dot is completed by
/// the origin (RFC 1035 section 5.1).
pub(super) fn complete(text: &str, origin: Option<&Name>) -> Option<Name> {
    if text == "@" {
        return origin.cloned();
    }
    let front = text.strip_suffix('.');
    let is_escaped =
        |front: &str| front.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 1;
    if front.is_some_and(|front| !is_escaped(front)) {
        return Name::from_text(text);
    }
    let relative = Name::from_text(&format!("{text}."))?;
    let (_, labels) = relative.wire().split_last()?;
    Name::from_wire(&[labels, origin?.wire()].concat())
}

/// Decodes an escape after its backslash: three digits, or the character itself.
pub(super) fn unescape(bytes: &mut impl Iterator<Item = u8>) -> Option<u8> {
    let first = bytes.next()?;
    if !first.is_ascii_digit() {
        return Some(first);
    }
    let mut value = u16::from(first - b'0');
    for _ in 0..2 {
        let digit = bytes.next().filter(u8::is_ascii_digit)?;
        value = value * 10 + u16::from(digit - b'0');
    }
    u8::try_from(value).ok()
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_text(&self.0, f)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_text(&self.0, f)
    }
}

fn write_text(wire: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut rest = wire;
    if rest.first() == Some(&0) {
        return f.write_str(".");
    }
    while let Some((label, tail)) = split_label(rest) {
        for &byte in label {
            match byte {
                b'.' | b'\\' | b'"' | b'(' | b')' | b';' | b'@' | b'$' => {
                    write!(f, "\\{}", char::from(byte))?;
                }
                0x21..=0x7e => write!(f, "{}", char::from(byte))?,
                _ => write!(f, "\\{byte:03}")?,
            }
        }
        f.write_str(".")?;
        rest = tail;
    }
    Ok(())
}

/// Length of the uncompressed name at the front of `bytes`; `None` when the name is truncated, too
/// long, or contains anything but plain labels.
#[inline]
pub(super) fn wire_len(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let len = usize::from(*bytes.get(at)?);
        at += 1;
        match len {
            0 => return Some(at),
            1..=MAX_LABEL_BYTES => at += len,
            _ => return None,
        }
        if at >= MAX_NAME_BYTES {
            return None;
        }
    }
}

/// Splits a well-formed name into its first label and its parent; `None` at the root.
pub(super) fn split_label(wire: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&len, rest) = wire.split_first()?;
    if len == 0 || usize::from(len) > rest.len() {
        return None;
    }
    Some(rest.split_at(usize::from(len)))
}

/// Parent of a name: the name without its first label; `None` at the root.
pub(super) fn parent(wire: &[u8]) -> Option<&[u8]> {
    split_label(wire).map(|(_, parent)| parent)
}

/// Number of labels of a well-formed name, without the root.
pub(super) fn label_count(wire: &[u8]) -> usize {
    let mut rest = wire;
    let mut count = 0;
    while let Some(tail) = parent(rest) {
        rest = tail;
        count += 1;
    }
    count
}

/// Tree key of a name: its labels from the root down, in lower case: `[3]com[7]example`. The key
/// of a name is a prefix of the keys of all names below it. So in sorted order these names follow
/// directly after their ancestor.
pub(super) fn tree_key(wire: &[u8]) -> Box<[u8]> {
    let mut key = vec![0; wire.len().saturating_sub(1)];
    let mut end = key.len();
    let mut rest = wire;
    while let Some((label, tail)) = split_label(rest) {
        let start = end - label.len();
        key[start..end].copy_from_slice(label);
        key[start..end].make_ascii_lowercase();
        key[start - 1] = label.len() as u8;
        end = start - 1;
        rest = tail;
    }
    key.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn converts_between_text_and_wire_format() {
        let name = Name::from_text("www.Example.com").unwrap();
        assert_eq!(name.wire(), b"\x03www\x07Example\x03com\x00");
        assert_eq!(name.to_string(), "www.Example.com.");
        assert_eq!(Name::from_text(".").unwrap().wire(), b"\0");
        assert_eq!(Name::from_text("").unwrap().to_string(), ".");
        let odd = Name::from_text("a\\.b\\000.x").unwrap();
        assert_eq!(odd.wire(), b"\x04a.b\x00\x01x\x00");
        assert_eq!(odd.to_string(), "a\\.b\\000.x.");
    }

    #[test]
    fn rejects_malformed_names() {
        for text in ["a..b", ".a", "a\\", "a\\25", "a\\256", &"x".repeat(64)] {
            assert_eq!(Name::from_text(text), None, "{text}");
        }
        let long = "abcdefg.".repeat(32);
        assert_eq!(Name::from_text(&long), None);
        assert!(Name::from_text(&long[8..]).is_some());
        for wire in [&b""[..], b"\x01", b"\x01a", b"\x40a\0", b"\xc0\x0c", b"\0\0"] {
            assert_eq!(Name::from_wire(wire), None, "{wire:?}");
        }
    }

    #[test]
    fn accepts_names_up_to_255_octets() {
        let mut wire = Vec::new();
        for _ in 0..127 {
            wire.extend_from_slice(b"\x01a");
        }
        wire.push(0);
        assert_eq!(wire.len(), MAX_NAME_BYTES);
        let name = Name::from_wire(&wire).unwrap();
        assert_eq!(label_count(name.wire()), 127);
        wire.splice(0..0, *b"\x01a");
        assert_eq!(Name::from_wire(&wire), None);
    }

    #[test]
    fn tree_keys_sort_children_after_their_parent() {
        let key = |text| tree_key(Name::from_text(text).unwrap().wire());
        assert_eq!(&*key("WWW.example"), b"\x07example\x03www");
        assert_eq!(&*key("."), b"");
        assert!(key("a.b.example").starts_with(&key("b.example")));
        assert!(!key("xb.example").starts_with(&key("b.example")));
    }

    proptest! {
        #[test]
        fn measures_any_bytes_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Some(len) = wire_len(&bytes) {
                let name = Name::from_wire(&bytes[..len]).unwrap();
                prop_assert_eq!(Name::from_text(&name.to_string()).unwrap(), name);
            }
        }
    }
}
