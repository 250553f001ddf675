//! `lab apps`: requests per second of unmodified applications, without and under a flood.

use std::thread;
use std::time::Duration;

use serde_json::json;
use tidegate_load::{TcpLoadConfig, TcpLoadReport, load_tcp};

use crate::error::LabError;
use crate::experiments::kernel_best::{FIRST_PASS_SECONDS, FirstPass, Goal, distinct_best};
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::median;
use crate::testbed::apps::application::Application;
use crate::testbed::apps::packaged_load;
use crate::testbed::apps::{
    CoreAssignment, RunningService, ServiceMeasurement, StackKind, check_installed, start_service,
};
use crate::testbed::flood::{FloodSource, FloodTestbed, GIGABIT_LINE_PPS, GoodputMeter};
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
    /// Requests per second that a packaged benchmark program counts, if there is one.
    packaged_rps: Vec<f64>,
    /// Answered share of the offered requests, without and under the flood.
    answered_shares: Vec<(f64, f64)>,
    offered_pps: Vec<f64>,
}

/// Results of one application: the kernel's best ways, and Tidegate's.
struct Case {
    application: Application,
    /// Choice by the load from the device.
    first_pass: FirstPass<StackKind>,
    /// Choice by the packaged benchmark program, if there is one.
    packaged_first_pass: Option<FirstPass<StackKind>>,
    rows: Vec<Row>,
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
    let mut cases = Vec::new();
    let ways = Application::PACKAGES.len() * StackKind::kernel().len();
    let first_pass = Progress::of_part("first pass", ways);
    for application in Application::PACKAGES {
        cases.push(Case::choose_kernel(application, &testbed, config.seconds, &first_pass)?);
    }
    drop(first_pass);
    let rows = cases.iter().flat_map(|case| &case.rows);
    // redis is measured under a flood too.
    let steps = rows.map(|row| if row.application == Application::Redis { 2 } else { 1 });
    let progress = Progress::new(steps.sum::<usize>() * config.repeats);
    for repeat in 1..=config.repeats {
        for row in cases.iter_mut().flat_map(|case| &mut case.rows) {
            let service = row.measure(&testbed, config.seconds)?;
            progress.step(format_args!("{repeat} {}", row.describe()));
            if row.application == Application::Redis {
                row.measure_under_flood(&testbed, &service, config.seconds)?;
                progress.step(format_args!("{repeat} {}", row.describe_flood()));
            }
            service.stop();
        }
    }
    Ok(report(config, &cases))
}

impl Case {
    /// Measures the kernel's ways once, and chooses the best for each load.
    fn choose_kernel(
        application: Application,
        testbed: &FloodTestbed,
        seconds: f64,
        progress: &Progress,
    ) -> Result<Self, LabError> {
        let measured = StackKind::kernel().into_iter().map(|stack| {
            let mut row = Row::new(application, stack);
            row.measure(testbed, seconds.min(FIRST_PASS_SECONDS))?.stop();
            progress.step(format_args!("first pass {}", row.describe()));
            Ok(row)
        });
        let measured = measured.collect::<Result<Vec<_>, LabError>>()?;
        let first_pass = |rate: fn(&Row) -> f64| {
            let ways =
                measured.iter().map(|row| (row.stack, row.stack.name().to_owned(), rate(row)));
            FirstPass::new(Goal::Highest, ways)
        };
        let has_packaged = measured.iter().all(|row| !row.packaged_rps.is_empty());
        let packaged_first_pass = has_packaged.then(|| first_pass(Row::median_packaged_rps));
        let first_pass = first_pass(Row::median_rps);
        let mut stacks = distinct_best([&first_pass].into_iter().chain(&packaged_first_pass));
        stacks.extend([StackKind::Embedded, StackKind::Attached]);
        let rows = stacks.into_iter().map(|stack| Row::new(application, stack)).collect();
        Ok(Self { application, first_pass, packaged_first_pass, rows })
    }

    fn row(&self, stack: StackKind) -> &Row {
        let found = self.rows.iter().find(|row| row.stack == stack);
        found.expect("every chosen stack is measured")
    }

    /// Sets the ratios of Tidegate's rates to those of the kernel's best.
    fn compare(&self, result: &mut Experiment) {
        let name = self.application.name();
        let by_device = Some((&self.first_pass, Row::median_rps as fn(&Row) -> f64, ""));
        let packaged = self.packaged_first_pass.as_ref();
        let by_program =
            packaged.map(|pass| (pass, Row::median_packaged_rps as fn(&Row) -> f64, "_packaged"));
        for (first_pass, rate, suffix) in [by_device, by_program].into_iter().flatten() {
            let kernel = rate(self.row(first_pass.best()));
            let ratio = |stack| rate(self.row(stack)) / kernel;
            let [embedded, attached] = [StackKind::Embedded, StackKind::Attached].map(ratio);
            for (way, ratio) in
                [("", embedded.max(attached)), ("_embedded", embedded), ("_attached", attached)]
            {
                let figure = format!("{name}_ratio{way}{suffix}");
                result.compare_with_best(&figure, ratio, first_pass.rows(kernel));
            }
        }
    }
}

/// Flags that turn on admission control in Tidegate's stacks, so that known sources take
/// precedence under overload.
fn admission_flags(stack: StackKind) -> &'static [&'static str] {
    if stack.is_kernel() { &[] } else { &["--admission"] }
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
    let target = (service.target.ip(), FLOODED_PORT).into();
    let payload: &[u8] = &[0; 18];
    let payloads = std::iter::repeat_n(payload, FloodSource::UnknownSources.flow_count());
    let mut flood =
        testbed.flood(FloodSource::UnknownSources, target, payloads, stack.receive_work())?;
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
    fn new(application: Application, stack: StackKind) -> Self {
        Self {
            application,
            stack,
            baseline: Vec::new(),
            packaged_rps: Vec::new(),
            answered_shares: Vec::new(),
            offered_pps: Vec::new(),
        }
    }

    /// Starts the service, and measures it by the load from the device and by a packaged benchmark
    /// program.
    fn measure(
        &mut self,
        testbed: &FloodTestbed,
        seconds: f64,
    ) -> Result<RunningService, LabError> {
        let core = testbed.server_core;
        let same_core = CoreAssignment { application: core, daemon: core };
        let flags = admission_flags(self.stack);
        let service = start_service(testbed, self.application, self.stack, same_core, flags)?;
        let baseline = service.measure_from_device(testbed, self.stack, CONNECTIONS, seconds)?;
        self.baseline.push(baseline);
        let (application, target) = (self.application, service.target);
        let connections = CONNECTIONS.into();
        let packaged = packaged_load::measure(testbed, application, target, connections, seconds);
        self.packaged_rps.extend(packaged.transpose()?);
        Ok(service)
    }

    fn measure_under_flood(
        &mut self,
        testbed: &FloodTestbed,
        service: &RunningService,
        seconds: f64,
    ) -> Result<(), LabError> {
        let (answered, offered_pps) = measure_flood(testbed, service, self.stack, seconds)?;
        self.answered_shares.push(answered);
        self.offered_pps.push(offered_pps);
        Ok(())
    }

    fn describe(&self) -> String {
        let load = self.baseline.last().map(|baseline| &baseline.load);
        format!(
            "{:<9} {:<16} {:>8.0} requests/s, p99 {:.0} us; {:>8.0} by a benchmark program",
            self.application.name(),
            self.stack.name(),
            load.map_or(f64::NAN, |load| load.requests_per_second),
            load.map_or(f64::NAN, |load| load.latency.p99_us),
            self.packaged_rps.last().unwrap_or(&f64::NAN),
        )
    }

    fn describe_flood(&self) -> String {
        let (calm, flooded) = self.answered_shares.last().copied().unwrap_or_default();
        format!(
            "{:<9} {:<16} flood {:.0} packets/s: {flooded:.3} of {calm:.3}",
            self.application.name(),
            self.stack.name(),
            self.offered_pps.last().unwrap_or(&f64::NAN),
        )
    }

    fn median_rps(&self) -> f64 {
        median(self.baseline.iter().map(|run| run.load.requests_per_second))
    }

    fn median_packaged_rps(&self) -> f64 {
        median(self.packaged_rps.iter().copied())
    }

    /// Median ratio of the request rate under the flood to the rate without it.
    fn kept_share(&self) -> Option<f64> {
        let ratios = self.answered_shares.iter().map(|(calm, flooded)| flooded / calm);
        (!self.answered_shares.is_empty()).then(|| median(ratios))
    }
}

fn report(config: &TcpLabConfig, cases: &[Case]) -> Experiment {
    let mut result = Experiment::new("apps");
    cases.iter().for_each(|case| case.compare(&mut result));
    let rows = || cases.iter().flat_map(|case| &case.rows);
    let kept_share = |is_wanted: fn(StackKind) -> bool| {
        let wanted = rows().filter(|row| is_wanted(row.stack));
        wanted.filter_map(Row::kept_share).fold(0.0, f64::max)
    };
    result.figure("redis_under_flood", kept_share(|stack| !stack.is_kernel()));
    let embedded = kept_share(|stack| stack == StackKind::Embedded);
    result.figure("redis_under_flood_embedded", embedded);
    let attached = kept_share(|stack| stack == StackKind::Attached);
    result.figure("redis_under_flood_attached", attached);
    result.figure("redis_under_flood_kernel", kept_share(StackKind::is_kernel));
    result.rows = rows()
        .map(|row| {
            let of =
                |figure: fn(&ServiceMeasurement) -> f64| median(row.baseline.iter().map(figure));
            let all =
                |count: fn(&ServiceMeasurement) -> u64| row.baseline.iter().map(count).sum::<u64>();
            json!({
                "program": row.application.name(),
                "way": row.stack.name(),
                "requests_per_second": row.median_rps().round(),
                "packaged_requests_per_second":
                    (!row.packaged_rps.is_empty()).then(|| row.median_packaged_rps().round()),
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
        "packaged_requests_per_second",
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
        "packaged: redis-benchmark, memcaslap and wrk on core 0, on kernel sockets, with as many connections; \
         where they disagree with the load from the device, core 0 is their limit",
    );
    result.note(
        "a first pass measures the kernel with its receive work in softirqs where Linux puts them, \
         on core 0 (kernel-softirq), by RPS on core 1 (kernel-rps), in a NAPI thread there \
         (kernel-thread), and in the program's own calls by net.core.busy_poll \
         (kernel-busy-poll); the best of these by each load is measured again in turn with \
         Tidegate, and the ratios are to it",
    );
    result.note(format!(
        "under the flood: {UNDER_FLOOD_RPS} requests/s in an open loop; 8,192 unknown sources send \
         UDP to a closed port, up to the packet rate of a 1 Gb/s link, from core 0 too; the load \
         runs on its own stack; kept_under_flood: rate under the flood over the rate without it"
    ));
    result
}
