//! Time limits of waiting calls.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Time limit of a wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Deadline {
    /// Do not wait.
    Now,
    /// Wait until this time.
    At(Instant),
    /// Wait without limit.
    Never,
}

/// Timeout shared by threads, initially none. Stored as whole milliseconds, as in kernel socket
/// options, to stay small: each stream has two.
pub(crate) struct SharedTimeout(AtomicU32);

impl SharedTimeout {
    pub(crate) const fn none() -> Self {
        Self(AtomicU32::new(u32::MAX))
    }

    pub(crate) fn get(&self) -> Option<Duration> {
        let ms = self.0.load(Ordering::Relaxed);
        (ms != u32::MAX).then(|| Duration::from_millis(ms.into()))
    }

    /// Sets the timeout, rounded up to milliseconds; above 49 days it is none.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a timeout of zero.
    pub(crate) fn set(&self, timeout: Option<Duration>) -> io::Result<()> {
        if timeout.is_some_and(|timeout| timeout.is_zero()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a timeout of zero is invalid: use set_nonblocking instead",
            ));
        }
        // Rounded up, never shorter than requested; more than 49 days is no timeout.
        let ms = timeout.map(|timeout| timeout.as_nanos().div_ceil(1_000_000));
        let ms = ms.and_then(|ms| u32::try_from(ms).ok());
        self.0.store(ms.unwrap_or(u32::MAX), Ordering::Relaxed);
        Ok(())
    }
}

impl Deadline {
    /// Deadline of a socket call: now if the socket is non-blocking, else after `timeout`.
    pub(crate) fn of_call(nonblocking: &AtomicBool, timeout: Option<Duration>) -> Self {
        match nonblocking.load(Ordering::Relaxed) {
            true => Self::Now,
            false => Self::after(timeout),
        }
    }

    pub(crate) fn after(timeout: Option<Duration>) -> Self {
        match timeout {
            Some(timeout) => Instant::now().checked_add(timeout).map_or(Self::Never, Self::At),
            None => Self::Never,
        }
    }

    /// Time from now to the deadline; `None` without limit.
    pub(crate) fn remaining(self) -> Option<Duration> {
        match self {
            Self::Now => Some(Duration::ZERO),
            Self::At(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
            Self::Never => None,
        }
    }
}
