//! The experiment `sessions`: a web server whose every response costs work, with clients that make
//! sessions of several requests, at up to ten times the load that the server can serve.
//!
//! A session that breaks off is of no use to its client, and the work for it was in vain. The figures
//! are the share of admitted sessions that are served to their end, and the sessions finished per
//! second at the worst load over the best.

mod client;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use self::client::{PATIENCE, PAUSE, SESSION_REQUESTS, SessionLoad, SessionReport};
use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_hundredths};
use crate::testbed::cpu::CoreTicks;
use crate::testbed::folder;
use crate::testbed::netns::{VethConfig, VethPair, remove_stale};
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::tcp::choose_cores;

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const KERNEL_SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const TIDEGATE_SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 3);
const PREFIX_BITS: u8 = 16;
const PORT: u16 = 80;

/// Work for each response.
const WORK: Duration = Duration::from_millis(1);

/// Connections of `wrk`.
const STRANGER_CONNECTIONS: usize = 100;

/// Time before sessions are counted.
const WARM_UP: Duration = Duration::from_secs(2);

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct SessionsConfig {
    /// Offered loads, in multiples of what the work alone would allow.
    pub loads: Vec<f64>,
    /// Time in which sessions are counted, in seconds.
    pub seconds: f64,
    /// Number of measurements; the median counts.
    pub repeats: usize,
}

impl Default for SessionsConfig {
    fn default() -> Self {
        Self { loads: vec![0.5, 1.0, 2.0, 5.0, 10.0], seconds: 5.0, repeats: 3 }
    }
}

impl SessionsConfig {
    /// A single short run at few loads, for a first impression.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { loads: vec![1.0, 10.0], seconds: 2.0, repeats: 1 }
    }

    fn check(&self) -> Result<(), LabError> {
        let loads =
            !self.loads.is_empty() && self.loads.iter().all(|load| (0.1..=20.0).contains(load));
        if loads && (0.5..=60.0).contains(&self.seconds) && self.repeats > 0 {
            return Ok(());
        }
        Err(LabError::Config(
            "give loads of 0.1 to 20, a measurement of 0.5 to 60 seconds, 1 or more repeats".into(),
        ))
    }
}

/// Server under load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SessionsCase {
    name: &'static str,
    on_kernel: bool,
    has_admission: bool,
    /// `wrk` sends requests without cookies as well, as fast as they are answered.
    has_strangers: bool,
}

impl SessionsCase {
    const ALL: [Self; 5] = [
        Self::new("tidegate, admission", false, true),
        Self::new("tidegate", false, false),
        Self::new("kernel sockets, admission", true, true),
        Self::new("kernel sockets", true, false),
        Self { has_strangers: true, ..Self::new("tidegate, admission, wrk", false, true) },
    ];

    const fn new(name: &'static str, on_kernel: bool, has_admission: bool) -> Self {
        Self { name, on_kernel, has_admission, has_strangers: false }
    }

    /// Loads at which the case is measured.
    fn loads(self, config: &SessionsConfig) -> Vec<f64> {
        if self.has_strangers { vec![1.0] } else { config.loads.clone() }
    }
}

/// Result of one measurement.
#[derive(Clone, Debug)]
struct SessionsMeasurement {
    sessions: SessionReport,
    finished_per_s: f64,
    server_busy_percent: f64,
}

impl SessionsMeasurement {
    fn kept(&self) -> f64 {
        self.sessions.finished as f64 / self.sessions.admitted.max(1) as f64
    }
}

/// One row: a case at a load.
struct SessionsRow {
    case: SessionsCase,
    load: f64,
    runs: Vec<SessionsMeasurement>,
}

impl SessionsRow {
    fn median(&self, of: impl Fn(&SessionsMeasurement) -> f64) -> f64 {
        median(self.runs.iter().map(of))
    }
}

/// Runs the experiment. Prints its progress on standard error.
///
/// # Errors
/// If there is only one core, namespaces cannot be created, `wrk` is not installed, or a server does
/// not start.
pub fn run(config: &SessionsConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in remove_stale()? {
        eprintln!("removed namespace {name} of a process that no longer exists");
    }
    let rows_of = |case: SessionsCase| {
        let loads = case.loads(config).into_iter();
        loads.map(move |load| SessionsRow { case, load, runs: Vec::new() })
    };
    let mut rows: Vec<_> = SessionsCase::ALL.into_iter().flat_map(rows_of).collect();
    let progress = Progress::new(rows.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for row in &mut rows {
            let run = measure(config, row.case, row.load)?;
            progress.step(format_args!(
                "{repeat} {:<26} load {:<4} finished {:.1}/s, kept {:.3}",
                row.case.name,
                row.load,
                run.finished_per_s,
                run.kept()
            ));
            row.runs.push(run);
        }
    }
    Ok(conclude(config, &rows))
}

fn measure(
    config: &SessionsConfig,
    case: SessionsCase,
    load: f64,
) -> Result<SessionsMeasurement, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let addresses = |address| vec![format!("{address}/{PREFIX_BITS}")];
    let veth = VethConfig { a: addresses(CLIENT), b: addresses(KERNEL_SERVER) };
    let pair = VethPair::as_on_a_wire(&veth)?;
    pair.a.set_rps(&[load_core])?;
    pair.b.set_rps(if case.on_kernel { std::slice::from_ref(&server_core) } else { &[] })?;
    let folder = folder::private()?;
    let (_server, target) = start_server(case, &pair, server_core, folder.path())?;
    let _strangers = match case.has_strangers {
        true => Some(start_wrk(&pair, load_core, target, config.seconds)?),
        false => None,
    };
    let sessions = SessionLoad {
        target,
        sessions_per_s: load / WORK.as_secs_f64() / SESSION_REQUESTS as f64,
        warm_up: WARM_UP,
        measured: Duration::from_secs_f64(config.seconds),
        core: load_core,
    };
    let before = CoreTicks::read(server_core)?;
    let sessions = pair.a.namespace.enter(|| sessions.run())??;
    let finished_per_s = sessions.finished_in_time as f64 / config.seconds;
    let server_busy_percent = CoreTicks::read(server_core)?.since(before).busy_percent;
    Ok(SessionsMeasurement { sessions, finished_per_s, server_busy_percent })
}

/// Starts `serve http` with the work and, if asked for, with admission by its defaults.
fn start_server(
    case: SessionsCase,
    pair: &VethPair,
    core: usize,
    folder: &Path,
) -> Result<(ServerProcess, SocketAddr), LabError> {
    let mut command = pair.b.namespace.command_on_core(core, programs::tidegate()?);
    let (io, address): (_, IpAddr) = match case.on_kernel {
        true => ("kernel", KERNEL_SERVER.into()),
        false => ("xdp", TIDEGATE_SERVER.into()),
    };
    command.args(["serve", "http", "--json", "--io", io, "--iface", &pair.b.device]);
    command.args(["--address", &format!("{address}/{PREFIX_BITS}"), "--cpu", &core.to_string()]);
    command.args(["--listen", &PORT.to_string(), "--work-ns", &WORK.as_nanos().to_string()]);
    if case.has_admission {
        let path = folder.join("config.toml");
        std::fs::write(&path, "[requests]\n")
            .map_err(|source| LabError::File { path: path.clone(), source })?;
        command.arg("--config").arg(path);
    }
    let mut server = ServerProcess::start(case.name, &mut command)?;
    server.wait_for_first_line()?;
    Ok((server, SocketAddr::new(address, PORT)))
}

/// Starts `wrk`, which ends after the longest measurement by itself.
fn start_wrk(
    pair: &VethPair,
    core: usize,
    target: SocketAddr,
    seconds: f64,
) -> Result<ServerProcess, LabError> {
    let mut command = pair.a.namespace.command_on_core(core, "wrk");
    let seconds = seconds.ceil() + WARM_UP.as_secs_f64() + 10.0;
    command.args([
        "-t",
        "1",
        "-c",
        &STRANGER_CONNECTIONS.to_string(),
        "-d",
        &format!("{seconds}s"),
    ]);
    ServerProcess::start("wrk", command.arg(format!("http://{target}/api/status")))
}

/// Share of the best rate that is left at the worst load from the best on.
fn floor(rates: &[f64]) -> f64 {
    let best = rates.iter().copied().fold(0.0, f64::max);
    let from_best = rates.iter().copied().skip_while(|&rate| rate < best);
    from_best.fold(best, f64::min) / best.max(1.0)
}

fn conclude(config: &SessionsConfig, rows: &[SessionsRow]) -> Experiment {
    let mut result = Experiment::new("sessions");
    for row in rows {
        let count = |of: fn(&SessionReport) -> u64| row.median(|run| of(&run.sessions) as f64);
        let per_s = |value: f64| round_to_hundredths(value / config.seconds);
        result.rows.push(json!({
            "way": row.case.name,
            "driven_by": if row.case.has_strangers { "sessions and wrk" } else { "sessions" },
            "load": row.load,
            "offered_per_s": per_s(count(|sessions| sessions.offered)),
            "refused_per_s": per_s(count(|sessions| sessions.refused)),
            "admitted_per_s": per_s(count(|sessions| sessions.admitted)),
            "finished_per_s": row.median(|run| run.finished_per_s),
            "kept": row.median(SessionsMeasurement::kept),
            "p99_ms": row.median(|run| {
                run.sessions.response_us.value_at_quantile(0.99) as f64 / 1000.0
            }),
            "server_busy_percent": row.median(|run| run.server_busy_percent),
        }));
    }
    for (case, suffix) in
        SessionsCase::ALL.iter().zip(["", "_none", "_kernel", "_kernel_none", "_wrk"])
    {
        let rows: Vec<_> = rows.iter().filter(|row| row.case == *case).collect();
        let kept = rows.iter().map(|row| row.median(SessionsMeasurement::kept));
        result.figure(&format!("admission_sessions_kept{suffix}"), kept.fold(1.0, f64::min));
        let rates: Vec<f64> = rows.iter().map(|row| row.median(|run| run.finished_per_s)).collect();
        if !case.has_strangers {
            result.figure(&format!("session_goodput_floor{suffix}"), floor(&rates));
        }
    }
    result.columns = vec![
        "way",
        "load",
        "offered_per_s",
        "refused_per_s",
        "admitted_per_s",
        "finished_per_s",
        "kept",
        "p99_ms",
        "server_busy_percent",
    ];
    result.note(format!(
        "sessions of {SESSION_REQUESTS} requests with {} ms between two of them, each response {} ms of \
         work; load 1 is {:.0} sessions/s; a client gives up after {} s without response",
        PAUSE.as_millis(),
        WORK.as_millis(),
        1.0 / WORK.as_secs_f64() / SESSION_REQUESTS as f64,
        PATIENCE.as_secs()
    ));
    result.note("one core serves, the other runs the clients, which are the laboratory's own");
    result.note(format!(
        "wrk: {STRANGER_CONNECTIONS} connections beside the sessions, without cookies, in a closed loop"
    ));
    result.note(format!(
        "kept is finished over admitted sessions; a floor is the worst rate from the peak on over the \
         peak; {} measurements of {} s each, taking turns; medians count",
        config.repeats, config.seconds
    ));
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floor_is_the_worst_rate_from_the_peak_on() {
        assert_eq!(floor(&[50.0, 100.0, 80.0, 90.0]), 0.8);
        assert_eq!(floor(&[50.0, 90.0, 100.0]), 1.0);
        assert_eq!(floor(&[0.0, 0.0]), 0.0);
    }

    #[test]
    fn rejects_invalid_configuration() {
        let default = SessionsConfig::default;
        assert!(default().check().is_ok() && default().quick().check().is_ok());
        for config in [
            SessionsConfig { loads: vec![], ..default() },
            SessionsConfig { loads: vec![100.0], ..default() },
            SessionsConfig { seconds: 0.0, ..default() },
            SessionsConfig { repeats: 0, ..default() },
        ] {
            assert!(config.check().is_err(), "{config:?}");
        }
    }
}
