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
use support::{Kind, SERVER_V4, SERVER_V6, Site, have, is_root};
use tidegate::{Net, TcpListener};

/// Ports on an address of the daemon's own, and on the kernel's.
const PORTS: [(Option<Kind>, &str); 3] =
    [(Some(Kind::Xdp), "xdp"), (Some(Kind::Packet), "packet"), (None, "xdp")];

fn site(kind: Option<Kind>) -> Site {
    kind.map_or_else(Site::shared, Site::new)
}

/// A daemon on a [`site`].
fn start<'s>(site: &'s Site, kind: Option<Kind>, flags: &[&str]) -> Daemon<'s> {
    match kind {
        Some(_) => Daemon::start(site, flags),
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

fn exchange(stream: &mut TcpStream, number: u32, len: usize) {
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
    let with_cores = |port: (Option<Kind>, _)| {
        let cores = if port.0.is_some() { &["1", "3"][..] } else { &["1"] };
        cores.iter().map(move |cores| (port, cores))
    };
    for ((kind, port), cores) in PORTS.into_iter().flat_map(with_cores) {
        let site = site(kind);
        let daemon = start(&site, kind, &["--port", port, "--cores", cores]);
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
                    assert!(output.status.success(), "{port} {round}: {}", text(&output));
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
    for (kind, port) in PORTS {
        let site = site(kind);
        let daemon = start(&site, kind, &["--port", port]);
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
            assert!(output.status.success(), "{port}: {}", text(&output));
            while client.recv(&mut bytes).ok() != Some(8) || bytes[..8] != [round; 8] {
                assert!(began.elapsed() < LIMIT);
                socket.send_to(&[round; 8], peer).unwrap();
            }
        }
    }
}

#[test]
fn an_upgrade_that_fails_changes_nothing() {
    if !is_root("upgrade_fails") {
        return;
    }
    for (kind, port) in PORTS {
        let site = site(kind);
        let daemon = start(&site, kind, &["--port", port]);
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
            let own = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
            let [v4, v6] = [&own[0], &own[1]].map(String::as_str);
            // One cannot even begin, one has not the address that is listened at, and one
            // finds out at the very end that it cannot serve.
            let refused: &[&[&str]] = match kind {
                Some(_) => &[
                    &["--iface", "nothing0", "--address", v4, "--address", v6],
                    &["--iface", site.device(), "--address", v6],
                    &["--iface", site.device(), "--address", v4, "--address", v6, "--cpu", "1000"],
                ],
                None => &[
                    &["--iface", "nothing0", "--shared"],
                    &["--iface", site.device(), "--shared", "--cpu", "1000"],
                ],
            };
            for (round, &flags) in refused.iter().enumerate() {
                let output = upgrade(&site, &daemon, &[&["--", "--port", port], flags].concat());
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
