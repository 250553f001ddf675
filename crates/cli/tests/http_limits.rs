//! Memory and time limits of the HTTP server, with clients on the kernel's sockets that do not
//! read, do not finish, or send garbage.

mod support;

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Server, Testbed, has_programs, is_root};

const LARGE_BYTES: u64 = 10 << 20;
const SERVERS: [&str; 2] = [SERVER_V4, SERVER_V6];
const TIMEOUT: Duration = Duration::from_secs(30);

/// Document root with a large file without blocks.
fn root() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::File::create(folder.path().join("large")).unwrap().set_len(LARGE_BYTES).unwrap();
    folder
}

fn connect(testbed: &Testbed, address: &str) -> TcpStream {
    let stream = testbed.client().enter(|| TcpStream::connect((address, 80)).unwrap()).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// Sends `request` on a new connection; returns the connection.
fn send(testbed: &Testbed, address: &str, request: &str) -> TcpStream {
    let mut stream = connect(testbed, address);
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

/// Sends `request`; returns all that comes back until the server closes.
fn exchange(testbed: &Testbed, address: &str, request: &str) -> String {
    let mut response = Vec::new();
    send(testbed, address, request).read_to_end(&mut response).unwrap();
    String::from_utf8(response).unwrap()
}

/// Requests the status; returns it, and the time that it took.
fn status(testbed: &Testbed, address: &str) -> (Value, Duration) {
    let began = Instant::now();
    let request = "GET /api/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let response = exchange(testbed, address, request);
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    (serde_json::from_str(body).unwrap(), began.elapsed())
}

/// Resident memory of the server in bytes.
fn resident_bytes(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Connections whose clients do not read cost the server little, and others are served.
#[test]
fn memory_is_bounded_while_clients_do_not_read() {
    if !is_root("http_memory") {
        return;
    }
    let folder = root();
    let root = folder.path().to_str().unwrap();
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = testbed.serve(DeviceKind::Xdp, &["http", "--root", root, "--memory", "32"]);
    status(&testbed, SERVER_V4);
    let idle_bytes = resident_bytes(&server);
    let mut clients = Vec::new();
    for number in 0..500 {
        let request = "GET /large HTTP/1.1\r\nHost: x\r\n\r\n";
        clients.push(send(&testbed, SERVERS[number % 2], request));
    }
    for address in SERVERS {
        let (status, _) = status(&testbed, address);
        assert!(status["memory_bytes"].as_u64().unwrap() <= 33 << 20, "{status}");
    }
    let grown_bytes = resident_bytes(&server).saturating_sub(idle_bytes);
    assert!(grown_bytes <= 48 << 20, "{grown_bytes}");
    drop(clients);
}

/// An echo is not stored while its client does not read.
#[test]
fn an_echo_that_is_not_read_takes_no_memory() {
    if !is_root("http_echo_memory") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = testbed.serve(DeviceKind::Xdp, &["http"]);
    status(&testbed, SERVER_V4);
    let idle_bytes = resident_bytes(&server);
    let piece = vec![b'x'; 1 << 20];
    let mut clients = Vec::new();
    let mut sent_bytes = 0;
    for number in 0..20 {
        let request = "POST /api/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n";
        let client = send(&testbed, SERVERS[number % 2], request);
        client.set_nonblocking(true).unwrap();
        clients.push(client);
    }
    // The server has taken all that it takes when a second passes without progress.
    let mut progress = Instant::now();
    while progress.elapsed() < Duration::from_secs(1) && sent_bytes < 500 << 20 {
        for client in &mut clients {
            match client.write(&piece) {
                Ok(len) => (sent_bytes, progress) = (sent_bytes + len, Instant::now()),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    status(&testbed, SERVER_V6);
    let grown_bytes = resident_bytes(&server).saturating_sub(idle_bytes);
    assert!(grown_bytes <= 24 << 20, "{grown_bytes} after {sent_bytes}");
}

#[test]
fn garbage_is_answered_and_does_not_delay_answers() {
    if !is_root("http_garbage") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = testbed.serve(DeviceKind::Xdp, &["http", "--idle-timeout", "60"]);
    let long = format!("GET / HTTP/1.1\r\nHost: x\r\nA: {}\r\n\r\n", "a".repeat(300 << 10));
    for address in SERVERS {
        for (request, expected) in [
            ("GE\x01T / HTTP/1.1\r\nHost: x\r\n\r\nmore", "400"),
            (&long, "431"),
            ("GET / HTTP/2.0\r\nHost: x\r\n\r\n", "505"),
            ("GET / HTTP/1.1\r\n\r\n", "400"),
            ("GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", "400"),
        ] {
            let response = exchange(&testbed, address, request);
            assert!(response.starts_with(&format!("HTTP/1.1 {expected}")), "{response}");
        }
        for stray in ["\r\n", "GET", "\0\0\0"] {
            let request = format!("GET /none HTTP/1.1\r\nHost: x\r\n\r\n{stray}");
            let mut client = send(&testbed, address, &request);
            let mut start = [0; 12];
            client.read_exact(&mut start).unwrap();
            assert_eq!(&start, b"HTTP/1.1 404", "{stray:?}");
        }
    }
    drop(server);
}

/// Slow clients lose their connections; nobody else waits.
#[test]
fn time_limits_end_slow_clients() {
    if !is_root("http_time") {
        return;
    }
    let folder = root();
    let root = folder.path().to_str().unwrap();
    let testbed = Testbed::new(DeviceKind::Xdp);
    let limits = ["--header-timeout", "1", "--body-timeout", "1", "--write-timeout", "1"];
    let mut arguments = vec!["http", "--root", root, "--idle-timeout", "1"];
    arguments.extend(limits);
    let server = testbed.serve(DeviceKind::Xdp, &arguments);
    for address in SERVERS {
        assert_eq!(exchange(&testbed, address, ""), "");
        assert!(exchange(&testbed, address, "GET / HT").starts_with("HTTP/1.1 408"));
        let body = "POST /api/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc";
        let large = "GET /large HTTP/1.1\r\nHost: x\r\n\r\n";
        for request in [body, large] {
            let mut client = send(&testbed, address, request);
            support::wait_until("only the status has a connection", || {
                status(&testbed, address).0["connections_open"] == 1
            });
            let error = io::copy(&mut client, &mut io::sink()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        }
    }
    assert_eq!(status(&testbed, SERVER_V4).0["timed_out"], 8);
    drop(server);
}

/// Kernel sockets: without descriptors the server neither spins nor stops answering.
#[test]
fn serves_when_descriptors_run_out() {
    if !is_root("http_descriptors") || !has_programs("http_descriptors", &["prlimit"]) {
        return;
    }
    let folder = root();
    let root = folder.path().to_str().unwrap();
    let testbed = Testbed::shared();
    let server = testbed.start(&["http", "--io", "kernel", "--root", root, "--user", "root"]);
    let pid = server.pid().to_string();
    // Lower than what the server has found when it started.
    testbed.tool("prlimit", &["--pid", &pid, "--nofile=60:60"]);
    let mut clients = Vec::new();
    for number in 0..200 {
        clients.push(connect(&testbed, SERVERS[number % 2]));
    }
    for address in SERVERS {
        support::wait_until("the oldest connections give way", || {
            status(&testbed, address).0["evicted"].as_u64() > Some(100)
        });
    }
    drop(clients);
    drop(server);
}
