//! Time at which the last datagram was received (`SIOCGSTAMP`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use tidegate_posix::control::real_time;

/// Nothing was received.
const NOTHING: u64 = 0;
/// A datagram was received before the application asked for times.
const UNKNOWN: u64 = 1;

/// Time of the last datagram that was read without its time as a control message. As at the kernel,
/// the first question turns the clock on, and is answered with the time of the question.
#[derive(Default)]
pub(crate) struct ReceiveTime {
    /// Nanoseconds since 1970, or one of the constants.
    last_ns: AtomicU64,
    is_kept: AtomicBool,
}

impl ReceiveTime {
    /// Called for each datagram, with its time on the monotonic clock.
    #[inline]
    pub(super) fn on_received(&self, received_ns: Option<u64>) {
        if self.is_kept.load(Ordering::Relaxed) {
            self.store(received_ns.map_or_else(now, real_time));
        } else if self.last_ns.load(Ordering::Relaxed) == NOTHING {
            self.last_ns.store(UNKNOWN, Ordering::Relaxed);
        }
    }

    /// Time since 1970 of the last datagram; `None` before the first one.
    pub(crate) fn get(&self) -> Option<Duration> {
        self.is_kept.store(true, Ordering::Relaxed);
        if self.last_ns.load(Ordering::Relaxed) == UNKNOWN {
            self.store(now());
        }
        match self.last_ns.load(Ordering::Relaxed) {
            NOTHING => None,
            ns => Some(Duration::from_nanos(ns)),
        }
    }

    fn store(&self, time: Duration) {
        self.last_ns.store(u64::try_from(time.as_nanos()).unwrap_or(UNKNOWN), Ordering::Relaxed);
    }
}

fn now() -> Duration {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_kept_from_the_first_question_on() {
        let time = ReceiveTime::default();
        assert_eq!(time.get(), None);
        let time = ReceiveTime::default();
        time.on_received(Some(1));
        let before = now();
        let first = time.get().unwrap();
        assert!(before <= first && first <= now());
        assert_eq!(time.get(), Some(first));
        time.on_received(Some(1));
        assert!(time.get().unwrap() < first, "the time of the datagram");
    }
}
