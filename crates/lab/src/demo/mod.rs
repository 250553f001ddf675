//! The demonstration: a DNS server on real packets, queried by the usual command-line tools,
//! then compared with the same server on kernel sockets.
//!
//! It uses the best I/O mode that the user's rights allow: AF_XDP as root, else AF_PACKET
//! inside a user namespace, else an in-memory wire.

mod programs;

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidegate::device::mem::{MemConfig, wire};
use tidegate::{Net, NetConfig, UdpSocket};
use tidegate_apps::ServeCounters;
use tidegate_apps::dns as dns_server;
use tidegate_apps::embedded::serve_embedded;
use tidegate_load::{DnsWorkload, LinkKind, LoadConfig, load_over_device};
use tidegate_memory::{Arena, ArenaConfig};

use crate::error::LabError;
use crate::experiments::compare::dns::peak_search::{LoadPoint, PeakSearch, SearchEffort};
use crate::report::experiment::Experiment;
use crate::stats::round_to_hundredths;
use crate::testbed::cpu;
use crate::testbed::dns::servers::{Server, ServerKind};
use crate::testbed::dns::{DnsMeasurement, DnsTestbed};
use crate::testbed::netns::{self, Namespace, output};
use crate::testbed::programs::laboratory;

/// Configuration of the demonstration.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DemoConfig {
    /// Names in the zone.
    pub names: u64,
    /// Duration of each measurement in seconds.
    pub seconds: f64,
}

impl Default for DemoConfig {
    fn default() -> Self {
        Self { names: 10_000, seconds: 1.0 }
    }
}

/// Environment variable set for the second run, inside a user namespace.
const INSIDE_ENV: &str = "TIDEGATE_DEMO_IN_USER_NAMESPACE";

const COLUMNS: [&str; 6] = ["server", "queries_per_s", "p50_us", "p99_us", "cpu_percent", "drops"];

const TOOLS_ADDRESS_V4: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 9);
const TOOLS_ADDRESS_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 9);
const OWN_ADDRESS_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 3);

/// Runs the demonstration, prints its progress, and returns its final table.
///
/// # Errors
/// When a server does not start or a load cannot be sent.
pub fn run(config: &DemoConfig) -> Result<Experiment, LabError> {
    let inside = std::env::var_os(INSIDE_ENV).is_some();
    match Namespace::new("probe") {
        Ok(_) => {
            let removed = netns::remove_stale()?;
            removed.iter().for_each(|name| println!("removed {name}, left by a killed process"));
            let link = if inside { LinkKind::Packet } else { LinkKind::Xdp };
            let mut result = run_over_veth(config, link)?;
            if !inside && cpu::available_cores() > 1 {
                let programs = programs::run(config.seconds)?;
                result.figures.extend(programs.into_iter().flat_map(|programs| programs.figures));
            }
            Ok(result)
        }
        Err(LabError::Permission { .. } | LabError::Missing { .. } | LabError::Command { .. })
            if !inside =>
        {
            println!("AF_XDP needs root: trying AF_PACKET inside a user namespace.");
            match in_user_namespace()? {
                true => Ok(Experiment::new("demo")),
                false => {
                    println!("User namespaces are not available: using an in-memory wire.");
                    run_in_memory(config)
                }
            }
        }
        Err(error) => Err(error),
    }
}

/// Runs this executable again as root of a user namespace, where network namespaces can be
/// created. Returns false when the system does not allow that.
fn in_user_namespace() -> Result<bool, LabError> {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "--mount", "--"]);
        command
    };
    // `ip netns` keeps its names in /run, which belongs to another user inside the namespace.
    const OWN_RUN: &str = "mount -t tmpfs tmpfs /run";
    let probe = format!("{OWN_RUN} && ip netns add tg-0-0-probe");
    let mut probe_command = unshare();
    probe_command.args(["sh", "-c", &probe]).stdout(Stdio::null()).stderr(Stdio::null());
    match probe_command.status() {
        Ok(status) if status.success() => {}
        Ok(_) => return Ok(false),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(LabError::io("cannot start `unshare`")(error)),
    }
    let program = laboratory()?;
    let script = format!("{OWN_RUN} && exec \"$@\"");
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let status = unshare()
        .args(["sh", "-c", &script, "sh"])
        .arg(program)
        .args(arguments)
        .env(INSIDE_ENV, "1")
        .status()
        .map_err(LabError::io("cannot start `unshare`"))?;
    if status.success() {
        return Ok(true);
    }
    Err(LabError::Config(format!("the demonstration in a user namespace failed ({status})")))
}

fn run_over_veth(config: &DemoConfig, link: LinkKind) -> Result<Experiment, LabError> {
    let (server_core, load_core) = if cpu::available_cores() > 1 { (1, 0) } else { (0, 0) };
    let mut testbed = DnsTestbed::new(config.names, server_core, load_core, link)?;
    testbed.setup.extra_own_addresses.push(format!("{OWN_ADDRESS_V6}/64"));
    testbed.pair.a.add_address(TOOLS_ADDRESS_V4.into(), 24)?;
    testbed.pair.a.add_address(TOOLS_ADDRESS_V6.into(), 64)?;
    let tidegate =
        if link == LinkKind::Xdp { ServerKind::TidegateXdp } else { ServerKind::TidegatePacket };
    println!(
        "Two network namespaces joined by veth: {} and {}.",
        testbed.pair.a.namespace.name(),
        testbed.pair.b.namespace.name()
    );
    let server = testbed.start(tidegate)?;
    println!("tidegate serve dns, {} names: {}\n", config.names, server.detail);
    show_tools(&testbed, &server)?;
    drop(server);
    println!("Measuring Tidegate and the same server on kernel sockets over the same wire:");
    let mut result = Experiment { columns: COLUMNS.to_vec(), ..Experiment::new("demo") };
    let mut peaks = Vec::new();
    for kind in [tidegate, ServerKind::TidegateKernel] {
        peaks.push((kind, find_peak(config, &testbed, kind)?));
    }
    // Both servers get the same load, so that latency and CPU are comparable.
    let common =
        peaks.iter().map(|(_, peak)| peak.answered_pps).fold(f64::INFINITY, f64::min) / 2.0;
    for (kind, peak) in &peaks {
        let row = compare_at(config, &testbed, *kind, *peak, common)?;
        result.rows.push(row);
    }
    let [tidegate, kernel] = [peaks[0].1.answered_pps, peaks[1].1.answered_pps];
    result.figure("qps_ratio", round_to_hundredths(tidegate / kernel.max(1.0)));
    result.note(format!(
        "core {server_core} serves, core {load_core} sends; latency and CPU at {common:.0} \
         queries/s for both; drops while overloaded"
    ));
    if !testbed.can_steer() {
        result.note("without root, both servers' packets are received on the sender's core");
    }
    if server_core == load_core {
        result.note("there is only one core: the load generator takes CPU time from the server");
    }
    Ok(result)
}

/// Queries the server with ping, dig and dnsperf on the kernel's side and prints their output.
fn show_tools(testbed: &DnsTestbed, server: &Server) -> Result<(), LabError> {
    let address = server.target.ip().to_string();
    let at = format!("@{address}");
    let v6 = OWN_ADDRESS_V6.to_string();
    let at_v6 = format!("@{v6}");
    let zone = testbed.setup.origin.as_str();
    let mail = format!("mail.{zone}");
    let queries = testbed.write_query_file()?.display().to_string();
    run_tool(testbed, &["ping", "-c", "3", "-i", "0.2", &address], &["bytes from", "rtt"])?;
    run_tool(testbed, &["ping", "-6", "-c", "1", &v6], &["bytes from"])?;
    run_tool(testbed, &["ping", "-c", "1", "-s", "4000", &address], &["bytes from"])?;
    run_tool(testbed, &["dig", "+short", &at, &mail, "A"], &[""])?;
    run_tool(testbed, &["dig", "+short", &at_v6, zone, "TXT"], &[""])?;
    run_tool(testbed, &["dig", "+noall", "+comments", &at, &format!("no.{zone}")], &["status"])?;
    let dnsperf = ["dnsperf", "-s", &address, "-d", &queries, "-l", "2"];
    run_tool(testbed, &dnsperf, &["Queries per second", "Queries lost", "Average Latency"])?;
    println!();
    Ok(())
}

/// Runs one tool and prints the output lines that contain one of the strings in `lines`.
fn run_tool(testbed: &DnsTestbed, command_line: &[&str], lines: &[&str]) -> Result<(), LabError> {
    println!("$ {}", command_line.join(" "));
    let mut command = testbed.pair.a.namespace.command(command_line[0]);
    let output = output(command.args(&command_line[1..]), "iproute2")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let shown = text.lines().filter(|line| lines.iter().any(|part| line.contains(part)));
    let mut count = 0;
    for line in shown {
        println!("    {}", line.trim());
        count += 1;
    }
    if count == 0 {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let first_line = stderr.lines().chain(text.lines()).find(|line| !line.trim().is_empty());
        println!("    no answer ({})", first_line.unwrap_or("no output").trim());
    }
    Ok(())
}

fn find_peak(
    config: &DemoConfig,
    testbed: &DnsTestbed,
    kind: ServerKind,
) -> Result<LoadPoint, LabError> {
    let server = testbed.start(kind)?;
    let mut search = PeakSearch::new(100_000.0, 1_500_000.0, SearchEffort::WHOLE);
    while let Some(offered_pps) = search.next_load() {
        let run = testbed.measure(&server, Some(offered_pps), config.seconds / 2.0)?;
        search.record(LoadPoint { offered_pps, answered_pps: run.load.result.answered_pps });
    }
    Ok(search.best().unwrap_or(LoadPoint { offered_pps: 100_000.0, answered_pps: 0.0 }))
}

/// Measures a server at its peak and at the common load; returns its row of the table.
fn compare_at(
    config: &DemoConfig,
    testbed: &DnsTestbed,
    kind: ServerKind,
    peak: LoadPoint,
    common_pps: f64,
) -> Result<Value, LabError> {
    let dropped_before = kernel_drops(testbed)?;
    let server = testbed.start(kind)?;
    // What overload drops; the rate is that of the peak found, as in the figure.
    testbed.measure(&server, Some(peak.offered_pps), config.seconds)?;
    let common = testbed.measure(&server, Some(common_pps), config.seconds)?;
    let own_drops =
        server.stop().map(|counters| counters["drops"].clone()).and_then(|drops| match drops {
            Value::Object(drops) => Some(drops),
            _ => None,
        });
    let mut drops: Vec<String> =
        own_drops.iter().flatten().map(|(reason, count)| format!("{reason} {count}")).collect();
    let dropped = kernel_drops(testbed)?.saturating_sub(dropped_before);
    if kind.is_on_kernel_sockets() && dropped > 0 {
        drops.push(format!("kernel receive buffer {dropped}"));
    }
    Ok(row(kind.name(), peak.answered_pps, &common, &drops))
}

fn row(name: &str, peak_pps: f64, common: &DnsMeasurement, drops: &[String]) -> Value {
    let latency = common.load.result.latency;
    json!({
        "server": name,
        "queries_per_s": peak_pps.round(),
        "p50_us": latency.p50_us.round(),
        "p99_us": latency.p99_us.round(),
        "cpu_percent": common.server_core.busy_percent.round(),
        "drops": if drops.is_empty() { "none".to_owned() } else { drops.join(", ") },
    })
}

/// Datagrams that the kernel of the server's namespace dropped because a socket's receive
/// buffer was full.
fn kernel_drops(testbed: &DnsTestbed) -> Result<u64, LabError> {
    let mut command = testbed.pair.b.namespace.command("cat");
    let output = output(command.arg("/proc/net/snmp"), "coreutils")?;
    Ok(parse_receive_buffer_errors(&String::from_utf8_lossy(&output.stdout)))
}

/// `RcvbufErrors` of UDP in `/proc/net/snmp`: a line of names, then a line of values.
fn parse_receive_buffer_errors(snmp: &str) -> u64 {
    let mut lines = snmp.lines().filter(|line| line.starts_with("Udp:"));
    let (names, figures) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
    let at = names.split_whitespace().position(|name| name == "RcvbufErrors");
    at.and_then(|at| figures.split_whitespace().nth(at)?.parse().ok()).unwrap_or(0)
}

/// Serves DNS over an in-memory wire and queries the server from another thread.
fn run_in_memory(config: &DemoConfig) -> Result<Experiment, LabError> {
    let server_address: IpAddr = [10, 77, 0, 3].into();
    let failed = |error: &dyn std::fmt::Display| LabError::Config(error.to_string());
    let zone = crate::testbed::dns::ZoneFile::write(config.names)?;
    let server = dns_server::DnsConfig {
        zones: vec![dns_server::ZoneSource {
            origin: Some(zone.origin().to_owned()),
            path: zone.path(),
        }],
        ..dns_server::DnsConfig::default()
    };
    let mut responder = dns_server::DnsServer::load(&server).map_err(|error| failed(&error))?;
    let (ours, theirs) =
        wire(&MemConfig::default()).map_err(LabError::io("cannot create a wire"))?;
    let address = "10.77.0.3/24".parse().map_err(|error| failed(&error))?;
    let net = Net::open(NetConfig::new(theirs).address(address)).map_err(|e| failed(&e))?;
    let target = SocketAddr::new(server_address, 53);
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
        let report = load_over_device(ours, arena, &load, &schedule, &mut |_| {}, workload);
        stop.store(true, Ordering::Relaxed);
        let served = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        served.map_err(LabError::io("the DNS server failed"))?;
        Ok::<_, LabError>(report?)
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
    result.note("in-memory wire, server and load in one process: not compared with the kernel");
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_receive_buffer_errors_by_column_name() {
        let snmp = "Tcp: A B\nTcp: 1 2\nUdp: InDatagrams NoPorts RcvbufErrors\nUdp: 10 2 33\n";
        assert_eq!(parse_receive_buffer_errors(snmp), 33);
        assert_eq!(parse_receive_buffer_errors("nothing"), 0);
    }

    #[test]
    fn in_memory_demo_answers_queries() {
        let result = run_in_memory(&DemoConfig { names: 100, seconds: 0.2 }).unwrap();
        assert!(result.rows[0]["queries_per_s"].as_f64().unwrap() > 0.0, "{result}");
    }
}
