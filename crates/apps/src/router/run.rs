//! Drives a router in any mode of the gate.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tidegate_engine::{IdleConfig, IdleDetector, IdleGovernor, IdleStep, thread_cpu_ns};
use tidegate_gate::{InterruptAction, Mode};

use super::forwarder::{Forwarder, ForwarderStep};
use super::sys;

/// Interval at which the stop flag is checked while nothing arrives.
const STOP_CHECK_INTERVAL_NS: u64 = 100_000_000;
/// Packets that the protocol thread processes while it holds the lock.
const PROTOCOL_BATCH_PACKETS: usize = 16;

/// Real-time priorities (`SCHED_FIFO`), so that packets take precedence over applications as they
/// do in a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Priorities {
    /// Priority of the receive thread, in the modes `interrupt` and `moderated`.
    pub receive: Option<i32>,
    /// Priority of the thread that does all other work.
    pub protocol: Option<i32>,
}

impl Priorities {
    /// Gives the calling thread the highest of these priorities. It, and the threads that it starts,
    /// can take any of them from then on, also when the process has dropped its privileges.
    ///
    /// # Errors
    /// The process may not use real-time priorities.
    pub fn acquire(self) -> io::Result<()> {
        match self.receive.max(self.protocol) {
            Some(priority) => sys::set_real_time_priority(priority),
            None => Ok(()),
        }
    }
}

/// Runs a router until `stop` is set.
///
/// # Errors
/// When a device fails for good, another host has claimed an address of the router, or a priority is not granted.
pub fn run(forwarder: &mut Forwarder, priorities: Priorities, stop: &AtomicBool) -> io::Result<()> {
    let mode = forwarder.gate().settings().config().mode;
    if mode.has_input_queue() {
        return run_with_input_queue(forwarder, priorities, stop);
    }
    let mut idle = IdleConfig::default();
    if let Some(priority) = priorities.protocol {
        sys::set_real_time_priority(priority)?;
        // A thread that never sleeps is stopped by the scheduler for 50 ms of each second, since
        // Linux keeps 5 % for threads of ordinary priority, and packets are lost meanwhile.
        idle = idle.spin_ns(0).pause_ns(0).max_gap_ns(0).max_linger_ns(0);
    }
    PollLoop::new(forwarder, idle)?.run(stop)
}

/// Poll loop of the modes without an input queue.
struct PollLoop<'a> {
    forwarder: &'a mut Forwarder,
    device_fds: Vec<OwnedFd>,
    filter_fd: Option<(u64, OwnedFd)>,
    idle_governor: IdleGovernor,
    /// Only with a CPU share.
    idle_detector: Option<IdleDetector>,
    /// Processor time of the thread that the CPU share has been charged for.
    charged_ns: u64,
}

impl<'a> PollLoop<'a> {
    fn new(forwarder: &'a mut Forwarder, idle: IdleConfig) -> io::Result<Self> {
        let device_fds = forwarder.device_fds()?;
        let idle_governor = IdleGovernor::new(idle, forwarder.read_clock());
        let has_share = forwarder.gate().has_cpu_share();
        let idle_detector = has_share.then(IdleDetector::start).transpose()?;
        let charged_ns = thread_cpu_ns();
        Ok(Self {
            forwarder,
            device_fds,
            filter_fd: None,
            idle_governor,
            idle_detector,
            charged_ns,
        })
    }

    fn run(mut self, stop: &AtomicBool) -> io::Result<()> {
        let dedicated = self.forwarder.gate().settings().config().mode == Mode::Dedicated;
        while !stop.load(Ordering::Relaxed) {
            self.forwarder.mark_all_ready();
            let (moved, paused_until_ns) = self.serve_turns(stop)?;
            let now_ns = self.forwarder.read_clock();
            self.forwarder.serve_timers();
            if moved {
                self.idle_governor.on_work(now_ns);
            }
            self.charge_thread_time(now_ns);
            if paused_until_ns.is_some() {
                self.sleep(paused_until_ns)?;
                continue;
            }
            match self.idle_governor.step(now_ns) {
                IdleStep::Sleep if !dedicated => self.sleep(None)?,
                IdleStep::Spin | IdleStep::Sleep => std::hint::spin_loop(),
                IdleStep::Pause => (0..32).for_each(|_| std::hint::spin_loop()),
            }
        }
        Ok(())
    }

    /// Serves turns until nothing is left to do. Returns whether packets moved, and until when
    /// receiving is paused.
    fn serve_turns(&mut self, stop: &AtomicBool) -> io::Result<(bool, Option<u64>)> {
        let mut moved = false;
        while !stop.load(Ordering::Relaxed) {
            match self.forwarder.step()? {
                ForwarderStep::Served(packets) => moved |= packets > 0,
                ForwarderStep::Yield => thread::yield_now(),
                ForwarderStep::Wait(paused_until_ns) => return Ok((moved, paused_until_ns)),
            }
            self.forwarder.serve_timers();
        }
        Ok((moved, None))
    }

    /// Charges what the thread took outside its turns: busy-polling, sleeping and waking up.
    fn charge_thread_time(&mut self, now_ns: u64) {
        if self.idle_detector.is_some() {
            let total_ns = thread_cpu_ns();
            self.forwarder.gate().replace_cpu_charges(now_ns, total_ns - self.charged_ns);
            self.charged_ns = total_ns;
        }
    }

    /// Sleeps until there is work. While receiving is paused, arriving packets do not count as
    /// work.
    fn sleep(&mut self, paused_until_ns: Option<u64>) -> io::Result<()> {
        let Some(timeout_ns) = self.forwarder.prepare_sleep(paused_until_ns)? else {
            return Ok(());
        };
        self.update_filter_fd()?;
        let detector = self.idle_detector.as_ref().filter(|_| paused_until_ns.is_some());
        if let Some(detector) = detector {
            detector.request();
        }
        let device_fds = if paused_until_ns.is_some() { &[][..] } else { &self.device_fds };
        let filter_fd = self.filter_fd.as_ref().map(|(_, fd)| fd.as_fd());
        let idle_fd = detector.map(IdleDetector::idle_fd);
        let fds = device_fds.iter().map(AsFd::as_fd).chain(filter_fd).chain(idle_fd);
        wait_readable(
            fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect(),
            timeout_ns,
        )?;
        if detector.is_some_and(IdleDetector::finish) {
            let now_ns = self.forwarder.read_clock();
            self.forwarder.gate().on_idle_processor(now_ns);
        }
        Ok(())
    }

    fn update_filter_fd(&mut self) -> io::Result<()> {
        let connection = self.forwarder.filter_connection();
        if self.filter_fd.as_ref().map_or(0, |&(known, _)| known) != connection {
            self.filter_fd = self.forwarder.filter_fd()?;
        }
        Ok(())
    }
}

fn wait_readable(mut fds: Vec<PollFd<'_>>, timeout_ns: u64) -> io::Result<()> {
    let timeout_ns = timeout_ns.min(STOP_CHECK_INTERVAL_NS);
    let timeout = Timespec {
        tv_sec: (timeout_ns / 1_000_000_000) as i64,
        tv_nsec: (timeout_ns % 1_000_000_000) as i64,
    };
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// State shared by the receive thread and the protocol thread.
struct SharedForwarder<'a> {
    forwarder: Mutex<&'a mut Forwarder>,
    /// Signalled when the receive thread has queued frames.
    input_queued: Condvar,
}

impl<'a> SharedForwarder<'a> {
    fn lock(&self) -> MutexGuard<'_, &'a mut Forwarder> {
        self.forwarder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the modes with an input queue: receiving in its own thread, above the protocol work.
fn run_with_input_queue(
    forwarder: &mut Forwarder,
    priorities: Priorities,
    stop: &AtomicBool,
) -> io::Result<()> {
    let device_fds = forwarder.device_fds()?;
    let shared = SharedForwarder { forwarder: Mutex::new(forwarder), input_queued: Condvar::new() };
    thread::scope(|scope| {
        let receive_thread = scope.spawn(|| {
            let result = receive_loop(&shared, &device_fds, priorities.receive, stop);
            // Neither thread is of use without the other.
            stop_on_error(result, &shared, stop)
        });
        let protocol_result = match priorities.protocol.map_or(Ok(()), sys::set_real_time_priority)
        {
            Ok(()) => protocol_loop(&shared, stop),
            Err(error) => Err(error),
        };
        let protocol_result = stop_on_error(protocol_result, &shared, stop);
        let receive_result =
            receive_thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        protocol_result.and(receive_result)
    })
}

fn stop_on_error(
    result: io::Result<()>,
    shared: &SharedForwarder<'_>,
    stop: &AtomicBool,
) -> io::Result<()> {
    if result.is_err() {
        stop.store(true, Ordering::Relaxed);
        shared.input_queued.notify_all();
    }
    result
}

/// Receive thread, in the role of the NICs' interrupt handlers: receives while frames arrive.
fn receive_loop(
    shared: &SharedForwarder<'_>,
    device_fds: &[OwnedFd],
    priority: Option<i32>,
    stop: &AtomicBool,
) -> io::Result<()> {
    if let Some(priority) = priority {
        sys::set_real_time_priority(priority)?;
    }
    while !stop.load(Ordering::Relaxed) {
        let (taken, ready, next_ns) = {
            let mut forwarder = shared.lock();
            let now_ns = forwarder.read_clock();
            let limit = match forwarder.gate().on_interrupt(now_ns, 0) {
                InterruptAction::Take { limit } => limit,
                InterruptAction::StartPolling => u32::MAX,
            };
            let taken = forwarder.receive_to_input_queue(limit)?;
            let next_ns = forwarder.gate().next_interrupt_ns(now_ns).saturating_sub(now_ns);
            let ready = taken == 0 && forwarder.prepare_sleep(None)?.is_some();
            (taken, ready, next_ns)
        };
        if taken > 0 {
            shared.input_queued.notify_one();
        }
        if next_ns > 0 {
            // Interrupts are moderated: none until then.
            thread::sleep(Duration::from_nanos(next_ns));
        } else if ready {
            let fds = device_fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN));
            wait_readable(fds.collect(), STOP_CHECK_INTERVAL_NS)?;
        }
    }
    Ok(())
}

/// Protocol thread: does the protocol work whenever the receive thread lets it run.
fn protocol_loop(shared: &SharedForwarder<'_>, stop: &AtomicBool) -> io::Result<()> {
    let mut filter_fd: Option<(u64, OwnedFd)> = None;
    while !stop.load(Ordering::Relaxed) {
        let mut forwarder = shared.lock();
        if forwarder.process_input_queue(PROTOCOL_BATCH_PACKETS)? > 0 {
            continue;
        }
        let connection = forwarder.filter_connection();
        if filter_fd.as_ref().map_or(0, |&(known, _)| known) != connection {
            filter_fd = forwarder.filter_fd()?;
        }
        if forwarder.has_input() {
            continue;
        }
        match &filter_fd {
            // Both verdicts and packets must wake this thread. A thread cannot sleep on a
            // descriptor and on a condition variable, so a short wait covers the packets.
            Some((_, fd)) => {
                drop(forwarder);
                wait_readable(vec![PollFd::new(fd, PollFlags::IN)], 50_000)?;
            }
            None => {
                let limit = Duration::from_millis(10);
                // Signalled or not, the loop checks for work.
                let _ = shared.input_queued.wait_timeout(forwarder, limit);
            }
        }
    }
    Ok(())
}
