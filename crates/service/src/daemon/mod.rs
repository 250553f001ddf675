//! The daemon: an engine on a network core, and a door for applications.
//!
//! The core owns everything: the engine, the applications' ends of the rings and
//! their sockets. It takes no lock. The door has a thread of its own, which makes
//! the memory for those who come in and sends them to the core.

mod application;
mod calls;
mod coalescing;
mod core;
mod door;
mod held;
mod names;
mod owners;
mod passing;
mod report;
mod save;
mod socket;
mod state;
mod succession;
mod tcp;
mod udp;

use std::io;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate_engine::{Engine, IdleConfig, KernelAddresses, NetConfig, OpenError, Prepared, open};
use tidegate_gate::Mode;

pub use door::DoorConfig;
pub use names::Identity;
pub use report::{ApplicationReport, Report, SocketReport};
pub use succession::Prints;

use self::calls::Host;
use self::core::{Core, Message, Post, open_closed};
use self::door::{Door, Doorway};
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
}

/// A stack on a network core, and the applications on it. It ends when it is
/// dropped.
pub struct Daemon {
    // The door closes first: nobody comes to a core that has ended.
    door: Option<Door>,
    post: Post,
    core: Option<JoinHandle<io::Result<Option<u32>>>>,
}

/// Makes the configuration of a daemon's stack once more.
pub type Again = Box<dyn FnMut() -> io::Result<NetConfig> + Send>;

/// Whether another daemon may go on in a daemon's place ([`Daemon::take_over`]).
pub enum Upgrade {
    /// No, because.
    Refused(&'static str),
    /// Yes: its port can be opened while the old one still has it.
    Beside,
    /// Yes, when the old one has closed the port, which it opens again by this
    /// configuration if the new one fails.
    Anew(Again),
}

/// How to run a daemon.
pub struct Start<B, S> {
    /// Where applications come in.
    pub door: DoorConfig,
    /// Called by the thread of the core before anything else, to choose its
    /// processor and its priority.
    pub begin: B,
    /// Called when the port is open, by the thread of the core after it has begun
    /// and by the calling one before the door opens: to give up what is needed no
    /// more. The door's thread has what the calling one has left.
    pub settle: S,
    /// Whether another daemon may go on in this one's place.
    pub upgrade: Upgrade,
    /// Where sentences about applications go.
    pub log: Log,
}

impl Daemon {
    /// Opens the stack and the door. `begin` is called by the thread of the core
    /// before anything else, to choose its processor and its priority.
    ///
    /// # Errors
    /// [`StartError`] says what is wrong; nothing stays behind.
    pub fn start(
        net: NetConfig,
        door: DoorConfig,
        begin: impl FnOnce() -> io::Result<()> + Send + 'static,
        log: Log,
    ) -> Result<Self, StartError> {
        let upgrade = Upgrade::Refused("it was not started to be replaced");
        Self::start_with(net, Start { door, begin, settle: || Ok(()), upgrade, log })
    }

    /// As [`Daemon::start`], with all that can be chosen.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub fn start_with(
        net: NetConfig,
        start: Start<
            impl FnOnce() -> io::Result<()> + Send + 'static,
            impl Fn() -> io::Result<()> + Clone + Send + 'static,
        >,
    ) -> Result<Self, StartError> {
        let net = check(net, &start.door)?;
        let way = Doorway::take(start.door.clone())?;
        let stack = open(net)?;
        Self::run(stack, None, way, start, || Ok(()))
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
            impl FnOnce() -> io::Result<()> + Send + 'static,
            impl Fn() -> io::Result<()> + Clone + Send + 'static,
        >,
    ) -> Result<(Self, Prints), StartError> {
        let mut prepared = Prepared::new(check(net, &start.door)?)?;
        prepared.catch()?;
        // Whoever comes must say soon what for.
        let mut other = Successor::call(&start.door.path)?;
        prepared.forget_caught()?;
        let Handed { state, listener, prints, descriptors } = other.ask()?;
        let State { stack, memories, applications, sockets, passages } =
            State::decode(&state).map_err(io::Error::from)?;
        let coalescing_ns = start.door.coalescing.as_nanos() as u64;
        let restored =
            save::restore(memories, applications, (sockets, passages), descriptors, coalescing_ns)?;
        open_closed(|| prepared.open_port())?;
        let stack = prepared.go_on(stack)?;
        let way = Doorway::inherit(start.door.clone(), listener)?;
        let daemon = Self::run(stack, Some(restored), way, start, || other.begin())?;
        Ok((daemon, prints))
    }

    /// Starts the threads. They begin when `may_begin` has said so.
    fn run(
        (engine, kernels): (Engine, KernelAddresses),
        restored: Option<Restored>,
        way: Doorway,
        start: Start<
            impl FnOnce() -> io::Result<()> + Send + 'static,
            impl Fn() -> io::Result<()> + Clone + Send + 'static,
        >,
        may_begin: impl FnOnce() -> io::Result<()>,
    ) -> Result<Self, StartError> {
        let Start { begin, settle, upgrade, log, .. } = start;
        let host = Host::new(engine, kernels);
        let (core, post) = match restored {
            Some(restored) => Core::restore(host, restored, upgrade, Arc::clone(&log))?,
            None => Core::new(host, upgrade, Arc::clone(&log))?,
        };
        // Before the channels: the threads end when those do.
        let mut daemon = Self { door: None, post: post.clone(), core: None };
        let (started, has_started) = mpsc::channel();
        let (core_begins, core_may_begin) = mpsc::channel();
        let (door_begins, door_may_begin) = mpsc::channel();
        let settle_core = settle.clone();
        let run = move || {
            let begun = begin().and_then(|()| settle_core());
            let is_good = begun.is_ok();
            // Who started us waits for it.
            let _ = started.send(begun);
            if is_good && core_may_begin.recv().is_ok() { core.run() } else { Ok(None) }
        };
        let core = std::thread::Builder::new().name("tidegate-core".into()).spawn(run)?;
        daemon.core = Some(core);
        has_started.recv().map_err(io::Error::other)??;
        settle()?;
        daemon.door = Some(Door::open(way, post, log, door_may_begin)?);
        may_begin()?;
        // Threads that have ended already are found out later.
        let _ = (core_begins.send(()), door_begins.send(()));
        Ok(daemon)
    }

    /// How things stand.
    ///
    /// # Errors
    /// When the core has ended.
    pub fn report(&self) -> io::Result<Report> {
        self.post.report()
    }

    /// Whether the core still runs. [`Daemon::stop`] says why it does not.
    pub fn is_running(&self) -> bool {
        self.core.as_ref().is_some_and(|core| !core.is_finished())
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
        self.door = None;
        // One that has ended already needs not be told.
        let _ = self.post.send(Message::Stop);
        match self.core.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(None),
        }
    }
}

/// A configuration that a core can run.
fn check(net: NetConfig, door: &DoorConfig) -> Result<NetConfig, StartError> {
    if !door.geometry.is_sound() {
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
