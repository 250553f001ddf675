//! Multicast listener discovery for IPv6, version 2 (RFC 3810), carried in ICMPv6: hosts report
//! to switches and routers which multicast groups they have joined.

use core::net::Ipv6Addr;

use crate::field::{ipv6_at, put, put_u16, u16_at};
use crate::icmp::IcmpHeader;
use crate::{DropReason, Ipv6Header};

/// Destination group of reports (RFC 3810 section 5.2.14).
pub const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);

/// Hop limit of every MLD message.
pub const HOP_LIMIT: u8 = 1;

/// Multicast listener discovery message, sent with the hop-by-hop header
/// [`crate::ipv6_extension::router_alert_header`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MldMessage<'a> {
    /// A router's request for the groups that hosts have joined.
    Query {
        /// Maximum response delay as coded in RFC 3810 section 5.1.3: milliseconds if under 32,768.
        maximum_response_code: u16,
        /// Queried group; unspecified for all groups.
        group: Ipv6Addr,
    },
    /// A host's report of its groups.
    Report(MldRecords<'a>),
}

impl<'a> MldMessage<'a> {
    const QUERY: u8 = 130;
    const REPORT_V2: u8 = 143;

    /// Returns true if `kind` is the ICMPv6 type of a supported MLD message.
    pub(crate) const fn is_supported_type(kind: u8) -> bool {
        matches!(kind, Self::QUERY | Self::REPORT_V2)
    }

    /// Parses the message of ICMPv6 type `kind`; `body` is the part after the checksum.
    ///
    /// # Errors
    /// [`DropReason::MldMalformed`] when the message violates a rule of RFC 3810 section 5.
    pub(crate) fn parse(ip: &Ipv6Header, kind: u8, body: &'a [u8]) -> Result<Self, DropReason> {
        let on_link = ip.hop_limit == HOP_LIMIT
            && (ip.source.is_unicast_link_local()
                || kind == Self::REPORT_V2 && ip.source.is_unspecified());
        let message = match kind {
            _ if !on_link => None,
            Self::QUERY => Self::parse_query(body),
            _ => Self::parse_report(body),
        };
        message.ok_or(DropReason::MldMalformed)
    }

    fn parse_query(body: &'a [u8]) -> Option<Self> {
        let (head, _sources) = body.split_first_chunk::<20>()?;
        let group = ipv6_at(head, 4);
        let legal = group.is_unspecified() || group.is_multicast();
        legal.then_some(Self::Query { maximum_response_code: u16_at(head, 0), group })
    }

    fn parse_report(body: &'a [u8]) -> Option<Self> {
        let (head, records) = body.split_first_chunk::<4>()?;
        Some(Self::Report(MldRecords::parse(u16_at(head, 2), records)?))
    }

    /// Returns the header, with a zero checksum, and the body.
    pub(crate) fn header_and_body(&self) -> (IcmpHeader, &'a [u8]) {
        match *self {
            Self::Query { maximum_response_code, group } => {
                let mut head = IcmpHeader::with_u16_pair(Self::QUERY, 0, maximum_response_code, 0);
                head.push(&group.octets());
                head.push(&[0; 4]);
                (head, &[])
            }
            Self::Report(records) => {
                (IcmpHeader::with_u16_pair(Self::REPORT_V2, 0, 0, records.count), records.bytes)
            }
        }
    }
}

/// Type of a multicast address record (RFC 3810 section 5.2.12).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MldRecordKind {
    /// Current state: the host listens only to these sources.
    ModeIsInclude,
    /// Current state: the host listens to all sources but these.
    ModeIsExclude,
    /// Change: the host now listens only to these sources; with no sources, the host left.
    ChangeToInclude,
    /// Change: the host now listens to all sources but these; with no sources, the host joined.
    ChangeToExclude,
    /// Change: the host now also listens to these sources.
    AllowNewSources,
    /// Change: the host no longer listens to these sources.
    BlockOldSources,
}

impl MldRecordKind {
    const fn number(self) -> u8 {
        self as u8 + 1
    }

    const fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::ModeIsInclude,
            2 => Self::ModeIsExclude,
            3 => Self::ChangeToInclude,
            4 => Self::ChangeToExclude,
            5 => Self::AllowNewSources,
            6 => Self::BlockOldSources,
            _ => return None,
        })
    }
}

/// Multicast address record: a host's membership of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MldRecord {
    /// Type of the record.
    pub kind: MldRecordKind,
    /// Multicast group.
    pub group: Ipv6Addr,
    /// Number of source addresses in the record.
    pub source_count: u16,
}

impl MldRecord {
    /// Length in bytes of a record without sources.
    pub const BYTES: usize = 20;

    /// Returns the bytes of a record without sources.
    pub fn emit_without_sources(kind: MldRecordKind, group: Ipv6Addr) -> [u8; Self::BYTES] {
        let mut record = [0; Self::BYTES];
        record[0] = kind.number();
        put_u16(&mut record, 2, 0);
        put(&mut record, 4, &group.octets());
        record
    }

    /// Parses the first record of `bytes`; the record is `None` if its type is unknown and it is to
    /// be skipped.
    fn parse(bytes: &[u8]) -> Option<(Option<Self>, &[u8])> {
        let (head, rest) = bytes.split_first_chunk::<20>()?;
        let (source_count, group) = (u16_at(head, 2), ipv6_at(head, 4));
        let rest = rest.get(usize::from(source_count) * 16 + usize::from(head[1]) * 4..)?;
        let record = MldRecordKind::from_number(head[0]);
        Some((record.map(|kind| Self { kind, group, source_count }), rest))
    }
}

/// Iterator over the records of a report, validated by [`MldRecords::parse`]. Records of unknown
/// type are skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MldRecords<'a> {
    count: u16,
    bytes: &'a [u8],
}

impl<'a> MldRecords<'a> {
    /// Checks that `bytes` contains `count` records. `None` when a record runs past the end.
    pub fn parse(count: u16, bytes: &'a [u8]) -> Option<Self> {
        let mut rest = bytes;
        for _ in 0..count {
            (_, rest) = MldRecord::parse(rest)?;
        }
        // Bytes after the last record are covered by the checksum, but otherwise ignored (RFC 3810
        // section 5.2.11).
        let bytes = bytes.get(..bytes.len() - rest.len())?;
        Some(Self { count, bytes })
    }
}

impl Iterator for MldRecords<'_> {
    type Item = MldRecord;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some((record, rest)) = MldRecord::parse(self.bytes) {
            self.bytes = rest;
            if record.is_some() {
                return record;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;
    use crate::Protocol;

    const GROUP: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 2);

    fn ip(source: &str, hop_limit: u8) -> Ipv6Header {
        let source = source.parse().unwrap();
        Ipv6Header {
            hop_limit,
            ..Ipv6Header::new(source, ALL_ROUTERS, Protocol::ICMPV6, 0).unwrap()
        }
    }

    #[test]
    fn rejects_messages_from_off_link() {
        let parse = |ip, kind| MldMessage::parse(&ip, kind, &[0; 24]);
        assert!(parse(ip("fe80::1", 1), 130).is_ok() && parse(ip("fe80::1", 1), 143).is_ok());
        assert!(parse(ip("::", 1), 143).is_ok(), "a host may report before it has an address");
        for (source, hop_limit, kind) in [
            ("::", 1, 130),
            ("2001:db8::1", 1, 130),
            ("2001:db8::1", 1, 143),
            ("fe80::1", 255, 130),
        ] {
            assert_eq!(parse(ip(source, hop_limit), kind), Err(DropReason::MldMalformed));
        }
    }

    #[test]
    fn accepts_general_and_group_specific_queries() {
        let query = |group: Ipv6Addr, bytes: usize| {
            let mut body = [0; 24];
            body[..2].copy_from_slice(&[0x27, 0x10]);
            body[4..20].copy_from_slice(&group.octets());
            match MldMessage::parse(&ip("fe80::1", 1), 130, &body[..bytes])? {
                MldMessage::Query { maximum_response_code, group } => {
                    Ok((maximum_response_code, group))
                }
                MldMessage::Report(_) => panic!("unexpected report"),
            }
        };
        for group in [GROUP, Ipv6Addr::UNSPECIFIED] {
            assert_eq!(query(group, 24), Ok((10_000, group)));
            assert_eq!(query(group, 20), Ok((10_000, group)), "version 1");
        }
        assert_eq!(query(GROUP, 19), Err(DropReason::MldMalformed));
        assert_eq!(query(Ipv6Addr::LOCALHOST, 24), Err(DropReason::MldMalformed));
    }

    #[test]
    fn yields_records_in_order_and_skips_unknown_types() {
        let join = MldRecord::emit_without_sources(MldRecordKind::ChangeToExclude, GROUP);
        let mut unknown = join;
        unknown[0] = 99;
        let mut with_sources =
            MldRecord::emit_without_sources(MldRecordKind::AllowNewSources, GROUP).to_vec();
        (with_sources[1], with_sources[3]) = (1, 2);
        with_sources.extend([0xaa; 36]);
        let bytes = [&join[..], &unknown, &with_sources, &[0xee; 3]].concat();
        let records = MldRecords::parse(3, &bytes).unwrap();
        assert_eq!(
            records.collect::<Vec<_>>(),
            [
                MldRecord { kind: MldRecordKind::ChangeToExclude, group: GROUP, source_count: 0 },
                MldRecord { kind: MldRecordKind::AllowNewSources, group: GROUP, source_count: 2 },
            ]
        );
        // A count of one more record than present, and a truncated record.
        assert_eq!(MldRecords::parse(4, &bytes), None);
        for cut in 0..with_sources.len() {
            assert_eq!(MldRecords::parse(1, &with_sources[..cut]), None);
        }
        assert_eq!(MldRecords::parse(u16::MAX, &[]), None);
    }
}
