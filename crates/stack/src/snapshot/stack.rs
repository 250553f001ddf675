//! Snapshot of a stack as plain data: saved by one process and restored by another, so that an
//! upgrade of the program loses no connection.

use std::net::IpAddr;

use tidegate_memory::Arena;
use tidegate_wire::{DropCounters, DropReason, MacAddr};

use super::error::{RestoreError, STATE_VERSION};
use crate::interface::Interface;
use crate::ip::address::AddressKind;
use crate::ip::path_mtu::{PathMtu, QuotedKind};
use crate::tcp::TcpSnapshot;
use crate::udp::UdpSnapshot;
use crate::{Config, Counters, Stack};

/// Complete state of a stack that its peers and the users of its sockets depend on.
///
/// A snapshot holds data without frames, and its times are relative to the moment of saving: the
/// restoring process may have another arena and another clock. Serialize it with serde in any
/// format, and keep it secret: it allows forging segments of the connections. Deserialized data may
/// be wrong in any way; [`Stack::restore`] checks all of it. The data of connections and datagrams
/// is borrowed from the serialized bytes where the format permits.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct StackSnapshot<'a> {
    version: u32,
    groups: Vec<IpAddr>,
    neighbours: Vec<(IpAddr, [u8; 6])>,
    path_mtus: Vec<PathMtuSnapshot>,
    counters: CountersSnapshot,
    #[cfg_attr(feature = "serde", serde(borrow))]
    udp: UdpSnapshot<'a>,
    #[cfg_attr(feature = "serde", serde(borrow))]
    tcp: TcpSnapshot<'a>,
}

#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct PathMtuSnapshot {
    destination: IpAddr,
    mtu: u16,
    routers_fragment: bool,
    /// Remaining lifetime in nanoseconds.
    remaining_ns: u64,
}

/// Counters, except those that follow from the others. Drops are stored by name.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct CountersSnapshot {
    copied: u64,
    delivered: u64,
    handled: u64,
    forwarded: u64,
    merged: u64,
    transmitted: u64,
    icmp_errors_sent: u64,
    drops: Vec<(String, u64)>,
    transmit_drops: Vec<(String, u64)>,
}

fn save_drops(drops: &DropCounters) -> Vec<(String, u64)> {
    drops.nonzero().map(|(reason, packets)| (reason.name().to_owned(), packets)).collect()
}

/// Restores drop counters. Unknown drop reasons are ignored.
fn restore_drops(saved: &[(String, u64)]) -> DropCounters {
    let mut drops = DropCounters::new();
    for (name, packets) in saved {
        if let Some(reason) = DropReason::from_name(name) {
            drops.add(reason, *packets);
        }
    }
    drops
}

/// Upper bound of a valid counter: the sum of all counters cannot overflow.
const MAX_COUNTER_PACKETS: u64 = 1 << 56;

impl CountersSnapshot {
    /// Saves the counters. Stored fragments are not saved and count as dropped.
    fn save(counters: &Counters, datagrams: u64) -> Self {
        let mut drops = counters.drops.clone();
        drops.add(DropReason::FragmentTimeout, counters.held.saturating_sub(datagrams));
        Self {
            copied: counters.copied,
            delivered: counters.delivered,
            handled: counters.handled,
            forwarded: counters.forwarded,
            merged: counters.merged,
            transmitted: counters.transmitted,
            icmp_errors_sent: counters.icmp_errors_sent,
            drops: save_drops(&drops),
            transmit_drops: save_drops(&counters.transmit_drops),
        }
    }

    fn restore(&self, held: u64) -> Result<Counters, RestoreError> {
        let numbers = [self.copied, self.delivered, self.handled, self.forwarded, self.merged];
        let numbers = numbers.into_iter().chain([self.transmitted, self.icmp_errors_sent]);
        let by_name = self.drops.iter().chain(&self.transmit_drops).map(|(_, packets)| *packets);
        if numbers.chain(by_name).any(|packets| packets > MAX_COUNTER_PACKETS) {
            return Err(RestoreError::Damaged("a counter is out of range"));
        }
        let drops = restore_drops(&self.drops);
        let accounted = [self.delivered, self.handled, self.forwarded, self.merged, held];
        let accounted = accounted.into_iter().sum::<u64>() + drops.total();
        let copied = self.copied.min(accounted);
        Ok(Counters {
            received: accounted - copied,
            copied,
            delivered: self.delivered,
            handled: self.handled,
            forwarded: self.forwarded,
            merged: self.merged,
            held,
            // Datagrams that migrated in sockets count as received here.
            migrated_in: 0,
            migrated_out: 0,
            drops,
            transmitted: self.transmitted,
            icmp_errors_sent: self.icmp_errors_sent,
            transmit_drops: restore_drops(&self.transmit_drops),
        })
    }
}

impl Stack {
    /// Saves everything that another process needs to continue this stack: sockets with their
    /// handles, connections, listeners, queued data, known neighbours and path MTUs. The stack
    /// itself is unchanged and can continue if no process restores the snapshot.
    ///
    /// Call between two bursts. Frames in the transmit queue, frames that wait for a neighbour,
    /// packets to forward and fragments are not saved: they are lost like packets on a wire. So
    /// transmit the queue first.
    pub fn save(&self, now_ns: u64, arena: &Arena) -> StackSnapshot<'static> {
        let path_mtus =
            self.interface.path_mtus.iter().map(|(destination, known)| PathMtuSnapshot {
                destination,
                mtu: u16::try_from(known.mtu).unwrap_or(u16::MAX),
                routers_fragment: known.routers_fragment,
                remaining_ns: known.until_ns.saturating_sub(now_ns),
            });
        StackSnapshot {
            version: STATE_VERSION,
            groups: self.interface.addresses.groups().collect(),
            neighbours: self
                .interface
                .neighbours
                .resolved_entries()
                .map(|(ip, mac)| (ip, mac.0))
                .collect(),
            path_mtus: path_mtus.filter(|known| known.remaining_ns > 0).collect(),
            counters: CountersSnapshot::save(&self.interface.counters, self.udp.queued_datagrams()),
            udp: self.udp.save(arena),
            tcp: self.tcp.save(now_ns),
        }
    }

    /// Creates a stack that continues a saved stack. Every [`crate::TcpId`],
    /// [`crate::TcpListenerId`] and [`crate::UdpId`] stays valid. Readiness is reported by an
    /// [`crate::Event`], even if it was reported before. Pending packets are in the transmit queue.
    ///
    /// `now_ns` is on the clock of the new stack, which may have another origin. The time between
    /// saving and restoring does not count. Times before the origin of the new clock are set to the
    /// origin, so that some timeouts take longer if the clock has just started.
    ///
    /// # Errors
    /// When the snapshot has another format version, is damaged, exceeds the limits of `config`, or
    /// uses an address that `config` lacks. No frame is lost then.
    pub fn restore(
        config: Config,
        saved: StackSnapshot<'_>,
        now_ns: u64,
        arena: &mut Arena,
    ) -> Result<Stack, RestoreError> {
        if saved.version != STATE_VERSION {
            return Err(RestoreError::Version { found: saved.version });
        }
        let mut stack = Stack::new(config, now_ns)?;
        stack.restore_link(now_ns, &saved);
        let readable = stack.udp.restore(saved.udp)?;
        stack.interface.events.extend(readable);
        stack.interface.counters = saved.counters.restore(stack.udp.queued_datagrams())?;
        stack.tcp.restore(now_ns, saved.tcp)?;
        stack.check_socket_addresses()?;
        stack.tcp_flush(now_ns, arena);
        Ok(stack)
    }

    /// Checks that all socket addresses belong to the interface.
    fn check_socket_addresses(&self) -> Result<(), RestoreError> {
        let used = self.udp.local_addresses().chain(self.tcp.local_addresses());
        self.find_nonlocal_address(used).map_or(Ok(()), |ip| Err(RestoreError::Address(ip)))
    }

    /// Returns the first socket address that does not belong to the interface.
    pub(crate) fn find_nonlocal_address(
        &self,
        mut used: impl Iterator<Item = IpAddr>,
    ) -> Option<IpAddr> {
        used.find(|&ip| {
            let may_be = ip.is_unspecified() || ip.is_multicast();
            !may_be && self.interface.addresses.kind(ip) == AddressKind::Other
        })
    }

    /// Restores addresses, groups, neighbours and path MTUs. Invalid entries are skipped; the stack
    /// will discover them again.
    fn restore_link(&mut self, now_ns: u64, saved: &StackSnapshot<'_>) {
        for &group in saved.groups.iter().filter(|group| group.is_multicast()) {
            self.interface.addresses.join(group);
        }
        self.interface.schedule_mld_reports(now_ns);
        for &(ip, mac) in &saved.neighbours {
            let mac = MacAddr(mac);
            if mac.is_valid_unicast() && !ip.is_multicast() && !ip.is_unspecified() {
                // Stale: the entry was valid before, and is verified at its next use.
                let _ = self.interface.neighbours.learn(now_ns, ip, mac);
            }
        }
        for known in &saved.path_mtus {
            let mtu = usize::from(known.mtu);
            let until_ns = now_ns.saturating_add(known.remaining_ns);
            let routers_fragment = known.routers_fragment;
            if mtu <= self.interface.mtu {
                let known_mtu = PathMtu { mtu, routers_fragment, until_ns };
                let Interface { path_mtus, rng, .. } = &mut self.interface;
                // The snapshot does not tell the kind of evidence.
                let kind = QuotedKind::Segment;
                path_mtus.restore(now_ns, rng, kind, known.destination, known_mtu);
            }
        }
    }
}
