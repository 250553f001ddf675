//! DNS, and echoes of UDP and TCP, over memif and as the host of a virtual
//! machine: requests per second, and latency.

use serde_json::json;

use super::DpdkLabConfig;
use super::bench::{Bench, Wire};
use crate::dns::bench::ZoneOnDisk;
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::experiment::{Experiment, number};
use crate::load::{
    ClosedReport, LatencySummary, LoadConfig, LoadResult, Progress, QuerySet, load_dns, load_tcp,
    load_udp, load_udp_closed,
};

const ECHO_PORT: u16 = 7;
const DNS_PORT: u16 = 53;
const MESSAGE_BYTES: usize = 64;
const IN_FLIGHT: usize = 512;
const CONNECTIONS: usize = 100;
/// Names of the zone.
const NAMES: u64 = 1000;
/// Latency is measured at this part of what a server can do.
const EASY: f64 = 0.5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    Dns,
    UdpEcho,
    TcpEcho,
}

impl Service {
    const ALL: [Self; 3] = [Self::Dns, Self::UdpEcho, Self::TcpEcho];

    fn name(self) -> &'static str {
        match self {
            Self::Dns => "serve dns",
            Self::UdpEcho => "serve echo",
            Self::TcpEcho => "serve echo --tcp",
        }
    }

    fn load(self) -> String {
        match self {
            Self::Dns => "as fast as it goes".to_owned(),
            Self::UdpEcho => format!("{IN_FLIGHT} on their way, {MESSAGE_BYTES} B"),
            Self::TcpEcho => format!("{CONNECTIONS} connections, {MESSAGE_BYTES} B"),
        }
    }
}

/// What one service did on one wire.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    requests_per_second: f64,
    latency: LatencySummary,
}

struct Found {
    wire: Wire,
    service: Service,
    runs: Vec<Run>,
}

/// Zone and questions for the DNS server.
struct Zone {
    on_disk: ZoneOnDisk,
    queries: QuerySet,
}

/// Measures every service on every wire, in turns, and adds rows.
pub(super) fn run(
    config: &DpdkLabConfig,
    bench: &Bench,
    result: &mut Experiment,
) -> Result<(), LabError> {
    let on_disk = ZoneOnDisk::write(NAMES)?;
    let zone = Zone { queries: on_disk.queries(), on_disk };
    let wires = [Wire::Memif, Wire::VirtioUser];
    let all = wires.iter().flat_map(|&wire| Service::ALL.map(|service| (wire, service)));
    let mut found: Vec<Found> =
        all.map(|(wire, service)| Found { wire, service, runs: Vec::new() }).collect();
    for repeat in 1..=config.repeats {
        for one in &mut found {
            let run = measure(config, bench, &zone, one)?;
            eprintln!(
                "{repeat} {:<12} {:<17} {:>10}/s, p50 {:.1} us, p99 {:.1} us",
                one.wire.name(),
                one.service.name(),
                number(run.requests_per_second.round()),
                run.latency.p50_us,
                run.latency.p99_us
            );
            one.runs.push(run);
        }
    }
    conclude(&found, result);
    Ok(())
}

/// Every load has a server and a wire of its own: DPDK's memif may end the
/// process of one whose client goes.
fn measure(
    config: &DpdkLabConfig,
    bench: &Bench,
    zone: &Zone,
    one: &Found,
) -> Result<Run, LabError> {
    let start = |arguments: &[&str]| {
        let ends = bench.wire(one.wire);
        bench.serve(arguments, &ends.server).map(|server| (server, ends.load))
    };
    let quiet = &mut |_: &Progress| {};
    let (most_pps, latency) = match one.service {
        Service::Dns => {
            let zone_file = format!("{}={}", zone.on_disk.origin(), zone.on_disk.file().display());
            let mut ask = |rate_pps| -> Result<LoadResult, LabError> {
                let (_server, device) = start(&["dns", "--zone", &zone_file])?;
                let load = bench.load_config(&device, DNS_PORT, config.seconds);
                let load = LoadConfig { rate_pps, ..load };
                Ok(load_dns(&load, &zone.queries, None, quiet)?.result)
            };
            let most_pps = ask(None)?.answered_pps;
            (most_pps, ask(Some(easy(most_pps)))?.latency)
        }
        Service::UdpEcho => {
            let load = |device: &str| bench.load_config(device, ECHO_PORT, config.seconds);
            let most = || -> Result<ClosedReport, LabError> {
                let (_server, device) = start(&["echo"])?;
                load_udp_closed(&load(&device), MESSAGE_BYTES, IN_FLIGHT)
            };
            let most_pps = most()?.answered_pps;
            let (_server, device) = start(&["echo"])?;
            let easy = LoadConfig { rate_pps: Some(easy(most_pps)), ..load(&device) };
            (most_pps, load_udp(&easy, MESSAGE_BYTES, quiet)?.result.latency)
        }
        Service::TcpEcho => {
            let (_server, device) = start(&["echo", "--tcp"])?;
            let mut load = bench.tcp_load_config(&device, ECHO_PORT, config.seconds);
            load.connections = CONNECTIONS;
            load.message_bytes = MESSAGE_BYTES;
            let report = load_tcp(&load)?;
            (report.requests_per_second, report.latency)
        }
    };
    Ok(Run { requests_per_second: most_pps, latency })
}

/// A rate that a server has time for.
fn easy(most_pps: f64) -> f64 {
    (EASY * most_pps).max(1.0)
}

fn conclude(found: &[Found], result: &mut Experiment) {
    for one in found {
        let of = |figure: fn(&Run) -> f64| median(&one.runs.iter().map(figure).collect::<Vec<_>>());
        let rates = one.runs.iter().map(|run| run.requests_per_second);
        result.rows.push(json!({
            "part": "services",
            "wire": one.wire.name(),
            "subject": one.service.name(),
            "load": one.service.load(),
            "per_second": of(|run| run.requests_per_second).round(),
            "lowest": rates.clone().fold(f64::INFINITY, f64::min).round(),
            "highest": rates.fold(0.0, f64::max).round(),
            "p50_us": of(|run| run.latency.p50_us),
            "p99_us": of(|run| run.latency.p99_us),
        }));
    }
    result.note(format!(
        "services: latency of DNS and of the echo of UDP at {:.0} % of their requests per second, \
         of TCP with every connection asking again at once; as the host of a virtual machine \
         Tidegate has the side of vhost-user, the load that of the guest (virtio-user)",
        100.0 * EASY
    ));
}
