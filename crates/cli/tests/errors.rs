//! What goes wrong is said in one clear error, with an exit code, and leaves
//! nothing behind.

mod support;

use std::process::{Command, Output};

use support::{SERVER_V4, Site, is_root, tidegate, zone};

/// The error of a run that failed: one message, no panic.
fn error_of(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "it ended well: {stderr}");
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
fn wrong_flags_name_the_flag() {
    fails_with(&[], &["Usage"]);
    fails_with(&["serve", "dns", "--prot", "xdp"], &["--prot", "--port"]);
    fails_with(&["serve", "dns", "--port", "avian"], &["avian", "xdp"]);
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
    fails_with(&["lab", "nothing"], &["nothing"]);
}

#[test]
fn settings_of_the_gate_that_make_no_sense_say_why() {
    let cases: [(&[&str], &str); 7] = [
        (&["--low-mark-percent", "80"], "low mark must be below"),
        (&["--cpu-share-percent", "0"], "cpu-share-percent is 0"),
        (&["--receive-quota", "0"], "receive-quota is 0"),
        (&["--receive-quota", "some"], "unlimited"),
        (&["--mode", "napi", "--cpu-share-percent", "50"], "choose mode polled"),
        (&["--mode", "napi", "--budget", "10"], "at least the weight"),
        (&["--mode", "fast"], "interrupt"),
    ];
    for (flags, words) in cases {
        let server = ["serve", "echo", "--iface", "lo", "--address", "10.9.8.7/24"];
        fails_with(&[&server, flags].concat(), &[words]);
    }
}

#[test]
fn a_missing_interface_is_named_with_those_that_exist() {
    for port in ["xdp", "packet"] {
        let arguments = ["serve", "echo", "--port", port, "--iface", "nope0"];
        let own = [&arguments[..], &["--address", "10.0.0.1/24"]].concat();
        fails_with(&own, &["nope0"]);
    }
    fails_with(&["serve", "echo", "--shared", "--iface", "nope0"], &["nope0", "lo"]);
    fails_with(&["doctor", "--iface", "nope0"], &["nope0", "lo"]);
}

#[cfg(not(feature = "dpdk"))]
#[test]
fn a_program_without_dpdk_says_what_to_install() {
    let serve = ["serve", "echo", "--port", "dpdk:net_null0", "--address", "10.0.0.1/24"];
    fails_with(&serve, &["libdpdk-dev", "--features dpdk"]);
    let load = ["load", "udp", "10.0.0.1:7", "--port", "dpdk:net_null0", "--source", "10.0.0.2"];
    fails_with(&load, &["libdpdk-dev", "--features dpdk"]);
    fails_with(&["lab", "dpdk"], &["libdpdk-dev", "--features dpdk"]);
    fails_with(&["lab", "dpdk", "--forward", "net_null0"], &["libdpdk-dev", "--features dpdk"]);
}

#[test]
fn a_port_that_there_is_not_is_told_with_those_that_there_are() {
    let serve = ["serve", "echo", "--address", "10.0.0.1/24", "--port"];
    fails_with(&[&serve[..], &["nonsense"]].concat(), &["nonsense", "xdp, packet, tap, dpdk:"]);
    let both = ["dpdk:net_null0", "--iface", "lo"];
    fails_with(&[&serve[..], &both].concat(), &["net_af_packet0,iface=lo"]);
}

#[test]
fn a_broken_zone_file_is_told_by_line_and_column() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.zone");
    let serve = |text: &str| {
        std::fs::write(&path, text).unwrap();
        let zone = format!("example.test={}", path.display());
        error_of(&tidegate(&["serve", "dns", "--port", "kernel", "--zone", &zone]))
    };
    let good = "@ 60 IN SOA ns host 1 2 3 4 5\n@ 60 IN NS ns\nns 60 IN A 192.0.2.1\n";
    let error = serve(&format!("{good}www 60 IN A 192.0.2\n"));
    assert!(error.contains("broken.zone:4:"), "{error}");
    let error = serve("@ 60 IN NS ns\nns 60 IN A 192.0.2.1\n");
    assert!(error.contains("SOA"), "{error}");
    let error = serve(&format!("{good}www 60 IN CNAME a\nwww 60 IN A 192.0.2.1\n"));
    assert!(error.contains("CNAME"), "{error}");
    fails_with(
        &["serve", "dns", "--port", "kernel", "--zone", "example.test=no-such.zone"],
        &["no-such.zone"],
    );
    fails_with(&["serve", "dns", "--port", "kernel"], &["--zone"]);
}

#[test]
fn a_broken_configuration_file_is_told() {
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

/// Starts a guard with this configuration file.
fn guard_refused(text: &str) -> String {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let path = file.path().to_str().unwrap();
    error_of(&tidegate(&["guard", "--iface", "lo", "--port", "udp/53", "--config", path]))
}

#[test]
fn classes_that_make_no_sense_say_why() {
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
    for (text, words) in cases {
        let error = guard_refused(&text);
        assert!(error.contains(words), "{words:?} is not in: {error}");
    }
    fails_with(&["guard", "--iface", "lo"], &["--port"]);
    fails_with(&["guard", "--iface", "lo", "--port", "53"], &["udp/53"]);
    fails_with(&["guard", "--iface", "lo", "--port", "udp/53", "--friend", "us"], &["us"]);
}

#[test]
fn a_guard_on_a_guarded_interface_is_refused() {
    if !is_root("a second guard") {
        return;
    }
    let site = Site::shared();
    let arguments = ["--iface", site.device(), "--port", "udp/53"];
    let guard = site.start_command("guard", &arguments);
    let mut second = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let error = error_of(&second.arg("guard").args(arguments).output().unwrap());
    assert!(error.contains(site.device()) && error.contains("XDP"), "{error}");
    guard.stop();
    nothing_is_attached(&site);
}

#[test]
fn without_permission_it_says_which_one() {
    if !is_root("without permission") {
        return;
    }
    let site = Site::shared();
    let run = |arguments: &[&str]| {
        let mut command = site.server().command("setpriv");
        command
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all"])
            // Through an open file: the build folder may be closed to others.
            .args(["--bounding-set=-all", "/proc/self/fd/0"])
            .args(arguments)
            .stdin(std::fs::File::open(env!("CARGO_BIN_EXE_tidegate")).unwrap());
        error_of(&command.output().unwrap())
    };
    let device = site.device();
    for port in ["xdp", "packet"] {
        let serve = ["serve", "echo", "--port", port, "--iface", device];
        let error = run(&[&serve[..], &["--address", "10.9.0.77/24"]].concat());
        assert!(error.contains("CAP_NET"), "{port}: {error}");
    }
    let error = run(&["guard", "--iface", device, "--port", "udp/53"]);
    assert!(error.contains("CAP_"), "{error}");
    nothing_is_attached(&site);
}

fn nothing_is_attached(site: &Site) {
    let link = site.server().ip(&["-d", "link", "show", site.device()]).unwrap();
    assert!(!link.contains("xdp"), "left attached: {link}");
}

/// Runs a server that cannot start on this site.
fn refused(site: &Site, arguments: &[&str]) -> String {
    let mut command = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let output = command.args(["serve", "echo", "--iface", site.device()]).args(arguments).output();
    error_of(&output.unwrap())
}

#[test]
fn an_interface_that_cannot_serve_is_told_and_left_as_it_was() {
    if !is_root("interface") {
        return;
    }
    let site = Site::shared();
    let own = format!("{SERVER_V4}/24");
    for port in ["xdp", "packet"] {
        let error = refused(&site, &["--port", port, "--address", &own]);
        assert!(error.contains(SERVER_V4), "{port}: {error}");
    }
    let error = refused(&site, &["--port", "packet", "--shared"]);
    assert!(error.contains("AF_XDP"), "{error}");
    let error = refused(&site, &["--queue", "63", "--shared"]);
    assert!(error.contains("queue 63"), "{error}");
    let error = refused(&site, &["--frames", "0", "--shared"]);
    assert!(error.contains("frames"), "{error}");

    site.server().ip(&["link", "set", site.device(), "mtu", "9000"]).unwrap();
    let error = refused(&site, &["--shared"]);
    assert!(error.contains("MTU") && error.contains("9000"), "{error}");

    // Loopback carries no Ethernet.
    let mut command = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let output = command
        .args(["serve", "echo", "--iface", "lo", "--address", "10.1.1.1/24"])
        .output()
        .unwrap();
    assert!(error_of(&output).contains("lo"));
    nothing_is_attached(&site);
}

#[test]
fn a_second_server_on_the_interface_is_refused() {
    if !is_root("second server") {
        return;
    }
    let site = Site::shared();
    let first = site.start(&["echo", "--shared", "--iface", site.device()]);
    let error = refused(&site, &["--shared", "--listen", "9"]);
    assert!(error.contains("attached") || error.contains("in use"), "{error}");
    drop(first);
    nothing_is_attached(&site);
}

#[test]
fn help_leads_a_newcomer() {
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
fn doctor_says_what_programs_need() {
    let socket = ["--socket", "/no/such/daemon.sock"];
    let output = tidegate(&[&["doctor", "--json"][..], &socket].concat());
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let of = |subject: &str| {
        let all = findings.as_array().unwrap().iter();
        all.clone().find(|finding| finding["subject"] == subject).unwrap().clone()
    };
    assert_eq!(of("daemon")["verdict"], "fair");
    assert!(of("daemon")["remedy"].as_str().unwrap().contains("tidegate serve"));
    assert!(of("files")["what"].as_str().unwrap().contains("descriptors"));
    let no_library = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["doctor"])
        .env("TIDEGATE_PRELOAD_LIBRARY", "/no/such/library.so")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&no_library.stdout).into_owned();
    assert!(said.contains("/no/such/library.so is no file"), "{said}");
}

#[test]
fn doctor_and_drops_speak_json() {
    for command in [&["doctor", "--json"][..], &["drops", "--json"]] {
        let output = tidegate(command);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(!json.as_array().unwrap().is_empty());
    }
}
