//! Schedule of duplicate address detection (RFC 4862 section 5.4).

use std::net::Ipv6Addr;

const SECOND_NS: u64 = 1_000_000_000;

/// Addresses that are not known to be unique yet.
#[derive(Default)]
pub(crate) struct TentativeAddresses(Vec<TentativeAddress>);

struct TentativeAddress {
    address: Ipv6Addr,
    /// Deadline of the current step, in nanoseconds.
    until_ns: u64,
    /// True after the solicitation was sent.
    solicited: bool,
}

/// Step of the detection that is due.
pub(crate) enum DetectionStep {
    /// To ask for other hosts with this address.
    Solicit(Ipv6Addr),
    /// No host claimed this address in time.
    Confirm(Ipv6Addr),
}

impl TentativeAddresses {
    /// Adds an address; its solicitation is due at once.
    pub(crate) fn add(&mut self, now_ns: u64, address: Ipv6Addr) {
        self.0.push(TentativeAddress { address, until_ns: now_ns, solicited: false });
    }

    pub(crate) fn remove(&mut self, address: Ipv6Addr) {
        self.0.retain(|tentative| tentative.address != address);
    }

    /// Removes the addresses for which `is_unique` returns true, and returns them.
    pub(crate) fn take_unique(&mut self, is_unique: impl Fn(Ipv6Addr) -> bool) -> Vec<Ipv6Addr> {
        self.0
            .extract_if(.., |tentative| is_unique(tentative.address))
            .map(|tentative| tentative.address)
            .collect()
    }

    /// Time in nanoseconds of the next step.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        self.0.iter().map(|tentative| tentative.until_ns).min()
    }

    /// Returns the next step that is due, and schedules the one after it.
    pub(crate) fn poll_due(&mut self, now_ns: u64) -> Option<DetectionStep> {
        let at = self.0.iter().rposition(|tentative| tentative.until_ns <= now_ns)?;
        let TentativeAddress { address, until_ns, solicited } = &mut self.0[at];
        if *solicited {
            return Some(DetectionStep::Confirm(self.0.swap_remove(at).address));
        }
        (*solicited, *until_ns) = (true, now_ns + SECOND_NS);
        Some(DetectionStep::Solicit(*address))
    }
}
