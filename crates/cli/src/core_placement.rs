//! Threads of network cores and readers, and their processors.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tidegate_device::sharded::MAX_CORES;

use crate::Failure;
use crate::host::pin_to;

/// Checks a number of network cores.
pub(crate) fn check_cores(cores: usize) -> Result<(), Failure> {
    if !(1..=MAX_CORES).contains(&cores) {
        return Err(format!("--cores {cores}: give 1 to {MAX_CORES}").into());
    }
    Ok(())
}

/// Checks that threads may run on these processors.
pub(crate) fn check_cpus(flag: &'static str, cpus: &[usize]) -> Result<(), Failure> {
    for &cpu in cpus {
        // On a separate thread, so that the affinity of this thread does not change.
        let result = thread::spawn(move || pin_to(cpu).map_err(|error| format!("{flag}: {error}")));
        result.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    }
    Ok(())
}

/// Pins the calling thread to its processor, if `cpus` names any.
pub(crate) fn pin_thread(what: &str, cpus: &[usize], number: usize) {
    // Each processor was tried when the command started.
    if let Some(Err(error)) = cpus.iter().cycle().nth(number).map(|&cpu| pin_to(cpu)) {
        tracing::warn!("{what} {number}: {error}");
    }
}

/// Calls `serve` for each network core, on a thread of its own if there are several. All end
/// together, also on an error.
pub(crate) fn run_on_cores<C: Send>(
    mut cores: Vec<C>,
    cpus: &[usize],
    stop: &AtomicBool,
    serve: impl Fn(C) -> io::Result<()> + Sync,
) -> io::Result<()> {
    if cores.len() == 1
        && let Some(core) = cores.pop()
    {
        pin_thread("network core", cpus, 0);
        return serve(core);
    }
    thread::scope(|scope| {
        let start = |(number, core)| {
            let serve = &serve;
            scope.spawn(move || {
                pin_thread("network core", cpus, number);
                let result = serve(core);
                stop.store(true, Ordering::Relaxed);
                result
            })
        };
        let threads: Vec<_> = cores.into_iter().enumerate().map(start).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, io::Result<()>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().try_for_each(join)
    })
}
