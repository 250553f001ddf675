//! `tidegate guard` in front of the kernel's sockets: it drops what is too much
//! for them, leaves everything else alone, and leaves nothing behind.

mod support;

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{CLIENT_V4, CLIENT_V6, SERVER_V4, SERVER_V6, Server, Site, have, is_root};
use tidegate_lab::netns::Namespace;

/// Longer than anything here takes on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);
const GUARDED_PORT: u16 = 5300;
const OTHER_PORT: u16 = 5301;
const FAMILIES: [(&str, &str); 2] = [(CLIENT_V4, SERVER_V4), (CLIENT_V6, SERVER_V6)];

fn guard(site: &Site, more: &[&str]) -> Server {
    let port = format!("udp/{GUARDED_PORT}");
    let mut arguments = vec!["--iface", site.device(), "--port", &port];
    arguments.extend(more);
    site.start_command("guard", &arguments)
}

fn bind(namespace: &Namespace, address: &str, port: u16) -> UdpSocket {
    let address = SocketAddr::new(address.parse().unwrap(), port);
    let socket = namespace.enter(|| UdpSocket::bind(address)).unwrap().unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn connected(site: &Site, (client, server): (&str, &str), port: u16) -> UdpSocket {
    let socket = bind(site.client(), client, 0);
    socket.connect(SocketAddr::new(server.parse().unwrap(), port)).unwrap();
    socket
}

/// Frames that a program on the server's interface has dropped.
fn dropped(site: &Site) -> u64 {
    let output = site.server().command("ethtool").args(["-S", site.device()]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.contains("rx_queue_0_xdp_drops"));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).expect("veth counts drops")
}

/// What is attached to the interface, and how its interrupts come.
fn state(site: &Site) -> (bool, String) {
    let link = site.server().ip(&["-d", "link", "show", site.device()]).unwrap();
    let script = "cat /sys/class/net/$1/napi_defer_hard_irqs /sys/class/net/$1/gro_flush_timeout";
    let mut settings = site.server().command("sh");
    let settings = settings.args(["-c", script, "sh", site.device()]).output().unwrap();
    (link.contains("xdp"), String::from_utf8(settings.stdout).unwrap())
}

fn class<'a>(report: &'a Value, name: &str) -> &'a Value {
    let classes = report["classes"].as_array().unwrap();
    classes.iter().find(|class| class["class"] == name).unwrap_or_else(|| panic!("no {name}"))
}

/// Packets refused of those who are no friends. Who sends for long enough
/// before it is too much is known by then, and no stranger.
fn refused(report: &Value) -> u64 {
    let classes = ["known", "strangers"].map(|name| class(report, name)["refused"].as_u64());
    classes.iter().map(|refused| refused.unwrap()).sum()
}

/// Sends until the guard refuses something.
fn flood_until_refused(site: &Site, flood: &UdpSocket) {
    let began = Instant::now();
    while dropped(site) == 0 {
        assert!(began.elapsed() < PATIENCE, "the guard lets everything through");
        for _ in 0..1000 {
            flood.send(&[0; 1000]).unwrap();
        }
    }
}

#[test]
fn a_flood_is_dropped_and_nothing_else() {
    if !is_root("guard") || !have("guard", &["ethtool"]) {
        return;
    }
    for family in FAMILIES {
        let site = Site::shared();
        // A server that does not read: whatever comes is too much for it.
        let _stuck = bind(site.server(), family.1, GUARDED_PORT);
        let other = bind(site.server(), family.1, OTHER_PORT);
        let guard = guard(&site, &[]);
        let flood = connected(&site, family, GUARDED_PORT);
        flood_until_refused(&site, &flood);
        let client = connected(&site, family, OTHER_PORT);
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
        assert!(refused(&report) > 0, "{report}");
        let rest = class(&report, "rest");
        assert_eq!(rest["refused"], 0, "{report}");
        assert!(rest["admitted"].as_u64().unwrap() > 0, "{report}");
        assert!(!state(&site).0, "left attached");
    }
}

#[test]
fn friends_go_first() {
    if !is_root("guard for friends") || !have("guard for friends", &["ethtool"]) {
        return;
    }
    let site = Site::shared();
    let _stuck = bind(site.server(), SERVER_V4, GUARDED_PORT);
    let guard = guard(&site, &["--friend", "10.9.0.1/32"]);
    site.client().ip(&["addr", "add", "10.9.0.99/24", "dev", site.client_device()]).unwrap();
    let flood = connected(&site, ("10.9.0.99", SERVER_V4), GUARDED_PORT);
    flood_until_refused(&site, &flood);
    let friend = connected(&site, FAMILIES[0], GUARDED_PORT);
    friend.send(&[0; 10]).unwrap();
    let report = guard.stop();
    assert!(refused(&report) > 0, "{report}");
    let friends = class(&report, "friends");
    assert_eq!((&friends["admitted"], &friends["refused"]), (&1.into(), &0.into()), "{report}");
}

#[test]
fn nothing_is_left_behind_however_it_ends() {
    if !is_root("guard ends") {
        return;
    }
    let site = Site::shared();
    let before = state(&site);
    assert!(!before.0);
    let ended = guard(&site, &[]);
    assert!(state(&site).0, "nothing is attached");
    let report = ended.stop();
    assert_eq!(report["classes"].as_array().unwrap().len(), 3, "known, strangers, rest");
    assert_eq!(state(&site), before);
    let killed = guard(&site, &[]);
    assert!(state(&site).0);
    killed.kill();
    assert_eq!(state(&site), before);
    // And the interface is free for the next one.
    guard(&site, &[]).stop();
}
