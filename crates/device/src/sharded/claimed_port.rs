//! Claims of cores on a local port, and the distribution of its flows.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::indirection_table::IndirectionTable;

/// Sharing mode of a claim on a local port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortSharing {
    /// No other core may claim the port.
    Exclusive,
    /// All claims with the same owner may share the port: sockets of one user with `SO_REUSEPORT`,
    /// or sockets that one application shards.
    ReusePort {
        /// Owner of the sockets.
        owner: u64,
    },
}

impl PortSharing {
    /// Mode of a socket of `owner`, with or without the option `SO_REUSEPORT`.
    pub fn new(reuse_port: bool, owner: u64) -> Self {
        if reuse_port { Self::ReusePort { owner } } else { Self::Exclusive }
    }
}

/// Returns true when two owners cannot both have these addresses of a port.
pub(super) type AddressOverlap = fn(IpAddr, IpAddr) -> bool;

/// Claims of one core on a port.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CoreClaims {
    pub(super) core: usize,
    claims: u32,
    /// Migrations from this core to another that have begun and not completed.
    migrating: u32,
}

/// Core at which a frame has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) core: usize,
    /// Cores that receive from a queue of their own, one bit each.
    pub(super) queue_cores: u64,
}

/// Group of a shared port at one moment.
struct SharedGroup {
    address: IpAddr,
    /// Cores with a socket of the group, one bit each.
    cores: u64,
    indirection: IndirectionTable,
}

impl SharedGroup {
    /// Core for a new flow: where it arrives, if every core of the group has a queue, so that the
    /// card divides the flows; otherwise by a hash of the flow.
    fn core(&self, arrival: Arrival, hash: impl FnOnce() -> u64) -> Option<usize> {
        let is_here = self.cores & 1 << arrival.core != 0;
        if is_here && self.cores & !arrival.queue_cores == 0 {
            return Some(arrival.core);
        }
        self.indirection.core(hash())
    }
}

/// Distribution of a shared port's flows at one moment, as a core with a queue reads it.
pub(super) struct SharedPort {
    /// Cores that have claimed the port, one bit each.
    pub(super) cores: u64,
    /// Cores whose claims are migrating to another core, one bit each.
    pub(super) migrating: u64,
    groups: Vec<SharedGroup>,
}

impl SharedPort {
    /// Core for a new flow to a local address: a core with a socket at the address, else one with a
    /// socket at the wildcard address, as in a stack. `None` without such a socket.
    pub(super) fn core(
        &self,
        address: IpAddr,
        arrival: Arrival,
        hash: impl Fn() -> u64,
    ) -> Option<usize> {
        let any: IpAddr = match address {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        // Two owners may have sockets there for a moment: one has not claimed the port.
        let group = |address| {
            let mut matching = self.groups.iter().filter(move |group| group.address == address);
            matching.find_map(|group| group.core(arrival, &hash))
        };
        group(address).or_else(|| group(any))
    }
}

/// Reuseport group: the sockets of one owner at one address that receive from any peer.
struct ReusePortGroup {
    address: IpAddr,
    owner: u64,
    /// Number of sockets on each core.
    sockets: Vec<(usize, u32)>,
    indirection: IndirectionTable,
}

/// A local port that cores have claimed.
#[derive(Default)]
pub(super) struct ClaimedPort {
    by_core: Vec<CoreClaims>,
    /// Number of claims that share the port with no other core.
    exclusive: u32,
    /// Owners of the other claims, each with its number of claims.
    owners: Vec<(u64, u32)>,
    groups: Vec<ReusePortGroup>,
}

impl ClaimedPort {
    /// Cores that have claimed the port.
    pub(super) fn by_core(&self) -> &[CoreClaims] {
        &self.by_core
    }

    fn core_claims(&mut self, core: usize) -> Option<&mut CoreClaims> {
        self.by_core.iter_mut().find(|part| part.core == core)
    }

    /// Returns true when any claims of the port are migrating.
    pub(super) fn is_any_migrating(&self) -> bool {
        self.by_core.iter().any(|part| part.migrating > 0)
    }

    /// Returns true when no core has claimed the port.
    pub(super) fn is_unclaimed(&self) -> bool {
        self.by_core.is_empty()
    }

    /// Returns true when the port has neither claims nor sockets.
    pub(super) fn is_unused(&self) -> bool {
        self.by_core.is_empty() && self.groups.is_empty()
    }

    /// Returns true when several cores may claim the port.
    pub(super) fn can_be_shared(&self) -> bool {
        self.exclusive == 0
    }

    /// Returns true when this core has all claims and none is migrating.
    fn is_held_only_by(&self, core: usize) -> bool {
        matches!(self.by_core.as_slice(), [only] if only.core == core && only.migrating == 0)
    }

    /// Returns true when a core may claim the port, as far as addresses of sockets permit.
    pub(super) fn can_claim(&self, core: usize, sharing: PortSharing) -> bool {
        let is_only_owner = |owner| self.owners.iter().all(|&(known, _)| known == owner);
        match sharing {
            _ if self.is_unclaimed() || self.is_held_only_by(core) => true,
            PortSharing::Exclusive => false,
            // Migrating claims still have their addresses.
            PortSharing::ReusePort { owner } => {
                self.exclusive == 0 && (is_only_owner(owner) || !self.is_any_migrating())
            }
        }
    }

    /// Returns true when a socket of `owner` has an address that overlaps one of another owner with
    /// a claim. On a single core its stack checks this.
    fn has_conflict(&self, owner: u64, overlap: AddressOverlap) -> bool {
        let has_claimed =
            |group: &ReusePortGroup| self.owners.iter().any(|&(one, _)| one == group.owner);
        let (own, others): (Vec<&ReusePortGroup>, Vec<&ReusePortGroup>) =
            self.groups.iter().partition(|group| group.owner == owner);
        let others = others.into_iter().filter(|group| has_claimed(group));
        let mut pairs = others.flat_map(|group| own.iter().map(|own| (own.address, group.address)));
        pairs.any(|(one, other)| overlap(one, other))
    }

    /// Adds a claim, if permitted.
    pub(super) fn claim(
        &mut self,
        core: usize,
        sharing: PortSharing,
        overlap: AddressOverlap,
    ) -> bool {
        if !self.can_claim(core, sharing) {
            return false;
        }
        match sharing {
            PortSharing::Exclusive => self.exclusive += 1,
            PortSharing::ReusePort { owner } => {
                if !self.is_held_only_by(core) && self.has_conflict(owner, overlap) {
                    return false;
                }
                match self.owners.iter_mut().find(|(known, _)| *known == owner) {
                    Some((_, claims)) => *claims += 1,
                    None => self.owners.push((owner, 1)),
                }
            }
        }
        self.add(core, 1);
        self.reassign();
        true
    }

    fn add(&mut self, core: usize, claims: u32) {
        match self.core_claims(core) {
            Some(part) => part.claims += claims,
            None => self.by_core.push(CoreClaims { core, claims, migrating: 0 }),
        }
    }

    fn remove(&mut self, core: usize, claims: u32) {
        if let Some(part) = self.core_claims(core) {
            part.claims = part.claims.saturating_sub(claims);
        }
        self.by_core.retain(|part| part.claims > 0);
    }

    /// Removes one claim. Without claims the port is free.
    pub(super) fn release(&mut self, core: usize, sharing: PortSharing) {
        if self.core_claims(core).is_none() {
            // The core has no claim on the port.
            return;
        }
        match sharing {
            PortSharing::Exclusive => self.exclusive = self.exclusive.saturating_sub(1),
            PortSharing::ReusePort { owner } => {
                let own = self.owners.iter_mut().filter(|(known, _)| *known == owner);
                own.for_each(|(_, claims)| *claims -= 1);
                self.owners.retain(|&(_, claims)| claims > 0);
            }
        }
        self.remove(core, 1);
        if self.is_unclaimed() {
            (self.exclusive, self.owners) = (0, Vec::new());
        }
        self.reassign();
    }

    /// Marks the start of a migration of a core's claims.
    pub(super) fn park(&mut self, core: usize) {
        if let Some(part) = self.core_claims(core) {
            part.migrating += 1;
        }
    }

    /// Moves this number of claims to another core; all claims if the port cannot be shared.
    pub(super) fn hand_over(&mut self, from: usize, to: usize, claims: u32) {
        let can_be_shared = self.can_be_shared();
        let Some(part) = self.core_claims(from) else { return };
        part.migrating = part.migrating.saturating_sub(1);
        let claims = if can_be_shared { claims.min(part.claims) } else { part.claims };
        if from != to {
            self.add(to, claims);
            self.remove(from, claims);
            self.reassign();
        }
    }

    /// Adds a socket of `owner` that receives from any peer at this address.
    pub(super) fn join(&mut self, core: usize, address: IpAddr, owner: u64) {
        let is_same = |group: &ReusePortGroup| (group.address, group.owner) == (address, owner);
        let at = self.groups.iter().position(is_same);
        let at = at.unwrap_or_else(|| {
            self.groups.push(ReusePortGroup {
                address,
                owner,
                sockets: Vec::new(),
                indirection: IndirectionTable::new(),
            });
            self.groups.len() - 1
        });
        let sockets = &mut self.groups[at].sockets;
        match sockets.iter_mut().find(|(known, _)| *known == core) {
            Some((_, count)) => *count += 1,
            None => sockets.push((core, 1)),
        }
        self.reassign();
    }

    /// Removes such a socket.
    pub(super) fn leave(&mut self, core: usize, address: IpAddr, owner: u64) {
        let is_same =
            |group: &&mut ReusePortGroup| (group.address, group.owner) == (address, owner);
        for group in self.groups.iter_mut().filter(is_same) {
            for (_, count) in group.sockets.iter_mut().filter(|(known, _)| *known == core) {
                *count = count.saturating_sub(1);
            }
            group.sockets.retain(|&(_, count)| count > 0);
        }
        self.groups.retain(|group| !group.sockets.is_empty());
        self.reassign();
    }

    /// Distributes flows over the cores that have claimed the port. A stack may have a socket for a
    /// moment before its claim is accepted or refused.
    fn reassign(&mut self) {
        let Self { by_core, owners, groups, .. } = self;
        let has_claimed = |core| by_core.iter().any(|part| part.core == core);
        let is_known = |owner| owners.iter().any(|&(known, _)| known == owner);
        for group in groups {
            let is_known = is_known(group.owner);
            let sockets = group.sockets.iter().copied();
            let sockets = sockets.filter(|&(core, _)| is_known && has_claimed(core));
            group.indirection.assign(&sockets.collect::<Vec<_>>());
        }
    }

    /// Distribution of the flows as it is now.
    pub(super) fn snapshot(&self) -> SharedPort {
        let (mut cores, mut migrating) = (0, 0);
        for part in &self.by_core {
            cores |= 1 << part.core;
            migrating |= u64::from(part.migrating > 0) << part.core;
        }
        let shared = |group: &ReusePortGroup| SharedGroup {
            address: group.address,
            cores: group
                .sockets
                .iter()
                .fold(0, |cores, &(core, count)| cores | u64::from(count > 0) << core),
            indirection: group.indirection.clone(),
        };
        SharedPort { cores, migrating, groups: self.groups.iter().map(shared).collect() }
    }
}
