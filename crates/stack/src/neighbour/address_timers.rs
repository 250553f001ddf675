//! Schedule of duplicate address detection (RFC 4862 section 5.4) and of announcements (RFC 5227
//! section 2.3, RFC 4861 section 7.2.6).

use std::net::{IpAddr, Ipv6Addr};

const SECOND_NS: u64 = 1_000_000_000;

/// Number of announcements of an address, and interval between two.
const ANNOUNCEMENTS: u8 = 2;
const ANNOUNCEMENT_INTERVAL_NS: u64 = 2 * SECOND_NS;

/// Timers of own addresses: of addresses that are not known to be unique yet, and of those that
/// are announced.
#[derive(Default)]
pub(crate) struct AddressTimers(Vec<AddressTimer>);

struct AddressTimer {
    address: IpAddr,
    /// Time of the next step, in nanoseconds.
    due_ns: u64,
    next: NextStep,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum NextStep {
    Solicit,
    Confirm,
    /// Announcements left, at least 1.
    Announce(u8),
}

/// Step that is due.
pub(crate) enum AddressStep {
    /// Solicits other hosts with this address.
    Solicit(Ipv6Addr),
    /// No host claimed this address in time.
    Confirm(Ipv6Addr),
    /// Announces this address to all neighbours.
    Announce(IpAddr),
}

impl AddressTimers {
    /// Adds a tentative address; its solicitation is due at once.
    pub(crate) fn add_tentative(&mut self, now_ns: u64, address: Ipv6Addr) {
        let address = address.into();
        self.0.push(AddressTimer { address, due_ns: now_ns, next: NextStep::Solicit });
    }

    /// Adds announcements of an address; the first is due at once.
    pub(crate) fn add_announcements(&mut self, now_ns: u64, address: IpAddr) {
        self.remove(address);
        let next = NextStep::Announce(ANNOUNCEMENTS);
        self.0.push(AddressTimer { address, due_ns: now_ns, next });
    }

    /// Removes the timer of an address.
    pub(crate) fn remove(&mut self, address: IpAddr) {
        self.0.retain(|timer| timer.address != address);
    }

    /// Removes the tentative addresses for which `is_unique` returns true, and returns them.
    pub(crate) fn take_unique(&mut self, is_unique: impl Fn(Ipv6Addr) -> bool) -> Vec<Ipv6Addr> {
        let tentative = |timer: &AddressTimer| match timer.address {
            IpAddr::V6(address) if !matches!(timer.next, NextStep::Announce(_)) => Some(address),
            _ => None,
        };
        let unique = self.0.extract_if(.., |timer| tentative(timer).is_some_and(&is_unique));
        unique.filter_map(|timer| tentative(&timer)).collect()
    }

    /// Time in nanoseconds of the next step.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        self.0.iter().map(|timer| timer.due_ns).min()
    }

    /// Returns the next step that is due, and schedules the one after it.
    pub(crate) fn poll_due(&mut self, now_ns: u64) -> Option<AddressStep> {
        let at = self.0.iter().rposition(|timer| timer.due_ns <= now_ns)?;
        let AddressTimer { address, due_ns, next } = &mut self.0[at];
        let (address, step) = (*address, *next);
        match step {
            NextStep::Solicit => (*next, *due_ns) = (NextStep::Confirm, now_ns + SECOND_NS),
            NextStep::Announce(left @ 2..) => {
                *next = NextStep::Announce(left - 1);
                *due_ns = now_ns + ANNOUNCEMENT_INTERVAL_NS;
            }
            NextStep::Confirm | NextStep::Announce(_) => drop(self.0.swap_remove(at)),
        }
        Some(match (step, address) {
            (NextStep::Solicit, IpAddr::V6(address)) => AddressStep::Solicit(address),
            (NextStep::Confirm, IpAddr::V6(address)) => AddressStep::Confirm(address),
            _ => AddressStep::Announce(address),
        })
    }
}
