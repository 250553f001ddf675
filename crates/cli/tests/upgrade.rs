//! `tidegate upgrade`: a new daemon takes over from the running one while applications are
//! attached and clients on the kernel are connected.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use support::run::Daemon;
#[cfg(feature = "dpdk")]
use support::{CLIENT_V4, CLIENT_V6};
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, has_programs, is_root};
use tidegate::{Net, TcpListener};

/// Devices on addresses of the daemon's own; `None` for the host's addresses. A memif is tested on its
/// own: its peer must survive the old daemon, which `dpdk-testpmd` may not.
const DEVICES: &[Option<DeviceKind>] = &[
    Some(DeviceKind::Xdp),
    Some(DeviceKind::Packet),
    Some(DeviceKind::Tap),
    #[cfg(feature = "dpdk")]
    Some(DeviceKind::DpdkPacket),
    None,
];

fn testbed(kind: Option<DeviceKind>) -> Testbed {
    kind.map_or_else(Testbed::shared, Testbed::new)
}

/// Starts a daemon on a [`testbed`].
fn start<'s>(testbed: &'s Testbed, kind: Option<DeviceKind>, flags: &[&str]) -> Daemon<'s> {
    match kind {
        Some(DeviceKind::DpdkPacket) if flags.contains(&"3") => {
            // A queue for each network core.
            let device = format!("dpdk:net_af_packet0,iface={},qpairs=3", testbed.device());
            Daemon::start(testbed, &[&["--io", &device], flags].concat())
        }
        Some(kind) => Daemon::start_on(testbed, kind, flags),
        None => Daemon::start_shared(testbed, flags),
    }
}

/// Upper bound for any step.
const TIMEOUT: Duration = Duration::from_secs(60);

fn upgrade(testbed: &Testbed, daemon: &Daemon<'_>, flags: &[&str]) -> Output {
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("upgrade").arg("--socket").arg(daemon.socket()).args(flags);
    command.stdin(Stdio::null()).output().unwrap()
}

fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// PID of the process that currently serves the daemon's socket.
fn daemon_pid(daemon: &Daemon<'_>) -> u32 {
    u32::try_from(daemon.sockets()["pid"].as_u64().unwrap()).unwrap()
}

/// Attached application that echoes the bytes of `clients` connections and returns when all
/// have closed.
fn echo(net: &Net, address: SocketAddr, clients: usize, is_listening: &AtomicBool) {
    let listener = TcpListener::bind(net, address).unwrap();
    is_listening.store(true, Ordering::Release);
    std::thread::scope(|scope| {
        for _ in 0..clients {
            let (mut stream, _) = listener.accept().unwrap();
            scope.spawn(move || {
                let mut bytes = [0; 16_384];
                while let Ok(len @ 1..) = stream.read(&mut bytes) {
                    stream.write_all(&bytes[..len]).unwrap();
                }
            });
        }
    });
}

/// A client on the kernel's sockets.
fn connect(testbed: &Testbed, address: SocketAddr) -> TcpStream {
    let stream = testbed.client().enter(|| TcpStream::connect(address).unwrap()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn exchange(stream: &mut (impl Read + Write), number: u32, len: usize) {
    let sent: Vec<u8> = (0..len).map(|n| (n as u32 ^ number) as u8).collect();
    stream.write_all(&sent).unwrap();
    let mut received = vec![0; len];
    stream.read_exact(&mut received).unwrap();
    assert!(sent == received, "exchange {number}");
}

#[test]
fn own_address_stays_that_of_the_upgraded_daemon() {
    if !is_root("own address") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start_on(&testbed, DeviceKind::Xdp, &[]);
    for _ in 0..2 {
        let before = daemon_pid(&daemon);
        let output = upgrade(&testbed, &daemon, &[]);
        assert!(output.status.success(), "{}", output_text(&output));
        let pid = daemon_pid(&daemon);
        assert_ne!(pid, before);
        let mut second = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        second.args(["serve", "echo", "--listen", "9", "--iface", testbed.device()]);
        let address = format!("{SERVER_V4}/24");
        let output = second.args(["--duration", "1", "--address", &address]).output().unwrap();
        let text = output_text(&output);
        let holder = format!("the own address of process {pid} (tidegate daemon");
        assert!(!output.status.success() && text.contains(&holder), "{text}");
    }
}

#[test]
fn connections_survive_upgrades() {
    if !is_root("upgrade") {
        return;
    }
    let flag_sets = |kind: Option<DeviceKind>| -> &[&[&str]] {
        match kind {
            Some(_) => &[&["--cores", "1"], &["--cores", "3"]],
            None => &[&["--io", "xdp"], &["--io", "packet"]],
        }
    };
    let with_flags = |kind| flag_sets(kind).iter().map(move |flags| (kind, flags));
    for (kind, flags) in DEVICES.iter().copied().flat_map(with_flags) {
        let testbed = match (kind, flags) {
            // The other cores close their queues before the primary core does.
            (Some(DeviceKind::Xdp), ["--cores", "3"]) => Testbed::with_queues(2),
            _ => testbed(kind),
        };
        let daemon = start(&testbed, kind, flags);
        // With several cores, the next application is placed on another core.
        let _first = Net::attach(daemon.socket(), "first").unwrap();
        let net = Net::attach(daemon.socket(), "echo").unwrap();
        for address in [SERVER_V4, SERVER_V6] {
            let address = SocketAddr::new(address.parse().unwrap(), 7);
            let (is_listening, is_finished) = (&AtomicBool::new(false), &AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| echo(&net, address, 3, is_listening));
                while !is_listening.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                // One connection is busy all the time, the other is silent during the upgrades.
                let mut busy = connect(&testbed, address);
                let mut silent = connect(&testbed, address);
                exchange(&mut silent, 1, 100);
                let busy = scope.spawn(move || {
                    let mut exchanges = 0;
                    while !is_finished.load(Ordering::Relaxed) {
                        exchange(&mut busy, exchanges, 1 + exchanges as usize * 97 % 30_000);
                        exchanges += 1;
                    }
                    exchanges
                });
                let mut previous = daemon_pid(&daemon);
                for round in 0..3 {
                    let output = upgrade(&testbed, &daemon, &[]);
                    assert!(output.status.success(), "{kind:?} {round}: {}", output_text(&output));
                    let next = daemon_pid(&daemon);
                    assert_ne!(next, previous);
                    assert!(
                        output_text(&output).contains(&format!("process {next} has taken over"))
                    );
                    previous = next;
                    exchange(&mut silent, round, 50_000);
                }
                is_finished.store(true, Ordering::Relaxed);
                assert!(busy.join().unwrap() > 0);
                // New connections are accepted, and existing ones close as usual.
                let mut late = connect(&testbed, address);
                exchange(&mut late, 7, 1000);
                for mut stream in [silent, late] {
                    stream.shutdown(Shutdown::Write).unwrap();
                    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
                }
            });
        }
    }
}

/// A TAP device that the daemon has created exists only while a process holds it. The next
/// daemon may or may not want segmentation offload.
#[test]
fn tap_device_survives_upgrades() {
    if !is_root("upgrade_tap") {
        return;
    }
    let testbed = Testbed::without_device();
    let daemon = Daemon::start(&testbed, &["--io", "tap", "--segmentation"]);
    testbed.give_client_addresses();
    let net = Net::attach(daemon.socket(), "echo").unwrap();
    let own = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
    let flags = ["--iface", testbed.device(), "--io", "tap", "--cores", "1"];
    let flags = [&flags[..], &["--address", &own[0], "--address", &own[1]]].concat();
    for address in [SERVER_V4, SERVER_V6] {
        let address = SocketAddr::new(address.parse().unwrap(), 7);
        let is_listening = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| echo(&net, address, 1, is_listening));
            while !is_listening.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let mut stream = connect(&testbed, address);
            for (round, more) in [&[][..], &["--segmentation"]].into_iter().enumerate() {
                exchange(&mut stream, 1, 100_000);
                let output = upgrade(&testbed, &daemon, &[&["--"], &flags[..], more].concat());
                assert!(output.status.success(), "{round}: {}", output_text(&output));
                exchange(&mut stream, 2, 100_000);
            }
        });
    }
}

/// An embedded stack of the test process at the other end of a memif, which captures the
/// daemon's frames.
#[cfg(feature = "dpdk")]
struct Peer {
    net: Net,
    capture: std::path::PathBuf,
}

#[cfg(feature = "dpdk")]
impl Peer {
    fn new(io: &str, capture: std::path::PathBuf) -> Self {
        let mut host = tidegate::host::HostConfig::default();
        host.io = io.parse().unwrap();
        host.addresses = [format!("{CLIENT_V4}/24"), format!("{CLIENT_V6}/64")]
            .map(|address| address.parse().unwrap())
            .into();
        host.capture = Some(capture.clone());
        let config = host.net_config(&tidegate::gate::Settings::default()).unwrap();
        Self { net: Net::open(config.own_thread(true)).unwrap(), capture }
    }

    fn connect(&self, address: SocketAddr) -> tidegate::TcpStream {
        let began = Instant::now();
        loop {
            match tidegate::TcpStream::connect(&self.net, address) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
                    break stream;
                }
                // Packets sent before the link is up are lost.
                Err(error) => assert!(began.elapsed() < TIMEOUT, "{error}"),
            }
        }
    }

    /// Source hardware addresses of the IPv4 packets that were sent from the server's address.
    fn server_mac_addresses(self) -> std::collections::BTreeSet<[u8; 6]> {
        drop(self.net);
        let file = std::fs::File::open(self.capture).unwrap();
        let mut reader = tidegate_device::pcap::Reader::new(file).unwrap();
        let server: std::net::Ipv4Addr = SERVER_V4.parse().unwrap();
        let mut addresses = std::collections::BTreeSet::new();
        while let Some(record) = reader.next_record().unwrap() {
            let frame = record.data;
            if frame[12..14] == [8, 0] && frame[26..30] == server.octets() {
                addresses.insert(*frame[6..].first_chunk().unwrap());
            }
        }
        addresses
    }
}

/// Both memif roles. A memif gets a new hardware address each time it is opened, but peers
/// must keep seeing the address of the first daemon.
#[cfg(feature = "dpdk")]
#[test]
fn memif_survives_upgrades() {
    if !is_root("upgrade_memif") {
        return;
    }
    let testbed = Testbed::without_device();
    for (role, other_role) in [("server", "client"), ("client", "server")] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memif").display().to_string();
        let memif =
            |role| format!("dpdk:net_memif0,role={role},id=0,socket-abstract=no,socket={path}");
        let peer = || Peer::new(&memif(other_role), folder.path().join("capture.pcap"));
        let server = (other_role == "server").then(peer);
        let io = memif(role);
        let daemon = Daemon::start(&testbed, &["--io", &io]);
        let peer = server.unwrap_or_else(peer);
        let net = Net::attach(daemon.socket(), "echo").unwrap();
        for address in [SERVER_V4, SERVER_V6] {
            let address = SocketAddr::new(address.parse().unwrap(), 7);
            let (is_listening, is_finished) = (&AtomicBool::new(false), &AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| echo(&net, address, 2, is_listening));
                while !is_listening.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                let (mut busy, mut silent) = (peer.connect(address), peer.connect(address));
                exchange(&mut silent, 1, 100);
                let busy = scope.spawn(move || {
                    let mut exchanges = 0;
                    while !is_finished.load(Ordering::Relaxed) {
                        exchange(&mut busy, exchanges, 1 + exchanges as usize * 97 % 30_000);
                        exchanges += 1;
                    }
                    exchanges
                });
                for round in 0..3 {
                    let output = upgrade(&testbed, &daemon, &[]);
                    assert!(output.status.success(), "{role} {round}: {}", output_text(&output));
                    exchange(&mut silent, round, 50_000);
                    let own = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
                    let flags = ["--", "--io", &io, "--address", &own[0]];
                    let too_much = ["--address", &own[1], "--cpu", "1000"];
                    let output = upgrade(&testbed, &daemon, &[&flags[..], &too_much].concat());
                    assert!(
                        output_text(&output).contains("the old daemon continues"),
                        "{}",
                        output_text(&output)
                    );
                    exchange(&mut silent, round, 50_000);
                }
                is_finished.store(true, Ordering::Relaxed);
                assert!(busy.join().unwrap() > 0);
            });
        }
        assert_eq!(peer.server_mac_addresses().len(), 1, "{role}");
    }
}

#[cfg(feature = "dpdk")]
#[test]
fn upgrade_refuses_a_device_that_cannot_be_handed_over() {
    if !is_root("upgrade_refused") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::DpdkTap);
    let daemon = Daemon::start_on(&testbed, DeviceKind::DpdkTap, &[]);
    let output = upgrade(&testbed, &daemon, &[]);
    assert!(!output.status.success());
    let printed = output_text(&output);
    assert!(
        printed.contains("--io tap has a persistent interface: restart it instead"),
        "{printed}"
    );
    assert_eq!(daemon_pid(&daemon), daemon.pid());
}

#[test]
fn unmodified_applications_survive_upgrades() {
    if !is_root("upgrade_redis") || !has_programs("upgrade_redis", &["redis-server"]) {
        return;
    }
    for kind in [Some(DeviceKind::Xdp), None] {
        let testbed = testbed(kind);
        let daemon = start(&testbed, kind, &[]);
        let redis = ["redis-server", "--port", "6379", "--bind", "0.0.0.0", "::"];
        let flags = ["--protected-mode", "no", "--save", ""];
        let _redis = daemon.run_server(&[&redis[..], &flags].concat(), 6379);
        let address = SocketAddr::new(SERVER_V4.parse().unwrap(), 6379);
        let mut stream = connect(&testbed, address);
        let mut request = |command: &str, expected: &str| {
            stream.write_all(command.as_bytes()).unwrap();
            let mut reply = vec![0; expected.len()];
            stream.read_exact(&mut reply).unwrap();
            assert_eq!(String::from_utf8_lossy(&reply), expected);
        };
        request("SET tide high\r\n", "+OK\r\n");
        let output = upgrade(&testbed, &daemon, &[]);
        assert!(output.status.success(), "{}", output_text(&output));
        request("GET tide\r\n", "$4\r\nhigh\r\n");
        assert_eq!(daemon.sockets()["applications"].as_array().unwrap().len(), 1);
    }
}

#[test]
fn udp_traffic_survives_upgrades() {
    if !is_root("upgrade_udp") {
        return;
    }
    for &kind in DEVICES {
        let testbed = testbed(kind);
        let daemon = start(&testbed, kind, &[]);
        let net = Net::attach(daemon.socket(), "echo").unwrap();
        let address = SocketAddr::new(SERVER_V4.parse().unwrap(), 7);
        let socket = tidegate::UdpSocket::bind(&net, address).unwrap();
        let client = testbed.client().enter(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
        client.connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let mut bytes = [0; 64];
        for round in 0..3_u8 {
            // A link may lose a datagram, so it is sent until it arrives.
            let began = Instant::now();
            let peer = loop {
                client.send(&[round; 8]).unwrap();
                socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
                match socket.recv_from(&mut bytes) {
                    Ok((8, peer)) if bytes[..8] == [round; 8] => break peer,
                    _ => assert!(began.elapsed() < TIMEOUT),
                }
            };
            let output = upgrade(&testbed, &daemon, &[]);
            assert!(output.status.success(), "{kind:?}: {}", output_text(&output));
            while client.recv(&mut bytes).ok() != Some(8) || bytes[..8] != [round; 8] {
                assert!(began.elapsed() < TIMEOUT);
                socket.send_to(&[round; 8], peer).unwrap();
            }
        }
    }
}

/// Flags of daemons that cannot take over: the first cannot open its device, the second lacks
/// an address with a listener, and the third fails at the very end.
fn unusable_flags(kind: Option<DeviceKind>, device: &str) -> Vec<Vec<String>> {
    let own = [format!("--address={SERVER_V4}/24"), format!("--address={SERVER_V6}/64")];
    let no_such_processor = "--cpu=1000".to_owned();
    let Some(kind) = kind else {
        let shared = |device: &str| vec!["--shared".to_owned(), format!("--iface={device}")];
        return vec![shared("nothing0"), [shared(device), vec![no_such_processor]].concat()];
    };
    let missing_device = match kind {
        // A TAP device that does not exist would be created.
        DeviceKind::Tap => kind.flags("lo"),
        _ => kind.flags("nothing0"),
    };
    let device_flags = kind.flags(device);
    vec![
        [&missing_device, &own[..]].concat(),
        [&device_flags, &own[1..]].concat(),
        [&device_flags, &own[..], &[no_such_processor]].concat(),
    ]
}

#[test]
fn failed_upgrade_changes_nothing() {
    if !is_root("upgrade_fails") {
        return;
    }
    for &kind in DEVICES {
        let testbed = testbed(kind);
        let daemon = start(&testbed, kind, &[]);
        let net = Net::attach(daemon.socket(), "echo").unwrap();
        let address = SocketAddr::new(SERVER_V4.parse().unwrap(), 7);
        let is_listening = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| echo(&net, address, 1, is_listening));
            while !is_listening.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let mut stream = connect(&testbed, address);
            exchange(&mut stream, 0, 1000);
            for (round, flags) in unusable_flags(kind, testbed.device()).iter().enumerate() {
                let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
                let output = upgrade(&testbed, &daemon, &[&["--"], &flags[..]].concat());
                assert!(!output.status.success(), "{flags:?}");
                let printed = output_text(&output);
                assert!(printed.contains("the old daemon continues"), "{flags:?}: {printed}");
                assert_eq!(daemon_pid(&daemon), daemon.pid());
                exchange(&mut stream, round as u32, 10_000);
            }
            // A client of the upgrade protocol that disconnects once it has received everything.
            let mut hello = b"tidegat\x02\x04".to_vec();
            hello.resize(8 + 1 + 16 + 48, 0);
            let mut aborting = UnixStream::connect(daemon.socket()).unwrap();
            aborting.write_all(&hello).unwrap();
            assert!(aborting.read(&mut [0; 16]).unwrap() > 0);
            drop(aborting);
            exchange(&mut stream, 9, 10_000);
            assert_eq!(daemon_pid(&daemon), daemon.pid());
            stream.shutdown(Shutdown::Write).unwrap();
            assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
        });
    }
}

#[test]
fn reports_a_missing_daemon() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output =
        command.args(["upgrade", "--socket", "/nonexistent/daemon.sock"]).output().unwrap();
    assert!(!output.status.success());
    assert!(output_text(&output).contains("no network daemon at"), "{}", output_text(&output));
}
