//! Schedule of the probes (RFC 5227 section 2.1, RFC 4862 section 5.4), announcements (RFC 5227
//! section 2.3, RFC 4861 section 7.2.6) and defences (RFC 5227 section 2.4) of own addresses.

use std::net::IpAddr;

use crate::AddressProbe;
use crate::random::SecretRng;

const MILLISECOND_NS: u64 = 1_000_000;
const SECOND_NS: u64 = 1_000_000_000;

/// Number of announcements of an address, and interval between two.
const ANNOUNCEMENTS: u8 = 2;
const ANNOUNCEMENT_INTERVAL_NS: u64 = 2 * SECOND_NS;

/// Minimum interval between two defences of an address (`DEFEND_INTERVAL`).
const DEFENCE_INTERVAL_NS: u64 = 10 * SECOND_NS;

/// Timers of own addresses: of addresses that are being probed, and of those that are announced.
#[derive(Default)]
pub(crate) struct AddressTimers {
    timers: Vec<AddressTimer>,
    /// Time of the next step: the stack asks for it once per burst.
    next_due_ns: Option<u64>,
    /// Addresses that were defended, and when.
    defended: Vec<(IpAddr, u64)>,
}

struct AddressTimer {
    address: IpAddr,
    /// Time of the next step, in nanoseconds.
    due_ns: u64,
    next: NextStep,
}

#[derive(Clone, Copy)]
enum NextStep {
    /// Probes left, at least 1, and their pace.
    Probe(u8, ProbePace),
    Confirm,
    /// Announcements left, at least 1.
    Announce(u8),
}

/// Step that is due.
pub(crate) enum AddressStep {
    /// Asks other hosts whether they use this address.
    Probe(IpAddr),
    /// No host claimed this address in time.
    Confirm(IpAddr),
    /// Announces this address to all neighbours.
    Announce(IpAddr),
}

/// Number of probes, and the times before, between and after them in milliseconds.
#[derive(Clone, Copy)]
struct ProbePace {
    probes: u8,
    max_delay_ms: u32,
    min_interval_ms: u32,
    max_interval_ms: u32,
    last_wait_ms: u32,
}

impl ProbePace {
    /// The last probe leaves within 140 ms, and the address is known to be unique after 210 ms.
    const QUICK: Self = Self {
        probes: 3,
        max_delay_ms: 0,
        min_interval_ms: 70,
        max_interval_ms: 70,
        last_wait_ms: 70,
    };
    /// RFC 5227 section 1.1: `PROBE_NUM`, `PROBE_WAIT`, `PROBE_MIN`, `PROBE_MAX`, `ANNOUNCE_WAIT`.
    const RFC_5227: Self = Self {
        probes: 3,
        max_delay_ms: 1000,
        min_interval_ms: 1000,
        max_interval_ms: 2000,
        last_wait_ms: 2000,
    };
    /// RFC 4862 section 5.4.2: `MAX_RTR_SOLICITATION_DELAY`, `DupAddrDetectTransmits`,
    /// `RetransTimer`.
    const RFC_4862: Self = Self {
        probes: 1,
        max_delay_ms: 1000,
        min_interval_ms: 1000,
        max_interval_ms: 1000,
        last_wait_ms: 1000,
    };

    fn of(probe: AddressProbe, address: IpAddr) -> Option<Self> {
        match (probe, address) {
            (AddressProbe::Off, _) => None,
            (AddressProbe::Quick, _) => Some(Self::QUICK),
            (AddressProbe::Rfc, IpAddr::V4(_)) => Some(Self::RFC_5227),
            (AddressProbe::Rfc, IpAddr::V6(_)) => Some(Self::RFC_4862),
        }
    }

    /// Time after a probe until the next step, when `left` probes are left.
    fn wait_ns(self, left: u8, rng: &mut SecretRng) -> u64 {
        let random = self.max_interval_ms - self.min_interval_ms;
        let wait_ms = match left {
            0 => self.last_wait_ms,
            _ => self.min_interval_ms + rng.below(random + 1),
        };
        u64::from(wait_ms) * MILLISECOND_NS
    }
}

impl AddressTimers {
    /// Adds the probes of an address, which announcements follow.
    pub(crate) fn add_probes(
        &mut self,
        now_ns: u64,
        address: IpAddr,
        probe: AddressProbe,
        rng: &mut SecretRng,
    ) {
        let Some(pace) = ProbePace::of(probe, address) else {
            return self.add_announcements(now_ns, address, ANNOUNCEMENTS);
        };
        let delay_ns = u64::from(rng.below(pace.max_delay_ms + 1)) * MILLISECOND_NS;
        let (due_ns, next) = (now_ns + delay_ns, NextStep::Probe(pace.probes, pace));
        self.set(AddressTimer { address, due_ns, next });
    }

    /// Adds one announcement of an address that another host claims, unless the address was
    /// defended or is announced anyway.
    pub(crate) fn add_defence(&mut self, now_ns: u64, address: IpAddr) {
        self.defended.retain(|&(_, at_ns)| now_ns.saturating_sub(at_ns) < DEFENCE_INTERVAL_NS);
        let is_defended = self.defended.iter().any(|&(defended, _)| defended == address);
        if !is_defended && !self.timers.iter().any(|timer| timer.address == address) {
            self.defended.push((address, now_ns));
            self.add_announcements(now_ns, address, 1);
        }
    }

    /// The first announcement is due at once.
    fn add_announcements(&mut self, now_ns: u64, address: IpAddr, count: u8) {
        let next = NextStep::Announce(count);
        self.set(AddressTimer { address, due_ns: now_ns, next });
    }

    fn set(&mut self, timer: AddressTimer) {
        self.remove(timer.address);
        self.timers.push(timer);
        self.update_next_due();
    }

    /// Removes the timer of an address.
    pub(crate) fn remove(&mut self, address: IpAddr) {
        self.timers.retain(|timer| timer.address != address);
        self.update_next_due();
    }

    fn update_next_due(&mut self) {
        self.next_due_ns = self.timers.iter().map(|timer| timer.due_ns).min();
    }

    /// True while the address is not known to be unique.
    pub(crate) fn is_probing(&self, address: IpAddr) -> bool {
        self.timers.iter().any(|timer| timer.address == address && timer.is_probing())
    }

    /// True while any address is not known to be unique.
    pub(crate) fn is_probing_any(&self) -> bool {
        self.timers.iter().any(AddressTimer::is_probing)
    }

    /// Time in nanoseconds of the next step.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        self.next_due_ns
    }

    /// Returns the next step that is due, and schedules the one after it.
    pub(crate) fn poll_due(&mut self, now_ns: u64, rng: &mut SecretRng) -> Option<AddressStep> {
        let at = self.timers.iter().rposition(|timer| timer.due_ns <= now_ns)?;
        let AddressTimer { address, due_ns, next } = &mut self.timers[at];
        let (address, step) = (*address, *next);
        match step {
            NextStep::Probe(left, pace) => {
                let left = left - 1;
                *next = if left > 0 { NextStep::Probe(left, pace) } else { NextStep::Confirm };
                *due_ns = now_ns + pace.wait_ns(left, rng);
            }
            NextStep::Confirm => *next = NextStep::Announce(ANNOUNCEMENTS),
            NextStep::Announce(left @ 2..) => {
                *next = NextStep::Announce(left - 1);
                *due_ns = now_ns + ANNOUNCEMENT_INTERVAL_NS;
            }
            NextStep::Announce(_) => drop(self.timers.swap_remove(at)),
        }
        self.update_next_due();
        Some(match step {
            NextStep::Probe(..) => AddressStep::Probe(address),
            NextStep::Confirm => AddressStep::Confirm(address),
            NextStep::Announce(_) => AddressStep::Announce(address),
        })
    }
}

impl AddressTimer {
    fn is_probing(&self) -> bool {
        !matches!(self.next, NextStep::Announce(_))
    }
}
