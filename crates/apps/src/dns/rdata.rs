//! Data of record types that the scanner of the crate `domain` does not know, from presentation
//! format to wire format.
//!
//! Each type is a list of fields. The zone file reader passes the encoded data to the scanner in
//! the generic form of RFC 3597.

mod fields;
mod location;

use super::entries::FileEntry;
use super::name::Name;
use fields::Encoder;

/// Field of record data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    U8,
    U16,
    U32,
    /// Number of seconds, with or without units.
    Seconds,
    /// Point in time: `YYYYMMDDHHmmSS`, or seconds since 1970.
    Time,
    Name,
    /// Character string of at most 255 octets, with a length octet.
    Text,
    /// Like [`Field::Text`], and may be absent.
    OptionalText,
    /// One or more character strings.
    Texts,
    /// Octets of a quoted string, without a length octet; not empty.
    Octets,
    /// Base64 up to the end of the record.
    Base64,
    /// Hexadecimal digits up to the end of the record.
    Hex,
    Ipv4,
    /// As many groups of two hexadecimal digits, separated by hyphens.
    Eui(usize),
    /// Four groups of up to four hexadecimal digits, separated by colons.
    Id64,
    /// Record type by name.
    RecordType,
    /// DNSSEC algorithm, by number or name.
    Algorithm,
    /// Certificate type, by number or name.
    CertificateType,
    /// Type bitmap of NSEC records (RFC 4034 section 4.1.2), up to the end of the record.
    TypeBitmap,
    /// Type bitmap of NXT records (RFC 2535 section 5.2), up to the end of the record.
    NxtBitmap,
    /// Address prefixes (RFC 3123), up to the end of the record.
    AddressPrefixes,
    /// Location (RFC 1876), up to the end of the record.
    Location,
    /// `0x` and hexadecimal digits with dots (RFC 1706).
    Nsap,
    /// Protocol of RFC 1035 section 3.4.2, by number or name.
    Protocol,
    /// Port bitmap of RFC 1035 section 3.4.2, up to the end of the record.
    Services,
}

/// Record type with the fields of its data.
pub(super) struct RecordFormat {
    mnemonic: &'static str,
    rtype: u16,
    fields: &'static [Field],
}

/// Types that this module encodes.
const FORMATS: [RecordFormat; 27] = {
    use Field::*;
    const fn new(mnemonic: &'static str, rtype: u16, fields: &'static [Field]) -> RecordFormat {
        RecordFormat { mnemonic, rtype, fields }
    }
    [
        new("WKS", 11, &[Ipv4, Protocol, Services]),
        new("AFSDB", 18, &[U16, Name]),
        new("X25", 19, &[Text]),
        new("ISDN", 20, &[Text, OptionalText]),
        new("RT", 21, &[U16, Name]),
        new("NSAP", 22, &[Nsap]),
        new("SIG", 24, &[RecordType, Algorithm, U8, Seconds, Time, Time, U16, Name, Base64]),
        new("KEY", 25, &[U16, U8, Algorithm, Base64]),
        new("PX", 26, &[U16, Name, Name]),
        new("LOC", 29, &[Location]),
        new("NXT", 30, &[Name, NxtBitmap]),
        new("KX", 36, &[U16, Name]),
        new("CERT", 37, &[CertificateType, U16, Algorithm, Base64]),
        new("APL", 42, &[AddressPrefixes]),
        new("DHCID", 49, &[Base64]),
        new("SMIMEA", 53, &[U8, U8, U8, Hex]),
        new("CSYNC", 62, &[U32, U16, TypeBitmap]),
        new("SPF", 99, &[Texts]),
        new("NID", 104, &[U16, Id64]),
        new("L32", 105, &[U16, Ipv4]),
        new("L64", 106, &[U16, Id64]),
        new("LP", 107, &[U16, Name]),
        new("EUI48", 108, &[Eui(6)]),
        new("EUI64", 109, &[Eui(8)]),
        new("URI", 256, &[U16, U16, Octets]),
        new("AVC", 258, &[Texts]),
        new("DLV", 32769, &[U16, Algorithm, U8, Hex]),
    ]
};

/// Error in a field: the token at fault and what was expected.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FieldError {
    /// Index of the token in its entry.
    pub token: usize,
    pub expected: &'static str,
}

/// Text of an entry in which the data of a type of this module is in the generic form. Returns
/// `None` for an entry of another type or form. `origin` completes relative names.
pub(super) fn to_generic_form(
    entry: &FileEntry<'_>,
    origin: impl Fn() -> Option<Name>,
) -> Result<Option<Vec<u8>>, FieldError> {
    let Some(type_token) = entry.type_token() else { return Ok(None) };
    let Some(format) = find_format(entry.token(type_token)) else { return Ok(None) };
    if entry.token(type_token + 1) == b"\\#" {
        return Ok(None);
    }
    let mut encoder = Encoder::new(entry, type_token + 1, origin());
    for &field in format.fields {
        encoder.encode(field)?;
    }
    let data = encoder.finish()?;
    let mut text = entry.front(type_token);
    text.extend_from_slice(format!("TYPE{} \\# {} ", format.rtype, data.len()).as_bytes());
    text.extend(data.iter().flat_map(|byte| format!("{byte:02x}").into_bytes()));
    text.push(b'\n');
    Ok(Some(text))
}

fn find_format(token: &[u8]) -> Option<&'static RecordFormat> {
    let is_number = |format: &RecordFormat| {
        let number =
            token.split_at_checked(4).filter(|(prefix, _)| prefix.eq_ignore_ascii_case(b"TYPE"));
        number.is_some_and(|(_, digits)| digits == format.rtype.to_string().as_bytes())
    };
    FORMATS
        .iter()
        .find(|format| token.eq_ignore_ascii_case(format.mnemonic.as_bytes()) || is_number(format))
}

#[cfg(test)]
mod tests;
