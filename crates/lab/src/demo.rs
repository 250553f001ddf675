//! The demonstration: a DNS server on real packets, asked by the kernel's own
//! tools, then measured beside the same server on kernel sockets.
//!
//! It goes as far as the user may: AF_XDP as root; AF_PACKET inside a user
//! namespace; a wire in memory where not even that is allowed.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidegate::port::mem::{MemConfig, wire};
use tidegate::{Net, NetConfig, UdpSocket};
use tidegate_apps::ServeCounters;
use tidegate_apps::dns as dns_server;
use tidegate_apps::embedded::serve_embedded;
use tidegate_memory::{Arena, ArenaConfig};

use crate::apps;
use crate::cpu;
use crate::dns::bench::{Bench, Measured};
use crate::dns::servers::{Server, ServerKind};
use crate::dns::sweep::{PeakSearch, Point};
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::load::{DnsWorkload, LinkKind, LoadConfig, over_port};
use crate::netns::{self, Namespace, output};

/// How to run the demonstration.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DemoConfig {
    /// Names in the zone.
    pub names: u64,
    /// How long each measurement takes, in seconds.
    pub seconds: f64,
}

impl Default for DemoConfig {
    fn default() -> Self {
        Self { names: 10_000, seconds: 1.0 }
    }
}

/// Set for the second run, inside a user namespace.
const INSIDE: &str = "TIDEGATE_DEMO_IN_USER_NAMESPACE";

const COLUMNS: [&str; 6] = ["server", "queries_per_s", "p50_us", "p99_us", "cpu_percent", "drops"];

const TOOLS_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 9);
const TOOLS_ADDRESS_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 9);
const OWN_ADDRESS_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 3);

/// Runs the demonstration, prints what happens, and returns the table that it
/// ends with.
///
/// # Errors
/// When a server does not start or a load cannot be sent.
pub fn run(config: &DemoConfig) -> Result<Experiment, LabError> {
    let inside = std::env::var_os(INSIDE).is_some();
    match Namespace::new("probe") {
        Ok(_) => {
            let removed = netns::remove_stale()?;
            removed.iter().for_each(|name| println!("removed {name}, left by a killed process"));
            let link = if inside { LinkKind::Packet } else { LinkKind::Xdp };
            let mut result = on_a_wire(config, link)?;
            if !inside && cpu::cores() > 1 {
                let programs = apps::demo::run(config.seconds)?;
                result.figures.extend(programs.into_iter().flat_map(|programs| programs.figures));
            }
            Ok(result)
        }
        Err(LabError::Permission { .. } | LabError::Missing { .. } | LabError::Command { .. })
            if !inside =>
        {
            println!("No root, so no AF_XDP: trying AF_PACKET inside a user namespace.");
            match in_user_namespace()? {
                true => Ok(Experiment::new("demo")),
                false => {
                    println!("No user namespace either: a wire in memory must do.");
                    in_memory(config)
                }
            }
        }
        Err(error) => Err(error),
    }
}

/// Runs this program again as root of a user namespace, where namespaces can
/// be made. Returns false when the system does not allow that.
fn in_user_namespace() -> Result<bool, LabError> {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "--mount", "--"]);
        command
    };
    // `ip netns` keeps its names in /run, which is another's in here.
    const OWN_RUN: &str = "mount -t tmpfs tmpfs /run";
    let probe = format!("{OWN_RUN} && ip netns add tg-0-0-probe");
    let mut may = unshare();
    may.args(["sh", "-c", &probe]).stdout(Stdio::null()).stderr(Stdio::null());
    match may.status() {
        Ok(status) if status.success() => {}
        Ok(_) => return Ok(false),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(LabError::io("cannot start `unshare`")(error)),
    }
    let program = std::env::current_exe().map_err(LabError::io("cannot find this program"))?;
    let script = format!("{OWN_RUN} && exec \"$@\"");
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let status = unshare()
        .args(["sh", "-c", &script, "sh"])
        .arg(program)
        .args(arguments)
        .env(INSIDE, "1")
        .status()
        .map_err(LabError::io("cannot start `unshare`"))?;
    if status.success() {
        return Ok(true);
    }
    Err(LabError::Config(format!("the demonstration in a user namespace failed ({status})")))
}

fn on_a_wire(config: &DemoConfig, link: LinkKind) -> Result<Experiment, LabError> {
    let (server_core, load_core) = if cpu::cores() > 1 { (1, 0) } else { (0, 0) };
    let mut bench = Bench::new(config.names, server_core, load_core, link)?;
    bench.setup.more_own.push(format!("{OWN_ADDRESS_V6}/64"));
    bench.pair.a.add_address(TOOLS_ADDRESS.into(), 24)?;
    bench.pair.a.add_address(TOOLS_ADDRESS_V6.into(), 64)?;
    let tidegate =
        if link == LinkKind::Xdp { ServerKind::TidegateXdp } else { ServerKind::TidegatePacket };
    println!(
        "Two network namespaces joined by veth: {} and {}.",
        bench.pair.a.namespace.name(),
        bench.pair.b.namespace.name()
    );
    let server = bench.start(tidegate)?;
    println!("tidegate serve dns, {} names: {}\n", config.names, server.detail);
    show_tools(&bench, &server)?;
    drop(server);
    println!("Measuring Tidegate and the same server on kernel sockets, same wire:");
    let mut result = Experiment { columns: COLUMNS.to_vec(), ..Experiment::new("demo") };
    let mut peaks = Vec::new();
    for kind in [tidegate, ServerKind::TidegateKernel] {
        peaks.push((kind, find_peak(config, &bench, kind)?));
    }
    // The same load for both, so that latency and CPU can be compared.
    let common = peaks.iter().map(|(_, peak)| peak.answered).fold(f64::INFINITY, f64::min) / 2.0;
    for (kind, peak) in &peaks {
        let row = compare_at(config, &bench, *kind, *peak, common)?;
        result.rows.push(row);
    }
    let [tidegate, kernel] = [peaks[0].1.answered, peaks[1].1.answered];
    result.figure("qps_ratio", (tidegate / kernel.max(1.0) * 100.0).round() / 100.0);
    result.note(format!(
        "core {server_core} serves, core {load_core} sends; latency and CPU at {common:.0} \
         queries/s for both; drops while overloaded"
    ));
    if !bench.steers() {
        result.note("without root, packets are received on the sender's core for both");
    }
    if server_core == load_core {
        result.note("there is one core only, so the load takes from the server");
    }
    Ok(result)
}

/// Asks with the tools of the kernel's side and shows what they say.
fn show_tools(bench: &Bench, server: &Server) -> Result<(), LabError> {
    let address = server.target.ip().to_string();
    let at = format!("@{address}");
    let v6 = OWN_ADDRESS_V6.to_string();
    let at_v6 = format!("@{v6}");
    let zone = bench.setup.origin.as_str();
    let mail = format!("mail.{zone}");
    let queries = bench.write_query_file()?.display().to_string();
    show(bench, &["ping", "-c", "3", "-i", "0.2", &address], &["bytes from", "rtt"])?;
    show(bench, &["ping", "-6", "-c", "1", &v6], &["bytes from"])?;
    show(bench, &["ping", "-c", "1", "-s", "4000", &address], &["bytes from"])?;
    show(bench, &["dig", "+short", &at, &mail, "A"], &[""])?;
    show(bench, &["dig", "+short", &at_v6, zone, "TXT"], &[""])?;
    show(bench, &["dig", "+noall", "+comments", &at, &format!("no.{zone}")], &["status"])?;
    let dnsperf = ["dnsperf", "-s", &address, "-d", &queries, "-l", "2"];
    show(bench, &dnsperf, &["Queries per second", "Queries lost", "Average Latency"])?;
    println!();
    Ok(())
}

/// Runs one tool and shows the lines that hold one of the words.
fn show(bench: &Bench, words: &[&str], lines: &[&str]) -> Result<(), LabError> {
    println!("$ {}", words.join(" "));
    let mut command = bench.pair.a.namespace.command(words[0]);
    let output = output(command.args(&words[1..]), "iproute2")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let shown = text.lines().filter(|line| lines.iter().any(|part| line.contains(part)));
    let mut count = 0;
    for line in shown {
        println!("    {}", line.trim());
        count += 1;
    }
    if count == 0 {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let said = stderr.lines().chain(text.lines()).find(|line| !line.trim().is_empty());
        println!("    no answer ({})", said.unwrap_or("it said nothing").trim());
    }
    Ok(())
}

fn find_peak(config: &DemoConfig, bench: &Bench, kind: ServerKind) -> Result<Point, LabError> {
    let server = bench.start(kind)?;
    let mut search = PeakSearch::new(100_000.0, 1_500_000.0);
    while let Some(offered) = search.next_load() {
        let run = bench.measure(&server, Some(offered), config.seconds / 2.0)?;
        search.record(Point { offered, answered: run.load.result.answered_pps });
    }
    Ok(search.best().unwrap_or(Point { offered: 100_000.0, answered: 0.0 }))
}

/// Measures at the peak and at the common load, and makes the table's row.
fn compare_at(
    config: &DemoConfig,
    bench: &Bench,
    kind: ServerKind,
    peak: Point,
    common_pps: f64,
) -> Result<Value, LabError> {
    let dropped_before = kernel_drops(bench)?;
    let server = bench.start(kind)?;
    let at_peak = bench.measure(&server, Some(peak.offered), config.seconds)?;
    let common = bench.measure(&server, Some(common_pps), config.seconds)?;
    let own = server.stop().map(|said| said["drops"].clone()).and_then(|drops| match drops {
        Value::Object(drops) => Some(drops),
        _ => None,
    });
    let mut drops: Vec<String> =
        own.iter().flatten().map(|(reason, count)| format!("{reason} {count}")).collect();
    let dropped = kernel_drops(bench)?.saturating_sub(dropped_before);
    if kind.is_on_kernel_sockets() && dropped > 0 {
        drops.push(format!("kernel receive buffer {dropped}"));
    }
    Ok(row(kind.name(), &at_peak, &common, &drops))
}

fn row(name: &str, at_peak: &Measured, common: &Measured, drops: &[String]) -> Value {
    let latency = common.load.result.latency;
    json!({
        "server": name,
        "queries_per_s": at_peak.load.result.answered_pps.round(),
        "p50_us": latency.p50_us.round(),
        "p99_us": latency.p99_us.round(),
        "cpu_percent": common.server_core.busy_percent.round(),
        "drops": if drops.is_empty() { "none".to_owned() } else { drops.join(", ") },
    })
}

/// Datagrams that the kernel of the server's namespace dropped because a
/// socket's buffer was full.
fn kernel_drops(bench: &Bench) -> Result<u64, LabError> {
    let mut command = bench.pair.b.namespace.command("cat");
    let output = output(command.arg("/proc/net/snmp"), "coreutils")?;
    Ok(parse_receive_buffer_errors(&String::from_utf8_lossy(&output.stdout)))
}

/// `RcvbufErrors` of UDP: a line of names, then a line of figures.
fn parse_receive_buffer_errors(snmp: &str) -> u64 {
    let mut lines = snmp.lines().filter(|line| line.starts_with("Udp:"));
    let (names, figures) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
    let at = names.split_whitespace().position(|name| name == "RcvbufErrors");
    at.and_then(|at| figures.split_whitespace().nth(at)?.parse().ok()).unwrap_or(0)
}

/// Serves DNS over a wire in memory and asks it from another thread.
fn in_memory(config: &DemoConfig) -> Result<Experiment, LabError> {
    let own: IpAddr = [10, 77, 0, 3].into();
    let failed = |error: &dyn std::fmt::Display| LabError::Config(error.to_string());
    let zone = crate::dns::bench::ZoneOnDisk::write(config.names)?;
    let server = dns_server::DnsConfig {
        zones: vec![dns_server::ZoneSource {
            origin: Some(zone.origin().to_owned()),
            path: zone.file(),
        }],
        ..dns_server::DnsConfig::default()
    };
    let mut responder = dns_server::Server::load(&server).map_err(|error| failed(&error))?;
    let (ours, theirs) = wire(&MemConfig::default()).map_err(LabError::io("cannot make a wire"))?;
    let address = "10.77.0.3/24".parse().map_err(|error| failed(&error))?;
    let net = Net::open(NetConfig::new(theirs).address(address)).map_err(|e| failed(&e))?;
    let target = SocketAddr::new(own, 53);
    let socket = UdpSocket::bind(&net, target).map_err(LabError::io("cannot bind the socket"))?;
    let arena = Arena::new(ArenaConfig::default()).map_err(|error| failed(&error))?;
    let load = LoadConfig {
        source: Some([10, 77, 0, 1].into()),
        seconds: config.seconds,
        ..LoadConfig::new(LinkKind::Xdp, target)
    };
    let queries = zone.queries();
    let stop = AtomicBool::new(false);
    let report = thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let counters = ServeCounters::new();
            let sockets = std::slice::from_ref(&socket);
            serve_embedded(&net, sockets, &mut responder, &stop, &counters)
        });
        let schedule = load.schedule()?;
        let workload = |flows| DnsWorkload::new(&queries, flows);
        let report = over_port(ours, arena, &load, &schedule, &mut |_| {}, workload);
        stop.store(true, Ordering::Relaxed);
        let served = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        served.map_err(LabError::io("the DNS server failed"))?;
        report
    })?;
    let mut result = Experiment { columns: COLUMNS.to_vec(), ..Experiment::new("demo") };
    let drops = net.counters().drops();
    let drops: Vec<_> = drops.nonzero().map(|(r, n)| format!("{} {n}", r.name())).collect();
    result.rows.push(json!({
        "server": "tidegate-mem",
        "queries_per_s": report.result.answered_pps.round(),
        "p50_us": report.result.latency.p50_us.round(),
        "p99_us": report.result.latency.p99_us.round(),
        "drops": if drops.is_empty() { "none".to_owned() } else { drops.join(", ") },
    }));
    result.note("over a wire in memory, server and load in one process: no kernel to compare with");
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receive_buffer_errors_are_found_by_their_name() {
        let snmp = "Tcp: A B\nTcp: 1 2\nUdp: InDatagrams NoPorts RcvbufErrors\nUdp: 10 2 33\n";
        assert_eq!(parse_receive_buffer_errors(snmp), 33);
        assert_eq!(parse_receive_buffer_errors("nothing"), 0);
    }

    #[test]
    fn the_demonstration_in_memory_answers() {
        let result = in_memory(&DemoConfig { names: 100, seconds: 0.2 }).unwrap();
        assert!(result.rows[0]["queries_per_s"].as_f64().unwrap() > 0.0, "{result}");
    }
}
