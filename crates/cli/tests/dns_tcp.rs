//! DNS over TCP (RFC 7766), asked by well-known tools and byte by byte.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use support::{Kind, SERVER_V4, SERVER_V6, Server, Site, have, is_root, zone};

const SERVERS: [&str; 2] = [SERVER_V4, SERVER_V6];

fn serve(site: &Site, kind: Kind, flags: &[&str]) -> Server {
    let zone = zone();
    let mut arguments = vec!["dns", "--zone", zone.as_str()];
    arguments.extend(flags);
    site.serve(kind, &arguments)
}

fn connect(site: &Site, server: &str) -> TcpStream {
    let stream = site.client().enter(|| TcpStream::connect((server, 53)).unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// A query for the address of www.example.test, with its length in front.
fn query(id: u16) -> Vec<u8> {
    let mut message = id.to_be_bytes().to_vec();
    message.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    message.extend(b"\x03www\x07example\x04test\x00\x00\x01\x00\x01");
    let mut framed = (message.len() as u16).to_be_bytes().to_vec();
    framed.extend(message);
    framed
}

/// The number and the last four bytes of an answer: the address.
fn answer(stream: &mut TcpStream) -> (u16, [u8; 4]) {
    let mut len = [0; 2];
    stream.read_exact(&mut len).unwrap();
    let mut message = vec![0; u16::from_be_bytes(len).into()];
    stream.read_exact(&mut message).unwrap();
    (u16::from_be_bytes([message[0], message[1]]), *message.last_chunk().unwrap())
}

const WWW: [u8; 4] = [192, 0, 2, 80];

#[test]
fn tools_ask_over_tcp_on_every_port() {
    if !is_root("dns_tcp") || !have("dns_tcp", &["dig", "kdig"]) {
        return;
    }
    for kind in Kind::ALL {
        eprintln!("{kind:?}");
        let site = Site::new(kind);
        let server = serve(&site, kind, &[]);
        for address in SERVERS {
            let at = format!("@{address}");
            for flags in [&["+tcp"][..], &["+tcp", "+keepopen"], &["+tcp", "+noedns"]] {
                let mut arguments = vec![at.as_str(), "+short", "+tries=1", "+time=5"];
                arguments.extend(flags);
                arguments.extend(["www.example.test", "A", "www.example.test", "AAAA"]);
                let said = site.tool("dig", &arguments);
                assert_eq!(said, "192.0.2.80\n2001:db8::80\n", "{address} {flags:?}");
            }
            let said = site.tool("kdig", &[&at, "+tcp", "+short", "text.example.test", "TXT"]);
            assert!(said.contains("a tide gate"), "{said}");
        }
        let report = server.stop();
        assert!(report["drops"].get("tcp_checksum").is_none(), "{report}");
    }
}

/// What does not fit in a datagram is asked for again over TCP, and is whole.
#[test]
fn what_is_cut_over_udp_comes_whole_over_tcp() {
    if !is_root("dns_fallback") || !have("dns_fallback", &["dig"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("zone");
    let mut text =
        "$ORIGIN large.test.\n@ 60 IN SOA ns h 1 60 60 60 60\n@ 60 IN NS ns\n".to_owned();
    for n in 0..300 {
        text += &format!("many 60 IN TXT \"{n} {}\"\n", "x".repeat(100));
    }
    std::fs::write(&path, text).unwrap();
    let site = Site::new(Kind::Xdp);
    let zone = format!("large.test={}", path.display());
    let server = site.serve(Kind::Xdp, &["dns", "--zone", &zone]);
    for address in SERVERS {
        let at = format!("@{address}");
        let question = [at.as_str(), "+tries=1", "+time=5", "many.large.test", "TXT"];
        let said = site.tool("dig", &question);
        assert!(said.contains("Truncated, retrying in TCP mode"), "{said}");
        assert_eq!(said.matches(&"x".repeat(100)).count(), 300, "{said}");
    }
    drop(server);
}

#[test]
fn requests_may_come_together_and_in_pieces() {
    if !is_root("dns_pipelining") {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let server = serve(&site, Kind::Xdp, &[]);
    for address in SERVERS {
        let mut stream = connect(&site, address);
        let many: Vec<u8> = (0..500).flat_map(query).collect();
        stream.write_all(&many).unwrap();
        for id in 0..500 {
            assert_eq!(answer(&mut stream), (id, WWW));
        }
        for byte in query(7) {
            stream.set_nodelay(true).unwrap();
            stream.write_all(&[byte]).unwrap();
        }
        assert_eq!(answer(&mut stream), (7, WWW));
        // One more, and the end: it is answered before the server ends too.
        stream.write_all(&query(8)).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(answer(&mut stream), (8, WWW));
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    drop(server);
}

#[test]
fn connections_have_limits() {
    if !is_root("dns_tcp_limits") {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let flags = ["--tcp-connections", "3", "--tcp-per-address", "2", "--tcp-idle-timeout", "1"];
    let server = serve(&site, Kind::Xdp, &flags);
    let is_over = |stream: &mut TcpStream| match stream.read(&mut [0]) {
        Ok(len) => len == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    };
    let mut first = connect(&site, SERVER_V4);
    let mut second = connect(&site, SERVER_V4);
    for stream in [&mut first, &mut second] {
        stream.write_all(&query(1)).unwrap();
        assert_eq!(answer(stream), (1, WWW));
    }
    // The reset may be there before the connection is told of.
    let third = site.client().enter(|| TcpStream::connect((SERVER_V4, 53))).unwrap();
    let is_refused = match third {
        Ok(mut third) => is_over(&mut third),
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    };
    assert!(is_refused, "the third of one address");
    let mut others = [connect(&site, SERVER_V6), connect(&site, SERVER_V6)];
    for stream in &mut others {
        stream.write_all(&query(2)).unwrap();
        assert_eq!(answer(stream), (2, WWW));
    }
    assert!(is_over(&mut first), "it had been idle longest");
    // The beginning of a request is no activity.
    others[0].write_all(&query(3)[..5]).unwrap();
    assert!(is_over(&mut others[0]) && is_over(&mut others[1]) && is_over(&mut second));
    drop(server);
}

/// A message of no use ends its connection; nobody else is harmed.
#[test]
fn nonsense_ends_one_connection() {
    if !is_root("dns_tcp_nonsense") {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let server = serve(&site, Kind::Xdp, &[]);
    let mut good = connect(&site, SERVER_V4);
    for nonsense in [&[0, 0][..], &[0, 1, 9], b"GET / HTTP/1.1\r\n\r\n"] {
        let mut bad = connect(&site, SERVER_V4);
        bad.write_all(nonsense).unwrap();
        bad.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        let end = bad.read_to_end(&mut rest);
        assert!(rest.is_empty(), "{nonsense:?}: {rest:?}");
        assert!(end.is_ok() || end.unwrap_err().kind() == ErrorKind::ConnectionReset);
        good.write_all(&query(5)).unwrap();
        assert_eq!(answer(&mut good), (5, WWW));
    }
    drop(server);
}
