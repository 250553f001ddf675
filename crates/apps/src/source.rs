//! Sources of connections, by which servers share their limits.

use std::net::{IpAddr, Ipv6Addr};

/// Source of a peer: its IPv4 address, or the 64-bit prefix of its IPv6 address.
pub(crate) fn source_of(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => {
            let prefix = address.to_bits() & !u128::from(u64::MAX);
            IpAddr::V6(Ipv6Addr::from_bits(prefix))
        }
        address => address,
    }
}
