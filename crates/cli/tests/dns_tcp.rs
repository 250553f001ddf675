//! DNS over TCP (RFC 7766), queried with well-known tools and with raw bytes.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use support::{DeviceKind, SERVER_V4, SERVER_V6, Server, Testbed, has_programs, is_root, zone};

const SERVERS: [&str; 2] = [SERVER_V4, SERVER_V6];

fn serve(testbed: &Testbed, kind: DeviceKind, flags: &[&str]) -> Server {
    let zone = zone();
    let mut arguments = vec!["dns", "--zone", zone.as_str()];
    arguments.extend(flags);
    testbed.serve(kind, &arguments)
}

fn connect(testbed: &Testbed, server: &str) -> TcpStream {
    let stream = testbed.client().enter(|| TcpStream::connect((server, 53)).unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// A query for the address of www.example.test, with the two-byte length prefix.
fn query(id: u16) -> Vec<u8> {
    let mut message = id.to_be_bytes().to_vec();
    message.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    message.extend(b"\x03www\x07example\x04test\x00\x00\x01\x00\x01");
    let mut framed = (message.len() as u16).to_be_bytes().to_vec();
    framed.extend(message);
    framed
}

/// Reads one response; returns its ID and its last four bytes, the address.
fn read_response(stream: &mut TcpStream) -> (u16, [u8; 4]) {
    let mut len = [0; 2];
    stream.read_exact(&mut len).unwrap();
    let mut message = vec![0; u16::from_be_bytes(len).into()];
    stream.read_exact(&mut message).unwrap();
    (u16::from_be_bytes([message[0], message[1]]), *message.last_chunk().unwrap())
}

const WWW: [u8; 4] = [192, 0, 2, 80];

#[test]
fn dig_and_kdig_query_over_tcp_on_every_device() {
    if !is_root("dns_tcp") || !has_programs("dns_tcp", &["dig", "kdig"]) {
        return;
    }
    for &kind in DeviceKind::ALL {
        eprintln!("{kind:?}");
        let testbed = Testbed::new(kind);
        let server = serve(&testbed, kind, &[]);
        for address in SERVERS {
            let at = format!("@{address}");
            for flags in [&["+tcp"][..], &["+tcp", "+keepopen"], &["+tcp", "+noedns"]] {
                let mut arguments = vec![at.as_str(), "+short", "+tries=1", "+time=5"];
                arguments.extend(flags);
                arguments.extend(["www.example.test", "A", "www.example.test", "AAAA"]);
                let printed = testbed.tool("dig", &arguments);
                assert_eq!(printed, "192.0.2.80\n2001:db8::80\n", "{address} {flags:?}");
            }
            let printed =
                testbed.tool("kdig", &[&at, "+tcp", "+short", "text.example.test", "TXT"]);
            assert!(printed.contains("a tide gate"), "{printed}");
        }
        let report = server.stop();
        assert!(report["drops"].get("tcp_checksum").is_none(), "{report}");
    }
}

/// A response too long for UDP is truncated; the query over TCP gets all of it.
#[test]
fn truncated_udp_response_is_complete_over_tcp() {
    if !is_root("dns_fallback") || !has_programs("dns_fallback", &["dig"]) {
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
    let testbed = Testbed::new(DeviceKind::Xdp);
    let zone = format!("large.test={}", path.display());
    let server = testbed.serve(DeviceKind::Xdp, &["dns", "--zone", &zone]);
    for address in SERVERS {
        let at = format!("@{address}");
        let question = [at.as_str(), "+tries=1", "+time=5", "many.large.test", "TXT"];
        let printed = testbed.tool("dig", &question);
        assert!(printed.contains("Truncated, retrying in TCP mode"), "{printed}");
        assert_eq!(printed.matches(&"x".repeat(100)).count(), 300, "{printed}");
    }
    drop(server);
}

#[test]
fn answers_pipelined_and_split_queries() {
    if !is_root("dns_pipelining") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = serve(&testbed, DeviceKind::Xdp, &[]);
    for address in SERVERS {
        let mut stream = connect(&testbed, address);
        let many: Vec<u8> = (0..500).flat_map(query).collect();
        stream.write_all(&many).unwrap();
        for id in 0..500 {
            assert_eq!(read_response(&mut stream), (id, WWW));
        }
        for byte in query(7) {
            stream.set_nodelay(true).unwrap();
            stream.write_all(&[byte]).unwrap();
        }
        assert_eq!(read_response(&mut stream), (7, WWW));
        // A query followed by FIN: the server answers before it closes its side.
        stream.write_all(&query(8)).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(read_response(&mut stream), (8, WWW));
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    drop(server);
}

#[test]
fn enforces_connection_limits_and_idle_timeout() {
    if !is_root("dns_tcp_limits") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let flags = ["--tcp-connections", "3", "--tcp-per-address", "2", "--tcp-idle-timeout", "1"];
    let server = serve(&testbed, DeviceKind::Xdp, &flags);
    let is_closed = |stream: &mut TcpStream| match stream.read(&mut [0]) {
        Ok(len) => len == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    };
    let mut first = connect(&testbed, SERVER_V4);
    let mut second = connect(&testbed, SERVER_V4);
    for stream in [&mut first, &mut second] {
        stream.write_all(&query(1)).unwrap();
        assert_eq!(read_response(stream), (1, WWW));
    }
    // The server's reset may arrive before `connect` returns.
    let third = testbed.client().enter(|| TcpStream::connect((SERVER_V4, 53))).unwrap();
    let is_refused = match third {
        Ok(mut third) => is_closed(&mut third),
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    };
    assert!(is_refused, "a third connection of one address was accepted");
    let mut others = [connect(&testbed, SERVER_V6), connect(&testbed, SERVER_V6)];
    for stream in &mut others {
        stream.write_all(&query(2)).unwrap();
        assert_eq!(read_response(stream), (2, WWW));
    }
    assert!(is_closed(&mut first), "the connection idle longest was not closed");
    // A partial request does not count as activity.
    others[0].write_all(&query(3)[..5]).unwrap();
    assert!(is_closed(&mut others[0]) && is_closed(&mut others[1]) && is_closed(&mut second));
    drop(server);
}

/// A malformed message closes its own connection; other connections are unaffected.
#[test]
fn malformed_message_closes_only_its_connection() {
    if !is_root("dns_tcp_nonsense") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = serve(&testbed, DeviceKind::Xdp, &[]);
    let mut good = connect(&testbed, SERVER_V4);
    for malformed in [&[0, 0][..], &[0, 1, 9], b"GET / HTTP/1.1\r\n\r\n"] {
        let mut bad = connect(&testbed, SERVER_V4);
        bad.write_all(malformed).unwrap();
        bad.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        let end = bad.read_to_end(&mut rest);
        assert!(rest.is_empty(), "{malformed:?}: {rest:?}");
        assert!(end.is_ok() || end.unwrap_err().kind() == ErrorKind::ConnectionReset);
        good.write_all(&query(5)).unwrap();
        assert_eq!(read_response(&mut good), (5, WWW));
    }
    drop(server);
}
