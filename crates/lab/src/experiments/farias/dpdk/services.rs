//! DNS, UDP echo and TCP echo over memif and over vhost-user (as the host of a virtual
//! machine): requests per second, and latency.

use serde_json::json;
use tidegate_load::{
    ClosedLoopReport, LatencySummary, LoadConfig, LoadProgress, LoadResult, QuerySet,
    format_number, load_dns, load_tcp, load_udp, load_udp_closed_loop,
};

use super::DpdkLabConfig;
use super::testbed::{DpdkTestbed, WireKind};
use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::median;
use crate::testbed::dns::ZoneFile;

const ECHO_PORT: u16 = 7;
const DNS_PORT: u16 = 53;
const MESSAGE_BYTES: usize = 64;
const IN_FLIGHT: usize = 512;
const CONNECTIONS: usize = 100;
/// Names in the zone.
const NAMES: u64 = 1000;
/// Load at which latency is measured, as a share of the server's capacity.
const LATENCY_LOAD_SHARE: f64 = 0.5;

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
            Self::Dns => "highest rate".to_owned(),
            Self::UdpEcho => format!("{IN_FLIGHT} in flight, {MESSAGE_BYTES} B"),
            Self::TcpEcho => format!("{CONNECTIONS} connections, {MESSAGE_BYTES} B"),
        }
    }
}

/// One measurement of a service on a wire.
#[derive(Clone, Copy, Debug, Default)]
struct ServiceRun {
    requests_per_second: f64,
    latency: LatencySummary,
}

struct ServiceResults {
    wire: WireKind,
    service: Service,
    runs: Vec<ServiceRun>,
}

/// Zone and queries for the DNS server.
struct TestZone {
    zone_file: ZoneFile,
    queries: QuerySet,
}

/// Measures every service on every wire, in turns, and adds rows.
pub(super) fn run(
    config: &DpdkLabConfig,
    testbed: &DpdkTestbed,
    result: &mut Experiment,
) -> Result<(), LabError> {
    let zone_file = ZoneFile::write(NAMES)?;
    let zone = TestZone { queries: zone_file.queries(), zone_file };
    let wires = [WireKind::Memif, WireKind::VirtioUser];
    let all = wires.iter().flat_map(|&wire| Service::ALL.map(|service| (wire, service)));
    let mut results: Vec<ServiceResults> =
        all.map(|(wire, service)| ServiceResults { wire, service, runs: Vec::new() }).collect();
    let progress = Progress::of_part("services", results.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for service_results in &mut results {
            let run = measure(config, testbed, &zone, service_results)?;
            progress.step(format_args!(
                "{repeat} {:<12} {:<17} {:>10}/s, p50 {:.1} us, p99 {:.1} us",
                service_results.wire.name(),
                service_results.service.name(),
                format_number(run.requests_per_second.round()),
                run.latency.p50_us,
                run.latency.p99_us
            ));
            service_results.runs.push(run);
        }
    }
    conclude(&results, result);
    Ok(())
}

/// Measures a service on a wire. Every load has a server and a wire of its own: DPDK's memif
/// may terminate a process when its peer disconnects.
fn measure(
    config: &DpdkLabConfig,
    testbed: &DpdkTestbed,
    zone: &TestZone,
    service_results: &ServiceResults,
) -> Result<ServiceRun, LabError> {
    let start = |arguments: &[&str]| {
        let devices = testbed.new_wire(service_results.wire);
        testbed.start_service(arguments, &devices.server).map(|server| (server, devices.load))
    };
    let ignore_progress = &mut |_: &LoadProgress| {};
    let (max_pps, latency) = match service_results.service {
        Service::Dns => {
            let zone_flag =
                format!("{}={}", zone.zone_file.origin(), zone.zone_file.path().display());
            let mut send_queries = |rate_pps| -> Result<LoadResult, LabError> {
                let (_server, device) = start(&["dns", "--rate-limit", "0", "--zone", &zone_flag])?;
                let load = testbed.load_config(&device, DNS_PORT, config.seconds);
                let load = LoadConfig { rate_pps, ..load };
                Ok(load_dns(&load, &zone.queries, None, ignore_progress)?.result)
            };
            let max_pps = send_queries(None)?.answered_pps;
            (max_pps, send_queries(Some(moderate_pps(max_pps)))?.latency)
        }
        Service::UdpEcho => {
            let load = |device: &str| testbed.load_config(device, ECHO_PORT, config.seconds);
            let measure_max = || -> Result<ClosedLoopReport, LabError> {
                let (_server, device) = start(&["echo"])?;
                Ok(load_udp_closed_loop(&load(&device), MESSAGE_BYTES, IN_FLIGHT)?)
            };
            let max_pps = measure_max()?.answered_pps;
            let (_server, device) = start(&["echo"])?;
            let moderate_load =
                LoadConfig { rate_pps: Some(moderate_pps(max_pps)), ..load(&device) };
            (max_pps, load_udp(&moderate_load, MESSAGE_BYTES, ignore_progress)?.result.latency)
        }
        Service::TcpEcho => {
            let (_server, device) = start(&["echo", "--tcp"])?;
            let mut load = testbed.tcp_load_config(&device, ECHO_PORT, config.seconds);
            load.connections = CONNECTIONS;
            load.message_bytes = MESSAGE_BYTES;
            let report = load_tcp(&load)?;
            (report.requests_per_second, report.latency)
        }
    };
    Ok(ServiceRun { requests_per_second: max_pps, latency })
}

/// Load for measuring latency, in requests per second.
fn moderate_pps(max_pps: f64) -> f64 {
    (LATENCY_LOAD_SHARE * max_pps).max(1.0)
}

fn conclude(results: &[ServiceResults], result: &mut Experiment) {
    for service_results in results {
        let of = |figure: fn(&ServiceRun) -> f64| median(service_results.runs.iter().map(figure));
        let rates = service_results.runs.iter().map(|run| run.requests_per_second);
        result.rows.push(json!({
            "part": "services",
            "wire": service_results.wire.name(),
            "subject": service_results.service.name(),
            "load": service_results.service.load(),
            "per_second": of(|run| run.requests_per_second).round(),
            "lowest": rates.clone().fold(f64::INFINITY, f64::min).round(),
            "highest": rates.fold(0.0, f64::max).round(),
            "p50_us": of(|run| run.latency.p50_us),
            "p99_us": of(|run| run.latency.p99_us),
        }));
    }
    result.note(format!(
        "services: latency of DNS and UDP echo at {:.0} % of their peak request rate, \
         of TCP with every connection sending again at once; as the host of a virtual machine \
         Tidegate is the vhost-user side, the load generator the guest (virtio-user)",
        100.0 * LATENCY_LOAD_SHARE
    ));
}
