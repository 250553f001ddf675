//! Neighbour cache: hardware addresses of hosts on the link.
//!
//! One state machine serves both families (RFC 4861 section 7.3.2). ARP requests and replies are
//! processed like neighbour solicitations and advertisements. The cache only keeps state; its
//! callers send the packets that a [`NeighbourAction`] asks for.
//!
//! The cache is a target of attacks (RFC 6583): any host on the link can create entries, and any
//! remote host can make this host solicit neighbours that do not exist. So the table has a fixed
//! size, and unanswered entries may fill only half of it. An unused entry never evicts an entry in
//! use, and eviction examines only a few entries.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;

use tidegate_memory::Frame;
use tidegate_wire::{DropReason, MacAddr};

use crate::random::{HashKey, SecretRng};

const SECOND_NS: u64 = 1_000_000_000;
/// RFC 4861 section 10: RETRANS_TIMER.
const RETRANSMIT_TIMER_NS: u64 = SECOND_NS;
/// RFC 4861 section 10: MAX_MULTICAST_SOLICIT and MAX_UNICAST_SOLICIT.
const MAX_SOLICITATIONS: u8 = 3;
/// RFC 4861 section 10: DELAY_FIRST_PROBE_TIME.
const DELAY_FIRST_PROBE_NS: u64 = 5 * SECOND_NS;
/// RFC 4861 section 10: base of REACHABLE_TIME; the value used is 0.5 to 1.5 times this.
const REACHABLE_TIME_NS: u64 = 30 * SECOND_NS;
/// Minimum time since the last use before an entry may be evicted.
const MIN_IDLE_BEFORE_EVICTION_NS: u64 = 60 * SECOND_NS;
/// Entries examined to find one to evict.
const EVICTION_CANDIDATES: usize = 16;

/// State of an entry (RFC 4861 section 7.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Solicited without an answer yet; the hardware address is unknown.
    Incomplete,
    /// Confirmed until the entry's deadline.
    Reachable,
    /// Confirmation has expired.
    Stale,
    /// Used since it became stale; probed at the entry's deadline unless confirmed before.
    Delay,
    /// Probed without an answer yet.
    Probe,
}

struct Neighbour {
    ip: IpAddr,
    mac: MacAddr,
    state: State,
    /// Deadline of the state; none for `Stale`.
    until_ns: u64,
    /// Solicitations sent in the current state.
    solicitations: u8,
    /// Time of the last packet sent to the neighbour; `None` if it has only sent to this host.
    last_used_ns: Option<u64>,
    waiting: VecDeque<Frame>,
}

/// Solicitation for the caller to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NeighbourAction {
    /// Multicast or broadcast solicitation.
    Solicit(IpAddr),
    /// Unicast probe of a known hardware address.
    Probe(IpAddr, MacAddr),
}

/// Result of looking up the neighbour for a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resolution {
    /// Hardware address, and the time until which it may be cached.
    Known(MacAddr, u64),
    /// Unknown yet: queue the packet after performing the action.
    Wait(Option<NeighbourAction>),
}

/// Content of an advertisement or ARP reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NeighbourClaim {
    /// Claimed IP address.
    pub(crate) ip: IpAddr,
    /// Hardware address, if present.
    pub(crate) mac: Option<MacAddr>,
    /// Solicited flag: the message answers a solicitation.
    pub(crate) solicited: bool,
    /// Override flag: the message may replace a cached hardware address.
    pub(crate) is_override: bool,
}

/// Result of applying a [`NeighbourClaim`].
#[derive(Debug)]
pub(crate) enum ClaimOutcome {
    /// No entry exists: this host has not solicited the neighbour.
    Unsolicited,
    /// The hardware address is unchanged.
    Unchanged,
    /// The hardware address has changed: cached paths are invalid.
    Changed,
    /// The entry is resolved: these frames were waiting and can be sent.
    Resolved(MacAddr, VecDeque<Frame>),
    /// The claim contradicts the entry: solicit before trusting it.
    Verify(NeighbourAction),
}

/// Neighbour that did not answer.
#[derive(Debug)]
pub(crate) struct UnreachableNeighbour {
    /// Frames that waited for the neighbour.
    pub(crate) waiting: VecDeque<Frame>,
}

/// Result of an expired timer.
#[derive(Debug)]
pub(crate) enum NeighbourTimeout {
    /// Solicit again.
    Solicit(NeighbourAction),
    /// No answer: the entry is removed.
    Unreachable(UnreachableNeighbour),
}

/// Neighbour cache of one interface, for both families.
pub(crate) struct NeighbourCache {
    index: HashMap<IpAddr, usize, HashKey>,
    entries: Vec<Neighbour>,
    timers: BTreeSet<(u64, IpAddr)>,
    max_entries: usize,
    max_waiting_per_neighbour: usize,
    max_waiting_total: usize,
    waiting_total: usize,
    incomplete: usize,
    eviction_hand: usize,
}

impl NeighbourCache {
    pub(crate) fn new(
        key: HashKey,
        max_entries: usize,
        max_waiting_per_neighbour: usize,
        max_waiting_total: usize,
    ) -> Self {
        Self {
            index: HashMap::with_hasher(key),
            entries: Vec::new(),
            timers: BTreeSet::new(),
            max_entries: max_entries.max(2),
            max_waiting_per_neighbour,
            max_waiting_total,
            waiting_total: 0,
            incomplete: 0,
            eviction_hand: 0,
        }
    }

    /// Looks up the next hop of a packet to send.
    ///
    /// # Errors
    /// [`DropReason::NeighbourTableFull`] when the neighbour is unknown and there is no space for
    /// an entry.
    pub(crate) fn resolve(&mut self, now_ns: u64, ip: IpAddr) -> Result<Resolution, DropReason> {
        let Some(&at) = self.index.get(&ip) else {
            if self.incomplete >= self.max_entries / 2 {
                return Err(DropReason::NeighbourTableFull);
            }
            let at = self.insert(now_ns, ip, MacAddr::UNSPECIFIED, State::Incomplete)?;
            self.entries[at].solicitations = 1;
            self.entries[at].last_used_ns = Some(now_ns);
            self.set_state(at, State::Incomplete, now_ns + RETRANSMIT_TIMER_NS);
            return Ok(Resolution::Wait(Some(NeighbourAction::Solicit(ip))));
        };
        let entry = &mut self.entries[at];
        entry.last_used_ns = Some(now_ns);
        if entry.state == State::Reachable && now_ns >= entry.until_ns {
            entry.state = State::Stale;
        }
        match entry.state {
            State::Incomplete => return Ok(Resolution::Wait(None)),
            State::Stale => self.set_state(at, State::Delay, now_ns + DELAY_FIRST_PROBE_NS),
            State::Reachable | State::Delay | State::Probe => {}
        }
        let entry = &self.entries[at];
        Ok(Resolution::Known(entry.mac, entry.until_ns))
    }

    /// Queues a frame for a neighbour for which [`NeighbourCache::resolve`] returned `Wait`. On
    /// overflow, returns a frame to drop: the oldest frame for the same neighbour (RFC 4861 section
    /// 7.2.2), or `frame` itself.
    pub(crate) fn queue_frame(&mut self, ip: IpAddr, frame: Frame) -> Option<Frame> {
        let Some(entry) = self.index.get(&ip).map(|&at| &mut self.entries[at]) else {
            return Some(frame);
        };
        let full = entry.waiting.len() >= self.max_waiting_per_neighbour
            || self.waiting_total >= self.max_waiting_total;
        let dropped = if full { entry.waiting.pop_front() } else { None };
        if full && dropped.is_none() {
            return Some(frame);
        }
        self.waiting_total += usize::from(dropped.is_none());
        entry.waiting.push_back(frame);
        dropped
    }

    /// Learns the hardware address from a neighbour's own request or solicitation (RFC 826, RFC
    /// 4861 section 7.2.3). Creates an entry if there is space.
    pub(crate) fn learn(&mut self, now_ns: u64, ip: IpAddr, mac: MacAddr) -> ClaimOutcome {
        let Some(&at) = self.index.get(&ip) else {
            // A full table is no error: the neighbour is solicited when needed.
            let _ = self.insert(now_ns, ip, mac, State::Stale);
            return ClaimOutcome::Unchanged;
        };
        let entry = &mut self.entries[at];
        if entry.state == State::Incomplete {
            return self.complete_resolution(at, mac, State::Stale, u64::MAX);
        }
        if entry.mac == mac {
            return ClaimOutcome::Unchanged;
        }
        entry.mac = mac;
        self.set_state(at, State::Stale, u64::MAX);
        ClaimOutcome::Changed
    }

    /// Applies an advertisement or ARP reply (RFC 4861 section 7.2.5).
    pub(crate) fn apply_claim(
        &mut self,
        now_ns: u64,
        rng: &mut SecretRng,
        claim: NeighbourClaim,
    ) -> ClaimOutcome {
        let Some(&at) = self.index.get(&claim.ip) else { return ClaimOutcome::Unsolicited };
        let reachable_until = now_ns + REACHABLE_TIME_NS / 2 + reachable_spread_ns(rng);
        let entry = &mut self.entries[at];
        let mac = match claim.mac {
            Some(mac) => mac,
            None if entry.state == State::Incomplete => return ClaimOutcome::Unchanged,
            None => entry.mac,
        };
        if entry.state == State::Incomplete {
            return match claim.solicited {
                true => self.complete_resolution(at, mac, State::Reachable, reachable_until),
                false => self.complete_resolution(at, mac, State::Stale, u64::MAX),
            };
        }
        let differs = mac != entry.mac;
        if differs && !claim.is_override {
            // Another host claims the address. RFC 4861 would wait until the entry is used and has
            // aged. An immediate solicitation costs one packet, and a genuine change takes effect
            // within a second. Only one verification runs at a time, so that false claims cannot
            // trigger a stream of solicitations.
            if entry.state == State::Probe {
                return ClaimOutcome::Unchanged;
            }
            let action = NeighbourAction::Solicit(entry.ip);
            entry.solicitations = 1;
            self.set_state(at, State::Probe, now_ns + RETRANSMIT_TIMER_NS);
            return ClaimOutcome::Verify(action);
        }
        entry.mac = mac;
        if claim.solicited {
            self.set_state(at, State::Reachable, reachable_until);
        } else if differs {
            self.set_state(at, State::Stale, u64::MAX);
        }
        if differs { ClaimOutcome::Changed } else { ClaimOutcome::Unchanged }
    }

    /// True if the neighbour was solicited or probed and has not answered yet.
    pub(crate) fn awaits_reply(&self, ip: IpAddr) -> bool {
        self.index
            .get(&ip)
            .is_some_and(|&at| matches!(self.entries[at].state, State::Incomplete | State::Probe))
    }

    /// Sets an entry from outside: its hardware address, or none. Returns the frames that waited
    /// for the neighbour.
    pub(crate) fn set(
        &mut self,
        now_ns: u64,
        rng: &mut SecretRng,
        ip: IpAddr,
        mac: Option<MacAddr>,
    ) -> Result<ClaimOutcome, UnreachableNeighbour> {
        let Some(mac) = mac else {
            let waiting = match self.index.get(&ip) {
                Some(&at) => self.remove(at),
                None => VecDeque::new(),
            };
            return Err(UnreachableNeighbour { waiting });
        };
        if !self.index.contains_key(&ip) {
            let _ = self.insert(now_ns, ip, mac, State::Stale);
        }
        Ok(self.apply_claim(
            now_ns,
            rng,
            NeighbourClaim { ip, mac: Some(mac), solicited: true, is_override: true },
        ))
    }

    /// All neighbours with a known hardware address.
    pub(crate) fn resolved_entries(&self) -> impl Iterator<Item = (IpAddr, MacAddr)> + '_ {
        let known = self.entries.iter().filter(|entry| entry.state != State::Incomplete);
        known.map(|entry| (entry.ip, entry.mac))
    }

    /// Hardware address of a neighbour, if known.
    pub(crate) fn mac(&self, ip: IpAddr) -> Option<MacAddr> {
        let entry = &self.entries[*self.index.get(&ip)?];
        (entry.state != State::Incomplete).then_some(entry.mac)
    }

    /// Deadline of the earliest timer in nanoseconds.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        self.timers.first().map(|&(at_ns, _)| at_ns)
    }

    /// Processes the next timer that has expired at `now_ns`; `None` when none has.
    pub(crate) fn poll_expired(&mut self, now_ns: u64) -> Option<NeighbourTimeout> {
        while let Some(&(at_ns, ip)) = self.timers.first() {
            if at_ns > now_ns {
                return None;
            }
            let Some(&at) = self.index.get(&ip) else {
                debug_assert!(false, "a timer without an entry");
                self.timers.pop_first();
                continue;
            };
            return Some(self.expire(now_ns, at));
        }
        None
    }

    fn expire(&mut self, now_ns: u64, at: usize) -> NeighbourTimeout {
        let entry = &mut self.entries[at];
        let (ip, mac, state) = (entry.ip, entry.mac, entry.state);
        if state == State::Delay {
            entry.solicitations = 0;
        } else if entry.solicitations >= MAX_SOLICITATIONS {
            return NeighbourTimeout::Unreachable(UnreachableNeighbour {
                waiting: self.remove(at),
            });
        }
        entry.solicitations += 1;
        if state == State::Incomplete {
            self.set_state(at, State::Incomplete, now_ns + RETRANSMIT_TIMER_NS);
            return NeighbourTimeout::Solicit(NeighbourAction::Solicit(ip));
        }
        self.set_state(at, State::Probe, now_ns + RETRANSMIT_TIMER_NS);
        NeighbourTimeout::Solicit(NeighbourAction::Probe(ip, mac))
    }

    /// True if frames wait for the answer of a neighbour.
    pub(crate) fn has_waiting(&self) -> bool {
        self.waiting_total > 0
    }

    /// Removes all waiting frames, before the stack is dropped.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Frame> + '_ {
        self.waiting_total = 0;
        self.entries.iter_mut().flat_map(|entry| entry.waiting.drain(..))
    }

    fn complete_resolution(
        &mut self,
        at: usize,
        mac: MacAddr,
        state: State,
        until_ns: u64,
    ) -> ClaimOutcome {
        let waiting = std::mem::take(&mut self.entries[at].waiting);
        self.waiting_total -= waiting.len();
        self.entries[at].mac = mac;
        self.set_state(at, state, until_ns);
        ClaimOutcome::Resolved(mac, waiting)
    }

    /// Changes the state of an entry and its timer. `Reachable` needs no timer: it turns into
    /// `Stale` at the next lookup.
    fn set_state(&mut self, at: usize, state: State, until_ns: u64) {
        let entry = &mut self.entries[at];
        self.timers.remove(&(entry.until_ns, entry.ip));
        self.incomplete -= usize::from(entry.state == State::Incomplete);
        self.incomplete += usize::from(state == State::Incomplete);
        (entry.state, entry.until_ns) = (state, until_ns);
        if matches!(state, State::Incomplete | State::Delay | State::Probe) {
            self.timers.insert((until_ns, entry.ip));
        }
    }

    fn insert(
        &mut self,
        now_ns: u64,
        ip: IpAddr,
        mac: MacAddr,
        state: State,
    ) -> Result<usize, DropReason> {
        if self.entries.len() >= self.max_entries {
            let evicted = self.find_evictable(now_ns).ok_or(DropReason::NeighbourTableFull)?;
            let waiting = self.remove(evicted);
            debug_assert!(waiting.is_empty(), "an entry with waiting frames was evicted");
        }
        let at = self.entries.len();
        self.incomplete += usize::from(state == State::Incomplete);
        let waiting = VecDeque::new();
        let until_ns = u64::MAX;
        self.entries.push(Neighbour {
            ip,
            mac,
            state,
            until_ns,
            solicitations: 0,
            last_used_ns: None,
            waiting,
        });
        self.index.insert(ip, at);
        Ok(at)
    }

    /// Selects an entry to evict among a few candidates: an unused entry, or the least recently
    /// used. Unanswered entries are skipped; they expire by themselves.
    fn find_evictable(&mut self, now_ns: u64) -> Option<usize> {
        let len = self.entries.len();
        let start = self.eviction_hand;
        self.eviction_hand = (self.eviction_hand + EVICTION_CANDIDATES) % len.max(1);
        (0..EVICTION_CANDIDATES.min(len))
            .map(|step| (start + step) % len)
            .filter(|&at| {
                let entry = &self.entries[at];
                let idle = entry.last_used_ns.is_none_or(|last_used_ns| {
                    last_used_ns + MIN_IDLE_BEFORE_EVICTION_NS <= now_ns
                });
                idle && matches!(entry.state, State::Stale | State::Reachable)
            })
            .min_by_key(|&at| self.entries[at].last_used_ns)
    }

    fn remove(&mut self, at: usize) -> VecDeque<Frame> {
        let entry = self.entries.swap_remove(at);
        self.timers.remove(&(entry.until_ns, entry.ip));
        self.index.remove(&entry.ip);
        if let Some(moved) = self.entries.get(at) {
            self.index.insert(moved.ip, at);
        }
        self.incomplete -= usize::from(entry.state == State::Incomplete);
        self.waiting_total -= entry.waiting.len();
        entry.waiting
    }
}

/// Random part of REACHABLE_TIME, so that hosts do not probe in step: 0 to the base time.
fn reachable_spread_ns(rng: &mut SecretRng) -> u64 {
    u64::from(rng.below(1 << 20)) * (REACHABLE_TIME_NS >> 20)
}
