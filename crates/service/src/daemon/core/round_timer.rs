//! Duration of a core's rounds, for experiments: a round during which other threads have the
//! processor counts without that time.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Instant;

/// Scheduling times of the calling thread: nanoseconds on a processor, nanoseconds runnable
/// without a processor, number of turns.
const SCHEDULING_FILE: &str = "/proc/thread-self/schedstat";

/// Timer of the rounds of one thread. A round costs two system calls more.
pub(super) struct RoundTimer {
    scheduling: File,
    began: Option<Moment>,
    longest_ns: u64,
}

#[derive(Clone, Copy)]
struct Moment {
    at: Instant,
    /// Time that the thread was runnable without a processor.
    delay_ns: u64,
}

impl RoundTimer {
    /// Timer of the calling thread.
    ///
    /// # Errors
    /// If the kernel does not report scheduling times (`CONFIG_SCHED_INFO`).
    pub(super) fn of_this_thread() -> io::Result<Self> {
        Ok(Self { scheduling: File::open(SCHEDULING_FILE)?, began: None, longest_ns: 0 })
    }

    /// Begins a round; ends the one in progress.
    pub(super) fn begin(&mut self) {
        let now = self.now();
        self.record(now);
        self.began = now;
    }

    /// Ends the round in progress: the core waits for work.
    pub(super) fn end(&mut self) {
        let now = self.now();
        self.record(now);
        self.began = None;
    }

    /// Longest round in nanoseconds: processor time, and time blocked in system calls.
    pub(super) fn longest_ns(&self) -> u64 {
        self.longest_ns
    }

    fn record(&mut self, now: Option<Moment>) {
        let (Some(began), Some(now)) = (self.began, now) else { return };
        let elapsed_ns = now.at.duration_since(began.at).as_nanos() as u64;
        let delay_ns = now.delay_ns.saturating_sub(began.delay_ns);
        self.longest_ns = self.longest_ns.max(elapsed_ns.saturating_sub(delay_ns));
    }

    fn now(&self) -> Option<Moment> {
        // The end of the system call is where other threads get the processor: with the time read
        // after it, their turn would count as part of the round.
        let at = Instant::now();
        let mut text = [0; 64];
        let len = self.scheduling.read_at(&mut text, 0).ok()?;
        let delay_ns = delay_ns(std::str::from_utf8(&text[..len]).ok()?)?;
        Some(Moment { at, delay_ns })
    }
}

/// Second number of a line of scheduling times.
fn delay_ns(line: &str) -> Option<u64> {
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_longest_round() {
        assert_eq!(delay_ns("12 345 6\n"), Some(345));
        assert_eq!(delay_ns("12\n"), None);
        let mut timer = RoundTimer::of_this_thread().unwrap();
        let at = Instant::now();
        let moment = |elapsed_ns, delay_ns| {
            Some(Moment { at: at + std::time::Duration::from_nanos(elapsed_ns), delay_ns })
        };
        timer.began = moment(0, 7);
        timer.record(moment(1000, 407));
        assert_eq!(timer.longest_ns(), 600);
        timer.record(moment(500, 7));
        assert_eq!(timer.longest_ns(), 600);
        timer.end();
        let longest = timer.longest_ns();
        timer.record(moment(u64::from(u32::MAX), 7));
        assert_eq!(timer.longest_ns(), longest, "no round is in progress");
    }
}
