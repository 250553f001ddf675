//! Queries that admission refuses.

use super::super::super::ZoneSource;
use super::*;
use crate::requests::RequestsConfig;

const START_NS: u64 = 1_700_000_000_000_000_000;
const MS: u64 = 1_000_000;

/// Server with the example zone and this section `[requests]`.
fn admitting_server(text: &str) -> DnsServer {
    let folder = tempfile::tempdir().unwrap();
    let requests: RequestsConfig = toml::from_str(text).unwrap();
    let path = folder.path().join("zone");
    std::fs::write(&path, ZONE).unwrap();
    let config = DnsConfig {
        zones: vec![ZoneSource { origin: Some("example".into()), path }],
        requests: Some(requests.compile().unwrap()),
        ..DnsConfig::default()
    };
    DnsServer::load(&config).unwrap()
}

fn rcode(server: &mut DnsServer, name: &str, rtype: Rtype) -> u8 {
    send_query(server, &question(name, rtype).to_message(1, Some(1232))).unwrap()[3] & 0xf
}

const CLASSES: &str = "
    [[class]]
    name = 'www'
    match = [{ name = 'www.example' }, { type = 'SOA' }]";

#[test]
fn standing_queue_refuses_names_of_the_last_rank_only() {
    let mut server = admitting_server(CLASSES);
    let other = |server: &mut DnsServer| rcode(server, "x.w.example", Rtype::A);
    server.start_batch(&|| START_NS);
    assert_eq!(other(&mut server), 0);
    // 21 ms later the queue has never been empty.
    server.start_batch(&|| START_NS + 21 * MS);
    assert_eq!(other(&mut server), 5);
    assert_eq!(rcode(&mut server, "wWw.example", Rtype::A), 0);
    assert_eq!(rcode(&mut server, "example", Rtype::SOA), 0);
    // The flood goes on and is refused: others are answered, however long.
    for round in 1..1000 {
        server.start_batch(&|| START_NS + 21 * MS + round * MS);
        assert_eq!(other(&mut server), 5);
        assert_eq!(rcode(&mut server, "www.example", Rtype::A), 0, "{round}");
    }
    assert_eq!(server.counters().not_admitted, 2000);
    server.on_idle();
    server.start_batch(&|| START_NS + 2000 * MS);
    assert_eq!(other(&mut server), 0);
}

/// A refusal says so to clients with EDNS (RFC 8914), and has no records.
#[test]
fn refusal_has_an_extended_error() {
    let mut server = admitting_server("[[class]]\nname = 'all'\nceiling-rps = 50");
    server.start_batch(&|| START_NS);
    let query = question("www.example", Rtype::A);
    while send_query(&mut server, &query.to_message(1, None)).unwrap()[3] & 0xf == 0 {}
    let plain = send_query(&mut server, &query.to_message(1, None)).unwrap();
    assert_eq!(plain[3] & 0xf, 5);
    assert_eq!(plain[6..12], [0; 6], "no records");
    let with_edns = send_query(&mut server, &query.to_message(1, Some(1232))).unwrap();
    assert!(with_edns.ends_with(b"\x00\x0f\x00\x0a\x00\x00overload"), "{with_edns:?}");
    assert!(Message::from_octets(with_edns).is_ok());
}

/// Over TCP there is nothing to repeat over.
#[test]
fn truncated_refusal_sends_clients_to_tcp() {
    let text = "dns-refusal = 'truncated'\n[[class]]\nname = 'all'\nceiling-rps = 50";
    let mut server = admitting_server(text);
    server.start_batch(&|| START_NS);
    let query = question("www.example", Rtype::A).to_message(1, None);
    while send_query(&mut server, &query).unwrap()[2] & 2 == 0 {}
    let reply = send_query(&mut server, &query).unwrap();
    assert_eq!([reply[2] & 2, reply[3] & 0xf, reply[7]], [2, 0, 0]);
    let mut reply = [0; 512];
    let client = "[2001:db8::1]:4000".parse().unwrap();
    server.respond_to_stream(&query, client, &mut reply).unwrap();
    assert_eq!([reply[2] & 2, reply[3] & 0xf], [0, 5]);
}
