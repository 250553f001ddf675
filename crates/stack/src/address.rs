//! Our own addresses, and the groups that they are members of.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tidegate_wire::ndp::solicited_node;
use tidegate_wire::{IpCidr, MacAddr};

use crate::chance::HashKey;

/// Every node on the link (RFC 4291 section 2.7.1).
pub(crate) const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Every router on the link (RFC 4291 section 2.7.1).
pub(crate) const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);

/// What an address is to this interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One of our own.
    Ours,
    /// One of our own that is not known to be unique yet (RFC 4862).
    Tentative,
    /// The broadcast address of one of our networks, or of all.
    Broadcast,
    /// A group that we are a member of.
    Group,
    /// Anything else.
    Other,
}

/// Whether packets to or from `address` cannot leave the link.
pub(crate) fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        // Groups tell their scope in the fourth nibble (RFC 4291 section 2.7).
        IpAddr::V6(v6) if v6.is_multicast() => v6.octets()[1] & 15 <= 2,
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Whether a packet can come from this address. The unspecified address can:
/// neighbour discovery uses it.
#[inline]
pub(crate) fn can_be_source_v6(address: Ipv6Addr) -> bool {
    // ::1, and IPv4-mapped addresses, which must never be on a wire (RFC 4942
    // section 2.2).
    let high = address.to_bits() >> 32;
    !address.is_multicast() && !address.is_loopback() && high != 0xffff
}

/// Whether a packet can come from `address`, as far as the address alone can
/// tell (RFC 1122 section 3.2.1.3, RFC 4291 section 2.5).
#[inline]
pub(crate) fn can_be_source_v4(address: Ipv4Addr) -> bool {
    // 0/8 and 127/8 never leave a host; 224/4 is groups.
    let first = address.octets()[0];
    first != 0 && first != 127 && !(224..240).contains(&first) && !address.is_broadcast()
}

/// More than any IPv4 address is.
const NO_ADDRESSES: [u64; 2] = [u64::MAX; 2];

/// The addresses of the interface.
pub(crate) struct Addresses {
    list: Vec<IpCidr>,
    /// The one address and broadcast address of a host that has just one, so
    /// that the common case needs no hash.
    single_v4: Option<(Ipv4Addr, Ipv4Addr)>,
    /// The same as numbers, as they stand in headers; otherwise numbers that
    /// no address is.
    only_v4: [u64; 2],
    single_v6: Option<Ipv6Addr>,
    /// Our first IPv6 address that may be used.
    first_v6: Option<Ipv6Addr>,
    /// All of our IPv6 addresses when there are two at most, as usual: a
    /// global and a link-local one. A single one stands twice.
    pair_v6: Option<[Ipv6Addr; 2]>,
    kinds: HashMap<IpAddr, Kind, HashKey>,
    /// The hardware addresses of our groups.
    group_macs: HashSet<MacAddr, HashKey>,
}

impl Addresses {
    pub(crate) fn new(key: HashKey) -> Self {
        let kinds = HashMap::with_hasher(key);
        Self {
            list: Vec::new(),
            single_v4: None,
            only_v4: NO_ADDRESSES,
            single_v6: None,
            first_v6: None,
            pair_v6: None,
            kinds,
            group_macs: HashSet::with_hasher(key),
        }
    }

    /// Adds an address.
    pub(crate) fn add(&mut self, cidr: IpCidr, kind: Kind) {
        if self.kinds.insert(cidr.address(), kind) != Some(kind) {
            self.list.retain(|known| known.address() != cidr.address());
            self.list.push(cidr);
        }
        if let Some(broadcast) = cidr.broadcast() {
            self.kinds.entry(broadcast.into()).or_insert(Kind::Broadcast);
        }
        if let IpAddr::V6(v6) = cidr.address() {
            self.join(solicited_node(v6).into());
            self.join(ALL_NODES.into());
        }
        self.find_singles();
    }

    /// Lets a tentative address be used.
    pub(crate) fn confirm(&mut self, address: IpAddr) {
        if let Some(kind) = self.kinds.get_mut(&address) {
            *kind = Kind::Ours;
        }
        self.find_singles();
    }

    /// Takes an address away; its groups stay.
    pub(crate) fn remove(&mut self, address: IpAddr) {
        self.list.retain(|known| known.address() != address);
        self.kinds.remove(&address);
        self.find_singles();
    }

    /// Becomes a member of a group.
    pub(crate) fn join(&mut self, group: IpAddr) {
        self.kinds.entry(group).or_insert(Kind::Group);
        self.group_macs.insert(group_mac(group));
    }

    /// Leaves a group, if our addresses do not need it.
    pub(crate) fn leave(&mut self, group: IpAddr) {
        let needed = self.list.iter().any(|cidr| match cidr.address() {
            IpAddr::V6(v6) => group == ALL_NODES || group == solicited_node(v6),
            IpAddr::V4(_) => false,
        });
        if !needed && self.kinds.get(&group) == Some(&Kind::Group) {
            self.kinds.remove(&group);
            // Groups may share a hardware address.
            let groups = self.kinds.iter().filter(|&(_, &kind)| kind == Kind::Group);
            self.group_macs.clear();
            self.group_macs.extend(groups.map(|(&group, _)| group_mac(group)));
        }
    }

    fn find_singles(&mut self) {
        let valid = |cidr: &&IpCidr| self.kinds.get(&cidr.address()) == Some(&Kind::Ours);
        let mut v4 = self.list.iter().filter(|c| c.address().is_ipv4());
        self.single_v4 = match (v4.next().filter(valid), v4.next()) {
            (Some(cidr), None) => match cidr.address() {
                IpAddr::V4(address) => Some((address, cidr.broadcast().unwrap_or(address))),
                IpAddr::V6(_) => None,
            },
            _ => None,
        };
        let number = |v4: Ipv4Addr| u64::from(u32::from_ne_bytes(v4.octets()));
        self.only_v4 =
            self.single_v4.map_or(NO_ADDRESSES, |(ours, all)| [number(ours), number(all)]);
        let all_v6: Vec<_> = self
            .list
            .iter()
            .filter_map(|cidr| match cidr.address() {
                IpAddr::V6(address) => Some((address, valid(&cidr))),
                IpAddr::V4(_) => None,
            })
            .collect();
        self.first_v6 = all_v6.iter().find(|(_, valid)| *valid).map(|&(address, _)| address);
        self.single_v6 = self.first_v6.filter(|_| all_v6.len() == 1);
        self.pair_v6 = match *all_v6 {
            [(only, true)] => Some([only, only]),
            [(a, true), (b, true)] => Some([a, b]),
            _ => None,
        };
    }

    /// Whether an IPv4 address is one of our own, and another one neither that
    /// nor a broadcast address. They are taken as they stand in headers.
    #[inline(always)]
    pub(crate) fn is_for_us_v4(&self, source: [u8; 4], destination: [u8; 4]) -> bool {
        let number = |octets| u64::from(u32::from_ne_bytes(octets));
        if number(destination) == self.only_v4[0] {
            !self.only_v4.contains(&number(source))
        } else {
            self.single_v4.is_none()
                && self.kind_by_hash(Ipv4Addr::from(destination).into()) == Kind::Ours
                && self.kind_by_hash(Ipv4Addr::from(source).into()) == Kind::Other
        }
    }

    /// Whether an IPv6 address is one of our own.
    #[inline(always)]
    pub(crate) fn is_ours_v6(&self, address: Ipv6Addr) -> bool {
        self.first_v6 == Some(address) || self.kind_by_hash(address.into()) == Kind::Ours
    }

    /// Whether an IPv6 address is not one of our own.
    #[inline(always)]
    pub(crate) fn is_other_v6(&self, address: Ipv6Addr) -> bool {
        match self.pair_v6 {
            Some(pair) => !pair.contains(&address),
            None => self.kind_by_hash(address.into()) == Kind::Other,
        }
    }

    /// What an IPv4 address is to us.
    #[inline]
    pub(crate) fn kind_v4(&self, address: Ipv4Addr) -> Kind {
        if let Some((ours, broadcast)) = self.single_v4 {
            if address == ours {
                return Kind::Ours;
            }
            if address != broadcast && !address.is_multicast() && !address.is_broadcast() {
                return Kind::Other;
            }
        }
        self.kind_by_hash(address.into())
    }

    /// What an IPv6 address is to us.
    #[inline]
    pub(crate) fn kind_v6(&self, address: Ipv6Addr) -> Kind {
        if let Some(ours) = self.single_v6 {
            if address == ours {
                return Kind::Ours;
            }
            if !address.is_multicast() {
                return Kind::Other;
            }
        }
        self.kind_by_hash(address.into())
    }

    /// What an address is to us.
    #[inline]
    pub(crate) fn kind(&self, address: IpAddr) -> Kind {
        match address {
            IpAddr::V4(v4) => self.kind_v4(v4),
            IpAddr::V6(v6) => self.kind_v6(v6),
        }
    }

    fn kind_by_hash(&self, address: IpAddr) -> Kind {
        match self.kinds.get(&address) {
            Some(&kind) => kind,
            None if address == IpAddr::V4(Ipv4Addr::BROADCAST) => Kind::Broadcast,
            None => Kind::Other,
        }
    }

    /// Whether frames to this hardware group are for us.
    pub(crate) fn listens_to(&self, group: MacAddr) -> bool {
        group.is_broadcast() || self.group_macs.contains(&group)
    }

    /// All of our own that may be used.
    pub(crate) fn ours(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let ours = self.kinds.iter().filter(|&(_, &kind)| kind == Kind::Ours);
        ours.map(|(&address, _)| address)
    }

    /// The groups of both families.
    pub(crate) fn groups(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let groups = self.kinds.iter().filter(|&(_, &kind)| kind == Kind::Group);
        groups.map(|(&group, _)| group)
    }

    /// The IPv6 groups that routers and switches must know of: all but the
    /// one for all nodes (RFC 3810 section 6).
    pub(crate) fn groups_v6(&self) -> impl Iterator<Item = Ipv6Addr> + '_ {
        self.kinds.iter().filter_map(|(&address, &kind)| match address {
            IpAddr::V6(v6) if kind == Kind::Group && v6 != ALL_NODES => Some(v6),
            _ => None,
        })
    }

    /// The best source for a packet to `destination`, whose next hop is
    /// `next_hop`: rules 1, 2 and 8 of RFC 6724 section 5, for both families.
    pub(crate) fn source_for(&self, destination: IpAddr, next_hop: IpAddr) -> Option<IpAddr> {
        let fit = |cidr: &&IpCidr| {
            let address = cidr.address();
            (
                is_link_local(address) == is_link_local(destination),
                cidr.contains(next_hop),
                common_bits(address, destination),
            )
        };
        self.list
            .iter()
            .filter(|c| c.address().is_ipv4() == destination.is_ipv4())
            .filter(|c| self.kinds.get(&c.address()) == Some(&Kind::Ours))
            .max_by_key(fit)
            .map(IpCidr::address)
    }
}

/// The hardware address that frames to a group carry.
fn group_mac(group: IpAddr) -> MacAddr {
    match group {
        IpAddr::V4(v4) => MacAddr::of_ipv4_group(v4),
        IpAddr::V6(v6) => MacAddr::of_ipv6_group(v6),
    }
}

/// How many bits two addresses have in common at the front.
fn common_bits(a: IpAddr, b: IpAddr) -> u32 {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    fn addresses(list: &[&str]) -> Addresses {
        let mut addresses = Addresses::new(Chance::new([0; 16]).hash_key());
        for cidr in list {
            addresses.add(cidr.parse().unwrap(), Kind::Ours);
        }
        addresses
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_address_and_many_answer_alike() {
        let one = addresses(&["192.0.2.1/24", "2001:db8::1/64"]);
        let many = addresses(&["192.0.2.1/24", "198.51.100.1/24", "2001:db8::1/64", "fe80::1/64"]);
        let cases = [
            ("192.0.2.1", Kind::Ours),
            ("192.0.2.255", Kind::Broadcast),
            ("255.255.255.255", Kind::Broadcast),
            ("192.0.2.2", Kind::Other),
            ("224.0.0.1", Kind::Other),
            ("2001:db8::1", Kind::Ours),
            ("2001:db8::2", Kind::Other),
            ("ff02::1", Kind::Group),
            ("ff02::1:ff00:1", Kind::Group),
            ("ff02::1:ff00:2", Kind::Other),
        ];
        for (address, kind) in cases {
            assert_eq!(one.kind(ip(address)), kind, "{address}");
            assert_eq!(many.kind(ip(address)), kind, "{address}");
        }
    }

    #[test]
    fn the_source_has_the_scope_and_network_of_the_destination() {
        let ours = addresses(&["192.0.2.1/24", "198.51.100.1/24", "2001:db8::1/64", "fe80::1/64"]);
        for (destination, next_hop, source) in [
            ("198.51.100.9", "198.51.100.9", "198.51.100.1"),
            ("203.0.113.9", "192.0.2.254", "192.0.2.1"),
            ("2001:db8:1::9", "fe80::99", "2001:db8::1"),
            ("fe80::99", "fe80::99", "fe80::1"),
        ] {
            assert_eq!(ours.source_for(ip(destination), ip(next_hop)), Some(ip(source)));
        }
        assert_eq!(addresses(&["192.0.2.1/24"]).source_for(ip("fe80::1"), ip("fe80::1")), None);
    }

    #[test]
    fn solicited_node_groups_are_heard() {
        let ours = addresses(&["2001:db8::1:2345/64"]);
        assert!(ours.listens_to("33:33:ff:01:23:45".parse().unwrap()));
        assert!(ours.listens_to("33:33:00:00:00:01".parse().unwrap()));
        assert!(!ours.listens_to("33:33:ff:01:23:46".parse().unwrap()));
    }
}
