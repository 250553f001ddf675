//! Messages between the attach listener and the core when another daemon takes over.

use std::sync::mpsc;

use super::save::StateFds;

/// Request to hand over, with the channels between its sender and the core.
pub(super) struct HandoverRequest {
    /// The package to hand over, or the reason for a refusal.
    pub(super) offer: mpsc::Sender<Result<HandoverPackage, String>>,
    /// Process that has taken over, if any. The core waits for this message.
    pub(super) outcome: mpsc::Receiver<Option<u32>>,
}

impl HandoverRequest {
    /// Refuses the handover.
    pub(super) fn refuse(&self, why: &str) {
        // The requester may have gone.
        let _ = self.offer.send(Err(why.to_owned()));
    }
}

/// Everything that the next daemon needs.
pub(super) struct HandoverPackage {
    pub(super) state: Vec<u8>,
    pub(super) fds: StateFds,
}

/// Handover that waits while all cores move their applications to the primary core.
pub(super) struct PendingHandover {
    pub(super) request: HandoverRequest,
    /// Cores that have not answered.
    pub(super) awaited_cores: usize,
    /// Times that all cores are still to be asked.
    pub(super) laps_left: usize,
    /// Applications and sockets that could not move, the last time.
    pub(super) unmoved: usize,
}
