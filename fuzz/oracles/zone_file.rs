//! Any bytes as a zone file: nothing panics, an error names a location in the file, and
//! loading twice gives the same zone, which is answered with well-formed messages.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use tidegate_apps::Responder;
use tidegate_apps::dns::synthetic::Question;
use tidegate_apps::dns::{DnsConfig, DnsError, DnsServer, Name, ZoneSource};

use crate::dns_answer;

/// Origin given for the zone when the first byte asks for it.
const ORIGIN: &str = "example.test";
/// Names in the queries: the zone, names in the seeds, and others.
const NAMES: [&str; 6] = [
    "example.test",
    "www.example.test",
    "a.b.c.example.test",
    "below.dname.example.test",
    "host.child.example.test",
    "elsewhere.test",
];
/// SOA, NS, A, CNAME, TXT, AAAA, DNAME, ANY and an unknown type.
const TYPES: [u16; 9] = [6, 2, 1, 5, 16, 28, 39, 255, 65_280];

/// Runs one input: the first byte decides whether an origin is given; the rest is the zone
/// file, written to `file`. Returns true if the file was a valid zone.
pub fn check(file: &Path, input: &[u8]) -> bool {
    let [given, text @ ..] = input else { return false };
    std::fs::write(file, text).expect("the file can be written");
    let origin = (given & 1 == 1).then(|| ORIGIN.to_owned());
    let zones = vec![ZoneSource { origin, path: file.to_owned() }];
    let config = DnsConfig { zones, hash_seed: 1, ..DnsConfig::default() };
    match (DnsServer::load(&config), DnsServer::load(&config)) {
        (Ok(first), Ok(again)) => {
            check_server(first, again, given & 1 == 1);
            true
        }
        (Err(first), Err(again)) => {
            assert_eq!(first.to_string(), again.to_string());
            check_error(&first, text);
            false
        }
        _ => panic!("the same file loads only sometimes"),
    }
}

/// Asserts that an error gives a location inside the file.
fn check_error(error: &DnsError, text: &[u8]) {
    let (DnsError::Syntax { location, problem } | DnsError::InvalidZone { location, problem }) =
        error
    else {
        panic!("the error has no location in the file: {error}");
    };
    let lines = text.split(|&byte| byte == b'\n').count();
    assert!(location.line <= lines, "{error}: of {lines} lines");
    let line = text.split(|&byte| byte == b'\n').nth(location.line.saturating_sub(1));
    let width = line.map_or(0, <[u8]>::len);
    // The end of a line or of the file is a valid location too.
    assert!(location.column <= width + 1, "{error}: the line has {width} bytes");
    assert!(!problem.is_empty() && error.to_string().len() < 4096, "{error}");
}

fn check_server(mut first: DnsServer, mut again: DnsServer, named: bool) {
    assert_eq!(first.name_count(), again.name_count());
    assert_eq!(first.warnings(), again.warnings());
    let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 4000));
    for name in NAMES {
        let wanted = Name::from_text(name).expect("a name");
        for (id, rtype) in TYPES.into_iter().enumerate() {
            let question = Question { name: wanted.clone(), rtype };
            let message = question.to_message(id as u16, Some(1232));
            // The space for the reply precedes the message.
            let input = [&0x0fff_u16.to_be_bytes()[..], &message].concat();
            dns_answer::check(&mut first, &input);
            let answer = |server: &mut DnsServer| {
                let mut reply = vec![0; 1232];
                let len = server.respond(&message, from, &mut reply)?;
                reply.truncate(len);
                Some(reply)
            };
            let reply = answer(&mut first);
            assert_eq!(reply, answer(&mut again), "{question}");
            if named && rtype == 6 && name == ORIGIN {
                let reply = reply.expect("the zone is served");
                // No error and one answer: every zone has its SOA record.
                assert_eq!((reply[3] & 0xf, &reply[6..8]), (0, &[0, 1][..]), "{reply:02x?}");
            }
        }
    }
}
