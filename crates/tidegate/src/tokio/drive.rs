//! Task that drives a stack for other tasks.

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
use tidegate_engine::{IdleStep, SleepPlan};
use tidegate_memory::Doorbell;

#[cfg(feature = "attach")]
use crate::backend::attached::stack::AttachedStack;
use crate::backend::embedded::core::EmbeddedCore;
use crate::backend::embedded::stack::EmbeddedStack;
use crate::net::handle::Net;

/// Most rounds before other tasks run, although frames still arrive.
const MAX_ROUNDS_PER_POLL: usize = 4;

/// Drives the stack for the tasks that wait for its sockets, until the stack fails or the future
/// is dropped. Spawn it once for each [`Net`], on a runtime with I/O enabled. It sleeps while
/// nothing happens.
///
/// With a dedicated thread of the stack it only waits for a failure of that thread.
///
/// # Errors
/// When the device has failed, or the daemon has exited.
///
/// # Examples
/// ```no_run
/// use tidegate::Net;
/// use tidegate::tokio::{TcpListener, drive};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// let net = Net::attach("/run/tidegate/tidegate.sock", "my-server")?;
/// tokio::spawn(drive(net.clone()));
/// let listener = TcpListener::bind(&net, "0.0.0.0:80")?;
/// let (_stream, peer) = listener.accept().await?;
/// println!("connection from {peer}");
/// # Ok(())
/// # }
/// ```
pub async fn drive(net: Net) -> io::Result<()> {
    #[cfg(feature = "attach")]
    if let Some(attached) = net.attached() {
        return drive_attached(attached).await;
    }
    let Some(shared) = net.embedded() else { return Ok(()) };
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

/// Takes the daemon's notifications, and wakes the tasks that they concern.
#[cfg(feature = "attach")]
async fn drive_attached(attached: &AttachedStack) -> io::Result<()> {
    let connection = watch(attached.wake_fd()?)?;
    loop {
        if attached.lock().prepare_sleep()? {
            connection.readable().await?.clear_ready();
        }
        attached.lock().finish_sleep()?;
        // Woken tasks run first.
        yield_now().await;
    }
}

struct Driver {
    shared: Arc<EmbeddedStack>,
    bell: Arc<Doorbell>,
    /// Descriptors to wait for, by their use.
    device: Option<AsyncFd<OwnedFd>>,
    others: Vec<AsyncFd<OwnedFd>>,
    timer: AsyncFd<OwnedFd>,
}

#[allow(deprecated, reason = "what it is deprecated for cannot happen to an owned descriptor")]
fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}

impl Driver {
    fn new(shared: Arc<EmbeddedStack>) -> io::Result<Self> {
        let bell = Arc::new(Doorbell::new()?);
        let fds = shared.lock().engine.wake_fds()?;
        let rung = bell.as_fd().try_clone_to_owned()?;
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        Ok(Self {
            bell,
            device: fds.device.map(watch).transpose()?,
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
            match self.run_rounds()? {
                // Woken tasks run first.
                IdleStep::Spin | IdleStep::Pause => yield_now().await,
                IdleStep::Sleep => self.sleep().await?,
            }
        }
    }

    fn poll_failure(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut core = self.shared.lock();
        match &core.failure {
            Some(failure) => Poll::Ready(Err(io::Error::new(failure.kind(), failure.to_string()))),
            None => {
                core.tasks.register_for_failure(context.waker());
                Poll::Pending
            }
        }
    }

    /// Runs the engine. Returns the way to wait for the next run.
    fn run_rounds(&self) -> io::Result<IdleStep> {
        let mut core = self.shared.lock();
        for _ in 0..MAX_ROUNDS_PER_POLL {
            core.flush_written();
            if core.run()? == 0 {
                break;
            }
            if core.tasks.has_woken() {
                return Ok(IdleStep::Spin);
            }
        }
        Ok(if core.tasks.has_woken() { IdleStep::Spin } else { core.engine.idle_step() })
    }

    /// Sleeps until the engine has work.
    async fn sleep(&self) -> io::Result<()> {
        let mut sleep_guard = None;
        poll_fn(|context| self.poll_sleep(context, &mut sleep_guard)).await
    }

    fn poll_sleep<'d>(
        &'d self,
        context: &mut Context<'_>,
        sleep_guard: &mut Option<SleepGuard<'d>>,
    ) -> Poll<io::Result<()>> {
        let sleep = match sleep_guard {
            Some(asleep) => {
                asleep.shared.lock().tasks.set_driver(Some(context.waker()));
                asleep.sleep
            }
            None => match SleepGuard::enter(self, context)? {
                Some(entered) => sleep_guard.insert(entered).sleep,
                None => return Poll::Ready(Ok(())),
            },
        };
        let mut woken = self.shared.lock().tasks.is_driver_woken;
        let device = self.device.iter().filter(|_| !sleep.receive_paused);
        for fd in device.chain(&self.others).chain([&self.timer]) {
            if let Poll::Ready(guard) = fd.poll_read_ready(context) {
                guard?.clear_ready();
                woken = true;
            }
        }
        if woken { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn set_timer(&self, timeout_ns: Option<u64>) -> io::Result<()> {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // A value of zero would stop the timer.
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
        // Data left to this driver is still sent.
        core.flush_written();
        let _ = core.flush_and_dispatch();
    }
}

/// Registration of the driver as a sleeper that will run the engine.
struct SleepGuard<'d> {
    shared: &'d Arc<EmbeddedStack>,
    bell: &'d Arc<Doorbell>,
    sleep: SleepPlan,
}

impl<'d> SleepGuard<'d> {
    /// Registers the driver; `None` when there is work.
    fn enter(driver: &'d Driver, context: &mut Context<'_>) -> io::Result<Option<Self>> {
        let Driver { shared, bell, .. } = driver;
        bell.arm();
        let mut core = shared.lock();
        core.tasks.set_driver(Some(context.waker()));
        if core.tasks.is_driver_woken || core.reader_groups.has_work() {
            return Ok(None);
        }
        let Some(sleep) = core.engine.prepare_sleep()? else { return Ok(None) };
        core.paused_sleeper = sleep.receive_paused.then(|| Arc::clone(bell));
        core.enter_sleep(bell, sleep.timeout_ns);
        drop(core);
        driver.set_timer(sleep.timeout_ns)?;
        Ok(Some(Self { shared, bell, sleep }))
    }
}

impl Drop for SleepGuard<'_> {
    fn drop(&mut self) {
        self.shared.lock().leave_sleep(self.bell);
        self.bell.disarm();
    }
}

impl EmbeddedCore {
    /// Queues the segments of data that tasks have written.
    fn flush_written(&mut self) {
        if std::mem::take(&mut self.tasks.is_driver_woken) {
            let now_ns = self.engine.read_clock();
            let (stack, arena, _) = self.engine.parts();
            stack.tcp_flush(now_ns, arena);
        }
    }
}
