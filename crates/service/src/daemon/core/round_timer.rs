//! Duration of a core's rounds, for experiments: processor time, and time blocked in system calls.
//! Time in which others have the processor does not count, be they threads or virtual machines.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use tidegate_engine::thread_cpu_ns;

/// Scheduling times of the calling thread: nanoseconds on a processor, nanoseconds runnable
/// without a processor, number of turns.
const SCHEDULING_FILE: &str = "/proc/thread-self/schedstat";
/// File with the number of times that the calling thread has blocked.
const STATUS_FILE: &str = "/proc/thread-self/status";
const VOLUNTARY_SWITCHES: &str = "\nvoluntary_ctxt_switches:";

/// Timer of the rounds of one thread. A round costs three system calls more.
pub(super) struct RoundTimer {
    scheduling: File,
    status: File,
    began: Option<Moment>,
    /// Last reading, which the next one refers to.
    last: Moment,
    longest_ns: u64,
}

#[derive(Clone, Copy)]
struct Moment {
    at: Instant,
    /// Processor time of the thread: without that of a hypervisor.
    cpu_ns: u64,
    /// Time that the thread was runnable without a processor.
    delay_ns: u64,
    /// Number of times that the thread was given a processor.
    turns: u64,
    /// Number of times that the thread has blocked.
    blocks: u64,
}

impl RoundTimer {
    /// Timer of the calling thread.
    ///
    /// # Errors
    /// If the kernel does not report scheduling times (`CONFIG_SCHED_INFO`).
    pub(super) fn of_this_thread() -> io::Result<Self> {
        let (scheduling, status) = (File::open(SCHEDULING_FILE)?, File::open(STATUS_FILE)?);
        let last = Moment { at: Instant::now(), cpu_ns: 0, delay_ns: 0, turns: 0, blocks: 0 };
        Ok(Self { scheduling, status, began: None, last, longest_ns: 0 })
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
        let round_ns = if now.blocks == began.blocks {
            now.cpu_ns.saturating_sub(began.cpu_ns)
        } else {
            let elapsed_ns = now.at.duration_since(began.at).as_nanos() as u64;
            elapsed_ns.saturating_sub(now.delay_ns.saturating_sub(began.delay_ns))
        };
        self.longest_ns = self.longest_ns.max(round_ns);
    }

    fn now(&mut self) -> Option<Moment> {
        // The end of a system call is where other threads get the processor: with the time read
        // after it, their turn would count as part of the round.
        let at = Instant::now();
        let cpu_ns = thread_cpu_ns();
        let mut text = [0; 64];
        let len = self.scheduling.read_at(&mut text, 0).ok()?;
        let (delay_ns, turns) = parse_scheduling(std::str::from_utf8(&text[..len]).ok()?)?;
        // A thread that has not lost the processor has not blocked.
        let is_same_turn = turns == self.last.turns;
        let blocks = if is_same_turn { self.last.blocks } else { self.read_blocks()? };
        self.last = Moment { at, cpu_ns, delay_ns, turns, blocks };
        Some(self.last)
    }

    fn read_blocks(&self) -> Option<u64> {
        let mut text = [0; 8192];
        let len = self.status.read_at(&mut text, 0).ok()?;
        parse_blocks(std::str::from_utf8(&text[..len]).ok()?)
    }
}

/// Second and third number of a line of scheduling times.
fn parse_scheduling(line: &str) -> Option<(u64, u64)> {
    let mut numbers = line.split_ascii_whitespace().skip(1);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn parse_blocks(status: &str) -> Option<u64> {
    let (_, rest) = status.split_once(VOLUNTARY_SWITCHES)?;
    rest.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn reads_scheduling_and_status() {
        assert_eq!(parse_scheduling("12 345 6\n"), Some((345, 6)));
        assert_eq!(parse_scheduling("12 345\n"), None);
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t42\nnonvoluntary_ctxt_switches:\t7\n";
        assert_eq!(parse_blocks(status), Some(42));
        assert_eq!(parse_blocks("Name:\tx\n"), None);
    }

    #[test]
    fn keeps_the_longest_round() {
        let mut timer = RoundTimer::of_this_thread().unwrap();
        let began = timer.now().unwrap();
        let moment = |elapsed_ns, cpu_ns, delay_ns, blocks| {
            Some(Moment {
                at: began.at + Duration::from_nanos(elapsed_ns),
                cpu_ns: began.cpu_ns + cpu_ns,
                delay_ns: began.delay_ns + delay_ns,
                turns: began.turns,
                blocks: began.blocks + blocks,
            })
        };
        timer.began = Some(began);
        timer.record(moment(10_000, 500, 400, 0));
        assert_eq!(timer.longest_ns(), 500, "others had the processor, or another machine");
        timer.record(moment(1_000, 100, 400, 1));
        assert_eq!(timer.longest_ns(), 600, "it has blocked for a while");
        timer.record(moment(500, 500, 0, 0));
        assert_eq!(timer.longest_ns(), 600);
        timer.end();
        let longest = timer.longest_ns();
        timer.record(moment(u64::from(u32::MAX), u64::from(u32::MAX), 7, 1));
        assert_eq!(timer.longest_ns(), longest, "no round is in progress");
    }

    #[test]
    fn time_in_a_blocking_call_counts() {
        let mut timer = RoundTimer::of_this_thread().unwrap();
        timer.begin();
        let time = Duration::from_millis(2);
        std::thread::sleep(time);
        timer.begin();
        assert!(timer.longest_ns() >= time.as_nanos() as u64, "{} ns", timer.longest_ns());
    }
}
