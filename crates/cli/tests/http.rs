//! HTTP on every port, with the kernel's sockets and well-known clients on the
//! other side.

mod support;

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use support::{Kind, SERVER_V4, SERVER_V6, Server, Site, have, is_root, tidegate};

const LARGE_BYTES: usize = 3_000_000;

/// A folder with a page, a large file and a secret beside it.
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

fn serve(site: &Site, kind: Kind, files: &Files) -> Server {
    site.serve(kind, &["http", "--root", &files.root()])
}

/// Runs curl and returns what it printed.
fn curl(site: &Site, arguments: &[&str]) -> String {
    let mut all = vec!["-sS", "--max-time", "20", "--path-as-is"];
    all.extend(arguments);
    site.tool("curl", &all)
}

fn urls(path: &str) -> [String; 2] {
    [format!("http://{SERVER_V4}{path}"), format!("http://[{SERVER_V6}]{path}")]
}

/// The status line and the headers, in lower case.
fn head(site: &Site, arguments: &[&str]) -> String {
    let mut all = vec!["-o", "/dev/null", "-D", "-"];
    all.extend(arguments);
    curl(site, &all).to_lowercase()
}

#[test]
fn files_go_out_whole_and_come_in_whole_on_every_port() {
    if !is_root("http_files") || !have("http_files", &["curl"]) {
        return;
    }
    let files = Files::new();
    let large = files.file("root/large.bin");
    for kind in Kind::ALL {
        eprintln!("{kind:?}");
        let site = Site::new(kind);
        let server = serve(&site, kind, &files);
        for url in urls("/") {
            assert_eq!(curl(&site, &[&url]), "<p>high water\n");
        }
        let got = files.file("got");
        for url in urls("/large.bin") {
            curl(&site, &["-o", &got, &url]);
            assert!(std::fs::read(&got).unwrap() == std::fs::read(&large).unwrap());
        }
        for url in urls("/api/echo") {
            curl(&site, &["-o", &got, "--data-binary", &format!("@{large}"), &url]);
            assert!(std::fs::read(&got).unwrap() == std::fs::read(&large).unwrap());
        }
        let status: Value = serde_json::from_str(&curl(&site, &[&urls("/api/status")[0]])).unwrap();
        assert_eq!(status["answers_2xx"], 6, "{status}");
        assert_eq!(status["connections_open"], 1, "{status}");
        let report = server.stop();
        assert_eq!(report["answers"], 7, "{report}");
        assert!(report["drops"].get("tcp_checksum").is_none(), "{report}");
    }
}

#[test]
fn what_clients_may_ask_for() {
    if !is_root("http_requests") || !have("http_requests", &["curl"]) {
        return;
    }
    let files = Files::new();
    let site = Site::new(Kind::Xdp);
    let server = serve(&site, Kind::Xdp, &files);
    let [page, _] = urls("/");
    let [large, _] = urls("/large.bin");
    let answer = head(&site, &["-I", &page]);
    assert!(answer.starts_with("http/1.1 200 ok"), "{answer}");
    for header in ["content-length: 14", "content-type: text/html; charset=utf-8", "last-modified"]
    {
        assert!(answer.contains(header), "{header} is missing: {answer}");
    }
    let etag = answer.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap().to_owned();
    let same = format!("If-None-Match: {etag}");
    assert!(head(&site, &["-H", &same, &page]).starts_with("http/1.1 304"));
    assert!(head(&site, &["-H", "If-Match: \"x\"", &page]).starts_with("http/1.1 412"));
    let answer = head(&site, &["-r", "100-199", &large]);
    assert!(answer.starts_with("http/1.1 206"), "{answer}");
    assert!(answer.contains(&format!("content-range: bytes 100-199/{LARGE_BYTES}")), "{answer}");
    let got = files.file("got");
    for (range, from, to) in [("2999990-", 2_999_990, 3_000_000), ("-7", 2_999_993, 3_000_000)] {
        curl(&site, &["-r", range, "-o", &got, &large]);
        let expected: Vec<u8> = (from..to).map(|n| (n % 251) as u8).collect();
        assert_eq!(std::fs::read(&got).unwrap(), expected, "{range}");
    }
    assert!(head(&site, &["-r", "3000000-", &large]).starts_with("http/1.1 416"));
    let [folder, _] = urls("/inner");
    assert!(head(&site, &[&folder]).contains("location: /inner/"));
    assert_eq!(curl(&site, &["-L", &folder]), "<p>inner\n");
    for (path, status) in [
        ("/none", "404"),
        ("/../secret", "404"),
        ("/%2e%2e/secret", "404"),
        ("/..%2fsecret", "404"),
        ("/api/none", "404"),
    ] {
        let answer = head(&site, &[&urls(path)[0]]);
        assert!(answer.starts_with(&format!("http/1.1 {status}")), "{path}: {answer}");
    }
    assert!(head(&site, &["-X", "DELETE", &page]).starts_with("http/1.1 405"));
    // Several on one connection.
    let many = curl(&site, &[&page, &urls("/none")[0], &page, &urls("/inner/")[0]]);
    assert_eq!(many.matches("high water").count(), 2, "{many}");
    drop(server);
}

#[test]
fn well_known_clients_are_served() {
    if !is_root("http_clients") {
        return;
    }
    let files = Files::new();
    let site = Site::new(Kind::Xdp);
    let server = serve(&site, Kind::Xdp, &files);
    let urls = urls("/");
    if have("http_clients", &["wrk"]) {
        for url in &urls {
            let said = site.tool("wrk", &["-t1", "-c20", "-d1s", url]);
            assert!(said.contains("requests in") && !said.contains("errors"), "{said}");
        }
    }
    if have("http_clients", &["h2load"]) {
        for url in &urls {
            let said = site.tool("h2load", &["--h1", "-n2000", "-c10", "-t1", url]);
            assert!(said.contains("2000 succeeded, 0 failed, 0 errored"), "{said}");
        }
    }
    if have("http_clients", &["ab"]) {
        for (url, keep) in urls.iter().zip(["-k", "-q"]) {
            let said = site.tool("ab", &["-n1000", "-c10", keep, url]);
            assert!(said.contains("Failed requests:        0"), "{said}");
        }
    }
    if have("http_clients", &["python3"]) {
        let script = format!(
            "import http.client\n\
             for host in ['{SERVER_V4}', '{SERVER_V6}']:\n\
             \x20   c = http.client.HTTPConnection(host, 80, timeout=20)\n\
             \x20   for n in range(50):\n\
             \x20       c.request('POST', '/api/echo', body=b'x' * n * 1000)\n\
             \x20       assert c.getresponse().read() == b'x' * n * 1000\n"
        );
        site.tool("python3", &["-c", &script]);
    }
    drop(server);
}

/// A client that never ends its request is thrown out, and others are served
/// meanwhile.
#[test]
fn a_slow_client_loses_its_connection() {
    if !is_root("http_slow") || !have("http_slow", &["curl"]) {
        return;
    }
    use std::io::{Read, Write};
    let site = Site::new(Kind::Xdp);
    let server = site.serve(Kind::Xdp, &["http", "--header-timeout", "1"]);
    let mut slow =
        site.client().enter(|| std::net::TcpStream::connect((SERVER_V4, 80)).unwrap()).unwrap();
    slow.write_all(b"GET /api/status HTTP/1.1\r\nHost: x\r\n").unwrap();
    assert!(curl(&site, &[&urls("/api/status")[0]]).contains("\"connections_open\":2"));
    slow.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).unwrap();
    drop(server);
}

/// The same server on kernel sockets, and what it says when it cannot start.
#[test]
fn kernel_sockets_and_wrong_folders() {
    if is_root("http_kernel") && have("http_kernel", &["curl"]) {
        let files = Files::new();
        let site = Site::shared();
        let root = files.root();
        let server = site.start(&["http", "--port", "kernel", "--root", &root]);
        for url in urls("/") {
            assert_eq!(curl(&site, &[&url]), "<p>high water\n");
        }
        assert_eq!(server.stop()["answers"], 2);
    }
    let output = tidegate(&["serve", "http", "--port", "kernel", "--root", "/no/such/folder"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("/no/such/folder"), "{said}");
    assert!(!Path::new("/no/such/folder").exists());
    let mut help = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    assert!(help.args(["serve", "http", "--help"]).output().unwrap().status.success());
}
