//! Requests of the primary core that other cores close and open their queues, which it makes when
//! its process hands the interface over to another one.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::OpenDevice;

/// Request to one core.
pub(super) enum QueueRequest {
    /// To close its queue. The core goes on without one.
    Close,
    /// To open a queue.
    Open(OpenDevice),
}

/// Request to one core, and its result.
#[derive(Default)]
struct Slot {
    /// A request waits: read in each round, without the lock.
    is_pending: AtomicBool,
    request: Mutex<Option<QueueRequest>>,
    /// Result of the last request.
    result: Mutex<Option<io::Result<()>>>,
}

/// Requests to all cores.
pub(super) struct QueueRequests(Box<[Slot]>);

impl QueueRequests {
    pub(super) fn new(cores: usize) -> Self {
        Self((0..cores).map(|_| Slot::default()).collect())
    }

    /// Asks a core, which is to be woken then.
    pub(super) fn post(&self, core: usize, request: QueueRequest) {
        let slot = &self.0[core];
        *lock(&slot.result) = None;
        *lock(&slot.request) = Some(request);
        slot.is_pending.store(true, Ordering::Release);
    }

    /// True if a request to this core waits.
    #[inline]
    pub(super) fn is_pending(&self, core: usize) -> bool {
        self.0[core].is_pending.load(Ordering::Acquire)
    }

    /// Takes the request to this core.
    pub(super) fn take(&self, core: usize) -> Option<QueueRequest> {
        let slot = &self.0[core];
        slot.is_pending.store(false, Ordering::Release);
        lock(&slot.request).take()
    }

    /// Answers the request that a core has taken.
    pub(super) fn answer(&self, core: usize, result: io::Result<()>) {
        *lock(&self.0[core].result) = Some(result);
    }

    /// Takes the answer of a core; `None` until there is one.
    pub(super) fn answer_of(&self, core: usize) -> Option<io::Result<()>> {
        lock(&self.0[core].result).take()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A value is written as a whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
