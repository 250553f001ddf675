//! `lab elastic`: a daemon that uses as many network cores as the load needs, under a load that
//! rises and falls.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidegate::{Net, UdpSocket};
use tidegate_load::{LinkKind, LoadConfig, LoadReport, load_udp};
use tidegate_service::daemon::DaemonReport;

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::round_to_hundredths;
use crate::testbed::netns::{VethConfig, VethPair};
use crate::testbed::process::ServerProcess;
use crate::testbed::{cpu, folder, programs};

const LOAD_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 1);
const DAEMON_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 2);
const FIRST_PORT: u16 = 7_000;
const MESSAGE_BYTES: usize = 64;
/// Load of the phases, as a share of the peak.
const PHASES: [f64; 5] = [0.05, 0.5, 1.0, 0.5, 0.05];
/// Interval at which the daemon is asked for its cores.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);
/// Longest wait of a program for a message, before it looks whether it is to end.
const PROGRAM_TIMEOUT: Duration = Duration::from_millis(50);
/// Time for the last answers of a phase.
const DRAIN_SECONDS: f64 = 0.3;
/// Processors from which load, network cores and programs have their own.
const MIN_PROCESSORS_APART: usize = 8;

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct ElasticConfig {
    /// Duration of each phase in seconds.
    pub seconds: f64,
    /// Largest number of network cores.
    pub cores: usize,
    /// Number of attached programs; each has a load generator of its own.
    pub programs: usize,
    /// Requests per second in the phase of most load, of all programs together.
    pub peak_pps: f64,
}

impl Default for ElasticConfig {
    fn default() -> Self {
        let processors = cpu::available_cores();
        let is_apart = processors >= MIN_PROCESSORS_APART;
        Self {
            seconds: 10.0,
            cores: (processors / 4).max(2),
            programs: if is_apart { processors / 4 } else { 2 },
            peak_pps: if is_apart { 150_000.0 * (processors / 4) as f64 } else { 60_000.0 },
        }
    }
}

impl ElasticConfig {
    /// A shorter configuration, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 4.0, ..self }
    }
}

/// Processors of load, network cores and programs.
struct Placement {
    load: Vec<usize>,
    first_network_core: usize,
    programs: Vec<usize>,
    is_apart: bool,
}

impl Placement {
    /// Load on the lower half of `processors`, then the network cores, then the programs. A machine
    /// with too few has all on all.
    fn new(processors: usize, cores: usize) -> Self {
        let is_apart = processors >= MIN_PROCESSORS_APART && processors / 2 + cores < processors;
        if !is_apart {
            let all: Vec<usize> = (0..processors).collect();
            return Self { load: all.clone(), first_network_core: 0, programs: all, is_apart };
        }
        let first_network_core = processors / 2;
        let programs = (first_network_core + cores..processors).collect();
        Self { load: (0..first_network_core).collect(), first_network_core, programs, is_apart }
    }
}

/// Network cores at one moment.
struct Sample {
    at: Instant,
    used: usize,
    busy_permille: u32,
}

/// One phase of the load.
struct Phase {
    began: Instant,
    ended: Instant,
    share: f64,
    reports: Vec<LoadReport>,
}

impl Phase {
    fn samples<'s>(
        &self,
        all: &'s [Sample],
    ) -> impl DoubleEndedIterator<Item = &'s Sample> + use<'s> {
        let (began, ended) = (self.began, self.ended);
        all.iter().filter(move |sample| sample.at >= began && sample.at < ended)
    }

    fn sum(&self, count: impl Fn(&LoadReport) -> u64) -> u64 {
        self.reports.iter().map(count).sum()
    }

    fn worst_p99_us(&self) -> f64 {
        self.reports.iter().map(|report| report.result.latency.p99_us).fold(0.0, f64::max)
    }

    /// Time from the beginning until the number of cores is that of the end for good.
    fn settled_ms(&self, samples: &[Sample]) -> f64 {
        let within: Vec<_> = self.samples(samples).collect();
        let Some(last) = within.last() else { return 0.0 };
        let settled = within.iter().rposition(|sample| sample.used != last.used);
        let first = settled.map_or(0, |position| position + 1);
        within[first].at.duration_since(self.began).as_secs_f64() * 1e3
    }

    fn row(&self, samples: &[Sample]) -> Value {
        let used = || self.samples(samples).map(|sample| sample.used);
        let rate = |of: fn(&LoadReport) -> f64| -> f64 { self.reports.iter().map(of).sum() };
        json!({
            "load_share": self.share,
            "sent_per_s": rate(|report| report.result.sent_pps).round(),
            "answered_per_s": rate(|report| report.result.answered_pps).round(),
            "lost": self.sum(|report| report.result.lost),
            "generator_behind": self.reports.iter().any(|report| report.result.generator_behind),
            "p99_us": round_to_hundredths(self.worst_p99_us()),
            "cores_at_most": used().max(),
            "cores_at_end": used().next_back(),
            "settled_ms": self.settled_ms(samples).round(),
        })
    }
}

/// Attached echo server; ends with `stop`.
fn run_program(
    path: &Path,
    port: u16,
    processor: usize,
    stop: &AtomicBool,
) -> Result<(), LabError> {
    cpu::pin_this_thread(processor)?;
    let failed = || LabError::io("an attached program failed");
    let net = Net::attach(path, "elastic").map_err(failed())?;
    let local = SocketAddr::new(DAEMON_ADDRESS.into(), port);
    let socket = UdpSocket::bind(&net, local).map_err(failed())?;
    socket.set_read_timeout(Some(PROGRAM_TIMEOUT)).map_err(failed())?;
    while !stop.load(Ordering::Relaxed) {
        match socket.exchange_in_place(|request| Some(request.len)) {
            Err(error)
                if error.kind() != std::io::ErrorKind::WouldBlock
                    && error.kind() != std::io::ErrorKind::TimedOut =>
            {
                return Err(failed()(error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Asks the daemon for its cores until `stop`.
fn sample_cores(path: &Path, stop: &AtomicBool) -> Result<Vec<Sample>, LabError> {
    let mut samples = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let report =
            DaemonReport::query(path).map_err(LabError::io("the daemon gives no report"))?;
        let busy_permille = report.cores.iter().map(|core| core.busy).sum();
        samples.push(Sample { at: Instant::now(), used: report.cores_used, busy_permille });
        thread::sleep(SAMPLE_INTERVAL);
    }
    Ok(samples)
}

/// Daemon with programs on a veth pair.
struct Testbed {
    pair: VethPair,
    placement: Placement,
    socket: PathBuf,
    daemon: ServerProcess,
    _folder: tempfile::TempDir,
}

impl Testbed {
    fn new(config: &ElasticConfig) -> Result<Self, LabError> {
        let placement = Placement::new(cpu::available_cores(), config.cores);
        let veth = VethConfig { a: vec![format!("{LOAD_ADDRESS}/24")], b: Vec::new() };
        let pair = VethPair::as_on_a_wire_with_queues(&veth, config.cores)?;
        // The answers are received on the processors of the load.
        pair.a.set_rps(&placement.load)?;
        let folder = folder::private()?;
        let socket = folder.path().join("daemon.sock");
        let mut command = pair.b.namespace.command(programs::tidegate()?);
        command.args(["daemon", "--io", "xdp", "--iface", &pair.b.device]);
        command.args(["--address", &format!("{DAEMON_ADDRESS}/24")]);
        command.args(["--cores", &format!("1-{}", config.cores)]);
        command.args(["--cpu", &placement.first_network_core.to_string(), "--socket"]);
        command.arg(&socket);
        let mut daemon = ServerProcess::start("tidegate daemon", &mut command)?;
        daemon.wait_for_first_line()?;
        Ok(Self { pair, placement, socket, daemon, _folder: folder })
    }

    /// Loads every program at the same rate.
    fn run_phase(&self, config: &ElasticConfig, share: f64) -> Result<Phase, LabError> {
        let began = Instant::now();
        let rate_pps = config.peak_pps * share / config.programs as f64;
        let (processors, namespace) = (&self.placement.load, &self.pair.a.namespace);
        let load = |index: usize| {
            let target = SocketAddr::new(DAEMON_ADDRESS.into(), FIRST_PORT + index as u16);
            let config = LoadConfig {
                source: Some(IpAddr::V4(LOAD_ADDRESS)),
                rate_pps: Some(rate_pps),
                seconds: config.seconds,
                drain_seconds: DRAIN_SECONDS,
                core: Some(processors[index % processors.len()]),
                ..LoadConfig::new(LinkKind::Kernel, target)
            };
            namespace.enter(|| load_udp(&config, MESSAGE_BYTES, &mut |_| {}))
        };
        let reports: Vec<_> = thread::scope(|scope| {
            let loads: Vec<_> =
                (0..config.programs).map(|index| scope.spawn(move || load(index))).collect();
            loads.into_iter().map(|load| load.join().expect("a load generator panicked")).collect()
        });
        let reports = reports.into_iter().map(|report| Ok(report??));
        let reports = reports.collect::<Result<_, LabError>>()?;
        Ok(Phase { began, ended: Instant::now(), share, reports })
    }
}

/// Runs a daemon under a load that rises and falls.
///
/// # Errors
/// If namespaces cannot be created, or the daemon, a program or the load fails.
pub fn run(config: &ElasticConfig) -> Result<Experiment, LabError> {
    if config.cores < 2 || config.programs == 0 || config.peak_pps <= 0.0 {
        let what = "give at least two network cores, one program, and a rate above zero";
        return Err(LabError::Config(what.to_owned()));
    }
    let testbed = Testbed::new(config)?;
    let (path, stop) = (testbed.socket.as_path(), AtomicBool::new(false));
    let began = Instant::now();
    let (phases, samples) = thread::scope(|scope| {
        let programs: Vec<_> = (0..config.programs)
            .map(|index| {
                let processors = &testbed.placement.programs;
                let processor = processors[index % processors.len()];
                let stop = &stop;
                scope.spawn(move || run_program(path, FIRST_PORT + index as u16, processor, stop))
            })
            .collect();
        let sampler = scope.spawn(|| sample_cores(path, &stop));
        let phases = run_phases(&testbed, config);
        stop.store(true, Ordering::Relaxed);
        for program in programs {
            program.join().expect("a program panicked")?;
        }
        let samples = sampler.join().expect("the sampler panicked")?;
        Ok::<_, LabError>((phases?, samples))
    })?;
    let is_apart = testbed.placement.is_apart;
    testbed.daemon.stop();
    Ok(conclude(config, began, &phases, &samples, is_apart))
}

fn run_phases(testbed: &Testbed, config: &ElasticConfig) -> Result<Vec<Phase>, LabError> {
    // The programs have their ports and the load its neighbour when a first request is answered.
    let progress = Progress::new(PHASES.len());
    let warm_up = ElasticConfig { seconds: 1.0, ..config.clone() };
    testbed.run_phase(&warm_up, PHASES[0])?;
    let mut phases = Vec::new();
    for share in PHASES {
        let phase = testbed.run_phase(config, share)?;
        let lost = phase.sum(|report| report.result.lost);
        progress.step(format_args!("{:.0} % of the peak: {lost} requests lost", 100.0 * share));
        phases.push(phase);
    }
    Ok(phases)
}

fn conclude(
    config: &ElasticConfig,
    began: Instant,
    phases: &[Phase],
    samples: &[Sample],
    is_apart: bool,
) -> Experiment {
    let mut result = Experiment::new("elastic");
    let lost: u64 = phases.iter().map(|phase| phase.sum(|report| report.result.lost)).sum();
    let sent: u64 = phases.iter().map(|phase| phase.sum(|report| report.result.sent)).sum();
    result.figure("elastic_lost", lost as f64);
    result.figure("elastic_sent", sent as f64);
    let most = samples.iter().map(|sample| sample.used).max().unwrap_or_default();
    result.figure("elastic_cores_at_most", most as f64);
    let slowest_ms = |is_wanted: fn(f64, f64) -> bool| {
        let both = phases.windows(2).filter(|both| is_wanted(both[0].share, both[1].share));
        both.map(|both| both[1].settled_ms(samples)).fold(0.0, f64::max).round()
    };
    result.figure("elastic_rise_ms", slowest_ms(|before, after| after > before));
    result.figure("elastic_fall_ms", slowest_ms(|before, after| after < before));
    if let Some(last) = phases.last() {
        let used = last.samples(samples).next_back().map(|sample| sample.used);
        result.figure("elastic_cores_at_end", used.unwrap_or_default() as f64);
    }
    result.rows = phases.iter().map(|phase| phase.row(samples)).collect();
    result.columns = vec![
        "load_share",
        "sent_per_s",
        "answered_per_s",
        "lost",
        "p99_us",
        "cores_at_most",
        "cores_at_end",
        "settled_ms",
    ];
    result.note(format!(
        "one daemon with 1 to {} network cores and as many receive queues of a veth, {} attached UDP \
         echo servers, a load generator on kernel sockets for each; phases of {} s. settled_ms: from the \
         beginning of a phase until the number of cores is that of its end. elastic_rise_ms: the \
         longest where the load rises; elastic_fall_ms: where it falls",
        config.cores, config.programs, config.seconds
    ));
    if !is_apart {
        result.note(
            "load, network cores and programs share processors here: losses and times are those of a \
             machine that has too few",
        );
    }
    let seconds = |at: Instant| at.saturating_duration_since(began).as_secs_f64();
    let over_time = |value: fn(&Sample) -> f64| -> Vec<(f64, f64)> {
        samples.iter().map(|sample| (seconds(sample.at), value(sample))).collect()
    };
    let series = vec![
        Series::new("cores in use", over_time(|sample| sample.used as f64)),
        Series::new(
            "cores' worth of work",
            over_time(|sample| f64::from(sample.busy_permille) / 1e3),
        ),
    ];
    let panel = Panel {
        title: "Network cores under a load that rises and falls".to_owned(),
        x: Axis::new("time", "s"),
        y: Axis::new("cores", ""),
        series,
        ..Panel::default()
    };
    result.picture =
        Some(Picture { title: "The elastic set of cores".to_owned(), panels: vec![panel] });
    result
}
