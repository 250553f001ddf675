//! The DNS server on any message: nothing panics, every message is counted once, and every
//! reply is a well-formed response within the size limit.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use domain::base::Message;
use domain::rdata::AllRecordData;
use tidegate_apps::Responder;
use tidegate_apps::dns::{
    DnsConfig, DnsServer, MAX_UDP_BYTES_WITHOUT_EDNS, Query, Rejection, ZoneSource,
};

const MAX_UDP_BYTES: usize = 1232;

/// Creates a server for the two zones in `folder`, which have every kind of record.
pub fn server(folder: &Path) -> DnsServer {
    let zones = ["varied.zone", "child.varied.zone"]
        .map(|file| ZoneSource { origin: None, path: folder.join(file) });
    let config = DnsConfig {
        zones: zones.into(),
        max_udp_bytes: MAX_UDP_BYTES,
        hash_seed: 1,
        ..DnsConfig::default()
    };
    DnsServer::load(&config).expect("the test zones load")
}

/// Runs one input: the first two bytes give the space for the reply.
pub fn check(server: &mut DnsServer, input: &[u8]) {
    let [high, low, message @ ..] = input else { return };
    let space = usize::from(u16::from_be_bytes([*high, *low]) & 0x0fff);
    let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 4000));
    let no_space_before = server.counters().no_reply_space;

    let mut reply = vec![0xa5; space];
    let answer = server.respond(message, from, &mut reply);

    let counters = server.counters();
    let total = counters.replies()
        + counters.too_short
        + counters.responses_received
        + counters.no_reply_space;
    assert_eq!(total, counters.queries, "{counters:?}");

    let query = Query::parse(message);
    let Some(len) = answer else {
        let unanswerable = matches!(query, Err(Rejection::TooShort | Rejection::Response));
        assert!(unanswerable || counters.no_reply_space > no_space_before);
        return;
    };
    let limit =
        query.map_or(MAX_UDP_BYTES_WITHOUT_EDNS, |query| query.udp_limit_bytes(MAX_UDP_BYTES));
    assert!(len <= limit.min(space), "{len} bytes, at most {limit} and {space}");
    check_response(message, &reply[..len]);
}

/// Asserts that `reply` is a complete response to `message`, by the `domain` crate's parser.
fn check_response(message: &[u8], reply: &[u8]) {
    assert_eq!(reply[..2], message[..2], "the ID");
    let response = Message::from_octets(reply).expect("a header");
    let header = response.header();
    assert!(header.qr());
    assert_eq!(header.opcode().to_int(), message[2] >> 3 & 0xf);

    let counts = response.header_counts();
    assert!(counts.qdcount() <= 1);
    for question in response.question() {
        question.expect("a complete question");
    }
    let mut records = [0, 0, 0];
    for item in response.iter() {
        let (record, section) = item.expect("a complete record");
        let data = record.to_any_record::<AllRecordData<_, _>>();
        assert!(data.is_ok(), "{data:?}");
        records[section as usize] += 1;
    }
    assert_eq!(records, [counts.ancount(), counts.nscount(), counts.arcount()]);
}
