//! HTTP on every kind of device, with the kernel's sockets and well-known clients on the
//! client side.

mod support;

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Server, Testbed, has_programs, is_root, tidegate};

const LARGE_BYTES: usize = 3_000_000;

/// Document root with a page and a large file; a secret file lies outside the root.
struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        std::fs::create_dir_all(root.join("inner")).unwrap();
        std::fs::write(root.join("index.html"), "<p>high water\n").unwrap();
        std::fs::write(root.join("inner/index.html"), "<p>inner\n").unwrap();
        let large: Vec<u8> = (0..LARGE_BYTES).map(|n| (n % 251) as u8).collect();
        std::fs::write(root.join("large.bin"), large).unwrap();
        std::fs::write(folder.path().join("secret"), "no").unwrap();
        Self { folder }
    }

    fn root(&self) -> String {
        self.folder.path().join("root").to_str().unwrap().to_owned()
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }
}

fn serve(testbed: &Testbed, kind: DeviceKind, files: &Files) -> Server {
    testbed.serve(kind, &["http", "--root", &files.root()])
}

/// Runs curl and returns what it printed.
fn curl(testbed: &Testbed, arguments: &[&str]) -> String {
    let mut all = vec!["-sS", "--max-time", "20", "--path-as-is"];
    all.extend(arguments);
    testbed.tool("curl", &all)
}

fn urls(path: &str) -> [String; 2] {
    [format!("http://{SERVER_V4}{path}"), format!("http://[{SERVER_V6}]{path}")]
}

/// The status line and the headers, in lower case.
fn head(testbed: &Testbed, arguments: &[&str]) -> String {
    let mut all = vec!["-o", "/dev/null", "-D", "-"];
    all.extend(arguments);
    curl(testbed, &all).to_lowercase()
}

#[test]
fn transfers_files_intact_on_every_device() {
    if !is_root("http_files") || !has_programs("http_files", &["curl"]) {
        return;
    }
    let files = Files::new();
    let large = files.file("root/large.bin");
    for &kind in DeviceKind::ALL {
        eprintln!("{kind:?}");
        let testbed = Testbed::new(kind);
        let server = serve(&testbed, kind, &files);
        for url in urls("/") {
            assert_eq!(curl(&testbed, &[&url]), "<p>high water\n");
        }
        let got = files.file("got");
        for url in urls("/large.bin") {
            curl(&testbed, &["-o", &got, &url]);
            assert!(std::fs::read(&got).unwrap() == std::fs::read(&large).unwrap());
        }
        for url in urls("/api/echo") {
            curl(&testbed, &["-o", &got, "--data-binary", &format!("@{large}"), &url]);
            assert!(std::fs::read(&got).unwrap() == std::fs::read(&large).unwrap());
        }
        let status: Value =
            serde_json::from_str(&curl(&testbed, &[&urls("/api/status")[0]])).unwrap();
        assert_eq!(status["answers_2xx"], 6, "{status}");
        assert_eq!(status["connections_open"], 1, "{status}");
        let report = server.stop();
        assert_eq!(report["answers"], 7, "{report}");
        assert!(report["drops"].get("tcp_checksum").is_none(), "{report}");
    }
}

#[test]
fn answers_conditional_range_and_invalid_requests() {
    if !is_root("http_requests") || !has_programs("http_requests", &["curl"]) {
        return;
    }
    let files = Files::new();
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = serve(&testbed, DeviceKind::Xdp, &files);
    let [page, _] = urls("/");
    let [large, _] = urls("/large.bin");
    let response = head(&testbed, &["-I", &page]);
    assert!(response.starts_with("http/1.1 200 ok"), "{response}");
    for header in ["content-length: 14", "content-type: text/html; charset=utf-8", "last-modified"]
    {
        assert!(response.contains(header), "{header} is missing: {response}");
    }
    let etag = response.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap().to_owned();
    let same = format!("If-None-Match: {etag}");
    assert!(head(&testbed, &["-H", &same, &page]).starts_with("http/1.1 304"));
    assert!(head(&testbed, &["-H", "If-Match: \"x\"", &page]).starts_with("http/1.1 412"));
    let response = head(&testbed, &["-r", "100-199", &large]);
    assert!(response.starts_with("http/1.1 206"), "{response}");
    assert!(
        response.contains(&format!("content-range: bytes 100-199/{LARGE_BYTES}")),
        "{response}"
    );
    let got = files.file("got");
    for (range, from, to) in [("2999990-", 2_999_990, 3_000_000), ("-7", 2_999_993, 3_000_000)] {
        curl(&testbed, &["-r", range, "-o", &got, &large]);
        let expected: Vec<u8> = (from..to).map(|n| (n % 251) as u8).collect();
        assert_eq!(std::fs::read(&got).unwrap(), expected, "{range}");
    }
    assert!(head(&testbed, &["-r", "3000000-", &large]).starts_with("http/1.1 416"));
    let [folder, _] = urls("/inner");
    assert!(head(&testbed, &[&folder]).contains("location: /inner/"));
    assert_eq!(curl(&testbed, &["-L", &folder]), "<p>inner\n");
    for (path, status) in [
        ("/none", "404"),
        ("/../secret", "404"),
        ("/%2e%2e/secret", "404"),
        ("/..%2fsecret", "404"),
        ("/api/none", "404"),
    ] {
        let response = head(&testbed, &[&urls(path)[0]]);
        assert!(response.starts_with(&format!("http/1.1 {status}")), "{path}: {response}");
    }
    assert!(head(&testbed, &["-X", "DELETE", &page]).starts_with("http/1.1 405"));
    // Several requests on one connection.
    let many = curl(&testbed, &[&page, &urls("/none")[0], &page, &urls("/inner/")[0]]);
    assert_eq!(many.matches("high water").count(), 2, "{many}");
    drop(server);
}

#[test]
fn serves_well_known_clients() {
    if !is_root("http_clients") {
        return;
    }
    let files = Files::new();
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = serve(&testbed, DeviceKind::Xdp, &files);
    let urls = urls("/");
    if has_programs("http_clients", &["wrk"]) {
        for url in &urls {
            let printed = testbed.tool("wrk", &["-t1", "-c20", "-d1s", url]);
            assert!(printed.contains("requests in") && !printed.contains("errors"), "{printed}");
        }
    }
    if has_programs("http_clients", &["h2load"]) {
        for url in &urls {
            let printed = testbed.tool("h2load", &["--h1", "-n2000", "-c10", "-t1", url]);
            assert!(printed.contains("2000 succeeded, 0 failed, 0 errored"), "{printed}");
        }
    }
    if has_programs("http_clients", &["ab"]) {
        for (url, keep) in urls.iter().zip(["-k", "-q"]) {
            let printed = testbed.tool("ab", &["-n1000", "-c10", keep, url]);
            assert!(printed.contains("Failed requests:        0"), "{printed}");
        }
    }
    if has_programs("http_clients", &["python3"]) {
        let script = format!(
            "import http.client\n\
             for host in ['{SERVER_V4}', '{SERVER_V6}']:\n\
             \x20   c = http.client.HTTPConnection(host, 80, timeout=20)\n\
             \x20   for n in range(50):\n\
             \x20       c.request('POST', '/api/echo', body=b'x' * n * 1000)\n\
             \x20       assert c.getresponse().read() == b'x' * n * 1000\n"
        );
        testbed.tool("python3", &["-c", &script]);
    }
    drop(server);
}

/// A client that never completes its request is disconnected; other clients are served
/// meanwhile.
#[test]
fn header_timeout_closes_a_slow_connection() {
    if !is_root("http_slow") || !has_programs("http_slow", &["curl"]) {
        return;
    }
    use std::io::{Read, Write};
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = testbed.serve(DeviceKind::Xdp, &["http", "--header-timeout", "1"]);
    let mut slow =
        testbed.client().enter(|| std::net::TcpStream::connect((SERVER_V4, 80)).unwrap()).unwrap();
    slow.write_all(b"GET /api/status HTTP/1.1\r\nHost: x\r\n").unwrap();
    assert!(curl(&testbed, &[&urls("/api/status")[0]]).contains("\"connections_open\":2"));
    slow.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).unwrap();
    drop(server);
}

/// The same server on kernel sockets, and its error when it cannot start.
#[test]
fn serves_over_kernel_sockets_and_rejects_a_missing_root() {
    if is_root("http_kernel") && has_programs("http_kernel", &["curl"]) {
        let files = Files::new();
        let testbed = Testbed::shared();
        let root = files.root();
        let server = testbed.start(&["http", "--io", "kernel", "--root", &root]);
        for url in urls("/") {
            assert_eq!(curl(&testbed, &[&url]), "<p>high water\n");
        }
        assert_eq!(server.stop()["answers"], 2);
    }
    let output = tidegate(&["serve", "http", "--io", "kernel", "--root", "/no/such/folder"]);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && printed.contains("/no/such/folder"), "{printed}");
    assert!(!Path::new("/no/such/folder").exists());
    let mut help = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    assert!(help.args(["serve", "http", "--help"]).output().unwrap().status.success());
}
