//! Addresses of the interface and its multicast groups.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tidegate_wire::ndp::solicited_node;
use tidegate_wire::{IpCidr, MacAddr};

use crate::random::HashKey;

/// Multicast group of all nodes on the link (RFC 4291 section 2.7.1).
pub(crate) const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Multicast group of all routers on the link (RFC 4291 section 2.7.1).
pub(crate) const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);

/// Classification of an address relative to this interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressKind {
    /// Address of this interface, ready for use.
    Local,
    /// Address of this interface that is not known to be unique yet (RFC 4862).
    Tentative,
    /// Broadcast address of an attached network, or 255.255.255.255.
    Broadcast,
    /// Multicast group that this interface has joined.
    JoinedGroup,
    /// Any other address.
    Other,
}

/// True if packets to or from `address` must not leave the link.
pub(crate) fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        // The scope of a multicast address is its fourth nibble (RFC 4291 section 2.7).
        IpAddr::V6(v6) if v6.is_multicast() => v6.octets()[1] & 15 <= 2,
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// True if `address` is a possible source address. The unspecified address is: neighbour
/// discovery sends from it.
#[inline]
pub(crate) fn can_be_source_v6(address: Ipv6Addr) -> bool {
    // Excludes ::1, and IPv4-mapped addresses, which must never appear on a wire (RFC 4942
    // section 2.2).
    let high = address.to_bits() >> 32;
    !address.is_multicast() && !address.is_loopback() && high != 0xffff
}

/// True if `address` is a possible source address, judged by the address alone (RFC 1122
/// section 3.2.1.3, RFC 4291 section 2.5).
#[inline]
pub(crate) fn can_be_source_v4(address: Ipv4Addr) -> bool {
    // 0/8 and 127/8 never leave a host; 224/4 is multicast.
    let first = address.octets()[0];
    first != 0 && first != 127 && !(224..240).contains(&first) && !address.is_broadcast()
}

/// Larger than any IPv4 address, so that no address compares equal.
const NO_V4_WORDS: [u64; 2] = [u64::MAX; 2];

/// Addresses and joined groups of the interface, with shortcuts for the common cases.
pub(crate) struct Addresses {
    list: Vec<IpCidr>,
    /// Address and broadcast address of a host with a single IPv4 address: the common case
    /// needs no hash lookup.
    single_v4: Option<(Ipv4Addr, Ipv4Addr)>,
    /// The same two addresses as integers in header byte order; otherwise two values that match no
    /// address.
    single_v4_words: [u64; 2],
    single_v6: Option<Ipv6Addr>,
    /// First IPv6 address that is ready for use.
    first_v6: Option<Ipv6Addr>,
    /// All IPv6 addresses of a host with at most two, usually a global and a link-local address.
    /// A single address is repeated.
    pair_v6: Option<[Ipv6Addr; 2]>,
    kinds: HashMap<IpAddr, AddressKind, HashKey>,
    /// Hardware addresses of the joined groups.
    group_macs: HashSet<MacAddr, HashKey>,
}

impl Addresses {
    pub(crate) fn new(key: HashKey) -> Self {
        let kinds = HashMap::with_hasher(key);
        Self {
            list: Vec::new(),
            single_v4: None,
            single_v4_words: NO_V4_WORDS,
            single_v6: None,
            first_v6: None,
            pair_v6: None,
            kinds,
            group_macs: HashSet::with_hasher(key),
        }
    }

    /// Adds an address, its broadcast address and, for IPv6, the groups that it requires.
    pub(crate) fn add(&mut self, cidr: IpCidr, kind: AddressKind) {
        if self.kinds.insert(cidr.address(), kind) != Some(kind) {
            self.list.retain(|known| known.address() != cidr.address());
            self.list.push(cidr);
        }
        if let Some(broadcast) = cidr.broadcast() {
            self.kinds.entry(broadcast.into()).or_insert(AddressKind::Broadcast);
        }
        if let IpAddr::V6(v6) = cidr.address() {
            self.join(solicited_node(v6).into());
            self.join(ALL_NODES.into());
        }
        self.update_singles();
    }

    /// Addresses that are ready for use.
    pub(crate) fn ready(&self) -> impl Iterator<Item = IpAddr> {
        let addresses = self.list.iter().map(IpCidr::address);
        addresses.filter(|address| self.kinds.get(address) == Some(&AddressKind::Local))
    }

    /// True for an address of this interface, ready for use or tentative.
    pub(crate) fn is_own(&self, address: IpAddr) -> bool {
        matches!(self.kind(address), AddressKind::Local | AddressKind::Tentative)
    }

    /// Makes an address of this interface tentative or ready for use.
    pub(crate) fn set_ready(&mut self, address: IpAddr, is_ready: bool) {
        if let Some(kind) = self.kinds.get_mut(&address) {
            *kind = if is_ready { AddressKind::Local } else { AddressKind::Tentative };
        }
        self.update_singles();
    }

    /// Removes an address; its groups stay joined.
    pub(crate) fn remove(&mut self, address: IpAddr) {
        self.list.retain(|known| known.address() != address);
        self.kinds.remove(&address);
        self.update_singles();
    }

    /// Joins a group.
    pub(crate) fn join(&mut self, group: IpAddr) {
        self.kinds.entry(group).or_insert(AddressKind::JoinedGroup);
        self.group_macs.insert(group_mac(group));
    }

    /// Leaves a group, unless an address of the interface requires the group.
    pub(crate) fn leave(&mut self, group: IpAddr) {
        let needed = self.list.iter().any(|cidr| match cidr.address() {
            IpAddr::V6(v6) => group == ALL_NODES || group == solicited_node(v6),
            IpAddr::V4(_) => false,
        });
        if !needed && self.kinds.get(&group) == Some(&AddressKind::JoinedGroup) {
            self.kinds.remove(&group);
            // Several groups can share a hardware address.
            let groups = self.kinds.iter().filter(|&(_, &kind)| kind == AddressKind::JoinedGroup);
            self.group_macs.clear();
            self.group_macs.extend(groups.map(|(&group, _)| group_mac(group)));
        }
    }

    fn update_singles(&mut self) {
        let valid = |cidr: &&IpCidr| self.kinds.get(&cidr.address()) == Some(&AddressKind::Local);
        let mut v4 = self.list.iter().filter(|c| c.address().is_ipv4());
        self.single_v4 = match (v4.next().filter(valid), v4.next()) {
            (Some(cidr), None) => match cidr.address() {
                IpAddr::V4(address) => Some((address, cidr.broadcast().unwrap_or(address))),
                IpAddr::V6(_) => None,
            },
            _ => None,
        };
        let number = |v4: Ipv4Addr| u64::from(u32::from_ne_bytes(v4.octets()));
        self.single_v4_words =
            self.single_v4.map_or(NO_V4_WORDS, |(local, all)| [number(local), number(all)]);
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

    /// True if `destination` is an address of this interface, and `source` is neither such an
    /// address nor a broadcast address. Both are in header byte order.
    #[inline(always)]
    pub(crate) fn is_for_us_v4(&self, source: [u8; 4], destination: [u8; 4]) -> bool {
        let number = |octets| u64::from(u32::from_ne_bytes(octets));
        if number(destination) == self.single_v4_words[0] {
            !self.single_v4_words.contains(&number(source))
        } else {
            self.single_v4.is_none()
                && self.kind_by_hash(Ipv4Addr::from(destination).into()) == AddressKind::Local
                && self.kind_by_hash(Ipv4Addr::from(source).into()) == AddressKind::Other
        }
    }

    /// True if `address` is an address of this interface that is ready for use.
    #[inline(always)]
    pub(crate) fn is_local_v6(&self, address: Ipv6Addr) -> bool {
        self.first_v6 == Some(address) || self.kind_by_hash(address.into()) == AddressKind::Local
    }

    /// True if `address` is not an address of this interface.
    #[inline(always)]
    pub(crate) fn is_other_v6(&self, address: Ipv6Addr) -> bool {
        match self.pair_v6 {
            Some(pair) => !pair.contains(&address),
            None => self.kind_by_hash(address.into()) == AddressKind::Other,
        }
    }

    /// Classifies an IPv4 address.
    #[inline]
    pub(crate) fn kind_v4(&self, address: Ipv4Addr) -> AddressKind {
        if let Some((local, broadcast)) = self.single_v4 {
            if address == local {
                return AddressKind::Local;
            }
            if address != broadcast && !address.is_multicast() && !address.is_broadcast() {
                return AddressKind::Other;
            }
        }
        self.kind_by_hash(address.into())
    }

    /// Classifies an IPv6 address.
    #[inline]
    pub(crate) fn kind_v6(&self, address: Ipv6Addr) -> AddressKind {
        if let Some(local) = self.single_v6 {
            if address == local {
                return AddressKind::Local;
            }
            if !address.is_multicast() {
                return AddressKind::Other;
            }
        }
        self.kind_by_hash(address.into())
    }

    /// Classifies an address.
    #[inline]
    pub(crate) fn kind(&self, address: IpAddr) -> AddressKind {
        match address {
            IpAddr::V4(v4) => self.kind_v4(v4),
            IpAddr::V6(v6) => self.kind_v6(v6),
        }
    }

    fn kind_by_hash(&self, address: IpAddr) -> AddressKind {
        match self.kinds.get(&address) {
            Some(&kind) => kind,
            None if address == IpAddr::V4(Ipv4Addr::BROADCAST) => AddressKind::Broadcast,
            None => AddressKind::Other,
        }
    }

    /// True if frames to the hardware address `group` belong to a joined group or are broadcast.
    pub(crate) fn listens_to(&self, group: MacAddr) -> bool {
        group.is_broadcast() || self.group_macs.contains(&group)
    }

    /// All joined groups, IPv4 and IPv6.
    pub(crate) fn groups(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let groups = self.kinds.iter().filter(|&(_, &kind)| kind == AddressKind::JoinedGroup);
        groups.map(|(&group, _)| group)
    }

    /// The joined IPv6 groups that are reported to routers and switches: all except the all-nodes
    /// group (RFC 3810 section 6).
    pub(crate) fn groups_v6(&self) -> impl Iterator<Item = Ipv6Addr> + '_ {
        self.kinds.iter().filter_map(|(&address, &kind)| match address {
            IpAddr::V6(v6) if kind == AddressKind::JoinedGroup && v6 != ALL_NODES => Some(v6),
            _ => None,
        })
    }

    /// Selects the source address for a packet to `destination` with next hop `next_hop`: rules 1,
    /// 2 and 8 of RFC 6724 section 5, for both families.
    pub(crate) fn source_for(&self, destination: IpAddr, next_hop: IpAddr) -> Option<IpAddr> {
        let preference = |cidr: &&IpCidr| {
            let address = cidr.address();
            (
                is_link_local(address) == is_link_local(destination),
                cidr.contains(next_hop),
                common_prefix_bits(address, destination),
            )
        };
        self.list
            .iter()
            .filter(|c| c.address().is_ipv4() == destination.is_ipv4())
            .filter(|c| self.kinds.get(&c.address()) == Some(&AddressKind::Local))
            .max_by_key(preference)
            .map(IpCidr::address)
    }
}

/// Hardware address of the frames that carry packets to a group.
fn group_mac(group: IpAddr) -> MacAddr {
    match group {
        IpAddr::V4(v4) => MacAddr::from_ipv4_group(v4),
        IpAddr::V6(v6) => MacAddr::from_ipv6_group(v6),
    }
}

/// Number of leading bits that two addresses share; 0 for different families.
fn common_prefix_bits(a: IpAddr, b: IpAddr) -> u32 {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    fn addresses(list: &[&str]) -> Addresses {
        let mut addresses = Addresses::new(SecretRng::new([0; 16]).hash_key());
        for cidr in list {
            addresses.add(cidr.parse().unwrap(), AddressKind::Local);
        }
        addresses
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn classifies_alike_with_one_and_many_addresses() {
        let one = addresses(&["192.0.2.1/24", "2001:db8::1/64"]);
        let many = addresses(&["192.0.2.1/24", "198.51.100.1/24", "2001:db8::1/64", "fe80::1/64"]);
        let cases = [
            ("192.0.2.1", AddressKind::Local),
            ("192.0.2.255", AddressKind::Broadcast),
            ("255.255.255.255", AddressKind::Broadcast),
            ("192.0.2.2", AddressKind::Other),
            ("224.0.0.1", AddressKind::Other),
            ("2001:db8::1", AddressKind::Local),
            ("2001:db8::2", AddressKind::Other),
            ("ff02::1", AddressKind::JoinedGroup),
            ("ff02::1:ff00:1", AddressKind::JoinedGroup),
            ("ff02::1:ff00:2", AddressKind::Other),
        ];
        for (address, kind) in cases {
            assert_eq!(one.kind(ip(address)), kind, "{address}");
            assert_eq!(many.kind(ip(address)), kind, "{address}");
        }
    }

    #[test]
    fn selects_source_by_scope_and_network() {
        let local = addresses(&["192.0.2.1/24", "198.51.100.1/24", "2001:db8::1/64", "fe80::1/64"]);
        for (destination, next_hop, source) in [
            ("198.51.100.9", "198.51.100.9", "198.51.100.1"),
            ("203.0.113.9", "192.0.2.254", "192.0.2.1"),
            ("2001:db8:1::9", "fe80::99", "2001:db8::1"),
            ("fe80::99", "fe80::99", "fe80::1"),
        ] {
            assert_eq!(local.source_for(ip(destination), ip(next_hop)), Some(ip(source)));
        }
        assert_eq!(addresses(&["192.0.2.1/24"]).source_for(ip("fe80::1"), ip("fe80::1")), None);
    }

    #[test]
    fn joins_solicited_node_groups() {
        let local = addresses(&["2001:db8::1:2345/64"]);
        assert!(local.listens_to("33:33:ff:01:23:45".parse().unwrap()));
        assert!(local.listens_to("33:33:00:00:00:01".parse().unwrap()));
        assert!(!local.listens_to("33:33:ff:01:23:46".parse().unwrap()));
    }
}
