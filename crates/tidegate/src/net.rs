//! The stack that a program's sockets share.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use tidegate_engine::{
    self as engine, Claims, Engine, EngineCounters, IdleWatch, NetConfig, OpenError, Sleep, Step,
    WakeFds,
};
use tidegate_gate::admission::ClassCounters;
use tidegate_gate::{GateCounters, Settings};
use tidegate_memory::Doorbell;
use tidegate_memory::queues::lock::{FoundTaken, LockMeter, LockStatistics};
use tidegate_port::{Capabilities, PortCounters};
use tidegate_service::attachment::Attachment;
use tidegate_stack::{Counters, Event, UdpId};
use tidegate_wire::Medium;

use crate::attached::{Attached, Fork};
use crate::batch;
use crate::calls::Calls;
use crate::poll::Polls;
use crate::readers::group::Groups;
use crate::readiness::Sleeper;
use crate::tasks::{CoreGuard, Tasks};
use crate::threads::{self, Threads};
use crate::wait::{self, JustSleep, Patience, SocketId, Waiters};

/// A network stack: in this program, or in a daemon that it is attached to.
/// Cheap to clone: all clones are the same stack, or the same attachment, which
/// ends when the last clone and the last socket are gone.
#[derive(Clone)]
pub struct Net {
    home: Home,
}

/// So many frames leave together at most while transmitting is deferred: the peers
/// work on the first answers of many while the last ones are made.
const DEFERRED_FRAMES: usize = 8;

/// Where the stack is.
#[derive(Clone)]
enum Home {
    /// In this program.
    Here {
        shared: Arc<Shared>,
        /// Threads that run the engine; without them whoever waits runs it.
        threads: Option<Arc<Threads>>,
    },
    /// In a daemon.
    Daemon(Arc<Attached>),
}

/// The port of a daemon.
fn unknown_port() -> Capabilities {
    Capabilities {
        kind: "daemon",
        detail: "attached".to_owned(),
        medium: Medium::Ip,
        mac: [0; 6],
        mtu: 0,
        receive_checksum: false,
        transmit_checksum: false,
        segmentation: false,
        queues: 0,
    }
}

/// What needs the stack in this program.
pub(crate) fn elsewhere(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        format!("{what} needs the stack in this program, and this one is attached to a daemon"),
    )
}

/// What all clones and threads share.
pub(crate) struct Shared {
    core: Mutex<Core>,
    /// Whether the core has a meter of its lock.
    counts_lock: bool,
    pub(crate) wake_fds: WakeFds,
    /// Tells when the processor falls idle, if there is a CPU share to lift.
    idle: Option<IdleWatch>,
}

/// The engine, and who sleeps until it has something for them.
pub(crate) struct Core {
    /// How this lock is used, if anybody wants to know.
    pub(crate) meter: Option<Box<LockMeter>>,
    pub(crate) engine: Engine,
    pub(crate) waiters: Waiters,
    /// Who sleeps and will run the engine then, and until when at the latest.
    pub(crate) sleepers: Vec<(Arc<Doorbell>, u64)>,
    /// Why the threads that ran the engine have ended.
    pub(crate) failure: Option<io::Error>,
    /// Whether somebody calls [`Core::tell_levels`] before each round.
    pub(crate) tells_levels: bool,
    /// The sockets whose queues something arrived for, or whose readers the
    /// gate waits for: of all others the gate need not know.
    levels: Vec<UdpId>,
    /// Who runs the engine, held back by a queue that is full.
    pub(crate) held: Option<Arc<Doorbell>>,
    /// Sets of sockets that programs wait for.
    pub(crate) polls: Polls,
    /// Tasks of an executor that wait for sockets.
    pub(crate) tasks: Tasks,
    /// The sockets that have several readers.
    pub(crate) groups: Groups,
    /// The kernel's addresses, when the stack lives on them.
    pub(crate) claims: Claims,
    /// So many more calls leave what they send to the next one.
    pub(crate) deferred_calls: u32,
}

/// What a stack counted since it was opened.
#[derive(Clone, Debug, Default)]
pub struct NetCounters {
    /// Rounds and sleeps of the engine.
    pub engine: EngineCounters,
    /// Turns, and how often receiving was held back.
    pub gate: GateCounters,
    /// What was admitted and refused of each class; empty without admission.
    pub classes: Vec<(String, ClassCounters)>,
    /// Frames at the port.
    pub port: PortCounters,
    /// Packets in the stack.
    pub stack: Counters,
}

impl NetCounters {
    /// Every drop, at the port and in the stack, by reason.
    pub fn drops(&self) -> tidegate_wire::DropCounters {
        let mut drops = self.port.drops.clone();
        drops.merge(&self.stack.drops);
        drops.merge(&self.stack.transmit_drops);
        drops
    }
}

impl Net {
    /// Opens the port and makes a stack on it.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong and what to do; nothing stays behind.
    pub fn open(config: NetConfig) -> Result<Self, OpenError> {
        let mode = config.mode_of_threads();
        let meter = config.counts_lock().then(Box::default);
        let (engine, claims) = engine::open(config)?;
        let shared = Shared::new(engine, claims, meter).map_err(OpenError::Io)?;
        let shared = Arc::new(shared);
        let threads =
            mode.map(|mode| threads::start(&shared, mode)).transpose().map_err(OpenError::Io)?;
        Ok(Self { home: Home::Here { shared, threads: threads.map(Arc::new) } })
    }

    /// Attaches to the daemon that listens at a path (`tidegate serve`), which
    /// knows this program as `name`. Sockets of this [`Net`] are the daemon's, and
    /// end with it or with this program.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] and [`io::ErrorKind::ConnectionRefused`] when no
    /// daemon listens there, [`io::ErrorKind::PermissionDenied`] when it is not for
    /// this user.
    pub fn attach(path: impl AsRef<Path>, name: &str) -> io::Result<Self> {
        let attachment = Attachment::connect(path.as_ref(), name)?;
        Ok(Self { home: Home::Daemon(Arc::new(Attached::new(attachment)?)) })
    }

    /// Whether the stack is in a daemon. Such a [`Net`] knows nothing of the port
    /// and of what was counted: ask the daemon, by `tidegate ss`.
    pub fn is_attached(&self) -> bool {
        matches!(self.home, Home::Daemon(_))
    }

    /// Before this process is forked, if it is attached to a daemon: the child gets
    /// all sockets of this [`Net`], and a socket ends when no process has it any
    /// more. None when the stack is in this program; a child must not use it then.
    pub fn prepare_fork(&self) -> Option<Fork<'_>> {
        self.attached().map(|attached| attached.prepare_fork())
    }

    /// The settings of receive scheduling that are in force.
    pub fn gate(&self) -> Settings {
        self.core().map_or_else(Settings::default, |mut core| core.engine.gate().settings().clone())
    }

    /// Changes the settings of receive scheduling from now on.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for another mode: which threads there
    /// are is settled when the stack is opened.
    pub fn set_gate(&self, settings: Settings) -> io::Result<()> {
        let mut core = self.core().ok_or_else(|| elsewhere("receive scheduling"))?;
        core.engine.set_gate(settings)
    }

    /// Whether threads of its own run the stack. If not, the calls that wait
    /// for a socket do.
    pub fn has_threads(&self) -> bool {
        matches!(self.home, Home::Here { threads: Some(_), .. })
    }

    /// What the port can do.
    pub fn capabilities(&self) -> Capabilities {
        self.core().map_or_else(unknown_port, |core| core.engine.capabilities().clone())
    }

    /// What was counted so far.
    pub fn counters(&self) -> NetCounters {
        let Some(mut core) = self.core() else { return NetCounters::default() };
        let gate = *core.engine.gate().counters();
        let classes = core.engine.class_counters();
        let (engine, port, stack) = core.engine.counters();
        let stack = stack.clone();
        NetCounters { engine, gate, classes, port, stack }
    }

    /// How the lock of this stack was used since it was opened, if
    /// [`NetConfig::lock_statistics`] asked for that.
    pub fn lock_statistics(&self) -> Option<LockStatistics> {
        self.core()?.meter.as_ref().map(|meter| meter.statistics())
    }

    /// Frames that are neither in use nor with the port.
    pub fn frames_available(&self) -> usize {
        self.core().map_or(0, |core| core.engine.frames_available())
    }

    /// Runs the stack once: receive, process, transmit. Returns how many
    /// frames were received. For programs with a loop of their own; blocking
    /// calls on sockets do it by themselves.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn run_once(&self) -> io::Result<usize> {
        match &self.home {
            Home::Here { shared, .. } => shared.lock().run(),
            Home::Daemon(attached) => attached.lock().hear().map(|_| 0),
        }
    }

    /// Brings connections that were closed to their end, if that does not take
    /// long: for a program that is about to end without dropping its last
    /// handle of the stack.
    pub fn finish(&self) {
        if let Some(mut core) = self.core() {
            core.finish_connections();
        }
    }

    /// The stack, if it is in this program.
    pub(crate) fn here(&self) -> Option<&Arc<Shared>> {
        match &self.home {
            Home::Here { shared, .. } => Some(shared),
            Home::Daemon(_) => None,
        }
    }

    /// The attachment, if the stack is in a daemon.
    pub(crate) fn attached(&self) -> Option<&Arc<Attached>> {
        match &self.home {
            Home::Here { .. } => None,
            Home::Daemon(attached) => Some(attached),
        }
    }

    /// The stack, held by this thread, if it is in this program.
    pub(crate) fn core(&self) -> Option<CoreGuard<'_>> {
        self.here().map(|shared| shared.lock())
    }

    /// Calls the stack, wherever it is.
    #[inline]
    pub(crate) fn with<R>(&self, calls: impl FnOnce(&mut dyn Calls) -> R) -> R {
        match &self.home {
            Home::Here { shared, .. } => calls(&mut *shared.lock()),
            Home::Daemon(attached) => calls(&mut *attached.lock()),
        }
    }

    /// Runs the stack until `ready` gives a value or patience ends.
    ///
    /// `ready` is asked first, so what has arrived already costs no system call.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when patience ends; what the port says when it
    /// is of no further use; [`io::ErrorKind::Interrupted`] never.
    pub(crate) fn wait_for<R>(
        &self,
        sockets: &[SocketId],
        patience: Patience,
        ready: impl FnMut(&mut dyn Calls) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        match &self.home {
            Home::Here { shared, threads: None } => shared.run_for(sockets, patience, ready),
            Home::Here { shared, .. } => shared.wait_for(sockets, patience, ready),
            Home::Daemon(attached) => attached.wait_for(sockets, patience, ready),
        }
    }

    pub(crate) fn is_same(&self, other: &Net) -> bool {
        match (&self.home, &other.home) {
            (Home::Here { shared, .. }, Home::Here { shared: other, .. }) => {
                Arc::ptr_eq(shared, other)
            }
            (Home::Daemon(attached), Home::Daemon(other)) => Arc::ptr_eq(attached, other),
            _ => false,
        }
    }
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.home {
            Home::Here { shared, .. } => shared.fmt(f),
            Home::Daemon(_) => f.debug_struct("Net").field("port", &"a daemon's").finish(),
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let port = self.lock().engine.capabilities().clone();
        f.debug_struct("Net").field("port", &port).finish_non_exhaustive()
    }
}

/// How long a stack that nobody has any more works on what its connections
/// still have to send.
const FINISH_LIMIT: Duration = Duration::from_secs(2);

impl Drop for Shared {
    fn drop(&mut self) {
        self.core.get_mut().unwrap_or_else(PoisonError::into_inner).finish_connections();
    }
}

impl Shared {
    /// Runs the stack until `ready` gives a value or patience ends.
    fn run_for<R>(
        &self,
        sockets: &[SocketId],
        patience: Patience,
        mut ready: impl FnMut(&mut dyn Calls) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        loop {
            let mut core = self.lock();
            if let Some(result) = ready(&mut *core) {
                core.mind_timers();
                return result;
            }
            core.run()?;
            if let Some(result) = ready(&mut *core) {
                core.mind_timers();
                return result;
            }
            if patience.left().is_some_and(|left| left.is_zero()) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            match core.engine.idle_step() {
                Step::Spin => {}
                Step::Pause => {
                    drop(core);
                    self.pause();
                }
                Step::Sleep => {
                    let bell = wait::thread_bell()?;
                    bell.arm();
                    core.waiters.enter(Arc::clone(&bell), sockets);
                    let slept = self.sleep(core, &bell, patience.left());
                    self.lock().waiters.leave(&bell);
                    bell.disarm();
                    slept?;
                }
            }
        }
    }

    /// As [`Shared::run_for`], when other threads run the stack.
    fn wait_for<R>(
        &self,
        sockets: &[SocketId],
        patience: Patience,
        mut ready: impl FnMut(&mut dyn Calls) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        loop {
            let mut core = self.lock();
            let result = ready(&mut *core);
            core.on_read(sockets);
            if let Some(result) = result {
                core.mind_timers();
                return result;
            }
            if let Some(failure) = core.failure() {
                return Err(failure);
            }
            let left = patience.left();
            if left.is_some_and(|left| left.is_zero()) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let bell = wait::thread_bell()?;
            bell.arm();
            core.waiters.enter(Arc::clone(&bell), sockets);
            drop(core);
            let slept = wait::sleep([], &bell, left);
            self.lock().waiters.leave(&bell);
            bell.disarm();
            slept?;
        }
    }

    /// Pauses while nothing comes, and tells the engine if others used that.
    pub(crate) fn pause(&self) {
        if engine::pause() {
            self.lock().engine.on_crowded();
        }
    }

    fn new(mut engine: Engine, claims: Claims, meter: Option<Box<LockMeter>>) -> io::Result<Self> {
        let wake_fds = engine.wake_fds()?;
        let has_share = engine.gate().settings().config().cpu_share_percent < 100;
        let idle = has_share.then(IdleWatch::start).transpose()?;
        let waiters = Waiters::default();
        let counts_lock = meter.is_some();
        let core = Core {
            meter,
            engine,
            waiters,
            sleepers: Vec::new(),
            failure: None,
            tells_levels: false,
            levels: Vec::new(),
            held: None,
            polls: Polls::default(),
            tasks: Tasks::default(),
            groups: Groups::new(None),
            claims,
            deferred_calls: 0,
        };
        Ok(Self { core: Mutex::new(core), counts_lock, wake_fds, idle })
    }

    #[inline]
    pub(crate) fn lock(&self) -> CoreGuard<'_> {
        assert!(!batch::is_held(), "a socket was used inside a batch by other ways than the batch");
        if self.counts_lock {
            return CoreGuard::new(self.lock_counted());
        }
        // A thread that panicked while it held the lock left the engine
        // between two packets, where it is whole.
        CoreGuard::new(self.core.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[cold]
    fn lock_counted(&self) -> MutexGuard<'_, Core> {
        let (mut core, found_taken) = match self.core.try_lock() {
            Ok(core) => (core, None),
            Err(TryLockError::Poisoned(poisoned)) => (poisoned.into_inner(), None),
            Err(TryLockError::WouldBlock) => {
                let found_taken = FoundTaken::now();
                let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
                (core, Some(found_taken))
            }
        };
        if let Some(meter) = &mut core.meter {
            if let Some(found_taken) = found_taken {
                meter.on_waited(found_taken);
            }
            meter.on_taken();
        }
        core
    }

    /// Sleeps until there is work for the engine, `bell` is rung, or the time
    /// is over. The caller has armed the bell.
    pub(crate) fn sleep(
        &self,
        core: CoreGuard<'_>,
        bell: &Arc<Doorbell>,
        limit: Option<Duration>,
    ) -> io::Result<()> {
        self.sleep_by(core, bell, limit, &mut JustSleep).map(|_| ())
    }

    /// As [`Shared::sleep`], in the sleeper's way. Whether it has found
    /// something of its own.
    pub(crate) fn sleep_by(
        &self,
        mut core: CoreGuard<'_>,
        bell: &Arc<Doorbell>,
        limit: Option<Duration>,
        sleeper: &mut dyn Sleeper,
    ) -> io::Result<bool> {
        if core.groups.has_work() {
            return Ok(false);
        }
        let Some(sleep) = core.engine.prepare_sleep()? else { return Ok(false) };
        core.held = sleep.held.then(|| Arc::clone(bell));
        core.enter_sleep(bell, sleep.timeout_ns);
        drop(core);
        let slept = self.sleep_for(sleep, bell, limit, sleeper);
        self.lock().leave_sleep(bell);
        slept
    }

    fn sleep_for(
        &self,
        sleep: Sleep,
        bell: &Doorbell,
        limit: Option<Duration>,
        sleeper: &mut dyn Sleeper,
    ) -> io::Result<bool> {
        let timer = sleep.timeout_ns.map(Duration::from_nanos);
        let timeout = timer.into_iter().chain(limit).min();
        let neighbours = self.wake_fds.neighbours.as_ref().map(AsFd::as_fd);
        if !sleep.held {
            let port = self.wake_fds.port.as_ref().map(AsFd::as_fd);
            let wake: Vec<_> = port.into_iter().chain(neighbours).chain([bell.as_fd()]).collect();
            return sleeper.sleep(&wake, timeout);
        }
        let wake = neighbours.into_iter().chain([bell.as_fd()]);
        let Some(idle) = &self.idle else {
            return sleeper.sleep(&wake.collect::<Vec<_>>(), timeout);
        };
        idle.ask();
        let slept = sleeper.sleep(&wake.chain([idle.idle_fd()]).collect::<Vec<_>>(), timeout);
        if idle.done() {
            let mut core = self.lock();
            let now_ns = core.engine.read_clock();
            core.engine.gate().on_idle_processor(now_ns);
        }
        slept
    }
}

impl Core {
    /// Transmits what a call has made, wakes those whom it concerns, and sees to
    /// the timers that it has set.
    pub(crate) fn send_and_tell(&mut self) -> io::Result<()> {
        self.flush()?;
        self.tell()?;
        self.mind_timers();
        Ok(())
    }

    /// Transmits, unless that was left to a later call.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if self.deferred_calls == 0 {
            return self.engine.flush();
        }
        let (stack, _, _) = self.engine.parts();
        let waiting = stack.transmit_queue().len();
        // A call that sent nothing is none to wait for.
        if waiting > 0 {
            self.deferred_calls -= 1;
        }
        if waiting >= DEFERRED_FRAMES { self.engine.flush() } else { Ok(()) }
    }

    /// Notes that somebody sleeps for so long and will run the engine then.
    pub(crate) fn enter_sleep(&mut self, bell: &Arc<Doorbell>, timeout_ns: Option<u64>) {
        let (_, _, now_ns) = self.engine.parts();
        let until_ns = timeout_ns.map_or(u64::MAX, |timeout_ns| now_ns.saturating_add(timeout_ns));
        self.sleepers.push((Arc::clone(bell), until_ns));
    }

    pub(crate) fn leave_sleep(&mut self, bell: &Arc<Doorbell>) {
        self.sleepers.retain(|(other, _)| !Arc::ptr_eq(other, bell));
    }

    /// When all who sleep would wake up too late for the next timer, or for what
    /// the stack sends to itself, wakes one of them.
    pub(crate) fn mind_timers(&self) {
        let Some((first, _)) = self.sleepers.first() else { return };
        if self.engine.has_looped() {
            return first.ring();
        }
        let next_ns = self.engine.stack().next_timeout();
        if next_ns.is_some_and(|next_ns| self.sleepers.iter().all(|other| other.1 > next_ns)) {
            first.ring();
        }
    }

    /// One round of the engine, then wakes those it has something for.
    pub(crate) fn run(&mut self) -> io::Result<usize> {
        let received = self.engine.poll()?;
        self.tell()?;
        Ok(received)
    }

    /// Gives readers what the engine has for them and takes what they have for
    /// it; wakes the others that it has something for.
    pub(crate) fn tell(&mut self) -> io::Result<()> {
        while let Some(event) = self.engine.poll_event() {
            if let Event::Readable(id) = event {
                if self.tells_levels {
                    self.levels.push(id);
                }
                if self.groups.on_readable(id) {
                    continue;
                }
            }
            if let Some(id) = SocketId::of_event(event) {
                self.waiters.wake(id);
                self.polls.on_event(id, &self.waiters);
                self.tasks.on_event(event);
            }
        }
        self.claims.release_ended(&mut self.engine);
        self.groups.serve(&mut self.engine)
    }

    /// Connections that the program has closed are brought to their end, if
    /// that does not take long.
    fn finish_connections(&mut self) {
        let began = Instant::now();
        while self.engine.stack().tcp_unfinished() && began.elapsed() < FINISH_LIMIT {
            if !matches!(self.run(), Ok(received) if received > 0) {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// The engine has ended: nobody shall wait for it.
    pub(crate) fn fail(&mut self, failure: io::Error) {
        self.failure = Some(failure);
        self.waiters.wake_all();
        self.tasks.wake_all();
        self.groups.fail();
    }

    /// Tells the gate how full the sockets' queues are.
    pub(crate) fn tell_levels(&mut self) {
        let Self { engine, groups, levels, .. } = self;
        if !engine.wants_levels() {
            levels.clear();
            return;
        }
        levels.sort_unstable_by_key(|id| id.to_bits());
        levels.dedup();
        levels.retain(|&id| {
            match groups.fill(id) {
                Some(fill) => engine.tell_fill(id, fill),
                None => engine.tell_level(id),
            }
            engine.gate().watches_queue(id.to_bits())
        });
        let (_, _, now_ns) = self.engine.parts();
        let held = self.engine.gate().held_until(now_ns).is_some();
        self.groups.set_held(held);
    }

    /// Something was taken from these sockets: what was held back because of
    /// them may go on.
    fn on_read(&mut self, sockets: &[SocketId]) {
        if !self.engine.gate().watches_queues() {
            return;
        }
        let now_ns = self.engine.read_clock();
        for &id in sockets {
            // What TCP does not take its window keeps away.
            if let SocketId::Udp(id) = id {
                self.engine.tell_level(id);
            }
        }
        if self.held.is_some()
            && self.engine.gate().held_until(now_ns).is_none()
            && let Some(bell) = self.held.take()
        {
            bell.ring();
        }
    }
}
