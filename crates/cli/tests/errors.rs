//! Failures produce one clear error and a non-zero exit status, and leave no state behind.

mod support;

use std::process::{Command, Output, Stdio};

use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, is_root, tidegate, zone};

/// Error output of a failed run. Panics if the command succeeded or panicked.
fn error_of(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "the command succeeded unexpectedly: {stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

fn fails_with(arguments: &[&str], parts: &[&str]) {
    let error = error_of(&tidegate(arguments));
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn flag_errors_name_the_flag() {
    fails_with(&[], &["Usage"]);
    fails_with(&["serve", "dns", "--iou", "xdp"], &["--iou", "--io"]);
    fails_with(&["serve", "dns", "--io", "avian"], &["avian", "xdp"]);
    fails_with(&["serve", "dns", "--address", "300.1.2.3/24"], &["300.1.2.3/24"]);
    fails_with(&["serve", "echo"], &["--address", "--shared"]);
    fails_with(&["serve", "echo", "--address", "10.0.0.1/24"], &["--iface"]);
    fails_with(&["serve", "echo", "--shared", "--address", "10.0.0.1/24"], &["--shared"]);
    fails_with(
        &["serve", "echo", "--iface", "x", "--address", "10.0.0.1/24", "--route", "nowhere"],
        &["--route nowhere", "PREFIX=GATEWAY"],
    );
    fails_with(
        &["serve", "echo", "--iface", "x", "--address", "10.0.0.1/24", "--fault", "loss=much"],
        &["loss=much"],
    );
    fails_with(&["serve", "echo", "--cpu", "100000", "--shared"], &["--cpu 100000"]);
}

#[test]
fn run_says_where_the_stack_would_be_and_why_not() {
    let embedded = ["run", "--explain", "--iface", "lo", "--address", "192.0.2.1/24", "--", "true"];
    let output = tidegate(&embedded);
    let line = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && line.starts_with("embedded: "), "{output:?}");
    assert!(line.contains("a device or its addresses are given"), "{line}");
    let socket = ["--socket", "/nonexistent/daemon.sock"];
    let run = |flags: &[&str], parts: &[&str]| {
        fails_with(&[&["run", "--explain"], flags, &["--", "true"]].concat(), parts);
    };
    run(&socket, &["no network daemon at /nonexistent/daemon.sock"]);
    run(&[&socket[..], &["--iface", "lo"]].concat(), &["leave --socket out"]);
    run(&["--iface", "lo"], &["--address"]);
    run(&["--admission"], &["tidegate daemon"]);
}

#[test]
fn rejects_invalid_gate_settings_with_reason() {
    let cases: [(&[&str], &str); 7] = [
        (&["--low-mark-percent", "80"], "low mark must be below"),
        (&["--cpu-share-percent", "0"], "cpu-share-percent is 0"),
        (&["--receive-quota", "0"], "receive-quota is 0"),
        (&["--receive-quota", "some"], "unlimited"),
        (&["--mode", "napi", "--cpu-share-percent", "50"], "choose mode polled"),
        (&["--mode", "napi", "--budget", "10"], "at least the weight"),
        (&["--mode", "fast"], "interrupt"),
    ];
    for (flags, reason) in cases {
        let server = ["serve", "echo", "--iface", "lo", "--address", "10.9.8.7/24"];
        fails_with(&[&server, flags].concat(), &[reason]);
    }
}

#[test]
fn unusable_addresses_are_refused_with_reason() {
    let serve = |flags: &[&str], parts: &[&str]| {
        fails_with(&[&["serve", "echo", "--iface", "nope0"], flags].concat(), parts);
    };
    let own = ["--address", "10.9.0.2/24"];
    let with_own = |flags: &[&'static str]| [&own[..], flags].concat();
    serve(&["--address", "10.9.0.2"], &["prefix length", "10.9.0.2/24"]);
    serve(&["--address", "fd00:9::2"], &["prefix length", "fd00:9::2/64"]);
    serve(&["--address", "10.9.0.0/24"], &["--address 10.9.0.0/24", "network itself"]);
    serve(&["--address", "10.9.0.255/24"], &["--address 10.9.0.255/24", "broadcast"]);
    serve(&with_own(&["--address", "10.9.0.2/16"]), &["10.9.0.2/16", "twice"]);
    serve(&with_own(&["--gateway", "10.8.0.1"]), &["10.8.0.1", "none of the networks"]);
    serve(&with_own(&["--gateway", "10.9.0.2"]), &["10.9.0.2", "own address"]);
    serve(&with_own(&["--gateway", "10.9.0.255"]), &["10.9.0.255", "broadcast"]);
    serve(&with_own(&["--gateway", "10.9.0.1", "--gateway", "10.9.0.3"]), &["10.9.0.3", "second"]);
    serve(&with_own(&["--route", "10.0.0.0/8=10.8.0.1"]), &["10.8.0.1", "none of the networks"]);
    serve(&with_own(&["--gateway", "fd00:9::1"]), &["fd00:9::1", "none of the networks"]);
    serve(&with_own(&["--frames", "10"]), &["--frames 10", "64"]);
    // Usable ones get as far as the interface.
    let fine: [&[&str]; 4] = [
        &["--address", "10.9.0.0/31"],
        &["--address", "10.9.0.255/16", "--gateway", "10.9.1.0"],
        &["--address", "fd00:9::2/64", "--gateway", "fe80::1"],
        &["--address", "10.9.0.2/24", "--address", "fd00:9::2/64", "--gateway", "10.9.0.1"],
    ];
    for flags in fine {
        serve(flags, &["nope0"]);
    }
    for server in ["echo", "http"] {
        fails_with(&["serve", server, "--listen", "0", "--io", "kernel"], &["--listen 0", "65535"]);
    }
    let serve = ["serve", "dns", "--io", "kernel", "--listen", "0", "--zone"];
    fails_with(&[&serve[..], &[&zone()]].concat(), &["--listen 0"]);
}

/// A reply without a way is counted under its reason.
#[test]
fn replies_without_a_route_are_counted() {
    if !is_root("no route") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let Testbed::Veth(pair) = &testbed else { panic!("no veth pair") };
    let mac = pair.b.mac.map(|byte| format!("{byte:02x}")).join(":");
    let folder = tempfile::tempdir().unwrap();
    for (server, own) in [(SERVER_V4, "/32"), (SERVER_V6, "/128")] {
        // The server has no way for an answer to the client's neighbour solicitation either.
        let neighbour = ["neigh", "replace", server, "lladdr", &mac, "dev", &pair.a.device];
        testbed.client().ip(&neighbour).unwrap();
        let counters = folder.path().join(own.trim_start_matches('/'));
        let own = format!("{server}{own}");
        let mut flags = vec!["echo", "--io", "packet", "--iface", testbed.device()];
        flags.extend(["--address", &own, "--counters", counters.to_str().unwrap()]);
        let echo = testbed.start(&flags);
        let send = || {
            let any = if server.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
            let socket = std::net::UdpSocket::bind(any).unwrap();
            socket.send_to(b"high water", (server, 7)).unwrap();
        };
        testbed.client().enter(send).unwrap();
        support::wait_until("the request has arrived", || {
            std::fs::read(&counters).unwrap().iter().take(8).any(|&byte| byte > 0)
        });
        let report = echo.stop();
        assert!(report["drops"]["no_route"].as_u64() >= Some(1), "{server}: {report}");
    }
}

/// The port of a server on kernel sockets is in use.
#[test]
fn errors_of_kernel_sockets_name_address_and_remedy() {
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let udp_port = udp.local_addr().unwrap().port().to_string();
    let tcp_port = tcp.local_addr().unwrap().port().to_string();
    let kernel = ["--io", "kernel", "--address", "127.0.0.1/8", "--listen"];
    let cases: [(&[&str], &str); 4] = [
        (&["http"], &tcp_port),
        (&["echo", "--tcp"], &tcp_port),
        (&["echo", "--tcp", "--io-uring"], &tcp_port),
        (&["echo"], &udp_port),
    ];
    for (server, port) in cases {
        let arguments = [&["serve"], server, &kernel, &[port]].concat();
        fails_with(&arguments, &[&format!("127.0.0.1:{port}"), "in use", "`ss -"]);
    }
}

/// A server whose interface is removed says so.
#[test]
fn error_of_a_removed_interface_names_it() {
    if !is_root("removed interface") {
        return;
    }
    for flags in [&["--busy-poll", "0"][..], &["--busy-poll", "64"], &["--xdp-mode", "generic"]] {
        let testbed = Testbed::shared();
        let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["serve", "echo", "--shared", "--duration", "60"]).args(flags);
        command.args(["--iface", testbed.device()]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut output, &mut line).unwrap();
        assert!(line.starts_with("ready"), "{line}");
        testbed.server().ip(&["link", "del", testbed.device()]).unwrap();
        let error = error_of(&child.wait_with_output().unwrap());
        assert!(error.contains(testbed.device()) && error.contains("ip link"), "{error}");
    }
}

/// `tidegate doctor | head` ends quietly, whichever command writes.
#[test]
fn a_closed_pipe_is_no_failure() {
    for arguments in [&["doctor"][..], &["doctor", "--json"], &["drops"], &["drops", "--json"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output =
            command.args(arguments).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
        assert!(output.status.success(), "{arguments:?}");
    }
    // Standard error may be closed as well.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let status = command.args(["serve", "echo"]).stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn ss_lists_only_drop_reasons_that_have_occurred() {
    if !is_root("ss") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket").display().to_string();
    let own = format!("{SERVER_V4}/24");
    let flags = ["--io", "packet", "--iface", testbed.device(), "--address", &own];
    let daemon = testbed.start_command("daemon", &[&flags[..], &["--socket", &socket]].concat());
    let output = tidegate(&["ss", "--summary", "--socket", &socket]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let drops = text.trim_end().rsplit_once("Dropped: ").unwrap().1;
    assert!(drops == "none" || drops.split(", ").all(|drop| !drop.ends_with(" 0")), "{text}");
    daemon.stop();
}

/// `make` waits while another installation holds the lock of the package lists.
#[test]
fn setup_waits_for_the_package_lock() {
    if !is_root("setup") {
        return;
    }
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let script = |name: &str, text: &str| {
        std::fs::write(path(name), format!("#!/bin/bash\n{text}\n")).unwrap();
        std::fs::set_permissions(path(name), PermissionsExt::from_mode(0o755)).unwrap();
    };
    for tool in ["bash", "env", "id", "cat", "rm", "chmod", "tee", "sleep"] {
        let found = ["/usr/bin", "/bin"].map(|folder| format!("{folder}/{tool}"));
        let found = found.iter().find(|path| std::path::Path::new(path).exists()).unwrap();
        symlink(found, path(tool)).unwrap();
    }
    script("cargo", "");
    script("sudo", "\"$@\"");
    let log = path("log").display().to_string();
    // The first two calls find the lock held; later ones succeed.
    script(
        "apt-get",
        &format!(
            "echo \"$@\" >>{log}\nread -ra lines -d '' <{log}\nmapfile -t calls <{log}\n\
             if [ ${{#calls[@]}} -le 2 ]; then echo 'E: Could not get lock /var/lib/apt/lists/lock. \
             It is held by process 7 (apt-get)' >&2; exit 100; fi"
        ),
    );
    let setup = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/setup");
    let run = || {
        let mut command = Command::new("/bin/bash");
        command.arg(setup).arg("build").env("PATH", folder.path());
        command.env("TIDEGATE_APT_RETRY_SECONDS", "0").output().unwrap()
    };
    let output = run();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stderr.matches("Waiting").count(), 1, "{stderr}");
    let calls = std::fs::read_to_string(path("log")).unwrap();
    assert_eq!(calls.matches("update").count(), 3, "{calls}");
    assert!(calls.contains("install") && calls.contains("DPkg::Lock::Timeout="), "{calls}");
    // Any other failure ends at once and is shown.
    script("apt-get", "echo 'E: Unable to locate package gcc' >&2; exit 100");
    let output = run();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("Unable to locate"));
}

#[test]
fn missing_interface_error_lists_existing_interfaces() {
    for io in ["xdp", "packet"] {
        let arguments = ["serve", "echo", "--io", io, "--iface", "nope0"];
        let own = [&arguments[..], &["--address", "10.0.0.1/24"]].concat();
        fails_with(&own, &["nope0"]);
    }
    fails_with(&["serve", "echo", "--shared", "--iface", "nope0"], &["nope0", "lo"]);
    fails_with(&["doctor", "--iface", "nope0"], &["nope0", "lo"]);
}

#[cfg(not(feature = "dpdk"))]
#[test]
fn build_without_dpdk_names_the_missing_packages() {
    let serve = ["serve", "echo", "--io", "dpdk:net_null0", "--address", "10.0.0.1/24"];
    fails_with(&serve, &["libdpdk-dev", "--features dpdk"]);
    let load = ["load", "udp", "10.0.0.1:7", "--io", "dpdk:net_null0", "--source", "10.0.0.2"];
    fails_with(&load, &["libdpdk-dev", "--features dpdk"]);
}

#[test]
fn unknown_io_kind_error_lists_known_kinds() {
    let serve = ["serve", "echo", "--address", "10.0.0.1/24", "--io"];
    fails_with(
        &[&serve[..], &["nonsense"]].concat(),
        &["nonsense", "auto, xdp, packet, tap, dpdk:"],
    );
    let both = ["dpdk:net_null0", "--iface", "lo"];
    fails_with(&[&serve[..], &both].concat(), &["net_af_packet0,iface=lo"]);
}

#[test]
fn zone_file_error_reports_line_and_column() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.zone");
    let serve = |text: &str| {
        std::fs::write(&path, text).unwrap();
        let zone = format!("example.test={}", path.display());
        error_of(&tidegate(&["serve", "dns", "--io", "kernel", "--zone", &zone]))
    };
    let good = "@ 60 IN SOA ns host 1 2 3 4 5\n@ 60 IN NS ns\nns 60 IN A 192.0.2.1\n";
    let error = serve(&format!("{good}www 60 IN A 192.0.2\n"));
    assert!(error.contains("broken.zone:4:"), "{error}");
    let error = serve("@ 60 IN NS ns\nns 60 IN A 192.0.2.1\n");
    assert!(error.contains("SOA"), "{error}");
    let error = serve(&format!("{good}www 60 IN CNAME a\nwww 60 IN A 192.0.2.1\n"));
    assert!(error.contains("CNAME"), "{error}");
    fails_with(
        &["serve", "dns", "--io", "kernel", "--zone", "example.test=no-such.zone"],
        &["no-such.zone"],
    );
    fails_with(&["serve", "dns", "--io", "kernel"], &["--zone"]);
}

#[test]
fn configuration_file_error_reports_the_line() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    let serve = |text: &str| {
        std::fs::write(&path, text).unwrap();
        error_of(&tidegate(&["serve", "echo", "--config", &path]))
    };
    let error = serve("[host]\niface = eth0\n");
    assert!(error.contains(&path) && error.contains("line 2"), "{error}");
    assert!(serve("[hots]\n").contains("hots"));
    assert!(serve("[host]\naddress = ['10.0.0.1/99']\n").contains("10.0.0.1/99"));
}

/// Error of a guard started with this configuration file.
fn guard_error(text: &str) -> String {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let path = file.path().to_str().unwrap();
    error_of(&tidegate(&["guard", "--iface", "lo", "--port", "udp/53", "--config", path]))
}

#[test]
fn rejects_invalid_admission_classes_with_reason() {
    let class = "[[admission.class]]\n";
    let cases = [
        (
            format!("{class}name = 'all'\n{class}name = 'dns'\nmatch = [{{port = 53}}]\n"),
            "never match",
        ),
        (format!("{class}name = 'a'\nguaranteed-pps = 9\nceiling-pps = 8\n"), "raise the ceiling"),
        (format!("{class}name = 'a'\nceiling-pps = 0\n"), "at least 1"),
        (format!("{class}name = 'a'\nmatch = [{{port = 70000}}]\n"), "65535"),
        ("[admission]\nlow-mark-percent = 80\n".into(), "low mark must be under"),
        ("[admission]\nknown-sources = 0\n".into(), "known-sources is 0"),
        ("[admission]\nlearn = 5\n".into(), "learn"),
        ("[host]\ncpu = 1\n".into(), "no section [admission]"),
    ];
    for (text, reason) in cases {
        let error = guard_error(&text);
        assert!(error.contains(reason), "{reason:?} is not in: {error}");
    }
    fails_with(&["guard", "--iface", "lo"], &["--port"]);
    fails_with(&["guard", "--iface", "lo", "--port", "53"], &["udp/53"]);
    fails_with(&["guard", "--iface", "lo", "--port", "udp/53", "--trusted", "us"], &["us"]);
}

#[test]
fn monitor_errors_name_the_flag() {
    fails_with(&["monitor"], &["--iface"]);
    for (flag, value, part) in [
        ("--interval", "0", "number of seconds"),
        ("--count", "0", "1.."),
        ("--flows", "0", "1.."),
        ("--by", "size", "packets"),
        ("--mode", "interrupt", "polled"),
        ("--ipfix", "collector", "192.0.2.9:2055"),
        ("--cpu", "100000", "--cpu 100000"),
        ("--cpu-share", "0", "cpu-share-percent is 0"),
        ("--duration", "-1", "--duration -1"),
    ] {
        fails_with(&["monitor", "--iface", "lo", &format!("{flag}={value}")], &[part]);
    }
    fails_with(&["monitor", "--iface", "lo", "--domain", "2"], &["--ipfix"]);
    if is_root("monitor of no interface") {
        fails_with(&["monitor", "--iface", "none0"], &["none0", "lo"]);
    }
}

#[test]
fn second_guard_on_an_interface_is_refused() {
    if !is_root("a second guard") {
        return;
    }
    let testbed = Testbed::shared();
    let arguments = ["--iface", testbed.device(), "--port", "udp/53"];
    let guard = testbed.start_command("guard", &arguments);
    let mut second = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let error = error_of(&second.arg("guard").args(arguments).output().unwrap());
    assert!(error.contains(testbed.device()) && error.contains("XDP"), "{error}");
    guard.stop();
    assert_no_xdp_program(&testbed);
}

#[test]
fn missing_privilege_error_names_the_capability() {
    if !is_root("without permission") {
        return;
    }
    let testbed = Testbed::shared();
    let run = |arguments: &[&str]| {
        let mut command = testbed.server().command("setpriv");
        command
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all"])
            // Run through an open file: the build directory may be inaccessible to other users.
            .args(["--bounding-set=-all", "/proc/self/fd/0"])
            .args(arguments)
            .stdin(std::fs::File::open(env!("CARGO_BIN_EXE_tidegate")).unwrap());
        error_of(&command.output().unwrap())
    };
    let device = testbed.device();
    for io in ["xdp", "packet"] {
        let serve = ["serve", "echo", "--io", io, "--iface", device];
        let error = run(&[&serve[..], &["--address", "10.9.0.77/24"]].concat());
        assert!(error.contains("CAP_NET"), "{io}: {error}");
    }
    let error = run(&["guard", "--iface", device, "--port", "udp/53"]);
    assert!(error.contains("CAP_"), "{error}");
    assert_no_xdp_program(&testbed);
}

fn assert_no_xdp_program(testbed: &Testbed) {
    let link = testbed.server().ip(&["-d", "link", "show", testbed.device()]).unwrap();
    assert!(!link.contains("xdp"), "XDP program still attached: {link}");
}

/// Error of a server that cannot start on this testbed.
fn server_error(testbed: &Testbed, arguments: &[&str]) -> String {
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let output =
        command.args(["serve", "echo", "--iface", testbed.device()]).args(arguments).output();
    error_of(&output.unwrap())
}

#[test]
fn unusable_interface_is_refused_and_left_unchanged() {
    if !is_root("interface") {
        return;
    }
    let testbed = Testbed::shared();
    let own = format!("{SERVER_V4}/24");
    for io in ["xdp", "packet"] {
        let error = server_error(&testbed, &["--io", io, "--address", &own]);
        assert!(error.contains(SERVER_V4), "{io}: {error}");
    }
    let error = server_error(&testbed, &["--queue", "63", "--shared"]);
    assert!(error.contains("queue 63"), "{error}");
    let error = server_error(&testbed, &["--frames", "0", "--shared"]);
    assert!(error.contains("frames"), "{error}");

    testbed.server().ip(&["link", "set", testbed.device(), "mtu", "9000"]).unwrap();
    let error = server_error(&testbed, &["--shared"]);
    assert!(error.contains("MTU") && error.contains("9000"), "{error}");

    // Loopback carries no Ethernet.
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let output = command
        .args(["serve", "echo", "--iface", "lo", "--address", "10.1.1.1/24"])
        .output()
        .unwrap();
    assert!(error_of(&output).contains("lo"));
    assert_no_xdp_program(&testbed);
}

#[test]
fn help_lists_the_first_commands() {
    let help = tidegate(&["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8_lossy(&help.stdout).into_owned();
    for part in ["serve", "doctor", "load", "lab", "demo", "drops", "New here?"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    let zone = zone();
    assert!(std::path::Path::new(zone.split_once('=').unwrap().1).exists());
}

#[test]
fn doctor_checks_application_requirements() {
    let socket = ["--socket", "/no/such/daemon.sock"];
    let output = tidegate(&[&["doctor", "--json"][..], &socket].concat());
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let finding_about = |subject: &str| {
        let all = findings.as_array().unwrap().iter();
        all.clone().find(|finding| finding["subject"] == subject).unwrap().clone()
    };
    assert_eq!(finding_about("daemon")["verdict"], "fair");
    assert!(finding_about("daemon")["remedy"].as_str().unwrap().contains("tidegate daemon"));
    assert!(finding_about("files")["what"].as_str().unwrap().contains("descriptors"));
    let no_library = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["doctor"])
        .env("TIDEGATE_PRELOAD_LIBRARY", "/no/such/library.so")
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&no_library.stdout).into_owned();
    assert!(printed.contains("/no/such/library.so is not a file"), "{printed}");
}

#[test]
fn doctor_and_drops_print_json() {
    for command in [&["doctor", "--json"][..], &["drops", "--json"]] {
        let output = tidegate(command);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(!json.as_array().unwrap().is_empty());
    }
}
