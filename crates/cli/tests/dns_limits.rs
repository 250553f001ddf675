//! Response rate limit, cookies and identity of `serve dns`, as clients see them.

mod support;

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, can_run, tidegate, zone};

/// Query for the address of a host in `example.test`, with one EDNS option or none.
fn query(id: u8, host: &[u8], option: &[u8]) -> Vec<u8> {
    let mut message = vec![0, id, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, host.len() as u8];
    message.extend_from_slice(host);
    message.extend(b"\x07example\x04test\0\0\x01\0\x01\0\0\x29\x04\xd0\0\0\0\0\0");
    message.push(option.len() as u8);
    message.extend_from_slice(option);
    message
}

/// Number of replies with records, and of truncated ones, to 100 equal queries.
#[derive(Debug, Default)]
struct Replies {
    full: u64,
    truncated: u64,
}

/// Sends a query again and again, ten at a time. A last query with a cookie, which is always
/// answered, shows that no more replies to the ten come.
fn repeat_query(socket: &UdpSocket, option: &[u8], cookie: &[u8]) -> Replies {
    let mut replies = Replies::default();
    let mut reply = [0; 1500];
    for _ in 0..10 {
        for id in 0..10 {
            socket.send(&query(id, b"www", option)).unwrap();
        }
        socket.send(&query(99, b"ns1", cookie)).unwrap();
        loop {
            socket.recv(&mut reply).unwrap();
            match (reply[1], reply[2] & 2 != 0, reply[7]) {
                (99, false, 1) => break,
                (_, false, 1) => replies.full += 1,
                (_, true, 0) => replies.truncated += 1,
                other => panic!("{other:?}"),
            }
        }
    }
    replies
}

#[test]
fn responses_are_limited_unless_a_cookie_proves_the_client() {
    if !can_run("response limit", &["kdig"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let zone = zone();
    let flags = ["dns", "--zone", &zone, "--rate-limit", "1", "--identity", "ns1.lab"];
    let server = testbed.serve(DeviceKind::Packet, &flags);
    for address in [SERVER_V4, SERVER_V6] {
        let socket = || UdpSocket::bind(if address.contains(':') { "[::]:0" } else { "0.0.0.0:0" });
        let socket = testbed.client().enter(socket).unwrap().unwrap();
        socket.connect((address, 53)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut reply = [0; 1500];
        socket.send(&query(1, b"mail", b"\0\x0a\0\x08clientck")).unwrap();
        let len = socket.recv(&mut reply).unwrap();
        let cookie = reply[..len].last_chunk::<28>().unwrap();

        let began = Instant::now();
        let replies = repeat_query(&socket, b"", cookie);
        let allowed = 2 + began.elapsed().as_secs();
        assert!(replies.full <= allowed && replies.truncated > 0, "{address}: {replies:?}");
        let replies = repeat_query(&socket, cookie, cookie);
        assert_eq!((replies.full, replies.truncated), (100, 0), "{address}: with a cookie");

        let at = format!("@{address}");
        let ask = |arguments: &[&str]| {
            let front = [at.as_str(), "+retry=0", "+timeout=20", "+tcp"];
            testbed.tool("kdig", &[&front, arguments].concat())
        };
        assert!(ask(&["+nsid", "ns1.example.test", "A"]).contains("ns1.lab"));
        assert!(ask(&["CH", "TXT", "id.server"]).contains("\"ns1.lab\""));
        assert!(ask(&["CH", "TXT", "version.bind"]).contains("\"tidegate "));
    }
    server.stop();
}

#[test]
fn check_reports_the_first_error_and_serves_nothing() {
    let check = |arguments: &[&str]| {
        let output = tidegate(&[&["serve", "dns", "--check"], arguments].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), error)
    };
    let (is_good, report) = check(&["--zone", &zone()]);
    assert!(is_good && report.contains("in 1 zones"), "{report}");
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("broken"), "@ 60 SOA a b 1 2 3 4 5\n@ 60 NS a\nw 60 KX host\n").unwrap();
    std::fs::write(path("secrets"), "00112233445566778899aabbccddeeff\nxyz\n").unwrap();
    std::fs::write(path("config"), "[dns]\nzone = []\n[gate]\nreceive-quota = 0\n").unwrap();
    let broken = format!("example.test={}", path("broken"));
    let cases: [(&[&str], &str); 5] = [
        (&["--zone", &broken], "broken:3:9: expected a number"),
        (&["--zone", &zone(), "--cookie-secrets", &path("secrets")], "secrets: line 2"),
        (&["--zone", &zone(), "--config", &path("config")], "receive-quota"),
        (&["--zone", &zone(), "--iface", "x", "--address", "10.0.0.0/8"], "network itself"),
        (&["--zone", &zone(), "--identity", &"x".repeat(200)], "--identity"),
    ];
    for (arguments, reason) in cases {
        let (is_good, error) = check(arguments);
        assert!(!is_good && error.contains(reason), "{arguments:?}: {error}");
    }
}
