//! Tests of whole replies, byte by byte where bytes matter.

use std::path::Path;

use domain::base::{Message, Rtype};
use proptest::prelude::*;

use super::super::catalog::Catalog;
use super::super::message::HEADER_BYTES;
use super::super::name::Name;
use super::super::synthetic::Question;
use super::super::zone::Zone;
use super::*;

mod admission;
mod floods;

const CLIENTS: [&str; 2] = ["192.0.2.9:4000", "[2001:db8::9]:4000"];

const ZONE: &str = "\
$ORIGIN example.
$TTL 300
@ SOA ns1 host 1 7200 3600 1209600 60
@ NS ns1
ns1 A 192.0.2.1
www A 192.0.2.2
*.w A 192.0.2.3
*.c CNAME www
loop CNAME pool
pool CNAME loop
self CNAME self
*.l CNAME x.l
d DNAME target.other.
sub NS ns.sub
sub NS ns2.sub
ns.sub A 192.0.2.4
ns2.sub A 192.0.2.5
ns2.sub AAAA 2001:db8::5
mx MX 10 ns1
";

fn server(texts: &[&str]) -> DnsServer {
    let folder = tempfile::tempdir().unwrap();
    let mut zones = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        let path = folder.path().join(index.to_string());
        std::fs::write(&path, text).unwrap();
        zones.push(super::super::ZoneSource { origin: None, path });
    }
    DnsServer::load(&DnsConfig { zones, hash_seed: 1, ..DnsConfig::default() }).unwrap()
}

/// Passes a message to the responder, from an IPv4 and an IPv6 client, and returns the reply.
fn send_query(server: &mut DnsServer, message: &[u8]) -> Option<Vec<u8>> {
    let replies = CLIENTS.map(|client| {
        let mut reply = vec![0xee; 4096];
        let len = server.respond(message, client.parse().unwrap(), &mut reply)?;
        reply.truncate(len);
        Some(reply)
    });
    assert_eq!(replies[0], replies[1]);
    replies[0].clone()
}

fn question(name: &str, rtype: Rtype) -> Question {
    Question { name: Name::from_text(name).unwrap(), rtype: rtype.to_int() }
}

fn reply_to(server: &mut DnsServer, name: &str, rtype: Rtype) -> Message<Vec<u8>> {
    let reply = send_query(server, &question(name, rtype).to_message(7, Some(1232))).unwrap();
    Message::from_octets(reply).unwrap()
}

fn counts(message: &Message<Vec<u8>>) -> [u16; 4] {
    let counts = message.header_counts();
    [counts.qdcount(), counts.ancount(), counts.nscount(), counts.arcount()]
}

fn records(message: &Message<Vec<u8>>) -> Vec<String> {
    use domain::base::ParsedName;
    use domain::rdata::AllRecordData;
    message
        .iter()
        .map(|record| record.unwrap().0)
        .filter(|record| record.rtype() != Rtype::OPT)
        .map(|record| {
            record.to_any_record::<AllRecordData<_, ParsedName<_>>>().unwrap().to_string()
        })
        .collect()
}

#[test]
fn encodes_reply_in_wire_format() {
    let mut server = server(&[ZONE]);
    let query = question("wWw.eXample", Rtype::A).to_message(0x1234, None);
    let mut expected = vec![0x12, 0x34, 0x84, 0x00, 0, 1, 0, 1, 0, 0, 0, 0];
    expected.extend_from_slice(b"\x03wWw\x07eXample\x00\x00\x01\x00\x01");
    expected.extend_from_slice(b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x01\x2c\x00\x04\xc0\x00\x02\x02");
    assert_eq!(send_query(&mut server, &query).unwrap(), expected);
}

#[test]
fn copies_rd_and_cd_and_clears_other_flags() {
    let mut server = server(&[ZONE]);
    let mut query = question("www.example", Rtype::A).to_message(1, None);
    // RD and CD set; AA, TC, RA, Z, AD and a response code set by a misbehaving client.
    query[2..4].copy_from_slice(&[0x07, 0xff]);
    let reply = send_query(&mut server, &query).unwrap();
    assert_eq!(reply[2..4], [0x85, 0x10]);
}

#[test]
fn sends_opt_record_only_to_edns_clients() {
    let mut server = server(&[ZONE]);
    let without_opt =
        send_query(&mut server, &question("www.example", Rtype::A).to_message(1, None)).unwrap();
    let with_opt =
        send_query(&mut server, &question("www.example", Rtype::A).to_message(1, Some(4000)))
            .unwrap();
    assert_eq!(with_opt.len(), without_opt.len() + 11);
    assert_eq!(with_opt[without_opt.len()..], [0, 0, 41, 0x04, 0xd0, 0, 0, 0, 0, 0, 0]);
    let mut secure = question("www.example", Rtype::A).to_message(1, Some(4000));
    let flags_at = secure.len() - 4;
    secure[flags_at] = 0x80;
    let reply = send_query(&mut server, &secure).unwrap();
    assert_eq!(reply[reply.len() - 4], 0x80);
}

#[test]
fn answers_unknown_edns_version_with_badvers() {
    let mut server = server(&[ZONE]);
    let mut query = question("www.example", Rtype::A).to_message(1, Some(1232));
    let version_at = query.len() - 5;
    query[version_at] = 1;
    let message = Message::from_octets(send_query(&mut server, &query).unwrap()).unwrap();
    assert_eq!(message.opt_rcode().to_int(), 16);
    assert_eq!(counts(&message), [1, 0, 0, 1]);
    assert_eq!(server.counters().replies_with(Rcode::BadVers), 2);
}

#[test]
fn refuses_foreign_names_and_classes() {
    let mut server = server(&[ZONE]);
    for name in ["other", ".", "www.other", "myexample", "example.com"] {
        let message = reply_to(&mut server, name, Rtype::A);
        assert_eq!(message.header().rcode().to_int(), 5, "{name}");
        assert_eq!(counts(&message), [1, 0, 0, 1]);
        assert!(!message.header().aa());
    }
    let mut query = question("www.example", Rtype::A).to_message(1, None);
    let class_at = query.len() - 1;
    for class in [0, 3, 4, 254, 255] {
        query[class_at] = class;
        assert_eq!(send_query(&mut server, &query).unwrap()[3], 5);
    }
}

#[test]
fn answers_meta_types_with_an_error() {
    let mut server = server(&[ZONE]);
    for (rtype, rcode) in
        [(252, 5), (251, 5), (253, 4), (254, 4), (249, 4), (250, 4), (41, 1), (0, 1)]
    {
        let message = reply_to(&mut server, "example", Rtype::from_int(rtype));
        assert_eq!(message.header().rcode().to_int(), rcode, "{rtype}");
        assert_eq!(counts(&message)[1..3], [0, 0]);
    }
}

#[test]
fn wildcards_match_names_of_every_length() {
    let mut server = server(&[ZONE]);
    let long = format!("{}.{}.{}.w.example", "a".repeat(63), "b".repeat(63), "c".repeat(63));
    for name in ["x.w.example", "x.y.z.w.example", "*.w.example", &long] {
        assert_eq!(
            records(&reply_to(&mut server, name, Rtype::A)),
            [format!("{name}. 300 IN A 192.0.2.3")]
        );
        let none = reply_to(&mut server, name, Rtype::TXT);
        assert_eq!(none.header().rcode().to_int(), 0);
        assert_eq!(
            records(&none),
            ["example. 60 IN SOA ns1.example. host.example. 1 7200 3600 1209600 60"]
        );
    }
    let long = format!("{}.{}.c.example", "a".repeat(63), "b".repeat(63));
    for name in ["x.c.example", &long] {
        assert_eq!(
            records(&reply_to(&mut server, name, Rtype::A)),
            [
                format!("{name}. 300 IN CNAME www.example."),
                "www.example. 300 IN A 192.0.2.2".into()
            ]
        );
    }
}

#[test]
fn refers_names_of_every_length() {
    let mut server = server(&[ZONE]);
    let long = format!("{}.{}.{}.sub.example", "a".repeat(63), "b".repeat(63), "c".repeat(63));
    for name in ["sub.example", "ns.sub.example", "x.y.sub.example", &long] {
        let message = reply_to(&mut server, name, Rtype::A);
        assert!(!message.header().aa());
        assert_eq!(
            records(&message),
            [
                "sub.example. 300 IN NS ns.sub.example.",
                "sub.example. 300 IN NS ns2.sub.example.",
                "ns.sub.example. 300 IN A 192.0.2.4",
                "ns2.sub.example. 300 IN A 192.0.2.5",
                "ns2.sub.example. 300 IN AAAA 2001:db8::5",
            ]
        );
    }
}

#[test]
fn cname_loops_end() {
    let mut server = server(&[ZONE]);
    for (name, max_answers) in [("loop.example", 2), ("self.example", 1), ("a.l.example", 2)] {
        let message = reply_to(&mut server, name, Rtype::A);
        let answers = counts(&message)[1];
        assert!((1..=max_answers).contains(&answers), "{name}: {answers}");
    }
}

#[test]
fn cname_chains_end_after_the_limit() {
    let links: String = (0..100).map(|n| format!("a{n} CNAME a{}\n", n + 1)).collect();
    let mut server = server(&[&format!("{ZONE}{links}")]);
    let message = reply_to(&mut server, "a0.example", Rtype::A);
    assert_eq!(counts(&message)[1], 17);
}

#[test]
fn dname_synthesizes_cname_for_names_below() {
    let mut server = server(&[ZONE]);
    assert_eq!(
        records(&reply_to(&mut server, "a.B.d.example", Rtype::A)),
        ["d.example. 300 IN DNAME target.other.", "a.B.d.example. 300 IN CNAME a.B.target.other.",]
    );
    // The DNAME record itself is data; its owner has no other data.
    assert_eq!(records(&reply_to(&mut server, "d.example", Rtype::DNAME)).len(), 1);
    assert_eq!(counts(&reply_to(&mut server, "d.example", Rtype::A))[1..3], [0, 1]);
    let tail =
        format!("{}.{}.{}.{}", "a".repeat(63), "b".repeat(63), "c".repeat(63), "e".repeat(50));
    let message = reply_to(&mut server, &format!("{tail}.d.example"), Rtype::A);
    assert_eq!(message.header().rcode().to_int(), 6);
    assert_eq!(counts(&message)[1], 1);
}

#[test]
fn truncates_whole_record_sets() {
    let many: String = (0..100).map(|n| format!("many A 192.0.2.{n}\n")).collect();
    let mut server = server(&[&format!("{ZONE}{many}")]);
    for (edns, fits) in
        [(None, false), (Some(512), false), (Some(1231), false), (Some(65_535), false)]
    {
        let reply =
            send_query(&mut server, &question("many.example", Rtype::A).to_message(1, edns))
                .unwrap();
        let message = Message::from_octets(reply).unwrap();
        assert_eq!(message.header().tc(), !fits);
        assert_eq!(counts(&message)[1], 0);
    }
    // A transport without such limits carries the whole answer.
    let query = question("many.example", Rtype::A).to_message(1, None);
    let mut reply = vec![0; 65_535];
    let len = server.answer(&Query::parse(&query).unwrap(), 65_535, &mut reply).unwrap();
    reply.truncate(len);
    assert_eq!(counts(&Message::from_octets(reply).unwrap()), [1, 100, 0, 0]);
}

#[test]
fn drops_glue_set_by_set_and_sets_tc() {
    let mut server = server(&[ZONE]);
    let query = question("x.sub.example", Rtype::A).to_message(1, None);
    let query = Query::parse(&query).unwrap();
    let mut lens = Vec::new();
    for max_len in (HEADER_BYTES + 19)..512 {
        let mut reply = vec![0; 512];
        let len = server.answer(&query, max_len, &mut reply).unwrap();
        assert!(len <= max_len);
        reply.truncate(len);
        let message = Message::from_octets(reply).unwrap();
        let record_count = records(&message).len();
        // All glue is inside the delegated zone, so missing glue sets TC.
        assert_eq!(message.header().tc(), record_count < 5, "{max_len}");
        lens.push(record_count);
    }
    lens.dedup();
    assert_eq!(lens, [0, 2, 3, 4, 5]);
}

#[test]
fn drops_optional_additional_records_without_tc() {
    let mut server = server(&[ZONE]);
    let query = question("mx.example", Rtype::MX).to_message(1, None);
    let query = Query::parse(&query).unwrap();
    let mut full = vec![0; 512];
    let full_len = server.answer(&query, 512, &mut full).unwrap();
    let mut reply = vec![0; 512];
    let len = server.answer(&query, full_len - 1, &mut reply).unwrap();
    assert!(len < full_len);
    reply.truncate(len);
    let message = Message::from_octets(reply).unwrap();
    assert!(!message.header().tc());
    assert_eq!(counts(&message), [1, 1, 0, 0]);
}

#[test]
fn answers_ds_from_the_parent_zone() {
    let child =
        "$ORIGIN child.example.\n@ 60 SOA ns host 1 2 3 4 5\n@ 60 NS ns\nns 60 A 192.0.2.7\n";
    let parent = format!("{ZONE}child NS ns.child\nchild DS 1 8 2 00\nns.child A 192.0.2.7\n");
    let mut server = server(&[&parent, child]);
    assert_eq!(
        records(&reply_to(&mut server, "child.example", Rtype::DS)),
        ["child.example. 300 IN DS 1 8 2 00"]
    );
    // All other types belong to the child zone.
    assert!(
        records(&reply_to(&mut server, "child.example", Rtype::A))[0]
            .starts_with("child.example. 5 IN SOA")
    );
    assert_eq!(reply_to(&mut server, "x.child.example", Rtype::A).header().rcode().to_int(), 3);
    let mut child_only = self::server(&[child]);
    assert!(records(&reply_to(&mut child_only, "child.example", Rtype::DS))[0].contains("SOA"));
}

#[test]
fn serves_the_root_zone() {
    let root =
        "$ORIGIN .\n@ 60 SOA a.host h.host 1 2 3 4 5\n@ 60 NS a.host\na.host 60 A 192.0.2.1\n";
    let mut server = server(&[root]);
    assert_eq!(reply_to(&mut server, ".", Rtype::SOA).header_counts().ancount(), 1);
    assert_eq!(reply_to(&mut server, "nothing", Rtype::A).header().rcode().to_int(), 3);
    assert_eq!(records(&reply_to(&mut server, "a.host", Rtype::A)), ["a.host. 60 IN A 192.0.2.1"]);
}

#[test]
fn counts_unanswered_messages() {
    let mut server = server(&[ZONE]);
    let query = question("www.example", Rtype::A).to_message(1, None);
    let mut response = query.clone();
    response[2] |= 0x80;
    assert_eq!(send_query(&mut server, &response), None);
    assert_eq!(send_query(&mut server, &query[..11]), None);
    let from = CLIENTS[0].parse().unwrap();
    assert_eq!(server.respond(&query, from, &mut [0; 20]), None);
    assert!(server.respond(&query, from, &mut [0; 512]).is_some());
    let counters = server.counters();
    assert_eq!((counters.queries, counters.responses_received, counters.too_short), (6, 2, 2));
    assert_eq!((counters.no_reply_space, counters.replies()), (1, 1));
    assert_eq!(server.share().counters(), &DnsCounters::default());
}

#[test]
fn echoes_only_header_and_question_of_a_malformed_query() {
    let mut server = server(&[ZONE]);
    let query = question("www.example", Rtype::A).to_message(1, None);
    let question_end = query.len();
    let malformed = [&query[..], &[1; 400]].concat();
    let reply = send_query(&mut server, &malformed).unwrap();
    assert_eq!(reply.len(), question_end);
    assert_eq!((reply[2], reply[3]), (0x80, 1));
    assert_eq!(reply[4..12], [0, 1, 0, 0, 0, 0, 0, 0]);
    let reply = send_query(&mut server, &query[..15]).unwrap();
    assert_eq!(reply.len(), HEADER_BYTES);
    assert_eq!(reply[4..12], [0; 8]);
}

#[test]
fn rejects_duplicate_and_missing_zones() {
    let zone = || {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("zone");
        std::fs::write(&path, ZONE).unwrap();
        Zone::load(Path::new(&path), None, &mut Vec::new()).unwrap()
    };
    let error = Catalog::new(vec![zone(), zone()]).err().unwrap();
    assert!(error.to_string().contains("given twice"), "{error}");
    assert!(matches!(DnsServer::load(&DnsConfig::default()), Err(DnsError::NoZones)));
}

#[test]
fn error_names_the_unreadable_zone() {
    let problem = |origin: Option<&str>| {
        let path = "no/such/file.zone".into();
        let zones = vec![super::super::ZoneSource { origin: origin.map(str::to_owned), path }];
        let config = DnsConfig { zones, ..DnsConfig::default() };
        DnsServer::load(&config).err().unwrap().to_string()
    };
    assert!(problem(None).contains("cannot read zone file no/such/file.zone"));
    assert!(problem(Some("a..b")).contains("`a..b` is not a domain name"));
}

fn any_name() -> impl Strategy<Value = Vec<u8>> {
    let label = prop_oneof![
        4 => Just(b"w".to_vec()), 2 => Just(b"*".to_vec()), 2 => Just(b"sub".to_vec()),
        2 => Just(b"d".to_vec()), 2 => Just(b"C".to_vec()), 1 => Just(b"loop".to_vec()),
        2 => proptest::collection::vec(any::<u8>(), 1..=63),
    ];
    (proptest::collection::vec(label, 0..6), any::<bool>()).prop_map(|(labels, is_in_zone)| {
        let mut wire = Vec::new();
        for label in labels {
            wire.push(label.len() as u8);
            wire.extend(label);
        }
        if is_in_zone {
            wire.extend_from_slice(b"\x07eXaMple");
        }
        wire.push(0);
        wire
    })
}

proptest! {
    #[test]
    fn every_reply_is_well_formed_and_within_limits(
        name in any_name(),
        rtype in prop_oneof![Just(1_u16), Just(2), Just(5), Just(15), Just(43), Just(255), any::<u16>()],
        edns in proptest::option::of(any::<u16>()),
    ) {
        let Some(name) = Name::from_wire(&name) else { return Ok(()) };
        let mut server = server(&[ZONE]);
        let query = Question { name, rtype }.to_message(9, edns);
        let reply = send_query(&mut server, &query).unwrap();
        prop_assert!(reply.len() <= usize::from(edns.unwrap_or(512)).clamp(512, 1232));
        let message = Message::from_octets(reply).unwrap();
        prop_assert_eq!(message.header_counts().arcount() > 0 && message.opt().is_some(), edns.is_some());
        // Parses every name and every record through all pointers.
        let read = records(&message);
        let [_, answers, authorities, additionals] = counts(&message);
        let total = usize::from(answers + authorities + additionals);
        prop_assert_eq!(read.len() + usize::from(edns.is_some()), total);
    }

    #[test]
    fn replies_to_random_bytes_are_small(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let mut server = server(&[ZONE]);
        if let Some(reply) = send_query(&mut server, &bytes) {
            prop_assert!(reply[2] & 0x80 != 0);
            prop_assert!(reply.len() <= 1232);
        }
    }
}
