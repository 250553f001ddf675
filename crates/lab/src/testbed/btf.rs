//! Offsets of fields in the kernel's structures, from the kernel's type information (BTF, kernel
//! documentation `bpf/btf.rst`).

use crate::LabError;

const BTF_FILE: &str = "/sys/kernel/btf/vmlinux";
const BTF_MAGIC: u16 = 0xeb9f;
const KIND_STRUCT: u32 = 4;

/// Fields of the requested structures: structure name, field name, offset in bytes.
pub(crate) type StructFields = Vec<(String, String, u64)>;

/// Reads the field offsets of the named structures from the running kernel.
pub(crate) fn read_struct_fields(structures: &[&str]) -> Result<StructFields, LabError> {
    let bytes = std::fs::read(BTF_FILE).map_err(LabError::file(BTF_FILE))?;
    parse(&bytes, structures).ok_or_else(|| {
        LabError::Config(format!("{BTF_FILE} is not type information (BTF) of a known format"))
    })
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|four| u32::from_ne_bytes(*four))
}

fn name_at(strings: &[u8], at: u32) -> Option<&str> {
    let rest = strings.get(at as usize..)?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    std::str::from_utf8(rest.get(..end)?).ok()
}

fn parse(bytes: &[u8], structures: &[&str]) -> Option<StructFields> {
    let magic = u16::from_ne_bytes(*bytes.first_chunk()?);
    let (header, types_at) = (u32_at(bytes, 4)?, u32_at(bytes, 8)?);
    let (types_len, strings_at) = (u32_at(bytes, 12)?, u32_at(bytes, 16)?);
    let section = |at: u32| bytes.get(header.checked_add(at)? as usize..);
    let (types, strings) = (section(types_at)?.get(..types_len as usize)?, section(strings_at)?);
    if magic != BTF_MAGIC {
        return None;
    }
    let mut fields = StructFields::new();
    let mut at = 0;
    while at < types.len() {
        let (name, info) = (u32_at(types, at)?, u32_at(types, at + 4)?);
        let (kind, count) = (info >> 24 & 31, info as usize & 0xffff);
        at += 12;
        let name = name_at(strings, name)?;
        if kind == KIND_STRUCT && structures.contains(&name) {
            for member in 0..count {
                let field = name_at(strings, u32_at(types, at + member * 12)?)?;
                // The upper byte is the size of a bit field.
                let bits = u32_at(types, at + member * 12 + 8)? & 0xff_ffff;
                fields.push((name.to_owned(), field.to_owned(), u64::from(bits / 8)));
            }
        }
        at += trailing_bytes(kind, count)?;
    }
    Some(fields)
}

/// Number of bytes after the 12-byte header of a type; `None` for an unknown kind.
fn trailing_bytes(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        // Integers, variables, declaration tags.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        // Structures, unions, sections, 64-bit enumerations.
        4 | 5 | 15 | 19 => 12 * count,
        // Enumerations, function prototypes.
        6 | 13 => 8 * count,
        // Pointers, forward declarations, typedefs, qualifiers, functions, floats, type tags.
        2 | 7..=12 | 16 | 18 => 0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// BTF data with an integer type, then a structure `sock` with the fields `a` at byte 8 and
    /// `b` at byte 20.
    fn small_btf() -> Vec<u8> {
        let strings = b"\0sock\0a\0b\0int\0";
        let types: [u32; 13] = [10, 1 << 24, 4, 32, 1, 4 << 24 | 2, 24, 6, 1, 64, 8, 1, 160];
        let mut bytes = BTF_MAGIC.to_ne_bytes().to_vec();
        bytes.extend([1, 0]);
        let header = [24, 0, types.len() as u32 * 4, types.len() as u32 * 4, strings.len() as u32];
        bytes.extend(header.iter().flat_map(|word: &u32| word.to_ne_bytes()));
        bytes.extend(types.iter().flat_map(|word| word.to_ne_bytes()));
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn finds_fields_after_other_types() {
        let fields = parse(&small_btf(), &["sock"]).unwrap();
        let expected = [("sock".into(), "a".into(), 8), ("sock".into(), "b".into(), 20)];
        assert_eq!(fields, expected);
        assert_eq!(parse(&small_btf(), &["other"]).unwrap(), []);
    }

    #[test]
    fn rejects_truncated_type_information() {
        let whole = small_btf();
        for len in 0..whole.len() - 4 {
            assert_eq!(parse(&whole[..len], &["sock"]), None, "{len}");
        }
        assert_eq!(parse(&[0; 64], &["sock"]), None);
    }
}
