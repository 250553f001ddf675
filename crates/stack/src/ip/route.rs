//! Longest-prefix routing table.

use std::collections::HashMap;
use std::net::IpAddr;

use tidegate_wire::IpCidr;

use crate::Route;
use crate::random::HashKey;

/// Routing table of one interface.
///
/// The table consists of one hash table per prefix length in use, searched from the longest. A
/// lookup costs as many probes as there are prefix lengths (at most 33 or 129), independent of the
/// number of routes.
pub(crate) struct RoutingTable {
    v4: Vec<PrefixLengthTable>,
    v6: Vec<PrefixLengthTable>,
    key: HashKey,
}

/// Routes of one prefix length.
struct PrefixLengthTable {
    prefix_bits: u8,
    networks: HashMap<IpAddr, Option<IpAddr>, HashKey>,
}

impl RoutingTable {
    pub(crate) fn new(key: HashKey) -> Self {
        Self { v4: Vec::new(), v6: Vec::new(), key }
    }

    /// Adds a route; replaces a route with the same prefix.
    pub(crate) fn add(&mut self, route: Route) {
        let network = route.prefix.network();
        let lengths = if network.address().is_ipv4() { &mut self.v4 } else { &mut self.v6 };
        let bits = network.prefix_bits();
        // Longest first.
        let at = match lengths.binary_search_by(|length| bits.cmp(&length.prefix_bits)) {
            Ok(at) => at,
            Err(at) => {
                let networks = HashMap::with_hasher(self.key);
                lengths.insert(at, PrefixLengthTable { prefix_bits: bits, networks });
                at
            }
        };
        lengths[at].networks.insert(network.address(), route.gateway);
    }

    /// True if packets to `address` need no router.
    pub(crate) fn is_on_link(&self, address: IpAddr) -> bool {
        self.next_hop(address) == Some(address)
    }

    /// Prefix length of the best route to `destination`, in bits.
    pub(crate) fn prefix_bits_to(&self, destination: IpAddr) -> Option<u8> {
        self.find(destination).map(|(bits, _)| bits)
    }

    /// Next hop to `destination`: the gateway, or the destination itself if on the link.
    pub(crate) fn next_hop(&self, destination: IpAddr) -> Option<IpAddr> {
        self.find(destination).map(|(_, gateway)| gateway.unwrap_or(destination))
    }

    /// Best route to `destination`: its prefix length and its gateway.
    fn find(&self, destination: IpAddr) -> Option<(u8, Option<IpAddr>)> {
        let lengths = if destination.is_ipv4() { &self.v4 } else { &self.v6 };
        lengths.iter().find_map(|length| {
            let network = IpCidr::new(destination, length.prefix_bits).ok()?.network().address();
            let gateway = length.networks.get(&network)?;
            Some((length.prefix_bits, *gateway))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    fn routes(list: &[(&str, Option<&str>)]) -> RoutingTable {
        let mut routes = RoutingTable::new(SecretRng::new([0; 16]).hash_key());
        for (prefix, gateway) in list {
            let gateway = gateway.map(|g| g.parse().unwrap());
            routes.add(Route { prefix: prefix.parse().unwrap(), gateway });
        }
        routes
    }

    #[test]
    fn the_longest_prefix_wins_in_both_families() {
        let routes = routes(&[
            ("0.0.0.0/0", Some("192.0.2.254")),
            ("192.0.2.0/24", None),
            ("10.1.0.0/16", Some("192.0.2.2")),
            ("10.1.2.3/32", Some("192.0.2.3")),
            ("2001:db8::/64", None),
            ("::/0", Some("fe80::1")),
            ("2001:db8:1::/48", Some("fe80::2")),
        ]);
        for (destination, next_hop) in [
            ("192.0.2.9", "192.0.2.9"),
            ("10.1.2.3", "192.0.2.3"),
            ("10.1.2.4", "192.0.2.2"),
            ("10.2.0.1", "192.0.2.254"),
            ("2001:db8::7", "2001:db8::7"),
            ("2001:db8:1:2::7", "fe80::2"),
            ("2001:db9::7", "fe80::1"),
        ] {
            let found = routes.next_hop(destination.parse().unwrap());
            assert_eq!(found, Some(next_hop.parse().unwrap()), "{destination}");
        }
    }

    #[test]
    fn without_a_default_route_unknown_networks_have_no_next_hop() {
        let routes = routes(&[("192.0.2.0/24", None)]);
        assert_eq!(routes.next_hop("198.51.100.1".parse().unwrap()), None);
        assert_eq!(routes.next_hop("2001:db8::1".parse().unwrap()), None);
    }

    #[test]
    fn a_route_replaces_the_one_with_its_prefix() {
        let routes =
            routes(&[("10.0.0.0/8", Some("192.0.2.1")), ("10.9.9.9/8", Some("192.0.2.2"))]);
        assert_eq!(
            routes.next_hop("10.1.1.1".parse().unwrap()),
            Some("192.0.2.2".parse().unwrap())
        );
    }
}
