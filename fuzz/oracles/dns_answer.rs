//! The DNS server on any message: nothing panics, every message is counted
//! once, and whatever is answered is a well-formed response of the right size.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use domain::base::Message;
use domain::rdata::AllRecordData;
use tidegate_apps::Responder;
use tidegate_apps::dns::{DnsConfig, PLAIN_UDP_BYTES, Query, Rejection, Server, ZoneSource};

const MAX_UDP_BYTES: usize = 1232;

/// A server for two zones with one of everything: those in `folder`.
pub fn server(folder: &Path) -> Server {
    let zones = ["varied.zone", "child.varied.zone"]
        .map(|file| ZoneSource { origin: None, path: folder.join(file) });
    let config = DnsConfig { zones: zones.into(), max_udp_bytes: MAX_UDP_BYTES, hash_seed: 1 };
    Server::load(&config).expect("the zones of the tests load")
}

/// The first two bytes say how much room there is for the reply.
pub fn check(server: &mut Server, input: &[u8]) {
    let [high, low, message @ ..] = input else { return };
    let room = usize::from(u16::from_be_bytes([*high, *low]) & 0x0fff);
    let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 4000));
    let no_room_before = server.counters().no_room;

    let mut reply = vec![0xa5; room];
    let answer = server.respond(message, from, &mut reply);

    let counters = server.counters();
    let told = counters.answers() + counters.too_short + counters.responses + counters.no_room;
    assert_eq!(told, counters.queries, "{counters:?}");

    let query = Query::parse(message);
    let Some(len) = answer else {
        let unanswerable = matches!(query, Err(Rejection::Truncated | Rejection::Response));
        assert!(unanswerable || counters.no_room > no_room_before);
        return;
    };
    let limit = query.map_or(PLAIN_UDP_BYTES, |query| query.udp_limit_bytes(MAX_UDP_BYTES));
    assert!(len <= limit.min(room), "{len} bytes, at most {limit} and {room}");
    check_response(message, &reply[..len]);
}

/// Asserts that `reply` is a whole response to `message`, as `domain` reads it.
fn check_response(message: &[u8], reply: &[u8]) {
    assert_eq!(reply[..2], message[..2], "the ID");
    let response = Message::from_octets(reply).expect("a header");
    let header = response.header();
    assert!(header.qr());
    assert_eq!(header.opcode().to_int(), message[2] >> 3 & 0xf);

    let counts = response.header_counts();
    assert!(counts.qdcount() <= 1);
    for question in response.question() {
        question.expect("a whole question");
    }
    let mut records = [0, 0, 0];
    for item in response.iter() {
        let (record, section) = item.expect("a whole record");
        let data = record.to_any_record::<AllRecordData<_, _>>();
        assert!(data.is_ok(), "{data:?}");
        records[section as usize] += 1;
    }
    assert_eq!(records, [counts.ancount(), counts.nscount(), counts.arcount()]);
}
