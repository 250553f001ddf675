//! The experiment `livelock`: goodput against offered load, up to the generator's maximum.
//!
//! The test cases are a service with tunable work per packet, on the kernel's sockets and on
//! each of Tidegate's modes, and real DNS servers. Each test case is offered the same loads,
//! from well below its peak to the maximum. A server that livelocks falls below its own peak as
//! the load grows.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::LabError;
use crate::experiments::goodput_curve::{GoodputCurve, LoadStep};
use crate::experiments::kernel_best::{FirstPass, Goal};
use crate::report::experiment::Experiment;
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::round_to_thousandths;
use crate::testbed::cpu;
use crate::testbed::dns::servers::ServerKind;
use crate::testbed::flood::FloodTestbed;
use crate::testbed::load::flood;
use crate::testbed::netns;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::test_case::{
    DEFAULT_MODE, FloodedServer, MODES, TestCase, Transport, Zone, check_installed,
};

/// Settling time at a load before its measurement, as a part of the measuring time.
const SETTLING: f64 = 0.25;
/// Work at which Tidegate is compared with the kernel at the maximum load, in nanoseconds.
const COMPARED_WORK_NS: [u64; 2] = [500, 2_000];
/// Work at which modes that no figure compares with the kernel are measured, in nanoseconds.
const MODE_WORK_NS: u64 = 2_000;

/// Configuration of the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LivelockConfig {
    /// Work per packet, in nanoseconds.
    pub work_ns: Vec<u64>,
    /// Transports of the service, by name. Empty selects Tidegate's modes, the raw loop, the kernel
    /// by a timer, and the best of the kernel's other ways at the maximum load.
    pub carriers: Vec<String>,
    /// DNS servers to measure.
    pub dns: Vec<ServerKind>,
    /// Offered loads in packets per second; the maximum is always added.
    pub loads_pps: Vec<f64>,
    /// Measuring time at each load, in seconds.
    pub seconds: f64,
    /// Number of repeats; the median counts.
    pub repeats: usize,
    /// The core that runs the server.
    pub server_core: usize,
    /// The core that generates the load.
    pub load_core: usize,
}

impl Default for LivelockConfig {
    fn default() -> Self {
        let kpps = [100, 200, 400, 700, 1200, 2000, 4000];
        Self {
            work_ns: vec![0, 500, 2_000, 10_000],
            carriers: Vec::new(),
            dns: vec![
                ServerKind::TidegateXdp,
                ServerKind::Nsd,
                ServerKind::Knot,
                ServerKind::KnotXdp,
            ],
            loads_pps: kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec(),
            seconds: 2.0,
            repeats: 2,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl LivelockConfig {
    /// Everything once and briefly, for a first impression.
    #[must_use]
    pub fn quick(self) -> Self {
        let kpps = [50, 100, 200, 400, 800];
        let loads_pps = kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec();
        Self { loads_pps, seconds: 0.2, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        let cores = cpu::available_cores();
        if cores < 2 || self.server_core == self.load_core {
            return Err(LabError::Config(format!(
                "one core must run the server, another the generator; {cores} available"
            )));
        }
        let is_valid = self.seconds > 0.0 && self.seconds < 60.0 && self.repeats > 0;
        if !is_valid || self.loads_pps.iter().any(|load| !(load.is_finite() && *load > 0.0)) {
            return Err(LabError::Config(
                "seconds (below 60), repeats and loads must all be above zero".into(),
            ));
        }
        check_installed(&self.dns)
    }

    /// All test cases, in the order of the table.
    fn test_cases(&self, choices: &KernelChoices) -> Result<Vec<TestCase>, LabError> {
        let named: Vec<Transport> =
            self.carriers.iter().map(|name| name.parse()).collect::<Result<_, _>>()?;
        let mut test_cases = Vec::new();
        for &work_ns in &self.work_ns {
            let transports = if named.is_empty() {
                default_transports(work_ns, choices.best_for_work(work_ns))
            } else {
                named.clone()
            };
            let measured =
                transports.into_iter().filter(|one| *one != Transport::Raw || work_ns == 0);
            test_cases.extend(measured.map(|transport| TestCase::Service { transport, work_ns }));
        }
        test_cases.extend(self.dns.iter().map(|&kind| {
            let receive_work = choices.best_for_dns(kind);
            TestCase::Dns { kind, receive_work }
        }));
        Ok(test_cases)
    }

    /// Every load for 10 s.
    #[must_use]
    pub fn long(self) -> Self {
        Self { seconds: 10.0, ..self }
    }

    /// Settling time and measuring time at each load.
    fn times(&self) -> (Duration, Duration) {
        let measuring = Duration::from_secs_f64(self.seconds);
        (measuring.mul_f64(SETTLING).min(Duration::from_secs(1)), measuring)
    }
}

/// Transports of a service with this work, if none are named. `kernel_best` is the kernel's best
/// way.
fn default_transports(work_ns: u64, kernel_best: Option<ReceiveWork>) -> Vec<Transport> {
    let by_timer = (COMPARED_WORK_NS.contains(&work_ns)).then(Transport::kernel);
    let mut transports: Vec<Transport> = by_timer.into_iter().collect();
    transports.extend(kernel_best.map(Transport::Kernel));
    transports.extend(Transport::all().filter(|one| match one {
        Transport::Kernel(_) => false,
        Transport::Raw => true,
        Transport::Tidegate(_) => *one == Transport::tidegate() || work_ns == MODE_WORK_NS,
    }));
    transports
}

/// The first pass: the kernel's ways at the maximum load.
#[derive(Default)]
struct KernelChoices {
    /// By the work of the service, in nanoseconds.
    services: Vec<(u64, FirstPass<ReceiveWork>)>,
    dns: Vec<(ServerKind, FirstPass<ReceiveWork>)>,
}

impl KernelChoices {
    fn measure(
        config: &LivelockConfig,
        testbed: &FloodTestbed,
        zone: Option<&Zone>,
    ) -> Result<Self, LabError> {
        let name = |work: ReceiveWork| work.kernel_name().to_owned();
        let progress = Progress::of_part("first pass", Self::steps(config));
        let measure = |test_case| {
            let goodput_pps = measure_max_load(config, testbed, zone, test_case)?;
            let way = test_case.receive_work().kernel_name();
            progress.step(format_args!(
                "first pass {:<26} {way:<22} {goodput_pps:>9.0}/s",
                describe_case(test_case)
            ));
            Ok(goodput_pps)
        };
        let services = config.work_ns.iter().filter(|_| config.carriers.is_empty());
        let services = services.map(|&work_ns| {
            let goodput =
                |work| measure(TestCase::Service { transport: Transport::Kernel(work), work_ns });
            let pass = FirstPass::measure(Goal::Highest, &ReceiveWork::KERNEL, name, goodput)?;
            Ok((work_ns, pass))
        });
        let services = services.collect::<Result<Vec<_>, LabError>>()?;
        let with_choice = config.dns.iter().filter(|kind| kind.receive_works().len() > 1);
        let dns = with_choice.map(|&kind| {
            let goodput = |receive_work| measure(TestCase::Dns { kind, receive_work });
            let pass = FirstPass::measure(Goal::Highest, kind.receive_works(), name, goodput)?;
            Ok((kind, pass))
        });
        Ok(Self { services, dns: dns.collect::<Result<Vec<_>, LabError>>()? })
    }

    /// Measurements of the first pass.
    fn steps(config: &LivelockConfig) -> usize {
        let works = if config.carriers.is_empty() { config.work_ns.len() } else { 0 };
        let ways = config.dns.iter().map(|kind| kind.receive_works().len());
        works * ReceiveWork::KERNEL.len() + ways.filter(|&ways| ways > 1).sum::<usize>()
    }

    fn for_work(&self, work_ns: u64) -> Option<&FirstPass<ReceiveWork>> {
        self.services.iter().find(|(work, _)| *work == work_ns).map(|(_, pass)| pass)
    }

    fn best_for_work(&self, work_ns: u64) -> Option<ReceiveWork> {
        self.for_work(work_ns).map(FirstPass::best)
    }

    fn best_for_dns(&self, kind: ServerKind) -> ReceiveWork {
        let pass = self.dns.iter().find(|(of, _)| *of == kind).map(|(_, pass)| pass);
        pass.map_or(kind.receive_works()[0], FirstPass::best)
    }
}

/// Goodput of a test case at the maximum load, in packets per second.
fn measure_max_load(
    config: &LivelockConfig,
    testbed: &FloodTestbed,
    zone: Option<&Zone>,
    test_case: TestCase,
) -> Result<f64, LabError> {
    let mut curve = GoodputCurve::with_loads([None]);
    sweep_loads(config, testbed, zone, test_case, &mut curve)?;
    Ok(curve.goodput_at_max_load_pps())
}

/// A test case and its measurements.
struct CaseResult {
    test_case: TestCase,
    curve: GoodputCurve,
}

/// Runs the experiment. Prints its progress on standard error.
///
/// # Errors
/// If there is only one core, namespaces cannot be created, a server is not installed or does
/// not start, or the flood cannot be sent.
pub fn run(config: &LivelockConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name} of a process that no longer exists");
    }
    let zone = if config.dns.is_empty() { None } else { Some(Zone::write()?) };
    let testbed = FloodTestbed::new(config.server_core, config.load_core)?;
    let choices = KernelChoices::measure(config, &testbed, zone.as_ref())?;
    let test_cases = config.test_cases(&choices)?;
    let loads = || config.loads_pps.iter().copied().map(Some).chain([None]);
    let mut results: Vec<CaseResult> = test_cases
        .into_iter()
        .map(|test_case| CaseResult { test_case, curve: GoodputCurve::with_loads(loads()) })
        .collect();
    let progress = Progress::new(results.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for case_result in &mut results {
            let CaseResult { test_case, curve } = case_result;
            sweep_loads(config, &testbed, zone.as_ref(), *test_case, curve)?;
            report_step(&progress, repeat, case_result);
        }
    }
    let mut result = Experiment::new("livelock");
    describe(config, &mut result);
    conclude(&results, &choices, &mut result);
    Ok(result)
}

/// Starts the server of one test case and offers every load once.
fn sweep_loads(
    config: &LivelockConfig,
    testbed: &FloodTestbed,
    zone: Option<&Zone>,
    test_case: TestCase,
    curve: &mut GoodputCurve,
) -> Result<(), LabError> {
    let (settling, measuring) = config.times();
    // Twice the expected time, plus time to start.
    let whole = (settling + measuring) * curve.steps.len() as u32;
    let limit = whole * 2 + Duration::from_secs(20);
    let mut server = FloodedServer::start(test_case, testbed, zone, limit)?;
    for step in &mut curve.steps {
        let FloodedServer { flood, meter, .. } = &mut server;
        let run = testbed.measure(flood, meter, step.requested_pps, settling, measuring)?;
        step.runs.push(run);
        server.check_running()?;
    }
    Ok(())
}

fn report_step(progress: &Progress, repeat: usize, case_result: &CaseResult) {
    progress.step(format_args!(
        "{repeat} {:<36}  {} k/s",
        describe_case(case_result.test_case),
        case_result.curve.format_last_runs()
    ));
}

fn describe(config: &LivelockConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {load} sends, by an XDP program that the kernel runs, and drops the replies; core \
         {server} does all other work: receive work, softirqs, service"
    ));
    result.note(format!(
        "a first pass at the maximum load measures the kernel with its receive work in softirqs \
         where Linux puts them, on core {load} (kernel-softirq), by RPS, where core {load} receives up \
         to where a packet is handed to core {server} (kernel-rps), in a NAPI thread on core \
         {server} (kernel-thread), in calls of the server that never sleeps (kernel-busy-poll, \
         SO_PREFER_BUSY_POLL), or of one that sleeps when idle (kernel-irq-suspension); the best is \
         measured again at each load in turn with Tidegate. NSD and Knot DNS have the same choice, \
         with net.core.busy_poll; knot-xdp that of a timer, softirqs or a thread"
    ));
    result.note(format!(
        "kernel-timer, and modes moderated and napi: a timer on core {server} polls the veth's NAPI \
         every 20 us while it is idle, like a NIC with coalescing that nobody tuned; in mode \
         interrupt each arrival wakes a thread of real-time priority; the other modes poll the \
         device themselves"
    ));
    result.note(
        "goodput: packets that the service has processed, read from its counters; of DNS servers, \
         replies counted at their device",
    );
    let (settling, measuring) = config.times();
    result.note(format!(
        "each load is held for {} s after {} s, {} times, the test cases taking turns; medians count; \
         a floor is the lowest goodput at any load above saturation over the highest at any load, each \
         turn compared with itself",
        measuring.as_secs_f64(),
        settling.as_secs_f64(),
        config.repeats,
    ));
    result.note(flood::FLOOD_NOTE);
    result.note(
        "raw: a loop of the laboratory that only takes frames from AF_XDP and frees them; what it \
         keeps without work is what the drops of a veth cost any receiver; tidegate_floor is that \
         with work, no_work_floor_over_raw compares both without",
    );
    result.note(format!(
        "modes other than {DEFAULT_MODE} are measured with {} us of work",
        MODE_WORK_NS as f64 / 1e3
    ));
}

/// Columns of the printed table; the JSON has more.
const COLUMNS: [&str; 7] = [
    "subject",
    "work_us",
    "offered_per_s",
    "goodput_per_s",
    "lowest",
    "highest",
    "server_core_busy_percent",
];

fn conclude(results: &[CaseResult], choices: &KernelChoices, result: &mut Experiment) {
    let unsaturated: Vec<String> = results
        .iter()
        .filter(|one| one.curve.floor().is_none())
        .map(|one| describe_case(one.test_case))
        .collect();
    let of =
        |wanted: &'static str| results.iter().filter(move |one| one.test_case.name() == wanted);
    let floor = |wanted| of(wanted).filter_map(|one| one.curve.floor()).reduce(f64::min);
    let is_idle = |one: &&CaseResult| one.test_case.work_us() == Some(0.0);
    let floor_without_work = |wanted| of(wanted).filter(is_idle).find_map(|one| one.curve.floor());
    let floor_with_work = |wanted| {
        let with_work = of(wanted).filter(|one| !is_idle(one));
        with_work.filter_map(|one| one.curve.floor()).reduce(f64::min)
    };
    let mut figure = |name: &str, value: Option<f64>| {
        if let Some(value) = value {
            result.figure(name, round_to_thousandths(value));
        }
    };
    figure("tidegate_floor", floor_with_work(DEFAULT_MODE));
    let (without_work, raw) = (floor_without_work(DEFAULT_MODE), floor_without_work("raw"));
    figure("tidegate_no_work_floor", without_work);
    figure("raw_floor", raw);
    figure("no_work_floor_over_raw", without_work.zip(raw).map(|(own, raw)| own / raw));
    for work in [ReceiveWork::Timer].into_iter().chain(ReceiveWork::KERNEL) {
        let name = work.kernel_name();
        figure(&format!("{}_floor", name.replace('-', "_")), floor(name));
    }
    figure("kernel_floor", best_kernel_floor(results, choices));
    for mode in MODES.iter().filter(|mode| mode.name != DEFAULT_MODE) {
        figure(&format!("{}_floor", mode.name.replace('+', "_")), floor(mode.name));
    }
    for (name, kind) in [
        ("dns_floor", ServerKind::TidegateXdp),
        ("nsd_floor", ServerKind::Nsd),
        ("knot_floor", ServerKind::Knot),
        ("knot_xdp_floor", ServerKind::KnotXdp),
    ] {
        figure(name, dns(results, kind).and_then(GoodputCurve::floor));
    }
    for (work_ns, suffix) in COMPARED_WORK_NS.into_iter().zip(["", "_2us"]) {
        compare_at_max_load(results, choices, work_ns, suffix, result);
    }
    for (kind, pass) in &choices.dns {
        result.note(format!("{}: best with {}", kind.name(), pass.best().kernel_name()));
    }
    if !unsaturated.is_empty() {
        result.note(format!(
            "not saturated by any load, so without a floor: {}",
            unsaturated.join(", ")
        ));
    }
    result.rows = results.iter().flat_map(rows).collect();
    result.columns = COLUMNS.to_vec();
    result.picture = Some(picture(results));
}

/// Name of a test case with its work.
fn describe_case(test_case: TestCase) -> String {
    let work = test_case.work_us().map_or(String::new(), |us| format!(" with {us} us of work"));
    format!("{}{work}", test_case.name())
}

/// Lowest floor of the kernel's best ways, which differ by the work of the service.
fn best_kernel_floor(results: &[CaseResult], choices: &KernelChoices) -> Option<f64> {
    let of_best = results.iter().filter(|one| match one.test_case {
        TestCase::Service { transport: Transport::Kernel(work), work_ns } => {
            choices.best_for_work(work_ns) == Some(work)
        }
        _ => false,
    });
    of_best.filter_map(|one| one.curve.floor()).reduce(f64::min)
}

/// Compares Tidegate's goodput at the highest load with the kernel's, for this work per packet: with
/// the best of its ways, and with each.
fn compare_at_max_load(
    results: &[CaseResult],
    choices: &KernelChoices,
    work_ns: u64,
    suffix: &str,
    result: &mut Experiment,
) {
    let at_max_load = |transport: Transport| {
        let test_case = TestCase::Service { transport, work_ns };
        let found = results.iter().find(|one| one.test_case == test_case)?;
        Some(found.curve.goodput_at_max_load_pps())
    };
    let Some(own_pps) = at_max_load(Transport::tidegate()) else { return };
    let figure = format!("tidegate_over_kernel_at_max{suffix}");
    let kernels = [ReceiveWork::Timer].into_iter().chain(ReceiveWork::KERNEL);
    let mut rates: Vec<(String, f64)> = kernels
        .filter_map(|work| {
            Some((work.kernel_name().to_owned(), at_max_load(Transport::Kernel(work))?))
        })
        .collect();
    for (name, pps) in &rates {
        let name = name.replace('-', "_");
        result.figure(
            &format!("tidegate_over_{name}_at_max{suffix}"),
            round_to_thousandths(own_pps / pps.max(1.0)),
        );
    }
    if let Some(pass) = choices.for_work(work_ns)
        && let Some(best_pps) = at_max_load(Transport::Kernel(pass.best()))
    {
        let kernel = pass.rows(best_pps);
        rates.extend(kernel.rows.into_iter().filter(|(name, _)| *name != kernel.best));
    }
    result.compare_with_kernel(&figure, own_pps, rates);
}

fn dns(results: &[CaseResult], kind: ServerKind) -> Option<&GoodputCurve> {
    let is_wanted =
        |one: &&CaseResult| matches!(one.test_case, TestCase::Dns { kind: of, .. } if of == kind);
    results.iter().find(is_wanted).map(|one| &one.curve)
}

fn rows(case_result: &CaseResult) -> Vec<Value> {
    let row = |step: &LoadStep| {
        let each = |figure: fn(f64, f64) -> f64, start: f64| {
            step.runs.iter().map(|run| run.goodput_pps).fold(start, figure).round()
        };
        json!({
            "subject": case_result.test_case.name(),
            "work_us": case_result.test_case.work_us(),
            "asked_per_s": step.requested_pps,
            "offered_per_s": step.offered_pps().round(),
            "goodput_per_s": step.goodput_pps().round(),
            "lowest": each(f64::min, f64::INFINITY),
            "highest": each(f64::max, 0.0),
            "server_core_busy_percent": step.median(|run| run.server_core.busy_percent).round(),
            "of_it_softirq_percent": step.median(|run| run.server_core.softirq_percent).round(),
            "load_core_busy_percent": step.median(|run| run.load_core.busy_percent).round(),
        })
    };
    case_result.curve.steps.iter().filter(|step| !step.runs.is_empty()).map(row).collect()
}

/// One panel per amount of work, and one for the DNS servers.
fn picture(results: &[CaseResult]) -> Picture {
    let mut work_us: Vec<Option<f64>> = results.iter().map(|one| one.test_case.work_us()).collect();
    work_us.dedup();
    let panel = |work: &Option<f64>| Panel {
        title: match work {
            Some(us) => format!("{us} us of work per packet"),
            None => "DNS servers".into(),
        },
        x: Axis::new("offered", "packets/s").log(),
        y: Axis::new("goodput", "packets/s"),
        series: results
            .iter()
            .filter(|one| one.test_case.work_us() == *work)
            .map(|one| Series::new(one.test_case.name(), one.curve.points()))
            .collect(),
        spans: Vec::new(),
    };
    let title = "Goodput against offered load".into();
    Picture { title, panels: work_us.iter().map(panel).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::goodput_curve::LoadStep;
    use crate::testbed::flood::FloodMeasurement;

    fn case_result(test_case: TestCase, points: &[(f64, f64)]) -> CaseResult {
        let step = |&(offered_pps, goodput_pps): &(f64, f64)| LoadStep {
            requested_pps: Some(offered_pps),
            runs: vec![FloodMeasurement {
                offered_pps,
                goodput_pps,
                ..FloodMeasurement::default()
            }],
        };
        CaseResult { test_case, curve: GoodputCurve { steps: points.iter().map(step).collect() } }
    }

    #[test]
    fn figures_use_the_worst_work_and_the_default_mode() {
        let dns = |kind: ServerKind, points: &[(f64, f64)]| {
            let receive_work = kind.receive_works()[0];
            case_result(TestCase::Dns { kind, receive_work }, points)
        };
        let service = |name: &str, work_ns, points: &[(f64, f64)]| {
            let transport = name.parse().unwrap();
            case_result(TestCase::Service { transport, work_ns }, points)
        };
        let all = [
            service("kernel", 0, &[(500.0, 500.0)]),
            service("raw", 0, &[(900.0, 900.0), (1200.0, 900.0), (1500.0, 720.0)]),
            service("polled+feedback", 0, &[(900.0, 900.0), (1500.0, 675.0)]),
            service("kernel", 500, &[(400.0, 400.0), (1000.0, 200.0)]),
            service("polled+feedback", 500, &[(800.0, 800.0), (1000.0, 792.0)]),
            service("interrupt", 500, &[(300.0, 300.0), (1000.0, 30.0)]),
            service("kernel", 2000, &[(300.0, 300.0), (1000.0, 240.0)]),
            service("polled+feedback", 2000, &[(400.0, 400.0), (1000.0, 384.0)]),
            dns(ServerKind::TidegateXdp, &[(4e5, 4e5), (1e6, 3.9e5)]),
            dns(ServerKind::Nsd, &[(2e5, 2e5), (1e6, 1e4)]),
        ];
        let mut result = Experiment::new("livelock");
        conclude(&all, &KernelChoices::default(), &mut result);
        let figures = &result.figures;
        assert_eq!(figures["tidegate_floor"], 0.96);
        assert_eq!(figures["tidegate_no_work_floor"], 0.75);
        assert_eq!(figures["raw_floor"], 0.8);
        assert_eq!(figures["no_work_floor_over_raw"], 0.938);
        assert_eq!(figures["kernel_timer_floor"], 0.5);
        assert_eq!(figures["interrupt_floor"], 0.1);
        assert_eq!(figures["tidegate_over_kernel_at_max"], 3.96);
        assert_eq!(figures["tidegate_over_kernel_at_max_2us"], 1.6);
        assert_eq!(figures["dns_floor"], 0.975);
        assert_eq!(figures["nsd_floor"], 0.05);
        assert!(!figures.contains_key("knot_floor"));
        assert_eq!(result.rows.len(), 20);
        assert!(result.notes.iter().any(|note| note.ends_with("kernel-timer with 0 us of work")));
        let picture = result.picture.unwrap();
        assert_eq!(picture.panels.len(), 4);
        assert_eq!(picture.panels[0].series.len(), 3);
    }

    #[test]
    fn settles_before_each_measurement() {
        let milliseconds = |config: LivelockConfig| {
            let (settling, measuring) = config.times();
            (settling.as_millis(), measuring.as_millis())
        };
        assert_eq!(milliseconds(LivelockConfig::default()), (500, 2_000));
        assert_eq!(milliseconds(LivelockConfig::default().long()), (1_000, 10_000));
        assert_eq!(milliseconds(LivelockConfig::default().quick()), (50, 200));
    }

    #[test]
    fn measures_the_raw_loop_without_work_and_further_modes_with_some() {
        let config = LivelockConfig { dns: Vec::new(), ..LivelockConfig::default() };
        let pass = |work_ns| {
            let name = |work: ReceiveWork| work.kernel_name().to_owned();
            let is_thread = |work| Ok(f64::from(u8::from(work == ReceiveWork::Thread)));
            let pass = FirstPass::measure(Goal::Highest, &ReceiveWork::KERNEL, name, is_thread);
            (work_ns, pass.unwrap())
        };
        let services = config.work_ns.iter().copied().map(pass).collect();
        let choices = KernelChoices { services, dns: Vec::new() };
        let test_cases = config.test_cases(&choices).unwrap();
        let work_of = |name: &str| {
            let of = test_cases.iter().filter(|test_case| test_case.name() == name);
            of.filter_map(|test_case| test_case.work_us()).collect::<Vec<_>>()
        };
        assert_eq!(work_of("raw"), [0.0]);
        assert_eq!(work_of("kernel-timer"), [0.5, 2.0]);
        assert_eq!(work_of("kernel-thread"), [0.0, 0.5, 2.0, 10.0]);
        assert_eq!(work_of("kernel-rps"), [0.0; 0]);
        assert_eq!(work_of(DEFAULT_MODE), [0.0, 0.5, 2.0, 10.0]);
        assert_eq!(work_of("dedicated"), [2.0]);
    }

    #[test]
    fn rejects_invalid_configuration() {
        let config = LivelockConfig { dns: Vec::new(), ..LivelockConfig::default() };
        let check_error = |config: &LivelockConfig| config.check().unwrap_err().to_string();
        assert!(
            check_error(&LivelockConfig { load_core: 1, ..config.clone() }).contains("another")
        );
        assert!(check_error(&LivelockConfig { repeats: 0, ..config.clone() }).contains("repeats"));
        let loads_pps = vec![0.0];
        assert!(check_error(&LivelockConfig { loads_pps, ..config.clone() }).contains("loads"));
        let unknown = LivelockConfig { carriers: vec!["pulled".into()], ..config };
        assert!(
            unknown
                .test_cases(&KernelChoices::default())
                .unwrap_err()
                .to_string()
                .contains("pulled")
        );
    }
}
