//! Servers on every kind of device, tested with standard network tools.

mod support;

use std::time::Duration;

use support::{
    CLIENT_V4, CLIENT_V6, DeviceKind, SERVER_V4, SERVER_V6, Testbed, has_programs, is_root, zone,
};

/// Sorted output lines of `dig +short`.
fn dig(testbed: &Testbed, server: &str, question: &[&str]) -> Vec<String> {
    let at = format!("@{server}");
    let mut arguments = vec![at.as_str(), "+short", "+tries=1", "+time=5", "+notcp"];
    arguments.extend(question);
    let mut lines: Vec<_> = testbed.tool("dig", &arguments).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

fn check_dns(testbed: &Testbed, server: &str) {
    assert_eq!(dig(testbed, server, &["www.example.test", "A"]), ["192.0.2.80"]);
    assert_eq!(dig(testbed, server, &["www.example.test", "AAAA"]), ["2001:db8::80"]);
    assert_eq!(dig(testbed, server, &["WWW.Example.TEST", "A"]), ["192.0.2.80"]);
    assert_eq!(
        dig(testbed, server, &["alias.example.test", "A"]),
        ["192.0.2.80", "www.example.test."]
    );
    assert_eq!(dig(testbed, server, &["a.b.wild.example.test", "A"]), ["192.0.2.99"]);
    assert_eq!(dig(testbed, server, &["example.test", "MX"]), ["10 mail.example.test."]);
    assert_eq!(
        dig(testbed, server, &["_dns._udp.example.test", "SRV"]),
        ["0 5 53 ns1.example.test."]
    );
    assert!(dig(testbed, server, &["nobody.example.test", "A"]).is_empty());

    let at = format!("@{server}");
    let kdig = |question: &[&str]| {
        let mut arguments = vec![at.as_str(), "+timeout=5", "+retry=0", "+notcp"];
        arguments.extend(question);
        testbed.tool("kdig", &arguments)
    };
    let missing = kdig(&["nobody.example.test", "A"]);
    assert!(missing.contains("NXDOMAIN") && missing.contains("SOA"), "{missing}");
    let referral = kdig(&["host.sub.example.test", "A"]);
    assert!(referral.contains("ns.sub.example.test.") && referral.contains("203.0.113.53"));
    assert!(kdig(&["example.org", "A"]).contains("REFUSED"));
}

fn check_ping(kind: DeviceKind, testbed: &Testbed, server: &str) {
    let (family, max_bytes) =
        if server.contains(':') { ("-6", usize::MAX) } else { ("-4", kind.max_ipv4_bytes()) };
    for size in [0, 56, 1400, 4000, 20000].into_iter().filter(|&size| size <= max_bytes) {
        let size = size.to_string();
        // Of several packets ping waits for the last no longer than for the others.
        for _ in 0..2 {
            let arguments = [family, "-c", "1", "-W", "10", "-s", &size, server];
            let output = testbed.tool("ping", &arguments);
            assert!(output.contains(" 0% packet loss"), "{output}");
        }
    }
}

/// A probe to a port without a listener is answered with ICMP "port unreachable", by which
/// traceroute knows that it has reached the destination.
fn check_traceroute(testbed: &Testbed, server: &str) {
    let family = if server.contains(':') { "-6" } else { "-4" };
    let output =
        testbed.tool("traceroute", &[family, "-n", "-q", "1", "-m", "3", "-w", "5", server]);
    let hops: Vec<_> = output.lines().skip(1).collect();
    assert_eq!(hops.len(), 1, "{output}");
    assert!(hops[0].contains(server), "{output}");
}

fn on_every_device(test: &str, programs: &[&str], check: impl Fn(DeviceKind, &Testbed)) {
    if is_root(test) && has_programs(test, programs) {
        for &kind in DeviceKind::ALL {
            eprintln!("{test} on {kind:?}");
            check(kind, &Testbed::new(kind));
        }
    }
}

#[test]
fn dig_and_kdig_get_correct_responses() {
    on_every_device("dig_and_kdig", &["dig", "kdig"], |kind, testbed| {
        let server = testbed.serve(kind, &["dns", "--zone", &zone()]);
        for address in [SERVER_V4, SERVER_V6] {
            check_dns(testbed, address);
        }
        let report = server.stop();
        assert_eq!(report["requests"], report["answers"]);
        assert!(report["drops"].get("udp_checksum").is_none(), "{report}");
    });
}

#[test]
fn several_readers_give_the_same_responses() {
    on_every_device("several_readers", &["dig", "kdig"], |kind, testbed| {
        for distribution in ["flow", "round-robin", "least-loaded"] {
            let readers = ["--readers", "3", "--distribution", distribution];
            let zone = zone();
            let arguments: Vec<&str> =
                ["dns", "--zone", &zone].into_iter().chain(readers).collect();
            let server = testbed.serve(kind, &arguments);
            for address in [SERVER_V4, SERVER_V6] {
                check_dns(testbed, address);
            }
            let report = server.stop();
            assert!(report["requests"].as_u64() > Some(20), "{report}");
            assert_eq!(report["requests"], report["answers"]);
        }
    });
}

#[test]
fn answers_pings_including_fragmented_ones() {
    on_every_device("ping", &["ping"], |kind, testbed| {
        let server = testbed.serve(kind, &["echo"]);
        for address in [SERVER_V4, SERVER_V6] {
            check_ping(kind, testbed, address);
        }
        drop(server);
    });
}

#[test]
fn traceroute_reaches_the_server() {
    on_every_device("traceroute", &["traceroute"], |kind, testbed| {
        let server = testbed.serve(kind, &["echo"]);
        for address in [SERVER_V4, SERVER_V6] {
            check_traceroute(testbed, address);
        }
        let report = server.stop();
        assert!(report["drops"]["udp_no_socket"].as_u64() >= Some(2), "{report}");
    });
}

/// Datagrams of every size from a kernel socket come back unchanged, fragmented where
/// necessary.
#[test]
fn echo_returns_datagrams_of_every_size() {
    on_every_device("echo", &[], |kind, testbed| {
        let server = testbed.serve(kind, &["echo", "--listen", "7777"]);
        for address in [SERVER_V4, SERVER_V6] {
            let results = testbed.client().enter(|| echo_sizes(address)).unwrap();
            for (size, intact) in results {
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

/// The server's link may go down and come back.
#[test]
fn serves_again_after_link_down() {
    on_every_device("link", &["ping"], |kind, testbed| {
        if kind.creates_link() {
            return;
        }
        let server = testbed.serve(kind, &["echo"]);
        check_ping(kind, testbed, SERVER_V4);
        for state in ["down", "up"] {
            testbed.client().ip(&["link", "set", testbed.client_device(), state]).unwrap();
        }
        // The kernel notices the carrier a moment later and sends nothing until then.
        let show = ["-o", "link", "show", testbed.client_device()];
        while !testbed.client().ip(&show).unwrap().contains("state UP") {}
        check_ping(kind, testbed, SERVER_V4);
        drop(server);
    });
}

/// An idle server sleeps: one second without traffic takes few rounds.
#[test]
fn an_idle_server_sleeps() {
    on_every_device("idle", &[], |kind, testbed| {
        let server = testbed.serve(kind, &["echo"]);
        // The start-up time varies.
        server.wait_until_asleep();
        std::thread::sleep(Duration::from_secs(1));
        let report = server.stop();
        let rounds = report["rounds"].as_u64().unwrap();
        assert!(report["sleeps"].as_u64() >= Some(1), "{kind:?} {report}");
        assert!(rounds < 20_000, "{kind:?}: {rounds} rounds of an idle server in a second");
    });
}

/// A server on the host's own addresses.
#[test]
fn shared_address_leaves_other_traffic_to_the_kernel() {
    if !is_root("shared") || !has_programs("shared", &["dig", "kdig", "ping", "nc"]) {
        return;
    }
    let testbed = Testbed::shared();
    let zone = zone();
    let serve = ["dns", "--zone", &zone, "--shared", "--iface", testbed.device()];
    let server = testbed.start(&serve);
    for address in [SERVER_V4, SERVER_V6] {
        check_dns(&testbed, address);
        check_ping(DeviceKind::Xdp, &testbed, address);
    }
    check_kernel_tcp(&testbed);
    server.kill();
    check_kernel_tcp(&testbed);
    check_ping(DeviceKind::Xdp, &testbed, SERVER_V4);
    let link = testbed.server().ip(&["link", "show", testbed.device()]).unwrap();
    assert!(!link.contains("xdp"), "XDP program still attached: {link}");
    // The interface can be used again at once.
    let server = testbed.start(&serve);
    check_dns(&testbed, SERVER_V4);
    let report = server.stop();
    assert_eq!(report["requests"], report["answers"]);
}

fn check_kernel_tcp(testbed: &Testbed) {
    for address in [SERVER_V4, SERVER_V6] {
        let listener =
            testbed.server().enter(|| std::net::TcpListener::bind((address, 0)).unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        let stream = testbed
            .client()
            .enter(|| std::net::TcpStream::connect((address, port)).unwrap())
            .unwrap();
        let (accepted, peer) = listener.accept().unwrap();
        assert_eq!(peer, stream.local_addr().unwrap());
        drop((accepted, stream));
    }
}

/// A kernel socket holds the port: the server reports that the port is in use.
#[test]
fn refuses_a_port_in_use_by_the_kernel() {
    if !is_root("port in use") {
        return;
    }
    let testbed = Testbed::shared();
    let holder =
        testbed.server().enter(|| std::net::UdpSocket::bind("0.0.0.0:7777").unwrap()).unwrap();
    let output = testbed
        .server()
        .command(env!("CARGO_BIN_EXE_tidegate"))
        .args(["serve", "echo", "--listen", "7777", "--shared", "--iface", testbed.device()])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("in use"), "{error}");
    drop(holder);
}

/// A server that takes over an address with another hardware address announces it: the client
/// learns the new one at once.
#[test]
fn clients_learn_the_new_hardware_address_of_a_takeover() {
    if !is_root("takeover") || !has_programs("takeover", &["ping"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let macs = ["02:00:00:00:00:0a", "02:00:00:00:00:0b"];
    let has_mac = |address: &str, mac: &str| {
        let shown = testbed.client().ip(&["neigh", "show", address]).unwrap();
        shown.contains(mac)
    };
    for mac in macs {
        let server = testbed.serve(DeviceKind::Packet, &["echo", "--mac", mac]);
        if mac == macs[0] {
            for address in [SERVER_V4, SERVER_V6] {
                check_ping(DeviceKind::Packet, &testbed, address);
            }
        }
        // The client sends nothing: it learns from the announcements alone.
        for address in [SERVER_V4, SERVER_V6] {
            support::wait_until("the client knows the server", || has_mac(address, mac));
        }
        server.stop();
    }
}

/// The kernel on the other end has the address: the server names it and ends.
#[test]
fn refuses_an_address_that_another_host_has() {
    if !is_root("address conflict") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let client = testbed.client().ip(&["link", "show", testbed.client_device()]).unwrap();
    for (address, bits) in [(CLIENT_V4, 24), (CLIENT_V6, 64)] {
        for command in [&["serve", "echo"] as &[&str], &["serve", "http"], &["daemon"]] {
            for probe in ["quick", "rfc"] {
                let folder = tempfile::tempdir().unwrap();
                let mut server = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
                server.args(command).args(["--io", "packet", "--iface", testbed.device()]);
                server.args(["--probe", probe, "--address", &format!("{address}/{bits}")]);
                if command == ["daemon"] {
                    server.arg("--socket").arg(folder.path().join("socket"));
                }
                let output = server.output().unwrap();
                assert!(!output.status.success());
                assert!(output.stdout.is_empty(), "no ready line");
                let error = String::from_utf8_lossy(&output.stderr).into_owned();
                let start = format!("uses {address}, too: choose another address");
                assert!(error.contains(&start), "{command:?}: {error}");
                let mac = error.split_once("MAC address ").unwrap().1.split(' ').next().unwrap();
                assert!(client.contains(mac), "{error}{client}");
            }
        }
    }
}

/// The kernel probes an address that the server has, and leaves it to the server.
#[test]
fn kernel_finds_addresses_of_the_server_taken() {
    on_every_device("probed address", &["arping"], |kind, testbed| {
        // With DPDK's driver both ends have one hardware address, and hosts pass over claims of their
        // own.
        if matches!(kind, DeviceKind::DpdkTap | DeviceKind::DpdkMemif) {
            return;
        }
        let server = testbed.serve(kind, &["echo"]);
        let device = testbed.client_device();
        let probed = testbed.try_tool("arping", &["-D", "-c", "2", "-I", device, SERVER_V4]);
        assert_eq!(probed.status.code(), Some(1), "{kind:?}: nobody answered the probe");
        let client = testbed.client();
        client.ip(&["address", "add", &format!("{SERVER_V6}/64"), "dev", device]).unwrap();
        support::wait_until("the kernel finds the IPv6 address taken", || {
            client.ip(&["address", "show", "dev", device]).unwrap().contains("dadfailed")
        });
        check_ping(kind, testbed, SERVER_V4);
        server.stop();
    });
}

/// The server resolves the client's hardware address instead of guessing it: a client whose
/// address has never sent anything to the server's stack is answered too.
#[test]
fn answers_a_client_after_its_hardware_address_changed() {
    on_every_device("neighbour", &["ping"], |kind, testbed| {
        let server = testbed.serve(kind, &["echo"]);
        check_ping(kind, testbed, SERVER_V4);
        if let Testbed::Veth(_) = testbed {
            let device = testbed.client_device();
            testbed.client().ip(&["link", "set", device, "address", "02:aa:bb:cc:dd:ee"]).unwrap();
            let _ = testbed.try_tool("arping", &["-U", "-c", "1", "-I", device, CLIENT_V4]);
            check_ping(kind, testbed, SERVER_V4);
        }
        drop(server);
    });
}
