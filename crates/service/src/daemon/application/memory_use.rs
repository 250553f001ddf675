//! Memory of an application's sockets: its quota, and memory that is discarded.
//!
//! The application can hold the lock of the memory's inode. So workers measure and discard the
//! memory, and a slot is free again once its memory is discarded. A command that needs the
//! outcome waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use crate::daemon::workers::{AppFd, WakeCores};
use crate::ipc::layout::SharedMemory;

/// Memory of an application's sockets.
pub(in crate::daemon) struct MemoryUse {
    /// Quota in bytes.
    max_bytes: u64,
    /// Bytes in use when they were last measured.
    used_bytes: u64,
    /// A measurement has ended that no command has used.
    is_current: bool,
    is_measuring: bool,
    /// Discards that have not ended.
    discards: Vec<Discard>,
    outcomes: mpsc::Receiver<Outcome>,
    outcome_sender: mpsc::Sender<Outcome>,
}

/// Slots whose memory a worker discards.
struct Discard {
    slots: Vec<u32>,
    /// Claimed by the worker that begins, or by an upgrade that cancels.
    is_claimed: Arc<AtomicBool>,
}

/// Outcome of a worker's job.
enum Outcome {
    /// The memory of these slots is discarded.
    Discarded(Vec<u32>),
    /// Bytes in use; `None` if they cannot be measured.
    Measured(Option<u64>),
}

impl MemoryUse {
    pub(super) fn new(max_bytes: u64) -> Self {
        let (outcome_sender, outcomes) = mpsc::channel();
        Self {
            max_bytes,
            used_bytes: 0,
            is_current: false,
            is_measuring: false,
            discards: Vec::new(),
            outcomes,
            outcome_sender,
        }
    }

    /// Bytes in use when they were last measured.
    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// True if the last measurement leaves memory for a socket.
    pub(super) fn is_within_quota(&self) -> bool {
        self.used_bytes < self.max_bytes || !self.is_limited()
    }

    /// True if there is a quota.
    pub(super) fn is_limited(&self) -> bool {
        self.max_bytes != u64::MAX
    }

    /// True while a worker has a job.
    pub(super) fn is_pending(&self) -> bool {
        self.is_measuring || !self.discards.is_empty()
    }

    /// True once for each measurement that has ended.
    pub(super) fn take_current(&mut self) -> bool {
        std::mem::take(&mut self.is_current)
    }

    /// Slots whose memory was discarded meanwhile. They are free.
    pub(super) fn collect(&mut self) -> Vec<u32> {
        let mut free = Vec::new();
        while self.is_pending()
            && let Ok(outcome) = self.outcomes.try_recv()
        {
            match outcome {
                Outcome::Discarded(slots) => {
                    self.discards.retain(|discard| discard.slots != slots);
                    free.extend(slots);
                }
                Outcome::Measured(bytes) => {
                    (self.is_measuring, self.is_current) = (false, true);
                    // Memory that cannot be measured is used up.
                    self.used_bytes = bytes.unwrap_or(u64::MAX);
                }
            }
        }
        free
    }

    /// Discards the memory of slots on a worker, then measures if `and_measure`.
    pub(super) fn start(
        &mut self,
        connection: &AppFd,
        memory: &SharedMemory,
        wake: &WakeCores,
        slots: Vec<u32>,
        and_measure: bool,
    ) {
        let is_claimed = Arc::new(AtomicBool::new(false));
        if !slots.is_empty() {
            let discard = Discard { slots: slots.clone(), is_claimed: Arc::clone(&is_claimed) };
            self.discards.push(discard);
        }
        self.is_measuring |= and_measure;
        let (memory, wake) = (memory.clone(), Arc::clone(wake));
        let outcomes = self.outcome_sender.clone();
        connection.run(move |_| {
            if !slots.is_empty() && !is_claimed.swap(true, Ordering::AcqRel) {
                for slot in slots.iter().filter_map(|&slot| memory.slot(slot).ok()) {
                    slot.discard();
                }
                // The application may have ended.
                let _ = outcomes.send(Outcome::Discarded(slots));
            }
            if and_measure {
                let _ = outcomes.send(Outcome::Measured(memory.allocated_bytes().ok()));
            }
            wake();
        });
    }

    /// Cancels the discards that no worker has begun; returns their slots, which are free.
    pub(super) fn cancel_discards(&mut self) -> Vec<u32> {
        let mut free = self.collect();
        let is_cancelled = |discard: &mut Discard| !discard.is_claimed.swap(true, Ordering::AcqRel);
        for discard in self.discards.extract_if(.., is_cancelled) {
            free.extend(discard.slots);
        }
        free
    }
}
