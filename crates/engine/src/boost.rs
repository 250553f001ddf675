//! Priority of a thread that handles packets beside CPU-bound threads.
//!
//! The scheduler shares the processor fairly: a thread that has used more than its share since it
//! last slept does not preempt when it wakes. It waits for a tick, some milliseconds. The kernel's
//! protocol work knows no such wait, because softirqs run on the time of whoever is interrupted.
//! A boost does the same for a thread in user space: it wakes at once, as long as it uses a
//! limited part of the processor.

use std::io;

use rustix::time::{ClockId, clock_gettime};

use crate::sys;

/// Nice value of a boosted thread: about nine times the weight of a thread with nice value 0.
const BOOSTED_NICE: i32 = -10;

/// A boost ends when the thread used more than this share of the processor, in percent.
const MAX_BOOSTED_PERCENT: u64 = 66;
/// A boost begins when the thread used less than this share, in percent.
const MIN_FREE_PERCENT: u64 = 60;

/// Time over which the use of the processor is measured, in nanoseconds.
const WINDOW_NS: u64 = 10_000_000;

/// Time slice of a thread that answers requests, in nanoseconds: the shortest that Linux grants.
const SHORT_SLICE_NS: u64 = 100_000;

/// Boost of one thread, within a budget of processor time.
///
/// Raises the priority only with permission (`CAP_SYS_NICE`). Without it the thread gets a short
/// time slice instead, which needs no permission.
#[derive(Debug, Default)]
pub struct PriorityBoost {
    budget: CpuBudget,
    /// Attributes of the thread before it was boosted.
    normal: Option<libc::sched_attr>,
    /// The kernel has refused.
    is_refused: bool,
}

impl PriorityBoost {
    /// Boosts the calling thread, or ends the boost when the budget is spent. Every call must be
    /// on the same thread.
    pub fn raise(&mut self, now_ns: u64) {
        if self.is_refused {
            return;
        }
        if !self.budget.is_left(now_ns, thread_cpu_ns) {
            return self.lower();
        }
        if self.normal.is_none() && self.try_raise().is_err() {
            self.is_refused = true;
            // Nothing more can be done.
            let _ = shorten_time_slice();
        }
    }

    /// Ends the boost when the budget is spent.
    pub fn check(&mut self, now_ns: u64) {
        if self.normal.is_some() && !self.budget.is_left(now_ns, thread_cpu_ns) {
            self.lower();
        }
    }

    /// Ends the boost.
    pub fn lower(&mut self) {
        if let Some(normal) = self.normal.take() {
            // Fails only without the permission that raised it: then the priority stays.
            // Without CAP_SYS_NICE a thread cannot clear the flag that the boost has set; it
            // only concerns threads that this thread starts.
            let kept_flag = libc::SCHED_FLAG_RESET_ON_FORK as u64;
            let with_flag =
                libc::sched_attr { sched_flags: normal.sched_flags | kept_flag, ..normal };
            let _ = sys::set_scheduling_attributes(&normal)
                .or_else(|_| sys::set_scheduling_attributes(&with_flag));
        }
    }

    fn try_raise(&mut self) -> io::Result<()> {
        let normal = sys::scheduling_attributes()?;
        if normal.sched_policy != libc::SCHED_OTHER as u32 || normal.sched_nice <= BOOSTED_NICE {
            // It has a higher priority already.
            return Ok(());
        }
        let boosted = libc::sched_attr {
            sched_nice: BOOSTED_NICE,
            // A shorter slice than that of the running thread lets a wake-up preempt at once.
            sched_runtime: SHORT_SLICE_NS,
            // Threads and processes that it starts begin without the boost.
            sched_flags: normal.sched_flags | libc::SCHED_FLAG_RESET_ON_FORK as u64,
            ..normal
        };
        sys::set_scheduling_attributes(&boosted)?;
        self.normal = Some(normal);
        Ok(())
    }
}

/// Processor time that a thread may use with a boost: a share of each window.
#[derive(Debug, Default)]
struct CpuBudget {
    /// Begin of the window, and processor time that the thread had used by then.
    window: Option<(u64, u64)>,
    is_left: bool,
}

impl CpuBudget {
    /// Returns true if the thread has budget left at `now_ns`. `cpu_ns` reads its processor time.
    fn is_left(&mut self, now_ns: u64, cpu_ns: impl FnOnce() -> u64) -> bool {
        let Some((begin_ns, begin_cpu_ns)) = self.window else {
            self.window = Some((now_ns, cpu_ns()));
            return false;
        };
        let elapsed_ns = now_ns.saturating_sub(begin_ns);
        if elapsed_ns < WINDOW_NS {
            return self.is_left;
        }
        let cpu_ns = cpu_ns();
        let used_percent = 100 * cpu_ns.saturating_sub(begin_cpu_ns) / elapsed_ns;
        self.window = Some((now_ns, cpu_ns));
        let max_percent = if self.is_left { MAX_BOOSTED_PERCENT } else { MIN_FREE_PERCENT };
        self.is_left = used_percent < max_percent;
        self.is_left
    }
}

/// Processor time that the calling thread has used, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Gives the calling thread the shortest time slice: when it wakes, it preempts a thread with a
/// longer slice, and each of its turns is shorter. Its share of the processor stays the same.
///
/// Linux before 6.12, and other scheduling policies than `SCHED_OTHER`, ignore the slice.
///
/// # Errors
/// If the kernel refuses, for example by a seccomp filter.
pub fn shorten_time_slice() -> io::Result<()> {
    let mut attributes = sys::scheduling_attributes()?;
    if attributes.sched_policy == libc::SCHED_OTHER as u32 {
        attributes.sched_runtime = SHORT_SLICE_NS;
        sys::set_scheduling_attributes(&attributes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn budget_is_a_share_of_each_window() {
        let mut budget = CpuBudget::default();
        // Processor time used by the end of each window, in milliseconds.
        let used_ms = [0, 5, 12, 18, 25, 32, 37];
        let left: Vec<bool> = (0u64..)
            .zip(used_ms)
            .map(|(window, used_ms)| budget.is_left(window * WINDOW_NS, || used_ms * MS))
            .collect();
        // 66 % ends a boost, and only less than 60 % begins another.
        assert_eq!(left, [false, true, false, false, false, false, true]);
    }

    #[test]
    fn reads_processor_time_once_for_each_window() {
        let mut budget = CpuBudget::default();
        let mut reads = 0;
        for now_ns in (0..5 * WINDOW_NS).step_by(MS as usize) {
            budget.is_left(now_ns, || {
                reads += 1;
                0
            });
        }
        assert_eq!(reads, 5);
    }

    #[test]
    fn boost_ends_with_the_priority_of_before() {
        std::thread::spawn(|| {
            let before = sys::scheduling_attributes().unwrap();
            let mut boost = PriorityBoost::default();
            boost.raise(0);
            assert_eq!(nice(), before.sched_nice, "its use of the processor is not known yet");
            // A short time on the clock of the budget is long on that of the thread: it used
            // little.
            boost.raise(1_000_000 * MS);
            if !boost.is_refused && before.sched_nice > BOOSTED_NICE {
                assert_eq!(nice(), BOOSTED_NICE);
                assert_eq!(std::thread::spawn(nice).join().unwrap(), 0, "not inherited");
            }
            boost.lower();
            assert_eq!(nice(), before.sched_nice);
            let after = sys::scheduling_attributes().unwrap();
            assert_eq!(after.sched_flags, before.sched_flags);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn time_slice_is_shortened_without_permission() {
        std::thread::spawn(|| {
            let nice_before = nice();
            shorten_time_slice().unwrap();
            let attributes = sys::scheduling_attributes().unwrap();
            assert_eq!(attributes.sched_nice, nice_before);
            // Linux before 6.12 reports 0.
            assert!([0, SHORT_SLICE_NS].contains(&attributes.sched_runtime));
        })
        .join()
        .unwrap();
    }

    fn nice() -> i32 {
        sys::scheduling_attributes().unwrap().sched_nice
    }
}
