//! Parser of DNS queries. Every query is checked before use.
//!
//! The parser follows no compression pointer. The name of a question is at the front of the
//! message, where nothing precedes it to point back to, and the names of other records are only
//! skipped. So no message can cause an endless loop.

use super::name::{self, MAX_NAME_BYTES};

/// Length of a message header, in bytes (RFC 1035 section 4.1.1).
pub(super) const HEADER_BYTES: usize = 12;

/// Largest message that every client accepts over UDP without EDNS, in bytes (RFC 1035 section
/// 4.2.1).
pub const MAX_UDP_BYTES_WITHOUT_EDNS: usize = 512;

/// Response codes (RFC 1035 section 4.1.1, RFC 2136, RFC 6891).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Rcode {
    /// The query succeeded; the answer may be empty.
    NoError = 0,
    /// The query was malformed.
    FormErr = 1,
    /// The server failed.
    ServFail = 2,
    /// The name does not exist.
    NxDomain = 3,
    /// The kind of query is not implemented.
    NotImp = 4,
    /// The server does not serve this name or class, or refuses zone transfers.
    Refused = 5,
    /// A name made from a DNAME record is too long.
    YxDomain = 6,
    /// The EDNS version is not supported.
    BadVers = 16,
}

impl Rcode {
    /// All response codes that this server sends.
    pub const ALL: [Rcode; 8] = [
        Rcode::NoError,
        Rcode::FormErr,
        Rcode::ServFail,
        Rcode::NxDomain,
        Rcode::NotImp,
        Rcode::Refused,
        Rcode::YxDomain,
        Rcode::BadVers,
    ];

    /// Mnemonic, such as `NXDOMAIN`, as DNS tools print it.
    pub const fn name(self) -> &'static str {
        match self {
            Rcode::NoError => "NOERROR",
            Rcode::FormErr => "FORMERR",
            Rcode::ServFail => "SERVFAIL",
            Rcode::NxDomain => "NXDOMAIN",
            Rcode::NotImp => "NOTIMP",
            Rcode::Refused => "REFUSED",
            Rcode::YxDomain => "YXDOMAIN",
            Rcode::BadVers => "BADVERS",
        }
    }
}

/// Record types with special treatment in the server.
pub(super) mod rtype {
    pub const A: u16 = 1;
    pub const NS: u16 = 2;
    pub const CNAME: u16 = 5;
    pub const SOA: u16 = 6;
    pub const PTR: u16 = 12;
    pub const MX: u16 = 15;
    pub const TXT: u16 = 16;
    pub const SIG: u16 = 24;
    pub const KEY: u16 = 25;
    pub const AAAA: u16 = 28;
    pub const SRV: u16 = 33;
    pub const DNAME: u16 = 39;
    pub const OPT: u16 = 41;
    pub const DS: u16 = 43;
    pub const RRSIG: u16 = 46;
    pub const NSEC: u16 = 47;
    pub const TKEY: u16 = 249;
    pub const TSIG: u16 = 250;
    pub const IXFR: u16 = 251;
    pub const AXFR: u16 = 252;
    pub const MAILB: u16 = 253;
    pub const MAILA: u16 = 254;
    pub const ANY: u16 = 255;
}

/// Class IN, the Internet.
pub(super) const CLASS_IN: u16 = 1;

/// Class CH (CHAOS), in which servers tell about themselves.
pub(super) const CLASS_CHAOS: u16 = 3;

/// EDNS parameters of the client (RFC 6891 section 6.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edns {
    /// Largest UDP payload that the client accepts, in bytes, as sent.
    pub udp_payload_bytes: u16,
    /// EDNS version; only version 0 exists.
    pub version: u8,
    /// DO bit: the client understands DNSSEC (RFC 3225). Copied into the reply.
    pub dnssec_ok: bool,
}

/// EDNS options of a query that this server knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EdnsOptions<'a> {
    /// Data of the COOKIE option (RFC 7873): 8, or 16 to 40 bytes.
    pub cookie: Option<&'a [u8]>,
    /// The client requests the identifier of the server (NSID, RFC 5001).
    pub wants_nsid: bool,
}

/// Codes of EDNS options.
pub(super) mod option_code {
    pub const NSID: u16 = 3;
    pub const COOKIE: u16 = 10;
    pub const EXTENDED_ERROR: u16 = 15;
}

/// Well-formed query with one question.
///
/// # Examples
/// ```
/// use tidegate_apps::dns::synthetic::Question;
/// use tidegate_apps::dns::{Name, Query};
///
/// let question = Question { name: Name::from_text("www.example").unwrap(), rtype: 1 };
/// let message = question.to_message(7, Some(1232));
/// let query = Query::parse(&message).unwrap();
/// assert_eq!(query.name(), b"\x03www\x07example\0");
/// assert_eq!(query.rtype, 1);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// Header and question of the query, unchanged.
    pub(super) header_and_question: &'a [u8],
    /// Queried record type.
    pub rtype: u16,
    /// Queried class.
    pub class: u16,
    /// EDNS parameters, if the client sent an OPT record.
    pub edns: Option<Edns>,
    /// EDNS options of the OPT record.
    pub(super) options: EdnsOptions<'a>,
}

/// Reason why a message is not a query to look up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection<'a> {
    /// Too short for a header. Gets no reply.
    TooShort,
    /// A response. Gets no reply, or two servers could exchange messages forever.
    Response,
    /// Malformed or not implemented. Gets an error reply without records.
    Error {
        /// Response code: `FormErr` or `NotImp`.
        rcode: Rcode,
        /// Header, and the question when it could be parsed.
        header_and_question: &'a [u8],
    },
}

impl<'a> Query<'a> {
    /// Parses a message.
    ///
    /// # Errors
    /// When the message is not a well-formed query with one question.
    #[inline]
    pub fn parse(message: &'a [u8]) -> Result<Self, Rejection<'a>> {
        let Some(header) = message.first_chunk::<HEADER_BYTES>() else {
            return Err(Rejection::TooShort);
        };
        if header[2] & 0x80 != 0 {
            return Err(Rejection::Response);
        }
        let error =
            |rcode, header_and_question| Err(Rejection::Error { rcode, header_and_question });
        let [questions, answers, authorities, additionals] =
            [4, 6, 8, 10].map(|at| u16::from_be_bytes([header[at], header[at + 1]]));
        let question = match questions {
            1 => name::wire_len(&message[HEADER_BYTES..]).and_then(|name_len| {
                let end = HEADER_BYTES + name_len;
                let fields = message.get(end..)?.first_chunk::<4>()?;
                Some((end + 4, *fields))
            }),
            _ => None,
        };
        let opcode = header[2] >> 3 & 0xf;
        if opcode != 0 {
            let end = question.map_or(HEADER_BYTES, |(end, _)| end);
            return error(Rcode::NotImp, &message[..end]);
        }
        let Some((end, [type_high, type_low, class_high, class_low])) = question else {
            return error(Rcode::FormErr, header);
        };
        let (header_and_question, rest) = message.split_at(end);
        // A query carries no answers. The authority section is for dynamic updates and incremental
        // transfers; the server supports neither.
        if answers != 0 || authorities != 0 {
            return error(Rcode::FormErr, header_and_question);
        }
        let Some((edns, options)) = read_additional(message, rest, additionals) else {
            return error(Rcode::FormErr, header_and_question);
        };
        Ok(Query {
            header_and_question,
            rtype: u16::from_be_bytes([type_high, type_low]),
            class: u16::from_be_bytes([class_high, class_low]),
            edns,
            options,
        })
    }

    /// Queried name, in wire format and in the client's case.
    pub fn name(&self) -> &'a [u8] {
        &self.header_and_question[HEADER_BYTES..self.header_and_question.len() - 4]
    }

    /// Largest reply for this client over UDP, in bytes, when the server's own limit is
    /// `server_max_bytes`: the client's EDNS payload size, but at least 512 (RFC 6891 section
    /// 6.2.3), or 512 without EDNS.
    pub fn udp_limit_bytes(&self, server_max_bytes: usize) -> usize {
        let client = self
            .edns
            .map_or(MAX_UDP_BYTES_WITHOUT_EDNS, |edns| usize::from(edns.udp_payload_bytes));
        client.max(MAX_UDP_BYTES_WITHOUT_EDNS).min(server_max_bytes.max(MAX_UDP_BYTES_WITHOUT_EDNS))
    }
}

/// Low octet of the type OPT; the high octet is 0.
const OPT_LOW_OCTET: u8 = rtype::OPT as u8;

/// EDNS parameters and options of a query.
type Additional<'a> = (Option<Edns>, EdnsOptions<'a>);

/// Parses the `count` records in `rest`, the end of `message`, and returns the EDNS parameters of
/// the OPT record, if present. Returns `None` when the records are malformed, when there are two
/// OPT records, or when bytes are left over.
#[inline]
fn read_additional<'a>(message: &[u8], rest: &'a [u8], count: u16) -> Option<Additional<'a>> {
    if let (1, Ok(record)) = (count, <&[u8; 11]>::try_from(rest))
        && let [0, 0, OPT_LOW_OCTET, high, low, _, version, flags, _, 0, 0] = *record
    {
        // The end of nearly every query: an OPT record without options.
        let edns = Edns {
            udp_payload_bytes: u16::from_be_bytes([high, low]),
            version,
            dnssec_ok: flags & 0x80 != 0,
        };
        return Some((Some(edns), EdnsOptions::default()));
    }
    read_additional_records(message, rest, count)
}

/// As [`read_additional`], for records of any type.
fn read_additional_records<'a>(
    message: &[u8],
    rest: &'a [u8],
    count: u16,
) -> Option<Additional<'a>> {
    let mut edns = None;
    let mut options = EdnsOptions::default();
    let mut rest = rest;
    for _ in 0..count {
        let at = message.len() - rest.len();
        let is_root = *rest.first()? == 0;
        rest = rest.get(skip_name(rest, at)?..)?;
        let fixed = rest.first_chunk::<10>()?;
        let data_len = usize::from(u16::from_be_bytes([fixed[8], fixed[9]]));
        let data = rest.get(10..10 + data_len)?;
        rest = &rest[10 + data_len..];
        if u16::from_be_bytes([fixed[0], fixed[1]]) == rtype::OPT {
            // RFC 6891 section 6.1.1: at most one OPT record, owned by the root.
            if edns.is_some() || !is_root {
                return None;
            }
            options = read_options(data)?;
            edns = Some(Edns {
                udp_payload_bytes: u16::from_be_bytes([fixed[2], fixed[3]]),
                version: fixed[5],
                dnssec_ok: fixed[6] & 0x80 != 0,
            });
        }
    }
    rest.is_empty().then_some((edns, options))
}

/// Returns the length of the name at the front of `rest`, which begins at offset `at` of the
/// message. A pointer ends a name. The target of the pointer must be before the name and after
/// the header (RFC 9267 section 2).
fn skip_name(rest: &[u8], at: usize) -> Option<usize> {
    let mut len = 0;
    loop {
        match *rest.get(len)? {
            0 => return Some(len + 1),
            label @ 1..=63 => len += 1 + usize::from(label),
            high @ 0xc0.. => {
                let target = usize::from(high & 0x3f) << 8 | usize::from(*rest.get(len + 1)?);
                return (HEADER_BYTES..at).contains(&target).then_some(len + 2);
            }
            _ => return None,
        }
        if len >= MAX_NAME_BYTES {
            return None;
        }
    }
}

/// Parses the options of an OPT record. Returns `None` unless the options fill its data exactly,
/// or when a cookie has an invalid length (RFC 7873 section 5.2.2).
fn read_options(data: &[u8]) -> Option<EdnsOptions<'_>> {
    let mut options = EdnsOptions::default();
    let mut rest = data;
    while let Some(&[code_high, code_low, len_high, len_low]) = rest.first_chunk() {
        let len = usize::from(u16::from_be_bytes([len_high, len_low]));
        let value = rest.get(4..4 + len)?;
        rest = &rest[4 + len..];
        match u16::from_be_bytes([code_high, code_low]) {
            option_code::NSID => options.wants_nsid = true,
            option_code::COOKIE if !matches!(len, 8 | 16..=40) => return None,
            // Only the first cookie counts (RFC 7873 section 5.2).
            option_code::COOKIE => options.cookie = options.cookie.or(Some(value)),
            _ => {}
        }
    }
    rest.is_empty().then_some(options)
}

#[cfg(test)]
mod tests;
