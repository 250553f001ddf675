//! A router between two kernel hosts, tried with the kernel's own tools.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Stdio};

use serde_json::Value;
use support::{have, is_root, tidegate};
use tidegate_lab::router::{
    LEFT_V4, LEFT_V6, RIGHT_V4, RIGHT_V6, ROUTER_LEFT, ROUTER_RIGHT, RouterSite,
};

/// A running `tidegate route` or `tidegate screen`, killed on drop.
struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Running {
    fn start(site: &RouterSite, arguments: &[&str]) -> Self {
        let mut command = site.router.command(env!("CARGO_BIN_EXE_tidegate"));
        command.args(arguments).arg("--json").stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert!(line.starts_with("ready: "), "it said {line:?}");
        Self { child, output }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn stop(mut self) -> Value {
        self.signal(rustix::process::Signal::TERM);
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        assert!(self.child.wait().unwrap().success());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // After `stop` it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn route(site: &RouterSite, kind: &str, more: &[&str]) -> Running {
    let ports = site.port_flags(kind);
    let mut arguments = vec!["route"];
    arguments.extend(ports.iter().map(String::as_str));
    arguments.extend(more);
    Running::start(site, &arguments)
}

/// What a tool on the left host prints, however it ends.
fn left(site: &RouterSite, program: &str, arguments: &[&str]) -> String {
    let output = site.left.namespace.command(program).args(arguments).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    stdout + &String::from_utf8_lossy(&output.stderr)
}

fn ping(site: &RouterSite, to: &str, more: &[&str]) -> String {
    let mut arguments = vec!["-c", "2", "-i", "0.05", "-W", "5"];
    arguments.extend(more);
    arguments.push(to);
    left(site, "ping", &arguments)
}

#[track_caller]
fn pings(site: &RouterSite, to: &str, more: &[&str]) {
    let output = ping(site, to, more);
    assert!(output.contains(" 0% packet loss"), "{output}");
}

/// The ports, and how they are driven.
#[cfg(not(feature = "dpdk"))]
const WAYS: [(&str, &[&str]); 4] = [
    ("packet", &["--mode", "polled"]),
    ("packet", &["--mode", "interrupt"]),
    ("xdp", &["--mode", "polled", "--quota", "10"]),
    ("xdp", &["--mode", "interrupt"]),
];

/// Those that a program with DPDK has beyond them.
#[cfg(feature = "dpdk")]
const WAYS: [(&str, &[&str]); 2] =
    [("dpdk", &["--mode", "polled"]), ("dpdk", &["--mode", "interrupt"])];

/// Whether fragments of IPv4 come through. DPDK's driver has the kernel put them
/// together, for a buffer that is one frame long.
const HAS_IPV4_FRAGMENTS: bool = cfg!(not(feature = "dpdk"));

fn everywhere(test: &str, programs: &[&str], check: impl Fn(&RouterSite)) {
    if !is_root(test) || !have(test, programs) {
        return;
    }
    for (kind, flags) in WAYS {
        eprintln!("{test} on {kind} {flags:?}");
        let site = RouterSite::new().unwrap();
        let router = route(&site, kind, flags);
        check(&site);
        let report = router.stop();
        assert!(report["drops"].get("udp_checksum").is_none(), "{report}");
    }
}

#[test]
fn hosts_reach_each_other_and_the_router() {
    everywhere("ping", &["ping"], |site| {
        for to in [RIGHT_V4, RIGHT_V6] {
            pings(site, to, &[]);
            pings(site, to, &["-s", "1400"]);
        }
        for to in ROUTER_LEFT.into_iter().chain(ROUTER_RIGHT) {
            pings(site, to, &[]);
        }
        // In fragments.
        if HAS_IPV4_FRAGMENTS {
            pings(site, RIGHT_V4, &["-s", "4000"]);
        }
        pings(site, RIGHT_V6, &["-s", "4000"]);
    });
}

#[test]
fn traceroute_shows_the_router() {
    everywhere("traceroute", &["traceroute"], |site| {
        for (to, router) in [(RIGHT_V4, ROUTER_LEFT[0]), (RIGHT_V6, ROUTER_LEFT[1])] {
            let output = left(site, "traceroute", &["-n", "-q", "1", "-m", "4", "-w", "5", to]);
            let hops: Vec<_> = output.lines().skip(1).collect();
            assert_eq!(hops.len(), 2, "{output}");
            assert!(hops[0].contains(router) && hops[1].contains(to), "{output}");
        }
    });
}

#[test]
fn what_is_unreachable_is_told() {
    everywhere("unreachable", &["ping"], |site| {
        let nowhere = ping(site, "192.0.2.1", &[]);
        assert!(nowhere.contains("Net Unreachable"), "{nowhere}");
        let nowhere = ping(site, "2001:db8::1", &[]);
        assert!(nowhere.contains("No route"), "{nowhere}");
        // After three questions, a second apart.
        let silent = ping(site, "10.7.2.99", &["-w", "6"]);
        assert!(silent.contains("Host Unreachable"), "{silent}");
        let silent = ping(site, "fd07:2::99", &["-w", "6"]);
        assert!(silent.contains("Address unreachable"), "{silent}");
    });
}

/// The right link carries less than the left one: the sender learns by how
/// much, and IPv4 without the flag is cut.
#[test]
fn the_path_mtu_is_found() {
    if !is_root("mtu") || !have("mtu", &["ping", "ip"]) {
        return;
    }
    for kind in ["packet", "xdp"] {
        let site = RouterSite::new().unwrap();
        site.router.ip(&["link", "set", &site.right_device, "mtu", "1300"]).unwrap();
        site.right.namespace.ip(&["link", "set", &site.right.device, "mtu", "1300"]).unwrap();
        let router = route(&site, kind, &[]);
        let told = ping(&site, RIGHT_V4, &["-M", "do", "-s", "1400"]);
        assert!(told.contains("mtu = 1300") || told.contains("mtu=1300"), "{told}");
        let path = site.left.namespace.ip(&["route", "get", RIGHT_V4]).unwrap();
        assert!(path.contains("mtu 1300"), "{path}");
        pings(&site, RIGHT_V4, &["-M", "do", "-s", "1272"]);
        // The first is lost on finding out.
        ping(&site, RIGHT_V6, &["-s", "1400"]);
        let path = site.left.namespace.ip(&["route", "get", RIGHT_V6]).unwrap();
        assert!(path.contains("mtu 1300"), "{path}");
        pings(&site, RIGHT_V6, &["-s", "1400"]);
        // A host that does not ask for the path's MTU.
        site.left.namespace.ip(&["route", "flush", "cache"]).unwrap();
        pings(&site, RIGHT_V4, &["-M", "dont", "-s", "1400"]);
        drop(router);
    }
}

#[test]
fn tcp_and_udp_go_through_whole() {
    everywhere("transport", &[], |site| {
        for (here, there) in [(LEFT_V4, RIGHT_V4), (LEFT_V6, RIGHT_V6)] {
            let sent: Vec<u8> = (0..2_000_000_u32).map(|n| (n * 7 / 3) as u8).collect();
            let listener = site.right.namespace.enter(|| std::net::TcpListener::bind((there, 0)));
            let listener = listener.unwrap().unwrap();
            let address = listener.local_addr().unwrap();
            let received = std::thread::scope(|scope| {
                let server = scope.spawn(|| {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut bytes = Vec::new();
                    stream.read_to_end(&mut bytes).unwrap();
                    bytes
                });
                site.left
                    .namespace
                    .enter(|| {
                        let mut stream = std::net::TcpStream::connect(address).unwrap();
                        std::io::Write::write_all(&mut stream, &sent).unwrap();
                    })
                    .unwrap();
                server.join().unwrap()
            });
            assert!(received == sent, "{} of {} bytes", received.len(), sent.len());

            let socket = |site: &tidegate_lab::netns::End, address: &str| {
                let bound = site.namespace.enter(|| std::net::UdpSocket::bind((address, 0)));
                let socket = bound.unwrap().unwrap();
                socket.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
                socket
            };
            let (a, b) = (socket(&site.left, here), socket(&site.right, there));
            for bytes in [0, 1, 100, 1400, 1472, 3000] {
                if bytes > 1472 && here == LEFT_V4 && !HAS_IPV4_FRAGMENTS {
                    continue;
                }
                let datagram = &sent[..bytes];
                a.send_to(datagram, b.local_addr().unwrap()).unwrap();
                let mut buffer = [0; 4000];
                let (len, from) = b.recv_from(&mut buffer).unwrap();
                assert_eq!((&buffer[..len], from), (datagram, a.local_addr().unwrap()));
            }
        }
    });
}

const RULES: &str = "
default = 'deny'
[[rule]]
action = 'deny'
protocol = 'icmp'
destination = '10.7.2.99'
[[rule]]
action = 'allow'
protocol = 'icmp'
[[rule]]
action = 'allow'
protocol = 'tcp'
";

struct ScreenSite {
    site: RouterSite,
    folder: tempfile::TempDir,
}

impl ScreenSite {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("rules"), RULES).unwrap();
        Self { site: RouterSite::new().unwrap(), folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn screen(&self) -> Running {
        let (rules, listen) = (self.path("rules"), self.path("screen"));
        Running::start(&self.site, &["screen", "--rules", &rules, "--listen", &listen])
    }

    fn route(&self, kind: &str, more: &[&str]) -> Running {
        let path = self.path("screen");
        let mut flags = vec!["--screen", &path];
        flags.extend(more);
        route(&self.site, kind, &flags)
    }
}

#[test]
fn a_screen_decides_what_passes() {
    if !is_root("screen") || !have("screen", &["ping"]) {
        return;
    }
    for (kind, flags) in WAYS {
        let both = ScreenSite::new();
        let screen = both.screen();
        let router = both.route(kind, flags);
        for to in [RIGHT_V4, RIGHT_V6] {
            pings(&both.site, to, &[]);
        }
        let refused = ping(&both.site, "10.7.2.99", &["-W", "1"]);
        assert!(refused.contains("100% packet loss"), "{refused}");
        let report = router.stop();
        assert_eq!(report["drops"]["screen_refused"], 2, "{report}");
        assert_eq!(report["screen"]["refused"], 2, "{report}");
        let said = screen.stop();
        assert_eq!((&said["passed"], &said["refused"]), (&report["screen"]["passed"], &2.into()));
    }
}

/// Nothing passes unjudged: not while the screen is missing, dead or stopped.
/// It comes back and all is well.
#[test]
fn a_screen_that_is_gone_lets_nothing_pass_and_may_come_back() {
    if !is_root("screen_gone") || !have("screen_gone", &["ping"]) {
        return;
    }
    for (kind, flags) in WAYS {
        let both = ScreenSite::new();
        let router = both.route(kind, flags);
        let lost = |what: &str| {
            let output = ping(&both.site, RIGHT_V4, &["-W", "1"]);
            assert!(output.contains("100% packet loss"), "{what}: {output}");
            // The router itself still answers.
            pings(&both.site, ROUTER_LEFT[0], &[]);
        };
        lost("no screen yet");
        let mut screen = both.screen();
        ping(&both.site, RIGHT_V4, &["-W", "1"]);
        pings(&both.site, RIGHT_V4, &[]);
        screen.signal(rustix::process::Signal::STOP);
        lost("stopped");
        screen.signal(rustix::process::Signal::CONT);
        pings(&both.site, RIGHT_V4, &[]);
        screen.child.kill().unwrap();
        screen.child.wait().unwrap();
        lost("killed");
        let again = both.screen();
        ping(&both.site, RIGHT_V4, &["-W", "1"]);
        pings(&both.site, RIGHT_V4, &[]);
        drop(again);
        let report = router.stop();
        assert!(report["drops"]["screen_gone"].as_u64() >= Some(2), "{report}");
        assert_eq!(report["screen"]["connections"], 2, "{report}");
    }
}

/// A screen that is killed in the middle of a flow, and its successor: the flow
/// goes on, and nobody gets a byte that was not sent.
#[test]
fn a_flow_survives_the_death_of_the_screen() {
    if !is_root("screen_death") {
        return;
    }
    for (kind, flags) in WAYS {
        let both = ScreenSite::new();
        let mut screen = both.screen();
        let router = both.route(kind, flags);
        for (there, seed) in [(RIGHT_V4, 3), (RIGHT_V6, 5)] {
            let sent: Vec<u8> = (0..600_000_u32).map(|n| (n * seed / 7) as u8).collect();
            let bind = || std::net::TcpListener::bind((there, 0));
            let listener = both.site.right.namespace.enter(bind).unwrap().unwrap();
            let address = listener.local_addr().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let send = || {
                        let mut stream = std::net::TcpStream::connect(address).unwrap();
                        std::io::Write::write_all(&mut stream, &sent).unwrap();
                    };
                    both.site.left.namespace.enter(send).unwrap();
                });
                let (mut stream, _) = listener.accept().unwrap();
                let mut received = vec![0; sent.len() / 4];
                stream.read_exact(&mut received).unwrap();
                screen.child.kill().unwrap();
                screen.child.wait().unwrap();
                screen = both.screen();
                stream.read_to_end(&mut received).unwrap();
                assert!(received == sent, "{} of {} bytes", received.len(), sent.len());
            });
        }
        drop(screen);
        let report = router.stop();
        assert_eq!(report["screen"]["connections"], 3, "{report}");
    }
}

/// Listens where the router looks for its screen, and answers its first
/// connection with garbage until told to stop: verdicts about packets that do
/// not exist, about real ones without "pass", messages of every length, more
/// than anybody can read.
fn hostile_screen(path: &str, stop: &std::sync::atomic::AtomicBool) {
    use rustix::net::*;
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let listener = socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&listener, 1).unwrap();
    let router = accept(&listener).unwrap();
    std::fs::remove_file(path).unwrap();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let (mut request, mut garbage) = ([0; 4096], Vec::new());
    let mut state = 1_u32;
    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
        while let Ok((len @ 4.., _)) = recv(&router, &mut request[..], RecvFlags::DONTWAIT) {
            // Its number, and anything but "pass".
            garbage.extend(&request[..4]);
            garbage.push(2 + (len % 200) as u8);
        }
        for _ in 0..state % 40 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // No packet of this test has a number as high as these.
            garbage.extend((state | 0xff00_0000).to_ne_bytes());
            garbage.push(1);
        }
        garbage.extend(&request[..state as usize % 5]);
        if !garbage.is_empty() {
            // What does not go through is lost, as with any garbage.
            let _ = send(&router, &garbage, flags);
        }
        garbage.clear();
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    }
}

#[test]
fn a_hostile_screen_passes_nothing_and_stops_nothing() {
    if !is_root("screen_hostile") || !have("screen_hostile", &["ping"]) {
        return;
    }
    for (kind, flags) in WAYS {
        let both = ScreenSite::new();
        let router = both.route(kind, flags);
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let hostile = scope.spawn(|| hostile_screen(&both.path("screen"), &stop));
            // The first packets make the router look for its screen.
            let found = || !std::fs::exists(both.path("screen")).unwrap();
            ping(&both.site, RIGHT_V4, &["-W", "1"]);
            while !found() && !hostile.is_finished() {
                ping(&both.site, RIGHT_V4, &["-W", "1"]);
            }
            for (to, own) in [(RIGHT_V4, ROUTER_LEFT[0]), (RIGHT_V6, ROUTER_LEFT[1])] {
                let lost = ping(&both.site, to, &["-W", "1"]);
                assert!(lost.contains("100% packet loss"), "{lost}");
                pings(&both.site, own, &[]);
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        let screen = both.screen();
        // The router looks for the new one when packets come, not for each.
        let answered = |_| ping(&both.site, RIGHT_V4, &["-W", "1"]).contains(" 0% packet loss");
        assert!((0..50).any(answered), "the router did not come back to its screen");
        let report = router.stop();
        let said = screen.stop();
        assert_eq!(report["screen"]["passed"], said["passed"], "{report}");
        assert!(report["screen"]["stray"].as_u64() > Some(0), "{report}");
        // A verdict may be among the garbage that did not go through.
        assert!(report["screen"]["refused"].as_u64() > Some(0), "{report}");
    }
}

#[test]
fn a_router_leaves_nothing_behind() {
    if !is_root("route_gone") {
        return;
    }
    let site = RouterSite::new().unwrap();
    let mut router = route(&site, "xdp", &[]);
    router.child.kill().unwrap();
    router.child.wait().unwrap();
    for device in [&site.left_device, &site.right_device] {
        let link = site.router.ip(&["link", "show", device]).unwrap();
        assert!(!link.contains("xdp"), "left attached: {link}");
    }
    // And the interfaces can be served again at once.
    let router = route(&site, "xdp", &[]);
    pings(&site, ROUTER_LEFT[0], &[]);
    drop(router);
}

#[test]
fn wrong_settings_are_told() {
    let fails_with = |arguments: &[&str], parts: &[&str]| {
        let output = tidegate(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && !error.contains("panicked"), "{error}");
        for part in parts {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
    };
    let two = ["--port", "xdp:nope0,10.0.0.1/24", "--port", "xdp:nope1,10.0.1.1/24"];
    let with = |more: &[&'static str]| [&["route"][..], &two, more].concat();
    fails_with(&["route"], &["two ports", "--port"]);
    fails_with(&with(&[]), &["nope0"]);
    fails_with(&with(&["--quota", "0"]), &["receive-quota is 0"]);
    fails_with(&with(&["--quota", "some"]), &["unlimited"]);
    fails_with(&with(&["--cpu-share", "0"]), &["cpu-share-percent"]);
    fails_with(&with(&["--cpu-share", "50", "--mode", "interrupt"]), &["polled"]);
    fails_with(&with(&["--route", "0.0.0.0/0=192.0.2.1"]), &["192.0.2.1", "no network"]);
    fails_with(&["route", "--port", "eth0"], &["KIND:INTERFACE"]);
    fails_with(&["screen", "--rules", "no-such", "--listen", "/tmp/x"], &["no-such"]);
    let folder = tempfile::tempdir().unwrap();
    let rules = folder.path().join("rules.toml");
    let rules = rules.to_str().unwrap();
    let rule = "default = 'deny'\n\n[[rule]]\naction = 'allow'\n";
    for (text, parts) in [
        ("default = 'deny'\n[[rule]\n".to_owned(), ["line 2", "]"]),
        (format!("{rule}sauce = '10.0.0.1'\n"), ["line 5", "sauce"]),
        (format!("{rule}source = '10.0.0.1/40'\n"), ["line 5", "10.0.0.1/40"]),
        (format!("{rule}destination-port = '9-5'\n"), ["line 5", "above the last"]),
        (
            format!("{rule}protocol = 'icmp'\nsource-port = 5\n"),
            ["rule 1 at line 3", "leave the ports out"],
        ),
        ("[[rule]]\naction = 'allow'\n".to_owned(), ["default", "missing"]),
    ] {
        std::fs::write(rules, text).unwrap();
        let arguments = ["screen", "--rules", rules, "--listen", "/tmp/x"];
        fails_with(&arguments, &["rules.toml", parts[0], parts[1]]);
    }
    let path = folder.path().join("route.toml");
    std::fs::write(&path, "[router]\nprot = []\n").unwrap();
    fails_with(&["route", "--config", path.to_str().unwrap()], &["route.toml", "prot"]);
    std::fs::write(&path, "[gate]\nlow-mark-percent = 80\n").unwrap();
    fails_with(&["route", "--config", path.to_str().unwrap()], &["low mark"]);
}
