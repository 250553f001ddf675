//! The DNS server against NSD: the same zones, the same questions, answers
//! with the same meaning.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tidegate_apps::ServeCounters;
use tidegate_apps::dns::synthetic::{Question, SyntheticZone};
use tidegate_apps::dns::{DnsConfig, Name, Server, ZoneSource, compare};
use tidegate_apps::kernel::{KernelOptions, KernelSocket, serve_kernel};

const LOOPBACKS: [&str; 2] = ["127.0.0.1", "::1"];

/// How long a server may take to start on a machine that has much else to do.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A zone with one of everything that a lookup can meet.
const VARIED: &str = include_str!("zones/varied.zone");
/// A zone under the first one, served by the same server.
const CHILD: &str = include_str!("zones/child.varied.zone");

/// NSD on loopback, ended with the test.
struct Nsd {
    process: Child,
    port: u16,
}

impl Drop for Nsd {
    fn drop(&mut self) {
        // NSD answers SIGTERM by ending its children too; SIGKILL would leave
        // them behind.
        let pid = self.process.id().to_string();
        if Command::new("kill").arg(&pid).status().is_ok_and(|status| status.success()) {
            let _ = self.process.wait();
        }
    }
}

impl Nsd {
    /// Starts NSD, or says why not.
    fn start(folder: &Path, zones: &[(&str, &Path)]) -> Option<Nsd> {
        let port = free_port();
        let at = |name: &str| folder.join(name).display().to_string();
        let mut text = format!(
            "server:\n ip-address: 127.0.0.1@{port}\n ip-address: ::1@{port}\n server-count: 1\n \
             username: \"\"\n chroot: \"\"\n zonesdir: \"{}\"\n database: \"\"\n \
             zonelistfile: \"{}\"\n pidfile: \"{}\"\n xfrdfile: \"{}\"\n xfrdir: \"{}\"\n \
             logfile: \"{}\"\n refuse-any: no\n rrl-ratelimit: 0\n rrl-whitelist-ratelimit: 0\n\
             remote-control:\n control-enable: no\n",
            folder.display(),
            at("zone.list"),
            at("nsd.pid"),
            at("xfrd.state"),
            folder.display(),
            at("nsd.log"),
        );
        for (origin, path) in zones {
            text += &format!("zone:\n name: \"{origin}\"\n zonefile: \"{}\"\n", path.display());
        }
        let config = folder.join("nsd.conf");
        fs::write(&config, text).unwrap();
        let spawned = ["nsd", "/usr/sbin/nsd"].into_iter().find_map(|program| {
            let mut command = Command::new(program);
            command.arg("-d").arg("-c").arg(&config);
            match command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                spawned => Some(spawned.unwrap()),
            }
        });
        let mut nsd = Nsd { process: spawned?, port };
        nsd.wait_until_it_answers(folder);
        Some(nsd)
    }

    fn wait_until_it_answers(&mut self, folder: &Path) {
        let probe = Question { name: Name::root(), rtype: 6 }.to_message(1, None);
        for loopback in LOOPBACKS {
            let socket = connect(loopback, self.port, Duration::from_millis(50));
            let mut reply = [0; 512];
            let started = Instant::now();
            loop {
                if let Some(status) = self.process.try_wait().unwrap() {
                    panic!("nsd ended with {status}: {}", log_of(folder));
                }
                // Refused while NSD is not there yet: the read says so at once.
                if socket.send(&probe).is_ok() && socket.recv(&mut reply).is_ok() {
                    break;
                }
                let waited = started.elapsed();
                assert!(waited < START_LIMIT, "nsd does not answer: {}", log_of(folder));
                thread::yield_now();
            }
        }
    }
}

fn log_of(folder: &Path) -> String {
    fs::read_to_string(folder.join("nsd.log")).unwrap_or_default()
}

/// A port that is free for UDP and TCP in both families just now.
fn free_port() -> u16 {
    loop {
        let first = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        let is_free = UdpSocket::bind(("::1", port)).is_ok()
            && LOOPBACKS.iter().all(|loopback| TcpListener::bind((*loopback, port)).is_ok());
        if is_free {
            return port;
        }
    }
}

fn connect(loopback: &str, port: u16, timeout: Duration) -> UdpSocket {
    let address: IpAddr = loopback.parse().unwrap();
    let socket = UdpSocket::bind(SocketAddr::new(address, 0)).unwrap();
    socket.connect(SocketAddr::new(address, port)).unwrap();
    socket.set_read_timeout(Some(timeout)).unwrap();
    socket
}

/// Our server on the kernel's sockets, in a thread.
struct Ours {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    ports: [u16; 2],
}

impl Ours {
    fn start(mut server: Server) -> Ours {
        let sockets = LOOPBACKS.map(|loopback| {
            let address = SocketAddr::new(loopback.parse().unwrap(), 0);
            KernelSocket::bind(address, &KernelOptions::default()).unwrap()
        });
        let ports = [0, 1].map(|index: usize| sockets[index].local_addr().port());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let counters = ServeCounters::new();
            serve_kernel(&sockets, &mut server, 4096, &stopped, &counters).unwrap();
        });
        Ours { stop, thread: Some(thread), ports }
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Both servers and a socket to each in each family.
struct Pair {
    nsd: [UdpSocket; 2],
    ours: [UdpSocket; 2],
    asked: usize,
    wrong: Vec<String>,
    _servers: (Nsd, Ours),
}

impl Pair {
    fn start(folder: &Path, zones: &[(&str, &str)]) -> Option<Pair> {
        let files: Vec<_> = zones
            .iter()
            .map(|(origin, text)| {
                let path = folder.join(format!("{origin}.zone"));
                fs::write(&path, text).unwrap();
                (*origin, path)
            })
            .collect();
        let for_nsd: Vec<_> = files.iter().map(|(origin, path)| (*origin, &**path)).collect();
        let Some(nsd) = Nsd::start(folder, &for_nsd) else {
            eprintln!("skipped: nsd not installed");
            return None;
        };
        let zones = files
            .iter()
            .map(|(origin, path)| ZoneSource {
                origin: Some((*origin).to_owned()),
                path: path.clone(),
            })
            .collect();
        let config = DnsConfig { zones, hash_seed: 42, ..DnsConfig::default() };
        let ours = Ours::start(Server::load(&config).unwrap());
        let patience = Duration::from_secs(10);
        Some(Pair {
            nsd: LOOPBACKS.map(|loopback| connect(loopback, nsd.port, patience)),
            ours: [0, 1].map(|index| connect(LOOPBACKS[index], ours.ports[index], patience)),
            asked: 0,
            wrong: Vec::new(),
            _servers: (nsd, ours),
        })
    }

    /// Asks both servers, in turn over IPv4 and IPv6, and notes a difference.
    fn ask(&mut self, what: &str, message: &[u8]) {
        let family = self.asked % 2;
        self.asked += 1;
        let mut replies = [vec![0; 65_535], vec![0; 65_535]];
        for (socket, reply) in [&self.nsd[family], &self.ours[family]].into_iter().zip(&mut replies)
        {
            socket.send(message).unwrap();
            let len = socket.recv(reply).unwrap_or_else(|error| panic!("{what}: {error}"));
            reply.truncate(len);
        }
        if let Err(difference) = compare(&replies[0], &replies[1]) {
            self.wrong.push(format!("{what}: {difference}"));
        }
    }

    fn ask_question(&mut self, question: &Question, edns_bytes: Option<u16>) {
        let id = (self.asked as u16).wrapping_mul(40_503);
        let what = format!("{question} edns {edns_bytes:?}");
        self.ask(&what, &question.to_message(id, edns_bytes));
    }

    fn assert_same(&self) {
        let count = self.wrong.len();
        let shown = self.wrong.iter().take(40).cloned().collect::<Vec<_>>().join("\n");
        assert!(count == 0, "{count} of {} answers differ:\n{shown}", self.asked);
    }
}

const EDNS_SIZES: [Option<u16>; 6] =
    [None, Some(0), Some(512), Some(700), Some(1232), Some(65_535)];

const TYPES: [u16; 20] =
    [1, 2, 5, 6, 12, 13, 15, 16, 28, 33, 35, 39, 43, 46, 47, 48, 52, 255, 257, 65_280];

#[test]
fn every_kind_of_answer_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let zones = [("varied.test", VARIED), ("child.varied.test", CHILD)];
    let Some(mut pair) = Pair::start(folder.path(), &zones) else { return };
    let names: Vec<&str> =
        include_str!("zones/varied.names").lines().filter(|line| !line.is_empty()).collect();
    assert!(names.len() > 50);
    for name in &names {
        let name = Name::from_text(name).unwrap();
        for rtype in TYPES {
            for edns_bytes in EDNS_SIZES {
                pair.ask_question(&Question { name: name.clone(), rtype }, edns_bytes);
            }
        }
    }
    assert!(pair.asked > 5000, "{}", pair.asked);
    pair.assert_same();
}

#[test]
fn a_synthetic_zone_is_the_same() {
    let zone = SyntheticZone { origin: "lab.test".into(), names: 3000, seed: 11 };
    let mut text = Vec::new();
    zone.write_zone(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let Some(mut pair) = Pair::start(folder.path(), &[("lab.test", &text)]) else { return };
    for index in 0..9000 {
        let edns_bytes = EDNS_SIZES[index as usize % EDNS_SIZES.len()];
        pair.ask_question(&zone.question(index), edns_bytes);
    }
    pair.assert_same();
}

/// Queries that are not everyday ones: what to refuse is clear, too.
#[test]
fn odd_queries_are_refused_in_the_same_way() {
    let folder = tempfile::tempdir().unwrap();
    let zones = [("varied.test", VARIED), ("child.varied.test", CHILD)];
    let Some(mut pair) = Pair::start(folder.path(), &zones) else { return };
    let www = Question { name: Name::from_text("www.varied.test").unwrap(), rtype: 1 };
    let plain = www.to_message(7, None);
    let with_edns = www.to_message(7, Some(1232));
    let change = |message: &[u8], at: usize, value: u8| {
        let mut message = message.to_vec();
        message[at] = value;
        message
    };
    let opt_at = plain.len();
    let two_opts = [&with_edns[..], &with_edns[opt_at..]].concat();
    let cases = [
        ("EDNS version 1", change(&with_edns, opt_at + 6, 1)),
        ("EDNS version 255", change(&with_edns, opt_at + 6, 255)),
        ("two OPT records", change(&two_opts, 11, 2)),
        ("no question", change(&plain[..12], 5, 0)),
        ("two questions", change(&plain, 5, 2)),
        ("an answer in a query", change(&plain, 7, 1)),
        ("a question cut short", plain[..20].to_vec()),
        ("a pointer to itself", [&plain[..12], &[0xc0, 12, 0, 1, 0, 1]].concat()),
        ("a label of 64 octets", change(&plain, 12, 64)),
        ("opcode status", change(&plain, 2, 2 << 3)),
        ("opcode 3", change(&plain, 2, 3 << 3)),
        ("opcode update", change(&plain, 2, 5 << 3)),
        ("opcode 15", change(&plain, 2, 15 << 3)),
        ("class CH", change(&plain, opt_at - 1, 3)),
        ("class NONE", change(&plain, opt_at - 1, 254)),
        ("RD and CD set", change(&change(&plain, 2, 1), 3, 0x10)),
    ];
    for (what, message) in cases {
        // Once in each family.
        pair.ask(what, &message);
        pair.ask(what, &message);
    }
    pair.assert_same();
}
