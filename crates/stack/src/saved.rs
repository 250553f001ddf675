//! The state of a stack as plain data: written down by one process and taken up
//! by another, so that a program can be replaced without a connection lost.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tidegate_memory::Arena;
use tidegate_wire::{DropCounters, DropReason, MacAddr};

use crate::address::Kind;
use crate::path_mtu::PathMtu;
use crate::tcp::SavedTcp;
use crate::udp::SavedUdp;
use crate::{Config, ConfigError, Counters, Stack};

/// The format of [`SavedStack`]. It grows with every change to what is written,
/// so that two programs can tell before they begin whether they understand each
/// other.
pub const STATE_VERSION: u32 = 3;

/// Everything about a stack that its peers and the users of its sockets would
/// miss.
///
/// It is data without frames, and has its times relative to the moment it was
/// saved: who takes it up may have another arena and another clock. To be
/// written down with serde, in any format, and to be kept as secret as the
/// connections are: whoever has it can forge their segments. What was read may
/// be wrong in any way: [`Stack::restore`] checks all of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedStack {
    version: u32,
    /// Our IPv6 addresses that are known to be unique.
    unique: Vec<IpAddr>,
    groups: Vec<IpAddr>,
    neighbours: Vec<(IpAddr, [u8; 6])>,
    path_mtus: Vec<SavedPathMtu>,
    counters: SavedCounters,
    udp: SavedUdp,
    tcp: SavedTcp,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct SavedPathMtu {
    destination: IpAddr,
    mtu: u16,
    routers_fragment: bool,
    /// How long it is still believed.
    for_ns: u64,
}

/// The counters, but for those that follow from the others. Drops are by name.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct SavedCounters {
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

/// Why a [`SavedStack`] was not taken up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// It was written by a program of another version.
    #[error(
        "the state has format {found}, and this program reads format {STATE_VERSION}: \
         restart instead of upgrading"
    )]
    Version {
        /// The format that was found.
        found: u32,
    },
    /// The new stack's own configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The limits of the new stack are lower than what is in use.
    #[error("the state has {found} {what}, and there is room for {limit}: raise the limit")]
    TooMany {
        /// What there are too many of.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there may be.
        limit: usize,
    },
    /// A socket has an address that the new stack has not.
    #[error("a socket has the address {0}, which the interface has no more: keep the address")]
    Address(IpAddr),
    /// The state contradicts itself: it was damaged on its way.
    #[error("the state is damaged: {0}; save it again, or restart instead of upgrading")]
    Damaged(&'static str),
}

fn save_drops(drops: &DropCounters) -> Vec<(String, u64)> {
    drops.nonzero().map(|(reason, packets)| (reason.name().to_owned(), packets)).collect()
}

/// Takes drops up. Those for reasons that there are no more are forgotten.
fn restore_drops(saved: &[(String, u64)]) -> DropCounters {
    let mut drops = DropCounters::new();
    for (name, packets) in saved {
        if let Some(reason) = DropReason::from_name(name) {
            drops.add(reason, *packets);
        }
    }
    drops
}

/// No counter gets so far, and all of them together do not overflow.
const MOST_PACKETS: u64 = 1 << 56;

impl SavedCounters {
    /// Fragments that wait are not taken along: they count as dropped.
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
        if numbers.chain(by_name).any(|packets| packets > MOST_PACKETS) {
            return Err(RestoreError::Damaged("a counter is beyond all that can be"));
        }
        let drops = restore_drops(&self.drops);
        let known = [self.delivered, self.handled, self.forwarded, self.merged, held];
        let known = known.into_iter().sum::<u64>() + drops.total();
        let copied = self.copied.min(known);
        Ok(Counters {
            received: known - copied,
            copied,
            delivered: self.delivered,
            handled: self.handled,
            forwarded: self.forwarded,
            merged: self.merged,
            held,
            // What came in sockets counts as received here.
            moved_in: 0,
            moved_out: 0,
            drops,
            transmitted: self.transmitted,
            icmp_errors_sent: self.icmp_errors_sent,
            transmit_drops: restore_drops(&self.transmit_drops),
        })
    }
}

impl Stack {
    /// Writes down everything that another process needs to go on with this
    /// stack: sockets by their names, connections, listeners, what waits to be
    /// read or sent, known neighbours and paths. Nothing is changed, so if
    /// nobody takes it up, this stack can go on.
    ///
    /// Call it between two bursts. Frames in the transmit queue, frames that
    /// wait for a neighbour, packets to be forwarded and fragments are not part
    /// of it: they are lost as on a wire. So send the queue first.
    pub fn save(&self, now_ns: u64, arena: &Arena) -> SavedStack {
        let path_mtus = self.path_mtus.iter().map(|(destination, known)| SavedPathMtu {
            destination,
            mtu: u16::try_from(known.mtu).unwrap_or(u16::MAX),
            routers_fragment: known.routers_fragment,
            for_ns: known.until_ns.saturating_sub(now_ns),
        });
        SavedStack {
            version: STATE_VERSION,
            unique: self.addresses.ours().filter(IpAddr::is_ipv6).collect(),
            groups: self.addresses.groups().collect(),
            neighbours: self.neighbours.known().map(|(ip, mac)| (ip, mac.0)).collect(),
            path_mtus: path_mtus.filter(|known| known.for_ns > 0).collect(),
            counters: SavedCounters::save(&self.counters, self.udp.held()),
            udp: self.udp.save(arena),
            tcp: self.tcp.save(now_ns),
        }
    }

    /// Makes a stack that goes on where another one was saved. Every
    /// [`crate::TcpId`], [`crate::TcpListenerId`] and [`crate::UdpId`] names
    /// what it named there. Whatever is ready is told by an [`crate::Event`],
    /// told before or not, and what is to be sent is in the transmit queue.
    ///
    /// `now_ns` is on the clock of the new stack, which may have another
    /// beginning; the time between saving and restoring does not count. What
    /// was before the beginning of that clock is taken to have been at it, so
    /// that some time-outs take longer when it has just begun.
    ///
    /// # Errors
    /// When the state is of another version, is damaged, or is more than the
    /// limits of `config` allow, or when `config` lacks an address in use. No frame is lost then.
    pub fn restore(
        config: Config,
        saved: SavedStack,
        now_ns: u64,
        arena: &mut Arena,
    ) -> Result<Stack, RestoreError> {
        if saved.version != STATE_VERSION {
            return Err(RestoreError::Version { found: saved.version });
        }
        let mut stack = Stack::new(config, now_ns)?;
        stack.restore_link(now_ns, &saved);
        let told = stack.udp.restore(saved.udp)?;
        stack.events.extend(told);
        stack.counters = saved.counters.restore(stack.udp.held())?;
        stack.tcp.restore(now_ns, saved.tcp)?;
        stack.check_addresses()?;
        stack.tcp_flush(now_ns, arena);
        Ok(stack)
    }

    /// What sockets send must not come from somebody else's address.
    fn check_addresses(&self) -> Result<(), RestoreError> {
        let used = self.udp.local_addresses().chain(self.tcp.local_addresses());
        self.foreign(used).map_or(Ok(()), |ip| Err(RestoreError::Address(ip)))
    }

    /// The first of some addresses of sockets that is not ours.
    pub(crate) fn foreign(&self, mut used: impl Iterator<Item = IpAddr>) -> Option<IpAddr> {
        used.find(|&ip| {
            let may_be = ip.is_unspecified() || ip.is_multicast();
            !may_be && self.addresses.kind(ip) == Kind::Other
        })
    }

    /// Takes up what was known about the link and the ways beyond it. What
    /// cannot be is left out: it will be found out again.
    fn restore_link(&mut self, now_ns: u64, saved: &SavedStack) {
        // They are in use: nobody else has got them meanwhile.
        let is_unique = |address| saved.unique.contains(&IpAddr::V6(address));
        let (unique, tentative) =
            self.tentative.drain(..).partition::<Vec<_>, _>(|t| is_unique(t.address));
        self.tentative = tentative;
        for tentative in unique {
            self.addresses.confirm(tentative.address.into());
        }
        for &group in saved.groups.iter().filter(|group| group.is_multicast()) {
            self.addresses.join(group);
        }
        self.report_groups(now_ns);
        for &(ip, mac) in &saved.neighbours {
            let mac = MacAddr(mac);
            if mac.is_station() && !ip.is_multicast() && !ip.is_unspecified() {
                // It was right a moment ago; whether it still is, is asked when
                // it is used.
                let _ = self.neighbours.heard(now_ns, ip, mac);
            }
        }
        for known in &saved.path_mtus {
            let mtu = usize::from(known.mtu);
            let until_ns = now_ns.saturating_add(known.for_ns);
            let routers_fragment = known.routers_fragment;
            if mtu <= self.mtu {
                let known_mtu = PathMtu { mtu, routers_fragment, until_ns };
                self.path_mtus.take_up(now_ns, known.destination, known_mtu);
            }
        }
    }
}
