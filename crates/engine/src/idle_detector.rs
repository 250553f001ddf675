//! Detection of an idle processor.
//!
//! Mogul and Ramakrishnan let the idle thread re-enable input before the period of the CPU share
//! ends (section 7). Here, a thread of the process takes that part, in the `SCHED_IDLE` class. The
//! scheduler gives such a thread some time even on a busy core. The core therefore counts as idle
//! only when the thread runs at once after its wake-up.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use tidegate_memory::Doorbell;

use crate::{Clock, Priority};

/// Longest wake-up latency of the thread at which the core counts as idle.
const MAX_IDLE_WAKE_NS: u64 = 200_000;

/// Detector thread at idle priority, on the processors of the thread that created it.
#[derive(Debug)]
pub struct IdleDetector {
    state: Arc<DetectorState>,
}

#[derive(Debug)]
struct DetectorState {
    /// Rung to request a report.
    request: Doorbell,
    /// Rung when the core was idle after a request.
    idle: Doorbell,
    clock: Clock,
    /// Wake-up latency of the thread below which the core counts as idle.
    max_wake_ns: u64,
    /// Time of the last request, by the clock.
    requested_ns: AtomicU64,
    requested: AtomicBool,
    found_idle: AtomicBool,
    stop: AtomicBool,
}

impl IdleDetector {
    /// Starts the thread, which sleeps until the first request.
    ///
    /// # Errors
    /// If the process cannot create another thread or descriptor.
    pub fn start() -> io::Result<Self> {
        Self::start_with(MAX_IDLE_WAKE_NS)
    }

    fn start_with(max_wake_ns: u64) -> io::Result<Self> {
        let state = DetectorState {
            request: Doorbell::new()?,
            idle: Doorbell::new()?,
            clock: Clock::new(),
            max_wake_ns,
            requested_ns: AtomicU64::new(0),
            requested: AtomicBool::new(false),
            found_idle: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        };
        state.request.arm();
        let state = Arc::new(state);
        let detector = Arc::clone(&state);
        std::thread::Builder::new().name("idle-watch".to_owned()).spawn(move || detector.run())?;
        Ok(Self { state })
    }

    /// Requests a report: [`IdleDetector::idle_fd`] becomes readable when the core falls idle, until
    /// [`IdleDetector::finish`].
    pub fn request(&self) {
        self.state.idle.arm();
        self.state.requested_ns.store(self.state.clock.now_ns(), Ordering::Relaxed);
        self.state.requested.store(true, Ordering::Release);
        self.state.request.ring();
    }

    /// Descriptor that is readable once the core was idle after [`IdleDetector::request`].
    pub fn idle_fd(&self) -> BorrowedFd<'_> {
        self.state.idle.as_fd()
    }

    /// Ends the request. Returns true if the core was idle meanwhile.
    pub fn finish(&self) -> bool {
        self.state.requested.store(false, Ordering::Release);
        self.state.idle.disarm();
        self.state.found_idle.swap(false, Ordering::AcqRel)
    }
}

impl DetectorState {
    fn run(&self) {
        // Without SCHED_IDLE the thread cannot report. The CPU share is then kept on an idle core
        // too, which is slower but correct.
        if Priority::Idle.apply().is_err() {
            return;
        }
        while !self.stop.load(Ordering::Acquire) {
            if self.requested.swap(false, Ordering::AcqRel) {
                let requested_ns = self.requested_ns.load(Ordering::Relaxed);
                if self.clock.now_ns().saturating_sub(requested_ns) < self.max_wake_ns {
                    self.found_idle.store(true, Ordering::Release);
                    self.idle.ring();
                }
            }
            self.request.arm();
            if self.requested.load(Ordering::Acquire) || self.stop.load(Ordering::Acquire) {
                continue;
            }
            // A failed poll only repeats the loop.
            let _ = poll(&mut [PollFd::new(&self.request, PollFlags::IN)], None);
            self.request.disarm();
        }
    }
}

impl Drop for IdleDetector {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Release);
        // Not joined: on a core that is never idle, the thread ends late.
        self.state.request.ring();
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::Timespec;

    use super::*;

    /// True if the detector reports an idle core within a time.
    fn reports_within(detector: &IdleDetector, limit: Timespec) -> bool {
        let idle_fd = detector.idle_fd();
        poll(&mut [PollFd::new(&idle_fd, PollFlags::IN)], Some(&limit)).unwrap() == 1
    }

    /// However late a busy machine wakes the thread.
    #[test]
    fn reports_once_for_each_request() {
        let detector = IdleDetector::start_with(u64::MAX).unwrap();
        for _ in 0..3 {
            detector.request();
            assert!(reports_within(&detector, Timespec { tv_sec: 300, tv_nsec: 0 }));
            assert!(detector.finish());
            assert!(!detector.finish(), "the report was taken");
        }
    }

    #[test]
    fn a_core_that_wakes_the_thread_late_is_not_idle() {
        let detector = IdleDetector::start_with(0).unwrap();
        // The thread that takes the second request has processed the first.
        for _ in 0..2 {
            detector.request();
            while detector.state.requested.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        }
        assert!(!reports_within(&detector, Timespec::default()));
        assert!(!detector.finish());
    }
}
