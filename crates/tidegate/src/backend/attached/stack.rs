//! Attached stack, shared by the threads of the application.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate_engine::{IdleStep, pause, shorten_time_slice};
use tidegate_service::attachment::Attachment;

use super::attachments::SleepFds;
use super::core::{AttachedCore, daemon_exited};
use crate::backend::guard::StackGuard;
use crate::types::batch_scope;
use crate::types::deadline::Deadline;
use crate::types::sleeper::{self, PollSleeper, Sleeper};
use crate::types::socket_id::SocketId;

/// Pauses between two polls of the sleeper while the thread busy-polls the sockets.
const PAUSES_PER_SLEEPER_CHECK: u32 = 8;

/// Waits that end at once after the daemon has exited, so that applications see their errors
/// and clean up.
const IMMEDIATE_WAITS: u32 = 256;

/// Duration of later waits that find nothing but errors: an application that keeps such a
/// socket would spin forever.
const DELAYED_WAIT: Duration = Duration::from_millis(100);

thread_local! {
    /// Shortens the time slice of a thread at its first use.
    static SHORT_SLICE: () = {
        // A kernel that refuses lets this thread wait longer beside CPU-bound threads.
        let _ = shorten_time_slice();
    };
}

/// Attached stack, shared by the threads of the application.
pub(crate) struct AttachedStack {
    core: Mutex<AttachedCore>,
    began: Instant,
}

impl AttachedStack {
    pub(crate) fn new(attachment: Attachment) -> io::Result<Self> {
        let core = AttachedCore::new(attachment)?;
        Ok(Self { core: Mutex::new(core), began: Instant::now() })
    }

    pub(crate) fn lock(&self) -> StackGuard<'_, AttachedCore> {
        batch_scope::assert_inactive();
        // A thread that panicked while it held the lock was between two operations.
        StackGuard::new(self.core.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until `ready` returns a value or the deadline passes.
    pub(crate) fn wait_until<R>(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        mut ready: impl FnMut(&mut AttachedCore) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        let mut result = None;
        let found = self.wait_for_daemon(sockets, deadline, &mut PollSleeper, &mut |core| {
            result = ready(core);
            result.is_some()
        })?;
        match found {
            Some(_) => result.unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into())),
            None => ready(&mut self.lock()).unwrap_or_else(|| Err(daemon_exited())),
        }
    }

    /// Waits until `ready` returns true, or `sleeper` has found an event of its own. Returns
    /// `false` when the deadline passes. After the daemon exits every socket is ready, for its
    /// error, and the sleeper still finds its events.
    pub(crate) fn wait(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        sleeper: &mut dyn Sleeper,
        ready: &mut dyn FnMut(&mut AttachedCore) -> bool,
    ) -> io::Result<bool> {
        if let Some(found) = self.wait_for_daemon(sockets, deadline, sleeper, ready)? {
            return Ok(found);
        }
        let mut core = self.lock();
        let is_ready = ready(&mut core);
        core.waits_since_exit = core.waits_since_exit.saturating_add(1);
        let limit = match core.waits_since_exit {
            _ if !is_ready => None,
            ..=IMMEDIATE_WAITS => Some(Duration::ZERO),
            _ => Some(DELAYED_WAIT),
        };
        drop(core);
        let limit = limit.into_iter().chain(deadline.remaining()).min();
        Ok(sleeper.sleep(&[], limit)? || is_ready)
    }

    /// Like [`AttachedStack::wait`]; returns `None` when the daemon has exited.
    fn wait_for_daemon(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        sleeper: &mut dyn Sleeper,
        ready: &mut dyn FnMut(&mut AttachedCore) -> bool,
    ) -> io::Result<Option<bool>> {
        let mut pauses = 0;
        loop {
            let mut core = self.lock();
            if core.has_daemon_exited {
                return Ok(None);
            }
            core.waiters.forget_rung();
            core.attachments.wake_daemon_if_overdue();
            if core.check_ready(ready) {
                core.followers.on_wait_end(|| self.now_ns());
                return Ok(Some(true));
            }
            if core.poll_daemon().is_err() {
                return Ok(None);
            }
            if core.has_unchecked_change {
                let now_ns = self.now_ns();
                core.idle.on_work(now_ns);
                if core.check_ready(ready) {
                    core.followers.on_wait_end(|| self.now_ns());
                    return Ok(Some(true));
                }
            }
            core.attachments.wake_daemon_if_deferred();
            let shares_processor = core.attachments.note_processor(rustix::thread::sched_getcpu());
            let remaining = deadline.remaining();
            if remaining.is_some_and(|left| left.is_zero()) {
                let is_processor_wanted =
                    core.attachments.is_processor_wanted() && !core.filters_calls;
                drop(core);
                if is_processor_wanted {
                    // A program that busy-polls would keep the core from what it polls for.
                    std::thread::yield_now();
                }
                return sleeper.sleep(&[], Some(Duration::ZERO)).map(Some);
            }
            if core.has_unchecked_change {
                continue;
            }
            core.followers.on_wait(|| self.now_ns());
            let is_led = core.followers.are_led(core.waiters.has_rung());
            let step = match shares_processor || is_led || core.filters_calls {
                // The core can only run while this thread sleeps.
                true => IdleStep::Sleep,
                false => core.idle.step(self.now_ns()),
            };
            if step != IdleStep::Sleep {
                drop(core);
                if pauses % PAUSES_PER_SLEEPER_CHECK == 0
                    && sleeper.sleep(&[], Some(Duration::ZERO))?
                {
                    return Ok(Some(true));
                }
                pauses += 1;
                if let Some(contention) = pause() {
                    if contention.is_cpu_bound {
                        SHORT_SLICE.with(|()| ());
                    }
                    self.lock().idle.on_cpu_contention(self.now_ns(), contention);
                }
                continue;
            }
            match self.sleep(core, is_led, sockets, remaining, sleeper)? {
                Some(false) => {}
                ended => return Ok(ended),
            }
        }
    }

    /// Sleeps until the daemon sends a notification for one of the sockets, or for `limit`; as a
    /// follower of another thread if it `is_led`. Returns true if `sleeper` has found an event, and
    /// `None` when the daemon has exited.
    fn sleep(
        &self,
        mut core: StackGuard<'_, AttachedCore>,
        is_led: bool,
        sockets: &[SocketId],
        limit: Option<Duration>,
        sleeper: &mut dyn Sleeper,
    ) -> io::Result<Option<bool>> {
        let bell = sleeper::thread_bell()?;
        bell.arm();
        core.waiters.enter(Arc::clone(&bell), sockets);
        if is_led && core.followers.enter(&bell) {
            drop(core);
            let found = sleeper.sleep(&[bell.as_fd()], limit);
            let mut core = self.lock();
            core.followers.leave(&bell);
            core.waiters.leave(&bell);
            bell.disarm();
            return found.map(Some);
        }
        core.enter_leading();
        let prepared = core.attachments.prepare_sleep();
        let fds = core.attachments.sleep_fds();
        drop(core);
        let found = match (prepared, &fds) {
            (Ok(true), SleepFds::OfAttachment([woken, ended])) => {
                sleeper.sleep(&[woken.as_fd(), ended.as_fd(), bell.as_fd()], limit)
            }
            (Ok(true), SleepFds::Epoll(all)) => sleeper.sleep(&[all.as_fd(), bell.as_fd()], limit),
            // An exited daemon is detected after the sleep.
            (Ok(false) | Err(_), _) => Ok(false),
        };
        let mut core = self.lock();
        core.leave_leading();
        core.waiters.leave(&bell);
        bell.disarm();
        let woken = core.finish_sleep_on(&fds, matches!(found, Ok(true)));
        if let Ok(true) = woken {
            let now_ns = self.now_ns();
            core.idle.on_work(now_ns);
        }
        Ok(match found? {
            true => Some(true),
            false => woken.is_ok().then_some(false),
        })
    }

    /// Makes fewer kinds of system calls from now on: no locks, and no yields.
    pub(crate) fn prepare_system_call_filter(&self) {
        let mut core = self.lock();
        core.filters_calls = true;
        core.attachments.forgo_locks();
    }

    /// Defers the wake-ups of the daemon for the next `calls` calls, for a program that answers
    /// several events before its next wait.
    pub(crate) fn defer_wake_ups(&self, calls: u32) {
        if calls > 0 {
            self.lock().attachments.defer_wake_ups(calls);
        }
    }

    /// Copy of the descriptor that is readable when the daemon has sent a notification.
    #[cfg(feature = "tokio")]
    pub(crate) fn wake_fd(&self) -> io::Result<std::os::fd::OwnedFd> {
        self.lock().attachments.wake_fd().as_fd().try_clone_to_owned()
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
}
