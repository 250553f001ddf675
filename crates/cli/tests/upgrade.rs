//! `tidegate upgrade`: another daemon goes on in the place of the one that runs,
//! under programs that are attached and clients of the kernel's.

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
use support::{Kind, SERVER_V4, SERVER_V6, Site, have, is_root};
use tidegate::{Net, TcpListener};

/// Ports on an address of the daemon's own, and on the kernel's.
#[cfg(not(feature = "dpdk"))]
const PORTS: [Option<Kind>; 4] = [Some(Kind::Xdp), Some(Kind::Packet), Some(Kind::Tap), None];

/// What a program with DPDK has beyond them. A memif needs another peer than
/// `dpdk-testpmd`, which may end when the other side does.
#[cfg(feature = "dpdk")]
const PORTS: [Option<Kind>; 1] = [Some(Kind::DpdkPacket)];

fn site(kind: Option<Kind>) -> Site {
    kind.map_or_else(Site::shared, Site::new)
}

/// A daemon on a [`site`].
fn start<'s>(site: &'s Site, kind: Option<Kind>, flags: &[&str]) -> Daemon<'s> {
    match kind {
        Some(kind) => Daemon::start_on(site, kind, flags),
        None => Daemon::start_shared(site, flags),
    }
}

/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(60);

fn upgrade(site: &Site, daemon: &Daemon<'_>, flags: &[&str]) -> Output {
    let mut command = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("upgrade").arg("--socket").arg(daemon.socket()).args(flags);
    command.stdin(Stdio::null()).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// The process that answers for the daemon.
fn pid(daemon: &Daemon<'_>) -> u32 {
    u32::try_from(daemon.sockets()["pid"].as_u64().unwrap()).unwrap()
}

/// Ends a daemon that this test's harness did not start, however the test ends.
struct Ends<'d, 's>(&'d Daemon<'s>);

impl Drop for Ends<'_, '_> {
    fn drop(&mut self) {
        let report = tidegate_service::daemon::Report::ask(&self.0.socket());
        let pid = report.ok().and_then(|report| i32::try_from(report.pid).ok());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// An attached program that sends back what each of so many clients says, and ends
/// when they have.
fn echo(net: &Net, address: SocketAddr, clients: usize, listens: &AtomicBool) {
    let listener = TcpListener::bind(net, address).unwrap();
    listens.store(true, Ordering::Release);
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
fn connect(site: &Site, address: SocketAddr) -> TcpStream {
    let stream = site.client().enter(|| TcpStream::connect(address).unwrap()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

fn exchange(stream: &mut (impl Read + Write), number: u32, len: usize) {
    let said: Vec<u8> = (0..len).map(|n| (n as u32 ^ number) as u8).collect();
    stream.write_all(&said).unwrap();
    let mut heard = vec![0; len];
    stream.read_exact(&mut heard).unwrap();
    assert!(said == heard, "exchange {number}");
}

#[test]
fn connections_go_on_under_the_next_daemon() {
    if !is_root("upgrade") {
        return;
    }
    let with_cores = |kind: Option<Kind>| {
        let cores = if kind.is_some() { &["1", "3"][..] } else { &["1"] };
        cores.iter().map(move |cores| (kind, cores))
    };
    for (kind, cores) in PORTS.into_iter().flat_map(with_cores) {
        let site = site(kind);
        let daemon = start(&site, kind, &["--cores", cores]);
        // Whoever comes next is on another core, if there is one.
        let _first = Net::attach(daemon.socket(), "first").unwrap();
        let net = Net::attach(daemon.socket(), "echo").unwrap();
        let _ends = Ends(&daemon);
        for address in [SERVER_V4, SERVER_V6] {
            let address = SocketAddr::new(address.parse().unwrap(), 7);
            let (listens, is_over) = (&AtomicBool::new(false), &AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| echo(&net, address, 3, listens));
                while !listens.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                // One talks all the time, one is silent meanwhile.
                let mut busy = connect(&site, address);
                let mut silent = connect(&site, address);
                exchange(&mut silent, 1, 100);
                let busy = scope.spawn(move || {
                    let mut exchanges = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        exchange(&mut busy, exchanges, 1 + exchanges as usize * 97 % 30_000);
                        exchanges += 1;
                    }
                    exchanges
                });
                let mut last = pid(&daemon);
                for round in 0..3 {
                    let output = upgrade(&site, &daemon, &[]);
                    assert!(output.status.success(), "{kind:?} {round}: {}", text(&output));
                    let next = pid(&daemon);
                    assert_ne!(next, last);
                    assert!(text(&output).contains(&format!("process {next} goes on")));
                    last = next;
                    exchange(&mut silent, round, 50_000);
                }
                is_over.store(true, Ordering::Relaxed);
                assert!(busy.join().unwrap() > 0);
                // New ones are let in, and old ones end as ever.
                let mut late = connect(&site, address);
                exchange(&mut late, 7, 1000);
                for mut stream in [silent, late] {
                    stream.shutdown(Shutdown::Write).unwrap();
                    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
                }
            });
        }
    }
}

/// A device that is there only as long as somebody has it, whose next daemon may want
/// segments cut or not.
#[test]
fn a_device_of_the_daemons_own_stays_when_the_daemon_is_replaced() {
    if !is_root("upgrade_tap") {
        return;
    }
    let site = Site::without_device();
    let daemon = Daemon::start(&site, &["--port", "tap", "--segmentation"]);
    let _ends = Ends(&daemon);
    site.give_client_addresses();
    let net = Net::attach(daemon.socket(), "echo").unwrap();
    let own = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
    let flags = ["--iface", site.device(), "--port", "tap", "--cores", "1"];
    let flags = [&flags[..], &["--address", &own[0], "--address", &own[1]]].concat();
    for address in [SERVER_V4, SERVER_V6] {
        let address = SocketAddr::new(address.parse().unwrap(), 7);
        let listens = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| echo(&net, address, 1, listens));
            while !listens.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let mut stream = connect(&site, address);
            for (round, more) in [&[][..], &["--segmentation"]].into_iter().enumerate() {
                exchange(&mut stream, 1, 100_000);
                let output = upgrade(&site, &daemon, &[&["--"], &flags[..], more].concat());
                assert!(output.status.success(), "{round}: {}", text(&output));
                exchange(&mut stream, 2, 100_000);
            }
        });
    }
}

/// A stack of this process's at the other end of a memif, and the addresses that frames
/// of the daemon's come from.
#[cfg(feature = "dpdk")]
struct Peer {
    net: Net,
    capture: std::path::PathBuf,
}

#[cfg(feature = "dpdk")]
impl Peer {
    fn new(port: &str, capture: std::path::PathBuf) -> Self {
        let host = tidegate::host::HostConfig {
            port: Some(port.parse().unwrap()),
            address: vec![format!("{CLIENT_V4}/24"), format!("{CLIENT_V6}/64")],
            capture: Some(capture.clone()),
            ..Default::default()
        };
        let config = host.net_config(&tidegate::gate::Settings::default()).unwrap();
        Self { net: Net::open(config.own_thread(true)).unwrap(), capture }
    }

    fn connect(&self, address: SocketAddr) -> tidegate::TcpStream {
        let began = Instant::now();
        loop {
            match tidegate::TcpStream::connect(&self.net, address) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(LIMIT)).unwrap();
                    break stream;
                }
                // What was sent before the link was up is lost.
                Err(error) => assert!(began.elapsed() < LIMIT, "{error}"),
            }
        }
    }

    /// The hardware addresses of those who sent from the server's address.
    fn neighbours(self) -> std::collections::BTreeSet<[u8; 6]> {
        drop(self.net);
        let file = std::fs::File::open(self.capture).unwrap();
        let mut reader = tidegate::port::pcap::Reader::new(file).unwrap();
        let server: std::net::Ipv4Addr = SERVER_V4.parse().unwrap();
        let mut neighbours = std::collections::BTreeSet::new();
        while let Some(record) = reader.next_record().unwrap() {
            let frame = record.data;
            if frame[12..14] == [8, 0] && frame[26..30] == server.octets() {
                neighbours.insert(*frame[6..].first_chunk().unwrap());
            }
        }
        neighbours
    }
}

/// In both roles. A memif has another hardware address each time that it is opened, and
/// peers know the daemon by that of the first one.
#[cfg(feature = "dpdk")]
#[test]
fn a_memif_goes_on_under_the_next_daemon() {
    if !is_root("upgrade_memif") {
        return;
    }
    let site = Site::without_device();
    for (role, other_role) in [("server", "client"), ("client", "server")] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memif").display().to_string();
        let memif =
            |role| format!("dpdk:net_memif0,role={role},id=0,socket-abstract=no,socket={path}");
        let peer = || Peer::new(&memif(other_role), folder.path().join("capture.pcap"));
        let server = (other_role == "server").then(peer);
        let port = memif(role);
        let daemon = Daemon::start(&site, &["--port", &port]);
        let peer = server.unwrap_or_else(peer);
        let net = Net::attach(daemon.socket(), "echo").unwrap();
        let _ends = Ends(&daemon);
        for address in [SERVER_V4, SERVER_V6] {
            let address = SocketAddr::new(address.parse().unwrap(), 7);
            let (listens, is_over) = (&AtomicBool::new(false), &AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| echo(&net, address, 2, listens));
                while !listens.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                let (mut busy, mut silent) = (peer.connect(address), peer.connect(address));
                exchange(&mut silent, 1, 100);
                let busy = scope.spawn(move || {
                    let mut exchanges = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        exchange(&mut busy, exchanges, 1 + exchanges as usize * 97 % 30_000);
                        exchanges += 1;
                    }
                    exchanges
                });
                for round in 0..3 {
                    let output = upgrade(&site, &daemon, &[]);
                    assert!(output.status.success(), "{role} {round}: {}", text(&output));
                    exchange(&mut silent, round, 50_000);
                    let own = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
                    let flags = ["--", "--port", &port, "--address", &own[0]];
                    let too_much = ["--address", &own[1], "--cpu", "1000"];
                    let output = upgrade(&site, &daemon, &[&flags[..], &too_much].concat());
                    assert!(text(&output).contains("the old one goes on"), "{}", text(&output));
                    exchange(&mut silent, round, 50_000);
                }
                is_over.store(true, Ordering::Relaxed);
                assert!(busy.join().unwrap() > 0);
            });
        }
        assert_eq!(peer.neighbours().len(), 1, "{role}");
    }
}

#[cfg(feature = "dpdk")]
#[test]
fn a_device_that_goes_with_its_daemon_is_not_handed_over() {
    if !is_root("upgrade_refused") {
        return;
    }
    let site = Site::new(Kind::DpdkTap);
    let daemon = Daemon::start_on(&site, Kind::DpdkTap, &[]);
    let output = upgrade(&site, &daemon, &[]);
    assert!(!output.status.success());
    let said = text(&output);
    assert!(said.contains("--port tap has one that stays: restart it instead"), "{said}");
    assert_eq!(pid(&daemon), daemon.pid());
}

#[test]
fn unmodified_programs_notice_nothing() {
    if !is_root("upgrade_redis") || !have("upgrade_redis", &["redis-server"]) {
        return;
    }
    for kind in [Some(Kind::Xdp), None] {
        let site = site(kind);
        let daemon = start(&site, kind, &[]);
        let redis = ["redis-server", "--port", "6379", "--bind", "0.0.0.0", "::"];
        let flags = ["--protected-mode", "no", "--save", ""];
        let _redis = daemon.run_server(&[&redis[..], &flags].concat(), 6379);
        let _ends = Ends(&daemon);
        let address = SocketAddr::new(SERVER_V4.parse().unwrap(), 6379);
        let mut stream = connect(&site, address);
        let mut ask = |said: &str, expected: &str| {
            stream.write_all(said.as_bytes()).unwrap();
            let mut heard = vec![0; expected.len()];
            stream.read_exact(&mut heard).unwrap();
            assert_eq!(String::from_utf8_lossy(&heard), expected);
        };
        ask("SET tide high\r\n", "+OK\r\n");
        let output = upgrade(&site, &daemon, &[]);
        assert!(output.status.success(), "{}", text(&output));
        ask("GET tide\r\n", "$4\r\nhigh\r\n");
        assert_eq!(daemon.sockets()["applications"].as_array().unwrap().len(), 1);
    }
}

#[test]
fn datagrams_go_on_under_the_next_daemon() {
    if !is_root("upgrade_udp") {
        return;
    }
    for kind in PORTS {
        let site = site(kind);
        let daemon = start(&site, kind, &[]);
        let net = Net::attach(daemon.socket(), "echo").unwrap();
        let _ends = Ends(&daemon);
        let address = SocketAddr::new(SERVER_V4.parse().unwrap(), 7);
        let socket = tidegate::UdpSocket::bind(&net, address).unwrap();
        let client = site.client().enter(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
        client.connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let mut bytes = [0; 64];
        for round in 0..3_u8 {
            // A wire may lose a datagram, so it is sent until it is there.
            let began = Instant::now();
            let peer = loop {
                client.send(&[round; 8]).unwrap();
                socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
                match socket.recv_from(&mut bytes) {
                    Ok((8, peer)) if bytes[..8] == [round; 8] => break peer,
                    _ => assert!(began.elapsed() < LIMIT),
                }
            };
            let output = upgrade(&site, &daemon, &[]);
            assert!(output.status.success(), "{kind:?}: {}", text(&output));
            while client.recv(&mut bytes).ok() != Some(8) || bytes[..8] != [round; 8] {
                assert!(began.elapsed() < LIMIT);
                socket.send_to(&[round; 8], peer).unwrap();
            }
        }
    }
}

/// Flags of daemons that come to nothing: one cannot open its port, one has not the
/// address that is listened at, and one finds out at the very end that it cannot serve.
fn unusable(kind: Option<Kind>, device: &str) -> Vec<Vec<String>> {
    let own = [format!("--address={SERVER_V4}/24"), format!("--address={SERVER_V6}/64")];
    let no_such_processor = "--cpu=1000".to_owned();
    let Some(kind) = kind else {
        let shared = |device: &str| vec!["--shared".to_owned(), format!("--iface={device}")];
        return vec![shared("nothing0"), [shared(device), vec![no_such_processor]].concat()];
    };
    let nothing = match kind {
        // A TAP device that is not there would be made.
        Kind::Tap => kind.flags("lo"),
        _ => kind.flags("nothing0"),
    };
    let port = kind.flags(device);
    vec![
        [&nothing, &own[..]].concat(),
        [&port, &own[1..]].concat(),
        [&port, &own[..], &[no_such_processor]].concat(),
    ]
}

#[test]
fn an_upgrade_that_fails_changes_nothing() {
    if !is_root("upgrade_fails") {
        return;
    }
    for kind in PORTS {
        let site = site(kind);
        let daemon = start(&site, kind, &[]);
        let net = Net::attach(daemon.socket(), "echo").unwrap();
        let address = SocketAddr::new(SERVER_V4.parse().unwrap(), 7);
        let listens = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| echo(&net, address, 1, listens));
            while !listens.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let mut stream = connect(&site, address);
            exchange(&mut stream, 0, 1000);
            for (round, flags) in unusable(kind, site.device()).iter().enumerate() {
                let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
                let output = upgrade(&site, &daemon, &[&["--"], &flags[..]].concat());
                assert!(!output.status.success(), "{flags:?}");
                let said = text(&output);
                assert!(said.contains("the old one goes on"), "{flags:?}: {said}");
                assert_eq!(pid(&daemon), daemon.pid());
                exchange(&mut stream, round as u32, 10_000);
            }
            // Somebody who comes and leaves when he has got everything.
            let mut hello = b"tidegat\x02\x04".to_vec();
            hello.resize(8 + 1 + 16 + 48, 0);
            let mut rude = UnixStream::connect(daemon.socket()).unwrap();
            rude.write_all(&hello).unwrap();
            assert!(rude.read(&mut [0; 16]).unwrap() > 0);
            drop(rude);
            exchange(&mut stream, 9, 10_000);
            assert_eq!(pid(&daemon), daemon.pid());
            stream.shutdown(Shutdown::Write).unwrap();
            assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
        });
    }
}

#[test]
fn where_no_daemon_is_it_says_so() {
    let mut nobody = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output = nobody.args(["upgrade", "--socket", "/nonexistent/daemon.sock"]).output().unwrap();
    assert!(!output.status.success());
    assert!(text(&output).contains("no network daemon at"), "{}", text(&output));
}
