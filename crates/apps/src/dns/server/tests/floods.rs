//! Rate limit, cookies, NSID and class CH: with virtual time, so that each run is the same.

use super::super::super::cookie::CookieSecret;
use super::super::super::{RateLimit, ServerIdentity, ZoneSource};
use super::*;

const SECOND_NS: u64 = 1_000_000_000;
const START_NS: u64 = 1_700_000_000 * SECOND_NS;

/// Interval of a flood of 20,000 queries per second.
const FLOOD_INTERVAL_NS: u64 = 50_000;

const SECRET: &str = "e5e973e5a6b2a43f48e7dc849e37bfcf";

/// Server with the defaults of `tidegate serve dns`, and a zone with a long TXT record set.
fn default_server() -> DnsServer {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("zone");
    let mut text = ZONE.to_owned();
    for line in 0..20 {
        text += &format!("long TXT \"{line} {}\"\n", "x".repeat(40));
    }
    for host in 0..100_000 {
        text += &format!("host{host} A 192.0.2.{}\n", host % 256);
    }
    std::fs::write(&path, text).unwrap();
    let config = DnsConfig {
        zones: vec![ZoneSource { origin: None, path }],
        hash_seed: 1,
        rate_limit: Some(RateLimit::default()),
        cookie_secrets: vec![CookieSecret::from_hex(SECRET).unwrap()],
        identity: ServerIdentity::new(Some("tidegate 1"), Some("ns1.lab")).unwrap(),
        ..DnsConfig::default()
    };
    DnsServer::load(&config).unwrap()
}

/// Sends queries from one source at a fixed interval; returns the bytes in and out.
fn flood(
    server: &mut DnsServer,
    source: &str,
    count: u64,
    query: impl Fn(u64) -> Vec<u8>,
) -> (usize, usize) {
    let (mut bytes_in, mut bytes_out) = (0, 0);
    for index in 0..count {
        server.start_batch(&|| START_NS + index * FLOOD_INTERVAL_NS);
        let message = query(index);
        let mut reply = [0; 1500];
        bytes_in += message.len();
        bytes_out += server.respond(&message, source.parse().unwrap(), &mut reply).unwrap_or(0);
    }
    (bytes_in, bytes_out)
}

/// Question of a query by its number.
type MakeQuestion = fn(u64) -> Question;

/// A victim whose address is forged gets at most as many bytes as the attacker sends.
#[test]
fn spoofed_floods_are_not_amplified() {
    let floods: [(&str, MakeQuestion); 5] = [
        ("one name", |_| question("www.example", Rtype::A)),
        ("random names", |index| question(&format!("x{index}.nothing.example"), Rtype::A)),
        ("random names of a wildcard", |index| question(&format!("x{index}.w.example"), Rtype::A)),
        ("ANY", |_| question("long.example", Rtype::ANY)),
        ("a large TXT", |_| question("long.example", Rtype::TXT)),
    ];
    let mut server = default_server();
    for (what, question) in floods {
        for source in CLIENTS {
            // A cookie of another server exempts from nothing.
            for options in [&b""[..], b"\0\x0a\0\x18aaaaaaaabbbbbbbbcccccccc"] {
                let query = |index| with_options(&question(index), options);
                let (bytes_in, bytes_out) = flood(&mut server.share(), source, 200_000, query);
                assert!(bytes_out <= bytes_in, "{what}: {bytes_in} in, {bytes_out} out");
            }
        }
    }
    assert!(flood(&mut server, CLIENTS[0], 1000, |_| vec![0; 20]).1 <= 20_000, "malformed");
}

#[test]
fn one_address_may_ask_for_many_names() {
    for source in CLIENTS {
        let mut server = default_server();
        for index in 0..100_000 {
            // All in one moment: as fast as can be.
            server.start_batch(&|| START_NS);
            let question = question(&format!("host{index}.example"), Rtype::A);
            let query = question.to_message(index as u16, Some(1232));
            let mut reply = [0; 1500];
            let len = server.respond(&query, source.parse().unwrap(), &mut reply).unwrap();
            assert_eq!((reply[2] & 2, reply[7]), (0, 1), "{question}: {:?}", &reply[..len]);
        }
        let counters = server.counters();
        assert_eq!((counters.rate_limited, counters.rate_truncated), (0, 0));
    }
}

/// Half of the replies over the limit are empty and truncated: a real client gets through by TCP.
#[test]
fn a_limited_client_is_answered_over_tcp() {
    let mut server = default_server();
    let from = CLIENTS[0].parse().unwrap();
    let query = question("www.example", Rtype::A).to_message(1, Some(1232));
    let mut truncated = 0;
    server.start_batch(&|| START_NS);
    for index in 0..1200 {
        let mut reply = [0; 1500];
        let len = server.respond(&query, from, &mut reply);
        assert_eq!(index < 200, len.is_some() && reply[2] & 2 == 0, "{index}");
        truncated += u32::from(len.is_some() && reply[2] & 2 != 0);
    }
    assert!((400..600).contains(&truncated), "{truncated}");
    let counters = server.counters();
    assert_eq!(counters.rate_limited + counters.rate_truncated, 1000);
    let mut reply = [0; 1500];
    for _ in 0..1000 {
        assert!(server.respond_to_stream(&query, from, &mut reply).is_some());
        assert_eq!(reply[7], 1);
    }
    server.start_batch(&|| START_NS + 2 * SECOND_NS);
    assert!(server.respond(&query, from, &mut reply).is_some());
    assert_eq!(reply[2] & 2, 0);
}

/// Query with one EDNS option, or several, already encoded.
fn with_options(question: &Question, options: &[u8]) -> Vec<u8> {
    let mut message = question.to_message(7, Some(1232));
    let len_at = message.len() - 2;
    message[len_at..].copy_from_slice(&(options.len() as u16).to_be_bytes());
    message.extend_from_slice(options);
    message
}

fn cookie_option(cookie: &[u8]) -> Vec<u8> {
    [&[0, 10, 0, cookie.len() as u8], cookie].concat()
}

/// Options of the OPT record at the end of a reply, after its front of 11 bytes.
fn reply_options(reply: &[u8], options_len: usize) -> &[u8] {
    let (front, options) = reply.split_at(reply.len() - options_len);
    assert_eq!(front.last_chunk::<2>(), Some(&(options_len as u16).to_be_bytes()));
    options
}

fn send(server: &mut DnsServer, client: &str, message: &[u8]) -> Vec<u8> {
    let mut reply = vec![0; 1500];
    let len = server.respond(message, client.parse().unwrap(), &mut reply).unwrap();
    reply.truncate(len);
    reply
}

#[test]
fn clients_with_a_cookie_are_not_limited() {
    for client in CLIENTS {
        let mut server = default_server();
        server.start_batch(&|| START_NS);
        let www = question("www.example", Rtype::A);
        let first = send(&mut server, client, &with_options(&www, &cookie_option(b"clientck")));
        let option = reply_options(&first, 28);
        assert_eq!(option[..12], *b"\0\x0a\0\x18clientck");
        let query = with_options(&www, option);
        for _ in 0..10_000 {
            let reply = send(&mut server, client, &query);
            assert_eq!((reply[2] & 2, reply[7]), (0, 1));
            assert_eq!(reply_options(&reply, 28), option);
        }
        assert_eq!(server.counters().valid_cookies, 10_000);
        // The cookie proves one address only.
        let others = ["192.0.2.10:4000", "[2001:db8::a]:4000"];
        let mut unanswered = 0;
        for _ in 0..2000 {
            let from = others[usize::from(client.starts_with('['))].parse().unwrap();
            unanswered += u32::from(server.respond(&query, from, &mut [0; 1500]).is_none());
        }
        assert!(unanswered > 500, "{unanswered}");
        // Nor does it last.
        server.start_batch(&|| START_NS + 3601 * SECOND_NS);
        let renewed = send(&mut server, client, &query);
        assert_ne!(reply_options(&renewed, 28), option);
    }
}

#[test]
fn malformed_cookies_are_format_errors() {
    let mut server = default_server();
    server.start_batch(&|| START_NS);
    let www = question("www.example", Rtype::A);
    for len in [0, 1, 7, 9, 15, 41] {
        let reply =
            send(&mut server, CLIENTS[0], &with_options(&www, &cookie_option(&vec![1; len])));
        assert_eq!(reply[3] & 15, 1, "{len} bytes");
    }
    for len in [8, 16, 24, 40] {
        let reply =
            send(&mut server, CLIENTS[0], &with_options(&www, &cookie_option(&vec![1; len])));
        assert_eq!((reply[3] & 15, reply[7]), (0, 1), "{len} bytes");
    }
}

#[test]
fn reports_identity_by_nsid_and_in_class_chaos() {
    let mut server = default_server();
    server.start_batch(&|| START_NS);
    let www = question("www.example", Rtype::A);
    let reply = send(&mut server, CLIENTS[0], &with_options(&www, b"\0\x03\0\0"));
    assert_eq!(reply_options(&reply, 11), b"\0\x03\0\x07ns1.lab");
    let both = [&cookie_option(b"clientck")[..], b"\0\x03\0\0"].concat();
    let reply = send(&mut server, CLIENTS[0], &with_options(&www, &both));
    assert_eq!(reply_options(&reply, 39)[28..], *b"\0\x03\0\x07ns1.lab");

    let mut ask = |name: &str, rtype: Rtype| {
        let mut message = question(name, rtype).to_message(7, None);
        *message.last_mut().unwrap() = 3;
        send(&mut server, CLIENTS[0], &message)
    };
    for (name, text) in [
        ("version.bind", "tidegate 1"),
        ("VERSION.SERVER", "tidegate 1"),
        ("id.server", "ns1.lab"),
        ("hostname.bind", "ns1.lab"),
    ] {
        let reply = ask(name, Rtype::TXT);
        assert_eq!((reply[3] & 15, reply[7]), (0, 1), "{name}");
        assert!(reply.ends_with(text.as_bytes()), "{name}: {reply:?}");
        assert_eq!(ask(name, Rtype::A)[3] & 15, 5, "{name}");
    }
    assert_eq!(ask("authors.bind", Rtype::TXT)[3] & 15, 5);
    let mut silent = super::server(&[ZONE]);
    let mut message = question("version.bind", Rtype::TXT).to_message(7, None);
    *message.last_mut().unwrap() = 3;
    assert_eq!(send_query(&mut silent, &message).unwrap()[3] & 15, 5);
    let plain = send_query(&mut silent, &with_options(&www, &both)).unwrap();
    assert_eq!(plain.last_chunk::<2>(), Some(&[0, 0]), "no options without identity and cookies");
}

/// Threads take reloaded zones at the start of a batch, and all queries of a batch get one version.
#[test]
fn reloaded_zones_are_served_from_the_next_batch_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("zone");
    let write = |text: &str| std::fs::write(&path, text).unwrap();
    write(ZONE);
    let zones = vec![ZoneSource { origin: None, path: path.clone() }];
    let config = DnsConfig { zones, hash_seed: 1, ..DnsConfig::default() };
    let mut first = DnsServer::load(&config).unwrap();
    let mut second = first.share();
    let reloader = first.reloader();
    let address = |server: &mut DnsServer| {
        records(&reply_to(server, "www.example", Rtype::A))[0]
            .rsplit_once(' ')
            .unwrap()
            .1
            .to_owned()
    };
    write(&ZONE.replace("www A 192.0.2.2", "www A 192.0.2"));
    let error = reloader.load(&config).err().unwrap().to_string();
    assert!(error.contains("zone:6:"), "{error}");
    write(&ZONE.replace("www A 192.0.2.2", "www A 192.0.2.77"));
    let loaded = reloader.load(&config).unwrap();
    assert_eq!(address(&mut first), "192.0.2.2");
    let publishing = std::thread::spawn(move || reloader.publish(loaded));
    // The former zones are freed by the reload, not by a server.
    while first.version == 0 || second.version == 0 {
        first.start_batch(&|| START_NS);
        second.start_batch(&|| START_NS);
    }
    publishing.join().unwrap();
    assert_eq!([address(&mut first), address(&mut second)], ["192.0.2.77", "192.0.2.77"]);
}
