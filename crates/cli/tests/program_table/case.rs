//! One program in one placement: start, transfer, reload, end, and what it leaves behind.

use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::description::Program;
use crate::scripts::ProgramFolder;
use crate::support::run::{ChildProcess, Daemon, OWN_ADDRESSES, ServerHost, library};
use crate::support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed};

/// Limit for a program to serve, to reload and to end.
const LIMIT: Duration = Duration::from_secs(60);
/// Limit for a program that is expected not to serve.
const SHORT_LIMIT: Duration = Duration::from_secs(8);

/// Where the sockets of a program are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    Kernel,
    Attached,
    Embedded,
}

impl Placement {
    pub const ALL: [Self; 3] = [Self::Kernel, Self::Attached, Self::Embedded];

    fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Attached => "attached",
            Self::Embedded => "embedded",
        }
    }
}

/// Requests and connections during reloads.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
pub struct Losses {
    pub lost: u64,
    pub of: u64,
}

/// Result of a program in one placement by one family.
#[derive(Clone, Serialize, Deserialize)]
pub struct Row {
    pub program: String,
    pub version: String,
    pub placement: Placement,
    pub family: String,
    /// Bytes transferred, right by hash.
    pub bytes: u64,
    /// Reason for which something did not work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reload: Option<Losses>,
    /// Remains of the program: processes, sockets, settings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_behind: Vec<String>,
}

impl Row {
    /// True if everything worked and nothing was left behind.
    pub fn is_good(&self) -> bool {
        self.failure.is_none() && self.left_behind.is_empty()
    }
}

impl Display for Row {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { program, family, bytes, .. } = self;
        write!(f, "{program}, {}, {family}: {bytes} bytes", self.placement.name())?;
        if let Some(Losses { lost, of }) = self.reload {
            write!(f, ", reload lost {lost} of {of}")?;
        }
        if let Some(failure) = &self.failure {
            write!(f, ", {failure}")?;
        }
        if !self.left_behind.is_empty() {
            write!(f, ", left behind: {}", self.left_behind.join(", "))?;
        }
        Ok(())
    }
}

/// Losses of both families at reload in one placement, if there was a reload.
pub fn losses(rows: &[Row], placement: Placement) -> Option<Losses> {
    let rows = rows.iter().filter(|row| row.placement == placement);
    rows.filter_map(|row| row.reload)
        .reduce(|sum, more| Losses { lost: sum.lost + more.lost, of: sum.of + more.of })
}

/// Runs the program in one placement, by both families.
pub fn run(program: &Program, version: &str, placement: Placement) -> Vec<Row> {
    let row = |family: &str| Row {
        program: program.name.clone(),
        version: version.to_owned(),
        placement,
        family: family.to_owned(),
        bytes: 0,
        failure: None,
        reload: None,
        left_behind: Vec::new(),
    };
    let mut rows = vec![row("IPv4"), row("IPv6")];
    // The testbed and the daemon panic if they cannot start.
    let outcome = catch_unwind(AssertUnwindSafe(|| run_on_testbed(program, placement, &mut rows)));
    let error = outcome.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text.unwrap_or_else(|| "the test panicked".to_owned()))
    });
    if let Err(error) = error {
        for row in &mut rows {
            row.failure.get_or_insert_with(|| error.clone());
        }
    }
    rows
}

fn run_on_testbed(program: &Program, placement: Placement, rows: &mut [Row]) -> Result<(), String> {
    let testbed = match placement {
        Placement::Kernel => Testbed::shared(),
        _ => Testbed::new(DeviceKind::Xdp),
    };
    if program.finds_addresses && placement != Placement::Kernel {
        for address in [format!("{SERVER_V4}/32"), format!("{SERVER_V6}/128")] {
            testbed.server().ip(&["addr", "add", &address, "dev", "lo"]).unwrap();
        }
    }
    let flags: Vec<&str> = program.daemon.iter().map(String::as_str).collect();
    let host = match placement {
        Placement::Kernel => ServerHost::Kernel(&testbed),
        Placement::Attached => ServerHost::Attached(Daemon::start(&testbed, &flags)),
        Placement::Embedded => ServerHost::Embedded(&testbed, &OWN_ADDRESSES),
    };
    let before = remains(&host);
    let of_daemon = processes(&host);
    let folder = ProgramFolder::new(&program.variables);
    let mut case = Case { program, host, folder, placement, of_daemon };
    let result = case.serve(rows);
    let ended = case.end();
    let mut left_behind = case.left_behind(&before);
    left_behind.extend(ended.err());
    for row in rows {
        row.left_behind.clone_from(&left_behind);
    }
    result
}

struct Case<'s> {
    program: &'s Program,
    host: ServerHost<'s>,
    folder: ProgramFolder,
    placement: Placement,
    /// Processes in the server's namespace before the program starts.
    of_daemon: BTreeSet<u32>,
}

impl Case<'_> {
    fn limit(&self) -> Duration {
        match self.program.expected_failure(self.placement) {
            Some(_) => SHORT_LIMIT,
            None => LIMIT,
        }
    }

    /// Starts the program and tries it by both families.
    fn serve(&mut self, rows: &mut [Row]) -> Result<(), String> {
        let (program, testbed) = (self.program, self.host.testbed());
        for (name, text) in &program.files {
            fs::write(self.folder.root().join(name), self.folder.fill(text)).unwrap();
        }
        let _backend = program.backend.as_ref().map(|command| self.start_backend(command));
        if let Some(prepare) = &program.prepare {
            self.folder.run(testbed.client(), prepare, SERVER_V4)?;
        }
        let words = self.folder.fill(&program.start);
        let words: Vec<&str> = words.split_whitespace().collect();
        let mut command = self.host.run(&words);
        let log = File::create(self.folder.root().join("log")).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log).current_dir(self.folder.root());
        if self.placement != Placement::Kernel {
            // The build folder may be inaccessible to the program's user.
            let copy = self.folder.root().join("libtidegate_preload.so");
            fs::copy(library(), &copy).unwrap();
            command.env("TIDEGATE_PRELOAD_LIBRARY", copy);
        }
        // Apache ends its whole process group.
        let child = ChildProcess::new(command.process_group(0));
        self.folder.pid = child.pid();
        let served = self.try_families(rows);
        // A program that ends later than its children must not be killed before them.
        let stopped = self.folder.run(testbed.server(), &program.stop, SERVER_V4);
        let ended =
            wait_until("the program has ended", self.limit(), || Ok(self.processes().is_empty()));
        served.and(stopped.map(drop)).and(ended)
    }

    fn start_backend(&self, command: &str) -> ChildProcess {
        let words = self.folder.fill(command);
        let mut words = words.split_whitespace();
        let mut backend = self.host.testbed().client().command(words.next().unwrap());
        let log = File::create(self.folder.root().join("backend.log")).unwrap();
        backend.args(words).stdout(log.try_clone().unwrap()).stderr(log);
        ChildProcess::new(backend.current_dir(self.folder.root()))
    }

    fn try_families(&self, rows: &mut [Row]) -> Result<(), String> {
        let addresses = [SERVER_V4, SERVER_V6];
        for address in addresses {
            self.wait_until_serving(address)?;
        }
        for (row, address) in rows.iter_mut().zip(addresses) {
            let outcome = self.transfer(address).and_then(|bytes| {
                row.bytes = bytes;
                row.reload = self.reload_under_load(address)?;
                Ok(())
            });
            row.failure = outcome.err();
        }
        Ok(())
    }

    fn wait_until_serving(&self, address: &str) -> Result<(), String> {
        let testbed = self.host.testbed();
        let state = format!("the program accepts connections at {address}");
        wait_until(&state, self.limit(), || {
            if self.has_ended() {
                return Err("the program ended".to_owned());
            }
            Ok(testbed.accepts(address, self.program.port))
        })
        .map_err(|error| format!("{error}: {}", self.folder.last_line("log")))?;
        let Some(ready) = &self.program.ready else { return Ok(()) };
        let mut last = String::new();
        wait_until("the program serves", self.limit(), || {
            let result = self.folder.run(testbed.client(), ready, address);
            last = result.as_ref().err().cloned().unwrap_or_default();
            Ok(result.is_ok())
        })
        .map_err(|error| format!("{error}: {last}"))
    }

    /// Moves the data and compares the hash. Returns the number of bytes.
    fn transfer(&self, address: &str) -> Result<u64, String> {
        let expected = self.folder.expected();
        let script = format!("{{ {}\n}} | sha256sum", self.program.transfer.trim_end());
        let printed = self.folder.run(self.host.testbed().client(), &script, address)?;
        let right = Command::new("sha256sum").stdin(File::open(&expected).unwrap()).output();
        if printed.as_bytes() != right.unwrap().stdout {
            return Err("the data is not what was sent".to_owned());
        }
        Ok(fs::metadata(expected).unwrap().len())
    }

    /// Reloads several times while requests are made and a connection is open.
    fn reload_under_load(&self, address: &str) -> Result<Option<Losses>, String> {
        if self.program.reload.is_empty() {
            return Ok(None);
        }
        let (folder, program) = (&self.folder, self.program);
        let (client, server) = (self.host.testbed().client(), self.host.testbed().server());
        let [stop, rounds, done] =
            ["stop", "rounds", "reloaded"].map(|name| folder.root().join(name));
        fs::write(&rounds, "").unwrap();
        let mut in_flight = (!program.in_flight.is_empty())
            .then(|| folder.spawn(client, &program.in_flight, address, "in_flight.log"));
        let script = format!("while [ ! -e stop ]; do {} ; done >>rounds", program.load.trim_end());
        let mut load = folder.spawn(client, &script, address, "load.log");
        let reloaded = (0..program.reloads).try_for_each(|count| {
            self.wait_for_rounds(&rounds, &mut load)?;
            if let Some(connection) = &mut in_flight
                && count == 0
                && connection.try_wait().unwrap().is_some()
            {
                let error = folder.last_line("in_flight.log");
                return Err(format!("the connection ended before the reload: {error}"));
            }
            folder.run(server, &program.reload, address).map(drop)
        });
        let reloaded = reloaded.and_then(|()| self.wait_for_rounds(&rounds, &mut load));
        for file in [&stop, &done] {
            fs::write(file, "").unwrap();
        }
        let load = load.wait().unwrap();
        fs::remove_file(&stop).unwrap();
        let mut losses = losses_of(&fs::read_to_string(&rounds).unwrap());
        if let Some(mut connection) = in_flight {
            losses.of += 1;
            losses.lost += u64::from(!connection.wait().unwrap().success());
        }
        fs::remove_file(&done).unwrap();
        reloaded?;
        match load.success() {
            true => Ok(Some(losses)),
            false => Err(format!("the load failed: {}", folder.last_line("load.log"))),
        }
    }

    /// Waits until two more rounds of the load have ended: one of them began after the call.
    fn wait_for_rounds(&self, rounds: &Path, load: &mut Child) -> Result<(), String> {
        let count = || fs::read_to_string(rounds).unwrap().lines().count();
        let wanted = count() + 2;
        wait_until("the load has made more requests", LIMIT, || match load.try_wait().unwrap() {
            Some(_) => Err(format!("the load ended: {}", self.folder.last_line("load.log"))),
            None => Ok(count() >= wanted),
        })
    }

    /// True if the started process and all others of the program have ended.
    fn has_ended(&self) -> bool {
        // The process is a zombie until it is waited for.
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.folder.pid)).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('Z') && self.processes().is_empty()
    }

    /// Processes of the program.
    fn processes(&self) -> BTreeSet<u32> {
        processes(&self.host).difference(&self.of_daemon).copied().collect()
    }

    /// Ends what the program has left running.
    fn end(&self) -> Result<(), String> {
        let rest = self.processes();
        if rest.is_empty() {
            return Ok(());
        }
        let name = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let names: BTreeSet<_> = rest.iter().map(name).map(|name| name.trim().to_owned()).collect();
        for pid in rest.iter().filter_map(|&pid| rustix::process::Pid::from_raw(pid as i32)) {
            // The process may have ended by itself.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        Err(format!("processes: {}", names.into_iter().collect::<Vec<_>>().join(", ")))
    }

    /// Names everything that exists after the end of the program and did not before.
    fn left_behind(&self, before: &BTreeSet<String>) -> Vec<String> {
        let mut after = remains(&self.host);
        // The daemon notices the end of a program by itself.
        let began = Instant::now();
        while !after.is_subset(before) && began.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_millis(20));
            after = remains(&self.host);
        }
        after.difference(before).cloned().collect()
    }
}

/// Everything that a program may leave behind, apart from processes.
fn remains(host: &ServerHost<'_>) -> BTreeSet<String> {
    let testbed = host.testbed();
    let mut entries = BTreeSet::new();
    match host {
        ServerHost::Attached(daemon) => {
            let report = daemon.sockets();
            let apps = report["applications"].as_array().unwrap();
            entries.extend(apps.iter().map(|app| format!("in `tidegate ss`: {app}")));
        }
        // An embedded stack changes settings of the device.
        _ => {
            let link = testbed.server().ip(&["-o", "link", "show", testbed.device()]).unwrap();
            entries.insert(format!("device: {}", link.trim()));
        }
    }
    let sockets = testbed.server().command("ss").arg("-Hln").output().unwrap().stdout;
    let of_kernel = String::from_utf8_lossy(&sockets).into_owned();
    let is_internet = |line: &&str| line.starts_with("tcp") || line.starts_with("udp");
    entries.extend(of_kernel.lines().filter(is_internet).map(|line| format!("listens: {line}")));
    entries
}

/// Processes in the server's namespace.
fn processes(host: &ServerHost<'_>) -> BTreeSet<u32> {
    let mut ip = Command::new("ip");
    let output = ip.args(["netns", "pids", host.testbed().server().name()]).output().unwrap();
    let pids = String::from_utf8_lossy(&output.stdout).into_owned();
    pids.lines().map(|pid| pid.trim().parse().unwrap()).collect()
}

/// Sums up the lines of a load: lost and made.
fn losses_of(rounds: &str) -> Losses {
    let numbers = rounds.lines().filter_map(|line| line.split_once(' '));
    let number = |text: &str| text.trim().parse::<u64>().unwrap();
    numbers.fold(Losses { lost: 0, of: 0 }, |sum, (lost, of)| Losses {
        lost: sum.lost + number(lost),
        of: sum.of + number(of),
    })
}

fn wait_until(
    state: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Result<bool, String>,
) -> Result<(), String> {
    let began = Instant::now();
    while !condition()? {
        if began.elapsed() > limit {
            return Err(format!("after {} s it is not so that {state}", limit.as_secs()));
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
