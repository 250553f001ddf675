//! Loop of `ff_run`: waiting between two calls of the program's function.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tidegate::{Interest, Source};

use crate::epoll::EpollSet;
use crate::sleeper::KernelWaiter;
use crate::socket::lock;
use crate::stack;

/// Longest time between two calls of the program's function, which may keep its own timers.
const MAX_WAIT: Duration = Duration::from_millis(1);

static IS_RUNNING: AtomicBool = AtomicBool::new(false);
static SETS: Mutex<Vec<Weak<EpollSet>>> = Mutex::new(Vec::new());

/// Adds a set to wait for.
pub(super) fn add(set: &Arc<EpollSet>) {
    let mut sets = lock(&SETS);
    sets.retain(|other| other.strong_count() > 0);
    sets.push(Arc::downgrade(set));
}

pub(super) fn start() {
    IS_RUNNING.store(true, Ordering::Relaxed);
}

pub(super) fn stop() {
    IS_RUNNING.store(false, Ordering::Relaxed);
}

pub(super) fn is_running() -> bool {
    IS_RUNNING.load(Ordering::Relaxed)
}

/// Runs the stack; waits until one of the sets has an event, if there are sets.
///
/// # Errors
/// When the device has failed, or a signal has arrived.
pub(super) fn wait_for_events() -> io::Result<()> {
    let net = stack::net()?;
    let sets: Vec<Arc<EpollSet>> = lock(&SETS).iter().filter_map(Weak::upgrade).collect();
    if sets.is_empty() {
        // The program looks at its sockets in its function.
        return net.run_once().map(|_| ());
    }
    let sources: Vec<(&dyn Source, Interest)> =
        sets.iter().map(|set| (set.poll() as &dyn Source, Interest::Readable)).collect();
    let mut kernel = KernelWaiter::new(Vec::new(), None, true);
    net.wait(&sources, Some(MAX_WAIT), &mut kernel).map(|_| ())
}
