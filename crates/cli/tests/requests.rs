//! Admission of requests, section `[requests]`, as curl and dig see it.

mod support;

use std::fs;

use serde_json::Value;
use support::running::Running;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, can_run, files, tidegate, url, zone};

/// Requests after which a class with a ceiling of one a second has refused some.
const MANY: usize = 20;

/// Starts a server with own addresses and this configuration, in a folder that it can read.
fn start(testbed: &Testbed, arguments: &[&str], config: &str) -> (Running, tempfile::TempDir) {
    let folder = files();
    let path = folder.path().join("config.toml");
    fs::write(&path, config).unwrap();
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").args(arguments).arg("--config").arg(path);
    for address in [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")] {
        command.args(["--address", &address]);
    }
    (Running::start(&mut command), folder)
}

/// Runs curl and returns what it printed.
fn curl(testbed: &Testbed, arguments: &[&str]) -> String {
    testbed.tool("curl", &[&["-sS", "--max-time", "60"], arguments].concat())
}

fn status(testbed: &Testbed) -> Value {
    serde_json::from_str(&curl(testbed, &[&url(SERVER_V4, "/api/status")])).unwrap()
}

const HTTP_CLASSES: &str = "
[requests]
retry-after-s = 7
[[requests.class]]
name = 'status'
match = [{ path = '/api/status' }]
[[requests.class]]
name = 'closed'
match = [{ path = '/closed', client = '10.9.0.0/24' }, { path = '/closed', client = 'fd00:9::/64' }]
ceiling-rps = 1
rank = 1
[[requests.class]]
name = 'session'
match = [{ session = true }]
rank = 2
";

/// Refusals, sessions and reload of `serve http`.
fn check_http(testbed: &Testbed, flags: &[&str]) {
    let (mut server, folder) = start(testbed, &[&["http"], flags].concat(), HTTP_CLASSES);
    for address in [SERVER_V4, SERVER_V6] {
        let closed = url(address, "/closed");
        let form = "%{http_code} %header{retry-after}\n";
        let mut arguments = vec!["-o", "/dev/null", "-w", form];
        arguments.extend(std::iter::repeat_n(closed.as_str(), MANY));
        let printed = curl(testbed, &arguments);
        assert!(printed.contains("503 7\n"), "{address}: {printed}");
        assert!(
            curl(testbed, &["-o", "/dev/null", "-w", form, &url(address, "/")]).contains("404")
        );

        // A refused request with a body that is not awaited ends the connection.
        let refused =
            curl(testbed, &["-i", "-d", "x", &closed, &closed, &closed, &closed, &closed]);
        let refused = refused.to_lowercase();
        let heads = refused.split("http/1.1 ").filter(|head| head.starts_with("503"));
        assert!(heads.clone().count() > 0, "{refused}");
        for part in ["retry-after: 7", "connection: close"] {
            assert!(heads.clone().all(|head| head.contains(part)), "{refused}");
        }
    }
    let before = status(testbed);
    assert!(before["refused"].as_u64().unwrap() > 0, "{before}");
    assert_eq!(before["session_requests"], 0, "{before}");

    let jar = folder.path().join("jar");
    let jar = jar.to_str().unwrap();
    for address in [SERVER_V4, SERVER_V6] {
        let _ = fs::remove_file(jar);
        let page = url(address, "/");
        let head = curl(testbed, &["-o", "/dev/null", "-D", "-", "-c", jar, &page]);
        assert!(head.contains("set-cookie: tidegate-session="), "{head}");
        // The session goes on, and gets no other cookie.
        let head = curl(testbed, &["-o", "/dev/null", "-D", "-", "-b", jar, &page, &page]);
        assert!(!head.contains("set-cookie"), "{head}");
        let forged = format!("tidegate-session={}", "0".repeat(56));
        let head = curl(testbed, &["-o", "/dev/null", "-D", "-", "-b", &forged, &page]);
        assert!(head.contains("set-cookie"), "a forged cookie is none: {head}");
    }
    let after = status(testbed);
    assert_eq!(after["session_requests"], 4, "{after}");
    assert_eq!(after["session_requests_refused"], 0, "{after}");

    // An error changes nothing, and without the section nothing is refused.
    let config = folder.path().join("config.toml");
    fs::write(&config, "[requests]\nmax-wait-ms = 0\n").unwrap();
    let line = server.reload();
    assert!(line.starts_with("not reloaded") && line.contains("max-wait-ms"), "{line}");
    fs::write(&config, "").unwrap();
    assert!(server.reload().starts_with("reloaded"));
    // The server takes new settings at its next look, a tenth of a second later.
    let set_cookie = || curl(testbed, &["-i", &url(SERVER_V6, "/")]).contains("set-cookie");
    support::wait_until("admission is off", || !set_cookie());
    let refused = status(testbed)["refused"].clone();
    let closed = url(SERVER_V4, "/closed");
    curl(testbed, &vec![closed.as_str(); MANY]);
    assert_eq!(status(testbed)["refused"], refused);
    server.stop();
}

#[test]
fn http_refuses_by_class_and_keeps_sessions() {
    if !can_run("http_requests", &["curl"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    check_http(&testbed, &["--io", "xdp", "--iface", testbed.device()]);
    let testbed = Testbed::shared();
    check_http(&testbed, &["--io", "kernel"]);
}

/// Each server core has queues and rates of its own, and one secret: a session goes on on any core.
#[test]
fn sessions_are_known_on_every_core() {
    if !can_run("http_sessions_cores", &["curl"]) {
        return;
    }
    let testbed = Testbed::with_queues(2);
    let flags = ["http", "--io", "xdp", "--iface", testbed.device(), "--cores", "2"];
    let (server, _folder) = start(&testbed, &flags, "[requests]\n");
    let head = curl(&testbed, &["-o", "/dev/null", "-D", "-", &url(SERVER_V6, "/")]);
    let cookie = head.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
    let cookie = cookie.split(';').next().unwrap();
    for number in 1..=10 {
        // Each connection has another port, and so perhaps another core.
        curl(&testbed, &["-b", cookie, &url([SERVER_V4, SERVER_V6][number % 2], "/")]);
    }
    assert_eq!(status(&testbed)["session_requests"], 10);
    server.stop();
}

fn check_dns(testbed: &Testbed, flags: &[&str]) {
    let config = "
[requests]
dns-refusal = 'REFUSAL'
[[requests.class]]
name = 'closed'
match = [{ name = 'WWW.example.test', type = 'A' }]
ceiling-rps = 1
";
    let zone = zone();
    let arguments = [&["dns", "--rate-limit", "0", "--zone", &zone], flags].concat();
    let (server, _folder) = start(testbed, &arguments, &config.replace("REFUSAL", "refused"));
    let ask = |address: &str, name: &str, rtype: &str, count: usize| {
        let server = format!("@{address}");
        let mut arguments = vec![server.as_str(), "+tries=1", "+timeout=10"];
        arguments.extend(std::iter::repeat_n([name, rtype], count).flatten());
        testbed.tool("dig", &arguments)
    };
    for address in [SERVER_V4, SERVER_V6] {
        let printed = ask(address, "www.example.test", "A", MANY);
        assert!(printed.contains("status: REFUSED"), "{printed}");
        assert!(printed.contains("EDE: 0") && printed.contains("overload"), "{printed}");
        for (name, rtype) in [("www.example.test", "AAAA"), ("ns1.example.test", "A")] {
            let printed = ask(address, name, rtype, MANY);
            assert_eq!(printed.matches("status: NOERROR").count(), MANY, "{printed}");
        }
    }
    server.stop();
    let (server, _folder) = start(testbed, &arguments, &config.replace("REFUSAL", "truncated"));
    for address in [SERVER_V4, SERVER_V6] {
        let server = format!("@{address}");
        let mut arguments = vec![server.as_str(), "+tries=1", "+timeout=10", "+ignore"];
        arguments.extend(std::iter::repeat_n(["www.example.test", "A"], MANY).flatten());
        let printed = testbed.tool("dig", &arguments);
        assert!(printed.contains("flags: qr tc rd;"), "{printed}");
    }
    server.stop();
}

#[test]
fn dns_refuses_by_name_and_type() {
    if !can_run("dns_requests", &["dig"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    check_dns(&testbed, &["--io", "packet", "--iface", testbed.device()]);
    let testbed = Testbed::shared();
    check_dns(&testbed, &["--io", "kernel"]);
}

#[test]
fn mistakes_in_the_section_are_named() {
    let folder = files();
    let path = folder.path().join("config.toml");
    let zone = zone();
    for (text, part) in [
        ("[requests]\nmax-wait-ms = 0", "section [requests]: max-wait-ms"),
        ("[requests]\nwait = 1", "wait"),
        ("[[requests.class]]\nname = 'a'\nmatch = [{ path = 'x' }]", "class `a`: path"),
        ("[[requests.class]]\nname = 'a'\nmatch = [{ type = 'X', path = '/' }]", "two rules"),
    ] {
        fs::write(&path, text).unwrap();
        let config = path.to_str().unwrap();
        for server in [&["http"][..], &["dns", "--zone", &zone]] {
            let output =
                tidegate(&[&["serve"], server, &["--io", "kernel", "--config", config]].concat());
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && error.contains(part), "{text}: {error}");
            assert!(error.contains(config), "{error}");
        }
    }
}
