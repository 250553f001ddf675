//! Log lines about packets that Tidegate cannot take as senders on this machine send them.
//!
//! Such senders leave checksums and segmentation to their device. Without a line, a server that
//! drops their packets looks like one that does not answer.

use std::time::Duration;

use tidegate::{DropCounters, DropReason};

/// Interval at which the counters of a running server are looked at.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Reasons of drops whose first packet is logged: each sentence says what to do.
const REASONS: [DropReason; 3] =
    [DropReason::UdpChecksumUnfilled, DropReason::TcpChecksumUnfilled, DropReason::FrameTooLong];

/// Log of the first packet that is dropped for each reason.
pub(crate) struct DropLog {
    /// Reasons without a line so far.
    silent: Vec<DropReason>,
}

impl DropLog {
    pub(crate) fn new() -> Self {
        Self { silent: REASONS.to_vec() }
    }

    /// True once there is nothing left to log.
    pub(crate) fn is_complete(&self) -> bool {
        self.silent.is_empty()
    }

    /// Logs the reasons for which packets were dropped since the last call, unless logged before.
    pub(crate) fn check(&mut self, drops: &DropCounters) {
        for line in self.new_lines(drops) {
            tracing::warn!("{line}");
        }
    }

    fn new_lines(&mut self, drops: &DropCounters) -> Vec<String> {
        let is_new = |reason: &mut DropReason| drops.get(*reason) > 0;
        let new = self.silent.extract_if(.., is_new);
        new.map(|reason| {
            format!(
                "dropped a packet as {} (later ones are only counted): {}",
                reason.name(),
                reason.sentence()
            )
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_packet_of_each_reason_is_logged() {
        let (mut drop_log, mut drops) = (DropLog::new(), DropCounters::new());
        drops.count(DropReason::UdpChecksum);
        assert_eq!(drop_log.new_lines(&drops), [""; 0]);
        drops.count(DropReason::FrameTooLong);
        let lines = drop_log.new_lines(&drops);
        assert_eq!(lines.len(), 1);
        for part in ["frame_too_long", "--io packet"] {
            assert!(lines[0].contains(part), "{lines:?}");
        }
        drops.count(DropReason::FrameTooLong);
        assert_eq!(drop_log.new_lines(&drops), [""; 0]);
        drops.count(DropReason::TcpChecksumUnfilled);
        drops.count(DropReason::UdpChecksumUnfilled);
        assert!(!drop_log.is_complete());
        assert_eq!(drop_log.new_lines(&drops).len(), 2);
        assert!(drop_log.is_complete());
    }
}
