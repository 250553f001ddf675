//! `--metrics` of every long-running command, read by curl, promtool and Prometheus.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::run::Daemon;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, has_programs, is_root, zone};
use tidegate_lab::testbed::netns::Namespace;

/// Upper bound for any step on the slowest machine.
const TIMEOUT: Duration = Duration::from_secs(60);
const V4: &str = "127.0.0.1:9480";
const V6: &str = "[::1]:9480";

fn can_run(test: &str) -> bool {
    is_root(test) && has_programs(test, &["curl", "promtool", "prometheus", "dig", "redis-server"])
}

fn fetch(namespace: &Namespace, address: &str, headers: &[&str]) -> String {
    let mut curl = namespace.command("curl");
    curl.args(["-sS", "--fail-with-body", "--max-time", "30", "--noproxy", "*"]);
    for header in headers {
        curl.args(["-H", header]);
    }
    let output = curl.arg(format!("http://{address}/metrics")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Value of the sample whose line begins so.
fn value(text: &str, sample: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {sample} in {text}")).parse().unwrap()
}

/// Checks the text by Prometheus's own linter.
fn check_with_promtool(text: &str) {
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = promtool.stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}\n{text}");
}

/// Fetches the metrics of a command whose name is `command`, and checks them.
fn checked(namespace: &Namespace, address: &str, command: &str) -> String {
    let text = fetch(namespace, address, &[]);
    assert!(text.contains(&format!("command=\"{command}\"}} 1\n")), "{text}");
    check_with_promtool(&text);
    text
}

/// The times of servers whose readers have threads of their own are there, too.
#[test]
fn readers_count_their_service_times() {
    if !can_run("metrics of readers") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let readers = ["echo", "--readers", "2", "--work-ns", "20000", "--metrics", V4];
    let _server = testbed.serve(DeviceKind::Xdp, &readers);
    let began = Instant::now();
    let echoes = 5;
    for server in [SERVER_V4, SERVER_V6] {
        let socket = testbed.client().enter(|| UdpSocket::bind((unspecified(server), 0)));
        let socket = socket.unwrap().unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        for _ in 0..echoes {
            socket.send_to(b"hello", (server, 7)).unwrap();
            assert_eq!(socket.recv(&mut [0; 8]).unwrap(), 5);
        }
    }
    let elapsed = began.elapsed().as_secs_f64();
    let times = "tidegate_udp_service_duration_seconds";
    // A time is counted just after the echo was sent.
    support::wait_until("every echo is counted", || {
        let text = fetch(testbed.server(), V4, &[]);
        value(&text, &format!("{times}_count")) == f64::from(2 * echoes)
    });
    let text = checked(testbed.server(), V4, "serve echo");
    assert!(value(&text, &format!("{times}_sum")) < elapsed, "{text}");
    // Each answer takes 20 microseconds of work.
    assert_eq!(value(&text, &format!("{times}_bucket{{le=\"1e-05\"}}")), 0.0, "{text}");
}

/// The address to which a client of `server` binds its socket.
fn unspecified(server: &str) -> IpAddr {
    match server.parse::<IpAddr>().unwrap() {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

#[test]
fn servers_count_requests_and_drops() {
    if !can_run("metrics of servers") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let dns = testbed
        .serve(DeviceKind::Xdp, &["dns", "--zone", &zone(), "--metrics", V4, "--no-cookies"]);
    let began = Instant::now();
    for server in [SERVER_V4, SERVER_V6, SERVER_V4] {
        let at = format!("@{server}");
        testbed.tool("dig", &[&at, "+tries=1", "+time=10", "www.example.test", "A"]);
    }
    let text = checked(testbed.server(), V4, "serve dns");
    assert_eq!(value(&text, "tidegate_requests_total"), 3.0);
    assert_eq!(value(&text, "tidegate_answers_total"), 3.0);
    assert_eq!(value(&text, "tidegate_udp_service_duration_seconds_count"), 3.0);
    let seconds = value(&text, "tidegate_udp_service_duration_seconds_sum");
    assert!(seconds > 0.0 && seconds < began.elapsed().as_secs_f64(), "{text}");
    assert!(!text.contains("tidegate_admission_limit"), "there is no admission: {text}");
    let queue = format!("{{device=\"{}\",queue=\"0\"}}", testbed.device());
    assert!(value(&text, &format!("tidegate_rx_packets_total{queue}")) >= 3.0);
    assert_eq!(
        value(&text, "tidegate_drops_total{reason=\"udp_checksum\",severity=\"peer\"}"),
        0.0
    );
    let open =
        fetch(testbed.server(), V4, &["Accept: application/openmetrics-text; version=1.0.0"]);
    assert!(open.ends_with("# EOF\n"), "{open}");
    // The interface is as it was: the metrics do not hold the stack.
    dns.stop();

    let folder = support::files();
    let root = folder.path().to_str().unwrap();
    let http = testbed.serve(DeviceKind::Xdp, &["http", "--root", root, "--metrics", V6]);
    let missing = support::url(SERVER_V6, "/no-such-file");
    testbed.try_tool("curl", &["-s", "--noproxy", "*", "--max-time", "30", &missing]);
    let text = checked(testbed.server(), V6, "serve http");
    assert_eq!(value(&text, "tidegate_http_responses_total{code=\"4xx\"}"), 1.0);
    assert_eq!(value(&text, "tidegate_http_response_duration_seconds_count"), 1.0);
    assert_eq!(value(&text, "tidegate_http_response_duration_seconds_bucket{le=\"+Inf\"}"), 1.0);
    http.stop();

    let kernel = ["echo", "--io", "kernel", "--metrics", V4];
    let echo = testbed.start(&kernel);
    let text = checked(testbed.server(), V4, "serve echo");
    assert_eq!(value(&text, "tidegate_requests_total"), 0.0);
    assert!(!text.contains("tidegate_rx_packets_total"), "the kernel's device is not ours");
    echo.stop();
}

#[test]
fn guard_and_monitor_have_metrics() {
    if !can_run("metrics of guard and monitor") {
        return;
    }
    let testbed = Testbed::shared();
    let device = testbed.device();
    let guard =
        testbed.start_command("guard", &["--iface", device, "--port", "udp/5300", "--metrics", V4]);
    let class = "tidegate_admission_packets_total{class=\"unknown\",result=\"admitted\"}";
    let text = checked_when(testbed.server(), V4, "guard", |text| text.contains(class));
    assert_eq!(value(&text, class), 0.0);
    assert_eq!(value(&text, "tidegate_admission_limiting"), 0.0);
    guard.stop();

    let interval = ["--iface", device, "--interval", "0.05", "--metrics", V6];
    let monitor = testbed.start_command("monitor", &interval);
    testbed.tool("ping", &["-c", "2", "-i", "0.05", SERVER_V4]);
    let packets = format!("tidegate_rx_packets_total{{device=\"{device}\",queue=\"0\"}}");
    let has_seen = |text: &str| text.contains(&packets) && value(text, &packets) >= 4.0;
    let text = checked_when(testbed.server(), V6, "monitor", has_seen);
    assert!(value(&text, "tidegate_flows") >= 2.0, "{text}");
    monitor.kill();
}

/// As [`checked`], once the metrics are as wanted: these commands publish them at intervals.
fn checked_when(
    namespace: &Namespace,
    address: &str,
    command: &str,
    is_wanted: impl Fn(&str) -> bool,
) -> String {
    let began = Instant::now();
    while !is_wanted(&fetch(namespace, address, &[])) {
        assert!(began.elapsed() < TIMEOUT, "{}", fetch(namespace, address, &[]));
        std::thread::yield_now();
    }
    checked(namespace, address, command)
}

/// Prometheus that scrapes the daemon; killed on drop.
struct Prometheus {
    child: Child,
    _folder: tempfile::TempDir,
}

impl Prometheus {
    const ADDRESS: &'static str = "127.0.0.1:9490";

    fn start(namespace: &Namespace, target: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}\n\
             scrape_configs:\n- job_name: tidegate\n  static_configs:\n  - targets: ['{target}']\n"
        );
        fs::write(&config, text).unwrap();
        let mut command = namespace.command("prometheus");
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()));
        command.arg(format!("--web.listen-address={}", Self::ADDRESS));
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        Self { child, _folder: folder }
    }

    /// Value of a query, once it is as wanted.
    fn query_until(&self, namespace: &Namespace, query: &str, is_wanted: impl Fn(f64) -> bool) {
        let began = Instant::now();
        loop {
            let url = format!("http://{}/api/v1/query", Self::ADDRESS);
            let mut curl = namespace.command("curl");
            curl.args(["-s", "--noproxy", "*", "-G", &url, "--data-urlencode"]);
            let output = curl.arg(format!("query={query}")).output().unwrap();
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            let value = &answer["data"]["result"][0]["value"][1];
            if value.as_str().and_then(|value| value.parse().ok()).is_some_and(&is_wanted) {
                return;
            }
            assert!(began.elapsed() < TIMEOUT, "{query}: {answer}");
            std::thread::yield_now();
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn prometheus_follows_a_daemon_its_programs_and_its_upgrade() {
    if !can_run("metrics of the daemon") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let daemon = Daemon::start_on(&testbed, DeviceKind::Packet, &["--metrics", V4]);
    let redis = ["redis-server", "--bind", "0.0.0.0", "::", "--protected-mode", "no", "--save", ""];
    let _redis = daemon.run_server(&redis, 6379);
    let text = checked(testbed.server(), V4, "daemon");
    assert!(
        text.contains("tidegate_listener_waiting_connections{program=\"redis-server\""),
        "{text}"
    );
    let prometheus = Prometheus::start(testbed.server(), V4);
    prometheus.query_until(testbed.server(), "up", |up| up == 1.0);
    let sockets = "sum(tidegate_application_sockets{program=\"redis-server\",state=\"listening\"})";
    prometheus.query_until(testbed.server(), sockets, |count| count >= 1.0);

    let mut upgrade = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let output = upgrade.arg("upgrade").arg("--socket").arg(daemon.socket()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = checked(testbed.server(), V4, "daemon");
    assert!(text.contains("program=\"redis-server\""), "{text}");
    prometheus.query_until(testbed.server(), "up", |up| up == 1.0);
}

#[test]
fn bound_address_in_use_ends_the_start() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let flags = ["serve", "echo", "--io", "kernel", "--listen", "9481", "--metrics", &address];
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let mut child = command.args(flags).stderr(Stdio::piped()).spawn().unwrap();
    let mut error = String::new();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert!(!child.wait().unwrap().success());
    assert!(error.contains(&format!("--metrics {address}")), "{error}");
}

/// Page that loads another page in a frame and writes down the parts of it that overlap.
const LAYOUT_CHECK: &str = include_str!("../../lab/tests/report/layout_check.html");
/// Widths of a phone and of a desk, in pixels.
const WIDTHS: [u32; 2] = [400, 1_400];

fn chromium(namespace: &Namespace, folder: &std::path::Path, url: &str, more: &[&str]) -> String {
    let mut browser = namespace.command("chromium");
    browser.args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]);
    browser.args(["--allow-file-access-from-files", "--virtual-time-budget=8000"]).args(more);
    browser.arg(format!("--user-data-dir={}", folder.display()));
    let output = browser.arg(url).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The page in a browser while a flood arrives, and its layout with the values of that flood.
#[test]
fn page_draws_a_flood() {
    if !can_run("page of the metrics") || !has_programs("page of the metrics", &["chromium"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = testbed
        .serve(DeviceKind::Xdp, &["echo", "--work-ns", "20000", "--admission", "--metrics", V4]);
    let flood = load(&testbed, &format!("{SERVER_V4}:7"));
    let began = Instant::now();
    let drops = |text: &str| -> f64 {
        let lines = text.lines().filter(|line| line.starts_with("tidegate_drops_total{"));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    let times = "tidegate_udp_service_duration_seconds";
    let limiting = loop {
        let text = fetch(testbed.server(), V4, &[]);
        let is_limiting = value(&text, "tidegate_admission_limiting") == 1.0;
        if drops(&text) > 0.0 && is_limiting && value(&text, &format!("{times}_count")) > 0.0 {
            break text;
        }
        assert!(began.elapsed() < TIMEOUT, "the flood does not arrive: {text}");
        std::thread::yield_now();
    };
    assert!(value(&limiting, "tidegate_admission_limit_packets_per_second") >= 100.0, "{limiting}");
    // Each answer takes 20 microseconds of work.
    assert_eq!(value(&limiting, &format!("{times}_bucket{{le=\"5e-06\"}}")), 0.0, "{limiting}");
    let folder = tempfile::tempdir().unwrap();
    let before = fetch(testbed.server(), V4, &[]);
    for width in WIDTHS {
        let size = format!("--window-size={width},1200");
        let page = chromium(testbed.server(), folder.path(), &format!("http://{V4}/"), &[&size]);
        assert!(page.contains("packets/s dropped"), "{page}");
        for chart in ["Packets per second", "Requests per second", "Service time", "by reason"] {
            assert!(page.contains(chart), "{chart}: {page}");
        }
        assert!(page.matches("<polyline").count() >= 6, "{page}");
        assert!(page.contains("Drops by reason") && page.contains("serve echo"), "{page}");
    }
    let after = fetch(testbed.server(), V4, &[]);
    drop((flood, server));

    // The same page with these values instead of a server, in a frame that can be measured.
    let texts = serde_json::to_string(&[before, after]).unwrap();
    let stub = format!(
        "<script>let asked = 0; const texts = {texts};\
         window.fetch = async () => ({{ ok: true, text: async () => texts[asked++ % 2] }});</script>"
    );
    let page = include_str!("../src/metrics/page.html").replacen(
        "<script>",
        &format!("{stub}<script>"),
        1,
    );
    let file = folder.path().join("page.html");
    fs::write(&file, page).unwrap();
    for width in WIDTHS {
        let check = folder.path().join("check.html");
        let text = LAYOUT_CHECK
            .replace("PAGE", &format!("file://{}", file.display()))
            .replace("WIDTH", &width.to_string())
            .replace("frame.onload = () => {", "frame.onload = () => setTimeout(() => {")
            .replacen("join(\"\\n\");\n};", "join(\"\\n\");\n}, 4000);", 1);
        fs::write(&check, text).unwrap();
        let url = format!("file://{}", check.display());
        let seen = chromium(testbed.client(), folder.path(), &url, &[]);
        let found =
            seen.split("<pre id=\"found\">").nth(1).and_then(|rest| rest.split("</pre>").next());
        let found = found.unwrap_or_else(|| panic!("{seen}"));
        let mut lines = found.lines();
        let charts =
            lines.next().and_then(|line| line.strip_suffix(" charts")).map(str::parse::<u32>);
        assert!(
            charts.is_some_and(|count| count.is_ok_and(|count| count >= 3)),
            "{width}: {found}"
        );
        assert_eq!(lines.collect::<Vec<_>>(), [""; 0], "at {width} pixels");
    }
}

/// Runs `tidegate load udp` in the client's namespace; it ends with the returned value.
fn load(testbed: &Testbed, target: &str) -> Killed {
    let mut load = testbed.client().command(env!("CARGO_BIN_EXE_tidegate"));
    load.args(["load", "udp", target, "--seconds", "600"]);
    Killed(load.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

/// Process that is killed when dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn dashboard_and_alerts_name_metrics_that_exist() {
    let folder =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/monitoring");
    let output = support::tidegate(&["metrics", "--json"]);
    let metrics: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let labels_of = |name: &str| {
        let metric = metrics.iter().find(|metric| metric["name"] == name);
        let metric = metric.unwrap_or_else(|| panic!("no metric {name}"));
        metric["labels"].as_array().unwrap().clone()
    };
    for file in ["dashboard.json", "alerts.yml"] {
        let text = fs::read_to_string(folder.join(file)).unwrap();
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let names = text.match_indices("tidegate_").map(|(at, _)| {
            let rest = &text[at..];
            let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
            (rest[..end].trim_end_matches("_bucket"), &rest[end..])
        });
        let mut count = 0;
        for (name, rest) in names {
            count += 1;
            let labels = labels_of(name);
            // Labels of a selector: `{reason="x",severity=~"y"}`.
            let selector = rest.strip_prefix('{').and_then(|rest| rest.split('}').next());
            for part in selector.unwrap_or_default().replace('\\', "").split("\",") {
                let label = part.split(['=', '!']).next().unwrap().trim();
                let is_known =
                    label.is_empty() || label == "instance" || labels.contains(&label.into());
                assert!(is_known, "{file}: {name} has no label {label}");
            }
        }
        assert!(count >= 8, "{file}: {count}");
    }
    if has_programs("alert rules", &["promtool"]) {
        let rules = folder.join("alerts.yml");
        let output = Command::new("promtool").args(["check", "rules"]).arg(rules).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn page_lists_every_metric() {
    let output = support::tidegate(&["metrics", "--json"]);
    let metrics: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/metrics.md")).unwrap();
    let text = |metric: &Value, key: &str| metric[key].as_str().unwrap().to_owned();
    let rows: Vec<String> = metrics
        .iter()
        .map(|metric| {
            let labels = metric["labels"].as_array().unwrap().iter();
            let labels: Vec<_> =
                labels.map(|label| format!("`{}`", label.as_str().unwrap())).collect();
            let [name, kind, commands, help] =
                ["name", "type", "commands", "help"].map(|key| text(metric, key));
            format!("| `{name}` | {kind} | {} | {commands} | {help} |", labels.join(", "))
        })
        .collect();
    let listed: Vec<&str> = page.lines().filter(|line| line.starts_with("| `tidegate_")).collect();
    assert_eq!(listed, rows, "make the table of docs/metrics.md what `tidegate metrics` says");
}
