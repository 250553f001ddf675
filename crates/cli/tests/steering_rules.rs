//! Ports on the kernel's addresses that several sockets have: they go to Tidegate until the last
//! of the sockets has closed.

mod support;

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use support::run::{ChildProcess, Daemon, ServerHost};
use support::{SERVER_V4, SERVER_V6, Testbed, can_run, wait_until};

const SERVERS: [&str; 2] = [SERVER_V4, SERVER_V6];
const PORT: u16 = 7001;

/// Time after which a stream fails.
const TIMEOUT: Duration = Duration::from_secs(20);

fn at(address: &str) -> SocketAddr {
    SocketAddr::new(address.parse::<IpAddr>().unwrap(), PORT)
}

fn connect(testbed: &Testbed, address: &str) -> TcpStream {
    let stream = testbed.client().enter(|| TcpStream::connect_timeout(&at(address), TIMEOUT));
    let stream = stream.unwrap().unwrap_or_else(|error| panic!("{address}: {error}"));
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn exchange(stream: &mut TcpStream) {
    stream.write_all(b"request").unwrap();
    let mut reply = [0; 7];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"request");
}

/// Two sockets for each protocol and family. On request the first of each pair is closed.
const PAIRS: &str = "
import select, socket
def make(kind, family, address):
    s = socket.socket(family, kind)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    s.bind((address, 7001))
    if kind == socket.SOCK_STREAM:
        s.listen()
    return s
def all():
    families = [(socket.AF_INET, '0.0.0.0'), (socket.AF_INET6, '::')]
    return [make(k, *f) for k in (socket.SOCK_DGRAM, socket.SOCK_STREAM) for f in families]
first, live = all(), all()
live += first
while True:
    close = False
    for s in select.select(live, [], [])[0]:
        if s.type == socket.SOCK_STREAM:
            c, _ = s.accept()
            c.sendall(b'here')
            c.close()
            continue
        data, peer = s.recvfrom(100)
        s.sendto(data, peer)
        close |= data == b'close'
    while close and first:
        live.remove(first[-1])
        first.pop().close()
";

#[test]
fn port_is_served_until_the_last_of_its_sockets_closes() {
    if !can_run("reuseport sockets", &["python3"]) {
        return;
    }
    ServerHost::each_shared(|host| {
        let testbed = host.testbed();
        let _server = host.run_server(&["python3", "-c", PAIRS], PORT);
        let ask = |address: &str, request: &[u8]| {
            let own = if address.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
            let socket = testbed.client().enter(|| UdpSocket::bind(own).unwrap()).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            wait_until("a datagram is answered", || {
                // Refused while no socket has the port.
                let _ = socket.send_to(request, at(address));
                let mut reply = [0; 16];
                socket.recv(&mut reply).is_ok_and(|len| reply[..len] == *request)
            });
        };
        let check = || {
            for address in SERVERS {
                // Flows of either socket.
                for _ in 0..8 {
                    ask(address, b"request");
                    let mut reply = [0; 4];
                    connect(testbed, address).read_exact(&mut reply).unwrap();
                    assert_eq!(&reply, b"here");
                }
            }
        };
        check();
        ask(SERVER_V4, b"close");
        let before = bytes_in(host);
        check();
        // Datagrams that go to the kernel reach the program by its kernel sockets.
        let requests = (2 * 8 * b"request".len()) as u64;
        let is_tidegates = |before| bytes_in(host).is_some_and(|now| now >= before + requests);
        assert!(before.is_none_or(is_tidegates), "the port has gone to the kernel");
    });
}

/// Bytes that the applications of a daemon have received through Tidegate. `None` for an embedded
/// stack, which has no report.
fn bytes_in(host: &ServerHost<'_>) -> Option<u64> {
    let ServerHost::Attached(daemon) = host else { return None };
    let report = daemon.sockets();
    let applications = report["applications"].as_array().unwrap().iter();
    Some(applications.map(|application| application["bytes_in"].as_u64().unwrap()).sum())
}

/// Accepts a stream of each family, and ends once both have requested it.
const ONCE: &str = "
import socket
listeners = [socket.create_server((a, 7001), family=f) for f, a in
             [(socket.AF_INET, '0.0.0.0'), (socket.AF_INET6, '::')]]
streams = []
for listener in listeners:
    while True:
        s, _ = listener.accept()
        if s.recv(3) == b'end':
            streams.append(s)
            break
        s.close()
";

/// Echoes streams.
const ECHO: &str = "
import socket, threading
def serve(s):
    while data := s.recv(1000):
        s.sendall(data)
def accept(listener):
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],)).start()
for f, a in [(socket.AF_INET, '0.0.0.0'), (socket.AF_INET6, '::')]:
    threading.Thread(target=accept, args=(socket.create_server((a, 7001), family=f),)).start()
";

#[test]
fn restarted_server_outlives_the_connections_of_the_old_one() {
    if !can_run("restarted server", &["python3"]) {
        return;
    }
    let testbed = Testbed::shared();
    let daemon = Daemon::start_shared(&testbed, &[]);
    let old = daemon.run_server(&["python3", "-c", ONCE], PORT);
    let ended = SERVERS.map(|address| {
        let mut stream = connect(&testbed, address);
        stream.write_all(b"end").unwrap();
        stream
    });
    for mut stream in &ended {
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "the old server has closed the stream");
    }
    wait_until("the old server has ended", || {
        daemon.sockets()["applications"].as_array().unwrap().is_empty()
    });
    drop(old);
    // This side has not closed the streams of the old server: they still have the port.
    let _new: ChildProcess = daemon.run_server(&["python3", "-c", ECHO], PORT);
    let mut streams = SERVERS.map(|address| connect(&testbed, address));
    streams.iter_mut().for_each(exchange);
    for stream in ended {
        // A reset ends the old stream at once, as TIME-WAIT does later.
        socket_reset(stream);
    }
    for _ in 0..20 {
        streams.iter_mut().for_each(exchange);
    }
    SERVERS.iter().for_each(|address| exchange(&mut connect(&testbed, address)));
}

/// Closes a stream with a reset.
fn socket_reset(stream: TcpStream) {
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    drop(stream);
}
