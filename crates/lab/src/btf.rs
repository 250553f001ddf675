//! Where the fields of the kernel's structures lie, from the kernel's own type
//! information (BTF: kernel documentation, `bpf/btf.rst`).

use crate::LabError;

const FILE: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u16 = 0xeb9f;
const STRUCT: u32 = 4;

/// The fields of the structures that were asked for: structure, field, offset
/// in bytes.
pub(crate) type Fields = Vec<(String, String, u64)>;

/// Reads where the fields of the named structures lie.
pub(crate) fn fields_of(structures: &[&str]) -> Result<Fields, LabError> {
    let bytes = std::fs::read(FILE).map_err(LabError::file(FILE))?;
    parse(&bytes, structures)
        .ok_or_else(|| LabError::Config(format!("{FILE} is not type information as we know it")))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|four| u32::from_ne_bytes(*four))
}

fn name_at(strings: &[u8], at: u32) -> Option<&str> {
    let rest = strings.get(at as usize..)?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    std::str::from_utf8(rest.get(..end)?).ok()
}

fn parse(bytes: &[u8], structures: &[&str]) -> Option<Fields> {
    let magic = u16::from_ne_bytes(*bytes.first_chunk()?);
    let (header, types_at) = (u32_at(bytes, 4)?, u32_at(bytes, 8)?);
    let (types_len, strings_at) = (u32_at(bytes, 12)?, u32_at(bytes, 16)?);
    let part = |at: u32| bytes.get(header.checked_add(at)? as usize..);
    let (types, strings) = (part(types_at)?.get(..types_len as usize)?, part(strings_at)?);
    if magic != MAGIC {
        return None;
    }
    let mut fields = Fields::new();
    let mut at = 0;
    while at < types.len() {
        let (name, info) = (u32_at(types, at)?, u32_at(types, at + 4)?);
        let (kind, count) = (info >> 24 & 31, info as usize & 0xffff);
        at += 12;
        let name = name_at(strings, name)?;
        if kind == STRUCT && structures.contains(&name) {
            for member in 0..count {
                let field = name_at(strings, u32_at(types, at + member * 12)?)?;
                // The upper byte is the size of a bit field.
                let bits = u32_at(types, at + member * 12 + 8)? & 0xff_ffff;
                fields.push((name.to_owned(), field.to_owned(), u64::from(bits / 8)));
            }
        }
        at += extra_bytes(kind, count)?;
    }
    Some(fields)
}

/// What follows the first 12 bytes of a type.
fn extra_bytes(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        // Integers, variables, declaration tags.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        // Structures, unions, sections, 64-bit enumerations.
        4 | 5 | 15 | 19 => 12 * count,
        // Enumerations, function prototypes.
        6 | 13 => 8 * count,
        // Pointers, forwards, names, qualifiers, functions, floats, type tags.
        2 | 7..=12 | 16 | 18 => 0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A structure `sock` with the fields `a` at 8 and `b` at 20 bytes, behind
    /// an integer.
    fn small() -> Vec<u8> {
        let strings = b"\0sock\0a\0b\0int\0";
        let types: [u32; 13] = [10, 1 << 24, 4, 32, 1, 4 << 24 | 2, 24, 6, 1, 64, 8, 1, 160];
        let mut bytes = MAGIC.to_ne_bytes().to_vec();
        bytes.extend([1, 0]);
        let header = [24, 0, types.len() as u32 * 4, types.len() as u32 * 4, strings.len() as u32];
        bytes.extend(header.iter().flat_map(|word: &u32| word.to_ne_bytes()));
        bytes.extend(types.iter().flat_map(|word| word.to_ne_bytes()));
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn fields_are_found_behind_other_types() {
        let fields = parse(&small(), &["sock"]).unwrap();
        let expected = [("sock".into(), "a".into(), 8), ("sock".into(), "b".into(), 20)];
        assert_eq!(fields, expected);
        assert_eq!(parse(&small(), &["other"]).unwrap(), []);
    }

    #[test]
    fn what_is_cut_short_is_refused() {
        let whole = small();
        for len in 0..whole.len() - 4 {
            assert_eq!(parse(&whole[..len], &["sock"]), None, "{len}");
        }
        assert_eq!(parse(&[0; 64], &["sock"]), None);
    }
}
