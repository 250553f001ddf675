//! The task that runs a stack for other tasks.

use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Poll};

use ::tokio::io::Interest;
use ::tokio::io::unix::AsyncFd;
use ::tokio::task::yield_now;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tidegate_engine::{Sleep, Step};
use tidegate_memory::Doorbell;

use crate::Net;
use crate::attached::Attached;
use crate::net::{Core, Shared};

/// The most rounds before other tasks have a turn though frames still come.
const ROUNDS: usize = 4;

/// Runs the stack for the tasks that wait for its sockets, until it fails or
/// is dropped. To be spawned once for each [`Net`], on a runtime with I/O
/// enabled. It sleeps while nothing happens.
///
/// With a thread of the stack's own it only waits, for the thread to fail.
///
/// # Errors
/// When the port is of no further use.
pub async fn drive(net: Net) -> io::Result<()> {
    if let Some(attached) = net.attached() {
        return hear(attached).await;
    }
    let Some(shared) = net.here() else { return Ok(()) };
    let driver = Driver::new(Arc::clone(shared))?;
    let result = match net.has_threads() {
        true => poll_fn(|context| driver.poll_failure(context)).await,
        false => driver.run().await,
    };
    if let Err(error) = &result {
        let error = io::Error::new(error.kind(), error.to_string());
        driver.shared.lock().fail(error);
    }
    result
}

/// Hears what a daemon tells, and wakes the tasks that it concerns.
async fn hear(attached: &Attached) -> io::Result<()> {
    let connection = watch(attached.signal()?)?;
    loop {
        if attached.lock().prepare_sleep()? {
            connection.readable().await?.clear_ready();
        }
        attached.lock().wake_up()?;
        // Tasks that were woken have their turn.
        yield_now().await;
    }
}

struct Driver {
    shared: Arc<Shared>,
    bell: Arc<Doorbell>,
    /// What there is to wait for, by its use.
    port: Option<AsyncFd<OwnedFd>>,
    others: Vec<AsyncFd<OwnedFd>>,
    timer: AsyncFd<OwnedFd>,
}

#[allow(deprecated, reason = "what it is deprecated for cannot happen to an owned descriptor")]
fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}

impl Driver {
    fn new(shared: Arc<Shared>) -> io::Result<Self> {
        let bell = Arc::new(Doorbell::new()?);
        let fds = shared.lock().engine.wake_fds()?;
        let rung = bell.as_fd().try_clone_to_owned()?;
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        Ok(Self {
            bell,
            port: fds.port.map(watch).transpose()?,
            others: fds
                .neighbours
                .into_iter()
                .chain([rung])
                .map(watch)
                .collect::<Result<_, _>>()?,
            timer: watch(timer)?,
            shared,
        })
    }

    async fn run(&self) -> io::Result<()> {
        loop {
            match self.rounds()? {
                // Tasks that were woken have their turn.
                Step::Spin | Step::Pause => yield_now().await,
                Step::Sleep => self.sleep().await?,
            }
        }
    }

    fn poll_failure(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut core = self.shared.lock();
        match &core.failure {
            Some(failure) => Poll::Ready(Err(io::Error::new(failure.kind(), failure.to_string()))),
            None => {
                core.tasks.wait_for_failure(context.waker());
                Poll::Pending
            }
        }
    }

    /// Runs the engine, and says how to wait for the next time.
    fn rounds(&self) -> io::Result<Step> {
        let mut core = self.shared.lock();
        for _ in 0..ROUNDS {
            core.send_written();
            if core.run()? == 0 {
                break;
            }
            if core.tasks.has_woken() {
                return Ok(Step::Spin);
            }
        }
        Ok(if core.tasks.has_woken() { Step::Spin } else { core.engine.idle_step() })
    }

    /// Sleeps until there is something for the engine to do.
    async fn sleep(&self) -> io::Result<()> {
        let mut asleep = None;
        poll_fn(|context| self.poll_sleep(context, &mut asleep)).await
    }

    fn poll_sleep<'d>(
        &'d self,
        context: &mut Context<'_>,
        asleep: &mut Option<Asleep<'d>>,
    ) -> Poll<io::Result<()>> {
        let sleep = match asleep {
            Some(asleep) => {
                asleep.shared.lock().tasks.set_driver(Some(context.waker()));
                asleep.sleep
            }
            None => match Asleep::enter(self, context)? {
                Some(entered) => asleep.insert(entered).sleep,
                None => return Poll::Ready(Ok(())),
            },
        };
        let mut woken = self.shared.lock().tasks.driver_called;
        let port = self.port.iter().filter(|_| !sleep.held);
        for fd in port.chain(&self.others).chain([&self.timer]) {
            if let Poll::Ready(guard) = fd.poll_read_ready(context) {
                guard?.clear_ready();
                woken = true;
            }
        }
        if woken { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn set_timer(&self, timeout_ns: Option<u64>) -> io::Result<()> {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Zero would stop the timer.
        let value = timeout_ns.map_or(zero, |ns| Timespec {
            tv_sec: (ns.max(1) / 1_000_000_000) as i64,
            tv_nsec: (ns.max(1) % 1_000_000_000) as i64,
        });
        let spec = Itimerspec { it_interval: zero, it_value: value };
        timerfd_settime(self.timer.get_ref(), TimerfdTimerFlags::empty(), &spec)?;
        Ok(())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let mut core = self.shared.lock();
        core.tasks.set_driver(None);
        // What was left to it goes out all the same.
        core.send_written();
        let _ = core.send_and_tell();
    }
}

/// Somebody who sleeps and will run the engine then.
struct Asleep<'d> {
    shared: &'d Arc<Shared>,
    bell: &'d Arc<Doorbell>,
    sleep: Sleep,
}

impl<'d> Asleep<'d> {
    /// `None` when there is work.
    fn enter(driver: &'d Driver, context: &mut Context<'_>) -> io::Result<Option<Self>> {
        let Driver { shared, bell, .. } = driver;
        bell.arm();
        let mut core = shared.lock();
        core.tasks.set_driver(Some(context.waker()));
        if core.tasks.driver_called || core.groups.has_work() {
            return Ok(None);
        }
        let Some(sleep) = core.engine.prepare_sleep()? else { return Ok(None) };
        core.held = sleep.held.then(|| Arc::clone(bell));
        core.enter_sleep(bell, sleep.timeout_ns);
        drop(core);
        driver.set_timer(sleep.timeout_ns)?;
        Ok(Some(Self { shared, bell, sleep }))
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        self.shared.lock().leave_sleep(self.bell);
        self.bell.disarm();
    }
}

impl Core {
    /// Lets go what tasks have written.
    fn send_written(&mut self) {
        if std::mem::take(&mut self.tasks.driver_called) {
            let now_ns = self.engine.read_clock();
            let (stack, arena, _) = self.engine.parts();
            stack.tcp_flush(now_ns, arena);
        }
    }
}
