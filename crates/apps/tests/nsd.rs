//! Compares the DNS server with NSD: same zones, same queries, equivalent responses.

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
use tidegate_apps::dns::{
    CookieSecret, DnsConfig, DnsServer, Name, ServerIdentity, ZoneSource, compare,
};
use tidegate_apps::kernel::{KernelOptions, KernelSocket, serve_kernel};

const LOOPBACKS: [&str; 2] = ["127.0.0.1", "::1"];

/// Time limit for starting a server on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Zone with every kind of record and name that a lookup can meet.
const VARIED_ZONE: &str = include_str!("zones/varied.zone");
/// Zone with each record type that the scanner of the crate `domain` does not know, and the file
/// that the zone includes.
const TYPES_ZONE: &str = include_str!("zones/types.zone");
const TYPES_INCLUDED: &str = include_str!("zones/types.included");

/// Cookie secret of both servers.
const COOKIE_SECRET: &str = "e5e973e5a6b2a43f48e7dc849e37bfcf";

/// Child zone of the varied zone, served by the same server.
const CHILD_ZONE: &str = include_str!("zones/child.varied.zone");

/// NSD on loopback; terminated when dropped.
struct Nsd {
    process: Child,
    port: u16,
}

impl Drop for Nsd {
    fn drop(&mut self) {
        // On SIGTERM NSD terminates its children too; SIGKILL would orphan them.
        let pid = self.process.id().to_string();
        if Command::new("kill").arg(&pid).status().is_ok_and(|status| status.success()) {
            let _ = self.process.wait();
        }
    }
}

impl Nsd {
    /// Starts NSD; returns `None` when NSD is not installed.
    fn start(folder: &Path, zones: &[(&str, &Path)]) -> Option<Nsd> {
        let port = free_port();
        let path_of = |name: &str| folder.join(name).display().to_string();
        let mut text = format!(
            "server:\n ip-address: 127.0.0.1@{port}\n ip-address: ::1@{port}\n server-count: 1\n \
             username: \"\"\n chroot: \"\"\n zonesdir: \"{}\"\n database: \"\"\n \
             zonelistfile: \"{}\"\n pidfile: \"{}\"\n xfrdfile: \"{}\"\n xfrdir: \"{}\"\n \
             logfile: \"{}\"\n refuse-any: no\n rrl-ratelimit: 0\n rrl-whitelist-ratelimit: 0\n \
             identity: \"ns1.lab\"\n nsid: \"ascii_ns1.lab\"\n version: \"tidegate 1\"\n \
             answer-cookie: yes\n cookie-secret: \"{COOKIE_SECRET}\"\n\
             remote-control:\n control-enable: no\n",
            folder.display(),
            path_of("zone.list"),
            path_of("nsd.pid"),
            path_of("xfrd.state"),
            folder.display(),
            path_of("nsd.log"),
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
        nsd.wait_until_ready(folder);
        Some(nsd)
    }

    fn wait_until_ready(&mut self, folder: &Path) {
        let probe = Question { name: Name::root(), rtype: 6 }.to_message(1, None);
        for loopback in LOOPBACKS {
            let socket = connect(loopback, self.port, Duration::from_millis(50));
            let mut reply = [0; 512];
            let started = Instant::now();
            loop {
                if let Some(status) = self.process.try_wait().unwrap() {
                    panic!("nsd exited with {status}: {}", read_log(folder));
                }
                // Until NSD listens, the send or the receive fails at once with a refusal.
                if socket.send(&probe).is_ok() && socket.recv(&mut reply).is_ok() {
                    break;
                }
                let waited = started.elapsed();
                assert!(waited < START_LIMIT, "nsd does not answer: {}", read_log(folder));
                thread::yield_now();
            }
        }
    }
}

fn read_log(folder: &Path) -> String {
    fs::read_to_string(folder.join("nsd.log")).unwrap_or_default()
}

/// Port that is currently free for UDP and TCP in both address families.
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

/// Tidegate's DNS server on kernel sockets, in a thread.
struct TidegateServer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    ports: [u16; 2],
}

impl TidegateServer {
    fn start(mut server: DnsServer) -> TidegateServer {
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
        TidegateServer { stop, thread: Some(thread), ports }
    }
}

impl Drop for TidegateServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Both servers, with a socket to each in each address family.
struct ServerPair {
    nsd: [UdpSocket; 2],
    tidegate: [UdpSocket; 2],
    queries: usize,
    differences: Vec<String>,
    _servers: (Nsd, TidegateServer),
}

impl ServerPair {
    fn start(folder: &Path, zones: &[(&str, &str)]) -> Option<ServerPair> {
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
            tidegate_needs::skip("nsd", "nsd is not installed");
            return None;
        };
        let zones = files
            .iter()
            .map(|(origin, path)| ZoneSource {
                origin: Some((*origin).to_owned()),
                path: path.clone(),
            })
            .collect();
        let config = DnsConfig {
            zones,
            hash_seed: 42,
            cookie_secrets: vec![CookieSecret::from_hex(COOKIE_SECRET).unwrap()],
            identity: ServerIdentity::new(Some("tidegate 1"), Some("ns1.lab")).unwrap(),
            ..DnsConfig::default()
        };
        let tidegate = TidegateServer::start(DnsServer::load(&config).unwrap());
        let timeout = Duration::from_secs(10);
        Some(ServerPair {
            nsd: LOOPBACKS.map(|loopback| connect(loopback, nsd.port, timeout)),
            tidegate: [0, 1].map(|index| connect(LOOPBACKS[index], tidegate.ports[index], timeout)),
            queries: 0,
            differences: Vec::new(),
            _servers: (nsd, tidegate),
        })
    }

    /// Queries both servers, alternating between IPv4 and IPv6, and records a difference.
    fn compare_replies(&mut self, what: &str, message: &[u8]) {
        let [expected, got] = self.replies(what, message);
        if let Err(difference) = compare(&expected, &got) {
            self.differences.push(format!("{what}: {difference}"));
        }
    }

    /// Replies of NSD and of Tidegate, from IPv4 and IPv6 in turn.
    fn replies(&mut self, what: &str, message: &[u8]) -> [Vec<u8>; 2] {
        let family = self.queries % 2;
        self.queries += 1;
        let mut replies = [vec![0; 65_535], vec![0; 65_535]];
        for (socket, reply) in
            [&self.nsd[family], &self.tidegate[family]].into_iter().zip(&mut replies)
        {
            socket.send(message).unwrap();
            let len = socket.recv(reply).unwrap_or_else(|error| panic!("{what}: {error}"));
            reply.truncate(len);
        }
        replies
    }

    fn compare_question(&mut self, question: &Question, edns_bytes: Option<u16>) {
        let id = (self.queries as u16).wrapping_mul(40_503);
        let what = format!("{question} edns {edns_bytes:?}");
        self.compare_replies(&what, &question.to_message(id, edns_bytes));
    }

    fn assert_same_answers(&self) {
        let count = self.differences.len();
        let shown = self.differences.iter().take(40).cloned().collect::<Vec<_>>().join("\n");
        assert!(count == 0, "{count} of {} answers differ:\n{shown}", self.queries);
    }
}

const EDNS_SIZES: [Option<u16>; 6] =
    [None, Some(0), Some(512), Some(700), Some(1232), Some(65_535)];

const TYPES: [u16; 20] =
    [1, 2, 5, 6, 12, 13, 15, 16, 28, 33, 35, 39, 43, 46, 47, 48, 52, 255, 257, 65_280];

#[test]
fn answers_match_nsd_for_the_varied_zone() {
    let folder = tempfile::tempdir().unwrap();
    let zones = [("varied.test", VARIED_ZONE), ("child.varied.test", CHILD_ZONE)];
    let Some(mut pair) = ServerPair::start(folder.path(), &zones) else { return };
    let names: Vec<&str> =
        include_str!("zones/varied.names").lines().filter(|line| !line.is_empty()).collect();
    assert!(names.len() > 50);
    for name in &names {
        let name = Name::from_text(name).unwrap();
        for rtype in TYPES {
            for edns_bytes in EDNS_SIZES {
                pair.compare_question(&Question { name: name.clone(), rtype }, edns_bytes);
            }
        }
    }
    assert!(pair.queries > 5000, "{}", pair.queries);
    pair.assert_same_answers();
}

#[test]
fn answers_match_nsd_for_a_synthetic_zone() {
    let zone = SyntheticZone { origin: "lab.test".into(), name_count: 3000, seed: 11 };
    let mut text = Vec::new();
    zone.write_zone(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let Some(mut pair) = ServerPair::start(folder.path(), &[("lab.test", &text)]) else { return };
    for index in 0..9000 {
        let edns_bytes = EDNS_SIZES[index as usize % EDNS_SIZES.len()];
        pair.compare_question(&zone.question(index), edns_bytes);
    }
    pair.assert_same_answers();
}

/// Record types that few servers know, by number, with names that have them.
const RARE_TYPES: [(u16, &[&str]); 28] = [
    (11, &["wks"]),
    (18, &["afsdb"]),
    (19, &["x25"]),
    (20, &["isdn", "isdn1"]),
    (21, &["rt"]),
    (22, &["nsap"]),
    (24, &["sig"]),
    (25, &["key"]),
    (26, &["px"]),
    (29, &["loc", "loc1", "loc2", "generic"]),
    (30, &["nxt"]),
    (36, &["kx"]),
    (37, &["cert", "cert1"]),
    (42, &["apl"]),
    (49, &["dhcid"]),
    (53, &["smimea"]),
    (62, &["csync"]),
    (99, &["spf"]),
    (104, &["nid"]),
    (105, &["l32"]),
    (106, &["l64"]),
    (107, &["lp"]),
    (108, &["eui48", "generic"]),
    (109, &["eui64"]),
    (256, &["uri"]),
    (258, &["avc"]),
    (32769, &["dlv"]),
    (12345, &["generic"]),
];

#[test]
fn rare_record_types_are_answered_like_nsd() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("types.included"), TYPES_INCLUDED).unwrap();
    let Some(mut pair) = ServerPair::start(folder.path(), &[("types.test", TYPES_ZONE)]) else {
        return;
    };
    let plain = [(1, &["generic", "host.inc"][..]), (16, &["inc"])];
    for (rtype, names) in RARE_TYPES.into_iter().chain(plain) {
        for name in names {
            let name = Name::from_text(&format!("{name}.types.test")).unwrap();
            // Once in each address family.
            for edns_bytes in [None, Some(1232)] {
                let question = Question { name: name.clone(), rtype };
                let message = question.to_message(7, edns_bytes);
                let [expected, got] = pair.replies(&question.to_string(), &message);
                assert_eq!((got[3] & 15, got[6..8].to_vec()), (0, expected[6..8].to_vec()));
                assert_ne!(got[7], 0, "{question} has no answer");
                if let Err(difference) = compare(&expected, &got) {
                    pair.differences.push(format!("{question}: {difference}"));
                }
            }
        }
    }
    pair.assert_same_answers();
}

/// Servers of one address with one secret accept each other's cookies (RFC 9018), and tell
/// identity and version alike.
#[test]
fn cookies_and_identity_are_those_of_nsd() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut pair) = ServerPair::start(folder.path(), &[("varied.test", VARIED_ZONE)]) else {
        return;
    };
    let www = Question { name: Name::from_text("www.varied.test").unwrap(), rtype: 1 };
    let with_options = |options: &[u8]| {
        let mut message = www.to_message(7, Some(1232));
        let len_at = message.len() - 2;
        message[len_at..].copy_from_slice(&(options.len() as u16).to_be_bytes());
        message.extend_from_slice(options);
        message
    };
    for _family in 0..2 {
        let option = |reply: &[u8]| reply[reply.len() - 28..].to_vec();
        let new_client = with_options(b"\0\x0a\0\x08clientck");
        let [nsd, tidegate] = pair.replies("a new client", &new_client).map(|reply| option(&reply));
        assert_eq!(nsd[..16], tidegate[..16]);
        pair.queries -= 1;
        // Made within the same second, the cookies are equal; a little later both are valid.
        for cookie in [nsd, tidegate] {
            let replies = pair.replies("a known client", &with_options(&cookie));
            pair.queries -= 1;
            for reply in replies {
                assert_eq!(option(&reply), cookie);
            }
        }
        let replies = pair.replies("NSID", &with_options(b"\0\x03\0\0"));
        pair.queries -= 1;
        assert!(replies.iter().all(|reply| reply.ends_with(b"\0\x03\0\x07ns1.lab")));
        pair.compare_replies("a malformed cookie", &with_options(b"\0\x0a\0\x03abc"));
    }
    for name in ["version.bind", "version.server", "id.server", "hostname.bind", "authors.bind"] {
        for rtype in [16, 255, 1] {
            let question = Question { name: Name::from_text(name).unwrap(), rtype };
            let mut message = question.to_message(7, None);
            *message.last_mut().unwrap() = 3;
            pair.compare_replies(&format!("{question} in CH"), &message);
            pair.compare_replies(&format!("{question} in CH"), &message);
        }
    }
    pair.assert_same_answers();
}

/// Unusual and malformed queries: both servers respond alike.
#[test]
fn odd_queries_are_answered_like_nsd() {
    let folder = tempfile::tempdir().unwrap();
    let zones = [("varied.test", VARIED_ZONE), ("child.varied.test", CHILD_ZONE)];
    let Some(mut pair) = ServerPair::start(folder.path(), &zones) else { return };
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
        // Once in each address family.
        pair.compare_replies(what, &message);
        pair.compare_replies(what, &message);
    }
    pair.assert_same_answers();
}
