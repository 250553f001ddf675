//! Unmodified programs on Tidegate, with the kernel's tools on the other side.

mod support;

use std::fs;
use std::path::Path;

use support::run::Program;
use support::{CLIENT_V4, CLIENT_V6, Kind, SERVER_V4, SERVER_V6, Site, can, files, tidegate, url};

const SERVERS: [&str; 2] = [SERVER_V4, SERVER_V6];

/// Fetches both files by both families, and the small one over loopback.
fn fetch_all(site: &Site, folder: &Path, port: u16) {
    for address in SERVERS {
        let small = url(address, &format!(":{port}/small"));
        assert_eq!(site.tool("curl", &["-sS", "--max-time", "20", &small]), "high water\n");
        let got = folder.join("got");
        let (got_text, large) = (got.to_str().unwrap(), url(address, &format!(":{port}/large")));
        site.tool("curl", &["-sS", "--max-time", "20", "-o", got_text, &large]);
        assert!(fs::read(&got).unwrap() == fs::read(folder.join("large")).unwrap(), "{address}");
    }
    let inside = url("127.0.0.1", &format!(":{port}/small"));
    let mut curl = site.server().command("curl");
    let output = curl.args(["-sS", "--max-time", "20", &inside]).output().unwrap();
    assert_eq!(output.stdout, b"high water\n", "loopback stays with the kernel");
}

#[test]
fn redis_serves_saves_and_is_benchmarked() {
    if !can("run_redis", &["redis-server", "redis-cli", "redis-benchmark"]) {
        return;
    }
    for (kind, port) in [(Kind::Xdp, "xdp"), (Kind::Packet, "packet"), (Kind::Tap, "tap")] {
        let site = Site::new(kind);
        let folder = files();
        let folder = folder.path().to_str().unwrap();
        let mut redis = vec!["redis-server", "--port", "6379", "--bind", "0.0.0.0", "::"];
        redis.extend(["--protected-mode", "no", "--dir", folder]);
        let _server = site.run_server(&["--port", port], &redis, 6379);
        let ask = |address: &str, words: &[&str]| {
            site.tool("redis-cli", &[&["-h", address], words].concat()).trim_end().to_owned()
        };
        for address in SERVERS {
            assert_eq!(ask(address, &["set", "tide", "high"]), "OK");
            assert_eq!(ask(address, &["get", "tide"]), "high");
            let large = "x".repeat(100_000);
            assert_eq!(ask(address, &["set", "large", &large]), "OK");
            assert_eq!(ask(address, &["strlen", "large"]), "100000");
        }
        // A child writes the file; the parent goes on serving.
        assert!(ask(SERVER_V4, &["bgsave"]).contains("started"));
        let saved = || ask(SERVER_V4, &["info", "persistence"]);
        while saved().contains("rdb_bgsave_in_progress:1") {}
        assert!(saved().contains("rdb_last_bgsave_status:ok"), "{}", saved());
        for address in SERVERS {
            let all = ["-h", address, "-n", "2000", "-c", "20", "-t", "get,set,lpush", "--csv"];
            assert_eq!(site.tool("redis-benchmark", &all).lines().count(), 4);
            let pipelined = ["-h", address, "-n", "5000", "-P", "16", "-t", "get", "--csv"];
            site.tool("redis-benchmark", &pipelined);
        }
    }
}

#[test]
fn a_server_and_a_client_live_on_the_kernels_address() {
    if !can("run_shared", &["redis-server", "redis-cli"]) {
        return;
    }
    let site = Site::shared();
    let redis = ["redis-server", "--port", "6379", "--bind", "0.0.0.0", "::"];
    let redis = [&redis[..], &["--protected-mode", "no", "--save", ""]].concat();
    let log = tempfile::NamedTempFile::new().unwrap();
    let shared = ["--shared", "--log", log.path().to_str().unwrap()];
    let server = site.wait_for_server(&mut site.run_with(&shared, &redis), 6379);
    for address in SERVERS {
        assert_eq!(site.tool("redis-cli", &["-h", address, "set", "tide", "high"]), "OK\n");
    }
    assert!(fs::read_to_string(log.path()).unwrap().contains("on Tidegate"));
    drop(server);

    let _on_kernel = Program::new(site.client().command(redis[0]).args(&redis[1..]));
    for address in [CLIENT_V4, CLIENT_V6] {
        site.wait_for_port(address, 6379);
        let ask = ["redis-cli", "-h", address, "set", "tide", "high"];
        let output = site.run_with(&shared, &ask).output().unwrap();
        assert_eq!(output.stdout, b"OK\n", "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(fs::read_to_string(log.path()).unwrap().matches("on Tidegate").count(), 3);
}

#[test]
fn memcached_answers_on_several_threads() {
    if !can("run_memcached", &["memcached", "sh", "nc"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let memcached = ["memcached", "-u", "root", "-p", "11211", "-l", "0.0.0.0,::", "-t", "2"];
    let _server = site.run_server(&[], &memcached, 11211);
    for address in SERVERS {
        let ask =
            format!(r"printf 'set k 0 0 4\r\nhigh\r\nget k\r\nquit\r\n' | nc {address} 11211");
        assert_eq!(
            site.tool("sh", &["-c", &ask]),
            "STORED\r\nVALUE k 0 4\r\nhigh\r\nEND\r\n",
            "{address}"
        );
    }
}

#[test]
fn nginx_sends_files_in_one_process() {
    if !can("run_nginx", &["nginx", "curl"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
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
    let _server = site.run_server(&[], &nginx, 80);
    fetch_all(&site, folder.path(), 80);
}

/// A server that sends a file that it opens for each request.
const NODE: &str = "const http = require('http'), fs = require('fs');
    http.createServer((request, response) =>
        fs.createReadStream(process.argv[2] + request.url).pipe(response)).listen(8080, '::');";

#[test]
fn node_serves_files_from_its_own_threads() {
    if !can("run_node", &["node", "curl", "ab"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let folder = files();
    let program = folder.path().join("serve.js");
    fs::write(&program, NODE).unwrap();
    let root = folder.path().to_str().unwrap();
    let _node = site.run_server(&[], &["node", program.to_str().unwrap(), root], 8080);
    fetch_all(&site, folder.path(), 8080);
    fs::write(folder.path().join("page"), "tide\n".repeat(500)).unwrap();
    for host in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
        let url = format!("http://{host}:8080/page");
        let said = site.tool("ab", &["-q", "-n", "2000", "-c", "8", &url]);
        let is_zero = |line: &str| line.starts_with("Failed requests:") && line.ends_with(" 0");
        assert!(said.lines().any(is_zero), "{said}");
        assert!(said.contains("Complete requests:      2000"), "{said}");
    }
}

#[test]
fn python_serves_files_and_curl_fetches_them() {
    if !can("run_http", &["python3", "curl"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let folder = files();
    let root = folder.path().to_str().unwrap();
    let server = ["python3", "-m", "http.server", "80", "--bind", "::", "--directory", root];
    let _server = site.run_server(&[], &server, 80);
    fetch_all(&site, folder.path(), 80);

    // The other way: the client is on Tidegate.
    let server = ["-m", "http.server", "8080", "--bind", "::", "--directory", root];
    let _on_kernel = Program::new(site.client().command("python3").args(server));
    for address in [CLIENT_V4, CLIENT_V6] {
        site.wait_for_port(address, 8080);
    }
    drop(_server);
    for address in [CLIENT_V4, CLIENT_V6] {
        let small = url(address, ":8080/small");
        let curl = site.run(&[], &["curl", "-sS", "--max-time", "20", &small]).output().unwrap();
        assert_eq!(curl.stdout, b"high water\n", "{}", String::from_utf8_lossy(&curl.stderr));
    }
}

#[test]
fn iperf3_moves_data_both_ways() {
    if !can("run_iperf3", &["iperf3"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let _server = site.run_server(&[], &["iperf3", "-s"], 5201);
    for address in SERVERS {
        for more in [&[][..], &["-R"], &["-u", "-b", "10M"]] {
            let all = [&["-c", address, "-n", "2M", "--json"], more].concat();
            let report: serde_json::Value =
                serde_json::from_str(&site.tool("iperf3", &all)).unwrap();
            assert!(report["error"].is_null(), "{more:?}: {report}");
        }
    }
}

#[test]
fn socat_echoes_in_one_process() {
    if !can("run_socat", &["socat", "sh"]) {
        return;
    }
    for (listen, connect) in [
        ("TCP4-LISTEN:7777,reuseaddr", format!("TCP4:{SERVER_V4}:7777")),
        ("TCP6-LISTEN:7777,reuseaddr", format!("TCP6:[{SERVER_V6}]:7777")),
    ] {
        let site = Site::new(Kind::Xdp);
        let _server = Program::new(&mut site.run(&[], &["socat", listen, "PIPE"]));
        let ask = format!("echo high water | socat -t 10 - {connect},retry=100,interval=0.1");
        assert_eq!(site.tool("sh", &["-c", &ask]), "high water\n");
    }
}

#[test]
fn rules_leave_ports_with_the_kernel() {
    if !can("run_rules", &["python3", "curl"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let folder = files();
    let root = folder.path().to_str().unwrap();
    let rules = folder.path().join("rules.toml");
    fs::write(&rules, "listen = ['81-90']\nconnect = []\n").unwrap();
    let flags = ["--rules", rules.to_str().unwrap(), "--log", &format!("{root}/log")];
    let serve = |port: &'static str| ["python3", "-m", "http.server", port, "--directory", root];
    let _server = Program::new(&mut site.run(&flags, &serve("80")));
    // It listens at the kernel, so the kernel's own tools reach it there.
    let ask = ["-sS", "--retry", "50", "--retry-delay", "1", "--retry-connrefused"];
    let mut curl = site.server().command("curl");
    let output = curl.args(ask).arg("http://127.0.0.1/small").output().unwrap();
    assert_eq!(output.stdout, b"high water\n");
    assert!(
        !folder.path().join("log").exists() || fs::read(format!("{root}/log")).unwrap().is_empty()
    );
}

#[test]
fn what_cannot_run_is_told_why() {
    let refused = |arguments: &[&str]| {
        let output = tidegate(arguments);
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let with = |program: &str| {
        let host = ["run", "--embedded", "--iface", "lo", "--address", "192.0.2.1/24", "--"];
        refused(&[&host[..], &[program]].concat())
    };
    let nobody = ["run", "--socket", "/nonexistent/daemon.sock", "--", "true"];
    assert!(refused(&nobody).contains("start one by `tidegate serve`"));
    assert!(refused(&["run", "--embedded", "--iface", "lo", "--", "true"]).contains("--address"));
    assert!(with("no-such-program").contains("no such program"));
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("static");
    // The head of a program with no headers: nothing names a C library.
    let mut head = b"\x7fELF\x02\x01".to_vec();
    head.resize(64, 0);
    fs::write(&program, head).unwrap();
    assert!(with(program.to_str().unwrap()).contains("linked statically"));
}
