//! Servers on every port, asked by the kernel's own tools.

mod support;

use std::time::Duration;

use support::{CLIENT_V4, Kind, SERVER_V4, SERVER_V6, Site, have, is_root, zone};

/// What `dig +short` says.
fn dig(site: &Site, server: &str, question: &[&str]) -> Vec<String> {
    let at = format!("@{server}");
    let mut arguments = vec![at.as_str(), "+short", "+tries=1", "+time=5", "+notcp"];
    arguments.extend(question);
    let mut lines: Vec<_> = site.tool("dig", &arguments).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

fn dns_is_right(site: &Site, server: &str) {
    assert_eq!(dig(site, server, &["www.example.test", "A"]), ["192.0.2.80"]);
    assert_eq!(dig(site, server, &["www.example.test", "AAAA"]), ["2001:db8::80"]);
    assert_eq!(dig(site, server, &["WWW.Example.TEST", "A"]), ["192.0.2.80"]);
    assert_eq!(
        dig(site, server, &["alias.example.test", "A"]),
        ["192.0.2.80", "www.example.test."]
    );
    assert_eq!(dig(site, server, &["a.b.wild.example.test", "A"]), ["192.0.2.99"]);
    assert_eq!(dig(site, server, &["example.test", "MX"]), ["10 mail.example.test."]);
    assert_eq!(dig(site, server, &["_dns._udp.example.test", "SRV"]), ["0 5 53 ns1.example.test."]);
    assert!(dig(site, server, &["nobody.example.test", "A"]).is_empty());

    let at = format!("@{server}");
    let kdig = |question: &[&str]| {
        let mut arguments = vec![at.as_str(), "+timeout=5", "+retry=0", "+notcp"];
        arguments.extend(question);
        site.tool("kdig", &arguments)
    };
    let missing = kdig(&["nobody.example.test", "A"]);
    assert!(missing.contains("NXDOMAIN") && missing.contains("SOA"), "{missing}");
    let referral = kdig(&["host.sub.example.test", "A"]);
    assert!(referral.contains("ns.sub.example.test.") && referral.contains("203.0.113.53"));
    assert!(kdig(&["example.org", "A"]).contains("REFUSED"));
}

fn pings_are_answered(kind: Kind, site: &Site, server: &str) {
    let (family, most) =
        if server.contains(':') { ("-6", usize::MAX) } else { ("-4", kind.ipv4_bytes_max()) };
    for size in [0, 56, 1400, 4000, 20000].into_iter().filter(|&size| size <= most) {
        let size = size.to_string();
        let arguments = [family, "-c", "2", "-i", "0.01", "-W", "5", "-s", &size, server];
        let output = site.tool("ping", &arguments);
        assert!(output.contains(" 0% packet loss"), "{output}");
    }
}

/// A probe to a port where nobody listens comes back as "port unreachable",
/// which is how traceroute knows that it has arrived.
fn probes_are_answered(site: &Site, server: &str) {
    let family = if server.contains(':') { "-6" } else { "-4" };
    let output = site.tool("traceroute", &[family, "-n", "-q", "1", "-m", "3", "-w", "5", server]);
    let hops: Vec<_> = output.lines().skip(1).collect();
    assert_eq!(hops.len(), 1, "{output}");
    assert!(hops[0].contains(server), "{output}");
}

fn on_every_port(test: &str, programs: &[&str], check: impl Fn(Kind, &Site)) {
    if is_root(test) && have(test, programs) {
        for kind in Kind::ALL {
            eprintln!("{test} on {kind:?}");
            check(kind, &Site::new(kind));
        }
    }
}

#[test]
fn dig_and_kdig_get_right_answers() {
    on_every_port("dig_and_kdig", &["dig", "kdig"], |kind, site| {
        let server = site.serve(kind, &["dns", "--zone", &zone()]);
        for address in [SERVER_V4, SERVER_V6] {
            dns_is_right(site, address);
        }
        let report = server.stop();
        assert_eq!(report["requests"], report["answers"]);
        assert!(report["drops"].get("udp_checksum").is_none(), "{report}");
    });
}

#[test]
fn several_readers_give_the_same_answers() {
    on_every_port("several_readers", &["dig", "kdig"], |kind, site| {
        for distribution in ["flow", "round-robin", "least-loaded"] {
            let readers = ["--readers", "3", "--distribution", distribution];
            let zone = zone();
            let arguments: Vec<&str> =
                ["dns", "--zone", &zone].into_iter().chain(readers).collect();
            let server = site.serve(kind, &arguments);
            for address in [SERVER_V4, SERVER_V6] {
                dns_is_right(site, address);
            }
            let report = server.stop();
            assert!(report["requests"].as_u64() > Some(20), "{report}");
            assert_eq!(report["requests"], report["answers"]);
        }
    });
}

#[test]
fn ping_gets_every_answer_also_in_fragments() {
    on_every_port("ping", &["ping"], |kind, site| {
        let server = site.serve(kind, &["echo"]);
        for address in [SERVER_V4, SERVER_V6] {
            pings_are_answered(kind, site, address);
        }
        drop(server);
    });
}

#[test]
fn traceroute_arrives() {
    on_every_port("traceroute", &["traceroute"], |kind, site| {
        let server = site.serve(kind, &["echo"]);
        for address in [SERVER_V4, SERVER_V6] {
            probes_are_answered(site, address);
        }
        let report = server.stop();
        assert!(report["drops"]["udp_no_socket"].as_u64() >= Some(2), "{report}");
    });
}

/// The kernel's own socket on the other side: datagrams of every size come back
/// byte for byte, in fragments where they must.
#[test]
fn echo_returns_datagrams_of_every_size() {
    on_every_port("echo", &[], |kind, site| {
        let server = site.serve(kind, &["echo", "--listen", "7777"]);
        for address in [SERVER_V4, SERVER_V6] {
            let answers = site.client().enter(|| echo_sizes(address)).unwrap();
            for (size, intact) in answers {
                assert!(intact, "{kind:?} {address} {size} bytes");
            }
        }
        drop(server);
    });
}

fn echo_sizes(server: &str) -> Vec<(usize, bool)> {
    let any = if server.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
    let socket = std::net::UdpSocket::bind(any).unwrap();
    socket.connect((server, 7777)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut buf = vec![0; 70_000];
    let sizes = [0, 1, 17, 64, 1000, 1471, 1472, 1473, 1600];
    let try_size = |&size: &usize| {
        let payload: Vec<u8> = (0..size).map(|n| (n * 7 + size) as u8).collect();
        socket.send(&payload).unwrap();
        let intact = socket.recv(&mut buf).is_ok_and(|len| buf[..len] == payload);
        (size, intact)
    };
    sizes.iter().map(try_size).collect()
}

/// The server's side of the wire may go down and come back.
#[test]
fn service_goes_on_after_the_link_was_down() {
    on_every_port("link", &["ping"], |kind, site| {
        if kind.makes_the_wire() {
            return;
        }
        let server = site.serve(kind, &["echo"]);
        pings_are_answered(kind, site, SERVER_V4);
        for state in ["down", "up"] {
            site.client().ip(&["link", "set", site.client_device(), state]).unwrap();
        }
        // The kernel notices a moment later that there is a carrier again, and
        // sends nothing until then.
        let show = ["-o", "link", "show", site.client_device()];
        while !site.client().ip(&show).unwrap().contains("state UP") {}
        pings_are_answered(kind, site, SERVER_V4);
        drop(server);
    });
}

/// An idle server sleeps: a second without traffic is a handful of rounds.
#[test]
fn an_idle_server_sleeps() {
    on_every_port("idle", &[], |kind, site| {
        let server = site.serve(kind, &["echo"]);
        // However long it took to start.
        server.wait_until_asleep();
        std::thread::sleep(Duration::from_secs(1));
        let report = server.stop();
        let rounds = report["rounds"].as_u64().unwrap();
        assert!(report["sleeps"].as_u64() >= Some(1), "{kind:?} {report}");
        assert!(rounds < 20_000, "{kind:?}: {rounds} rounds of an idle server in a second");
    });
}

/// A server that lives on an address of the kernel's.
#[test]
fn a_shared_address_leaves_all_else_to_the_kernel() {
    if !is_root("shared") || !have("shared", &["dig", "kdig", "ping", "nc"]) {
        return;
    }
    let site = Site::shared();
    let zone = zone();
    let serve = ["dns", "--zone", &zone, "--shared", "--iface", site.device()];
    let server = site.start(&serve);
    for address in [SERVER_V4, SERVER_V6] {
        dns_is_right(&site, address);
        pings_are_answered(Kind::Xdp, &site, address);
    }
    tcp_to_the_kernel_works(&site);
    server.kill();
    tcp_to_the_kernel_works(&site);
    pings_are_answered(Kind::Xdp, &site, SERVER_V4);
    let link = site.server().ip(&["link", "show", site.device()]).unwrap();
    assert!(!link.contains("xdp"), "left attached: {link}");
    // And the interface can be served again at once.
    let server = site.start(&serve);
    dns_is_right(&site, SERVER_V4);
    let report = server.stop();
    assert_eq!(report["requests"], report["answers"]);
}

fn tcp_to_the_kernel_works(site: &Site) {
    for address in [SERVER_V4, SERVER_V6] {
        let listener =
            site.server().enter(|| std::net::TcpListener::bind((address, 0)).unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        let stream =
            site.client().enter(|| std::net::TcpStream::connect((address, port)).unwrap()).unwrap();
        let (accepted, peer) = listener.accept().unwrap();
        assert_eq!(peer, stream.local_addr().unwrap());
        drop((accepted, stream));
    }
}

/// A kernel socket on the port: the second server is told so.
#[test]
fn a_port_in_use_by_the_kernel_is_not_taken() {
    if !is_root("port in use") {
        return;
    }
    let site = Site::shared();
    let holder =
        site.server().enter(|| std::net::UdpSocket::bind("0.0.0.0:7777").unwrap()).unwrap();
    let output = site
        .server()
        .command(env!("CARGO_BIN_EXE_tidegate"))
        .args(["serve", "echo", "--listen", "7777", "--shared", "--iface", site.device()])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("in use"), "{error}");
    drop(holder);
}

/// The client's address is resolved, not guessed: a client that never sent
/// anything to the server's stack before is answered too.
#[test]
fn a_client_with_another_hardware_address_is_answered() {
    on_every_port("neighbour", &["ping"], |kind, site| {
        let server = site.serve(kind, &["echo"]);
        pings_are_answered(kind, site, SERVER_V4);
        if let Site::Veth(_) = site {
            let device = site.client_device();
            site.client().ip(&["link", "set", device, "address", "02:aa:bb:cc:dd:ee"]).unwrap();
            let _ = site.try_tool("arping", &["-U", "-c", "1", "-I", device, CLIENT_V4]);
            pings_are_answered(kind, site, SERVER_V4);
        }
        drop(server);
    });
}
