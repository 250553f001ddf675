//! Stack handle shared by an application's sockets.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use tidegate_device::{Capabilities, DeviceCounters};
use tidegate_engine::{
    self as engine, Engine, EngineCounters, IdleDetector, IdleStep, NetConfig, OpenError,
    PortClaims, SleepPlan, WakeFds,
};
use tidegate_gate::admission::ClassCounters;
use tidegate_gate::{GateCounters, Settings};
use tidegate_memory::Doorbell;
use tidegate_memory::queues::lock::{ContentionStart, LockMeter, LockStatistics};
use tidegate_service::attachment::Attachment;
use tidegate_stack::{Counters, Event, UdpId};
use tidegate_wire::Medium;

use crate::attached::{AttachedStack, Fork};
use crate::batch;
use crate::poll::PollSets;
use crate::readers::group::ReaderGroups;
use crate::readiness::Sleeper;
use crate::socket_ops::SocketOps;
use crate::tasks::{EmbeddedGuard, Tasks};
use crate::threads::{self, Threads};
use crate::wait::{self, Deadline, PollSleeper, SocketId, Waiters};

/// Handle of a network stack: embedded in this process, or in a daemon that this process is
/// attached to.
///
/// Cheap to clone. All clones share one stack or one attachment, which ends when the last
/// clone and the last socket are dropped.
///
/// # Examples
/// ```
/// use tidegate::{Net, NetConfig};
///
/// let (device, _peer) = tidegate::mem::wire(&Default::default())?;
/// let config = NetConfig::new(device)
///     .address("192.0.2.1/24".parse().unwrap())
///     .address("2001:db8::1/64".parse().unwrap());
/// let net = Net::open(config)?;
/// assert!(!net.is_attached());
/// // An application with an event loop of its own drives the stack itself.
/// let received_frames = net.run_once()?;
/// # let _ = received_frames;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Net {
    backend: Backend,
}

/// Transmit batch limit while transmission is deferred: a peer already processes the first
/// replies while the last ones are written.
const MAX_DEFERRED_FRAMES: usize = 8;

/// Location of the stack.
#[derive(Clone)]
enum Backend {
    /// In this process.
    Embedded {
        shared: Arc<EmbeddedStack>,
        /// Threads that drive the engine; without them the waiting calls drive it.
        threads: Option<Arc<Threads>>,
    },
    /// In a daemon.
    Attached(Arc<AttachedStack>),
}

/// Capabilities reported for an attached stack, whose device is the daemon's.
fn attached_capabilities() -> Capabilities {
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

/// Error of an operation that needs an embedded stack.
pub(crate) fn unsupported_when_attached(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        format!(
            "{what} needs an embedded stack, but this Net is attached to a daemon: use Net::open"
        ),
    )
}

/// State shared by all clones of a [`Net`] and by its threads.
pub(crate) struct EmbeddedStack {
    core: Mutex<EmbeddedCore>,
    /// True if the core measures its lock.
    measures_lock: bool,
    pub(crate) wake_fds: WakeFds,
    /// Signals an idle processor; present if there is a CPU share to lift.
    idle: Option<IdleDetector>,
}

/// Engine of an embedded stack, and the threads and tasks that wait for its sockets.
pub(crate) struct EmbeddedCore {
    /// Lock statistics, if they were requested.
    pub(crate) meter: Option<Box<LockMeter>>,
    pub(crate) engine: Engine,
    pub(crate) waiters: Waiters,
    /// Sleeping threads that will run the engine next, each with its latest wake-up time.
    pub(crate) sleepers: Vec<(Arc<Doorbell>, u64)>,
    /// Error that ended the threads that drive the engine.
    pub(crate) failure: Option<io::Error>,
    /// True if [`EmbeddedCore::report_queue_levels`] is called before each round.
    pub(crate) reports_queue_levels: bool,
    /// Sockets whose queue level the gate still has to learn: something arrived for them, or
    /// the gate waits for their readers.
    changed_queues: Vec<UdpId>,
    /// Doorbell of the thread that runs the engine, while a full queue pauses receiving.
    pub(crate) paused_sleeper: Option<Arc<Doorbell>>,
    /// Poll sets of the application.
    pub(crate) poll_sets: PollSets,
    /// Tasks of an executor that wait for sockets.
    pub(crate) tasks: Tasks,
    /// Sockets with several readers.
    pub(crate) reader_groups: ReaderGroups,
    /// Ports claimed from the kernel, when the stack shares the kernel's addresses.
    pub(crate) claims: PortClaims,
    /// Number of further calls that leave their frames to a later call.
    pub(crate) deferred_calls: u32,
}

/// Counters of a stack since it was opened.
#[derive(Clone, Debug, Default)]
pub struct NetCounters {
    /// Rounds and sleeps of the engine.
    pub engine: EngineCounters,
    /// Turns, and how often receiving was paused.
    pub gate: GateCounters,
    /// Admitted and refused packets of each class; empty without admission control.
    pub classes: Vec<(String, ClassCounters)>,
    /// Frames at the device.
    pub device: DeviceCounters,
    /// Packets in the stack.
    pub stack: Counters,
}

impl NetCounters {
    /// Every drop, at the device and in the stack, by reason.
    pub fn drops(&self) -> tidegate_wire::DropCounters {
        let mut drops = self.device.drops.clone();
        drops.merge(&self.stack.drops);
        drops.merge(&self.stack.transmit_drops);
        drops
    }
}

impl Net {
    /// Opens the device and starts a stack on it.
    ///
    /// # Errors
    /// [`OpenError`] states the cause and the remedy; everything opened so far is released.
    pub fn open(config: NetConfig) -> Result<Self, OpenError> {
        let mode = config.thread_mode();
        let meter = config.has_lock_statistics().then(Box::default);
        let (engine, claims) = engine::open(config)?;
        let shared = EmbeddedStack::new(engine, claims, meter).map_err(OpenError::Io)?;
        let shared = Arc::new(shared);
        let threads =
            mode.map(|mode| threads::start(&shared, mode)).transpose().map_err(OpenError::Io)?;
        Ok(Self { backend: Backend::Embedded { shared, threads: threads.map(Arc::new) } })
    }

    /// Attaches to the daemon that listens at `path` (`tidegate daemon`). The daemon lists
    /// this process as `name`. Sockets of this [`Net`] live in the daemon, and end with the
    /// daemon or with this process.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] and [`io::ErrorKind::ConnectionRefused`] when no daemon
    /// listens at `path`, [`io::ErrorKind::PermissionDenied`] when this user may not attach.
    pub fn attach(path: impl AsRef<Path>, name: &str) -> io::Result<Self> {
        let attachment = Attachment::connect(path.as_ref(), name)?;
        Ok(Self { backend: Backend::Attached(Arc::new(AttachedStack::new(attachment)?)) })
    }

    /// True if the stack is in a daemon. Such a [`Net`] has no device information and no
    /// counters: `tidegate ss` reports them.
    pub fn is_attached(&self) -> bool {
        matches!(self.backend, Backend::Attached(_))
    }

    /// Prepares a fork of this process, if it is attached to a daemon: the child gets all
    /// sockets of this [`Net`], and a socket is closed when no process holds it any more.
    /// Returns `None` for an embedded stack, which the child must not use.
    pub fn prepare_fork(&self) -> Option<Fork<'_>> {
        self.attached().map(|attached| attached.prepare_fork())
    }

    /// Receive-scheduling settings in force.
    pub fn gate(&self) -> Settings {
        self.lock_embedded()
            .map_or_else(Settings::default, |mut core| core.engine.gate().settings().clone())
    }

    /// Changes the receive-scheduling settings.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for another mode, because the mode's threads are
    /// started when the stack is opened. [`io::ErrorKind::Unsupported`] when the stack is in
    /// a daemon.
    pub fn set_gate(&self, settings: Settings) -> io::Result<()> {
        let mut core =
            self.lock_embedded().ok_or_else(|| unsupported_when_attached("receive scheduling"))?;
        core.engine.set_gate(settings)
    }

    /// True if dedicated threads drive the stack. Otherwise the calls that wait for a socket
    /// drive it.
    pub fn has_threads(&self) -> bool {
        matches!(self.backend, Backend::Embedded { threads: Some(_), .. })
    }

    /// Capabilities of the device.
    pub fn capabilities(&self) -> Capabilities {
        self.lock_embedded()
            .map_or_else(attached_capabilities, |core| core.engine.capabilities().clone())
    }

    /// Counters so far; all zero for an attached stack.
    pub fn counters(&self) -> NetCounters {
        let Some(mut core) = self.lock_embedded() else { return NetCounters::default() };
        let gate = *core.engine.gate().counters();
        let classes = core.engine.class_counters();
        let (engine, device, stack) = core.engine.counters();
        let stack = stack.clone();
        NetCounters { engine, gate, classes, device, stack }
    }

    /// Lock statistics since the stack was opened, if [`NetConfig::lock_statistics`] enabled
    /// them.
    pub fn lock_statistics(&self) -> Option<LockStatistics> {
        self.lock_embedded()?.meter.as_ref().map(|meter| meter.statistics())
    }

    /// Number of frames that are neither in use nor owned by the device.
    pub fn frames_available(&self) -> usize {
        self.lock_embedded().map_or(0, |core| core.engine.frames_available())
    }

    /// Runs the stack once: receive, process, transmit. Returns the number of received
    /// frames. For applications with an event loop of their own; blocking calls on sockets
    /// run the stack by themselves.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn run_once(&self) -> io::Result<usize> {
        match &self.backend {
            Backend::Embedded { shared, .. } => shared.lock().run(),
            Backend::Attached(attached) => attached.lock().poll_daemon().map(|_| 0),
        }
    }

    /// Finishes closed connections, for at most 2 s: for a process that exits without
    /// dropping its last handle of the stack.
    pub fn finish(&self) {
        if let Some(mut core) = self.lock_embedded() {
            core.finish_connections();
        }
    }

    /// The embedded stack, if there is one.
    pub(crate) fn embedded(&self) -> Option<&Arc<EmbeddedStack>> {
        match &self.backend {
            Backend::Embedded { shared, .. } => Some(shared),
            Backend::Attached(_) => None,
        }
    }

    /// The attachment, if the stack is in a daemon.
    pub(crate) fn attached(&self) -> Option<&Arc<AttachedStack>> {
        match &self.backend {
            Backend::Embedded { .. } => None,
            Backend::Attached(attached) => Some(attached),
        }
    }

    /// Locks the embedded stack, if there is one.
    pub(crate) fn lock_embedded(&self) -> Option<EmbeddedGuard<'_>> {
        self.embedded().map(|shared| shared.lock())
    }

    /// Runs `call` on the locked stack, embedded or attached.
    #[inline]
    pub(crate) fn with<R>(&self, call: impl FnOnce(&mut dyn SocketOps) -> R) -> R {
        match &self.backend {
            Backend::Embedded { shared, .. } => call(&mut *shared.lock()),
            Backend::Attached(attached) => call(&mut *attached.lock()),
        }
    }

    /// Runs the stack until `ready` returns a value or the deadline passes.
    ///
    /// `ready` is called first, so data that has already arrived costs no system call.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the deadline passes; the device's error when the
    /// device has failed; never [`io::ErrorKind::Interrupted`].
    pub(crate) fn wait_until<R>(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        ready: impl FnMut(&mut dyn SocketOps) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        match &self.backend {
            Backend::Embedded { shared, threads: None } => {
                shared.run_until(sockets, deadline, ready)
            }
            Backend::Embedded { shared, .. } => shared.wait_until(sockets, deadline, ready),
            Backend::Attached(attached) => attached.wait_until(sockets, deadline, ready),
        }
    }

    pub(crate) fn is_same(&self, other: &Net) -> bool {
        match (&self.backend, &other.backend) {
            (Backend::Embedded { shared, .. }, Backend::Embedded { shared: other, .. }) => {
                Arc::ptr_eq(shared, other)
            }
            (Backend::Attached(attached), Backend::Attached(other)) => Arc::ptr_eq(attached, other),
            _ => false,
        }
    }
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.backend {
            Backend::Embedded { shared, .. } => shared.fmt(f),
            Backend::Attached(_) => f.debug_struct("Net").field("device", &"daemon's").finish(),
        }
    }
}

impl std::fmt::Debug for EmbeddedStack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = self.lock().engine.capabilities().clone();
        f.debug_struct("Net").field("device", &device).finish_non_exhaustive()
    }
}

/// Time limit for finishing connections with unsent data when the last handle of a stack is
/// dropped.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

impl Drop for EmbeddedStack {
    fn drop(&mut self) {
        self.core.get_mut().unwrap_or_else(PoisonError::into_inner).finish_connections();
    }
}

impl EmbeddedStack {
    /// Runs the stack until `ready` returns a value or the deadline passes.
    fn run_until<R>(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        mut ready: impl FnMut(&mut dyn SocketOps) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        loop {
            let mut core = self.lock();
            if let Some(result) = ready(&mut *core) {
                core.wake_for_timers();
                return result;
            }
            core.run()?;
            if let Some(result) = ready(&mut *core) {
                core.wake_for_timers();
                return result;
            }
            if deadline.remaining().is_some_and(|left| left.is_zero()) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            match core.engine.idle_step() {
                IdleStep::Spin => {}
                IdleStep::Pause => {
                    drop(core);
                    self.pause();
                }
                IdleStep::Sleep => {
                    let bell = wait::thread_bell()?;
                    bell.arm();
                    core.waiters.enter(Arc::clone(&bell), sockets);
                    let slept = self.sleep(core, &bell, deadline.remaining());
                    self.lock().waiters.leave(&bell);
                    bell.disarm();
                    slept?;
                }
            }
        }
    }

    /// Like [`EmbeddedStack::run_until`], when other threads drive the stack.
    fn wait_until<R>(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        mut ready: impl FnMut(&mut dyn SocketOps) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        loop {
            let mut core = self.lock();
            let result = ready(&mut *core);
            core.on_read(sockets);
            if let Some(result) = result {
                core.wake_for_timers();
                return result;
            }
            if let Some(failure) = core.failure() {
                return Err(failure);
            }
            let remaining = deadline.remaining();
            if remaining.is_some_and(|left| left.is_zero()) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let bell = wait::thread_bell()?;
            bell.arm();
            core.waiters.enter(Arc::clone(&bell), sockets);
            drop(core);
            let slept = wait::sleep([], &bell, remaining);
            self.lock().waiters.leave(&bell);
            bell.disarm();
            slept?;
        }
    }

    /// Pauses while nothing arrives, and reports to the engine if other threads used the
    /// processor meanwhile.
    pub(crate) fn pause(&self) {
        if engine::pause() {
            self.lock().engine.on_cpu_contention();
        }
    }

    fn new(
        mut engine: Engine,
        claims: PortClaims,
        meter: Option<Box<LockMeter>>,
    ) -> io::Result<Self> {
        let wake_fds = engine.wake_fds()?;
        let has_share = engine.gate().settings().config().cpu_share_percent < 100;
        let idle = has_share.then(IdleDetector::start).transpose()?;
        let waiters = Waiters::default();
        let measures_lock = meter.is_some();
        let core = EmbeddedCore {
            meter,
            engine,
            waiters,
            sleepers: Vec::new(),
            failure: None,
            reports_queue_levels: false,
            changed_queues: Vec::new(),
            paused_sleeper: None,
            poll_sets: PollSets::default(),
            tasks: Tasks::default(),
            reader_groups: ReaderGroups::new(None),
            claims,
            deferred_calls: 0,
        };
        Ok(Self { core: Mutex::new(core), measures_lock, wake_fds, idle })
    }

    #[inline]
    pub(crate) fn lock(&self) -> EmbeddedGuard<'_> {
        assert!(!batch::is_active(), "a socket was used inside a batch, but not through the batch");
        if self.measures_lock {
            return EmbeddedGuard::new(self.lock_counted());
        }
        // A thread that panicked while it held the lock left the engine between two packets,
        // where its state is consistent.
        EmbeddedGuard::new(self.core.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[cold]
    fn lock_counted(&self) -> MutexGuard<'_, EmbeddedCore> {
        let (mut core, found_taken) = match self.core.try_lock() {
            Ok(core) => (core, None),
            Err(TryLockError::Poisoned(poisoned)) => (poisoned.into_inner(), None),
            Err(TryLockError::WouldBlock) => {
                let found_taken = ContentionStart::now();
                let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
                (core, Some(found_taken))
            }
        };
        if let Some(meter) = &mut core.meter {
            if let Some(found_taken) = found_taken {
                meter.on_contended(found_taken);
            }
            meter.on_acquired();
        }
        core
    }

    /// Sleeps until the engine has work, `bell` is rung, or the timeout expires. The caller
    /// has armed the bell.
    pub(crate) fn sleep(
        &self,
        core: EmbeddedGuard<'_>,
        bell: &Arc<Doorbell>,
        limit: Option<Duration>,
    ) -> io::Result<()> {
        self.sleep_with(core, bell, limit, &mut PollSleeper).map(|_| ())
    }

    /// Like [`EmbeddedStack::sleep`], through `sleeper`. Returns true if the sleeper found an event
    /// of its own.
    pub(crate) fn sleep_with(
        &self,
        mut core: EmbeddedGuard<'_>,
        bell: &Arc<Doorbell>,
        limit: Option<Duration>,
        sleeper: &mut dyn Sleeper,
    ) -> io::Result<bool> {
        if core.reader_groups.has_work() {
            return Ok(false);
        }
        let Some(sleep) = core.engine.prepare_sleep()? else { return Ok(false) };
        core.paused_sleeper = sleep.receive_paused.then(|| Arc::clone(bell));
        core.enter_sleep(bell, sleep.timeout_ns);
        drop(core);
        let slept = self.sleep_for(sleep, bell, limit, sleeper);
        self.lock().leave_sleep(bell);
        slept
    }

    fn sleep_for(
        &self,
        sleep: SleepPlan,
        bell: &Doorbell,
        limit: Option<Duration>,
        sleeper: &mut dyn Sleeper,
    ) -> io::Result<bool> {
        let timer = sleep.timeout_ns.map(Duration::from_nanos);
        let timeout = timer.into_iter().chain(limit).min();
        let neighbours = self.wake_fds.neighbours.as_ref().map(AsFd::as_fd);
        if !sleep.receive_paused {
            let device = self.wake_fds.device.as_ref().map(AsFd::as_fd);
            let wake: Vec<_> = device.into_iter().chain(neighbours).chain([bell.as_fd()]).collect();
            return sleeper.sleep(&wake, timeout);
        }
        let wake = neighbours.into_iter().chain([bell.as_fd()]);
        let Some(idle) = &self.idle else {
            return sleeper.sleep(&wake.collect::<Vec<_>>(), timeout);
        };
        idle.request();
        let slept = sleeper.sleep(&wake.chain([idle.idle_fd()]).collect::<Vec<_>>(), timeout);
        if idle.finish() {
            let mut core = self.lock();
            let now_ns = core.engine.read_clock();
            core.engine.gate().on_idle_processor(now_ns);
        }
        slept
    }
}

impl EmbeddedCore {
    /// Transmits queued frames, dispatches events, and wakes a sleeper for the timers that a
    /// call has set.
    pub(crate) fn flush_and_dispatch(&mut self) -> io::Result<()> {
        self.flush()?;
        self.dispatch_events()?;
        self.wake_for_timers();
        Ok(())
    }

    /// Transmits queued frames, unless transmission was deferred to a later call.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if self.deferred_calls == 0 {
            return self.engine.flush();
        }
        let (stack, _, _) = self.engine.parts();
        let waiting = stack.transmit_queue().len();
        // A call that sent nothing does not count.
        if waiting > 0 {
            self.deferred_calls -= 1;
        }
        if waiting >= MAX_DEFERRED_FRAMES { self.engine.flush() } else { Ok(()) }
    }

    /// Registers a sleeping thread that will run the engine after at most `timeout_ns`.
    pub(crate) fn enter_sleep(&mut self, bell: &Arc<Doorbell>, timeout_ns: Option<u64>) {
        let (_, _, now_ns) = self.engine.parts();
        let until_ns = timeout_ns.map_or(u64::MAX, |timeout_ns| now_ns.saturating_add(timeout_ns));
        self.sleepers.push((Arc::clone(bell), until_ns));
    }

    pub(crate) fn leave_sleep(&mut self, bell: &Arc<Doorbell>) {
        self.sleepers.retain(|(other, _)| !Arc::ptr_eq(other, bell));
    }

    /// Wakes one sleeper if all sleepers would wake up too late for the next timer, or if
    /// loopback frames wait.
    pub(crate) fn wake_for_timers(&self) {
        let Some((first, _)) = self.sleepers.first() else { return };
        if self.engine.has_loopback() {
            return first.ring();
        }
        let next_ns = self.engine.stack().next_timeout();
        if next_ns.is_some_and(|next_ns| self.sleepers.iter().all(|other| other.1 > next_ns)) {
            first.ring();
        }
    }

    /// Runs one round of the engine, then dispatches its events.
    pub(crate) fn run(&mut self) -> io::Result<usize> {
        let received = self.engine.poll()?;
        self.dispatch_events()?;
        Ok(received)
    }

    /// Delivers datagrams to readers, collects their replies, and wakes the other threads and
    /// tasks that the engine has events for.
    pub(crate) fn dispatch_events(&mut self) -> io::Result<()> {
        while let Some(event) = self.engine.poll_event() {
            if let Event::UdpReadable(id) = event {
                if self.reports_queue_levels {
                    self.changed_queues.push(id);
                }
                if self.reader_groups.on_readable(id) {
                    continue;
                }
            }
            if let Some(id) = SocketId::of_event(event) {
                self.waiters.wake(id);
                self.poll_sets.on_event(id, &self.waiters);
                self.tasks.on_event(event);
            }
        }
        self.claims.release_closed(&mut self.engine);
        self.reader_groups.serve(&mut self.engine)
    }

    /// Finishes closed connections, for at most [`FINISH_TIMEOUT`].
    fn finish_connections(&mut self) {
        let began = Instant::now();
        while self.engine.stack().tcp_unfinished() && began.elapsed() < FINISH_TIMEOUT {
            if !matches!(self.run(), Ok(received) if received > 0) {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// Records that the engine has failed, and wakes all waiters.
    pub(crate) fn fail(&mut self, failure: io::Error) {
        self.failure = Some(failure);
        self.waiters.wake_all();
        self.tasks.wake_all();
        self.reader_groups.fail();
    }

    /// Reports the fill levels of socket queues to the gate.
    pub(crate) fn report_queue_levels(&mut self) {
        let Self { engine, reader_groups, changed_queues, .. } = self;
        if !engine.needs_queue_levels() {
            changed_queues.clear();
            return;
        }
        changed_queues.sort_unstable_by_key(|id| id.to_bits());
        changed_queues.dedup();
        changed_queues.retain(|&id| {
            match reader_groups.fill_level(id) {
                Some(fill) => engine.report_fill(id, fill),
                None => engine.report_level(id),
            }
            engine.gate().watches_queue(id.to_bits())
        });
        let (_, _, now_ns) = self.engine.parts();
        let held = self.engine.gate().paused_until(now_ns).is_some();
        self.reader_groups.set_receive_paused(held);
    }

    /// Called after a read from these sockets: receiving may resume if their queues had
    /// paused it.
    fn on_read(&mut self, sockets: &[SocketId]) {
        if !self.engine.gate().watches_queues() {
            return;
        }
        let now_ns = self.engine.read_clock();
        for &id in sockets {
            // TCP queues need no report: the receive window limits the peer.
            if let SocketId::Udp(id) = id {
                self.engine.report_level(id);
            }
        }
        if self.paused_sleeper.is_some()
            && self.engine.gate().paused_until(now_ns).is_none()
            && let Some(bell) = self.paused_sleeper.take()
        {
            bell.ring();
        }
    }
}
