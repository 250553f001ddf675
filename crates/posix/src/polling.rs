//! The kernel's descriptors in a call that waits for Tidegate's as well.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use libc::{pollfd, timespec};

/// Interval at which the kernel is polled while Tidegate always has events.
const KERNEL_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Time-out of the kernel's waiting calls.
pub fn kernel_timeout(timeout: Duration) -> timespec {
    timespec {
        tv_sec: timeout.as_secs().min(i32::MAX as u64) as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    }
}

/// Polls `fds` and the descriptors of `wake` together by `poll`, which returns the number of ready
/// descriptors. Returns true if one of `fds` has an event.
///
/// # Errors
/// As `poll`.
pub fn poll_with_wake(
    fds: &mut Vec<pollfd>,
    wake: &[BorrowedFd<'_>],
    poll: impl FnOnce(&mut [pollfd]) -> io::Result<usize>,
) -> io::Result<bool> {
    let own_count = fds.len();
    let wake = wake.iter().map(AsRawFd::as_raw_fd);
    fds.extend(wake.map(|fd| pollfd { fd, events: libc::POLLIN, revents: 0 }));
    let found = poll(fds);
    let has_own_event = fds[..own_count].iter().any(|fd| fd.revents != 0);
    fds.truncate(own_count);
    found.map(|found| found > 0 && has_own_event)
}

/// Time of the last poll of the kernel, by threads that always find events of Tidegate.
#[derive(Default)]
pub struct KernelPolls(Mutex<Option<Instant>>);

impl KernelPolls {
    /// True if the kernel is to be polled now, which counts as a poll.
    pub fn are_due(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let is_due = last.is_none_or(|last| now.duration_since(last) >= KERNEL_POLL_INTERVAL);
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}
