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

/// What a core has of a port.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) core: usize,
    claims: u32,
    /// How many have begun to go from there to another core and have not arrived.
    leaving: u32,
}

/// The sockets at one address that take flows from anybody.
struct Group {
    address: IpAddr,
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
    /// Whose the others are.
    parties: Vec<u64>,
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
        self.alone == 0 && self.parties.len() <= 1
    }

    /// Whether a core may claim it so.
    pub(super) fn is_open_to(&self, core: usize, sharing: Sharing) -> bool {
        let shares = |party| self.alone == 0 && self.parties == [party];
        match self.parts.as_slice() {
            [] => true,
            // Its stack has nothing against it.
            [only] if only.core == core && only.leaving == 0 => true,
            _ => matches!(sharing, Sharing::ReusePort { party } if shares(party)),
        }
    }

    /// Claims it, if that may be.
    pub(super) fn claim(&mut self, core: usize, sharing: Sharing) -> bool {
        if !self.is_open_to(core, sharing) {
            return false;
        }
        match sharing {
            Sharing::Alone => self.alone += 1,
            Sharing::ReusePort { party } if self.parties.contains(&party) => {}
            Sharing::ReusePort { party } => self.parties.push(party),
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
        self.alone -= u32::from(sharing == Sharing::Alone && self.alone > 0);
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

    /// A socket at this address takes flows from anybody.
    pub(super) fn join(&mut self, core: usize, address: IpAddr) {
        let at = self.groups.iter().position(|group| group.address == address);
        let at = at.unwrap_or_else(|| {
            self.groups.push(Group { address, sockets: Vec::new(), slots: Slots::new() });
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
    pub(super) fn leave(&mut self, core: usize, address: IpAddr) {
        for group in self.groups.iter_mut().filter(|group| group.address == address) {
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
        let Self { parts, groups, .. } = self;
        let has_claimed = |core| parts.iter().any(|part| part.core == core);
        for group in groups {
            let sockets = group.sockets.iter().copied().filter(|&(core, _)| has_claimed(core));
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
        let group = |address| self.groups.iter().find(|group| group.address == address);
        let found = group(address).and_then(|group| group.slots.core(hash));
        found.or_else(|| group(any)?.slots.core(hash))
    }
}
