//! Messages between the attach listener and the core when another daemon takes over.

use std::sync::mpsc;

use super::save::StateFds;

/// Request to hand over, with the channels between its sender and the core.
pub(in crate::daemon) struct HandoverRequest {
    /// The package to hand over, or the reason for a refusal.
    pub(in crate::daemon) offer: mpsc::Sender<Result<HandoverPackage, String>>,
    /// Process that has taken over, if any. The core waits for this message.
    pub(in crate::daemon) outcome: mpsc::Receiver<Option<u32>>,
}

impl HandoverRequest {
    /// Refuses the handover.
    pub(in crate::daemon) fn refuse(&self, why: &str) {
        // The requester may have gone.
        let _ = self.offer.send(Err(why.to_owned()));
    }
}

/// Everything that the next daemon needs.
pub(in crate::daemon) struct HandoverPackage {
    pub(in crate::daemon) state: Vec<u8>,
    pub(in crate::daemon) fds: StateFds,
}

/// Handover that waits while all cores move their applications to the primary core.
pub(in crate::daemon) struct PendingHandover {
    pub(in crate::daemon) request: HandoverRequest,
    /// Cores that have not answered.
    pub(in crate::daemon) awaited_cores: usize,
    /// Times that all cores are still to be asked.
    pub(in crate::daemon) laps_left: usize,
    /// Applications and sockets that could not move, the last time.
    pub(in crate::daemon) unmoved: usize,
}
