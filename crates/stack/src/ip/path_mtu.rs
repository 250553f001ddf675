//! Path MTU discovery (RFC 1191, RFC 8201): path MTUs below the link's MTU, as reported by
//! routers.

use std::collections::HashMap;
use std::net::IpAddr;

use tidegate_wire::DropReason;

use crate::random::{HashKey, SecretRng};

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

/// Packet that a report of a path MTU quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuotedKind {
    /// A TCP segment in flight. An attacker must guess its sequence number, so segments are sized
    /// by these reports only (RFC 5927 section 7).
    Segment,
    /// A datagram of an existing socket, which an attacker can invent.
    Datagram,
}

/// Destinations with a path MTU below the link's MTU, by kind of evidence.
pub(crate) struct PathMtuCache {
    of_segments: PathMtuTable,
    of_datagrams: PathMtuTable,
    timeout_ns: u64,
}

/// Path MTUs of a limited number of destinations. A new entry replaces a random entry of a full
/// table, so that forged reports cannot keep real reports out.
struct PathMtuTable {
    entries: Vec<(IpAddr, PathMtu)>,
    index: HashMap<IpAddr, usize, HashKey>,
    max_entries: usize,
}

impl PathMtuTable {
    fn new(key: HashKey, max_entries: usize) -> Self {
        Self { entries: Vec::new(), index: HashMap::with_hasher(key), max_entries }
    }

    fn get(&self, now_ns: u64, destination: IpAddr) -> Option<PathMtu> {
        let &at = self.index.get(&destination)?;
        self.entries.get(at).map(|entry| entry.1).filter(|known| now_ns < known.until_ns)
    }

    fn insert(&mut self, rng: &mut SecretRng, destination: IpAddr, known: PathMtu) {
        if let Some(&at) = self.index.get(&destination) {
            self.entries[at].1 = known;
        } else if self.entries.len() < self.max_entries {
            self.index.insert(destination, self.entries.len());
            self.entries.push((destination, known));
        } else if let Ok(count @ 1..) = u32::try_from(self.entries.len()) {
            let at = rng.below(count) as usize;
            self.index.remove(&self.entries[at].0);
            self.index.insert(destination, at);
            self.entries[at] = (destination, known);
        }
    }
}

impl PathMtuCache {
    /// Cache with at most `max_entries` destinations for each kind of evidence.
    pub(crate) fn new(key: HashKey, max_entries: usize, timeout_ns: u64) -> Self {
        let table = || PathMtuTable::new(key, max_entries);
        Self { of_segments: table(), of_datagrams: table(), timeout_ns }
    }

    /// Path MTU for packets of a kind: reports about segments hold for datagrams too.
    pub(crate) fn get(
        &self,
        now_ns: u64,
        kind: QuotedKind,
        destination: IpAddr,
    ) -> Option<PathMtu> {
        let of_segments = self.of_segments.get(now_ns, destination);
        match kind {
            QuotedKind::Segment => of_segments,
            QuotedKind::Datagram => {
                let of_datagrams = self.of_datagrams.get(now_ns, destination);
                of_segments.into_iter().chain(of_datagrams).min_by_key(|known| known.mtu)
            }
        }
    }

    /// All entries; a destination may occur twice.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (IpAddr, PathMtu)> + '_ {
        self.of_segments.entries.iter().chain(&self.of_datagrams.entries).copied()
    }

    /// Adds an entry of an earlier or other stack, if it is valid, lower than a known entry, and
    /// there is space.
    pub(crate) fn restore(
        &mut self,
        now_ns: u64,
        rng: &mut SecretRng,
        kind: QuotedKind,
        destination: IpAddr,
        known: PathMtu,
    ) {
        let until_ns = known.until_ns.min(now_ns.saturating_add(self.timeout_ns));
        let is_lower =
            self.get(now_ns, kind, destination).is_none_or(|present| known.mtu < present.mtu);
        let table = self.table(kind);
        let has_space = table.entries.len() < table.max_entries;
        if known.mtu >= min_path_mtu_bytes(destination) && has_space && is_lower {
            table.insert(rng, destination, PathMtu { until_ns, ..known });
        }
    }

    fn table(&mut self, kind: QuotedKind) -> &mut PathMtuTable {
        match kind {
            QuotedKind::Segment => &mut self.of_segments,
            QuotedKind::Datagram => &mut self.of_datagrams,
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
        rng: &mut SecretRng,
        destination: IpAddr,
        report: MtuReport,
        current: usize,
    ) -> Result<usize, DropReason> {
        let MtuReport { kind, packet_bytes, mtu: reported } = report;
        let reported = match reported {
            0 if destination.is_ipv4() => {
                let smaller =
                    PLATEAU_MTUS_BYTES.into_iter().find(|&size| size < packet_bytes.min(current));
                smaller.unwrap_or(MIN_PATH_MTU_V4_BYTES)
            }
            reported => reported,
        };
        let minimum = min_path_mtu_bytes(destination);
        // RFC 8201 section 4: reports below the minimum are ignored. And a packet that fits cannot
        // have been too big.
        if destination.is_ipv6() && reported < minimum || reported < 68 || packet_bytes <= reported
        {
            return Err(DropReason::IcmpMtu);
        }
        let routers_fragment = reported < minimum;
        let mtu = reported.max(minimum).min(current);
        let known = self.get(now_ns, kind, destination);
        if mtu == current && known.is_some_and(|k| k.routers_fragment >= routers_fragment)
            || mtu >= current && !routers_fragment
        {
            return Err(DropReason::IcmpMtu);
        }
        let until_ns = now_ns.saturating_add(self.timeout_ns);
        let learned = PathMtu { mtu, routers_fragment, until_ns };
        self.table(kind).insert(rng, destination, learned);
        Ok(mtu)
    }
}

/// Report of a router that a packet exceeds the next hop's MTU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MtuReport {
    pub(crate) kind: QuotedKind,
    /// Length of the quoted packet.
    pub(crate) packet_bytes: usize,
    /// MTU of the next hop in bytes; 0 when not reported.
    pub(crate) mtu: usize,
}

/// Smallest path MTU that this host uses.
fn min_path_mtu_bytes(destination: IpAddr) -> usize {
    if destination.is_ipv4() { MIN_PATH_MTU_V4_BYTES } else { MIN_PATH_MTU_V6_BYTES }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cache of two destinations, with its generator.
    struct Cache {
        mtus: PathMtuCache,
        rng: SecretRng,
    }

    impl Cache {
        fn new() -> Self {
            let mut rng = SecretRng::new([0; 16]);
            Self { mtus: PathMtuCache::new(rng.hash_key(), 2, 1000), rng }
        }

        fn learn(
            &mut self,
            now_ns: u64,
            destination: IpAddr,
            mtu: usize,
            packet_bytes: usize,
            current: usize,
        ) -> Result<usize, DropReason> {
            let report = MtuReport { kind: QuotedKind::Datagram, packet_bytes, mtu };
            self.mtus.learn(now_ns, &mut self.rng, destination, report, current)
        }

        fn get(&self, now_ns: u64, destination: IpAddr) -> Option<PathMtu> {
            self.mtus.get(now_ns, QuotedKind::Datagram, destination)
        }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn forgets_a_reported_mtu_after_the_timeout() {
        let mut cache = Cache::new();
        for destination in [ip("192.0.2.9"), ip("2001:db8::9")] {
            assert_eq!(cache.learn(0, destination, 1400, 1500, 1500), Ok(1400));
            assert_eq!(cache.get(999, destination).map(|k| k.mtu), Some(1400));
            assert_eq!(cache.get(1000, destination), None);
        }
    }

    #[test]
    fn rejects_or_clamps_mtus_below_the_minimum() {
        let mut cache = Cache::new();
        let (v4, v6) = (ip("192.0.2.9"), ip("2001:db8::9"));
        assert_eq!(cache.learn(0, v6, 1279, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(cache.learn(0, v6, 0, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(cache.learn(0, v4, 67, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(cache.learn(0, v4, 296, 1500, 1500), Ok(576));
        assert!(cache.get(0, v4).unwrap().routers_fragment);
    }

    #[test]
    fn rejects_reports_that_raise_the_mtu_or_quote_a_fitting_packet() {
        let mut cache = Cache::new();
        let v4 = ip("192.0.2.9");
        assert_eq!(cache.learn(0, v4, 1500, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(cache.learn(0, v4, 9000, 1500, 1500), Err(DropReason::IcmpMtu));
        assert_eq!(cache.learn(0, v4, 1000, 900, 1500), Err(DropReason::IcmpMtu));
    }

    #[test]
    fn old_routers_step_down_the_plateaus() {
        let mut cache = Cache::new();
        let v4 = ip("192.0.2.9");
        let mut current = 1500;
        for expected in [1492, 1006, 576] {
            current = cache.learn(0, v4, 0, current, current).unwrap();
            assert_eq!(current, expected);
        }
    }

    #[test]
    fn a_full_table_replaces_an_entry_and_stays_full() {
        let mut cache = Cache::new();
        for n in 1..=50 {
            let destination = IpAddr::from([192, 0, 2, n]);
            assert_eq!(cache.learn(0, destination, 1400, 1500, 1500), Ok(1400));
            assert_eq!(cache.get(0, destination).map(|k| k.mtu), Some(1400));
            assert_eq!(cache.mtus.iter().count(), usize::from(n).min(2));
        }
    }

    #[test]
    fn reports_about_datagrams_do_not_reach_segments() {
        let mut cache = Cache::new();
        let v4 = ip("192.0.2.9");
        let report = MtuReport { kind: QuotedKind::Segment, packet_bytes: 1500, mtu: 1400 };
        assert_eq!(cache.mtus.learn(0, &mut cache.rng, v4, report, 1500), Ok(1400));
        assert_eq!(cache.learn(0, v4, 600, 1400, 1400), Ok(600));
        for n in 1..=50 {
            let _ = cache.learn(0, IpAddr::from([198, 51, 100, n]), 600, 1500, 1500);
        }
        let of_segments = cache.mtus.get(0, QuotedKind::Segment, v4);
        assert_eq!(of_segments.map(|known| known.mtu), Some(1400));
    }
}
