//! A local port that cores have claimed, and how those divide its flows that share it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::slots::Slots;

/// To whom a claim leaves its port besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// To nobody on another core.
    Alone,
    /// To all claims like this of the same party: of a user's sockets (`SO_REUSEPORT`),
    /// or of those that one program divides.
    ReusePort {
        /// Whose the sockets are.
        party: u64,
    },
}

impl Sharing {
    /// That of a socket of this party's, which has the option `SO_REUSEPORT` or has not.
    pub fn new(reuse_port: bool, party: u64) -> Self {
        if reuse_port { Self::ReusePort { party } } else { Self::Alone }
    }
}

/// Whether two addresses of a port cannot be had by two parties.
pub(super) type Overlap = fn(IpAddr, IpAddr) -> bool;

/// What a core has of a port.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) core: usize,
    claims: u32,
    /// How many have begun to go from there to another core and have not arrived.
    leaving: u32,
}

/// The sockets of a party's at one address that take flows from anybody.
struct Group {
    address: IpAddr,
    party: u64,
    /// How many there are on each core.
    sockets: Vec<(usize, u32)>,
    slots: Slots,
}

/// A local port that cores have claimed.
#[derive(Default)]
pub(super) struct SharedPort {
    parts: Vec<Part>,
    /// How many of the claims share it with no other core.
    alone: u32,
    /// Whose the others are, and how many each has.
    parties: Vec<(u64, u32)>,
    groups: Vec<Group>,
}

impl SharedPort {
    /// The cores that have claimed it.
    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    fn part(&mut self, core: usize) -> Option<&mut Part> {
        self.parts.iter_mut().find(|part| part.core == core)
    }

    /// Whether something that a core has of it is on its way elsewhere.
    pub(super) fn is_leaving(&self, core: usize) -> bool {
        self.parts.iter().any(|part| part.core == core && part.leaving > 0)
    }

    /// Whether something of it is on its way.
    pub(super) fn is_anything_leaving(&self) -> bool {
        self.parts.iter().any(|part| part.leaving > 0)
    }

    /// Nobody has it.
    pub(super) fn is_free(&self) -> bool {
        self.parts.is_empty()
    }

    /// Nobody has anything to do with it.
    pub(super) fn is_over(&self) -> bool {
        self.parts.is_empty() && self.groups.is_empty()
    }

    /// Whether its claims may be on several cores.
    pub(super) fn can_be_shared(&self) -> bool {
        self.alone == 0
    }

    /// Whether one core has it, all of it.
    fn is_whole_at(&self, core: usize) -> bool {
        matches!(self.parts.as_slice(), [only] if only.core == core && only.leaving == 0)
    }

    /// Whether a core may claim it so, as far as its sockets leave addresses to others.
    pub(super) fn is_open_to(&self, core: usize, sharing: Sharing) -> bool {
        let is_own = |party| self.parties.iter().all(|&(known, _)| known == party);
        match sharing {
            _ if self.is_free() || self.is_whole_at(core) => true,
            Sharing::Alone => false,
            // What is on its way still has its addresses.
            Sharing::ReusePort { party } => {
                self.alone == 0 && (is_own(party) || !self.is_anything_leaving())
            }
        }
    }

    /// Whether sockets of others that have claimed it are at an address where this party
    /// has one. On one core its stack knows that.
    fn has_rival(&self, party: u64, overlap: Overlap) -> bool {
        let has_claimed = |group: &Group| self.parties.iter().any(|&(one, _)| one == group.party);
        let (own, others): (Vec<&Group>, Vec<&Group>) =
            self.groups.iter().partition(|group| group.party == party);
        let others = others.into_iter().filter(|group| has_claimed(group));
        let mut pairs = others.flat_map(|group| own.iter().map(|own| (own.address, group.address)));
        pairs.any(|(one, other)| overlap(one, other))
    }

    /// Claims it, if that may be.
    pub(super) fn claim(&mut self, core: usize, sharing: Sharing, overlap: Overlap) -> bool {
        if !self.is_open_to(core, sharing) {
            return false;
        }
        match sharing {
            Sharing::Alone => self.alone += 1,
            Sharing::ReusePort { party } => {
                if !self.is_whole_at(core) && self.has_rival(party, overlap) {
                    return false;
                }
                match self.parties.iter_mut().find(|(known, _)| *known == party) {
                    Some((_, claims)) => *claims += 1,
                    None => self.parties.push((party, 1)),
                }
            }
        }
        self.add(core, 1);
        self.divide();
        true
    }

    fn add(&mut self, core: usize, claims: u32) {
        match self.part(core) {
            Some(part) => part.claims += claims,
            None => self.parts.push(Part { core, claims, leaving: 0 }),
        }
    }

    fn remove(&mut self, core: usize, claims: u32) {
        if let Some(part) = self.part(core) {
            part.claims = part.claims.saturating_sub(claims);
        }
        self.parts.retain(|part| part.claims > 0);
    }

    /// Takes one claim back. With the last the port is nobody's.
    pub(super) fn release(&mut self, core: usize, sharing: Sharing) {
        if self.part(core).is_none() {
            // It has no claim of it.
            return;
        }
        match sharing {
            Sharing::Alone => self.alone = self.alone.saturating_sub(1),
            Sharing::ReusePort { party } => {
                let own = self.parties.iter_mut().filter(|(known, _)| *known == party);
                own.for_each(|(_, claims)| *claims -= 1);
                self.parties.retain(|&(_, claims)| claims > 0);
            }
        }
        self.remove(core, 1);
        if self.is_free() {
            (self.alone, self.parties) = (0, Vec::new());
        }
        self.divide();
    }

    /// What a core has of it begins to go elsewhere.
    pub(super) fn park(&mut self, core: usize) {
        if let Some(part) = self.part(core) {
            part.leaving += 1;
        }
    }

    /// So many claims have gone from one core to another; all if it cannot be shared.
    pub(super) fn hand(&mut self, from: usize, to: usize, claims: u32) {
        let can_be_shared = self.can_be_shared();
        let Some(part) = self.part(from) else { return };
        part.leaving = part.leaving.saturating_sub(1);
        let claims = if can_be_shared { claims.min(part.claims) } else { part.claims };
        if from != to {
            self.add(to, claims);
            self.remove(from, claims);
            self.divide();
        }
    }

    /// A socket of a party's at this address takes flows from anybody.
    pub(super) fn join(&mut self, core: usize, address: IpAddr, party: u64) {
        let is_it = |group: &Group| (group.address, group.party) == (address, party);
        let at = self.groups.iter().position(is_it);
        let at = at.unwrap_or_else(|| {
            self.groups.push(Group { address, party, sockets: Vec::new(), slots: Slots::new() });
            self.groups.len() - 1
        });
        let sockets = &mut self.groups[at].sockets;
        match sockets.iter_mut().find(|(known, _)| *known == core) {
            Some((_, count)) => *count += 1,
            None => sockets.push((core, 1)),
        }
        self.divide();
    }

    /// It does so no longer.
    pub(super) fn leave(&mut self, core: usize, address: IpAddr, party: u64) {
        let is_it = |group: &&mut Group| (group.address, group.party) == (address, party);
        for group in self.groups.iter_mut().filter(is_it) {
            for (_, count) in group.sockets.iter_mut().filter(|(known, _)| *known == core) {
                *count = count.saturating_sub(1);
            }
            group.sockets.retain(|&(_, count)| count > 0);
        }
        self.groups.retain(|group| !group.sockets.is_empty());
        self.divide();
    }

    /// Divides flows among those that have claimed the port: a stack has a socket for
    /// a moment before it is known whether it may.
    fn divide(&mut self) {
        let Self { parts, parties, groups, .. } = self;
        let has_claimed = |core| parts.iter().any(|part| part.core == core);
        let is_known = |party| parties.iter().any(|&(known, _)| known == party);
        for group in groups {
            let is_known = is_known(group.party);
            let sockets = group.sockets.iter().copied();
            let sockets = sockets.filter(|&(core, _)| is_known && has_claimed(core));
            group.slots.divide(&sockets.collect::<Vec<_>>());
        }
    }

    /// The core that gets a flow of this hash to an address of ours: one with a socket
    /// there, else one with a socket for any address, as in a stack. `None` if there is
    /// none.
    pub(super) fn core(&self, address: IpAddr, hash: u64) -> Option<usize> {
        let any: IpAddr = match address {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        // Two parties may have sockets there for a moment: one of them has not claimed it.
        let group = |address| {
            let mut there = self.groups.iter().filter(move |group| group.address == address);
            there.find_map(|group| group.slots.core(hash))
        };
        group(address).or_else(|| group(any))
    }
}
