//! SIGHUP reloads a running server: zones, document root, receive scheduling and admission.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use support::running::Running;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, can_run, files, tidegate, url};

/// Starts `tidegate` on the server's side.
fn start(testbed: &Testbed, arguments: &[&str]) -> Running {
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    Running::start(command.args(arguments))
}

/// Zone `example.test` in which `www` has this address.
fn zone_text(address: &str) -> String {
    format!(
        "$ORIGIN example.test.\n@ 60 SOA ns h 1 2 3 4 5\n@ 60 NS ns\nns 60 A 192.0.2.1\nwww 60 A {address}\n"
    )
}

fn lookup(testbed: &Testbed, name: &str) -> [String; 2] {
    [SERVER_V4, SERVER_V6].map(|server| {
        let at = format!("@{server}");
        let question = [at.as_str(), "+short", "+retry=0", "+timeout=10", name, "A"];
        testbed.tool("kdig", &question).trim().to_owned()
    })
}

fn serve_dns(testbed: &Testbed, kind: DeviceKind, flags: &[&str]) -> Running {
    let mut arguments: Vec<String> = vec!["serve".into(), "dns".into()];
    arguments.extend(kind.flags(testbed.device()));
    for address in [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")] {
        arguments.extend(["--address".to_owned(), address]);
    }
    arguments.extend(flags.iter().map(|&flag| flag.to_owned()));
    start(testbed, &arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

fn check_zone_reload(testbed: &Testbed, flags: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let zone = folder.path().join("example.zone");
    fs::write(&zone, zone_text("192.0.2.80")).unwrap();
    let zone_flags = ["--zone", zone.to_str().unwrap()];
    let mut server = serve_dns(testbed, DeviceKind::Packet, &[&zone_flags[..], flags].concat());
    let is_now = |address: &str| {
        assert_eq!(lookup(testbed, "www.example.test"), [address, address], "{flags:?}");
    };
    is_now("192.0.2.80");

    fs::write(&zone, zone_text("192.0.2.81")).unwrap();
    let line = server.reload();
    assert!(line.starts_with("reloaded: ") && line.contains("names in 1 zones"), "{line}");
    is_now("192.0.2.81");

    // A broken zone is refused with its place, and the zones before it stay.
    fs::write(&zone, zone_text("192.0.2")).unwrap();
    let line = server.reload();
    assert!(line.starts_with("not reloaded") && line.contains("example.zone:5:"), "{line}");
    is_now("192.0.2.81");

    fs::remove_file(&zone).unwrap();
    assert!(server.reload().contains("cannot read zone file"));
    is_now("192.0.2.81");

    fs::write(&zone, zone_text("192.0.2.82")).unwrap();
    assert!(server.reload().starts_with("reloaded"));
    is_now("192.0.2.82");
    server.stop();
}

#[test]
fn zones_reload_on_hangup() {
    if can_run("zones_reload", &["kdig"]) {
        let testbed = Testbed::new(DeviceKind::Packet);
        check_zone_reload(&testbed, &[]);
        check_zone_reload(&testbed, &["--readers", "2"]);
    }
}

/// Receive quota in force, from the control socket.
fn receive_quota(control: &Path) -> String {
    gate_state(control)["settings"]["receive-quota"].to_string()
}

/// Frames that a transmit class has sent.
fn sent(control: &Path, class: &str) -> u64 {
    gate_state(control)["transmit_classes"][class]["sent"].as_u64().unwrap()
}

fn gate_state(control: &Path) -> serde_json::Value {
    let output = tidegate(&["ctl", control.to_str().unwrap(), "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut state: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    state["gate"].take()
}

#[test]
fn configuration_reloads_as_a_whole_or_not_at_all() {
    if !can_run("configuration_reload", &["kdig"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| -> PathBuf { folder.path().join(name) };
    let (zone, other, config, control) =
        (path("a.zone"), path("b.zone"), path("config.toml"), path("control"));
    fs::write(&zone, zone_text("192.0.2.80")).unwrap();
    fs::write(&other, zone_text("192.0.2.90").replace("example.test", "other.test")).unwrap();
    let write_config = |zones: &str, rest: &str| {
        fs::write(&config, format!("[dns]\nzone = [{zones}]\n{rest}")).unwrap();
    };
    let (zone, other) = (format!("'{}'", zone.display()), format!("'{}'", other.display()));
    write_config(&zone, "[gate]\nreceive-quota = 32\n");
    let flags = ["--config", config.to_str().unwrap(), "--control", control.to_str().unwrap()];
    let mut server = serve_dns(&testbed, DeviceKind::Packet, &flags);
    assert_eq!(receive_quota(&control), "32");
    assert_eq!(lookup(&testbed, "www.other.test"), ["", ""]);

    let both = format!("{zone}, {other}");
    // The zones are right, but the gate is not: neither changes.
    write_config(&both, "[gate]\nreceive-quota = 0\n");
    let line = server.reload();
    assert!(line.starts_with("not reloaded") && line.contains("receive-quota"), "{line}");
    write_config(&both, "[gate]\nmode = 'dedicated'\n");
    assert!(server.reload().contains("restart"));
    assert_eq!(receive_quota(&control), "32");
    assert_eq!(lookup(&testbed, "www.other.test"), ["", ""]);

    let class = "[[admission.class]]\nname = 'all'\n";
    write_config(&both, &format!("[gate]\nreceive-quota = 16\n{class}"));
    let line = server.reload();
    assert!(line.starts_with("reloaded") && line.contains("in 2 zones"), "{line}");
    assert!(line.contains("admission classes changed"), "{line}");
    assert!(line.contains("gate.receive-quota = 16, was 32"), "{line}");
    assert!(line.contains("added admission.class[0].name = \"all\""), "{line}");
    assert_eq!(receive_quota(&control), "16");
    assert_eq!(lookup(&testbed, "www.other.test"), ["192.0.2.90", "192.0.2.90"]);

    write_config(&both, "[host]\nframes = 128\n[transmit]\nceiling-bps = 1000\n");
    let line = server.reload();
    assert!(line.starts_with("not reloaded") && line.contains("ceiling-bps 1000"), "{line}");
    for class in ["answers", "replies"] {
        let rules =
            format!("[[transmit.class]]\nname = '{class}'\nmatch = [{{ local-port = 53 }}]\n");
        write_config(&both, &format!("[host]\nframes = 128\n{rules}"));
        let line = server.reload();
        assert!(line.contains("[host] has changed: restart"), "{line}");
        assert!(line.contains("transmit classes changed"), "{line}");
        assert_eq!(sent(&control, class), 0);
        assert_eq!(lookup(&testbed, "www.other.test"), ["192.0.2.90", "192.0.2.90"]);
        assert_eq!(sent(&control, class), 2, "an answer on each family");
    }
    server.stop();
}

#[test]
fn document_root_reloads_on_hangup() {
    if !can_run("document_root", &["curl"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let (first, second, folder) = (files(), files(), tempfile::tempdir().unwrap());
    fs::write(second.path().join("small"), "low water\n").unwrap();
    let config = folder.path().join("config.toml");
    let write_root = |root: &str| fs::write(&config, format!("[http]\nroot = '{root}'\n")).unwrap();
    write_root(first.path().to_str().unwrap());
    let (v4, v6) = (format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64"));
    let mut arguments = vec!["serve", "http", "--io", "packet", "--iface", testbed.device()];
    arguments.extend(["--address", &v4, "--address", &v6, "--config", config.to_str().unwrap()]);
    let mut server = start(&testbed, &arguments);
    let is_now = |expected: &str| {
        for address in [SERVER_V4, SERVER_V6] {
            let url = url(address, "/small");
            assert_eq!(testbed.tool("curl", &["-sS", "-m", "20", "-g", &url]), expected);
        }
    };
    is_now("high water\n");
    write_root("/no/such/folder");
    let line = server.reload();
    assert!(line.starts_with("not reloaded") && line.contains("/no/such/folder"), "{line}");
    is_now("high water\n");
    write_root(second.path().to_str().unwrap());
    assert!(server.reload().starts_with("reloaded: serving "));
    is_now("low water\n");
    server.stop();
}

#[test]
fn daemon_reloads_on_hangup() {
    if !can_run("daemon_reload", &[]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (config, control, socket) = (path("config.toml"), path("control"), path("socket"));
    fs::write(&config, "[gate]\nreceive-quota = 32\n").unwrap();
    let own = format!("{SERVER_V4}/24");
    let mut arguments = vec!["daemon", "--io", "packet", "--iface", testbed.device()];
    arguments.extend(["--address", &own, "--config", &config, "--control", &control]);
    arguments.extend(["--socket", &socket]);
    let mut daemon = start(&testbed, &arguments);
    assert_eq!(receive_quota(Path::new(&control)), "32");
    fs::write(&config, "[gate]\nreceive-quota = 16\n").unwrap();
    assert!(daemon.reload().starts_with("reloaded"));
    assert_eq!(receive_quota(Path::new(&control)), "16");
    fs::write(&config, "[gate]\nreceive-quota = many\n").unwrap();
    let line = daemon.reload();
    assert!(line.starts_with("not reloaded") && line.contains("config.toml"), "{line}");
    daemon.stop();
}
