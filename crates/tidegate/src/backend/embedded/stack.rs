//! Embedded stack, shared by the threads of the application.

use std::cell::RefCell;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use tidegate_engine::{
    self as engine, Engine, IdleDetector, IdleStep, PortClaims, PriorityBoost, SleepPlan, WakeFds,
};
use tidegate_memory::Doorbell;
use tidegate_memory::lock_meter::{ContentionStart, LockMeter};

use super::core::EmbeddedCore;
use crate::backend::guard::StackGuard;
use crate::types::batch_scope;
use crate::types::deadline::Deadline;
use crate::types::sleeper::{self, PollSleeper, Sleeper};
use crate::types::socket_id::SocketId;
use crate::types::socket_ops::SocketOps;

/// Pauses between two polls of the sleeper while the thread busy-polls the sockets.
const PAUSES_PER_SLEEPER_CHECK: u32 = 8;

/// Yields of the processor until a thread that waits for the lock takes it: longer than it takes to
/// wake the thread.
const MAX_HAND_OVER_YIELDS: u32 = 256;

/// Locked embedded stack.
pub(crate) type EmbeddedGuard<'a> = StackGuard<'a, EmbeddedCore>;

/// State shared by all clones of a [`Net`] and by its threads.
pub(crate) struct EmbeddedStack {
    core: Mutex<EmbeddedCore>,
    /// Threads that wait for the lock.
    waiting: AtomicU32,
    /// True if the core measures its lock.
    measures_lock: bool,
    pub(crate) wake_fds: WakeFds,
    /// Signals an idle processor; present if there is a CPU share to lift.
    idle: Option<IdleDetector>,
    /// Stack of the primary core, which other cores need until they are closed: the last field.
    primary: Option<Arc<EmbeddedStack>>,
}

impl std::fmt::Debug for EmbeddedStack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = self.lock().engine.capabilities().clone();
        f.debug_struct("Net").field("device", &device).finish_non_exhaustive()
    }
}

impl Drop for EmbeddedStack {
    fn drop(&mut self) {
        let Self { core, primary, .. } = self;
        let core = core.get_mut().unwrap_or_else(PoisonError::into_inner);
        core.finish_connections(|| run_primary(primary.as_deref()));
    }
}

/// Runs the stack of the primary core, for a secondary core that ends: nobody else may run it any
/// more. Returns true if it has received frames.
fn run_primary(primary: Option<&EmbeddedStack>) -> bool {
    primary.is_some_and(|primary| primary.lock().run().is_ok_and(|received| received > 0))
}

impl EmbeddedStack {
    /// Finishes closed connections, for a limited time.
    pub(crate) fn finish_connections(&self) {
        self.lock().finish_connections(|| run_primary(self.primary.as_deref()));
    }

    /// Runs the stack until `ready` returns a value or the deadline passes.
    pub(crate) fn run_until<R>(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        mut ready: impl FnMut(&mut EmbeddedCore) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        loop {
            let mut core = self.lock();
            if let Some(result) = ready(&mut core) {
                core.wake_for_timers();
                return result;
            }
            if matches!(deadline, Deadline::Now) && !core.needs_round() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            core.run()?;
            if let Some(result) = ready(&mut core) {
                core.end_wait();
                return result;
            }
            if deadline.remaining().is_some_and(|left| left.is_zero()) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let is_led = core.is_led();
            match if is_led { IdleStep::Sleep } else { core.engine.idle_step() } {
                IdleStep::Spin => {}
                IdleStep::Pause => {
                    drop(core);
                    self.pause();
                }
                IdleStep::Sleep => {
                    let bell = sleeper::thread_bell()?;
                    bell.arm();
                    core.waiters.enter(Arc::clone(&bell), sockets);
                    let limit = deadline.remaining();
                    let slept = self.sleep_as(is_led, core, &bell, limit, &mut PollSleeper);
                    self.lock().waiters.leave(&bell);
                    bell.disarm();
                    slept?;
                }
            }
        }
    }

    /// Like [`EmbeddedStack::run_until`], when other threads drive the stack.
    pub(crate) fn wait_until<R>(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        mut ready: impl FnMut(&mut EmbeddedCore) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        loop {
            let mut core = self.lock();
            let result = ready(&mut core);
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
            let bell = sleeper::thread_bell()?;
            bell.arm();
            core.waiters.enter(Arc::clone(&bell), sockets);
            drop(core);
            let slept = sleeper::sleep([], &bell, remaining);
            self.lock().waiters.leave(&bell);
            bell.disarm();
            slept?;
        }
    }

    /// Runs the stack until `ready` returns true, or `sleeper` has found an event of its own.
    /// Returns `false` when the deadline passes. With `has_threads` other threads drive the
    /// stack.
    pub(crate) fn wait(
        &self,
        has_threads: bool,
        sockets: &[SocketId],
        deadline: Deadline,
        sleeper: &mut dyn Sleeper,
        mut ready: impl FnMut(&mut dyn SocketOps) -> bool,
    ) -> io::Result<bool> {
        let mut pauses = 0;
        loop {
            let mut core = self.lock();
            if !has_threads {
                core.run_for_wait()?;
            }
            if ready(&mut *core) {
                core.end_wait();
                return Ok(true);
            }
            if let Some(failure) = core.failure() {
                return Err(failure);
            }
            let remaining = deadline.remaining();
            if remaining.is_some_and(|left| left.is_zero()) {
                drop(core);
                return sleeper.sleep(&[], Some(Duration::ZERO));
            }
            let is_led = !has_threads && core.is_led();
            let sleeps = has_threads || is_led;
            let step = if sleeps { IdleStep::Sleep } else { core.engine.idle_step() };
            if step != IdleStep::Sleep {
                drop(core);
                if pauses % PAUSES_PER_SLEEPER_CHECK == 0
                    && sleeper.sleep(&[], Some(Duration::ZERO))?
                {
                    return Ok(true);
                }
                pauses += 1;
                if step == IdleStep::Pause {
                    self.pause();
                }
                continue;
            }
            let bell = sleeper::thread_bell()?;
            bell.arm();
            core.waiters.enter(Arc::clone(&bell), sockets);
            let found = if has_threads {
                drop(core);
                sleeper.sleep(&[bell.as_fd()], remaining)
            } else {
                self.sleep_as(is_led, core, &bell, remaining, sleeper)
            };
            self.lock().waiters.leave(&bell);
            bell.disarm();
            if found? {
                return Ok(true);
            }
        }
    }

    /// Pauses while nothing arrives, and reports to the engine if other threads used the
    /// processor meanwhile.
    pub(crate) fn pause(&self) {
        if let Some(contention) = engine::pause() {
            self.lock().engine.on_cpu_contention(contention);
        }
    }

    /// Makes the stack of an opened engine; on a secondary core with the stack of the primary one.
    pub(crate) fn new(
        mut engine: Engine,
        claims: PortClaims,
        meter: Option<Box<LockMeter>>,
        primary: Option<Arc<EmbeddedStack>>,
    ) -> io::Result<Self> {
        let wake_fds = engine.wake_fds()?;
        let has_share = engine.gate().settings().config().cpu_share_percent < 100;
        let idle = has_share.then(IdleDetector::start).transpose()?;
        let measures_lock = meter.is_some();
        let core = EmbeddedCore::new(engine, claims, meter);
        let (core, waiting) = (Mutex::new(core), AtomicU32::new(0));
        Ok(Self { core, waiting, measures_lock, wake_fds, idle, primary })
    }

    #[inline]
    pub(crate) fn lock(&self) -> EmbeddedGuard<'_> {
        batch_scope::assert_inactive();
        if self.measures_lock {
            return EmbeddedGuard::new(self.lock_counted());
        }
        EmbeddedGuard::new(self.try_lock().unwrap_or_else(|| self.wait_for_lock()))
    }

    #[inline]
    fn try_lock(&self) -> Option<MutexGuard<'_, EmbeddedCore>> {
        match self.core.try_lock() {
            Ok(core) => Some(core),
            // A thread that panicked while it held the lock left the engine between two packets,
            // where its state is consistent.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    #[cold]
    fn wait_for_lock(&self) -> MutexGuard<'_, EmbeddedCore> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        core
    }

    /// Lets a thread that waits for the lock take it, for a limited time. A thread that locks the
    /// stack again and again would otherwise take it before a thread that has to wake up first. The
    /// caller does not hold the lock.
    pub(super) fn hand_over_lock(&self) {
        let before = self.waiting.load(Ordering::Relaxed);
        if before == 0 {
            return;
        }
        for _ in 0..MAX_HAND_OVER_YIELDS {
            std::thread::yield_now();
            if self.waiting.load(Ordering::Relaxed) < before {
                return;
            }
        }
    }

    #[cold]
    fn lock_counted(&self) -> MutexGuard<'_, EmbeddedCore> {
        let (mut core, found_taken) = match self.try_lock() {
            Some(core) => (core, None),
            None => {
                let found_taken = ContentionStart::now();
                (self.wait_for_lock(), Some(found_taken))
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

    /// Sleeps as a follower until `bell` is rung or the timeout expires if the thread `is_led`, else
    /// like [`EmbeddedStack::sleep_with`].
    fn sleep_as(
        &self,
        is_led: bool,
        mut core: EmbeddedGuard<'_>,
        bell: &Arc<Doorbell>,
        limit: Option<Duration>,
        sleeper: &mut dyn Sleeper,
    ) -> io::Result<bool> {
        if !is_led || !core.followers.enter(bell) {
            return self.sleep_with(core, bell, limit, sleeper);
        }
        drop(core);
        let found = sleeper.sleep(&[bell.as_fd()], limit);
        self.lock().followers.leave(bell);
        found
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
        let boost = core.engine.is_beside_cpu_bound().then(|| WakeBoost::raise(&mut core.engine));
        drop(core);
        let slept = self.sleep_for(sleep, bell, limit, sleeper);
        drop(boost);
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

thread_local! {
    static BOOST: RefCell<PriorityBoost> = RefCell::default();
}

/// Boost of the calling thread while it sleeps, so that it wakes at once. Ends before the program
/// runs its own code.
struct WakeBoost;

impl WakeBoost {
    fn raise(engine: &mut Engine) -> Self {
        let now_ns = engine.read_clock();
        BOOST.with_borrow_mut(|boost| boost.raise(now_ns));
        Self
    }
}

impl Drop for WakeBoost {
    fn drop(&mut self) {
        BOOST.with_borrow_mut(PriorityBoost::lower);
    }
}

#[cfg(test)]
mod tests {
    use tidegate_device::mem::{MemConfig, wire};

    use crate::{AddressProbe, Net, NetConfig, UdpSocket};

    #[test]
    fn one_of_the_waiting_threads_leads() {
        let (device, _peer) = wire(&MemConfig::default()).unwrap();
        let config = NetConfig::new(device)
            .address("192.0.2.1/24".parse().unwrap())
            .address_probe(AddressProbe::Off);
        let net = Net::open(config).unwrap();
        let sockets: Vec<_> =
            (0..5).map(|n| UdpSocket::bind(&net, ("192.0.2.1", 7000 + n)).unwrap()).collect();
        let sleeping = || net.embedded().unwrap().lock().followers.sleeping();
        std::thread::scope(|scope| {
            for socket in &sockets {
                scope.spawn(|| socket.recv_from(&mut [0; 16]).unwrap());
            }
            while sleeping() != (1, 4) {
                std::thread::yield_now();
            }
            for (n, socket) in sockets.iter().enumerate() {
                socket.send_to(b"end", ("192.0.2.1", 7000 + n as u16)).unwrap();
            }
        });
        assert_eq!(sleeping(), (0, 0));
    }
}
