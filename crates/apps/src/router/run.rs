//! Driving a router, in any mode of the gate.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tidegate_engine::{Clock, Idle, IdleConfig, Step as IdleStep};
use tidegate_gate::{Interrupt, Mode};
use tidegate_memory::Doorbell;

use super::forwarder::{Forwarder, Step};
use super::sys;

/// How often the stop flag is looked at while nothing comes.
const STOP_CHECK_NS: u64 = 100_000_000;
/// A thread that runs so soon after it was woken had nobody before it.
const AT_ONCE_NS: u64 = 200_000;
/// The packets of one turn of the lower half.
const LOWER_HALF_PACKETS: usize = 16;

/// Real-time priorities (`SCHED_FIFO`), so that packets come before programs as
/// they do in a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Priorities {
    /// Of the thread that receives, in the modes `interrupt` and `moderated`.
    pub receive: Option<i32>,
    /// Of the thread that does all else.
    pub protocol: Option<i32>,
}

/// Runs a router until `stop` is set.
///
/// # Errors
/// When a port is of no further use, or a priority is not granted.
pub fn run(forwarder: &mut Forwarder, priorities: Priorities, stop: &AtomicBool) -> io::Result<()> {
    let mode = forwarder.gate().settings().config().mode;
    if mode.has_input_queue() {
        return run_in_halves(forwarder, priorities, stop);
    }
    if let Some(priority) = priorities.protocol {
        sys::run_at_real_time_priority(priority)?;
    }
    let share = forwarder.gate().settings().config().cpu_share_percent;
    if share >= 100 {
        return Polling::new(forwarder, None)?.run(stop);
    }
    let idle = IdleWatch::new()?;
    thread::scope(|scope| {
        scope.spawn(|| idle.watch(stop));
        let result = Polling::new(forwarder, Some(&idle)).and_then(|polling| polling.run(stop));
        idle.end();
        result
    })
}

/// The polling loop.
struct Polling<'a> {
    forwarder: &'a mut Forwarder,
    port_fds: Vec<OwnedFd>,
    screen_fd: Option<(u64, OwnedFd)>,
    idle: Idle,
    idle_watch: Option<&'a IdleWatch>,
}

impl<'a> Polling<'a> {
    fn new(forwarder: &'a mut Forwarder, idle_watch: Option<&'a IdleWatch>) -> io::Result<Self> {
        let port_fds = forwarder.port_fds()?;
        let idle = Idle::new(IdleConfig::default(), forwarder.read_clock());
        Ok(Self { forwarder, port_fds, screen_fd: None, idle, idle_watch })
    }

    fn run(mut self, stop: &AtomicBool) -> io::Result<()> {
        let dedicated = self.forwarder.gate().settings().config().mode == Mode::Dedicated;
        while !stop.load(Ordering::Relaxed) {
            self.forwarder.look_everywhere();
            let (moved, held_until_ns) = self.turns(stop)?;
            let now_ns = self.forwarder.read_clock();
            self.forwarder.serve_timers();
            if moved {
                self.idle.on_work(now_ns);
            }
            if held_until_ns.is_some() {
                self.sleep(held_until_ns)?;
                continue;
            }
            match self.idle.step(now_ns) {
                IdleStep::Sleep if !dedicated => self.sleep(None)?,
                IdleStep::Spin | IdleStep::Sleep => std::hint::spin_loop(),
                IdleStep::Pause => (0..32).for_each(|_| std::hint::spin_loop()),
            }
        }
        Ok(())
    }

    /// Serves turns until there is nothing to do. Returns whether packets
    /// moved, and until when receiving is held back.
    fn turns(&mut self, stop: &AtomicBool) -> io::Result<(bool, Option<u64>)> {
        let mut moved = false;
        while !stop.load(Ordering::Relaxed) {
            match self.forwarder.step()? {
                Step::Served(packets) => moved |= packets > 0,
                Step::Yield => thread::yield_now(),
                Step::Wait(held_until_ns) => return Ok((moved, held_until_ns)),
            }
            self.forwarder.serve_timers();
        }
        Ok((moved, None))
    }

    /// Sleeps until there is something to do; held back, packets are nothing
    /// to do.
    fn sleep(&mut self, held_until_ns: Option<u64>) -> io::Result<()> {
        let Some(timeout_ns) = self.forwarder.prepare_sleep(held_until_ns)? else { return Ok(()) };
        self.follow_screen()?;
        let watch = self.idle_watch.filter(|_| held_until_ns.is_some());
        if let Some(watch) = watch {
            watch.begin();
        }
        let ports = if held_until_ns.is_some() { &[][..] } else { &self.port_fds };
        let screen = self.screen_fd.as_ref().map(|(_, fd)| fd.as_fd());
        let lifted = watch.map(|watch| watch.lifted.as_fd());
        let fds = ports.iter().map(AsFd::as_fd).chain(screen).chain(lifted);
        wait_for(fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect(), timeout_ns)?;
        if watch.is_some_and(IdleWatch::finish) {
            let now_ns = self.forwarder.read_clock();
            self.forwarder.gate().on_idle_processor(now_ns);
        }
        Ok(())
    }

    fn follow_screen(&mut self) -> io::Result<()> {
        let connection = self.forwarder.screen_connection();
        if self.screen_fd.as_ref().map_or(0, |&(known, _)| known) != connection {
            self.screen_fd = self.forwarder.screen_fd()?;
        }
        Ok(())
    }
}

fn wait_for(mut fds: Vec<PollFd<'_>>, timeout_ns: u64) -> io::Result<()> {
    let timeout_ns = timeout_ns.min(STOP_CHECK_NS);
    let timeout = Timespec {
        tv_sec: (timeout_ns / 1_000_000_000) as i64,
        tv_nsec: (timeout_ns % 1_000_000_000) as i64,
    };
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Finds out whether anybody else wants the processor: a thread that the
/// scheduler runs only when nobody does. Since it gives such threads a little
/// time all the same, only one that comes to run at once has found an idle
/// processor.
struct IdleWatch {
    clock: Clock,
    /// When receiving began to be held back.
    since_ns: AtomicU64,
    /// Rung while receiving is held back, so that the thread wants to run.
    held: Doorbell,
    /// Rung by the thread when it came to run.
    lifted: Doorbell,
    wanted: AtomicBool,
    found: AtomicBool,
    ended: AtomicBool,
}

impl IdleWatch {
    fn new() -> io::Result<Self> {
        Ok(Self {
            clock: Clock::new(),
            since_ns: AtomicU64::new(0),
            held: Doorbell::new()?,
            lifted: Doorbell::new()?,
            wanted: AtomicBool::new(false),
            found: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        })
    }

    /// Receiving is held back from now on.
    fn begin(&self) {
        self.lifted.arm();
        self.since_ns.store(self.clock.now_ns(), Ordering::Relaxed);
        self.wanted.store(true, Ordering::Release);
        self.held.ring();
    }

    /// It is not any more; returns whether the processor was idle meanwhile.
    fn finish(&self) -> bool {
        self.wanted.store(false, Ordering::Release);
        self.lifted.disarm();
        self.found.swap(false, Ordering::AcqRel)
    }

    fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.held.ring();
    }

    /// The thread. It inherits the core of the one that started it.
    fn watch(&self, stop: &AtomicBool) {
        if sys::run_when_idle().is_err() {
            // Without it the share is kept to also when nobody gains by that.
            return;
        }
        while !stop.load(Ordering::Relaxed) && !self.ended.load(Ordering::Acquire) {
            self.held.arm();
            if self.wanted.swap(false, Ordering::AcqRel) {
                let waited_ns = self.clock.now_ns() - self.since_ns.load(Ordering::Relaxed);
                if waited_ns < AT_ONCE_NS {
                    self.found.store(true, Ordering::Release);
                    self.lifted.ring();
                }
            } else {
                let fds = vec![PollFd::new(&self.held, PollFlags::IN)];
                if wait_for(fds, STOP_CHECK_NS).is_err() {
                    return;
                }
            }
            self.held.disarm();
        }
    }
}

/// What the halves share.
struct Halves<'a> {
    forwarder: Mutex<&'a mut Forwarder>,
    /// The upper half has put something into the input queue.
    input: Condvar,
}

impl<'a> Halves<'a> {
    fn lock(&self) -> MutexGuard<'_, &'a mut Forwarder> {
        self.forwarder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Receiving in a thread of its own, above the protocol work.
fn run_in_halves(
    forwarder: &mut Forwarder,
    priorities: Priorities,
    stop: &AtomicBool,
) -> io::Result<()> {
    let port_fds = forwarder.port_fds()?;
    let halves = Halves { forwarder: Mutex::new(forwarder), input: Condvar::new() };
    thread::scope(|scope| {
        let upper = scope.spawn(|| {
            let result = upper_half(&halves, &port_fds, priorities.receive, stop);
            // Either half alone is of no use.
            stop_on_error(result, &halves, stop)
        });
        let lower = match priorities.protocol.map_or(Ok(()), sys::run_at_real_time_priority) {
            Ok(()) => lower_half(&halves, stop),
            Err(error) => Err(error),
        };
        let lower = stop_on_error(lower, &halves, stop);
        let upper = upper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        lower.and(upper)
    })
}

fn stop_on_error(result: io::Result<()>, halves: &Halves<'_>, stop: &AtomicBool) -> io::Result<()> {
    if result.is_err() {
        stop.store(true, Ordering::Relaxed);
        halves.input.notify_all();
    }
    result
}

/// The interrupt handler of each card: takes frames as long as they come.
fn upper_half(
    halves: &Halves<'_>,
    port_fds: &[OwnedFd],
    priority: Option<i32>,
    stop: &AtomicBool,
) -> io::Result<()> {
    if let Some(priority) = priority {
        sys::run_at_real_time_priority(priority)?;
    }
    while !stop.load(Ordering::Relaxed) {
        let (taken, ready, next_ns) = {
            let mut forwarder = halves.lock();
            let now_ns = forwarder.read_clock();
            let limit = match forwarder.gate().on_interrupt(now_ns, 0) {
                Interrupt::Take { limit } => limit,
                Interrupt::StartPolling => u32::MAX,
            };
            let taken = forwarder.take_in(limit)?;
            let next_ns = forwarder.gate().next_interrupt_ns(now_ns).saturating_sub(now_ns);
            let ready = taken == 0 && forwarder.prepare_sleep(None)?.is_some();
            (taken, ready, next_ns)
        };
        if taken > 0 {
            halves.input.notify_one();
        }
        if next_ns > 0 {
            // No interrupt before then.
            thread::sleep(Duration::from_nanos(next_ns));
        } else if ready {
            let fds = port_fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN));
            wait_for(fds.collect(), STOP_CHECK_NS)?;
        }
    }
    Ok(())
}

/// The protocol work, whenever the upper half lets it run.
fn lower_half(halves: &Halves<'_>, stop: &AtomicBool) -> io::Result<()> {
    let mut screen_fd: Option<(u64, OwnedFd)> = None;
    while !stop.load(Ordering::Relaxed) {
        let mut forwarder = halves.lock();
        if forwarder.process_input(LOWER_HALF_PACKETS)? > 0 {
            continue;
        }
        let connection = forwarder.screen_connection();
        if screen_fd.as_ref().map_or(0, |&(known, _)| known) != connection {
            screen_fd = forwarder.screen_fd()?;
        }
        if forwarder.has_input() {
            continue;
        }
        match &screen_fd {
            // Verdicts and packets both wake it up; packets by a short wait,
            // since one thread cannot sleep on a descriptor and on a lock.
            Some((_, fd)) => {
                drop(forwarder);
                wait_for(vec![PollFd::new(fd, PollFlags::IN)], 50_000)?;
            }
            None => {
                let limit = Duration::from_millis(10);
                // Whether it was woken or not, it looks.
                let _ = halves.input.wait_timeout(forwarder, limit);
            }
        }
    }
    Ok(())
}
