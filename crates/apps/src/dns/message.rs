//! Queries as they come from the wire, checked before anything looks at them.
//!
//! No compression pointer is ever followed: the name of a question stands at
//! the front of the message, where there is nothing to point back to, and the
//! names of other records are only skipped. So no message can make a loop.

use super::name::{self, MAX_NAME_BYTES};

/// The length of a message header (RFC 1035 section 4.1.1).
pub(super) const HEADER_BYTES: usize = 12;

/// What every peer can receive without EDNS (RFC 1035 section 4.2.1).
pub const PLAIN_UDP_BYTES: usize = 512;

/// Response codes (RFC 1035 section 4.1.1, RFC 2136, RFC 6891).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Rcode {
    /// The question was answered, maybe with nothing.
    NoError = 0,
    /// The query was malformed.
    FormErr = 1,
    /// The server failed.
    ServFail = 2,
    /// The name does not exist.
    NxDomain = 3,
    /// The kind of query is not implemented.
    NotImp = 4,
    /// The server is not for this name.
    Refused = 5,
    /// A name made from a DNAME record would be too long.
    YxDomain = 6,
    /// The EDNS version is not supported.
    BadVers = 16,
}

impl Rcode {
    /// Every code that this server sends.
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

    /// The name as tools print it.
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

/// Record types that the server treats in a way of their own.
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

/// The class of the Internet.
pub(super) const CLASS_IN: u16 = 1;

/// What the client says about EDNS (RFC 6891 section 6.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edns {
    /// The largest UDP payload that the client takes, in bytes, as sent.
    pub udp_payload_bytes: u16,
    /// The version: only 0 exists.
    pub version: u8,
    /// The client understands DNSSEC (RFC 3225). Sent back as it came.
    pub dnssec_ok: bool,
}

/// A well-formed query for one question.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// Header and question, as they came.
    pub(super) front: &'a [u8],
    /// The type that is asked for.
    pub rtype: u16,
    /// The class that is asked for.
    pub class: u16,
    /// The client's EDNS record, if it sent one.
    pub edns: Option<Edns>,
}

/// Why a message is not a query to be looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection<'a> {
    /// Too short to have a header. Not answered.
    Truncated,
    /// A response. Not answered, or two servers could talk for ever.
    Response,
    /// Answered with an error and nothing else.
    Error {
        /// `FormErr` or `NotImp`.
        rcode: Rcode,
        /// The header, and the question too when it could be read.
        front: &'a [u8],
    },
}

impl<'a> Query<'a> {
    /// Reads a message.
    ///
    /// # Errors
    /// When it is not a well-formed query with one question.
    #[inline]
    pub fn parse(message: &'a [u8]) -> Result<Self, Rejection<'a>> {
        let Some(header) = message.first_chunk::<HEADER_BYTES>() else {
            return Err(Rejection::Truncated);
        };
        if header[2] & 0x80 != 0 {
            return Err(Rejection::Response);
        }
        let error = |rcode, front| Err(Rejection::Error { rcode, front });
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
        let (front, rest) = message.split_at(end);
        // A query carries no answers. The authority section is for updates and
        // incremental transfers, neither of which is served.
        if answers != 0 || authorities != 0 {
            return error(Rcode::FormErr, front);
        }
        let Some(edns) = read_additional(message, rest, additionals) else {
            return error(Rcode::FormErr, front);
        };
        Ok(Query {
            front,
            rtype: u16::from_be_bytes([type_high, type_low]),
            class: u16::from_be_bytes([class_high, class_low]),
            edns,
        })
    }

    /// The name that is asked for, in wire format and in the client's case.
    pub fn name(&self) -> &'a [u8] {
        &self.front[HEADER_BYTES..self.front.len() - 4]
    }

    /// The largest answer for this client over UDP, if the server sends no
    /// more than `server_max_bytes`: what EDNS says, but at least 512 (RFC
    /// 6891 section 6.2.3), and 512 without EDNS.
    pub fn udp_limit_bytes(&self, server_max_bytes: usize) -> usize {
        let client = self.edns.map_or(PLAIN_UDP_BYTES, |edns| usize::from(edns.udp_payload_bytes));
        client.max(PLAIN_UDP_BYTES).min(server_max_bytes.max(PLAIN_UDP_BYTES))
    }
}

/// The low octet of the type OPT; the high one is 0.
const OPT_LOW: u8 = rtype::OPT as u8;

/// Walks the `count` records in `rest`, the end of `message`, and returns the
/// OPT record if there is one. `None` when the records are malformed, when
/// there are two OPT records, or when bytes are left over.
#[inline]
fn read_additional(message: &[u8], rest: &[u8], count: u16) -> Option<Option<Edns>> {
    if let (1, Ok(record)) = (count, <&[u8; 11]>::try_from(rest))
        && let [0, 0, OPT_LOW, high, low, _, version, flags, _, 0, 0] = *record
    {
        // What nearly every query ends with: an OPT record without options.
        return Some(Some(Edns {
            udp_payload_bytes: u16::from_be_bytes([high, low]),
            version,
            dnssec_ok: flags & 0x80 != 0,
        }));
    }
    read_records(message, rest, count)
}

/// As [`read_additional`], for records of any kind.
fn read_records(message: &[u8], rest: &[u8], count: u16) -> Option<Option<Edns>> {
    let mut edns = None;
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
            // RFC 6891 section 6.1.1: at most one, and owned by the root.
            if edns.is_some() || !is_root || !options_are_whole(data) {
                return None;
            }
            edns = Some(Edns {
                udp_payload_bytes: u16::from_be_bytes([fixed[2], fixed[3]]),
                version: fixed[5],
                dnssec_ok: fixed[6] & 0x80 != 0,
            });
        }
    }
    rest.is_empty().then_some(edns)
}

/// The length of the name at the front of `rest`, which begins `at` bytes into
/// the message. A pointer ends a name; it must point to something before the
/// name and behind the header (RFC 9267 section 2).
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

/// Whether the options of an OPT record fill its data exactly.
fn options_are_whole(data: &[u8]) -> bool {
    let mut rest = data;
    while let Some(header) = rest.first_chunk::<4>() {
        let len = usize::from(u16::from_be_bytes([header[2], header[3]]));
        match rest.get(4 + len..) {
            Some(tail) => rest = tail,
            None => return false,
        }
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests;
