//! The daemon: engines on network cores, and a door for applications.
//!
//! A core owns everything: an engine, the applications' ends of the rings and their
//! sockets. It takes no lock. The door has a thread of its own, which makes the
//! memory for those who come in and sends them to a core. With several cores
//! applications go from one to another, so that as many cores are used as are needed.

mod application;
mod balance;
mod calls;
mod claims;
mod coalescing;
mod controls;
mod core;
mod cores;
mod door;
mod family;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod handover;
mod heap_trim;
mod held;
mod leaving;
mod load;
mod moving;
mod names;
mod owners;
mod passages;
mod passing;
mod post;
mod quota;
mod report;
mod save;
mod socket;
mod state;
mod succession;
mod tcp;
mod udp;
mod wanted_port;

use std::io;
use std::ops::RangeInclusive;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate_engine::{IdleConfig, NetConfig, OpenError, PreparedCores, SpreadStacks, open_spread};
use tidegate_gate::Mode;
use tidegate_port::spread::MOST_CORES;
use tidegate_wire::MacAddr;

pub use controls::Controls;
pub use door::DoorConfig;
pub use names::Identity;
pub use quota::Quota;
pub use report::{ApplicationReport, CoreReport, GateState, Report, SocketReport};
pub use succession::Prints;

use self::balance::Balance;
use self::calls::Host;
use self::core::{Core, Seat};
use self::cores::Cores;
use self::door::{Door, Doorway};
use self::leaving::open_closed;
use self::post::{Message, Post};
use self::quota::Terms;
use self::save::Restored;
use self::state::State;
use self::succession::{Handed, Successor};

/// Where sentences about applications go.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// How long an application that was woken is not woken again, unless it is told
/// otherwise.
pub const DEFAULT_COALESCING: Duration = Duration::from_micros(100);

/// Why a daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The stack could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The door could not be opened, or there is no thread or descriptor left.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The geometry of applications' memory.
    #[error(
        "what applications get makes no sense: streams hold a power of two of bytes from 4 KiB \
         to 64 MiB, and there is room for 1 to 1,048,576 sockets"
    )]
    Geometry,
    /// A mode that needs threads for interrupts.
    #[error(
        "a network core polls: mode {} works by interrupts; choose mode polled or dedicated",
        .0.name()
    )]
    Mode(Mode),
    /// A share of a core's time that is none.
    #[error("an application's share of a core is 1 to 100 percent, and not {0}")]
    Share(u32),
    /// A number of cores that there cannot be.
    #[error(
        "there can be 1 to {MOST_CORES} network cores, and not {}-{}",
        .0.start(),
        .0.end()
    )]
    Cores(RangeInclusive<usize>),
}

/// Stacks on network cores, and the applications on them. It ends when it is
/// dropped.
pub struct Daemon {
    // The door closes first: nobody comes to a core that has ended.
    door: Option<Door>,
    balance: Option<Balance>,
    cores: Arc<Cores>,
    threads: Vec<JoinHandle<io::Result<Option<u32>>>>,
}

/// Makes the configuration of a daemon's stack once more.
pub type Again = Box<dyn FnMut() -> io::Result<NetConfig> + Send>;

/// Whether another daemon may go on in a daemon's place ([`Daemon::take_over`]).
pub enum Upgrade {
    /// No, because.
    Refused(&'static str),
    /// Yes: its port can be opened while the old one still has it.
    Beside,
    /// Yes, when the old one has closed the port and given what is left of it, which
    /// it opens again by this configuration if the new one fails.
    Anew(Again),
}

/// How to run a daemon.
pub struct Start<B, S> {
    /// Where applications come in.
    pub door: DoorConfig,
    /// How many network cores there are at least and at most. They are used as they
    /// are needed; those that are not sleep.
    pub cores: RangeInclusive<usize>,
    /// Called by the thread of each core, with its number, before anything else: to
    /// choose its processor and its priority.
    pub begin: B,
    /// Called when the port is open, by the threads of the cores after they have
    /// begun and by the calling one before the door opens: to give up what is needed
    /// no more. The door's thread has what the calling one has left.
    pub settle: S,
    /// Whether another daemon may go on in this one's place.
    pub upgrade: Upgrade,
    /// Where sentences about applications go.
    pub log: Log,
}

impl Daemon {
    /// Opens a stack on one network core and the door. `begin` is called by the
    /// thread of the core before anything else, to choose its processor and its
    /// priority.
    ///
    /// # Errors
    /// [`StartError`] says what is wrong; nothing stays behind.
    pub fn start(
        net: NetConfig,
        door: DoorConfig,
        begin: impl Fn() -> io::Result<()> + Clone + Send + 'static,
        log: Log,
    ) -> Result<Self, StartError> {
        let upgrade = Upgrade::Refused("it was not started to be replaced");
        let begin = move |_| begin();
        Self::start_with(net, Start { door, cores: 1..=1, begin, settle: || Ok(()), upgrade, log })
    }

    /// As [`Daemon::start`], with all that can be chosen.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub fn start_with(
        net: NetConfig,
        start: Start<
            impl Fn(usize) -> io::Result<()> + Clone + Send + 'static,
            impl Fn() -> io::Result<()> + Clone + Send + 'static,
        >,
    ) -> Result<Self, StartError> {
        let net = check(net, &start)?;
        let way = Doorway::take(start.door.clone())?;
        let stacks = open_spread(net, *start.cores.end())?;
        Self::run(stacks, None, way, start, || Ok(()))
    }

    /// Goes on in the place of the daemon that listens at the door's path, with its
    /// sockets, its connections and its applications, which notice a pause. That
    /// daemon has ended when this returns; if it fails, that one goes on. Also gives
    /// where the other one printed what it had to say.
    ///
    /// # Errors
    /// [`StartError`] says what is wrong, or what the other daemon said.
    pub fn take_over(
        net: NetConfig,
        start: Start<
            impl Fn(usize) -> io::Result<()> + Clone + Send + 'static,
            impl Fn() -> io::Result<()> + Clone + Send + 'static,
        >,
    ) -> Result<(Self, Prints), StartError> {
        let mut prepared = PreparedCores::new(check(net, &start)?, *start.cores.end())?;
        prepared.first().catch()?;
        // Whoever comes must say soon what for.
        let mut other = Successor::call(&start.door.path)?;
        prepared.first().forget_caught()?;
        let Handed { state, listener, prints, descriptors } = other.ask()?;
        let state = State::decode(&state).map_err(io::Error::from)?;
        prepared.keep_mac(MacAddr(state.mac));
        let terms = Terms { coalescing: start.door.coalescing, quota: start.door.quota };
        let (stack, restored, inherited) = save::restore(state, descriptors, terms)?;
        if let Some(inherited) = inherited {
            prepared.first().inherit(inherited);
        }
        open_closed(|| prepared.first().open_port())?;
        let stacks = prepared.go_on(stack)?;
        let way = Doorway::inherit(start.door.clone(), listener)?;
        let daemon = Self::run(stacks, Some(restored), way, start, || other.begin())?;
        Ok((daemon, prints))
    }

    /// Starts the threads, the first of them with what is `restored`. They begin when
    /// `may_begin` has said so.
    fn run(
        stacks: SpreadStacks,
        mut restored: Option<Restored>,
        way: Doorway,
        start: Start<
            impl Fn(usize) -> io::Result<()> + Clone + Send + 'static,
            impl Fn() -> io::Result<()> + Clone + Send + 'static,
        >,
        may_begin: impl FnOnce() -> io::Result<()>,
    ) -> Result<Self, StartError> {
        let Start { cores: limits, begin, settle, upgrade, log, .. } = start;
        let SpreadStacks { stacks, crossing } = stacks;
        let ways = stacks.iter().map(|_| Post::new()).collect::<io::Result<Vec<_>>>()?;
        let (posts, inboxes): (Vec<_>, Vec<_>) = ways.into_iter().unzip();
        let cores = Arc::new(Cores::new(posts, &limits, crossing)?);
        // Before the channels: the threads end when those do.
        let mut daemon =
            Self { door: None, balance: None, cores: Arc::clone(&cores), threads: Vec::new() };
        let mut upgrade = Some(upgrade);
        let mut beginnings = Vec::new();
        for (number, ((engine, claims), inbox)) in stacks.into_iter().zip(inboxes).enumerate() {
            let seat = Seat { number, inbox, cores: Arc::clone(&cores) };
            let (host, log) = (Host::new(engine, claims), Arc::clone(&log));
            let upgrade = upgrade.take().unwrap_or(Upgrade::Refused("it is not asked"));
            let core = match restored.take() {
                Some(restored) => Core::restore(seat, host, restored, upgrade, log)?,
                None => Core::new(seat, host, upgrade, log)?,
            };
            let (started, has_started) = mpsc::channel();
            let (begins, may_begin) = mpsc::channel();
            let (begin, settle) = (begin.clone(), settle.clone());
            let run = move || {
                let begun = begin(number).and_then(|()| settle());
                let is_good = begun.is_ok();
                // Who started us waits for it.
                let _ = started.send(begun);
                if is_good && may_begin.recv().is_ok() { core.run() } else { Ok(None) }
            };
            let name = match number {
                0 => "tidegate-core".to_owned(),
                _ => format!("tidegate-core-{number}"),
            };
            daemon.threads.push(std::thread::Builder::new().name(name).spawn(run)?);
            has_started.recv().map_err(io::Error::other)??;
            beginnings.push(begins);
        }
        settle()?;
        let (door_begins, door_may_begin) = mpsc::channel();
        daemon.door = Some(Door::open(way, Arc::clone(&cores), log, door_may_begin)?);
        if limits.end() > &1 {
            daemon.balance = Some(Balance::start(cores, limits)?);
        }
        may_begin()?;
        // Threads that have ended already are found out later.
        for begins in beginnings.iter().chain([&door_begins]) {
            let _ = begins.send(());
        }
        Ok(daemon)
    }

    /// How things stand.
    ///
    /// # Errors
    /// When a core has ended.
    pub fn report(&self) -> io::Result<Report> {
        self.cores.report()
    }

    /// How to change it while it runs.
    pub fn controls(&self) -> Controls {
        Controls { cores: Arc::clone(&self.cores) }
    }

    /// Whether all cores still run. [`Daemon::stop`] says why one does not.
    pub fn is_running(&self) -> bool {
        self.threads.iter().all(|core| !core.is_finished())
    }

    /// Ends the daemon. Gives the process that goes on in its place, when there is
    /// one.
    ///
    /// # Errors
    /// What the core ended with, when it ended before.
    pub fn stop(mut self) -> io::Result<Option<u32>> {
        self.end()
    }

    fn end(&mut self) -> io::Result<Option<u32>> {
        (self.door, self.balance) = (None, None);
        let mut successor = Ok(None);
        // The one with the card comes last: it has to send what the others say.
        while let Some(core) = self.threads.pop() {
            // One that has ended already needs not be told.
            let _ = self.cores.post(self.threads.len()).send(Message::Stop);
            let ended = core.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // When the one with the card has ended, so do the others, with an error: it
            // knows why.
            if !matches!(ended, Ok(None)) {
                successor = ended;
            }
        }
        successor
    }
}

/// A configuration that a core can run.
fn check<B, S>(net: NetConfig, start: &Start<B, S>) -> Result<NetConfig, StartError> {
    let (least, most) = (*start.cores.start(), *start.cores.end());
    if !(1..=most).contains(&least) || most > MOST_CORES {
        return Err(StartError::Cores(start.cores.clone()));
    }
    let share = start.door.quota.cpu_share_percent;
    if !(1..=100).contains(&share) {
        return Err(StartError::Share(share));
    }
    if !start.door.geometry.is_sound() {
        return Err(StartError::Geometry);
    }
    if let Some(mode) = net.mode_of_threads() {
        return Err(StartError::Mode(mode));
    }
    // Applications may be on this processor: a pause lets them have it.
    Ok(net.idle(IdleConfig { spin_ns: 0, ..IdleConfig::default() }))
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // An error was the core's last word, and nobody asked.
        let _ = self.end();
    }
}
