//! The neighbour cache: hardware addresses of hosts on the link.
//!
//! One state machine serves both families (RFC 4861 section 7.3.2); ARP feeds
//! it requests and replies as neighbour discovery does solicitations and
//! advertisements. It decides and remembers; packets are made by its callers,
//! which are told what to ask by [`Action`].
//!
//! The cache is a target (RFC 6583): anybody on the link can make entries, and
//! anybody beyond can make us look for neighbours that do not exist. So the
//! table is of fixed size, unanswered entries may fill only half of it, an
//! entry in use is not pushed out by one that nobody has used, and finding a
//! place looks at a few entries only.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;

use tidegate_memory::Frame;
use tidegate_wire::{DropReason, MacAddr};

use crate::chance::{Chance, HashKey};

const SECOND_NS: u64 = 1_000_000_000;
/// RFC 4861 section 10: RETRANS_TIMER.
const RETRANSMIT_NS: u64 = SECOND_NS;
/// RFC 4861 section 10: MAX_MULTICAST_SOLICIT and MAX_UNICAST_SOLICIT.
const MAX_SOLICITATIONS: u8 = 3;
/// RFC 4861 section 10: DELAY_FIRST_PROBE_TIME.
const DELAY_NS: u64 = 5 * SECOND_NS;
/// RFC 4861 section 10: REACHABLE_TIME, from which half to one and a half is
/// chosen.
const REACHABLE_NS: u64 = 30 * SECOND_NS;
/// An entry used within this time is not given up for another.
const IN_USE_NS: u64 = 60 * SECOND_NS;
/// How many entries are looked at to find one to replace.
const VICTIM_CANDIDATES: usize = 16;

/// RFC 4861 section 7.3.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Asked, not answered; the hardware address is not known.
    Incomplete,
    /// Known to be right until the time of the entry.
    Reachable,
    /// Was right once.
    Stale,
    /// In use again; if nothing confirms it by the time of the entry, probe.
    Delay,
    /// Asked whether it is still right.
    Probe,
}

struct Neighbour {
    ip: IpAddr,
    mac: MacAddr,
    state: State,
    /// When the state ends; for `Stale`, never.
    until_ns: u64,
    /// Solicitations sent in this state.
    asked: u8,
    /// When a packet was last sent there; `None` if only it spoke to us.
    used_ns: Option<u64>,
    waiting: VecDeque<Frame>,
}

/// What to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Ask everybody for this neighbour.
    Solicit(IpAddr),
    /// Ask this neighbour whether it is still there.
    Probe(IpAddr, MacAddr),
}

/// What the cache knows about a neighbour that a packet is to be sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resolution {
    /// Its hardware address, and how long it may be used without asking again.
    Known(MacAddr, u64),
    /// Not yet: let the packet wait. The action is to be done first.
    Wait(Option<Action>),
}

/// What an advertisement or ARP reply brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    /// Whose address.
    pub(crate) ip: IpAddr,
    /// The hardware address, if it was told.
    pub(crate) mac: Option<MacAddr>,
    /// Whether it says that it answers a question.
    pub(crate) solicited: bool,
    /// Whether it says that it is newer than what was told before.
    pub(crate) overrides: bool,
}

/// What came of a [`Claim`].
#[derive(Debug)]
pub(crate) enum Claimed {
    /// There is no entry: nobody asked.
    Unsolicited,
    /// Nothing that packets depend on changed.
    Noted,
    /// The hardware address in use changed: cached paths are wrong.
    Changed,
    /// The answer that these frames waited for.
    Resolved(MacAddr, VecDeque<Frame>),
    /// It contradicts what is known: ask, before it is believed.
    Doubted(Action),
}

/// A neighbour that never answered.
#[derive(Debug)]
pub(crate) struct Lost {
    pub(crate) ip: IpAddr,
    /// What waited for it.
    pub(crate) waiting: VecDeque<Frame>,
}

/// What a timer brought.
#[derive(Debug)]
pub(crate) enum Expired {
    /// Ask again.
    Ask(Action),
    /// Give up.
    Lost(Lost),
}

/// The neighbour cache.
pub(crate) struct Neighbours {
    index: HashMap<IpAddr, usize, HashKey>,
    entries: Vec<Neighbour>,
    timers: BTreeSet<(u64, IpAddr)>,
    limit: usize,
    waiting_limit: usize,
    waiting_total_limit: usize,
    waiting_total: usize,
    incomplete: usize,
    hand: usize,
}

impl Neighbours {
    pub(crate) fn new(
        key: HashKey,
        limit: usize,
        waiting_limit: usize,
        waiting_total_limit: usize,
    ) -> Self {
        Self {
            index: HashMap::with_hasher(key),
            entries: Vec::new(),
            timers: BTreeSet::new(),
            limit: limit.max(2),
            waiting_limit,
            waiting_total_limit,
            waiting_total: 0,
            incomplete: 0,
            hand: 0,
        }
    }

    /// Looks a next hop up that a packet is about to go to.
    ///
    /// # Errors
    /// [`DropReason::NeighbourTableFull`] when it is not known and there is no
    /// room to look for it.
    pub(crate) fn resolve(&mut self, now_ns: u64, ip: IpAddr) -> Result<Resolution, DropReason> {
        let Some(&at) = self.index.get(&ip) else {
            if self.incomplete >= self.limit / 2 {
                return Err(DropReason::NeighbourTableFull);
            }
            let at = self.insert(now_ns, ip, MacAddr::UNSPECIFIED, State::Incomplete)?;
            self.entries[at].asked = 1;
            self.entries[at].used_ns = Some(now_ns);
            self.set_state(at, State::Incomplete, now_ns + RETRANSMIT_NS);
            return Ok(Resolution::Wait(Some(Action::Solicit(ip))));
        };
        let entry = &mut self.entries[at];
        entry.used_ns = Some(now_ns);
        if entry.state == State::Reachable && now_ns >= entry.until_ns {
            entry.state = State::Stale;
        }
        match entry.state {
            State::Incomplete => return Ok(Resolution::Wait(None)),
            State::Stale => self.set_state(at, State::Delay, now_ns + DELAY_NS),
            State::Reachable | State::Delay | State::Probe => {}
        }
        let entry = &self.entries[at];
        Ok(Resolution::Known(entry.mac, entry.until_ns))
    }

    /// Lets a frame wait for a neighbour that [`Neighbours::resolve`] said to
    /// wait for. Gives a frame back when there is no room: the oldest that
    /// waits for the same neighbour (RFC 4861 section 7.2.2), or this one.
    pub(crate) fn wait(&mut self, ip: IpAddr, frame: Frame) -> Option<Frame> {
        let Some(entry) = self.index.get(&ip).map(|&at| &mut self.entries[at]) else {
            return Some(frame);
        };
        let full = entry.waiting.len() >= self.waiting_limit
            || self.waiting_total >= self.waiting_total_limit;
        let out = if full { entry.waiting.pop_front() } else { None };
        if full && out.is_none() {
            return Some(frame);
        }
        self.waiting_total += usize::from(out.is_none());
        entry.waiting.push_back(frame);
        out
    }

    /// Notes that a neighbour spoke to us first and told its hardware address:
    /// a request or a solicitation (RFC 826, RFC 4861 section 7.2.3). Returns
    /// what came of it; an entry is made when there is room.
    pub(crate) fn heard(&mut self, now_ns: u64, ip: IpAddr, mac: MacAddr) -> Claimed {
        let Some(&at) = self.index.get(&ip) else {
            // No room is no error: it will be looked for when it is needed.
            let _ = self.insert(now_ns, ip, mac, State::Stale);
            return Claimed::Noted;
        };
        let entry = &mut self.entries[at];
        if entry.state == State::Incomplete {
            return self.resolved(at, mac, State::Stale, u64::MAX);
        }
        if entry.mac == mac {
            return Claimed::Noted;
        }
        entry.mac = mac;
        self.set_state(at, State::Stale, u64::MAX);
        Claimed::Changed
    }

    /// Takes an advertisement or an ARP reply (RFC 4861 section 7.2.5).
    pub(crate) fn claim(&mut self, now_ns: u64, chance: &mut Chance, claim: Claim) -> Claimed {
        let Some(&at) = self.index.get(&claim.ip) else { return Claimed::Unsolicited };
        let reachable_until = now_ns + REACHABLE_NS / 2 + reachable_spread_ns(chance);
        let entry = &mut self.entries[at];
        let mac = match claim.mac {
            Some(mac) => mac,
            None if entry.state == State::Incomplete => return Claimed::Noted,
            None => entry.mac,
        };
        if entry.state == State::Incomplete {
            return match claim.solicited {
                true => self.resolved(at, mac, State::Reachable, reachable_until),
                false => self.resolved(at, mac, State::Stale, u64::MAX),
            };
        }
        let differs = mac != entry.mac;
        if differs && !claim.overrides {
            // Somebody else says that the address is his. RFC 4861 would wait
            // for the entry to be used and to age; asking at once costs one
            // packet and lets a real move take effect within a second. At most
            // one doubt at a time, so this cannot be used to make us chatter.
            if entry.state == State::Probe {
                return Claimed::Noted;
            }
            let action = Action::Solicit(entry.ip);
            entry.asked = 1;
            self.set_state(at, State::Probe, now_ns + RETRANSMIT_NS);
            return Claimed::Doubted(action);
        }
        entry.mac = mac;
        if claim.solicited {
            self.set_state(at, State::Reachable, reachable_until);
        } else if differs {
            self.set_state(at, State::Stale, u64::MAX);
        }
        if differs { Claimed::Changed } else { Claimed::Noted }
    }

    /// Whether this neighbour was asked and has not answered yet.
    pub(crate) fn is_asked(&self, ip: IpAddr) -> bool {
        self.index
            .get(&ip)
            .is_some_and(|&at| matches!(self.entries[at].state, State::Incomplete | State::Probe))
    }

    /// Takes an entry from outside: its hardware address, or that there is
    /// none. Returns what waited for it, and the address to send that to.
    pub(crate) fn tell(
        &mut self,
        now_ns: u64,
        chance: &mut Chance,
        ip: IpAddr,
        mac: Option<MacAddr>,
    ) -> Result<Claimed, Lost> {
        let Some(mac) = mac else {
            let waiting = match self.index.get(&ip) {
                Some(&at) => self.remove(at),
                None => VecDeque::new(),
            };
            return Err(Lost { ip, waiting });
        };
        if !self.index.contains_key(&ip) {
            let _ = self.insert(now_ns, ip, mac, State::Stale);
        }
        Ok(self.claim(
            now_ns,
            chance,
            Claim { ip, mac: Some(mac), solicited: true, overrides: true },
        ))
    }

    /// Everybody whose hardware address is known.
    pub(crate) fn known(&self) -> impl Iterator<Item = (IpAddr, MacAddr)> + '_ {
        let known = self.entries.iter().filter(|entry| entry.state != State::Incomplete);
        known.map(|entry| (entry.ip, entry.mac))
    }

    /// The hardware address of a neighbour, as far as it is known.
    pub(crate) fn mac(&self, ip: IpAddr) -> Option<MacAddr> {
        let entry = &self.entries[*self.index.get(&ip)?];
        (entry.state != State::Incomplete).then_some(entry.mac)
    }

    /// When the next timer is due.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        self.timers.first().map(|&(at_ns, _)| at_ns)
    }

    /// The next thing that is due at `now_ns`, until there is none.
    pub(crate) fn poll_expired(&mut self, now_ns: u64) -> Option<Expired> {
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

    fn expire(&mut self, now_ns: u64, at: usize) -> Expired {
        let entry = &mut self.entries[at];
        let (ip, mac, state) = (entry.ip, entry.mac, entry.state);
        if state == State::Delay {
            entry.asked = 0;
        } else if entry.asked >= MAX_SOLICITATIONS {
            return Expired::Lost(Lost { ip, waiting: self.remove(at) });
        }
        entry.asked += 1;
        if state == State::Incomplete {
            self.set_state(at, State::Incomplete, now_ns + RETRANSMIT_NS);
            return Expired::Ask(Action::Solicit(ip));
        }
        self.set_state(at, State::Probe, now_ns + RETRANSMIT_NS);
        Expired::Ask(Action::Probe(ip, mac))
    }

    /// Every frame that waits: for when the stack is taken down.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Frame> + '_ {
        self.waiting_total = 0;
        self.entries.iter_mut().flat_map(|entry| entry.waiting.drain(..))
    }

    fn resolved(&mut self, at: usize, mac: MacAddr, state: State, until_ns: u64) -> Claimed {
        let waiting = std::mem::take(&mut self.entries[at].waiting);
        self.waiting_total -= waiting.len();
        self.entries[at].mac = mac;
        self.set_state(at, state, until_ns);
        Claimed::Resolved(mac, waiting)
    }

    /// The states that end by themselves have a timer. `Reachable` turns to
    /// `Stale` when it is next looked at.
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
        if self.entries.len() >= self.limit {
            let victim = self.victim(now_ns).ok_or(DropReason::NeighbourTableFull)?;
            let waiting = self.remove(victim);
            debug_assert!(waiting.is_empty(), "an entry with frames was replaced");
        }
        let at = self.entries.len();
        self.incomplete += usize::from(state == State::Incomplete);
        let waiting = VecDeque::new();
        let until_ns = u64::MAX;
        self.entries.push(Neighbour { ip, mac, state, until_ns, asked: 0, used_ns: None, waiting });
        self.index.insert(ip, at);
        Ok(at)
    }

    /// An entry that may be replaced: of a few, one never used or the one not
    /// used for the longest time. Unanswered ones go by themselves.
    fn victim(&mut self, now_ns: u64) -> Option<usize> {
        let len = self.entries.len();
        let start = self.hand;
        self.hand = (self.hand + VICTIM_CANDIDATES) % len.max(1);
        (0..VICTIM_CANDIDATES.min(len))
            .map(|step| (start + step) % len)
            .filter(|&at| {
                let entry = &self.entries[at];
                let idle = entry.used_ns.is_none_or(|used| used + IN_USE_NS <= now_ns);
                idle && matches!(entry.state, State::Stale | State::Reachable)
            })
            .min_by_key(|&at| self.entries[at].used_ns)
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

/// Up to the base time more, so that hosts do not probe in step.
fn reachable_spread_ns(chance: &mut Chance) -> u64 {
    u64::from(chance.below(1 << 20)) * (REACHABLE_NS >> 20)
}
