//! Unmodified applications with an embedded stack, with the kernel's tools on the client side.

mod support;

use std::fs;
use std::path::Path;

use support::run::ChildProcess;
use support::{
    CLIENT_V4, CLIENT_V6, DeviceKind, SERVER_V4, SERVER_V6, Testbed, can_run, files, tidegate, url,
};

const SERVERS: [&str; 2] = [SERVER_V4, SERVER_V6];

/// Fetches both files over both families, and the small one over loopback.
fn fetch_all(testbed: &Testbed, folder: &Path, port: u16) {
    for address in SERVERS {
        let small = url(address, &format!(":{port}/small"));
        assert_eq!(testbed.tool("curl", &["-sS", "--max-time", "20", &small]), "high water\n");
        let got = folder.join("got");
        let (got_text, large) = (got.to_str().unwrap(), url(address, &format!(":{port}/large")));
        testbed.tool("curl", &["-sS", "--max-time", "20", "-o", got_text, &large]);
        assert!(fs::read(&got).unwrap() == fs::read(folder.join("large")).unwrap(), "{address}");
    }
    let inside = url("127.0.0.1", &format!(":{port}/small"));
    let mut curl = testbed.server().command("curl");
    let output = curl.args(["-sS", "--max-time", "20", &inside]).output().unwrap();
    assert_eq!(output.stdout, b"high water\n", "loopback stays with the kernel");
}

#[test]
fn redis_serves_saves_and_is_benchmarked() {
    if !can_run("run_redis", &["redis-server", "redis-cli", "redis-benchmark"]) {
        return;
    }
    for (kind, io) in
        [(DeviceKind::Xdp, "xdp"), (DeviceKind::Packet, "packet"), (DeviceKind::Tap, "tap")]
    {
        let testbed = Testbed::new(kind);
        let folder = files();
        let folder = folder.path().to_str().unwrap();
        let mut redis = vec!["redis-server", "--port", "6379", "--bind", "0.0.0.0", "::"];
        redis.extend(["--protected-mode", "no", "--dir", folder]);
        let _server = testbed.run_server(&["--io", io], &redis, 6379);
        let request = |address: &str, words: &[&str]| {
            testbed.tool("redis-cli", &[&["-h", address], words].concat()).trim_end().to_owned()
        };
        for address in SERVERS {
            assert_eq!(request(address, &["set", "tide", "high"]), "OK");
            assert_eq!(request(address, &["get", "tide"]), "high");
            let large = "x".repeat(100_000);
            assert_eq!(request(address, &["set", "large", &large]), "OK");
            assert_eq!(request(address, &["strlen", "large"]), "100000");
        }
        // A child writes the file; the parent continues to serve.
        assert!(request(SERVER_V4, &["bgsave"]).contains("started"));
        let saved = || request(SERVER_V4, &["info", "persistence"]);
        while saved().contains("rdb_bgsave_in_progress:1") {}
        assert!(saved().contains("rdb_last_bgsave_status:ok"), "{}", saved());
        for address in SERVERS {
            let all = ["-h", address, "-n", "2000", "-c", "20", "-t", "get,set,lpush", "--csv"];
            assert_eq!(testbed.tool("redis-benchmark", &all).lines().count(), 4);
            let pipelined = ["-h", address, "-n", "5000", "-P", "16", "-t", "get", "--csv"];
            testbed.tool("redis-benchmark", &pipelined);
        }
    }
}

#[test]
fn server_and_client_work_on_shared_addresses() {
    if !can_run("run_shared", &["redis-server", "redis-cli"]) {
        return;
    }
    let testbed = Testbed::shared();
    let redis = ["redis-server", "--port", "6379", "--bind", "0.0.0.0", "::"];
    let redis = [&redis[..], &["--protected-mode", "no", "--save", ""]].concat();
    let log = tempfile::NamedTempFile::new().unwrap();
    let shared = ["--shared", "--log", log.path().to_str().unwrap()];
    let server = testbed.wait_for_server(&mut testbed.run_with(&shared, &redis), 6379);
    for address in SERVERS {
        assert_eq!(testbed.tool("redis-cli", &["-h", address, "set", "tide", "high"]), "OK\n");
    }
    assert!(fs::read_to_string(log.path()).unwrap().contains("now uses Tidegate"));
    drop(server);

    let _on_kernel = ChildProcess::new(testbed.client().command(redis[0]).args(&redis[1..]));
    for address in [CLIENT_V4, CLIENT_V6] {
        testbed.wait_for_port(address, 6379);
        let request = ["redis-cli", "-h", address, "set", "tide", "high"];
        let output = testbed.run_with(&shared, &request).output().unwrap();
        assert_eq!(output.stdout, b"OK\n", "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(fs::read_to_string(log.path()).unwrap().matches("now uses Tidegate").count(), 3);
}

#[test]
fn memcached_answers_on_several_threads() {
    if !can_run("run_memcached", &["memcached", "sh", "nc"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let memcached = ["memcached", "-u", "root", "-p", "11211", "-l", "0.0.0.0,::", "-t", "2"];
    let _server = testbed.run_server(&[], &memcached, 11211);
    for address in SERVERS {
        let request =
            format!(r"printf 'set k 0 0 4\r\nhigh\r\nget k\r\nquit\r\n' | nc {address} 11211");
        assert_eq!(
            testbed.tool("sh", &["-c", &request]),
            "STORED\r\nVALUE k 0 4\r\nhigh\r\nEND\r\n",
            "{address}"
        );
    }
}

#[test]
fn nginx_sends_files_in_one_process() {
    if !can_run("run_nginx", &["nginx", "curl"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let folder = files();
    let root = folder.path().to_str().unwrap();
    let config = format!(
        "daemon off; master_process off; user root; pid {root}/pid; error_log {root}/errors; \
         events {{ }} http {{ access_log off; sendfile on; tcp_nopush on; \
         server {{ listen 80; listen [::]:80; root {root}; }} }}"
    );
    let config_file = folder.path().join("nginx.conf");
    fs::write(&config_file, config).unwrap();
    let nginx = ["nginx", "-c", config_file.to_str().unwrap(), "-p", root];
    let _server = testbed.run_server(&[], &nginx, 80);
    fetch_all(&testbed, folder.path(), 80);
}

/// HTTP server that opens and sends a file for each request.
const NODE: &str = "const http = require('http'), fs = require('fs');
    http.createServer((request, response) =>
        fs.createReadStream(process.argv[2] + request.url).pipe(response)).listen(8080, '::');";

#[test]
fn node_serves_files_from_its_own_threads() {
    if !can_run("run_node", &["node", "curl", "ab"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let folder = files();
    let program = folder.path().join("serve.js");
    fs::write(&program, NODE).unwrap();
    let root = folder.path().to_str().unwrap();
    let _node = testbed.run_server(&[], &["node", program.to_str().unwrap(), root], 8080);
    fetch_all(&testbed, folder.path(), 8080);
    fs::write(folder.path().join("page"), "tide\n".repeat(500)).unwrap();
    for host in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
        let url = format!("http://{host}:8080/page");
        let printed = testbed.tool("ab", &["-q", "-n", "2000", "-c", "8", &url]);
        let is_zero = |line: &str| line.starts_with("Failed requests:") && line.ends_with(" 0");
        assert!(printed.lines().any(is_zero), "{printed}");
        assert!(printed.contains("Complete requests:      2000"), "{printed}");
    }
}

#[test]
fn python_serves_files_and_curl_fetches_them() {
    if !can_run("run_http", &["python3", "curl"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let folder = files();
    let root = folder.path().to_str().unwrap();
    let server = ["python3", "-m", "http.server", "80", "--bind", "::", "--directory", root];
    let _server = testbed.run_server(&[], &server, 80);
    fetch_all(&testbed, folder.path(), 80);

    // The other direction: the client is on Tidegate.
    let server = ["-m", "http.server", "8080", "--bind", "::", "--directory", root];
    let _on_kernel = ChildProcess::new(testbed.client().command("python3").args(server));
    for address in [CLIENT_V4, CLIENT_V6] {
        testbed.wait_for_port(address, 8080);
    }
    drop(_server);
    for address in [CLIENT_V4, CLIENT_V6] {
        let small = url(address, ":8080/small");
        let curl = testbed.run(&[], &["curl", "-sS", "--max-time", "20", &small]).output().unwrap();
        assert_eq!(curl.stdout, b"high water\n", "{}", String::from_utf8_lossy(&curl.stderr));
    }
}

#[test]
fn iperf3_moves_data_both_ways() {
    if !can_run("run_iperf3", &["iperf3"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let _server = testbed.run_server(&[], &["iperf3", "-s"], 5201);
    for address in SERVERS {
        for more in [&[][..], &["-R"], &["-u", "-b", "10M"]] {
            let all = [&["-c", address, "-n", "2M", "--json"], more].concat();
            let report: serde_json::Value =
                serde_json::from_str(&testbed.tool("iperf3", &all)).unwrap();
            assert!(report["error"].is_null(), "{more:?}: {report}");
        }
    }
}

#[test]
fn socat_echoes_in_one_process() {
    if !can_run("run_socat", &["socat", "sh"]) {
        return;
    }
    for (listen, connect) in [
        ("TCP4-LISTEN:7777,reuseaddr", format!("TCP4:{SERVER_V4}:7777")),
        ("TCP6-LISTEN:7777,reuseaddr", format!("TCP6:[{SERVER_V6}]:7777")),
    ] {
        let testbed = Testbed::new(DeviceKind::Xdp);
        let _server = ChildProcess::new(&mut testbed.run(&[], &["socat", listen, "PIPE"]));
        let request = format!("echo high water | socat -t 10 - {connect},retry=100,interval=0.1");
        assert_eq!(testbed.tool("sh", &["-c", &request]), "high water\n");
    }
}

#[test]
fn rules_leave_excluded_ports_to_the_kernel() {
    if !can_run("run_rules", &["python3", "curl"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let folder = files();
    let root = folder.path().to_str().unwrap();
    let rules = folder.path().join("rules.toml");
    fs::write(&rules, "listen = ['81-90']\nconnect = []\n").unwrap();
    let flags = ["--rules", rules.to_str().unwrap(), "--log", &format!("{root}/log")];
    let serve = |port: &'static str| ["python3", "-m", "http.server", port, "--directory", root];
    let _server = ChildProcess::new(&mut testbed.run(&flags, &serve("80")));
    // The server listens on a kernel socket, so clients on the host reach it.
    let request = ["-sS", "--retry", "50", "--retry-delay", "1", "--retry-connrefused"];
    let mut curl = testbed.server().command("curl");
    let output = curl.args(request).arg("http://127.0.0.1/small").output().unwrap();
    assert_eq!(output.stdout, b"high water\n");
    assert!(
        !folder.path().join("log").exists() || fs::read(format!("{root}/log")).unwrap().is_empty()
    );
}

#[test]
fn rejects_unsupported_programs_with_reason() {
    let refused = |arguments: &[&str]| {
        let output = tidegate(arguments);
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let with = |program: &str| {
        let host = ["run", "--embedded", "--iface", "lo", "--address", "192.0.2.1/24", "--"];
        refused(&[&host[..], &[program]].concat())
    };
    let without_daemon = ["run", "--socket", "/nonexistent/daemon.sock", "--", "true"];
    assert!(refused(&without_daemon).contains("start one with `tidegate daemon`"));
    assert!(refused(&["run", "--embedded", "--iface", "lo", "--", "true"]).contains("--address"));
    assert!(with("no-such-program").contains("no such executable"));
    let log =
        ["run", "--embedded", "--iface", "lo", "--address", "192.0.2.1/24", "--log", "/no/log"];
    assert!(refused(&[&log[..], &["--", "true"]].concat()).contains("--log /no/log: No such file"));
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("static");
    // ELF header without program headers: the executable names no C library.
    let mut head = b"\x7fELF\x02\x01".to_vec();
    head.resize(64, 0);
    fs::write(&program, head).unwrap();
    assert!(with(program.to_str().unwrap()).contains("linked statically"));
}

/// A program is told that another host has an address of its stack, and its sockets fail.
#[test]
fn sockets_fail_if_another_host_has_the_address() {
    if !can_run("address conflict of a program", &["python3"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let link = testbed.client().ip(&["link", "show", testbed.client_device()]).unwrap();
    for (address, bits, family) in [(CLIENT_V4, 24, "AF_INET"), (CLIENT_V6, 64, "AF_INET6")] {
        let script = format!(
            "import socket; s = socket.socket(socket.{family}); s.bind(('{address}', 7000)); \
             s.listen(); s.accept()"
        );
        for probe in ["quick", "rfc"] {
            let own = format!("{address}/{bits}");
            let flags = ["--io", "packet", "--probe", probe, "--address", &own];
            let output = testbed.run_with(&flags, &["python3", "-c", &script]).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success(), "{error}");
            assert!(error.contains("Cannot assign requested address"), "{error}");
            let expected = format!("uses {address}, too: choose another address");
            assert!(error.contains(&expected), "{probe}: {error}");
            let mac = error.split_once("MAC address ").unwrap().1.split(' ').next().unwrap();
            assert!(link.contains(mac), "{error}{link}");
        }
    }
}

/// A program that gives up its privileges before its first socket is told what helps: as root it was
/// started already.
#[test]
fn programs_without_privileges_are_sent_to_a_daemon() {
    if !can_run("program without privileges", &["python3"]) {
        return;
    }
    for (kind, io) in [(DeviceKind::Xdp, "xdp"), (DeviceKind::Packet, "packet")] {
        let testbed = Testbed::new(kind);
        for family in ["AF_INET", "AF_INET6"] {
            let script = format!(
                "import os, socket; os.setuid(65534); s = socket.socket(socket.{family}); \
                 s.bind(('', 7000)); s.listen()"
            );
            let program = ["python3", "-c", &script];
            let output = testbed.run(&["--io", io], &program).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success(), "{error}");
            assert!(error.contains("Network is down"), "{error}");
            assert!(error.contains("this process lacks CAP_"), "{error}");
            assert!(error.contains("attach to a daemon"), "{error}");
            assert!(!error.contains("as root") && !error.contains("setcap"), "{error}");
        }
    }
}
