//! Processors of a thread that a network core has started.

use rustix::thread::CpuSet;

/// Lets the calling thread run on every processor, not only on the one that a network core is pinned
/// to. Errors are ignored: the thread then stays where it is.
pub fn run_on_every_processor() {
    let mut processors = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| processors.set(cpu));
    let _ = rustix::thread::sched_setaffinity(None, &processors);
}
