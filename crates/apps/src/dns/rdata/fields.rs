//! Encoder of single fields.

use std::net::IpAddr;

use domain::base::iana::Rtype;
use domain::utils::{base16, base64};

use super::super::entries::{FileEntry, parse_seconds};
use super::super::name::{self, Name};
use super::{Field, FieldError, location};

/// Longest record data, in octets.
const MAX_DATA_BYTES: usize = u16::MAX as usize;

/// DNSSEC algorithms by name (RFC 4034 appendix A.1 and the IANA registry).
const ALGORITHMS: [(&str, u8); 17] = [
    ("RSAMD5", 1),
    ("DH", 2),
    ("DSA", 3),
    ("ECC", 4),
    ("RSASHA1", 5),
    ("DSA-NSEC3-SHA1", 6),
    ("RSASHA1-NSEC3-SHA1", 7),
    ("RSASHA256", 8),
    ("RSASHA512", 10),
    ("ECC-GOST", 12),
    ("ECDSAP256SHA256", 13),
    ("ECDSAP384SHA384", 14),
    ("ED25519", 15),
    ("ED448", 16),
    ("INDIRECT", 252),
    ("PRIVATEDNS", 253),
    ("PRIVATEOID", 254),
];

/// Certificate types by name (RFC 4398 section 2.1).
const CERTIFICATE_TYPES: [(&str, u16); 10] = [
    ("PKIX", 1),
    ("SPKI", 2),
    ("PGP", 3),
    ("IPKIX", 4),
    ("ISPKI", 5),
    ("IPGP", 6),
    ("ACPKIX", 7),
    ("IACPKIX", 8),
    ("URI", 253),
    ("OID", 254),
];

/// Protocols by name.
const PROTOCOLS: [(&str, u8); 3] = [("icmp", 1), ("tcp", 6), ("udp", 17)];

/// Services by name, of those that the records listed when they were in use.
const SERVICES: [(&str, u16); 20] = [
    ("echo", 7),
    ("discard", 9),
    ("daytime", 13),
    ("ftp-data", 20),
    ("ftp", 21),
    ("ssh", 22),
    ("telnet", 23),
    ("smtp", 25),
    ("time", 37),
    ("domain", 53),
    ("tftp", 69),
    ("gopher", 70),
    ("finger", 79),
    ("http", 80),
    ("pop3", 110),
    ("sunrpc", 111),
    ("nntp", 119),
    ("ntp", 123),
    ("snmp", 161),
    ("https", 443),
];

/// Encodes the fields of one record.
pub(super) struct Encoder<'a> {
    entry: &'a FileEntry<'a>,
    /// Index of the next token.
    next: usize,
    origin: Option<Name>,
    data: Vec<u8>,
}

impl<'a> Encoder<'a> {
    pub(super) fn new(entry: &'a FileEntry<'a>, first: usize, origin: Option<Name>) -> Self {
        Encoder { entry, next: first, origin, data: Vec::with_capacity(32) }
    }

    /// Data of all fields.
    pub(super) fn finish(self) -> Result<Vec<u8>, FieldError> {
        if self.has_more() {
            return Err(self.error_at(self.next, "the end of the record"));
        }
        if self.data.len() > MAX_DATA_BYTES {
            return Err(self.error_at(self.next - 1, "at most 65,535 octets of data"));
        }
        Ok(self.data)
    }

    /// Encodes the next field.
    pub(super) fn encode(&mut self, field: Field) -> Result<(), FieldError> {
        match field {
            Field::U8 => self.number("a number up to 255", u8::to_be_bytes),
            Field::U16 => self.number("a number up to 65535", u16::to_be_bytes),
            Field::U32 => self.number("a number up to 4294967295", u32::to_be_bytes),
            Field::Seconds => self.with_token("a number of seconds", seconds),
            Field::Time => self.with_token("a time, as 20301231235959", time),
            Field::Name => self.name(),
            Field::Text => self.text(),
            Field::OptionalText if !self.has_more() => Ok(()),
            Field::OptionalText => self.text(),
            Field::Texts => self.repeat(true, Self::text),
            Field::Octets => self.octets(),
            Field::Base64 => self.joined("base64", |text| base64::decode(text).ok()),
            Field::Hex => self.joined("hexadecimal digits", |text| base16::decode_vec(text).ok()),
            Field::Ipv4 => self.with_token("an IPv4 address", |text| {
                text.parse().ok().map(|address: std::net::Ipv4Addr| address.octets().to_vec())
            }),
            Field::Eui(groups) => self
                .with_token("groups of two hexadecimal digits, as 00-00-5e-00-53-2a", |text| {
                    eui(text, groups)
                }),
            Field::Id64 => {
                self.with_token("four groups of hexadecimal digits, as 14:4fff:ff20:ee64", id64)
            }
            Field::RecordType => self.with_token("a record type", |text| {
                text.parse().ok().map(|rtype: Rtype| rtype.to_int().to_be_bytes().to_vec())
            }),
            Field::Algorithm => self.with_token("a DNSSEC algorithm", |text| {
                named(&ALGORITHMS, text).map(|number| vec![number])
            }),
            Field::CertificateType => self.with_token("a certificate type", |text| {
                named(&CERTIFICATE_TYPES, text).map(|number| number.to_be_bytes().to_vec())
            }),
            Field::TypeBitmap => self.type_bitmap(),
            Field::NxtBitmap => self.nxt_bitmap(),
            Field::AddressPrefixes => self.repeat(false, |encoder| {
                encoder.with_token("an address prefix, as 1:192.0.2.0/24", address_prefix)
            }),
            Field::Location => self.location(),
            Field::Nsap => self.with_token("0x and hexadecimal digits", nsap),
            Field::Protocol => self.with_token("a protocol", |text| {
                named(&PROTOCOLS, text).map(|number| vec![number])
            }),
            Field::Services => self.services(),
        }
    }

    fn has_more(&self) -> bool {
        !self.entry.token(self.next).is_empty()
    }

    fn error_at(&self, token: usize, expected: &'static str) -> FieldError {
        FieldError { token, expected }
    }

    /// Takes the next token, as text.
    fn take(&mut self, expected: &'static str) -> Result<&'a str, FieldError> {
        let token = self.entry.token(self.next);
        match std::str::from_utf8(token) {
            Ok(text) if !text.is_empty() => {
                self.next += 1;
                Ok(text)
            }
            _ => Err(self.error_at(self.next, expected)),
        }
    }

    fn with_token(
        &mut self,
        expected: &'static str,
        encode: impl Fn(&str) -> Option<Vec<u8>>,
    ) -> Result<(), FieldError> {
        let text = self.take(expected)?;
        let data = encode(text).ok_or_else(|| self.error_at(self.next - 1, expected))?;
        self.data.extend_from_slice(&data);
        Ok(())
    }

    fn number<T: std::str::FromStr, const N: usize>(
        &mut self,
        expected: &'static str,
        encode: impl Fn(T) -> [u8; N],
    ) -> Result<(), FieldError> {
        self.with_token(expected, |text| number(text).map(|value| encode(value).to_vec()))
    }

    /// Encodes the rest of the record with one encoder, at least once if `is_needed`.
    fn repeat(
        &mut self,
        is_needed: bool,
        mut encode: impl FnMut(&mut Self) -> Result<(), FieldError>,
    ) -> Result<(), FieldError> {
        let mut is_needed = is_needed;
        while is_needed || self.has_more() {
            encode(self)?;
            is_needed = false;
        }
        Ok(())
    }

    /// Encodes the remaining tokens as one: long data may be split by spaces.
    fn joined(
        &mut self,
        expected: &'static str,
        decode: impl Fn(&str) -> Option<Vec<u8>>,
    ) -> Result<(), FieldError> {
        let first = self.next;
        let mut text = self.take(expected)?.to_owned();
        while self.has_more() {
            text += self.take(expected)?;
        }
        let data = decode(&text).ok_or_else(|| self.error_at(first, expected))?;
        self.data.extend_from_slice(&data);
        Ok(())
    }

    fn name(&mut self) -> Result<(), FieldError> {
        let text = self.take("a domain name")?;
        let name = name::complete(text, self.origin.as_ref())
            .ok_or_else(|| self.error_at(self.next - 1, "a domain name"))?;
        self.data.extend_from_slice(name.wire());
        Ok(())
    }

    fn text(&mut self) -> Result<(), FieldError> {
        let expected = "a text of at most 255 octets";
        let octets = self.decode_token(expected)?;
        let len = u8::try_from(octets.len()).map_err(|_| self.error_at(self.next - 1, expected))?;
        self.data.push(len);
        self.data.extend_from_slice(&octets);
        Ok(())
    }

    fn octets(&mut self) -> Result<(), FieldError> {
        let expected = "a quoted text that is not empty";
        let octets = self.decode_token(expected)?;
        if octets.is_empty() {
            return Err(self.error_at(self.next - 1, expected));
        }
        self.data.extend_from_slice(&octets);
        Ok(())
    }

    /// Takes the next token and decodes its quotation marks and escapes.
    fn decode_token(&mut self, expected: &'static str) -> Result<Vec<u8>, FieldError> {
        if !self.has_more() {
            return Err(self.error_at(self.next, expected));
        }
        let decoded = self.entry.decoded_token(self.next);
        self.next += 1;
        decoded.ok_or_else(|| self.error_at(self.next - 1, expected))
    }

    /// Takes the remaining tokens as record types.
    fn take_types(&mut self) -> Result<Vec<u16>, FieldError> {
        let mut types = Vec::new();
        while self.has_more() {
            let rtype: Rtype = self
                .take("a record type")?
                .parse()
                .map_err(|_| self.error_at(self.next - 1, "a record type"))?;
            types.push(rtype.to_int());
        }
        types.sort_unstable();
        types.dedup();
        Ok(types)
    }

    fn type_bitmap(&mut self) -> Result<(), FieldError> {
        let types = self.take_types()?;
        for window in types.chunk_by(|one, other| one >> 8 == other >> 8) {
            let mut bitmap = Vec::new();
            window.iter().for_each(|rtype| set_bit(&mut bitmap, usize::from(rtype & 0xff)));
            self.data.extend_from_slice(&[(window[0] >> 8) as u8, bitmap.len() as u8]);
            self.data.extend_from_slice(&bitmap);
        }
        Ok(())
    }

    fn nxt_bitmap(&mut self) -> Result<(), FieldError> {
        let first = self.next;
        let types = self.take_types()?;
        // Bit 0 marks another format, which was never defined.
        if types.iter().any(|rtype| !(1..128).contains(rtype)) {
            return Err(self.error_at(first, "record types from 1 to 127"));
        }
        let mut bitmap = Vec::new();
        types.iter().for_each(|&rtype| set_bit(&mut bitmap, rtype.into()));
        self.data.extend_from_slice(&bitmap);
        Ok(())
    }

    fn services(&mut self) -> Result<(), FieldError> {
        let mut bitmap = Vec::new();
        while self.has_more() {
            let expected = "a port number or a well-known service";
            let text = self.take(expected)?;
            let port =
                named(&SERVICES, text).ok_or_else(|| self.error_at(self.next - 1, expected))?;
            set_bit(&mut bitmap, port.into());
        }
        self.data.extend_from_slice(&bitmap);
        Ok(())
    }

    fn location(&mut self) -> Result<(), FieldError> {
        let first = self.next;
        let mut tokens = Vec::new();
        while self.has_more() {
            tokens.push(self.take(location::EXPECTED)?);
        }
        let data = location::encode(&tokens)
            .map_err(|index| self.error_at(first + index, location::EXPECTED))?;
        self.data.extend_from_slice(&data);
        Ok(())
    }
}

/// Sets a bit, counted from the most significant bit of the first octet.
fn set_bit(bitmap: &mut Vec<u8>, bit: usize) {
    let octet = bit / 8;
    if bitmap.len() <= octet {
        bitmap.resize(octet + 1, 0);
    }
    bitmap[octet] |= 0x80 >> (bit % 8);
}

/// Parses a decimal number of digits only.
fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Parses a number or one of the names.
fn named<T: std::str::FromStr + Copy>(names: &[(&str, T)], text: &str) -> Option<T> {
    let by_name = names.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
    by_name.map(|&(_, number)| number).or_else(|| number(text))
}

fn seconds(text: &str) -> Option<Vec<u8>> {
    let seconds = parse_seconds(text.as_bytes()).or_else(|| number(text));
    seconds.map(|seconds: u32| seconds.to_be_bytes().to_vec())
}

/// Parses `YYYYMMDDHHmmSS` or a number of seconds; times after 2106 wrap around (RFC 4034 section
/// 3.1.5).
fn time(text: &str) -> Option<Vec<u8>> {
    let seconds = match text.len() {
        14 if text.is_ascii() => {
            let part = |from: usize, to: usize| number::<i64>(text.get(from..to)?);
            let (year, month, day) = (part(0, 4)?, part(4, 6)?, part(6, 8)?);
            let (hour, minute, second) = (part(8, 10)?, part(10, 12)?, part(12, 14)?);
            let is_valid = (1..=12).contains(&month)
                && (1..=days_of_month(year, month)).contains(&day)
                && hour < 24
                && minute < 60
                && second < 60
                && year >= 1970;
            if !is_valid {
                return None;
            }
            ((days_since_1970(year, month, day) * 24 + hour) * 60 + minute) * 60 + second
        }
        _ => i64::from(number::<u32>(text)?),
    };
    Some((seconds as u32).to_be_bytes().to_vec())
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_of_month(year: i64, month: i64) -> i64 {
    match month {
        2 => 28 + i64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let years: i64 = (1970..year).map(|year| 365 + i64::from(is_leap(year))).sum();
    let months: i64 = (1..month).map(|month| days_of_month(year, month)).sum();
    years + months + day - 1
}

/// Parses one hexadecimal number of `digits`.
fn hex(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u16> {
    let is_hex = digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    u16::from_str_radix(text, 16).ok().filter(|_| is_hex)
}

fn eui(text: &str, groups: usize) -> Option<Vec<u8>> {
    let octets: Option<Vec<u8>> =
        text.split('-').map(|group| Some(hex(group, 2..=2)? as u8)).collect();
    octets.filter(|octets| octets.len() == groups)
}

fn id64(text: &str) -> Option<Vec<u8>> {
    let groups: Option<Vec<u16>> = text.split(':').map(|group| hex(group, 1..=4)).collect();
    let groups = groups.filter(|groups| groups.len() == 4)?;
    Some(groups.into_iter().flat_map(u16::to_be_bytes).collect())
}

fn nsap(text: &str) -> Option<Vec<u8>> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))?;
    let digits: String = digits.chars().filter(|&digit| digit != '.').collect();
    base16::decode_vec(&digits).ok().filter(|data| !data.is_empty())
}

/// Encodes `[!]family:address/prefix` (RFC 3123 section 5).
fn address_prefix(text: &str) -> Option<Vec<u8>> {
    let (negation, text) = match text.strip_prefix('!') {
        Some(rest) => (0x80, rest),
        None => (0, text),
    };
    let (family, rest) = text.split_once(':')?;
    let (address, prefix) = rest.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let (known, octets) = match address {
        IpAddr::V4(address) => ("1", address.octets().to_vec()),
        IpAddr::V6(address) => ("2", address.octets().to_vec()),
    };
    let prefix: u8 = number(prefix)?;
    if family != known || usize::from(prefix) > octets.len() * 8 {
        return None;
    }
    // Trailing zero octets are left out (RFC 3123 section 4).
    let len = octets.iter().rposition(|&octet| octet != 0).map_or(0, |last| last + 1);
    let mut data = vec![0, known.parse().ok()?, prefix, negation | len as u8];
    data.extend_from_slice(&octets[..len]);
    Some(data)
}
