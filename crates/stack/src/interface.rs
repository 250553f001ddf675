//! Network interface: the state below the transport protocols, which borrow it.

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;

use tidegate_memory::{Arena, Fifo, Frame};
use tidegate_wire::{IpCidr, MacAddr, Medium, VlanTag};

use crate::fast_path::plain::PlainLink;
use crate::icmp::{PendingReply, ReportSchedule};
use crate::ip::address::{ALL_ROUTERS, AddressKind, Addresses, is_link_local};
use crate::ip::identification::Identifications;
use crate::ip::path::PathCache;
use crate::ip::path_mtu::PathMtuCache;
use crate::ip::reassembly::Reassembly;
use crate::ip::route::RoutingTable;
use crate::ip::transit::Forwarding;
use crate::neighbour::{AddressTimers, NeighbourCache};
use crate::ports::ReservedPorts;
use crate::random::SecretRng;
use crate::rate_limit::{IcmpErrorLimiter, TokenBucket};
use crate::transmit::TransmitClasses;
use crate::{AddressConflict, AddressOwnership, Config, Counters, Event, Limits, Route};

/// Link, neighbours, IP and ICMP of one interface, with the queues, counters and events that all
/// protocols share. Each layer adds its methods in its own folder.
pub(crate) struct Interface {
    pub(crate) medium: Medium,
    pub(crate) mac: MacAddr,
    pub(crate) mtu: usize,
    pub(crate) vlan: Option<VlanTag>,
    pub(crate) ownership: AddressOwnership,
    pub(crate) transmit_checksum: bool,
    /// Largest TSO payload of the device in bytes, as configured; 0 without checksums by the device.
    pub(crate) device_tso_bytes: usize,
    /// The same, as far as transmit classes permit.
    pub(crate) max_tso_bytes: usize,
    pub(crate) hop_limit: u8,
    pub(crate) limits: Limits,
    pub(crate) rng: SecretRng,
    pub(crate) addresses: Addresses,
    pub(crate) routes: RoutingTable,
    pub(crate) neighbours: NeighbourCache,
    pub(crate) paths: PathCache,
    pub(crate) path_mtus: PathMtuCache,
    pub(crate) reassembly: Reassembly,
    pub(crate) icmp_error_limiter: IcmpErrorLimiter,
    pub(crate) echo_limit: TokenBucket,
    pub(crate) address_timers: AddressTimers,
    /// First own address that was given up.
    pub(crate) taken: Option<AddressConflict>,
    pub(crate) mld: ReportSchedule,
    pub(crate) reply: PendingReply,
    /// Start of a plain frame as [`crate::fast_path`] expects it.
    pub(crate) plain_link: PlainLink,
    pub(crate) forwarding: Forwarding,
    pub(crate) transmit: Fifo<Frame>,
    /// Classes that frames of `transmit` wait in; `None` if they leave in their order.
    pub(crate) transmit_classes: Option<Box<TransmitClasses>>,
    /// Frames are sent by classes or captured.
    pub(crate) sends_specially: bool,
    /// Frames that the stack sends to its own addresses.
    pub(crate) loopback: Fifo<Frame>,
    pub(crate) events: VecDeque<Event>,
    /// Addresses with a queued event: false for an unresolved neighbour, true for a conflict.
    pub(crate) queued_address_events: HashSet<(bool, IpAddr)>,
    pub(crate) counters: Counters,
    pub(crate) identifications: Identifications,
    pub(crate) reserved_ports: ReservedPorts,
}

impl Interface {
    /// Creates the interface of a valid configuration.
    pub(crate) fn new(config: Config, now_ns: u64) -> Self {
        let limits = config.limits;
        let mut rng = SecretRng::new(config.seed);
        let neighbours = NeighbourCache::new(
            rng.hash_key(),
            limits.neighbours,
            limits.unresolved_frames,
            limits.unresolved_frames_total,
        );
        let device_tso_bytes = if config.transmit_checksum { config.max_tso_bytes } else { 0 };
        let mut interface = Self {
            medium: config.medium,
            mac: config.mac,
            mtu: config.mtu,
            vlan: config.vlan.map(VlanTag::new),
            ownership: config.ownership,
            transmit_checksum: config.transmit_checksum,
            device_tso_bytes,
            max_tso_bytes: device_tso_bytes,
            hop_limit: config.hop_limit,
            addresses: Addresses::new(rng.hash_key()),
            routes: RoutingTable::new(rng.hash_key()),
            neighbours,
            paths: PathCache::new(rng.hash_key()),
            path_mtus: PathMtuCache::new(
                rng.hash_key(),
                limits.path_mtus,
                limits.path_mtu_timeout_ns,
            ),
            reassembly: Reassembly::new(rng.hash_key(), &limits),
            icmp_error_limiter: IcmpErrorLimiter::new(
                now_ns,
                rng.hash_key(),
                limits.icmp_errors_pps,
                limits.icmp_errors_per_destination_pps,
            ),
            echo_limit: TokenBucket::new(now_ns, limits.icmp_echo_pps),
            address_timers: AddressTimers::default(),
            taken: None,
            mld: ReportSchedule::default(),
            reply: PendingReply::default(),
            plain_link: PlainLink::new(config.medium, config.mac, config.vlan),
            forwarding: Forwarding::new(config.forwarding),
            transmit: Fifo::with_capacity(limits.transmit_frames.min(1 << 16)),
            transmit_classes: None,
            sends_specially: false,
            loopback: Fifo::new(),
            events: VecDeque::new(),
            queued_address_events: HashSet::new(),
            counters: Counters::default(),
            identifications: Identifications::new(&mut rng),
            reserved_ports: ReservedPorts::default(),
            rng,
            limits,
        };
        interface.add_addresses(now_ns, &config.addresses);
        for route in config.routes {
            interface.routes.add(route);
        }
        interface
    }

    /// Adds the configured addresses. An IPv6 interface has a link-local address (RFC 4291 section
    /// 2.1): if none is configured, one is generated.
    fn add_addresses(&mut self, now_ns: u64, addresses: &[IpCidr]) {
        let is_exclusive =
            self.ownership == AddressOwnership::Exclusive && self.medium == Medium::Ethernet;
        let has_v6 = addresses.iter().any(|cidr| cidr.address().is_ipv6());
        let has_link_local =
            addresses.iter().any(|cidr| cidr.address().is_ipv6() && is_link_local(cidr.address()));
        let generated = (is_exclusive && has_v6 && !has_link_local)
            .then(|| IpCidr::new(self.mac.link_local().into(), 64).ok())
            .flatten();
        for &cidr in addresses.iter().chain(&generated) {
            self.routes.add(Route { prefix: cidr, gateway: None });
            self.addresses.add(cidr, AddressKind::Local);
        }
        if self.forwarding.enabled && has_v6 {
            self.addresses.join(ALL_ROUTERS.into());
        }
        self.schedule_mld_reports(now_ns);
    }

    /// Queues an event about an address, unless it is queued already.
    pub(crate) fn queue_event_once(&mut self, event: Event) {
        let Some(key) = address_of_event(event) else { return };
        // Addresses come from received packets, so their events need a bound. A lost event is
        // queued again with the next packet.
        if self.queued_address_events.len() < self.limits.neighbours.max(1024)
            && self.queued_address_events.insert(key)
        {
            self.events.push_back(event);
        }
    }

    /// Allows an event about an address to be queued again.
    #[cold]
    pub(crate) fn rearm_event(&mut self, event: Event) {
        if let Some(key) = address_of_event(event) {
            self.queued_address_events.remove(&key);
        }
    }

    /// Returns all frames to the arena.
    pub(crate) fn release(&mut self, arena: &mut Arena) {
        let queued = self.neighbours.drain().chain(self.transmit.drain(..));
        let queued = queued.chain(self.loopback.drain(..)).chain(self.forwarding.drain());
        queued.for_each(|frame| arena.free(frame));
        if let Some(classes) = &mut self.transmit_classes {
            classes.release(arena);
        }
    }
}

/// Key of an event about an address: false for an unresolved neighbour, true for a conflict.
fn address_of_event(event: Event) -> Option<(bool, IpAddr)> {
    match event {
        Event::NeighbourUnresolved(ip) => Some((false, ip)),
        Event::AddressConflict(ip) => Some((true, ip)),
        _ => None,
    }
}
