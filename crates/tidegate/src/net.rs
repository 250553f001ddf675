//! The stack that a program's sockets share.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use tidegate_engine::{Engine, EngineCounters, IdleWatch, Sleep, Step, WakeFds};
use tidegate_gate::admission::ClassCounters;
use tidegate_gate::{GateCounters, Settings};
use tidegate_memory::Doorbell;
use tidegate_memory::queues::lock::{FoundTaken, LockMeter, LockStatistics};
use tidegate_port::{Capabilities, PortCounters};
use tidegate_stack::{Counters, Event, TcpId, UdpId};

use crate::batch;
use crate::open::{self, Claim, NetConfig, OpenError};
use crate::poll::Polls;
use crate::readers::group::Groups;
use crate::tasks::{CoreGuard, Tasks};
use crate::threads::{self, Threads};
use crate::wait::{self, Patience, SocketId, Waiters};

/// A network stack embedded in this program. Cheap to clone: all clones are
/// the same stack, which ends when the last clone and the last socket are gone.
#[derive(Clone)]
pub struct Net {
    shared: Arc<Shared>,
    /// Threads that run the engine; without them whoever waits runs it.
    threads: Option<Arc<Threads>>,
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
    /// Ports of closed connections, which stay ours until those have ended.
    pub(crate) closing: Vec<(TcpId, Arc<Claim>)>,
    /// The sockets that have several readers.
    pub(crate) groups: Groups,
    /// The kernel's addresses, when the stack lives on them.
    pub(crate) shared_addresses: Vec<IpAddr>,
}

/// What a stack counted since it was opened.
#[derive(Clone, Debug)]
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
        let form = config.form();
        let meter = config.counts_lock().then(Box::default);
        let (engine, shared_addresses) = open::engine(config)?;
        let shared = Shared::new(engine, shared_addresses, meter).map_err(OpenError::Io)?;
        let shared = Arc::new(shared);
        let threads = threads::start(&shared, form).map_err(OpenError::Io)?;
        Ok(Self { shared, threads: threads.map(Arc::new) })
    }

    /// The settings of receive scheduling that are in force.
    pub fn gate(&self) -> Settings {
        self.lock().engine.gate().settings().clone()
    }

    /// Changes the settings of receive scheduling from now on.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for another mode: which threads there
    /// are is settled when the stack is opened.
    pub fn set_gate(&self, settings: Settings) -> io::Result<()> {
        let mut core = self.lock();
        let (now, new) = (core.engine.gate().settings().config().mode, settings.config().mode);
        if now != new {
            let (now, new) = (now.name(), new.name());
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the mode is {now} and cannot become {new} while it runs: start again"),
            ));
        }
        core.engine.gate().set(settings);
        Ok(())
    }

    /// Whether threads of its own run the stack. If not, the calls that wait
    /// for a socket do.
    pub fn has_threads(&self) -> bool {
        self.threads.is_some()
    }

    /// What the port can do.
    pub fn capabilities(&self) -> Capabilities {
        self.lock().engine.capabilities().clone()
    }

    /// What was counted so far.
    pub fn counters(&self) -> NetCounters {
        let mut core = self.lock();
        let gate = *core.engine.gate().counters();
        let classes = core.engine.admission().map_or_else(Vec::new, |admission| {
            let names = admission.classes().names().map(str::to_owned);
            names.zip(admission.counters().iter().copied()).collect()
        });
        let (engine, port, stack) = core.engine.counters();
        let stack = stack.clone();
        NetCounters { engine, gate, classes, port, stack }
    }

    /// How the lock of this stack was used since it was opened, if
    /// [`NetConfig::lock_statistics`] asked for that.
    pub fn lock_statistics(&self) -> Option<LockStatistics> {
        self.lock().meter.as_ref().map(|meter| meter.statistics())
    }

    /// Frames that are neither in use nor with the port.
    pub fn frames_available(&self) -> usize {
        self.lock().engine.frames_available()
    }

    /// Runs the stack once: receive, process, transmit. Returns how many
    /// frames were received. For programs with a loop of their own; blocking
    /// calls on sockets do it by themselves.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn run_once(&self) -> io::Result<usize> {
        self.lock().run()
    }

    pub(crate) fn lock(&self) -> CoreGuard<'_> {
        self.shared.lock()
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
        mut ready: impl FnMut(&mut Core) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        if self.threads.is_some() {
            return self.wait_for_threads(sockets, patience, ready);
        }
        loop {
            let mut core = self.lock();
            if let Some(result) = ready(&mut core) {
                core.mind_timers();
                return result;
            }
            core.run()?;
            if let Some(result) = ready(&mut core) {
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
                    wait::pause();
                }
                Step::Sleep => {
                    let bell = wait::thread_bell()?;
                    bell.arm();
                    core.waiters.enter(Arc::clone(&bell), sockets);
                    let slept = self.shared.sleep(core, &bell, patience.left());
                    self.lock().waiters.leave(&bell);
                    bell.disarm();
                    slept?;
                }
            }
        }
    }

    /// As [`Net::wait_for`], when other threads run the stack.
    fn wait_for_threads<R>(
        &self,
        sockets: &[SocketId],
        patience: Patience,
        mut ready: impl FnMut(&mut Core) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        loop {
            let mut core = self.lock();
            let result = ready(&mut core);
            core.on_read(sockets);
            if let Some(result) = result {
                core.mind_timers();
                return result;
            }
            if let Some(failure) = &core.failure {
                return Err(io::Error::new(failure.kind(), failure.to_string()));
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

    pub(crate) fn is_same(&self, other: &Net) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Net").field("port", &self.capabilities()).finish_non_exhaustive()
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
    fn new(
        mut engine: Engine,
        shared_addresses: Vec<IpAddr>,
        meter: Option<Box<LockMeter>>,
    ) -> io::Result<Self> {
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
            closing: Vec::new(),
            groups: Groups::new(None),
            shared_addresses,
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
        mut core: CoreGuard<'_>,
        bell: &Arc<Doorbell>,
        limit: Option<Duration>,
    ) -> io::Result<()> {
        if core.groups.has_work() {
            return Ok(());
        }
        let Some(sleep) = core.engine.prepare_sleep()? else { return Ok(()) };
        core.held = sleep.held.then(|| Arc::clone(bell));
        core.enter_sleep(bell, sleep.timeout_ns);
        drop(core);
        let slept = self.sleep_for(sleep, bell, limit);
        self.lock().leave_sleep(bell);
        slept
    }

    fn sleep_for(&self, sleep: Sleep, bell: &Doorbell, limit: Option<Duration>) -> io::Result<()> {
        let timer = sleep.timeout_ns.map(Duration::from_nanos);
        let timeout = timer.into_iter().chain(limit).min();
        let neighbours = self.wake_fds.neighbours.as_ref().map(AsFd::as_fd);
        if !sleep.held {
            let port = self.wake_fds.port.as_ref().map(AsFd::as_fd);
            return wait::sleep(port.into_iter().chain(neighbours), bell, timeout);
        }
        let Some(idle) = &self.idle else { return wait::sleep(neighbours, bell, timeout) };
        idle.ask();
        let slept = wait::sleep(neighbours.into_iter().chain([idle.idle_fd()]), bell, timeout);
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
    pub(crate) fn commit(&mut self) -> io::Result<()> {
        self.engine.flush()?;
        self.tell()?;
        self.mind_timers();
        Ok(())
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

    /// When all who sleep would wake up too late for the next timer, wakes one
    /// of them.
    fn mind_timers(&self) {
        let Some((first, _)) = self.sleepers.first() else { return };
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
        if !self.closing.is_empty() {
            self.release_closed();
        }
        self.groups.serve(&mut self.engine)
    }

    /// Gives the ports of connections back that have ended.
    fn release_closed(&mut self) {
        let Self { engine, closing, .. } = self;
        let (open, over) =
            std::mem::take(closing).into_iter().partition(|(id, _)| engine.stack().tcp_exists(*id));
        *closing = open;
        let over: Vec<(TcpId, Arc<Claim>)> = over;
        // The last one who needed the port gives it back.
        for claim in over.into_iter().filter_map(|(_, claim)| Arc::into_inner(claim)) {
            claim.release(engine.port());
        }
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
