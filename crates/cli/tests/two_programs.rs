//! Two programs on one interface: AF_XDP for one of them, AF_PACKET beside it for the other.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use support::{CLIENT_V4, CLIENT_V6, SERVER_V4, SERVER_V6, Server, Testbed, is_root};

const TIMEOUT: Duration = Duration::from_secs(20);
/// Ports of the two servers.
const PORTS: [u16; 2] = [7001, 7002];
/// Addresses of the second server, where each server has its own.
const SECOND_V4: &str = "10.9.0.3";
const SECOND_V6: &str = "fd00:9::3";

/// Whose addresses the servers use.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Addresses {
    Shared,
    Own,
}

impl Addresses {
    fn testbed(self) -> Testbed {
        match self {
            Self::Shared => Testbed::shared(),
            Self::Own => Testbed::new(support::DeviceKind::Xdp),
        }
    }

    fn of(self, server: usize) -> [SocketAddr; 2] {
        let addresses = match (self, server) {
            (Self::Own, 1) => [SECOND_V4, SECOND_V6],
            _ => [SERVER_V4, SERVER_V6],
        };
        addresses.map(|address| at(address, PORTS[server]))
    }

    /// Starts an echo server of streams, with the default device.
    fn start(self, testbed: &Testbed, server: usize) -> Server {
        let port = PORTS[server].to_string();
        let own = self.of(server).map(|address| match address.ip() {
            IpAddr::V4(v4) => format!("{v4}/24"),
            IpAddr::V6(v6) => format!("{v6}/64"),
        });
        let mut arguments = vec!["echo", "--tcp", "--listen", &port, "--iface", testbed.device()];
        match self {
            Self::Shared => arguments.push("--shared"),
            Self::Own => arguments.extend(["--address", &own[0], "--address", &own[1]]),
        }
        testbed.start(&arguments)
    }
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

/// Connections to a server, one of each family.
fn connect(testbed: &Testbed, addresses: [SocketAddr; 2]) -> [TcpStream; 2] {
    let connect = |address| {
        let stream = TcpStream::connect_timeout(&address, TIMEOUT)
            .unwrap_or_else(|error| panic!("{address}: {error}"));
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream
    };
    testbed.client().enter(|| addresses.map(connect)).unwrap()
}

/// Sends bytes in large writes over each connection, and reads them back.
fn exchange(streams: &[TcpStream; 2]) {
    let sent = &(0..300_000).map(|n| (n % 251) as u8).collect::<Vec<_>>();
    for stream in streams {
        let (mut writer, mut reader) = (stream, stream);
        let mut received = vec![0; sent.len()];
        std::thread::scope(|scope| {
            let written = scope.spawn(move || writer.write_all(sent).unwrap());
            reader.read_exact(&mut received).unwrap();
            written.join().unwrap();
        });
        assert!(received == *sent);
    }
}

fn ping(testbed: &Testbed) {
    for address in [SERVER_V4, SERVER_V6] {
        testbed.tool("ping", &["-c", "1", "-W", "20", address]);
    }
}

/// The kernel has its ports back: it refuses connections, and no XDP program is attached.
fn assert_nothing_left(testbed: &Testbed, addresses: Addresses) {
    let link = testbed.server().ip(&["-d", "link", "show", testbed.device()]).unwrap();
    assert!(!link.contains("xdp"), "{link}");
    if addresses == Addresses::Shared {
        for address in [addresses.of(0), addresses.of(1)].concat() {
            let refused = || TcpStream::connect_timeout(&address, TIMEOUT).unwrap_err().kind();
            let kind = testbed.client().enter(refused).unwrap();
            assert_eq!(kind, ErrorKind::ConnectionRefused, "{address}");
        }
    }
}

#[test]
fn second_program_runs_beside_the_first_and_outlives_it() {
    if !is_root("outlives the first") {
        return;
    }
    for addresses in [Addresses::Shared, Addresses::Own] {
        for by_kill in [false, true] {
            eprintln!("{addresses:?}, the first is killed: {by_kill}");
            let testbed = addresses.testbed();
            let first = addresses.start(&testbed, 0);
            let first_id = first.pid().as_raw_pid();
            let second = addresses.start(&testbed, 1);
            let to_first = connect(&testbed, addresses.of(0));
            let to_second = connect(&testbed, addresses.of(1));
            exchange(&to_first);
            exchange(&to_second);
            ping(&testbed);
            match by_kill {
                true => first.kill(),
                false => drop(first.stop()),
            }
            exchange(&to_second);
            exchange(&connect(&testbed, addresses.of(1)));
            let report = second.stop();
            let holder = format!("is held by process {first_id} (tidegate serve echo)");
            assert_eq!(report["port"], "packet");
            assert!(report["detail"].as_str().unwrap().contains(&holder), "{report}");
            assert_nothing_left(&testbed, addresses);
        }
    }
}

#[test]
fn first_program_outlives_the_second() {
    if !is_root("outlives the second") {
        return;
    }
    for addresses in [Addresses::Shared, Addresses::Own] {
        for by_kill in [false, true] {
            eprintln!("{addresses:?}, the second is killed: {by_kill}");
            let testbed = addresses.testbed();
            let first = addresses.start(&testbed, 0);
            let second = addresses.start(&testbed, 1);
            let to_first = connect(&testbed, addresses.of(0));
            exchange(&connect(&testbed, addresses.of(1)));
            match by_kill {
                true => second.kill(),
                false => drop(second.stop()),
            }
            exchange(&to_first);
            // The next program on the port again runs beside the first.
            let next = addresses.start(&testbed, 1);
            exchange(&connect(&testbed, addresses.of(1)));
            exchange(&to_first);
            next.kill();
            first.kill();
            assert_nothing_left(&testbed, addresses);
        }
    }
}

/// Runs a program that serves for a moment, and has to fail to start; returns its error.
fn refused(testbed: &Testbed, arguments: &[&str]) -> String {
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let output = command.args(arguments).args(["--duration", "1"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{arguments:?} has started: {error}");
    error.into_owned()
}

#[test]
fn own_address_of_another_program_is_refused() {
    if !is_root("refused address") {
        return;
    }
    let testbed = Addresses::Own.testbed();
    let (device, first_addresses) = (testbed.device(), Addresses::Own.of(0));
    let first = Addresses::Own.start(&testbed, 0);
    for address in first_addresses {
        let (second_v4, second_v6) = (format!("{SECOND_V4}/24"), format!("{SECOND_V6}/64"));
        let (of_first, of_second) = match address.ip() {
            IpAddr::V4(v4) => (format!("{v4}/24"), second_v6),
            IpAddr::V6(v6) => (format!("{v6}/64"), second_v4),
        };
        let on = ["--iface", device, "--address", &of_second, "--address", &of_first];
        let attach = tempfile::tempdir().unwrap();
        let attach = attach.path().join("attach").to_str().unwrap().to_owned();
        let interface = format!("packet:{device},{of_second},{of_first}");
        for arguments in [
            [&["serve", "echo", "--listen", "9"], &on[..]].concat(),
            [&["serve", "echo", "--listen", "9", "--io", "packet"], &on[..]].concat(),
            [&["daemon", "--socket", &attach], &on[..]].concat(),
            vec!["route", "--io", &interface, "--io", "packet:lo,192.0.2.1/24"],
        ] {
            let error = refused(&testbed, &arguments);
            let own = format!(
                "{} on {device} is the own address of process {} (tidegate serve echo)",
                address.ip(),
                first.pid().as_raw_pid(),
            );
            assert!(error.contains(&own), "{arguments:?}: {error}");
        }
    }
    exchange(&connect(&testbed, first_addresses));
    first.kill();
    let next = Addresses::Own.start(&testbed, 0);
    exchange(&connect(&testbed, first_addresses));
    next.stop();
}

#[test]
fn programs_on_af_packet_share_the_kernel_s_addresses() {
    if !is_root("several on AF_PACKET") {
        return;
    }
    let testbed = Testbed::shared();
    let start = |port| {
        let on = ["--iface", testbed.device(), "--shared", "--io", "packet"];
        testbed.start(&[&["echo", "--listen", port], &on[..]].concat())
    };
    let servers = [start("7001"), start("7002")];
    let exchange = |(local, server)| {
        let socket = UdpSocket::bind(at(local, 0)).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        for port in PORTS {
            socket.connect(at(server, port)).unwrap();
            for payload in [&[7; 1400][..], b"x"] {
                socket.send(payload).unwrap();
                let mut buffer = [0; 2000];
                let len = socket.recv(&mut buffer).unwrap();
                assert_eq!(&buffer[..len], payload);
            }
        }
        // A port of neither server: the kernel answers that it is unreachable.
        socket.connect(at(server, 7003)).unwrap();
        socket.send(b"x").unwrap();
        assert_eq!(socket.recv(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    };
    let pairs = [(CLIENT_V4, SERVER_V4), (CLIENT_V6, SERVER_V6)];
    testbed.client().enter(|| pairs.map(exchange)).unwrap();
    ping(&testbed);
    for server in servers {
        let report = server.stop();
        assert_eq!(report["requests"], 4, "{report}");
    }
    assert_nothing_left(&testbed, Addresses::Shared);
}

#[test]
fn explicit_af_xdp_names_the_holder_and_the_ways_beside_it() {
    if !is_root("explicit AF_XDP") {
        return;
    }
    let testbed = Testbed::shared();
    let first = testbed.start(&["echo", "--shared", "--iface", testbed.device()]);
    let mut second = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    second.args(["serve", "echo", "--io", "xdp", "--shared", "--listen", "9"]);
    let output = second.args(["--iface", testbed.device()]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    let holder = format!("process {} (tidegate serve echo)", first.pid().as_raw_pid());
    for part in [&holder, "tidegate daemon", "tidegate run", "--io packet", "--io auto"] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}
