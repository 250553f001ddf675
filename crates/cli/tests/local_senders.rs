//! Servers on a veth as Linux makes it. Senders on this machine leave checksums and segmentation to
//! their device: frames arrive with unfilled checksums, and as large as 64 KiB.

mod support;

use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use support::running::Running;
use support::{
    CLIENT_V4, CLIENT_V6, DeviceKind, SERVER_V4, SERVER_V6, Server, Testbed, can_run, is_root,
};

const PORT: u16 = 7777;
const TIMEOUT: Duration = Duration::from_secs(20);
const KINDS: [DeviceKind; 4] =
    [DeviceKind::Xdp, DeviceKind::XdpGeneric, DeviceKind::XdpInterrupts, DeviceKind::Packet];

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse::<IpAddr>().unwrap(), port)
}

/// Sends datagrams one after the other, and expects each of them back at the first attempt.
fn exchange_datagrams(testbed: &Testbed) {
    let exchange = |local, server| {
        let socket = UdpSocket::bind(at(local, 0)).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        socket.connect(at(server, PORT)).unwrap();
        let mut buffer = [0; 2000];
        for bytes in [1, 2, 64, 1000, 1452] {
            let sent: Vec<u8> = (0..bytes).map(|n| (n % 251) as u8).collect();
            socket.send(&sent).unwrap();
            let len = socket.recv(&mut buffer).unwrap_or_else(|error| panic!("{server}: {error}"));
            assert!(buffer[..len] == sent, "{server}: {len} of {bytes} bytes came back");
        }
    };
    let pairs = [(CLIENT_V4, SERVER_V4), (CLIENT_V6, SERVER_V6)];
    testbed.client().enter(|| pairs.map(|(local, server)| exchange(local, server))).unwrap();
}

/// Sends a stream of bytes in large writes, and reads it back.
fn exchange_streams(testbed: &Testbed) {
    let exchange = |server| {
        let sent: Vec<u8> = (0..3_000_000).map(|n| (n % 251) as u8).collect();
        let stream = TcpStream::connect(at(server, PORT)).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        let received = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut received = Vec::new();
                (&stream).read_to_end(&mut received).unwrap();
                received
            });
            (&stream).write_all(&sent).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            reader.join().unwrap()
        });
        assert!(received == sent, "{server}: {} bytes came back", received.len());
    };
    testbed.client().enter(|| [SERVER_V4, SERVER_V6].map(exchange)).unwrap();
}

/// Stops the server, which has neither met a bad checksum nor a frame that it could not take.
fn check_report(server: Server, kind: DeviceKind) {
    let report = server.stop();
    for reason in [
        "udp_checksum",
        "udp_checksum_unfilled",
        "tcp_checksum",
        "tcp_checksum_unfilled",
        "frame_too_long",
    ] {
        assert!(report["drops"].get(reason).is_none(), "{kind:?}: {report}");
    }
    let detail = report["detail"].as_str().unwrap();
    let says_so = detail.contains("unfilled checksums of local senders accepted");
    assert_eq!(says_so, kind != DeviceKind::Packet, "{detail}");
}

#[test]
fn datagrams_of_local_senders_are_answered() {
    if !is_root("local_datagrams") {
        return;
    }
    for kind in KINDS {
        eprintln!("local_datagrams on {kind:?}");
        let testbed = Testbed::new(kind);
        let server = testbed.serve(kind, &["echo", "--listen", "7777"]);
        exchange_datagrams(&testbed);
        check_report(server, kind);
    }
}

/// Sends one frame of 40 datagrams (`UDP_SEGMENT`) and a datagram behind it, and prints the number
/// of datagrams that came back before the last one.
const SEGMENTED: &str = "
import socket, sys
s = socket.socket(socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(20)
s.connect((sys.argv[1], 7777))
s.send(b'first')
assert s.recv(100) == b'first'
s.setsockopt(17, 103, 1000)
s.send(b'x' * 40000)
s.send(b'last')
count = 0
while s.recv(2000) != b'last':
    count += 1
print(count)
";

#[test]
fn segmented_datagrams_arrive_or_are_counted() {
    if !can_run("segmented_datagrams", &["python3"]) {
        return;
    }
    for kind in KINDS {
        eprintln!("segmented_datagrams on {kind:?}");
        let testbed = Testbed::new(kind);
        let server = testbed.serve(kind, &["echo", "--listen", "7777"]);
        // AF_XDP in generic mode does not see where the datagrams end.
        let is_taken = kind != DeviceKind::XdpGeneric;
        for address in [SERVER_V4, SERVER_V6] {
            let count = testbed.tool("python3", &["-c", SEGMENTED, address]);
            assert_eq!(count.trim(), if is_taken { "40" } else { "0" }, "{kind:?} {address}");
        }
        let report = server.stop();
        let dropped = report["drops"]["frame_too_long"].as_u64().unwrap_or(0);
        assert_eq!(dropped, if is_taken { 0 } else { 2 }, "{report}");
    }
}

/// Sends one frame of 40 datagrams, to a port of nobody.
const SEGMENTED_TO_NOBODY: &str = "
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(17, 103, 1000)
s.sendto(b'x' * 40000, (sys.argv[1], 9))
";

#[test]
fn first_frame_of_local_senders_that_is_dropped_is_logged() {
    if !can_run("logged_drops", &["python3"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let attach = folder.path().join("attach").to_str().unwrap().to_owned();
    for arguments in [
        &["serve", "echo", "--listen", "7777"][..],
        &["serve", "echo", "--tcp", "--listen", "7777"],
        &["daemon", "--socket", &attach],
    ] {
        eprintln!("logged_drops of {arguments:?}");
        let testbed = Testbed::new(DeviceKind::XdpGeneric);
        let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        let address = format!("{SERVER_V4}/24");
        command.args(arguments).args(DeviceKind::XdpGeneric.flags(testbed.device()));
        let mut server = Running::start(command.args(["--address", &address]));
        testbed.tool("python3", &["-c", SEGMENTED_TO_NOBODY, SERVER_V4]);
        let line = server.line_with("frame_too_long");
        assert!(line.contains("native mode or --io packet"), "{line}");
        server.stop();
    }
}

#[test]
fn streams_of_local_senders_are_answered() {
    if !is_root("local_streams") {
        return;
    }
    for kind in KINDS {
        eprintln!("local_streams on {kind:?}");
        let testbed = Testbed::new(kind);
        let server = testbed.serve(kind, &["echo", "--tcp", "--listen", "7777"]);
        exchange_streams(&testbed);
        check_report(server, kind);
    }
}

#[test]
fn local_senders_are_answered_on_shared_addresses() {
    if !is_root("local_shared") {
        return;
    }
    for mode in ["native", "generic"] {
        eprintln!("local_shared in {mode} mode");
        let testbed = Testbed::shared();
        let on = ["--listen", "7777", "--shared", "--xdp-mode", mode, "--iface", testbed.device()];
        let server = testbed.start(&[&["echo"], &on[..]].concat());
        exchange_datagrams(&testbed);
        check_report(server, DeviceKind::Xdp);
        let server = testbed.start(&[&["echo", "--tcp"], &on[..]].concat());
        exchange_streams(&testbed);
        check_report(server, DeviceKind::Xdp);
    }
}
