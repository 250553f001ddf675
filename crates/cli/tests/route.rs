//! A router between two kernel hosts, tested with standard network tools.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, UdpSocket};
use std::process::{Child, ChildStdout, Stdio};
use std::time::Duration;

use serde_json::Value;
use support::{has_programs, is_root, tidegate};
use tidegate_lab::experiments::mogul::router::{
    LEFT_V4, LEFT_V6, RIGHT_V4, RIGHT_V6, ROUTER_LEFT, ROUTER_RIGHT, RouterTestbed,
};

/// A running `tidegate route` or `tidegate filter`, killed on drop.
struct RunningCommand {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl RunningCommand {
    fn start(testbed: &RouterTestbed, arguments: &[&str]) -> Self {
        let mut command = testbed.router.command(env!("CARGO_BIN_EXE_tidegate"));
        command.args(arguments).arg("--json").stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert!(line.starts_with("ready: "), "the command printed {line:?}");
        Self { child, output }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Stops the process until it gets the signal `CONT`; returns when it has stopped.
    fn pause(&self) {
        use rustix::process::{Pid, Signal, WaitOptions, waitpid};
        self.signal(Signal::STOP);
        let pid = Pid::from_child(&self.child);
        let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap().1;
        assert!(stopped.stopped(), "{stopped:?}");
    }

    fn stop(mut self) -> Value {
        self.signal(rustix::process::Signal::TERM);
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        assert!(self.child.wait().unwrap().success());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}"))
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        // `stop` has ended the process already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn route(testbed: &RouterTestbed, kind: &str, more: &[&str]) -> RunningCommand {
    let mut io_flags = testbed.device_flags(kind);
    if more.contains(&"--cores") {
        // DPDK's driver opens as many sockets as it is told.
        io_flags = io_flags.map(|flag| flag.replace(",iface=", ",qpairs=2,iface="));
    }
    let mut arguments = vec!["route"];
    arguments.extend(io_flags.iter().map(String::as_str));
    arguments.extend(more);
    RunningCommand::start(testbed, &arguments)
}

/// Output of a tool on the left host; the exit status is ignored.
fn run_on_left_host(testbed: &RouterTestbed, program: &str, arguments: &[&str]) -> String {
    let output = testbed.left.namespace.command(program).args(arguments).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    stdout + &String::from_utf8_lossy(&output.stderr)
}

fn ping(testbed: &RouterTestbed, to: &str, more: &[&str]) -> String {
    let mut arguments = vec!["-c", "2", "-i", "0.05", "-W", "5"];
    arguments.extend(more);
    arguments.push(to);
    run_on_left_host(testbed, "ping", &arguments)
}

#[track_caller]
fn assert_reachable(testbed: &RouterTestbed, to: &str, more: &[&str]) {
    let output = ping(testbed, to, more);
    assert!(output.contains(" 0% packet loss"), "{output}");
}

/// Device kinds of the router, each with the flags of a receive mode.
const DEVICES_AND_MODES: &[(&str, &[&str])] = &[
    ("packet", &["--mode", "polled"]),
    ("packet", &["--mode", "interrupt"]),
    ("xdp", &["--mode", "polled", "--quota", "10"]),
    ("xdp", &["--mode", "interrupt"]),
    #[cfg(feature = "dpdk")]
    ("dpdk", &["--mode", "polled"]),
    #[cfg(feature = "dpdk")]
    ("dpdk", &["--mode", "interrupt"]),
];

/// Each kind of device once.
const DEVICES: &[(&str, &[&str])] = &[
    ("packet", &["--mode", "polled"]),
    ("xdp", &["--mode", "interrupt"]),
    #[cfg(feature = "dpdk")]
    ("dpdk", &["--mode", "polled"]),
];

/// Devices that several network cores share. A packet socket for each core needs no queues.
const SHARED_DEVICES: &[(&str, &[&str])] = &[
    ("packet", &["--cores", "3"]),
    ("xdp", &["--cores", "2"]),
    #[cfg(feature = "dpdk")]
    ("dpdk", &["--cores", "2"]),
];

/// True if IPv4 fragments are forwarded. With DPDK's driver the kernel reassembles them, for
/// a buffer one frame long.
fn has_ipv4_fragments(kind: &str) -> bool {
    kind != "dpdk"
}

/// Testbed with veth pairs as Linux makes them, of two queues. DPDK's AF_PACKET driver does not learn the state of
/// checksums.
fn new_testbed(kind: &str) -> RouterTestbed {
    match kind {
        "dpdk" => RouterTestbed::as_on_a_wire().unwrap(),
        _ => RouterTestbed::with_queues(2).unwrap(),
    }
}

/// Calls `check` with a router on each kind of device.
fn on_every_device(test: &str, programs: &[&str], check: impl Fn(&RouterTestbed, &str)) {
    if !is_root(test) || !has_programs(test, programs) {
        return;
    }
    for (kind, flags) in DEVICES_AND_MODES.iter().chain(SHARED_DEVICES) {
        eprintln!("{test} on {kind} {flags:?}");
        let testbed = new_testbed(kind);
        let router = route(&testbed, kind, flags);
        check(&testbed, kind);
        let report = router.stop();
        assert!(report["drops"].get("udp_checksum").is_none(), "{report}");
    }
}

#[test]
fn hosts_reach_each_other_and_the_router() {
    on_every_device("ping", &["ping"], |testbed, kind| {
        for to in [RIGHT_V4, RIGHT_V6] {
            assert_reachable(testbed, to, &[]);
            assert_reachable(testbed, to, &["-s", "1400"]);
        }
        for to in ROUTER_LEFT.into_iter().chain(ROUTER_RIGHT) {
            assert_reachable(testbed, to, &[]);
        }
        // Fragmented.
        if has_ipv4_fragments(kind) {
            assert_reachable(testbed, RIGHT_V4, &["-s", "4000"]);
        }
        assert_reachable(testbed, RIGHT_V6, &["-s", "4000"]);
    });
}

/// The flows are divided among the network cores, which learn of neighbours together.
#[test]
fn each_network_core_forwards() {
    const FLOWS: u64 = 64;
    if !is_root("router's network cores") {
        return;
    }
    for &(kind, flags) in SHARED_DEVICES {
        let testbed = new_testbed(kind);
        let router = route(&testbed, kind, &[flags, &["--core-cpus", "1,0"]].concat());
        for (to, any) in [(RIGHT_V4, "0.0.0.0:0"), (RIGHT_V6, "[::]:0")] {
            let at = SocketAddr::new(to.parse().unwrap(), 7);
            let host = || UdpSocket::bind(at).unwrap();
            let echo = testbed.right.namespace.enter(host).unwrap();
            echo.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let exchange = || {
                for number in 0..FLOWS {
                    let socket = UdpSocket::bind(any).unwrap();
                    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                    socket.send_to(&number.to_be_bytes(), at).unwrap();
                    let mut bytes = [0; 16];
                    let (len, from) = echo.recv_from(&mut bytes).unwrap();
                    echo.send_to(&bytes[..len], from).unwrap();
                    assert_eq!(socket.recv(&mut bytes).unwrap(), 8);
                    assert_eq!(bytes[..8], number.to_be_bytes());
                }
            };
            testbed.left.namespace.enter(exchange).unwrap();
        }
        let report = router.stop();
        let forwarded: u64 =
            (0..2).map(|at| report["ports"][at]["forwarded"].as_u64().unwrap()).sum();
        // Twice the number of flows by each family; a packet sent twice would be one too many.
        assert_eq!(forwarded, 4 * FLOWS, "{report}");
        for core in report["cores"].as_array().unwrap() {
            assert!(core["received"].as_u64() > Some(FLOWS / 4), "{report}");
        }
    }
}

#[test]
fn several_network_cores_need_as_many_queues_and_no_filter() {
    if !is_root("router's queues") {
        return;
    }
    let testbed = RouterTestbed::with_queues(2).unwrap();
    for (kind, flags, words) in [
        ("xdp", &["--cores", "3"][..], "receive queues for 2 network cores, not for 3"),
        ("packet", &["--cores", "2", "--filter", "/nonexistent"], "omit --filter"),
        ("packet", &["--cores", "65"], "give 1 to 64"),
        #[cfg(feature = "dpdk")]
        ("dpdk", &["--cores", "2"], "receive queues for 1 network cores, not for 2"),
    ] {
        let mut command = testbed.router.command(env!("CARGO_BIN_EXE_tidegate"));
        let output = command.arg("route").args(testbed.device_flags(kind)).args(flags).output();
        let output = output.unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(words), "{error}");
    }
}

#[test]
fn traceroute_shows_the_router() {
    on_every_device("traceroute", &["traceroute"], |testbed, _| {
        for (to, router) in [(RIGHT_V4, ROUTER_LEFT[0]), (RIGHT_V6, ROUTER_LEFT[1])] {
            let output = run_on_left_host(
                testbed,
                "traceroute",
                &["-n", "-q", "1", "-m", "4", "-w", "5", to],
            );
            let hops: Vec<_> = output.lines().skip(1).collect();
            assert_eq!(hops.len(), 2, "{output}");
            assert!(hops[0].contains(router) && hops[1].contains(to), "{output}");
        }
    });
}

#[test]
fn reports_unreachable_destinations() {
    on_every_device("unreachable", &["ping"], |testbed, _| {
        let nowhere = ping(testbed, "192.0.2.1", &[]);
        assert!(nowhere.contains("Net Unreachable"), "{nowhere}");
        let nowhere = ping(testbed, "2001:db8::1", &[]);
        assert!(nowhere.contains("No route"), "{nowhere}");
        // After three solicitations, one second apart.
        let silent = ping(testbed, "10.7.2.99", &["-w", "6"]);
        assert!(silent.contains("Host Unreachable"), "{silent}");
        let silent = ping(testbed, "fd07:2::99", &["-w", "6"]);
        assert!(silent.contains("Address unreachable"), "{silent}");
    });
}

/// The MTU of the right link is smaller than that of the left link: the sender learns the path
/// MTU, and IPv4 packets without DF are fragmented.
#[test]
fn sender_learns_the_path_mtu() {
    if !is_root("mtu") || !has_programs("mtu", &["ping", "ip"]) {
        return;
    }
    for kind in ["packet", "xdp"] {
        let testbed = new_testbed(kind);
        testbed.router.ip(&["link", "set", &testbed.right_device, "mtu", "1300"]).unwrap();
        testbed.right.namespace.ip(&["link", "set", &testbed.right.device, "mtu", "1300"]).unwrap();
        let router = route(&testbed, kind, &[]);
        let output = ping(&testbed, RIGHT_V4, &["-M", "do", "-s", "1400"]);
        assert!(output.contains("mtu = 1300") || output.contains("mtu=1300"), "{output}");
        let path = testbed.left.namespace.ip(&["route", "get", RIGHT_V4]).unwrap();
        assert!(path.contains("mtu 1300"), "{path}");
        assert_reachable(&testbed, RIGHT_V4, &["-M", "do", "-s", "1272"]);
        // The first ping is lost: it triggers the Packet Too Big message.
        ping(&testbed, RIGHT_V6, &["-s", "1400"]);
        let path = testbed.left.namespace.ip(&["route", "get", RIGHT_V6]).unwrap();
        assert!(path.contains("mtu 1300"), "{path}");
        assert_reachable(&testbed, RIGHT_V6, &["-s", "1400"]);
        // A sender without path MTU discovery.
        testbed.left.namespace.ip(&["route", "flush", "cache"]).unwrap();
        assert_reachable(&testbed, RIGHT_V4, &["-M", "dont", "-s", "1400"]);
        drop(router);
    }
}

#[test]
fn forwards_tcp_and_udp_intact() {
    on_every_device("transport", &[], |testbed, kind| {
        for (here, there) in [(LEFT_V4, RIGHT_V4), (LEFT_V6, RIGHT_V6)] {
            let sent: Vec<u8> = (0..2_000_000_u32).map(|n| (n * 7 / 3) as u8).collect();
            let listener =
                testbed.right.namespace.enter(|| std::net::TcpListener::bind((there, 0)));
            let listener = listener.unwrap().unwrap();
            let address = listener.local_addr().unwrap();
            let received = std::thread::scope(|scope| {
                let server = scope.spawn(|| {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut bytes = Vec::new();
                    stream.read_to_end(&mut bytes).unwrap();
                    bytes
                });
                testbed
                    .left
                    .namespace
                    .enter(|| {
                        let mut stream = std::net::TcpStream::connect(address).unwrap();
                        std::io::Write::write_all(&mut stream, &sent).unwrap();
                    })
                    .unwrap();
                server.join().unwrap()
            });
            assert!(received == sent, "{} of {} bytes", received.len(), sent.len());

            let socket = |end: &tidegate_lab::testbed::netns::VethEnd, address: &str| {
                let bound = end.namespace.enter(|| UdpSocket::bind((address, 0)));
                let socket = bound.unwrap().unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                socket
            };
            let (a, b) = (socket(&testbed.left, here), socket(&testbed.right, there));
            for bytes in [0, 1, 100, 1400, 1472, 3000] {
                if bytes > 1472 && here == LEFT_V4 && !has_ipv4_fragments(kind) {
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

struct FilterSetup {
    testbed: RouterTestbed,
    folder: tempfile::TempDir,
}

impl FilterSetup {
    fn new(kind: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("rules"), RULES).unwrap();
        Self { testbed: new_testbed(kind), folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn start_filter(&self) -> RunningCommand {
        let (rules, listen) = (self.path("rules"), self.path("screen"));
        RunningCommand::start(&self.testbed, &["filter", "--rules", &rules, "--listen", &listen])
    }

    fn start_router(&self, kind: &str, more: &[&str]) -> RunningCommand {
        let path = self.path("screen");
        let mut flags = vec!["--filter", &path];
        flags.extend(more);
        route(&self.testbed, kind, &flags)
    }
}

#[test]
fn filter_decides_which_packets_pass() {
    if !is_root("filter_rules") || !has_programs("filter_rules", &["ping"]) {
        return;
    }
    for &(kind, flags) in DEVICES {
        let setup = FilterSetup::new(kind);
        let filter = setup.start_filter();
        let router = setup.start_router(kind, flags);
        for to in [RIGHT_V4, RIGHT_V6] {
            assert_reachable(&setup.testbed, to, &[]);
        }
        let refused = ping(&setup.testbed, "10.7.2.99", &["-W", "1"]);
        assert!(refused.contains("100% packet loss"), "{refused}");
        let report = router.stop();
        assert_eq!(report["drops"]["filter_refused"], 2, "{report}");
        assert_eq!(report["screen"]["refused"], 2, "{report}");
        let filter_report = filter.stop();
        assert_eq!(
            (&filter_report["passed"], &filter_report["refused"]),
            (&report["screen"]["passed"], &2.into())
        );
    }
}

/// SIGHUP replaces the rules of a filter whose router is connected; rules with an error do not.
#[test]
fn filter_takes_new_rules_while_it_serves() {
    if !is_root("filter_reload") || !has_programs("filter_reload", &["ping"]) {
        return;
    }
    let setup = FilterSetup::new("packet");
    let filter = setup.start_filter();
    let router = setup.start_router("packet", &["--mode", "polled"]);
    assert_reachable(&setup.testbed, RIGHT_V4, &[]);
    let passes = || ping(&setup.testbed, RIGHT_V4, &["-c", "1", "-W", "1"]).contains("1 received");
    let reload = |rules: &str| {
        std::fs::write(setup.path("rules"), rules).unwrap();
        filter.signal(rustix::process::Signal::HUP);
    };
    reload("default = 'deny'");
    support::wait_until("the new rules refuse", || !passes());
    reload(RULES);
    support::wait_until("the old rules pass", &passes);
    reload("default = 'neither'");
    assert!(passes());
    // The router reads no configuration again, and goes on.
    router.signal(rustix::process::Signal::HUP);
    assert!(passes());
    router.stop();
    filter.stop();
}

/// No packet passes without a verdict while the filter is absent, dead or stopped. Forwarding
/// resumes when a filter connects.
#[test]
fn absent_filter_blocks_traffic_until_it_returns() {
    if !is_root("filter_absent") || !has_programs("filter_absent", &["ping"]) {
        return;
    }
    for &(kind, flags) in DEVICES {
        let setup = FilterSetup::new(kind);
        let router = setup.start_router(kind, flags);
        let assert_blocked = |state: &str| {
            let output = ping(&setup.testbed, RIGHT_V4, &["-W", "1"]);
            assert!(output.contains("100% packet loss"), "{state}: {output}");
            // The router itself still replies.
            assert_reachable(&setup.testbed, ROUTER_LEFT[0], &[]);
        };
        assert_blocked("no filter yet");
        let mut filter = setup.start_filter();
        ping(&setup.testbed, RIGHT_V4, &["-W", "1"]);
        assert_reachable(&setup.testbed, RIGHT_V4, &[]);
        filter.signal(rustix::process::Signal::STOP);
        assert_blocked("stopped");
        filter.signal(rustix::process::Signal::CONT);
        assert_reachable(&setup.testbed, RIGHT_V4, &[]);
        filter.child.kill().unwrap();
        filter.child.wait().unwrap();
        assert_blocked("killed");
        let restarted = setup.start_filter();
        ping(&setup.testbed, RIGHT_V4, &["-W", "1"]);
        assert_reachable(&setup.testbed, RIGHT_V4, &[]);
        drop(restarted);
        let report = router.stop();
        assert!(report["drops"]["filter_gone"].as_u64() >= Some(2), "{report}");
        assert_eq!(report["screen"]["connections"], 2, "{report}");
    }
}

/// A filter is killed during a TCP flow and restarted: the flow continues, and the receiver
/// gets exactly the bytes that were sent.
#[test]
fn tcp_flow_survives_a_filter_restart() {
    if !is_root("filter_restart") {
        return;
    }
    for &(kind, flags) in DEVICES {
        let setup = FilterSetup::new(kind);
        let mut filter = setup.start_filter();
        let router = setup.start_router(kind, flags);
        for (there, seed) in [(RIGHT_V4, 3), (RIGHT_V6, 5)] {
            let sent: Vec<u8> = (0..600_000_u32).map(|n| (n * seed / 7) as u8).collect();
            let bind = || std::net::TcpListener::bind((there, 0));
            let listener = setup.testbed.right.namespace.enter(bind).unwrap().unwrap();
            let address = listener.local_addr().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let send = || {
                        let mut stream = std::net::TcpStream::connect(address).unwrap();
                        std::io::Write::write_all(&mut stream, &sent).unwrap();
                    };
                    setup.testbed.left.namespace.enter(send).unwrap();
                });
                let (mut stream, _) = listener.accept().unwrap();
                let mut received = vec![0; sent.len() / 4];
                stream.read_exact(&mut received).unwrap();
                // The kernel may close the filter's connection before its listener. A router that
                // runs meanwhile connects to a filter that is gone.
                router.pause();
                filter.child.kill().unwrap();
                filter.child.wait().unwrap();
                router.signal(rustix::process::Signal::CONT);
                filter = setup.start_filter();
                stream.read_to_end(&mut received).unwrap();
                assert!(received == sent, "{} of {} bytes", received.len(), sent.len());
            });
        }
        drop(filter);
        let report = router.stop();
        assert_eq!(report["screen"]["connections"], 3, "{report}");
    }
}

/// Hostile filter: listens on the filter socket and sends garbage over the first connection
/// until `stop` is set. The garbage holds verdicts on unknown packets, verdicts other than
/// "pass" on real packets, and messages of every length, faster than the router can read.
fn run_hostile_filter(path: &str, stop: &std::sync::atomic::AtomicBool) {
    use rustix::net::*;
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let listener = socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    // The router is not root any more.
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    listen(&listener, 1).unwrap();
    let router = accept(&listener).unwrap();
    std::fs::remove_file(path).unwrap();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let (mut request, mut garbage) = ([0; 4096], Vec::new());
    let mut state = 1_u32;
    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
        while let Ok((len @ 4.., _)) = recv(&router, &mut request[..], RecvFlags::DONTWAIT) {
            // The packet's number with a verdict other than "pass".
            garbage.extend(&request[..4]);
            garbage.push(2 + (len % 200) as u8);
        }
        for _ in 0..state % 40 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // No packet of this test has a number as high as this.
            garbage.extend((state | 0xff00_0000).to_ne_bytes());
            garbage.push(1);
        }
        garbage.extend(&request[..state as usize % 5]);
        if !garbage.is_empty() {
            // Garbage that does not fit is dropped.
            let _ = send(&router, &garbage, flags);
        }
        garbage.clear();
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    }
}

#[test]
fn hostile_filter_admits_nothing_and_stalls_nothing() {
    if !is_root("hostile_filter") || !has_programs("hostile_filter", &["ping"]) {
        return;
    }
    for &(kind, flags) in DEVICES {
        let setup = FilterSetup::new(kind);
        let router = setup.start_router(kind, flags);
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let hostile = scope.spawn(|| run_hostile_filter(&setup.path("screen"), &stop));
            // The first packets make the router connect to its filter.
            let is_connected = || !std::fs::exists(setup.path("screen")).unwrap();
            ping(&setup.testbed, RIGHT_V4, &["-W", "1"]);
            while !is_connected() && !hostile.is_finished() {
                ping(&setup.testbed, RIGHT_V4, &["-W", "1"]);
            }
            for (to, own) in [(RIGHT_V4, ROUTER_LEFT[0]), (RIGHT_V6, ROUTER_LEFT[1])] {
                let lost = ping(&setup.testbed, to, &["-W", "1"]);
                assert!(lost.contains("100% packet loss"), "{lost}");
                assert_reachable(&setup.testbed, own, &[]);
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        let filter = setup.start_filter();
        // The router retries the connection when packets arrive, but not for each packet.
        let answered = |_| ping(&setup.testbed, RIGHT_V4, &["-W", "1"]).contains(" 0% packet loss");
        assert!((0..50).any(answered), "the router did not reconnect to its filter");
        let report = router.stop();
        let filter_report = filter.stop();
        assert_eq!(report["screen"]["passed"], filter_report["passed"], "{report}");
        assert!(report["screen"]["stray"].as_u64() > Some(0), "{report}");
        // A verdict may be part of the garbage that was dropped.
        assert!(report["screen"]["refused"].as_u64() > Some(0), "{report}");
    }
}

#[test]
fn killed_router_leaves_no_xdp_program() {
    if !is_root("route_gone") {
        return;
    }
    let testbed = new_testbed("xdp");
    let mut router = route(&testbed, "xdp", &[]);
    router.child.kill().unwrap();
    router.child.wait().unwrap();
    for device in [&testbed.left_device, &testbed.right_device] {
        let link = testbed.router.ip(&["link", "show", device]).unwrap();
        assert!(!link.contains("xdp"), "XDP program still attached: {link}");
    }
    // The interfaces can be used again at once.
    let router = route(&testbed, "xdp", &[]);
    assert_reachable(&testbed, ROUTER_LEFT[0], &[]);
    drop(router);
}

#[test]
fn rejects_invalid_settings_with_reason() {
    let fails_with = |arguments: &[&str], parts: &[&str]| {
        let output = tidegate(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && !error.contains("panicked"), "{error}");
        for part in parts {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
    };
    let two = ["--io", "xdp:nope0,10.0.0.1/24", "--io", "xdp:nope1,10.0.1.1/24"];
    let with = |more: &[&'static str]| [&["route"][..], &two, more].concat();
    fails_with(&["route"], &["two interfaces", "--io"]);
    fails_with(&with(&[]), &["nope0"]);
    fails_with(&with(&["--quota", "0"]), &["receive-quota is 0"]);
    fails_with(&with(&["--quota", "some"]), &["unlimited"]);
    fails_with(&with(&["--cpu-share", "0"]), &["cpu-share-percent"]);
    fails_with(&with(&["--cpu-share", "50", "--mode", "interrupt"]), &["polled"]);
    fails_with(&with(&["--route", "0.0.0.0/0=192.0.2.1"]), &["192.0.2.1", "no network"]);
    fails_with(&["route", "--io", "eth0"], &["KIND:INTERFACE"]);
    fails_with(&["filter", "--rules", "no-such", "--listen", "/tmp/x"], &["no-such"]);
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
        let arguments = ["filter", "--rules", rules, "--listen", "/tmp/x"];
        fails_with(&arguments, &["rules.toml", parts[0], parts[1]]);
    }
    let path = folder.path().join("route.toml");
    std::fs::write(&path, "[router]\nprot = []\n").unwrap();
    fails_with(&["route", "--config", path.to_str().unwrap()], &["route.toml", "prot"]);
    std::fs::write(&path, "[gate]\nlow-mark-percent = 80\n").unwrap();
    fails_with(&["route", "--config", path.to_str().unwrap()], &["low mark"]);
}

/// A router ends with an error if a host on one of its links has one of its addresses.
#[test]
fn refuses_an_address_that_another_host_has() {
    if !is_root("router's address conflict") {
        return;
    }
    let testbed = RouterTestbed::new().unwrap();
    let left = &testbed.left;
    let link = left.namespace.ip(&["link", "show", &left.device]).unwrap();
    let (one, other) = (&testbed.device_flags("packet")[1], &testbed.device_flags("packet")[3]);
    for (address, bits) in [(LEFT_V4, 24), (LEFT_V6, 64)] {
        let interface = one.split(',').next().unwrap();
        for (probe, mode) in [("quick", "polled"), ("quick", "interrupt"), ("rfc", "polled")] {
            let mut router = testbed.router.command(env!("CARGO_BIN_EXE_tidegate"));
            router.args(["route", "--probe", probe, "--mode", mode, "--io", other, "--io"]);
            let output = router.arg(format!("{interface},{address}/{bits}")).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success(), "{error}");
            assert!(output.stdout.is_empty(), "no ready line");
            let expected = format!("uses {address}, too: choose another address");
            assert!(error.contains(&expected), "{probe} {mode}: {error}");
            let mac = error.split_once("MAC address ").unwrap().1.split(' ').next().unwrap();
            assert!(link.contains(mac), "{error}{link}");
        }
    }
}
