//! Path MTU discovery (RFC 1191, RFC 8201): path MTUs below the link's MTU, as reported by
//! routers.

use std::collections::HashMap;
use std::net::IpAddr;

use tidegate_wire::DropReason;

use crate::random::HashKey;

/// Minimum MTU of every IPv6 link (RFC 8200 section 5).
pub(crate) const MIN_PATH_MTU_V6_BYTES: usize = 1280;
/// Packet size that every IPv4 host must accept (RFC 1122 section 3.3.2). RFC 791 allows link MTUs
/// down to 68 bytes. After a report below this minimum, the stack clears the "don't fragment" flag
/// instead of sending tiny packets.
pub(crate) const MIN_PATH_MTU_V4_BYTES: usize = 576;

/// MTUs to try when a router reports none (RFC 1191 section 7).
const PLATEAU_MTUS_BYTES: [usize; 7] = [32_000, 17_914, 8166, 4352, 2002, 1492, 1006];

/// Reduced path MTU of one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PathMtu {
    /// Path MTU in bytes.
    pub(crate) mtu: usize,
    /// Routers on the path must fragment: its MTU is below the minimum that this host uses.
    pub(crate) routers_fragment: bool,
    /// Expiry time in nanoseconds.
    pub(crate) until_ns: u64,
}

/// Destinations with a path MTU below the link's MTU.
pub(crate) struct PathMtuCache {
    entries: HashMap<IpAddr, PathMtu, HashKey>,
    max_entries: usize,
    timeout_ns: u64,
}

impl PathMtuCache {
    pub(crate) fn new(key: HashKey, max_entries: usize, timeout_ns: u64) -> Self {
        Self { entries: HashMap::with_hasher(key), max_entries, timeout_ns }
    }

    pub(crate) fn get(&self, now_ns: u64, destination: IpAddr) -> Option<PathMtu> {
        self.entries.get(&destination).copied().filter(|known| now_ns < known.until_ns)
    }

    /// All entries.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (IpAddr, PathMtu)> + '_ {
        self.entries.iter().map(|(&destination, &known)| (destination, known))
    }

    /// Adds an entry of an earlier or other stack, if it is valid and there is space.
    pub(crate) fn restore(&mut self, now_ns: u64, destination: IpAddr, known: PathMtu) {
        let minimum =
            if destination.is_ipv4() { MIN_PATH_MTU_V4_BYTES } else { MIN_PATH_MTU_V6_BYTES };
        if known.mtu >= minimum && self.entries.len() < self.max_entries {
            let until_ns = known.until_ns.min(now_ns.saturating_add(self.timeout_ns));
            self.entries.insert(destination, PathMtu { until_ns, ..known });
        }
    }

    /// Applies a router's report about a packet of `packet_bytes` bytes, sent over a path with MTU
    /// `current`. `reported` is 0 when the router does not report its MTU. Returns the new path
    /// MTU.
    ///
    /// # Errors
    /// [`DropReason::IcmpMtu`] when the report changes nothing or is impossible.
    pub(crate) fn learn(
        &mut self,
        now_ns: u64,
        destination: IpAddr,
        reported: usize,
        packet_bytes: usize,
        current: usize,
    ) -> Result<usize, DropReason> {
        let reported = match reported {
            0 if destination.is_ipv4() => {
                let smaller =
                    PLATEAU_MTUS_BYTES.into_iter().find(|&size| size < packet_bytes.min(current));
                smaller.unwrap_or(MIN_PATH_MTU_V4_BYTES)
            }
            reported => reported,
        };
        let minimum =
            if destination.is_ipv4() { MIN_PATH_MTU_V4_BYTES } else { MIN_PATH_MTU_V6_BYTES };
        // RFC 8201 section 4: reports below the minimum are ignored. And a packet that fits cannot
        // have been too big.
        if destination.is_ipv6() && reported < minimum || reported < 68 || packet_bytes <= reported
        {
            return Err(DropReason::IcmpMtu);
        }
        let routers_fragment = reported < minimum;
        let mtu = reported.max(minimum).min(current);
        let known = self.get(now_ns, destination);
        if mtu == current && known.is_some_and(|k| k.routers_fragment >= routers_fragment)
            || mtu >= current && !routers_fragment
        {
            return Err(DropReason::IcmpMtu);
        }
        if self.entries.len() >= self.max_entries && !self.entries.contains_key(&destination) {
            self.entries.retain(|_, known| now_ns < known.until_ns);
            if self.entries.len() >= self.max_entries {
                return Err(DropReason::IcmpMtu);
            }
        }
        let until_ns = now_ns.saturating_add(self.timeout_ns);
        self.entries.insert(destination, PathMtu { mtu, routers_fragment, until_ns });
        Ok(mtu)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    fn mtus() -> PathMtuCache {
        PathMtuCache::new(SecretRng::new([0; 16]).hash_key(), 2, 1000)
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn forgets_a_reported_mtu_after_the_timeout() {
        let mut mtus = mtus();
        for destination in [ip("192.0.2.9"), ip("2001:db8::9")] {
            assert_eq!(mtus.learn(0, destination, 1400, 1500, 1500), Ok(1400));
            assert_eq!(mtus.get(999, destination).map(|k| k.mtu), Some(1400));
            assert_eq!(mtus.get(1000, destination), None);
        }
    }

    #[test]
    fn rejects_or_clamps_mtus_below_the_minimum() {
        let mut mtus = mtus();
        let (v4, v6) = (ip("192.0.2.9"), ip("2001:db8::9"));
        assert_eq!(mtus.learn(0, v6, 1279, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(mtus.learn(0, v6, 0, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(mtus.learn(0, v4, 67, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(mtus.learn(0, v4, 296, 1500, 1500), Ok(576));
        assert!(mtus.get(0, v4).unwrap().routers_fragment);
    }

    #[test]
    fn rejects_reports_that_raise_the_mtu_or_quote_a_fitting_packet() {
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
    fn limits_entries_and_reuses_expired_ones() {
        let mut mtus = mtus();
        assert!(mtus.learn(0, ip("192.0.2.1"), 1400, 1500, 1500).is_ok());
        assert!(mtus.learn(0, ip("192.0.2.2"), 1400, 1500, 1500).is_ok());
        assert!(mtus.learn(0, ip("192.0.2.3"), 1400, 1500, 1500).is_err());
        assert!(mtus.learn(2000, ip("192.0.2.3"), 1400, 1500, 1500).is_ok());
    }
}
