//! Transmit classes of servers and of the daemon, against clients on the kernel.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::run::{Daemon, OWN_ADDRESSES};
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, can_run, files, is_root, tidegate};

const PORT: u16 = 7777;
const TIMEOUT: Duration = Duration::from_secs(60);
const LINK_BPS: u64 = 2_000_000;
/// Full frames, as many as the link carries in a tenth of a second.
const MAX_BULK_BYTES: usize = 16 * 1448;
/// Bytes after which a bulk sender has a window of many more frames.
const WARM_UP_BYTES: usize = 200_000;

fn config_file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tidegate.toml");
    std::fs::write(&path, text).unwrap();
    (folder, path)
}

/// Reads what has arrived; returns the number of bytes.
fn read_arrived(stream: &mut TcpStream) -> usize {
    let (mut buf, mut total) = ([0; 64 << 10], 0);
    loop {
        match stream.read(&mut buf) {
            Ok(0) => panic!("the bulk sender has ended"),
            Ok(bytes) => total += bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return total,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Sends a request for a file.
fn get(stream: &mut TcpStream, file: &str) {
    write!(stream, "GET /{file} HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
}

/// Bytes of a large file that arrive between ten requests for a small one and their answers.
fn bulk_bytes_before_answers(server: SocketAddr) -> Vec<usize> {
    let connect = || {
        let stream = TcpStream::connect(server).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    };
    let (mut bulk, mut small) = (connect(), connect());
    get(&mut bulk, "large");
    bulk.read_exact(&mut vec![0; WARM_UP_BYTES]).unwrap();
    bulk.set_nonblocking(true).unwrap();
    let mut ask = || {
        read_arrived(&mut bulk);
        get(&mut small, "small");
        let (mut answer, mut buf) = (Vec::new(), [0; 2000]);
        while !answer.ends_with(b"high water\n") {
            let bytes = small.read(&mut buf).unwrap();
            assert!(bytes > 0, "the server closes the connection");
            answer.extend_from_slice(&buf[..bytes]);
        }
        read_arrived(&mut bulk)
    };
    (0..10).map(|_| ask()).collect()
}

/// Packets in the queue of the server's device.
fn queued_packets(testbed: &Testbed) -> u64 {
    let mut tc = testbed.server().command("tc");
    let output = tc.args(["-s", "-j", "qdisc", "show", "dev", testbed.device()]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    report[0]["qlen"].as_u64().expect("the length of the queue")
}

#[test]
fn small_answer_overtakes_a_bulk_sender_of_the_same_server() {
    if !can_run("small_answer_overtakes", &["tc"]) {
        return;
    }
    let (_folder, path) = config_file(&format!("[transmit]\nceiling-bps = {LINK_BPS}\n"));
    let files = files();
    let root = files.path().to_str().unwrap();
    let flags = ["http", "--listen", "7777", "--root", root, "--config"];
    for kind in [DeviceKind::Xdp, DeviceKind::Packet] {
        let testbed = Testbed::new(kind);
        if kind == DeviceKind::Packet {
            // A slow link behind the server. Its queue stays empty: the queue is in the classes.
            let mut tc = testbed.server().command("tc");
            tc.args(["qdisc", "add", "dev", testbed.device(), "root", "tbf"]);
            let tbf = ["rate", "4mbit", "burst", "3kb", "latency", "2s"];
            assert!(tc.args(tbf).status().unwrap().success());
        }
        let server = testbed.serve(kind, &[&flags[..], &[path.to_str().unwrap()]].concat());
        for address in [SERVER_V4, SERVER_V6] {
            let server = SocketAddr::new(address.parse().unwrap(), PORT);
            let exchange = || bulk_bytes_before_answers(server);
            let mut bytes = testbed.client().enter(exchange).unwrap();
            bytes.sort_unstable();
            assert!(bytes[bytes.len() / 2] <= MAX_BULK_BYTES, "{kind:?} {address}: {bytes:?}");
            if kind == DeviceKind::Packet {
                assert!(queued_packets(&testbed) <= 4, "the queue of the device is long");
            }
        }
        server.stop();
    }
}

/// Server that echoes datagrams, and accepts connections so that the test knows that it runs.
const ECHO: &str = "
import socket, sys
port = int(sys.argv[1])
def both(kind):
    s = socket.socket(socket.AF_INET6, kind)
    s.setsockopt(41, 26, 0)
    s.bind(('::', port))
    return s
datagrams = both(socket.SOCK_DGRAM)
listener = both(socket.SOCK_STREAM)
listener.listen()
while True:
    data, peer = datagrams.recvfrom(2000)
    datagrams.sendto(data, peer)
";

/// Prints the traffic class of an answer from an address and a port.
const ASK: &str = "
import socket, sys
v6 = ':' in sys.argv[1]
s = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(30)
s.setsockopt(*((41, 66, 1) if v6 else (0, 13, 1)))
s.connect((sys.argv[1], int(sys.argv[2])))
s.send(b'?')
data, extra, flags, peer = s.recvmsg(100, 100)
print(int.from_bytes(extra[0][2], sys.byteorder))
";

#[test]
fn programs_of_the_daemon_have_the_classes_of_their_ports_names_and_users() {
    if !can_run("classes_of_programs", &["python3"]) {
        return;
    }
    let classes = |of_root: u8| {
        format!(
            "[[transmit.class]]\n\
             name = 'of-a-port'\nmatch = [{{ local-port = 7778, protocol = 'udp' }}]\nset-dscp = 10\n\
             [[transmit.class]]\n\
             name = 'of-nobody'\nmatch = [{{ program = 'python3', user = 65534 }}]\nset-dscp = 20\n\
             [[transmit.class]]\n\
             name = 'of-root'\nmatch = [{{ program = 'python3', user = 0 }}]\nset-dscp = {of_root}\n"
        )
    };
    let (_folder, path) = config_file(&classes(46));
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &["--config", path.to_str().unwrap()]);
    let servers = ["7777", "7778"]
        .map(|port| daemon.run_server(&["python3", "-c", ECHO, port], port.parse().unwrap()));
    for address in [SERVER_V4, SERVER_V6] {
        for (port, dscp) in [("7777", 46), ("7778", 10)] {
            assert_eq!(dscp_of_answer(&testbed, address, port), dscp, "{address} port {port}");
        }
    }
    // The programs stay known when other classes are read.
    std::fs::write(&path, classes(34)).unwrap();
    kill_process(Pid::from_raw(daemon.pid().cast_signed()).unwrap(), Signal::HUP).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while dscp_of_answer(&testbed, SERVER_V4, "7777") != 34 {
        assert!(Instant::now() < deadline, "the classes of the file do not come into force");
    }
    assert_eq!(dscp_of_answer(&testbed, SERVER_V6, "7777"), 34);
    drop(servers);
}

/// Code point of the answer of an echo server.
fn dscp_of_answer(testbed: &Testbed, address: &str, port: &str) -> u8 {
    let traffic_class = testbed.tool("python3", &["-c", ASK, address, port]);
    traffic_class.trim().parse::<u8>().unwrap() >> 2
}

#[test]
fn embedded_program_has_the_classes_of_its_file() {
    if !can_run("classes_of_embedded", &["python3"]) {
        return;
    }
    let (_folder, path) = config_file(
        "[[transmit.class]]\nname = 'of-a-port'\nmatch = [{ local-port = 7777 }]\nset-dscp = 10\n",
    );
    let testbed = Testbed::new(DeviceKind::Xdp);
    let flags = [&OWN_ADDRESSES[..], &["--config", path.to_str().unwrap()]].concat();
    let mut command = testbed.run_with(&flags, &["python3", "-c", ECHO, "7777"]);
    let server = testbed.wait_for_server(&mut command, 7777);
    for address in [SERVER_V4, SERVER_V6] {
        assert_eq!(dscp_of_answer(&testbed, address, "7777"), 10, "{address}");
    }
    drop(server);
}

#[test]
fn mistake_in_the_classes_is_reported_before_the_server_starts() {
    if !is_root("mistake_in_classes") {
        return;
    }
    let (_folder, path) = config_file("[[transmit.class]]\nname = 'a'\nweight = 0\n");
    let host = ["--iface", "lo", "--address", "192.0.2.1/24", "--config", path.to_str().unwrap()];
    for (command, program) in
        [(["serve", "echo"], &[][..]), (["run", "--embedded"], &["--", "true"])]
    {
        let output = tidegate(&[&command[..], &host, program].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("weight is a number from 1"), "{text}");
    }
}
