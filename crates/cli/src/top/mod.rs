//! `tidegate top`: live view of the daemon or of a server.

mod order;
mod terminal;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use tidegate_service::SocketState;
use tidegate_service::daemon::{ApplicationReport, DaemonReport};

use self::order::{SortColumn, SortOrder};
use self::terminal::TerminalView;
use crate::Failure;
use crate::process::stop_flag;
use crate::report_source::ReportSource;

/// Flags of `top`.
#[derive(Args)]
#[command(
    after_help = "Keys: < and > choose the column to sort by, r reverses the order, q quits."
)]
pub(crate) struct Top {
    #[command(flatten)]
    source: ReportSource,
    /// Interval between updates, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    interval: f64,
    /// Column to sort the processes by, largest first
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t = SortColumn::Commands)]
    sort: SortColumn,
    /// Reverse the order
    #[arg(long)]
    reverse: bool,
    /// Print one interval and exit; without a terminal, intervals are printed one after another
    #[arg(long)]
    once: bool,
    /// Print each interval as a JSON object
    #[arg(long)]
    json: bool,
}

/// Activity of the daemon in one interval.
#[derive(Debug, Serialize, PartialEq)]
struct IntervalView {
    /// Busy rounds of the network cores (rounds that found frames), in percent of all rounds.
    busy_percent: f64,
    /// Load of each network core in percent; empty with a single core.
    cores_busy_percent: Vec<f64>,
    /// Number of network cores that new applications are placed on.
    cores_used: usize,
    sleeps_per_s: f64,
    frames_in_per_s: f64,
    frames_out_per_s: f64,
    connections: usize,
    tcp_memory_bytes: usize,
    frames_available: usize,
    drops_per_s: Vec<(String, f64)>,
    applications: Vec<AppView>,
}

/// Activity of one process in one interval.
#[derive(Debug, Serialize, PartialEq)]
struct AppView {
    name: String,
    pid: u32,
    uid: u32,
    sockets: usize,
    connections: usize,
    /// Bytes, datagrams and connections that wait in the stack for the process.
    waiting: usize,
    commands_per_s: f64,
    bytes_in_per_s: f64,
    bytes_out_per_s: f64,
    /// Memory of the data of its sockets, in bytes.
    memory_bytes: u64,
    /// Network cores that serve the process.
    cores: BTreeSet<usize>,
}

/// Counters by process id: commands, bytes in, bytes out. A process may be attached several
/// times.
type Counts = BTreeMap<u32, [u64; 3]>;

fn counts(report: &DaemonReport) -> Counts {
    let mut counts = Counts::new();
    for app in &report.applications {
        let sums = counts.entry(app.identity.pid).or_default();
        for (sum, count) in sums.iter_mut().zip([app.commands, app.bytes_in, app.bytes_out]) {
            *sum += count;
        }
    }
    counts
}

impl IntervalView {
    fn new(before: &DaemonReport, now: &DaemonReport, elapsed: Duration) -> Self {
        // A restarted daemon counts from zero.
        let since = |now: u64, before: u64| now.saturating_sub(before) as f64;
        let per_s = |now, before| since(now, before) / elapsed.as_secs_f64();
        let rounds = since(now.rounds, before.rounds);
        let busy = since(now.busy_rounds, before.busy_rounds);
        let dropped = |reason: &str| {
            before.drops.iter().find(|(other, _)| other == reason).map_or(0, |(_, count)| *count)
        };
        let drops = now.drops.iter();
        let drops = drops.map(|(reason, count)| (reason.clone(), per_s(*count, dropped(reason))));
        let (counts_before, counts_now) = (counts(before), counts(now));
        let mut applications: Vec<AppView> = Vec::new();
        for app in &now.applications {
            match applications.iter_mut().find(|known| known.pid == app.identity.pid) {
                Some(known) => known.add(app),
                None => {
                    let [before, now] = [&counts_before, &counts_now]
                        .map(|counts| counts.get(&app.identity.pid).copied().unwrap_or_default());
                    let rates = std::array::from_fn(|index| per_s(now[index], before[index]));
                    applications.push(AppView::new(app, rates));
                }
            }
        }
        Self {
            busy_percent: if rounds > 0.0 { 100.0 * busy / rounds } else { 0.0 },
            cores_busy_percent: match &now.cores[..] {
                [] | [_] => Vec::new(),
                cores => cores.iter().map(|core| f64::from(core.busy) / 10.0).collect(),
            },
            cores_used: now.cores_used,
            sleeps_per_s: per_s(now.sleeps, before.sleeps),
            frames_in_per_s: per_s(now.received, before.received),
            frames_out_per_s: per_s(now.transmitted, before.transmitted),
            connections: now.connections,
            tcp_memory_bytes: now.tcp_memory_bytes,
            frames_available: now.frames_available,
            drops_per_s: drops.filter(|(_, rate)| *rate > 0.0).collect(),
            applications,
        }
    }

    /// Returns the summary of the network cores and the drops, one line each.
    fn summary_lines(&self) -> [String; 2] {
        let drops: Vec<String> =
            self.drops_per_s.iter().map(|(reason, rate)| format!("{reason} {rate:.0}/s")).collect();
        let cores: Vec<_> =
            self.cores_busy_percent.iter().map(|busy| format!("{busy:.0} %")).collect();
        let cores = match cores.len() {
            0 => format!("core {:.0} % busy", self.busy_percent),
            all => format!("{} of {all} cores used, busy {}", self.cores_used, cores.join(", ")),
        };
        [
            format!(
                "{cores}, {:.0} sleeps/s; {:.0} frames/s in, {:.0} out; {} connections, \
                 {} KiB of data, {} free buffers",
                self.sleeps_per_s,
                self.frames_in_per_s,
                self.frames_out_per_s,
                self.connections,
                self.tcp_memory_bytes / 1024,
                self.frames_available
            ),
            format!("dropped: {}", if drops.is_empty() { "none".into() } else { drops.join(", ") }),
        ]
    }
}

const COLUMNS: [&str; 11] = [
    "PID",
    "USER",
    "SOCKETS",
    "CONNECTED",
    "WAITING",
    "COMMANDS/S",
    "IN B/S",
    "OUT B/S",
    "KIB",
    "CORE",
    "PROGRAM",
];

impl AppView {
    fn new(app: &ApplicationReport, [commands, bytes_in, bytes_out]: [f64; 3]) -> Self {
        let mut view = Self {
            name: app.identity.name.clone(),
            pid: app.identity.pid,
            uid: app.identity.uid,
            sockets: 0,
            connections: 0,
            waiting: 0,
            commands_per_s: commands,
            bytes_in_per_s: bytes_in,
            bytes_out_per_s: bytes_out,
            memory_bytes: 0,
            cores: BTreeSet::new(),
        };
        view.add(app);
        view
    }

    fn add(&mut self, app: &ApplicationReport) {
        self.cores.insert(app.core);
        self.memory_bytes += app.memory_bytes;
        self.sockets += app.sockets.len();
        let is_connected =
            |phase| matches!(phase, SocketState::Connecting | SocketState::Connected);
        self.connections += app.sockets.iter().filter(|s| is_connected(s.phase)).count();
        self.waiting += app.sockets.iter().map(|socket| socket.waiting).sum::<usize>();
    }

    fn cells(&self) -> [String; 11] {
        [
            self.pid.to_string(),
            self.uid.to_string(),
            self.sockets.to_string(),
            self.connections.to_string(),
            self.waiting.to_string(),
            format!("{:.0}", self.commands_per_s),
            format!("{:.0}", self.bytes_in_per_s),
            format!("{:.0}", self.bytes_out_per_s),
            (self.memory_bytes >> 10).to_string(),
            self.cores.iter().map(usize::to_string).collect::<Vec<_>>().join(","),
            self.name.clone(),
        ]
    }
}

/// Polls the report of the daemon once per interval.
struct ReportPoller<'p> {
    source: &'p ReportSource,
    interval: Duration,
    last: DaemonReport,
    requested_at: Instant,
}

impl<'p> ReportPoller<'p> {
    fn new(source: &'p ReportSource, interval: Duration) -> io::Result<Self> {
        Ok(Self { source, interval, last: source.query()?, requested_at: Instant::now() })
    }

    /// Returns the remaining time of the interval.
    fn remaining(&self) -> Duration {
        self.interval.saturating_sub(self.requested_at.elapsed())
    }

    /// Queries the daemon and returns the activity since the last query.
    fn next(&mut self) -> io::Result<IntervalView> {
        let now = self.source.query()?;
        let view = IntervalView::new(&self.last, &now, self.requested_at.elapsed());
        (self.last, self.requested_at) = (now, Instant::now());
        Ok(view)
    }
}

impl Top {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let interval = Duration::try_from_secs_f64(self.interval)
            .ok()
            .filter(|interval| !interval.is_zero())
            .ok_or_else(|| {
                format!("--interval {}: give a number of seconds above 0", self.interval)
            })?;
        let mut poller = ReportPoller::new(&self.source, interval)?;
        if self.once || self.json || !io::stdout().is_terminal() {
            return self.print(&mut poller);
        }
        // ratatui restores the terminal also on a panic.
        let mut terminal = ratatui::try_init()?;
        let result = TerminalView::new(self.order()).show(&mut terminal, &mut poller);
        ratatui::try_restore()?;
        Ok(result?)
    }

    fn order(&self) -> SortOrder {
        SortOrder { column: self.sort, is_reversed: self.reverse }
    }

    /// Prints each interval as text, until stopped by a signal or the reader closes the pipe.
    fn print(&self, poller: &mut ReportPoller<'_>) -> Result<(), Failure> {
        let stop = stop_flag(None)?;
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(poller.remaining().min(POLL_INTERVAL));
            if !poller.remaining().is_zero() {
                continue;
            }
            let mut view = poller.next()?;
            self.order().sort(&mut view.applications);
            match print(&view, self.json) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
                printed => printed?,
            }
            if self.once {
                break;
            }
        }
        Ok(())
    }
}

/// Interval at which the stop flag is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

fn print(view: &IntervalView, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string(view)?)?;
        return out.flush();
    }
    let line = |out: &mut io::StdoutLock<'_>, cells: [&str; 11]| {
        let [head @ .., bytes_in, bytes_out, memory, core, name] = cells;
        let [pid, user, sockets, connected, waiting, commands] = head;
        writeln!(
            out,
            "{pid:>8} {user:>6} {sockets:>8} {connected:>9} {waiting:>9} {commands:>11} \
             {bytes_in:>12} {bytes_out:>12} {memory:>8} {core:>4}  {name}"
        )
    };
    for text in view.summary_lines() {
        writeln!(out, "{text}")?;
    }
    line(&mut out, COLUMNS)?;
    for app in &view.applications {
        let cells = app.cells();
        line(&mut out, cells.each_ref().map(String::as_str))?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use tidegate_service::daemon::{CoreReport, Identity};

    use super::*;

    fn app(pid: u32, counts: [u64; 3]) -> ApplicationReport {
        let [commands, bytes_in, bytes_out] = counts;
        let identity =
            Identity { pid, uid: 0, name: "redis".to_owned(), library: Default::default() };
        ApplicationReport {
            identity,
            commands,
            bytes_in,
            bytes_out,
            memory_bytes: 4096,
            sockets: Vec::new(),
            core: 0,
        }
    }

    fn report(scale: u64, applications: Vec<ApplicationReport>) -> DaemonReport {
        DaemonReport {
            versions: None,
            pid: 1,
            arguments: Vec::new(),
            folder: "/".into(),
            is_shared: false,
            applications,
            frames_available: 7,
            connections: 3,
            tcp_memory_bytes: 2048,
            received: 100 * scale,
            transmitted: 50 * scale,
            drops: vec![("no_route".to_owned(), 10 * scale), ("no_buffer".to_owned(), 4)],
            rounds: 10 * scale,
            busy_rounds: 5 * scale,
            sleeps: 2 * scale,
            cores: Vec::new(),
            cores_used: 1,
        }
    }

    pub(super) fn view() -> IntervalView {
        let before = report(1, vec![app(9, [1, 10, 100])]);
        let now = report(3, vec![app(9, [5, 20, 300]), app(9, [2, 2, 2]), app(8, [4, 0, 0])]);
        IntervalView::new(&before, &now, Duration::from_secs(2))
    }

    #[test]
    fn rates_are_counter_differences_over_time() {
        let view = view();
        assert_eq!((view.busy_percent, view.sleeps_per_s), (50.0, 2.0));
        assert_eq!((view.frames_in_per_s, view.frames_out_per_s), (100.0, 50.0));
        assert_eq!(view.drops_per_s, [("no_route".to_owned(), 10.0)]);
        let [twice, new] = &view.applications[..] else { panic!("{view:?}") };
        assert_eq!((twice.pid, twice.commands_per_s), (9, 3.0), "the process is attached twice");
        assert_eq!(twice.memory_bytes, 8192, "current value, not a rate");
        assert_eq!((twice.bytes_in_per_s, twice.bytes_out_per_s), (6.0, 101.0));
        assert_eq!((new.pid, new.commands_per_s), (8, 2.0));
    }

    #[test]
    fn restarted_daemon_has_no_negative_rates() {
        let view =
            IntervalView::new(&report(9, vec![]), &report(1, vec![]), Duration::from_secs(1));
        assert_eq!((view.busy_percent, view.frames_in_per_s), (0.0, 0.0));
    }

    #[test]
    fn shows_load_of_each_core() {
        let core = |busy| CoreReport {
            nodes: Default::default(),
            busy,
            applications: 1,
            received: 0,
            transmitted: 0,
            longest_round_ns: None,
        };
        let cores = vec![core(834), core(20)];
        let now = DaemonReport { cores, cores_used: 2, ..report(1, vec![app(9, [0; 3])]) };
        let head =
            IntervalView::new(&report(1, vec![]), &now, Duration::from_secs(1)).summary_lines();
        assert!(head[0].starts_with("2 of 2 cores used, busy 83 %, 2 %,"), "{}", head[0]);
    }
}
