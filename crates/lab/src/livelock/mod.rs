//! The experiment `livelock`: goodput against offered load, up to the most that
//! can be offered.
//!
//! A service with tunable work per packet on the kernel's sockets and on
//! Tidegate in each of its modes, and real DNS servers. Each is offered the
//! same loads, from well below its peak to the generator's maximum. Who
//! livelocks falls behind its own peak as the load grows.

pub(crate) mod bench;
pub mod curve;
pub mod subject;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cpu;
use crate::dns::servers::ServerKind;
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::load::flood;
use crate::netns;
use crate::plot::{Axis, Panel, Picture, Series};
use bench::Bench;
pub use bench::Measured;
use curve::Curve;
use subject::{Carrier, DEFAULT_MODE, MODES, Running, Subject, Zone};

/// The loads of a subject take turns of this length, in seconds: a machine that
/// is slow for a second is slow for all of them.
const SLICE_S: f64 = 0.05;
/// Time to settle at a load before each slice: what waits is worked on in less.
const WARM_UP: Duration = Duration::from_millis(25);

/// How to run the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LivelockConfig {
    /// Work for each packet, in nanoseconds.
    pub work_ns: Vec<u64>,
    /// What carries the service, by name: `kernel` and Tidegate's modes; all
    /// that there are when empty.
    pub carriers: Vec<String>,
    /// Which DNS servers.
    pub dns: Vec<ServerKind>,
    /// Loads to offer, in packets per second, besides the maximum.
    pub loads_pps: Vec<f64>,
    /// How long to measure at each load, in seconds.
    pub seconds: f64,
    /// How often to measure everything; the median counts.
    pub repeats: usize,
    /// The core that serves.
    pub server_core: usize,
    /// The core that sends.
    pub load_core: usize,
}

impl Default for LivelockConfig {
    fn default() -> Self {
        let kpps = [50, 100, 150, 200, 300, 400, 500, 600, 800, 1000, 1500];
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
            seconds: 0.5,
            repeats: 5,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl LivelockConfig {
    /// Everything once and shortly, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        let kpps = [50, 100, 200, 400, 800];
        let loads_pps = kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec();
        Self { loads_pps, seconds: 0.2, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        let cores = cpu::cores();
        if cores < 2 || self.server_core == self.load_core {
            return Err(LabError::Config(format!(
                "one core must serve and another send; there are {cores} to choose from"
            )));
        }
        let sane = self.seconds > 0.0 && self.seconds < 60.0 && self.repeats > 0;
        if !sane || self.loads_pps.iter().any(|load| !(load.is_finite() && *load > 0.0)) {
            return Err(LabError::Config(
                "seconds (below 60), repeats and loads must all be above zero".into(),
            ));
        }
        subject::check_installed(&self.dns)
    }

    /// Every subject, in the order of the table.
    fn subjects(&self) -> Result<Vec<Subject>, LabError> {
        let carriers: Vec<Carrier> = if self.carriers.is_empty() {
            Carrier::all().collect()
        } else {
            self.carriers.iter().map(|name| name.parse()).collect::<Result<_, _>>()?
        };
        let services = self.work_ns.iter().flat_map(|&work_ns| {
            carriers.iter().map(move |&carrier| Subject::Service { carrier, work_ns })
        });
        Ok(services.chain(self.dns.iter().copied().map(Subject::Dns)).collect())
    }

    /// How often each load is measured in a turn of a subject.
    fn slices(&self) -> usize {
        (self.seconds / SLICE_S).round().max(1.0) as usize
    }
}

/// A subject and what was measured of it.
struct Found {
    subject: Subject,
    curve: Curve,
}

/// Runs the experiment. Says on standard error what it is at.
///
/// # Errors
/// When there is only one core, namespaces cannot be made, a server is not
/// installed or does not start, or the flood cannot be sent.
pub fn run(config: &LivelockConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name}, left behind by a process that is gone");
    }
    let subjects = config.subjects()?;
    let zone = if config.dns.is_empty() { None } else { Some(Zone::write()?) };
    let bench = Bench::new(config.server_core, config.load_core)?;
    let loads = || config.loads_pps.iter().copied().map(Some).chain([None]);
    let mut found: Vec<Found> =
        subjects.into_iter().map(|subject| Found { subject, curve: Curve::at(loads()) }).collect();
    for repeat in 1..=config.repeats {
        for one in &mut found {
            sweep(config, &bench, zone.as_ref(), one)?;
            tell(repeat, one);
        }
    }
    let mut result = Experiment::new("livelock");
    describe(config, &mut result);
    conclude(&found, &mut result);
    Ok(result)
}

/// Starts one subject and offers it every load once.
fn sweep(
    config: &LivelockConfig,
    bench: &Bench,
    zone: Option<&Zone>,
    one: &mut Found,
) -> Result<(), LabError> {
    let slices = config.slices();
    let slice = Duration::from_secs_f64(config.seconds / slices as f64);
    // Twice what it should take, and time to start.
    let measuring = (slice + WARM_UP) * (one.curve.steps.len() * slices) as u32;
    let limit = measuring * 2 + Duration::from_secs(20);
    let mut running = Running::start(one.subject, bench, zone, limit)?;
    running.flood.lose_as_a_card();
    let mut runs = vec![Vec::new(); one.curve.steps.len()];
    for _ in 0..slices {
        for (step, runs) in one.curve.steps.iter().zip(&mut runs) {
            let Running { flood, meter, .. } = &mut running;
            runs.push(bench.measure(flood, meter, step.asked_pps, WARM_UP, slice)?);
        }
    }
    for (step, runs) in one.curve.steps.iter_mut().zip(&runs) {
        step.runs.push(Measured::mean(runs));
    }
    Ok(())
}

fn tell(repeat: usize, one: &Found) {
    let work = one.subject.work_us().map_or(String::new(), |us| format!("{us} us"));
    eprintln!("{repeat} {:<16} {work:>7}  {} k/s", one.subject.name(), one.curve.last_runs());
}

fn describe(config: &LivelockConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {load} sends, by an XDP program that the kernel runs, and drops the answers; core \
         {server} does all the rest: receive work, softirqs, service"
    ));
    result.note(format!(
        "kernel, the DNS servers on kernel sockets, knot-xdp and modes moderated and napi: a timer \
         on core {server} polls the veth's NAPI every 20 us while it is idle, as a card with \
         coalescing would; in mode interrupt each arrival wakes a thread of real-time priority; \
         the other modes poll it themselves"
    ));
    result.note(format!(
        "kernel-thread: the NAPI context has a thread on core {server}, of ordinary priority; \
         kernel-rps: core {load} receives up to where RPS hands a packet to core {server}, so two \
         cores work for it, and the flood slows down"
    ));
    result.note(
        "goodput: packets that the service has worked on, read from its counters; of DNS servers, \
         answers counted at their device",
    );
    result.note(format!(
        "{} turns of each subject; in a turn {} slices of {:.0} ms at each load, the loads taking \
         turns; medians of the turns count; a floor is the median of what each turn kept of its \
         own goodput at the load of the peak",
        config.repeats,
        config.slices(),
        1e3 * config.seconds / config.slices() as f64
    ));
    result.note(flood::CARD);
}

/// What people see; the JSON has more.
const COLUMNS: [&str; 7] = [
    "subject",
    "work_us",
    "offered_per_s",
    "goodput_per_s",
    "lowest",
    "highest",
    "server_core_busy_percent",
];

fn conclude(found: &[Found], result: &mut Experiment) {
    let floor = |wanted: &str| {
        let of = found.iter().filter(|one| one.subject.name() == wanted);
        of.map(|one| one.curve.floor()).reduce(f64::min)
    };
    let mut figure = |name: &str, value: Option<f64>| {
        if let Some(value) = value {
            result.figure(name, rounded(value));
        }
    };
    figure("tidegate_floor", floor(DEFAULT_MODE));
    figure("kernel_floor", floor("kernel"));
    figure("kernel_thread_floor", floor("kernel-thread"));
    figure("kernel_rps_floor", floor("kernel-rps"));
    for mode in MODES.iter().filter(|mode| mode.name != DEFAULT_MODE) {
        figure(&format!("{}_floor", mode.name.replace('+', "_")), floor(mode.name));
    }
    for kernel in Carrier::all().filter(|carrier| matches!(carrier, Carrier::Kernel(_))) {
        let name = kernel.name().replace('-', "_");
        for (work_ns, suffix) in [(500, ""), (2_000, "_2us")] {
            let ratio = over_kernel_at_maximum(found, kernel, work_ns);
            figure(&format!("tidegate_over_{name}_at_max{suffix}"), ratio);
        }
    }
    let tidegate_dns = dns(found, ServerKind::TidegateXdp);
    figure("dns_floor", tidegate_dns.and_then(|curve| curve.kept_near(1e6)));
    for (name, kind) in [
        ("nsd_floor", ServerKind::Nsd),
        ("knot_floor", ServerKind::Knot),
        ("knot_xdp_floor", ServerKind::KnotXdp),
    ] {
        figure(name, dns(found, kind).map(Curve::floor));
    }
    result.rows = found.iter().flat_map(rows).collect();
    result.columns = COLUMNS.to_vec();
    result.picture = Some(picture(found));
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Tidegate's goodput at the most load over the kernel's, with so much work. A
/// kernel that delivers nothing counts as one that delivers a packet a second.
fn over_kernel_at_maximum(found: &[Found], kernel: Carrier, work_ns: u64) -> Option<f64> {
    let of = |carrier: Carrier| {
        let subject = Subject::Service { carrier, work_ns };
        found.iter().find(|one| one.subject == subject).map(|one| one.curve.at_maximum_pps())
    };
    Some(of(Carrier::tidegate())? / of(kernel)?.max(1.0))
}

fn dns(found: &[Found], kind: ServerKind) -> Option<&Curve> {
    found.iter().find(|one| one.subject == Subject::Dns(kind)).map(|one| &one.curve)
}

fn rows(one: &Found) -> Vec<Value> {
    let row = |step: &curve::Step| {
        let each = |figure: fn(f64, f64) -> f64, start: f64| {
            step.runs.iter().map(|run| run.goodput_pps).fold(start, figure).round()
        };
        json!({
            "subject": one.subject.name(),
            "work_us": one.subject.work_us(),
            "asked_per_s": step.asked_pps,
            "offered_per_s": step.offered_pps().round(),
            "goodput_per_s": step.goodput_pps().round(),
            "lowest": each(f64::min, f64::INFINITY),
            "highest": each(f64::max, 0.0),
            "server_core_busy_percent": step.median(|run| run.server_core.busy_percent).round(),
            "of_it_softirq_percent": step.median(|run| run.server_core.softirq_percent).round(),
            "load_core_busy_percent": step.median(|run| run.load_core.busy_percent).round(),
        })
    };
    one.curve.steps.iter().filter(|step| !step.runs.is_empty()).map(row).collect()
}

/// One panel for each amount of work, and one for the DNS servers.
fn picture(found: &[Found]) -> Picture {
    let mut works: Vec<Option<f64>> = found.iter().map(|one| one.subject.work_us()).collect();
    works.dedup();
    let panel = |work: &Option<f64>| Panel {
        title: match work {
            Some(us) => format!("{us} us of work per packet"),
            None => "DNS servers".into(),
        },
        x: Axis::new("offered", "packets/s"),
        y: Axis::new("goodput", "packets/s"),
        series: found
            .iter()
            .filter(|one| one.subject.work_us() == *work)
            .map(|one| Series::new(one.subject.name(), one.curve.points()))
            .collect(),
        spans: Vec::new(),
    };
    let title = "Goodput against offered load".into();
    Picture { title, panels: works.iter().map(panel).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use curve::Step;

    fn found(subject: Subject, points: &[(f64, f64)]) -> Found {
        let step = |&(offered_pps, goodput_pps): &(f64, f64)| Step {
            asked_pps: Some(offered_pps),
            runs: vec![Measured { offered_pps, goodput_pps, ..Measured::default() }],
        };
        Found { subject, curve: Curve { steps: points.iter().map(step).collect() } }
    }

    #[test]
    fn figures_are_of_the_worst_work_and_of_the_default_mode() {
        let service = |name: &str, work_ns, points: &[(f64, f64)]| {
            let carrier = name.parse().unwrap();
            found(Subject::Service { carrier, work_ns }, points)
        };
        let all = [
            service("kernel", 500, &[(400.0, 400.0), (1000.0, 200.0)]),
            service("polled+feedback", 500, &[(800.0, 800.0), (1000.0, 792.0)]),
            service("interrupt", 500, &[(300.0, 300.0), (1000.0, 30.0)]),
            service("kernel", 2000, &[(300.0, 300.0), (1000.0, 240.0)]),
            service("polled+feedback", 2000, &[(400.0, 400.0), (1000.0, 384.0)]),
            found(Subject::Dns(ServerKind::TidegateXdp), &[(4e5, 4e5), (1e6, 3.9e5)]),
            found(Subject::Dns(ServerKind::Nsd), &[(2e5, 2e5), (1e6, 1e4)]),
        ];
        let mut result = Experiment::new("livelock");
        conclude(&all, &mut result);
        let figures = &result.figures;
        assert_eq!(figures["tidegate_floor"], 0.96);
        assert_eq!(figures["kernel_floor"], 0.5);
        assert_eq!(figures["interrupt_floor"], 0.1);
        assert_eq!(figures["tidegate_over_kernel_at_max"], 3.96);
        assert_eq!(figures["tidegate_over_kernel_at_max_2us"], 1.6);
        assert_eq!(figures["dns_floor"], 0.975);
        assert_eq!(figures["nsd_floor"], 0.05);
        assert!(!figures.contains_key("knot_floor"));
        assert_eq!(result.rows.len(), 14);
        let picture = result.picture.unwrap();
        assert_eq!(picture.panels.len(), 3);
        assert_eq!(picture.panels[0].series.len(), 3);
    }

    #[test]
    fn a_measurement_is_cut_into_slices() {
        let slices = |seconds| LivelockConfig { seconds, ..Default::default() }.slices();
        assert_eq!([slices(0.01), slices(0.05), slices(0.2), slices(0.5)], [1, 1, 4, 10]);
    }

    #[test]
    fn the_slices_of_a_turn_are_one_measurement() {
        let slice = |goodput_pps, busy_percent| Measured {
            goodput_pps,
            server_core: cpu::CoreUse { busy_percent, ..Default::default() },
            ..Measured::default()
        };
        let mean = Measured::mean(&[slice(100.0, 50.0), slice(300.0, 100.0)]);
        assert_eq!((mean.goodput_pps, mean.server_core.busy_percent), (200.0, 75.0));
        assert_eq!((mean.offered_pps, mean.load_core.busy_percent), (0.0, 0.0));
    }

    #[test]
    fn a_configuration_that_cannot_be_run_is_refused() {
        let config = LivelockConfig { dns: Vec::new(), ..LivelockConfig::default() };
        let refused = |config: &LivelockConfig| config.check().unwrap_err().to_string();
        assert!(refused(&LivelockConfig { load_core: 1, ..config.clone() }).contains("another"));
        assert!(refused(&LivelockConfig { repeats: 0, ..config.clone() }).contains("repeats"));
        let loads_pps = vec![0.0];
        assert!(refused(&LivelockConfig { loads_pps, ..config.clone() }).contains("loads"));
        let unknown = LivelockConfig { carriers: vec!["pulled".into()], ..config };
        assert!(unknown.subjects().unwrap_err().to_string().contains("pulled"));
    }
}
