//! The experiment `observe`: cost of metrics and logs, for DNS servers by kxdpgun and for web servers
//! by wrk.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::{Value, json};
use tidegate_load::{LinkKind, format_number};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths, spread_percent};
use crate::testbed::apps::packaged_load;
use crate::testbed::cpu;
use crate::testbed::dns::servers::{ServerKind, check_installed};
use crate::testbed::dns::tools::DnsTool;
use crate::testbed::dns::{DnsService, DnsTestbed};
use crate::testbed::netns;
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::tcp::choose_cores;

/// Port of the metrics, on the kernel's stack.
const METRICS_PORT: u16 = 9153;
/// Prometheus asks once a second, and so does the open page.
const SCRAPE_INTERVAL: Duration = Duration::from_millis(500);
/// Queries per second of kxdpgun: more than a core answers. dnsperf on one core asks less.
const QUERIES_PER_S: f64 = 1_000_000.0;
/// Names of the zone.
const NAME_COUNT: u64 = 10_000;
/// Connections of wrk.
const CONNECTIONS: usize = 64;
/// Bytes of the file that wrk gets.
const FILE_BYTES: usize = 64;

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct ObserveConfig {
    /// Duration of a measurement, in seconds.
    pub seconds: f64,
    /// Number of measurements of each case; the median counts.
    pub repeats: usize,
}

impl Default for ObserveConfig {
    fn default() -> Self {
        Self { seconds: 3.0, repeats: 5 }
    }
}

impl ObserveConfig {
    /// One short measurement of each case.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 1.0, repeats: 1 }
    }
}

/// Server under load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    /// Tidegate's own servers.
    Dns,
    Http,
    /// Knot DNS in its XDP mode.
    Knot,
    /// nginx on kernel sockets.
    Nginx,
}

/// Reports of the server meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reporting {
    Nothing,
    /// Metrics that are read twice a second.
    Metrics,
    /// Each request, in a file: of nginx by its own access log, of Knot DNS by its dnstap module.
    Log,
}

/// Server and what it reports, with all measurements.
struct Case {
    service: Service,
    reporting: Reporting,
    runs: Vec<Run>,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    answers_per_s: f64,
    /// Processor time of the server with all its threads.
    cpu_us_per_answer: f64,
    /// Records in the log over those of all answers.
    logged_share: f64,
}

/// Runs the experiment. Reports progress on standard error.
///
/// # Errors
/// If there is only one core, kxdpgun or wrk is not installed, a server does not start, or it does not
/// serve its metrics.
pub fn run(config: &ObserveConfig) -> Result<Experiment, LabError> {
    if config.repeats == 0 || !(config.seconds > 0.0 && config.seconds <= 600.0) {
        return Err(LabError::Config("give repeats, and up to 600 seconds".into()));
    }
    DnsTool::Kxdpgun.check_installed()?;
    check_installed("nginx", "nginx")?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name} of a process that no longer exists");
    }
    let (server_core, load_core) = choose_cores()?;
    let mut testbed = DnsTestbed::new(NAME_COUNT, server_core, load_core, LinkKind::Xdp)?;
    testbed.pair.a.set_rps(&[load_core])?;
    let root = root_folder(&testbed);
    fs::create_dir(&root).map_err(LabError::file(&root))?;
    let file = root.join("f");
    fs::write(&file, [b'f'; FILE_BYTES]).map_err(LabError::file(&file))?;
    let cases = |service: Service| {
        let case = move |&reporting| Case { service, reporting, runs: Vec::new() };
        service.reporting().iter().map(case)
    };
    let mut cases: Vec<Case> = Service::ALL.into_iter().flat_map(cases).collect();
    let progress = Progress::new(config.repeats * cases.len());
    for repeat in 1..=config.repeats {
        for case in &mut cases {
            let run = case.measure(&mut testbed, config.seconds)?;
            let rate = format_number(run.answers_per_s.round());
            progress.step(format_args!(
                "{repeat} {:<5} {:<8} {rate} answers/s, {:.2} us of processor time for each",
                case.service.name(),
                case.reporting.name(),
                run.cpu_us_per_answer
            ));
            case.runs.push(run);
        }
    }
    Ok(report(config, &cases))
}

impl Service {
    const ALL: [Self; 4] = [Self::Dns, Self::Http, Self::Knot, Self::Nginx];

    fn name(self) -> &'static str {
        match self {
            Self::Dns => "dns",
            Self::Http => "http",
            Self::Knot => "knot",
            Self::Nginx => "nginx",
        }
    }

    /// The server's reports that are measured, beginning with none.
    fn reporting(self) -> &'static [Reporting] {
        match self {
            Self::Dns | Self::Http => &[Reporting::Nothing, Reporting::Metrics, Reporting::Log],
            Self::Knot | Self::Nginx => &[Reporting::Nothing, Reporting::Log],
        }
    }
}

impl Reporting {
    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Metrics => "metrics",
            Self::Log => "log",
        }
    }
}

impl Case {
    fn measure(&self, testbed: &mut DnsTestbed, seconds: f64) -> Result<Run, LabError> {
        let log = testbed.setup.folder.join("log");
        if log.exists() {
            fs::remove_file(&log).map_err(LabError::file(&log))?;
        }
        let metrics = SocketAddr::new(testbed.setup.kernel_address, METRICS_PORT);
        let (log_path, metrics_address) = (log.display().to_string(), metrics.to_string());
        testbed.setup.query_log = (self.reporting == Reporting::Log).then(|| log.clone());
        testbed.setup.flags = match (self.reporting, self.service) {
            (Reporting::Metrics, _) => vec!["--metrics".to_owned(), metrics_address],
            (Reporting::Log, Service::Dns) => vec!["--dnstap".to_owned(), log_path],
            (Reporting::Log, Service::Http) => vec!["--access-log".to_owned(), log_path],
            _ => Vec::new(),
        };
        let server = RunningServer::start(self.service, testbed)?;
        let (stop_sender, stop) = channel();
        let load_core = testbed.load_core;
        let scraper = match self.reporting {
            Reporting::Metrics => {
                let scrape = move || scrape(metrics, load_core, &stop);
                Some(testbed.pair.b.namespace.spawn(scrape)?)
            }
            _ => None,
        };
        let ticks = cpu::process_ticks(server.pid())?;
        let (answers_per_s, answers) = server.load(testbed, seconds)?;
        let ticks = cpu::process_ticks(server.pid())? - ticks;
        drop(stop_sender);
        if let Some(scraper) = scraper {
            scraper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        // The rest of the log is written at the end.
        drop(server);
        let records = match self.reporting {
            Reporting::Log => self.service.count_records(&log)?,
            _ => 0,
        };
        Ok(Run {
            answers_per_s,
            cpu_us_per_answer: 1e6 * ticks as f64 / cpu::ticks_per_second() as f64 / answers,
            logged_share: records as f64 / self.service.records_of(answers),
        })
    }

    fn median(&self, figure: impl Fn(&Run) -> f64) -> f64 {
        median(self.runs.iter().map(figure))
    }

    fn row(&self) -> Value {
        let rates = || self.runs.iter().map(|run| run.answers_per_s);
        json!({
            "server": self.service.name(),
            "reports": self.reporting.name(),
            "answers_per_s": self.median(|run| run.answers_per_s).round(),
            "spread_percent": round_to_thousandths(spread_percent(rates())),
            "cpu_us_per_answer": round_to_thousandths(self.median(|run| run.cpu_us_per_answer)),
            "logged_share": (self.reporting == Reporting::Log)
                .then(|| round_to_thousandths(self.median(|run| run.logged_share))),
        })
    }
}

/// Server in the namespace of the servers.
enum RunningServer {
    Dns(DnsService),
    Http { process: ServerProcess, target: SocketAddr },
}

impl RunningServer {
    /// Starts a server with the flags and the log of the testbed.
    fn start(service: Service, testbed: &DnsTestbed) -> Result<Self, LabError> {
        let (setup, end) = (&testbed.setup, &testbed.pair.b);
        match service {
            Service::Dns => return testbed.start(ServerKind::TidegateXdp).map(Self::Dns),
            // Received by a thread of the kernel on the core of the server.
            Service::Knot => {
                let server = testbed.start_with(ServerKind::KnotXdp, ReceiveWork::Thread)?;
                return Ok(Self::Dns(server));
            }
            Service::Http | Service::Nginx => {}
        }
        ReceiveWork::reset(end)?;
        // Knot DNS leaves its XDP program attached.
        end.remove_xdp_program()?;
        if service == Service::Nginx {
            return Self::start_nginx(testbed);
        }
        let program = programs::tidegate()?;
        let mut command = end.namespace.command_on_core(setup.core, program);
        let address = format!("{}/{}", setup.own_address, setup.prefix);
        command.args(["serve", "http", "--iface", &end.device, "--address", &address]);
        command.args(["--cpu", &setup.core.to_string()]);
        command.arg("--root").arg(root_folder(testbed)).args(&setup.flags);
        let mut process = ServerProcess::start("serve http", &mut command)?;
        process.wait_for_first_line()?;
        Ok(Self::Http { process, target: SocketAddr::new(setup.own_address, 80) })
    }

    /// Starts nginx with one process; the kernel receives on its core.
    fn start_nginx(testbed: &DnsTestbed) -> Result<Self, LabError> {
        let (setup, end) = (&testbed.setup, &testbed.pair.b);
        let target = SocketAddr::new(setup.kernel_address, 80);
        let (folder, root) = (setup.folder.display(), root_folder(testbed));
        let log = match &setup.query_log {
            Some(file) => format!("{} combined buffer=64k", file.display()),
            None => "off".to_owned(),
        };
        let text = format!(
            "daemon off; master_process off; pid {folder}/pid; error_log /dev/null;\n\
             events {{ worker_connections 4096; }}\n\
             http {{ access_log {log}; keepalive_requests 1000000000;\n\
             server {{ listen {target}; root {}; }} }}\n",
            root.display()
        );
        let config = setup.folder.join("nginx.conf");
        fs::write(&config, text).map_err(LabError::file(&config))?;
        let mut command = end.namespace.command_on_core(setup.core, "nginx");
        command.arg("-c").arg(&config).arg("-p").arg(&setup.folder);
        let mut process = ServerProcess::start("nginx", &mut command)?;
        process.wait_until(|| {
            end.namespace.enter(|| TcpStream::connect(target)).is_ok_and(|stream| stream.is_ok())
        })?;
        ReceiveWork::Steered.place(end, setup.core)?;
        Ok(Self::Http { process, target })
    }

    fn pid(&self) -> u32 {
        match self {
            Self::Dns(server) => server.pid(),
            Self::Http { process, .. } => process.pid(),
        }
    }

    /// Returns the answers per second and the answers in all.
    fn load(&self, testbed: &DnsTestbed, seconds: f64) -> Result<(f64, f64), LabError> {
        match self {
            Self::Dns(server) => {
                let before = testbed.pair.b.tx_packets()?;
                let tool = DnsTool::Kxdpgun;
                let rates = testbed.measure_tool(tool, server, QUERIES_PER_S, seconds)?;
                let answers = testbed.pair.b.tx_packets()? - before;
                Ok((rates.answered_pps, answers as f64))
            }
            Self::Http { target, .. } => {
                let namespace = &testbed.pair.a.namespace;
                let mut wrk = namespace.command_on_core(testbed.load_core, "wrk");
                let rate = packaged_load::measure_http(&mut wrk, *target, CONNECTIONS, seconds)?;
                Ok((rate, rate * seconds.ceil()))
            }
        }
    }
}

impl Service {
    /// Records of a log with all answers: of DNS also the queries.
    fn records_of(self, answers: f64) -> f64 {
        match self {
            Self::Dns | Self::Knot => 2.0 * answers,
            Self::Http | Self::Nginx => answers,
        }
    }

    fn count_records(self, log: &Path) -> Result<u64, LabError> {
        let bytes = fs::read(log).map_err(LabError::file(log))?;
        Ok(match self {
            Self::Dns | Self::Knot => count_data_frames(&bytes),
            Self::Http | Self::Nginx => bytes.iter().filter(|byte| **byte == b'\n').count() as u64,
        })
    }
}

/// Counts the data frames of a Frame Streams file: each begins with its length, a control frame with
/// zero and its length.
fn count_data_frames(mut bytes: &[u8]) -> u64 {
    let mut count = 0;
    let mut is_control = false;
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let length = u32::from_be_bytes(*length) as usize;
        let begins_control = length == 0 && !is_control;
        count += u64::from(!begins_control && !is_control);
        is_control = begins_control;
        bytes = rest.get(length..).unwrap_or_default();
    }
    count
}

fn root_folder(testbed: &DnsTestbed) -> PathBuf {
    testbed.setup.folder.join("www")
}

/// Reads the metrics on this core until `stop` has no sender any more.
fn scrape(address: SocketAddr, core: usize, stop: &Receiver<()>) -> Result<(), LabError> {
    cpu::pin_this_thread(core)?;
    loop {
        let answer = get_metrics(address).map_err(LabError::io("cannot read the metrics"))?;
        if !answer.starts_with("HTTP/1.1 200") {
            return Err(LabError::Config(format!("no metrics: {answer}")));
        }
        if stop.recv_timeout(SCRAPE_INTERVAL) != Err(RecvTimeoutError::Timeout) {
            return Ok(());
        }
    }
}

fn get_metrics(address: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn report(config: &ObserveConfig, cases: &[Case]) -> Experiment {
    let mut result = Experiment::new("observe");
    for service in Service::ALL {
        let of = |reporting| {
            cases.iter().find(|case| case.service == service && case.reporting == reporting)
        };
        let Some(plain) = of(Reporting::Nothing) else { continue };
        for reporting in [Reporting::Metrics, Reporting::Log] {
            let Some(case) = of(reporting) else { continue };
            let name = format!("{}_{}", service.name(), reporting.name());
            let mut compare = |figure: &str, of: fn(&Run) -> f64| {
                // Runs of one round, which saw the same other work on the machine.
                let pairs = case.runs.iter().zip(&plain.runs);
                let ratio = median(pairs.map(|(run, plain)| of(run) / of(plain)));
                result.figure(&format!("{name}_{figure}"), round_to_thousandths(ratio));
            };
            compare("rate_ratio", |run| run.answers_per_s);
            compare("cpu_ratio", |run| run.cpu_us_per_answer);
            if reporting == Reporting::Log {
                let share = case.median(|run| run.logged_share);
                result.figure(&format!("{name}_share"), round_to_thousandths(share));
            }
        }
    }
    result.rows = cases.iter().map(Case::row).collect();
    result.note(format!(
        "dns and http: Tidegate's servers on AF_XDP; knot: Knot DNS in its XDP mode; nginx: on kernel \
         sockets, received on its core; each with all its threads on core 1; on core 0 kxdpgun with {} \
         queries/s, or wrk with {CONNECTIONS} connections as fast as answers come, for {} s; medians \
         of {}, taking turns",
        format_number(QUERIES_PER_S),
        config.seconds,
        config.repeats
    ));
    result.note(
        "metrics: read twice a second, by Prometheus and by an open page; log: each query and each \
         answer as dnstap, or a line for each request, in a file, by the server itself",
    );
    result.note(
        "cpu_us_per_answer: processor time of the server with the thread that writes its log, without \
         what the kernel does for nginx outside of its calls; \
         logged_share: records in the log over those of all answers, the rest is lost and counted",
    );
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_frames_are_counted_without_the_control_frames() {
        let start = [&[0; 4][..], &[0, 0, 0, 2], b"ct"].concat();
        let data = [&[0, 0, 0, 3][..], b"abc"].concat();
        let stop = [&[0; 4][..], &[0, 0, 0, 0]].concat();
        let whole = [&start[..], &data, &data, &stop].concat();
        assert_eq!(count_data_frames(&whole), 2);
        assert_eq!(count_data_frames(&[&start[..], &data, &data[..5]].concat()), 2, "cut off");
        assert_eq!(count_data_frames(&[]), 0);
    }

    #[test]
    fn ratios_are_to_the_server_that_reports_nothing() {
        let case = |reporting, answers_per_s, logged_share| Case {
            service: Service::Http,
            reporting,
            runs: vec![Run { answers_per_s, cpu_us_per_answer: 10.0, logged_share }],
        };
        let cases = [
            case(Reporting::Nothing, 100.0, 0.0),
            case(Reporting::Metrics, 99.0, 0.0),
            case(Reporting::Log, 80.0, 0.5),
        ];
        let result = report(&ObserveConfig::default(), &cases);
        let figure = |name: &str| result.figures[name];
        assert_eq!(figure("http_metrics_rate_ratio"), 0.99);
        assert_eq!(figure("http_log_rate_ratio"), 0.8);
        assert_eq!((figure("http_log_cpu_ratio"), figure("http_log_share")), (1.0, 0.5));
        assert_eq!(result.rows.len(), 3);
    }

    #[test]
    fn rejects_measurements_without_time_or_repeats() {
        for config in [
            ObserveConfig { repeats: 0, ..ObserveConfig::default() },
            ObserveConfig { seconds: f64::NAN, ..ObserveConfig::default() },
        ] {
            assert!(run(&config).is_err(), "{config:?}");
        }
    }
}
