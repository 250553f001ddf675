//! `lab apps`: requests per second of unmodified applications, without and under a flood.

use std::thread;
use std::time::Duration;

use serde_json::json;
use tidegate_load::{TcpLoadConfig, TcpLoadReport, load_tcp};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::stats::median;
use crate::testbed::apps::application::Application;
use crate::testbed::apps::{
    CoreAssignment, RunningService, ServiceMeasurement, StackKind, check_installed, start_service,
};
use crate::testbed::flood::{
    FloodSource, FloodTestbed, GIGABIT_LINE_PPS, GoodputMeter, ReceiveWork,
};
use crate::testbed::tcp::{TcpLabConfig, choose_cores};

/// Concurrent connections of the load.
const CONNECTIONS: u16 = 50;
/// Requests per second under a flood: few enough that the core that also sends the flood can
/// generate them.
pub(crate) const UNDER_FLOOD_RPS: f64 = 10_000.0;
/// Warm-up in seconds: a source becomes known once it was seen in two consecutive periods of one
/// second, and the first period is not a full one.
const LEARNING_SECONDS: f64 = 4.0;
/// Time in seconds from the start of the flood to the start of the measurement.
const SETTLING_SECONDS: f64 = 1.0;
/// Destination port of the flood, on which no socket listens.
const FLOODED_PORT: u16 = 9;

/// Results of one application on one stack.
struct Row {
    application: Application,
    stack: StackKind,
    baseline: Vec<ServiceMeasurement>,
    /// Answered share of the offered requests, without and under the flood.
    answered_shares: Vec<(f64, f64)>,
    offered_pps: Vec<f64>,
}

/// Runs redis, memcached and nginx on the kernel's stack, on an embedded stack, and attached to
/// the daemon.
///
/// # Errors
/// If an application is not installed or does not start.
pub fn run(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    check_installed(&Application::PACKAGES)?;
    let (server_core, load_core) = choose_cores()?;
    let testbed = FloodTestbed::new(server_core, load_core)?;
    let mut rows: Vec<Row> = Application::PACKAGES
        .into_iter()
        .flat_map(|application| StackKind::SERVER_CORE.map(|stack| (application, stack)))
        .map(|(application, stack)| {
            let (baseline, answered_shares, offered_pps) = (Vec::new(), Vec::new(), Vec::new());
            Row { application, stack, baseline, answered_shares, offered_pps }
        })
        .collect();
    let same_core = CoreAssignment { application: server_core, daemon: server_core };
    for repeat in 1..=config.repeats {
        for row in &mut rows {
            let service = start_service(
                &testbed,
                row.application,
                row.stack,
                same_core,
                admission_flags(row.stack),
            )?;
            let baseline =
                service.measure_from_device(&testbed, row.stack, CONNECTIONS, config.seconds)?;
            eprintln!(
                "{repeat} {:<9} {:<13} {:>8.0} requests/s, p99 {:.0} us",
                row.application.name(),
                row.stack.name(),
                baseline.load.requests_per_second,
                baseline.load.latency.p99_us
            );
            row.baseline.push(baseline);
            if row.application == Application::Redis {
                let (answered, offered_pps) =
                    measure_flood(&testbed, &service, row.stack, config.seconds)?;
                eprintln!(
                    "{repeat} {:<9} {:<13} flood {offered_pps:.0} packets/s: {:.3} of {:.3}",
                    row.application.name(),
                    row.stack.name(),
                    answered.1,
                    answered.0
                );
                row.answered_shares.push(answered);
                row.offered_pps.push(offered_pps);
            }
            service.stop();
        }
    }
    Ok(report(config, &rows))
}

/// Flags that turn on admission control in Tidegate's stacks, so that known sources take
/// precedence under overload.
fn admission_flags(stack: StackKind) -> &'static [&'static str] {
    match stack {
        StackKind::KernelSoftirq | StackKind::Kernel | StackKind::KernelThread => &[],
        StackKind::Embedded | StackKind::Attached => &["--admission"],
    }
}

/// Measures the answered share of the requests, without and under a flood from unknown sources,
/// and the packet rate (packets/s) offered by the flood.
pub(crate) fn measure_flood(
    testbed: &FloodTestbed,
    service: &RunningService,
    stack: StackKind,
    seconds: f64,
) -> Result<((f64, f64), f64), LabError> {
    let load = TcpLoadConfig {
        rate_per_second: Some(UNDER_FLOOD_RPS),
        warm_up_seconds: LEARNING_SECONDS,
        seconds,
        ..service.load_config(testbed, CONNECTIONS.into())
    };
    let baseline = testbed.pair.a.namespace.enter(|| load_tcp(&load))??;
    let work = match stack {
        StackKind::KernelSoftirq | StackKind::Kernel => ReceiveWork::Steered,
        StackKind::KernelThread => ReceiveWork::Thread,
        StackKind::Embedded | StackKind::Attached => ReceiveWork::Server,
    };
    let target = (service.target.ip(), FLOODED_PORT).into();
    let payload: &[u8] = &[0; 18];
    let payloads = std::iter::repeat_n(payload, FloodSource::UnknownSources.flow_count());
    let mut flood = testbed.flood(FloodSource::UnknownSources, target, payloads, work)?;
    let flood_load = TcpLoadConfig { warm_up_seconds: LEARNING_SECONDS + SETTLING_SECONDS, ..load };
    let client = testbed.pair.a.namespace.spawn(move || Ok(load_tcp(&flood_load)?))?;
    // The load becomes a known source before the flood, and is measured during the whole flood.
    thread::sleep(Duration::from_secs_f64(LEARNING_SECONDS));
    let time = Duration::from_secs_f64(seconds + SETTLING_SECONDS);
    let rate = Some(GIGABIT_LINE_PPS);
    let measured =
        testbed.measure(&mut flood, &GoodputMeter::TransmittedFrames, rate, Duration::ZERO, time);
    let flooded = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    flood.set_rate(Some(0.0))?;
    let answered = |load: &TcpLoadReport| load.requests_per_second / UNDER_FLOOD_RPS;
    Ok(((answered(&baseline), answered(&flooded)), measured?.offered_pps))
}

impl Row {
    fn median_rps(&self) -> f64 {
        median(self.baseline.iter().map(|run| run.load.requests_per_second))
    }

    /// Median ratio of the request rate under the flood to the rate without it.
    fn kept_share(&self) -> Option<f64> {
        let ratios = self.answered_shares.iter().map(|(calm, flooded)| flooded / calm);
        (!self.answered_shares.is_empty()).then(|| median(ratios))
    }
}

fn report(config: &TcpLabConfig, rows: &[Row]) -> Experiment {
    let mut result = Experiment::new("apps");
    let find = |application, stack| {
        rows.iter()
            .find(|row| row.application == application && row.stack == stack)
            .expect("every application has a row for every stack")
    };
    for application in Application::PACKAGES {
        let [steered, threaded] = [StackKind::Kernel, StackKind::KernelThread]
            .map(|stack| find(application, stack).median_rps());
        let kernel = steered.max(threaded);
        let [embedded, attached] = [StackKind::Embedded, StackKind::Attached]
            .map(|stack| find(application, stack).median_rps() / kernel);
        let name = application.name();
        result.figure(&format!("{name}_ratio"), embedded.max(attached));
        result.figure(&format!("{name}_ratio_embedded"), embedded);
        result.figure(&format!("{name}_ratio_attached"), attached);
    }
    let kept_share = |stack| find(Application::Redis, stack).kept_share().unwrap_or(0.0);
    result.figure(
        "redis_under_flood",
        kept_share(StackKind::Embedded).max(kept_share(StackKind::Attached)),
    );
    result.figure("redis_under_flood_embedded", kept_share(StackKind::Embedded));
    result.figure("redis_under_flood_attached", kept_share(StackKind::Attached));
    result.figure("redis_under_flood_kernel", kept_share(StackKind::Kernel));
    result.figure("redis_under_flood_kernel_thread", kept_share(StackKind::KernelThread));
    result.rows = rows
        .iter()
        .map(|row| {
            let of =
                |figure: fn(&ServiceMeasurement) -> f64| median(row.baseline.iter().map(figure));
            let all =
                |count: fn(&ServiceMeasurement) -> u64| row.baseline.iter().map(count).sum::<u64>();
            json!({
                "program": row.application.name(),
                "way": row.stack.name(),
                "requests_per_second": row.median_rps().round(),
                "p50_us": of(|run| run.load.latency.p50_us),
                "p99_us": of(|run| run.load.latency.p99_us),
                "server_core_percent": of(|run| run.server_core_percent),
                "kept_under_flood": row.kept_share(),
                "flood_pps": (!row.offered_pps.is_empty())
                    .then(|| median(row.offered_pps.iter().copied()).round()),
                "wrong_answers": all(|run| run.load.wrong_answers),
                "broken": all(|run| run.load.broken),
            })
        })
        .collect();
    result.columns = vec![
        "program",
        "way",
        "requests_per_second",
        "p50_us",
        "p99_us",
        "server_core_percent",
        "kept_under_flood",
        "flood_pps",
    ];
    result.note(format!(
        "Debian's packages, one process and one thread; {CONNECTIONS} connections, one \
         request in flight on each, 64-byte values; the server's side on core 1, the load on \
         core 0 by a BPF program on its device, a request for each response; medians of {}",
        config.repeats
    ));
    result.note(
        "kernel: receive work by RPS, which leaves the driver's work and GRO to core 0; the \
         others have all receive work on core 1, in a NAPI thread or by busy-polling; ratios \
         are relative to the faster of the two kernel rows",
    );
    result.note(format!(
        "under the flood: {UNDER_FLOOD_RPS} requests/s in an open loop; 8,192 unknown sources send \
         UDP to a closed port, up to the packet rate of a 1 Gb/s link, from core 0 too; the load \
         runs on its own stack; kept_under_flood: rate under the flood over the rate without it"
    ));
    result
}
