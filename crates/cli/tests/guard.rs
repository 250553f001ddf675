//! `tidegate guard` in front of the kernel's sockets: drops excess traffic to the guarded
//! ports only, and detaches its XDP program when it exits.

mod support;

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{CLIENT_V4, CLIENT_V6, SERVER_V4, SERVER_V6, Server, Testbed, has_programs, is_root};
use tidegate_lab::testbed::netns::Namespace;

/// Upper bound for any step on the slowest machine.
const TIMEOUT: Duration = Duration::from_secs(60);
const GUARDED_PORT: u16 = 5300;
const OTHER_PORT: u16 = 5301;
const FAMILIES: [(&str, &str); 2] = [(CLIENT_V4, SERVER_V4), (CLIENT_V6, SERVER_V6)];

fn guard(testbed: &Testbed, more: &[&str]) -> Server {
    let port = format!("udp/{GUARDED_PORT}");
    let mut arguments = vec!["--iface", testbed.device(), "--port", &port];
    arguments.extend(more);
    testbed.start_command("guard", &arguments)
}

fn bind(namespace: &Namespace, address: &str, port: u16) -> UdpSocket {
    let address = SocketAddr::new(address.parse().unwrap(), port);
    let socket = namespace.enter(|| UdpSocket::bind(address)).unwrap().unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket
}

fn connected_socket(testbed: &Testbed, (client, server): (&str, &str), port: u16) -> UdpSocket {
    let socket = bind(testbed.client(), client, 0);
    socket.connect(SocketAddr::new(server.parse().unwrap(), port)).unwrap();
    socket
}

/// Frames dropped by an XDP program on the server's interface.
fn xdp_drops(testbed: &Testbed) -> u64 {
    let output =
        testbed.server().command("ethtool").args(["-S", testbed.device()]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.contains("rx_queue_0_xdp_drops"));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).expect("veth counts drops")
}

/// State of the interface: whether an XDP program is attached, and the interrupt moderation
/// settings.
fn interface_state(testbed: &Testbed) -> (bool, String) {
    let link = testbed.server().ip(&["-d", "link", "show", testbed.device()]).unwrap();
    let script = "cat /sys/class/net/$1/napi_defer_hard_irqs /sys/class/net/$1/gro_flush_timeout";
    let mut settings = testbed.server().command("sh");
    let settings = settings.args(["-c", script, "sh", testbed.device()]).output().unwrap();
    (link.contains("xdp"), String::from_utf8(settings.stdout).unwrap())
}

fn class<'a>(report: &'a Value, name: &str) -> &'a Value {
    let classes = report["classes"].as_array().unwrap();
    classes.iter().find(|class| class["class"] == name).unwrap_or_else(|| panic!("no {name}"))
}

/// Packets refused from untrusted sources. A source that sends for long enough before the
/// overload counts as known, not as unknown.
fn refused_packets(report: &Value) -> u64 {
    let classes = ["known", "unknown"].map(|name| class(report, name)["refused"].as_u64());
    classes.iter().map(|refused| refused.unwrap()).sum()
}

/// Sends until the guard refuses a packet.
fn flood_until_refused(testbed: &Testbed, flood: &UdpSocket) {
    let began = Instant::now();
    while xdp_drops(testbed) == 0 {
        assert!(began.elapsed() < TIMEOUT, "the guard admitted every packet");
        for _ in 0..1000 {
            flood.send(&[0; 1000]).unwrap();
        }
    }
}

#[test]
fn flood_is_dropped_without_affecting_other_traffic() {
    if !is_root("guard") || !has_programs("guard", &["ethtool"]) {
        return;
    }
    for family in FAMILIES {
        let testbed = Testbed::shared();
        // The server never reads: any rate overloads its socket.
        let _stuck = bind(testbed.server(), family.1, GUARDED_PORT);
        let other = bind(testbed.server(), family.1, OTHER_PORT);
        let guard = guard(&testbed, &[]);
        let flood = connected_socket(&testbed, family, GUARDED_PORT);
        flood_until_refused(&testbed, &flood);
        let client = connected_socket(&testbed, family, OTHER_PORT);
        for number in 0..200_u32 {
            flood.send(&[0; 1000]).unwrap();
            client.send(&number.to_be_bytes()).unwrap();
            let mut bytes = [0; 4];
            let (_, from) = other.recv_from(&mut bytes).unwrap();
            assert_eq!(u32::from_be_bytes(bytes), number);
            other.send_to(&bytes, from).unwrap();
            client.recv(&mut bytes).unwrap();
        }
        let report = guard.stop();
        assert!(refused_packets(&report) > 0, "{report}");
        let rest = class(&report, "rest");
        assert_eq!(rest["refused"], 0, "{report}");
        assert!(rest["admitted"].as_u64().unwrap() > 0, "{report}");
        assert!(!interface_state(&testbed).0, "XDP program still attached");
    }
}

/// SIGHUP replaces the classes, also while packets are refused. The new classes are counted from
/// zero.
#[test]
fn takes_new_classes_while_it_refuses() {
    if !is_root("guard reload") || !has_programs("guard reload", &["ethtool"]) {
        return;
    }
    let classes = |text: &str| {
        format!("[[admission.class]]\nmatch = [{{ port = {GUARDED_PORT} }}]\n{text}\n")
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("guard.toml");
    std::fs::write(&path, classes("name = 'before'")).unwrap();
    let testbed = Testbed::shared();
    let _stuck = bind(testbed.server(), SERVER_V4, GUARDED_PORT);
    let guard = guard(&testbed, &["--config", path.to_str().unwrap()]);
    let flood = connected_socket(&testbed, FAMILIES[0], GUARDED_PORT);
    let refused_of_burst = || {
        let before = xdp_drops(&testbed);
        for _ in 0..1000 {
            flood.send(&[0; 1000]).unwrap();
        }
        xdp_drops(&testbed) - before
    };
    let reload = |text: &str| {
        std::fs::write(&path, text).unwrap();
        rustix::process::kill_process(guard.pid(), rustix::process::Signal::HUP).unwrap();
    };
    flood_until("packets are refused", || refused_of_burst() > 0);
    reload("[admission]\nnonsense = 1");
    flood_until("packets are refused as before", || refused_of_burst() > 0);
    reload(&classes("name = 'after'\nexempt = true"));
    flood_until("the new class is exempt", || refused_of_burst() == 0);
    let report = guard.stop();
    assert_eq!(class_names(&report), ["after", "others"], "{report}");
    assert_eq!(class(&report, "after")["refused"], 0, "{report}");
}

/// Waits without a pause, as the flood must not pause.
fn flood_until(state: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < TIMEOUT, "not in time: {state}");
    }
}

fn class_names(report: &Value) -> Vec<&str> {
    let classes = report["classes"].as_array().unwrap();
    classes.iter().map(|class| class["class"].as_str().unwrap()).collect()
}

#[test]
fn trusted_sources_take_precedence() {
    if !is_root("guard trusted") || !has_programs("guard trusted", &["ethtool"]) {
        return;
    }
    let testbed = Testbed::shared();
    let _stuck = bind(testbed.server(), SERVER_V4, GUARDED_PORT);
    let guard = guard(&testbed, &["--trusted", "10.9.0.1/32"]);
    testbed.client().ip(&["addr", "add", "10.9.0.99/24", "dev", testbed.client_device()]).unwrap();
    let flood = connected_socket(&testbed, ("10.9.0.99", SERVER_V4), GUARDED_PORT);
    flood_until_refused(&testbed, &flood);
    let trusted = connected_socket(&testbed, FAMILIES[0], GUARDED_PORT);
    trusted.send(&[0; 10]).unwrap();
    let report = guard.stop();
    assert!(refused_packets(&report) > 0, "{report}");
    let trusted_class = class(&report, "trusted");
    assert_eq!(
        (&trusted_class["admitted"], &trusted_class["refused"]),
        (&1.into(), &0.into()),
        "{report}"
    );
}

/// A ceiling for what a request begins with, in front of a server that nobody changes.
#[test]
fn ceiling_bounds_what_begins_with_certain_bytes() {
    if !is_root("guard payload") || !has_programs("guard payload", &["ethtool"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("guard.toml");
    let class = |name: &str, payload: &str, rates: &str| {
        let rule = format!("match = [{{ port = {GUARDED_PORT}{payload} }}]");
        format!("[[admission.class]]\nname = '{name}'\n{rule}\n{rates}\n")
    };
    let classes = [
        class("search", ", payload = 'GET /search'", "ceiling-pps = 1"),
        class("status", r", payload = '\x07status', payload-at = 2", "guaranteed-pps = 100000"),
        class("port", "", "rank = 2"),
    ];
    std::fs::write(&path, classes.concat()).unwrap();
    const REQUESTS: u64 = 100;
    for family in FAMILIES {
        let testbed = Testbed::shared();
        let _stuck = bind(testbed.server(), family.1, GUARDED_PORT);
        let guard = guard(&testbed, &["--config", path.to_str().unwrap()]);
        let flood = connected_socket(&testbed, family, GUARDED_PORT);
        flood_until_refused(&testbed, &flood);
        for _ in 0..REQUESTS {
            for payload in [&[0; 1000][..], b"get /search?q=1", b"..\x07status"] {
                flood.send(payload).unwrap();
            }
        }
        let report = guard.stop();
        let counts = |name: &str| {
            let class = self::class(&report, name);
            (class["admitted"].as_u64().unwrap(), class["refused"].as_u64().unwrap())
        };
        assert_eq!(counts("status"), (REQUESTS, 0), "{report}");
        let (admitted, refused) = counts("search");
        assert_eq!(admitted + refused, REQUESTS, "{report}");
        assert!(refused > REQUESTS / 2, "{report}");
    }
}

#[test]
fn xdp_program_is_detached_on_stop_and_on_kill() {
    if !is_root("guard ends") {
        return;
    }
    let testbed = Testbed::shared();
    let before = interface_state(&testbed);
    assert!(!before.0);
    let stopped = guard(&testbed, &[]);
    assert!(interface_state(&testbed).0, "no XDP program is attached");
    let report = stopped.stop();
    assert_eq!(report["classes"].as_array().unwrap().len(), 3, "known, unknown, rest");
    assert_eq!(interface_state(&testbed), before);
    let killed = guard(&testbed, &[]);
    assert!(interface_state(&testbed).0);
    killed.kill();
    assert_eq!(interface_state(&testbed), before);
    // The interface is free for the next guard.
    guard(&testbed, &[]).stop();
}
