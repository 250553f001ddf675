//! Path MTU discovery (RFC 1191, RFC 8201): what routers told about paths that
//! are narrower than our link.

use std::collections::HashMap;
use std::net::IpAddr;

use tidegate_wire::DropReason;

use crate::chance::HashKey;

/// What every IPv6 link must carry (RFC 8200 section 5).
pub(crate) const MINIMUM_V6: usize = 1280;
/// What every IPv4 host must take (RFC 1122 section 3.3.2). RFC 791 lets links
/// carry as little as 68 bytes; whoever tells less than this makes us clear
/// the "don't fragment" flag, not send crumbs.
pub(crate) const MINIMUM_V4: usize = 576;

/// Sizes to try when a router does not tell its MTU (RFC 1191 section 7).
const PLATEAUS: [usize; 7] = [32_000, 17_914, 8166, 4352, 2002, 1492, 1006];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PathMtu {
    /// The largest packet.
    pub(crate) mtu: usize,
    /// Routers on the path have to fragment: it carries less than our least.
    pub(crate) routers_fragment: bool,
    /// Until when that is believed.
    pub(crate) until_ns: u64,
}

/// Destinations with a path MTU under that of the link.
pub(crate) struct PathMtus {
    known: HashMap<IpAddr, PathMtu, HashKey>,
    limit: usize,
    timeout_ns: u64,
}

impl PathMtus {
    pub(crate) fn new(key: HashKey, limit: usize, timeout_ns: u64) -> Self {
        Self { known: HashMap::with_hasher(key), limit, timeout_ns }
    }

    pub(crate) fn get(&self, now_ns: u64, destination: IpAddr) -> Option<PathMtu> {
        self.known.get(&destination).copied().filter(|known| now_ns < known.until_ns)
    }

    /// All that is known.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (IpAddr, PathMtu)> + '_ {
        self.known.iter().map(|(&destination, &known)| (destination, known))
    }

    /// Takes what was known before, if it can be and there is room.
    pub(crate) fn take_up(&mut self, now_ns: u64, destination: IpAddr, known: PathMtu) {
        let minimum = if destination.is_ipv4() { MINIMUM_V4 } else { MINIMUM_V6 };
        if known.mtu >= minimum && self.known.len() < self.limit {
            let until_ns = known.until_ns.min(now_ns.saturating_add(self.timeout_ns));
            self.known.insert(destination, PathMtu { until_ns, ..known });
        }
    }

    /// Takes what a router told about a packet of `packet_bytes` that we sent
    /// over a path with MTU `current`. `told` is 0 when the router is too old
    /// to tell. Returns the new path MTU.
    ///
    /// # Errors
    /// [`DropReason::IcmpMtu`] when it is no news, or impossible.
    pub(crate) fn learn(
        &mut self,
        now_ns: u64,
        destination: IpAddr,
        told: usize,
        packet_bytes: usize,
        current: usize,
    ) -> Result<usize, DropReason> {
        let told = match told {
            0 if destination.is_ipv4() => {
                let smaller = PLATEAUS.into_iter().find(|&size| size < packet_bytes.min(current));
                smaller.unwrap_or(MINIMUM_V4)
            }
            told => told,
        };
        let minimum = if destination.is_ipv4() { MINIMUM_V4 } else { MINIMUM_V6 };
        // RFC 8201 section 4: less than the minimum is to be ignored. And a
        // packet that fits cannot have been too big.
        if destination.is_ipv6() && told < minimum || told < 68 || packet_bytes <= told {
            return Err(DropReason::IcmpMtu);
        }
        let routers_fragment = told < minimum;
        let mtu = told.max(minimum).min(current);
        let known = self.get(now_ns, destination);
        if mtu == current && known.is_some_and(|k| k.routers_fragment >= routers_fragment)
            || mtu >= current && !routers_fragment
        {
            return Err(DropReason::IcmpMtu);
        }
        if self.known.len() >= self.limit && !self.known.contains_key(&destination) {
            self.known.retain(|_, known| now_ns < known.until_ns);
            if self.known.len() >= self.limit {
                return Err(DropReason::IcmpMtu);
            }
        }
        let until_ns = now_ns.saturating_add(self.timeout_ns);
        self.known.insert(destination, PathMtu { mtu, routers_fragment, until_ns });
        Ok(mtu)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    fn mtus() -> PathMtus {
        PathMtus::new(Chance::new([0; 16]).hash_key(), 2, 1000)
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn what_is_told_is_believed_for_a_while() {
        let mut mtus = mtus();
        for destination in [ip("192.0.2.9"), ip("2001:db8::9")] {
            assert_eq!(mtus.learn(0, destination, 1400, 1500, 1500), Ok(1400));
            assert_eq!(mtus.get(999, destination).map(|k| k.mtu), Some(1400));
            assert_eq!(mtus.get(1000, destination), None);
        }
    }

    #[test]
    fn minimums_hold() {
        let mut mtus = mtus();
        let (v4, v6) = (ip("192.0.2.9"), ip("2001:db8::9"));
        assert_eq!(mtus.learn(0, v6, 1279, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(mtus.learn(0, v6, 0, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(mtus.learn(0, v4, 67, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(mtus.learn(0, v4, 296, 1500, 1500), Ok(576));
        assert!(mtus.get(0, v4).unwrap().routers_fragment);
    }

    #[test]
    fn nothing_makes_it_larger_and_nothing_that_fits_was_too_big() {
        let mut mtus = mtus();
        let v4 = ip("192.0.2.9");
        assert_eq!(mtus.learn(0, v4, 1500, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(mtus.learn(0, v4, 9000, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(mtus.learn(0, v4, 1000, 900, 1500), Err(DropReason::IcmpMtu));
    }

    #[test]
    fn old_routers_step_down_the_plateaus() {
        let mut mtus = mtus();
        let v4 = ip("192.0.2.9");
        let mut current = 1500;
        for expected in [1492, 1006, 576] {
            current = mtus.learn(0, v4, 0, current, current).unwrap();
            assert_eq!(current, expected);
        }
    }

    #[test]
    fn the_table_is_bounded_and_ages() {
        let mut mtus = mtus();
        assert!(mtus.learn(0, ip("192.0.2.1"), 1400, 1500, 1500).is_ok());
        assert!(mtus.learn(0, ip("192.0.2.2"), 1400, 1500, 1500).is_ok());
        assert!(mtus.learn(0, ip("192.0.2.3"), 1400, 1500, 1500).is_err());
        assert!(mtus.learn(2000, ip("192.0.2.3"), 1400, 1500, 1500).is_ok());
    }
}
