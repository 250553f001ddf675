//! Servers that are killed or stopped at any moment of a flood, and their restorers with them: the
//! interface must be as it was.

use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::interface_state::{InterfaceState, round_trip};
use super::{AttackResult, HostileConfig};
use crate::LabError;
use crate::report::Progress;
use crate::testbed::folder;
use crate::testbed::netns::{VethConfig, VethPair};
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;

/// Addresses of the client, of the server's kernel and of the server: IPv4, then IPv6.
const CLIENT: [&str; 2] = ["10.9.0.1", "fd00:9::1"];
const KERNEL: [&str; 2] = ["10.9.0.2", "fd00:9::2"];
const SERVER: [&str; 2] = ["10.9.0.3", "fd00:9::3"];
const PREFIX_BITS: [u8; 2] = [24, 64];

/// Port of both echo servers: the kernel's and Tidegate's.
const PORT: u16 = 7;

/// Name of restorer processes.
const RESTORER: &str = "tg-restorer";

/// Maximum time between the start of a flood and the attack.
const MAX_DELAY: Duration = Duration::from_millis(60);

/// A kernel round trip after an attack takes less than this many times the round trip before.
const MAX_SLOWDOWN: u32 = 2;

/// Round trips up to this time do not count as slow, whatever they were before.
const FAST_ROUND_TRIP: Duration = Duration::from_micros(100);

/// Maximum number of effects that are described in the notes.
const MAX_EFFECTS: usize = 8;

/// One way to end a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// SIGKILL.
    Killed,
    /// SIGSTOP.
    Stopped,
    /// SIGKILL of a restorer, and of the server a moment later.
    RestorerKilled,
    /// SIGKILL of a restorer and of the server, at once.
    BothKilled,
    /// SIGKILL of all restorers and of the server, at once. The next server restores.
    AllKilled,
}

impl Ending {
    pub(super) const ALL: [Self; 5] =
        [Self::Killed, Self::Stopped, Self::RestorerKilled, Self::BothKilled, Self::AllKilled];

    fn name(self) -> &'static str {
        match self {
            Self::Killed => "server killed",
            Self::Stopped => "server stopped",
            Self::RestorerKilled => "restorer killed, then the server",
            Self::BothKilled => "restorer and server killed",
            Self::AllKilled => "both restorers and server killed",
        }
    }
}

/// One kind of server.
const SERVERS: [&[&str]; 3] = [
    &["serve", "echo", "--listen", "7", "--io", "xdp"],
    &["daemon", "--cores", "1", "--no-hugepages", "--io", "xdp"],
    &["serve", "echo", "--listen", "7", "--io", "packet", "--segmentation"],
];

/// Effects of one ending, over all trials.
#[derive(Default)]
struct Effects {
    left_behind: u64,
    /// Trials in which the server had changed the interface when the attack began.
    changed: u64,
    slowest: Duration,
    descriptions: Vec<String>,
}

/// Trials of each line of the progress.
const TRIALS_PER_LINE: u64 = 20;

/// Kills and stops servers.
pub(super) fn run(config: &HostileConfig, progress: &Progress) -> Result<AttackResult, LabError> {
    let testbed = Testbed::new()?;
    let mut rng = fastrand::Rng::with_seed(config.seed);
    let (mut rows, mut notes) = (Vec::new(), Vec::new());
    let (mut left_behind, mut changed) = (0, 0);
    for ending in Ending::ALL {
        let mut effects = Effects::default();
        for trial in 0..config.trials {
            testbed.attack(ending, trial, config, &mut rng, &mut effects)?;
            if trial % TRIALS_PER_LINE == TRIALS_PER_LINE - 1 {
                progress.step(format_args!("{}: {} trials", ending.name(), trial + 1));
            } else {
                progress.advance();
            }
        }
        rows.push(json!({
            "attack": ending.name(),
            "trials": config.trials,
            "changed_before": effects.changed,
            "left_behind": effects.left_behind,
            "restored_ms": effects.slowest.as_secs_f64() * 1e3,
        }));
        (left_behind, changed) = (left_behind + effects.left_behind, changed + effects.changed);
        notes.extend(effects.descriptions.into_iter().take(MAX_EFFECTS));
    }
    notes.push(format!(
        "left_behind: trials after which any value of /sys/class/net, of ethtool -k, -c, -l, -g, -n \
         or of `ip -d link` was not as before within {} ms, or a kernel round trip took {MAX_SLOWDOWN} \
         times as long (and over {} us); servers on AF_XDP, in the daemon and on AF_PACKET with \
         segmentation, at random moments of a flood over IPv4 and IPv6, seed {}; a stopped server \
         keeps its XDP program and its multicast groups; changed_before: trials in which the server had changed a value",
        config.limit.as_millis(),
        FAST_ROUND_TRIP.as_micros(),
        config.seed
    ));
    let figures = vec![("left_behind", left_behind as f64), ("settings_changed", changed as f64)];
    Ok(AttackResult { figures, rows, notes })
}

/// Both hosts, with an echo server and a client on the kernel.
struct Testbed {
    folder: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    echo: Vec<JoinHandle<Result<(), LabError>>>,
    clients: Vec<UdpSocket>,
    floods: Vec<UdpSocket>,
    before: InterfaceState,
    round_trip: Duration,
    pair: VethPair,
}

impl Drop for Testbed {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for echo in self.echo.drain(..) {
            let _ = echo.join();
        }
    }
}

impl Testbed {
    fn new() -> Result<Self, LabError> {
        let with_prefix = |addresses: [&str; 2]| {
            let pairs = addresses.iter().zip(PREFIX_BITS);
            pairs.map(|(address, bits)| format!("{address}/{bits}")).collect()
        };
        let pair = VethPair::new(&VethConfig { a: with_prefix(CLIENT), b: with_prefix(KERNEL) })?;
        // NAPI, which the settings are of, is in use with GRO only.
        pair.b.ethtool(&["gro", "on"])?;
        let folder = folder::private()?;
        let stop = Arc::new(AtomicBool::new(false));
        let (mut echo, mut clients, mut floods) = (Vec::new(), Vec::new(), Vec::new());
        for family in 0..2 {
            let server = socket(&pair.b, KERNEL[family], PORT)?;
            let stop = Arc::clone(&stop);
            echo.push(thread::spawn(move || serve_echo(&server, &stop)));
            clients.push(socket(&pair.a, CLIENT[family], 0)?);
            floods.push(socket(&pair.a, CLIENT[family], 0)?);
        }
        let before = InterfaceState::of(&pair.b)?;
        let mut testbed =
            Self { folder, stop, echo, clients, floods, before, round_trip: Duration::ZERO, pair };
        testbed.round_trip = testbed.slowest_round_trip()?;
        Ok(testbed)
    }

    /// Slower of the median round trips of both families.
    fn slowest_round_trip(&self) -> Result<Duration, LabError> {
        let mut slowest = Duration::ZERO;
        for (client, kernel) in self.clients.iter().zip(KERNEL) {
            slowest = slowest.max(round_trip(client, at(kernel, PORT))?);
        }
        Ok(slowest)
    }

    fn start_server(&self, number: u64) -> Result<ServerProcess, LabError> {
        let mut command = self.pair.b.namespace.command(programs::tidegate()?);
        let server = SERVERS[(number % SERVERS.len() as u64) as usize];
        command.args(server).args(["--iface", &self.pair.b.device]);
        if server[0] == "daemon" {
            command.arg("--socket").arg(self.folder.path().join("daemon.sock"));
        }
        for (address, bits) in SERVER.iter().zip(PREFIX_BITS) {
            command.args(["--address", &format!("{address}/{bits}")]);
        }
        let mut server = ServerProcess::start("the server", &mut command)?;
        server.wait_for_first_line()?;
        Ok(server)
    }

    /// Runs one trial.
    fn attack(
        &self,
        ending: Ending,
        trial: u64,
        config: &HostileConfig,
        rng: &mut fastrand::Rng,
        effects: &mut Effects,
    ) -> Result<(), LabError> {
        let server = self.start_server(trial)?;
        let flood = at(SERVER[(trial / SERVERS.len() as u64 % 2) as usize], PORT);
        let is_changed = self.with_flood(flood, || {
            let changed = InterfaceState::of(&self.pair.b)?.without_sockets();
            thread::sleep(MAX_DELAY.mul_f64(rng.f64()));
            self.end(ending, server.pid(), rng)?;
            Ok(changed != self.before.without_sockets())
        })?;
        effects.changed += u64::from(is_changed);
        let mut left = self.wait_until_restored(ending, config, effects)?;
        match ending {
            Ending::Stopped => {
                signal(server.pid(), Signal::CONT)?;
                if left.is_empty() && is_changed && !self.is_changed_again(flood, config)? {
                    left.push("the server did not apply its settings again".to_owned());
                }
                // The server ends in order.
                drop(server);
                left.extend(self.wait_until_restored(Ending::Killed, config, effects)?);
            }
            Ending::AllKilled => {
                drop(server);
                drop(self.start_server(trial)?);
                left = self.wait_until_restored(Ending::Killed, config, effects)?;
            }
            _ => {}
        }
        if !left.is_empty() {
            effects.left_behind += 1;
            let what = left.join(", ");
            effects.descriptions.push(format!("left behind, {}: {what}", ending.name()));
        }
        Ok(())
    }

    /// Ends the server.
    fn end(&self, ending: Ending, server: u32, rng: &mut fastrand::Rng) -> Result<(), LabError> {
        let restorers = restorers_of(server);
        let one = restorers.get(rng.usize(..restorers.len().max(1))).copied();
        match ending {
            Ending::Killed => signal(server, Signal::KILL),
            Ending::Stopped => signal(server, Signal::STOP),
            Ending::RestorerKilled => {
                one.map_or(Ok(()), |restorer| signal(restorer, Signal::KILL))?;
                thread::sleep(MAX_DELAY.mul_f64(rng.f64()));
                signal(server, Signal::KILL)
            }
            Ending::BothKilled => {
                one.map_or(Ok(()), |restorer| signal(restorer, Signal::KILL))?;
                signal(server, Signal::KILL)
            }
            Ending::AllKilled => {
                // A stopped restorer cannot replace the one that is killed first.
                restorers.iter().try_for_each(|&restorer| signal(restorer, Signal::STOP))?;
                signal(server, Signal::KILL)?;
                restorers.iter().try_for_each(|&restorer| signal(restorer, Signal::KILL))
            }
        }
    }

    /// Runs `work` while datagrams are sent as fast as possible.
    fn with_flood<T>(
        &self,
        target: SocketAddr,
        work: impl FnOnce() -> Result<T, LabError>,
    ) -> Result<T, LabError> {
        let stop = AtomicBool::new(false);
        let socket = &self.floods[usize::from(target.is_ipv6())];
        thread::scope(|scope| {
            let _stop = crate::testbed::stop::StopOnDrop(&stop);
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // Fails while the server has no hardware address yet, and when it is gone.
                    let _ = socket.send_to(&[0; 64], target);
                }
            });
            work()
        })
    }

    /// Waits until the interface is as before; returns what is not within the time limit.
    fn wait_until_restored(
        &self,
        ending: Ending,
        config: &HostileConfig,
        effects: &mut Effects,
    ) -> Result<Vec<String>, LabError> {
        if ending == Ending::AllKilled {
            return Ok(Vec::new());
        }
        let start = Instant::now();
        loop {
            let now = InterfaceState::of(&self.pair.b)?;
            let mut left = match ending {
                Ending::Stopped => {
                    self.before.without_sockets().differences(&now.without_sockets())
                }
                _ => self.before.differences(&now),
            };
            let elapsed = start.elapsed();
            if left.is_empty() {
                let round_trip = self.slowest_round_trip()?;
                if round_trip < (MAX_SLOWDOWN * self.round_trip).max(FAST_ROUND_TRIP) {
                    effects.slowest = effects.slowest.max(elapsed);
                    return Ok(left);
                }
                left.push(format!("round trip of {round_trip:?}, before {:?}", self.round_trip));
            }
            if elapsed > config.limit {
                return Ok(left);
            }
        }
    }

    /// True if the server changes the interface again within the time limit.
    fn is_changed_again(
        &self,
        flood: SocketAddr,
        config: &HostileConfig,
    ) -> Result<bool, LabError> {
        let start = Instant::now();
        self.with_flood(flood, || {
            while start.elapsed() < config.limit {
                let now = InterfaceState::of(&self.pair.b)?.without_sockets();
                if now != self.before.without_sockets() {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }
}

/// Process IDs of the restorers of a server. Their standard error is a descriptor of the server.
fn restorers_of(server: u32) -> Vec<u32> {
    let is_restorer = |id: &u32| {
        let read = |file: &str| fs::read_to_string(format!("/proc/{id}/{file}"));
        read("comm").is_ok_and(|name| name.trim_end() == RESTORER)
            && read("fdinfo/2").is_ok_and(|info| {
                let mut lines = info.lines().filter_map(|line| line.strip_prefix("Pid:"));
                lines.any(|id| id.trim() == server.to_string())
            })
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(is_restorer).collect()
}

fn signal(process: u32, signal: Signal) -> Result<(), LabError> {
    let Some(pid) = i32::try_from(process).ok().and_then(Pid::from_raw) else { return Ok(()) };
    match kill_process(pid, signal) {
        // A restorer may end or be replaced at any time.
        Err(rustix::io::Errno::SRCH) => Ok(()),
        result => result.map_err(LabError::io(format!("cannot signal process {process}"))),
    }
}

fn at(address: &str, port: u16) -> SocketAddr {
    // The constants above are valid addresses, so the parser cannot fail.
    SocketAddr::new(address.parse().unwrap_or(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED)), port)
}

fn socket(
    end: &crate::testbed::netns::VethEnd,
    address: &str,
    port: u16,
) -> Result<UdpSocket, LabError> {
    let socket = end.namespace.enter(|| UdpSocket::bind(at(address, port)))?;
    socket.map_err(LabError::io(format!("cannot bind {address}")))
}

/// Answers datagrams with themselves until `stop` is set.
fn serve_echo(socket: &UdpSocket, stop: &AtomicBool) -> Result<(), LabError> {
    let failed = || LabError::io("the kernel's echo server");
    socket.set_read_timeout(Some(Duration::from_millis(50))).map_err(failed())?;
    let mut datagram = [0; 64];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((len, from)) = socket.recv_from(&mut datagram) {
            let _ = socket.send_to(&datagram[..len], from);
        }
    }
    Ok(())
}
