//! Experiment syn-flood: success of connection attempts during a flood of SYN segments from unknown
//! sources.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::thread;
use std::time::Duration;

use serde_json::json;
use tidegate_load::{LinkKind, TcpLoadConfig, TcpLoadReport, load_tcp};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::median;
use crate::testbed::flood::{
    CLIENT_ADDRESS, FloodTestbed, GIGABIT_LINE_PPS, GoodputMeter, KERNEL_ADDRESS, LOAD_ADDRESS,
    PREFIX_BITS, Receiver, TIDEGATE_ADDRESS,
};
use crate::testbed::load::syn_flood::{SYN_SOURCES, syn_frames};
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::tcp::{ECHO_PORT, TcpLabConfig, choose_cores};

/// Connections per second of the client.
const CONNECTS_PER_SECOND: f64 = 100.0;
/// Maximum number of simultaneous connections of the client: more than are due during the
/// retransmission delay of a lost segment.
const MAX_CONNECTIONS: usize = 1_000;
/// Learning time in seconds. A source becomes known when it was seen in two successive periods of
/// one second, and the first period is incomplete.
const LEARNING_SECONDS: f64 = 4.0;
/// Seconds from the start of the flood to the start of the measurement.
const SETTLING_SECONDS: f64 = 2.0;
/// Minimum duration in seconds. A lost segment delays a connection by one second, so a shorter
/// measurement would miss its effect.
const MIN_SECONDS: f64 = 5.0;

/// Server under the flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FloodedServer {
    /// Tidegate, with these flags.
    Tidegate(&'static [&'static str]),
    /// Kernel sockets, with this receive work.
    Kernel(ReceiveWork),
}

impl FloodedServer {
    fn address(self) -> Ipv4Addr {
        match self {
            Self::Tidegate(_) => TIDEGATE_ADDRESS,
            Self::Kernel(_) => KERNEL_ADDRESS,
        }
    }
}

/// Server configuration and rate of the flood. `None` is the maximum rate, which may exceed what
/// the receiver can examine.
struct FloodCase {
    name: &'static str,
    figure: &'static str,
    server: FloodedServer,
    flood_pps: Option<f64>,
    runs: Vec<FloodRun>,
}

struct FloodRun {
    success: f64,
    offered_pps: f64,
    load: TcpLoadReport,
}

/// Measures a client that connects throughout the flood.
///
/// # Errors
/// When namespaces cannot be created or the server does not start.
pub fn run(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = FloodTestbed::new(server_core, load_core)?;
    testbed.route_unknown_sources()?;
    let mut cases = cases();
    let progress = Progress::new(cases.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for case in &mut cases {
            let run = measure(&testbed, case, config.seconds)?;
            progress.step(format_args!(
                "{repeat} {:<20} {:.2} % of {CONNECTS_PER_SECOND} connections/s, p50 {:.0} us, p99 \
                 {:.0} us; {:.0} SYN/s",
                case.name,
                run.success * 100.0,
                run.load.connect_latency.p50_us,
                run.load.connect_latency.p99_us,
                run.offered_pps
            ));
            case.runs.push(run);
        }
    }
    let mut result = Experiment::new("syn-flood");
    conclude(&cases, &mut result);
    result.note(format!(
        "a client on kernel sockets makes {CONNECTS_PER_SECOND} connections/s, sends 64 bytes on \
         each and reads them back, for {} s and 5 at least, while {SYN_SOURCES} unknown sources send SYN \
         segments at the line rate of 1 Gb/s or, in an overrun, as fast as core 0 can; core 1 serves; \
         success is the number of answered connections over the number due",
        config.seconds
    ));
    result.note(
        "kernel: the same server on kernel sockets, with Linux's own defaults for SYN cookies \
         (tcp_syncookies) and backlog (somaxconn, tcp_max_syn_backlog); receive work in softirqs of \
         core 1 by a timer, in a NAPI thread there (kernel-thread), or steered there by RPS \
         (kernel-rps); ratios refer to the best of them",
    );
    Ok(result)
}

/// All cases: each server at the line rate of 1 Gb/s and in an overrun.
fn cases() -> Vec<FloodCase> {
    let line = Some(GIGABIT_LINE_PPS);
    let case = |name, figure, server, flood_pps| {
        let runs = Vec::new();
        FloodCase { name, figure, server, flood_pps, runs }
    };
    let admission = FloodedServer::Tidegate(&["--admission"]);
    let drop_tail = FloodedServer::Tidegate(&[]);
    let kernel = FloodedServer::Kernel(ReceiveWork::Timer);
    let thread = FloodedServer::Kernel(ReceiveWork::Thread);
    let rps = FloodedServer::Kernel(ReceiveWork::Steered);
    vec![
        case("admission", "connect_success", admission, line),
        case("drop-tail", "connect_success_droptail", drop_tail, line),
        case("kernel", "connect_success_kernel", kernel, line),
        case("kernel-thread", "connect_success_kernel_thread", thread, line),
        case("kernel-rps", "connect_success_kernel_rps", rps, line),
        case("admission, overrun", "connect_success_overrun", admission, None),
        case("drop-tail, overrun", "connect_success_droptail_overrun", drop_tail, None),
        case("kernel, overrun", "connect_success_kernel_overrun", kernel, None),
        case("kernel-thread, overrun", "connect_success_kernel_thread_overrun", thread, None),
        case("kernel-rps, overrun", "connect_success_kernel_rps_overrun", rps, None),
    ]
}

fn conclude(cases: &[FloodCase], result: &mut Experiment) {
    for case in cases {
        let median_of = |figure: fn(&FloodRun) -> f64| median(case.runs.iter().map(figure));
        result.figure(case.figure, median_of(|run| run.success));
        result.rows.push(json!({
            "server": case.name,
            "syn_per_second": median_of(|run| run.offered_pps).round(),
            "connect_success": median_of(|run| run.success),
            "connect_p50_us": median_of(|run| run.load.connect_latency.p50_us),
            "connect_p99_us": median_of(|run| run.load.connect_latency.p99_us),
            "broken": case.runs.iter().map(|run| run.load.broken).sum::<u64>(),
        }));
    }
    for (figure, flood_pps) in
        [("connects_over_kernel", Some(GIGABIT_LINE_PPS)), ("connects_over_kernel_overrun", None)]
    {
        let connects_per_s = |case: &FloodCase| {
            CONNECTS_PER_SECOND * median(case.runs.iter().map(|run| run.success))
        };
        let at_rate = || cases.iter().filter(move |case| case.flood_pps == flood_pps);
        let kernel = at_rate().filter(|case| matches!(case.server, FloodedServer::Kernel(_)));
        let kernel = kernel.map(|case| (case.name.to_owned(), connects_per_s(case)));
        if let Some(admission) = at_rate().next() {
            result.compare_with_kernel(figure, connects_per_s(admission), kernel);
        }
    }
}

fn measure(testbed: &FloodTestbed, case: &FloodCase, seconds: f64) -> Result<FloodRun, LabError> {
    let server = start_server(testbed, case.server)?;
    let seconds = seconds.max(MIN_SECONDS);
    let target = SocketAddrV4::new(case.server.address(), ECHO_PORT);
    let receive_work = match case.server {
        FloodedServer::Tidegate(_) => ReceiveWork::Server,
        FloodedServer::Kernel(receive_work) => receive_work,
    };
    let mut flood = testbed.flood_frames(&syn_frames(testbed.pair.b.mac, target), receive_work)?;
    let load = TcpLoadConfig {
        connections: MAX_CONNECTIONS,
        connection_per_request: true,
        source: Some(CLIENT_ADDRESS.into()),
        rate_per_second: Some(CONNECTS_PER_SECOND),
        // The client becomes known before the flood and is measured throughout the flood.
        warm_up_seconds: LEARNING_SECONDS + SETTLING_SECONDS,
        seconds,
        core: Some(testbed.load_core),
        ..TcpLoadConfig::new(LinkKind::Kernel, target.into())
    };
    let client = testbed.pair.a.namespace.spawn(move || Ok(load_tcp(&load)?))?;
    thread::sleep(Duration::from_secs_f64(LEARNING_SECONDS));
    let time = Duration::from_secs_f64(seconds + SETTLING_SECONDS);
    let measured = testbed.measure(
        &mut flood,
        &GoodputMeter::TransmittedFrames,
        case.flood_pps,
        Duration::ZERO,
        time,
    );
    let load = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    flood.set_rate(Some(0.0))?;
    server.stop();
    let due = CONNECTS_PER_SECOND * load.seconds;
    let success = (load.requests as f64 / due).min(1.0);
    Ok(FloodRun { success, offered_pps: measured?.offered_pps, load })
}

/// Starts an echo server on the server's core, with the backlog that the kernel allows.
fn start_server(testbed: &FloodTestbed, server: FloodedServer) -> Result<ServerProcess, LabError> {
    let on_kernel = matches!(server, FloodedServer::Kernel(_));
    testbed.prepare(if on_kernel { Receiver::Kernel } else { Receiver::Server })?;
    let end = &testbed.pair.b;
    let (core, port) = (testbed.server_core.to_string(), ECHO_PORT.to_string());
    let address = format!("{TIDEGATE_ADDRESS}/{PREFIX_BITS}");
    // Default route for the replies to the flood's sources.
    let route = format!("0.0.0.0/0={LOAD_ADDRESS}");
    let mut command = end.namespace.command_on_core(testbed.server_core, programs::tidegate()?);
    command.args(["serve", "echo", "--tcp", "--listen", &port, "--json", "--cpu", &core]);
    match server {
        FloodedServer::Tidegate(flags) => {
            command.args(["--iface", &end.device, "--address", &address, "--route", &route]);
            command.args(flags);
        }
        FloodedServer::Kernel(_) => drop(command.args(["--io", "kernel"])),
    }
    let mut server = ServerProcess::start("tidegate", &mut command)?;
    server.wait_for_first_line()?;
    Ok(server)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compares_the_connections_with_the_best_of_the_kernel_at_each_rate() {
        let mut cases = cases();
        for case in &mut cases {
            let success = match (case.name, case.flood_pps.is_some()) {
                ("admission", _) => 1.0,
                ("kernel-thread", _) => 0.5,
                ("kernel", _) => 0.25,
                (_, true) => 0.125,
                (_, false) => 0.0,
            };
            let load = TcpLoadReport::default();
            case.runs.push(FloodRun { success, offered_pps: 1.0, load });
        }
        let mut result = Experiment::new("syn-flood");
        conclude(&cases, &mut result);
        assert_eq!(result.figures["connects_over_kernel"], 2.0);
        assert_eq!(result.comparisons[0].kernel_best, "kernel-thread");
        assert_eq!(result.comparisons[0].kernel_rows.len(), 3);
        assert_eq!(result.figures["connects_over_kernel_overrun"], 0.0);
        assert_eq!(result.figures["connect_success_kernel_thread"], 0.5);
    }
}
