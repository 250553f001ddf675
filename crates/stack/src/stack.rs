//! The stack: its state, frame input, timers and events.

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;

use tidegate_memory::{Arena, Checksum, Fifo, Frame};
use tidegate_wire::{
    ArpPacket, DropReason, EtherType, EthernetHeader, IpCidr, MacAddr, Medium, VlanTag,
};

use crate::fast_path::may_be_plain_tcp;
use crate::fast_path::plain::PlainLink;
use crate::icmp::MldReportState;
use crate::icmp::{PendingReply, ReceivedIcmpError, parse_quote_v4, parse_quote_v6};
use crate::ip::address::{ALL_ROUTERS, AddressKind, Addresses, is_link_local};
use crate::ip::forward::{Forwarding, rebase_checksum};
use crate::ip::output::IDENTIFICATION_COUNTERS;
use crate::ip::packet::{IcmpErrorKind, RxVerdict};
use crate::ip::path::PathCache;
use crate::ip::path_mtu::PathMtuCache;
use crate::ip::reassembly::{ExpiredReassembly, Fragment, FragmentKey, Reassembly};
use crate::ip::route::RoutingTable;
use crate::ip::{ipv4, ipv6};
use crate::link::LinkMeta;
use crate::neighbour::TentativeAddress;
use crate::neighbour::{ClaimOutcome, NeighbourCache, NeighbourTimeout, UnreachableNeighbour};
use crate::ports::ReservedPorts;
use crate::random::{HashKey, SecretRng};
use crate::rate_limit::{IcmpErrorLimiter, TokenBucket};
use crate::tcp::{MAX_TSO_BYTES, TcpTable};
use crate::udp::{Payload, UdpTable};
use crate::{AddressOwnership, Config, ConfigError, Counters, Event, Limits, Route};

/// Network stack of one interface of one host. See the [crate documentation](crate).
pub struct Stack {
    pub(crate) medium: Medium,
    pub(crate) mac: MacAddr,
    pub(crate) mtu: usize,
    pub(crate) vlan: Option<VlanTag>,
    pub(crate) ownership: AddressOwnership,
    pub(crate) transmit_checksum: bool,
    /// Largest TSO payload in bytes: as configured, at most what an IP packet holds.
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
    pub(crate) tentative: Vec<TentativeAddress>,
    pub(crate) mld: MldReportState,
    pub(crate) reply: PendingReply,
    /// Start of a plain frame as [`crate::fast_path`] expects it.
    pub(crate) plain_link: PlainLink,
    pub(crate) forwarding: Forwarding,
    pub(crate) udp: UdpTable,
    pub(crate) tcp: TcpTable,
    pub(crate) transmit: Fifo<Frame>,
    /// Frames that the stack sends to its own addresses.
    pub(crate) loopback: Fifo<Frame>,
    pub(crate) events: VecDeque<Event>,
    /// Addresses with a queued event: false for an unresolved neighbour, true for a conflict.
    pub(crate) queued_address_events: HashSet<(bool, IpAddr)>,
    pub(crate) counters: Counters,
    pub(crate) hash_key: HashKey,
    pub(crate) identifications: Box<[u32]>,
    pub(crate) reserved_ports: ReservedPorts,
}

impl Stack {
    /// Creates a stack.
    ///
    /// # Errors
    /// When the configuration is invalid.
    pub fn new(config: Config, now_ns: u64) -> Result<Stack, ConfigError> {
        config.check()?;
        let limits = config.limits;
        let mut rng = SecretRng::new(config.seed);
        let neighbours = NeighbourCache::new(
            rng.hash_key(),
            limits.neighbours,
            limits.unresolved_frames,
            limits.unresolved_frames_total,
        );
        let mut stack = Stack {
            medium: config.medium,
            mac: config.mac,
            mtu: config.mtu,
            vlan: config.vlan.map(VlanTag::new),
            ownership: config.ownership,
            transmit_checksum: config.transmit_checksum,
            max_tso_bytes: match config.transmit_checksum {
                true => config.max_tso_bytes.min(MAX_TSO_BYTES),
                false => 0,
            },
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
            tentative: Vec::new(),
            mld: MldReportState::default(),
            reply: PendingReply::default(),
            plain_link: PlainLink::new(config.medium, config.mac, config.vlan),
            forwarding: Forwarding::new(config.forwarding),
            udp: UdpTable::new(rng.hash_key(), limits.sockets),
            tcp: TcpTable::new(&mut rng, &limits, config.mtu, now_ns),
            transmit: Fifo::with_capacity(limits.transmit_frames.min(1 << 16)),
            loopback: Fifo::new(),
            events: VecDeque::new(),
            queued_address_events: HashSet::new(),
            counters: Counters::default(),
            hash_key: rng.hash_key(),
            identifications: (0..IDENTIFICATION_COUNTERS).map(|_| rng.next_u32()).collect(),
            reserved_ports: ReservedPorts::default(),
            rng,
            limits,
        };
        stack.add_addresses(now_ns, &config.addresses, config.duplicate_address_detection);
        for route in config.routes {
            stack.routes.add(route);
        }
        Ok(stack)
    }

    /// Adds the configured addresses. An IPv6 interface has a link-local address (RFC 4291 section
    /// 2.1): if none is configured, one is generated.
    fn add_addresses(&mut self, now_ns: u64, addresses: &[IpCidr], detect: bool) {
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
            match cidr.address() {
                IpAddr::V6(address) if is_exclusive && detect => {
                    self.addresses.add(cidr, AddressKind::Tentative);
                    self.tentative.push(TentativeAddress {
                        address,
                        until_ns: now_ns,
                        solicited: false,
                    });
                }
                _ => self.addresses.add(cidr, AddressKind::Local),
            }
        }
        if self.forwarding.enabled && has_v6 {
            self.addresses.join(ALL_ROUTERS.into());
        }
        self.schedule_mld_reports(now_ns);
    }

    /// Processes a received frame: consumes it, answers it, queues it for a socket, or drops it for
    /// a counted reason. [`Stack::ingest_burst`] costs less per frame.
    pub fn ingest(&mut self, now_ns: u64, frame: Frame, arena: &mut Arena) {
        self.counters.received += 1;
        let frame = match may_be_plain_tcp(arena.bytes(&frame)) {
            true => self.ingest_plain_tcp(now_ns, frame, arena),
            false => Some(frame),
        };
        if let Some(frame) = frame {
            self.ingest_padded_or_slow(now_ns, frame, arena);
        }
        self.udp_trim_queues_if_scarce(arena);
        self.tcp_flush(now_ns, arena);
    }

    /// Processes all frames of a burst like [`Stack::ingest`].
    #[inline]
    pub fn ingest_burst(&mut self, now_ns: u64, burst: &mut Fifo<Frame>, arena: &mut Arena) {
        self.counters.received += burst.len() as u64;
        while let Some(first) = burst.front() {
            if may_be_plain_tcp(arena.bytes(first)) {
                let Some(frame) = burst.pop_front() else { break };
                if let Some(frame) = self.ingest_plain_tcp(now_ns, frame, arena) {
                    self.ingest_slow(now_ns, frame, arena);
                }
                continue;
            }
            self.ingest_plain(burst, arena);
            let Some(frame) = burst.pop_front() else { break };
            self.ingest_padded_or_slow(now_ns, frame, arena);
        }
        self.udp_trim_queues_if_scarce(arena);
        self.tcp_flush(now_ns, arena);
    }

    fn ingest_padded_or_slow(&mut self, now_ns: u64, frame: Frame, arena: &mut Arena) {
        if let Some(frame) = self.ingest_padded(frame, arena) {
            self.ingest_slow(now_ns, frame, arena);
        }
    }

    /// Processes a frame on the slow path.
    #[inline(never)]
    fn ingest_slow(&mut self, now_ns: u64, mut frame: Frame, arena: &mut Arena) {
        let result = self.link_input(now_ns, &mut frame, arena);
        self.apply_verdict(now_ns, frame, arena, result);
    }

    /// Passes a frame on according to its verdict.
    pub(crate) fn apply_verdict(
        &mut self,
        now_ns: u64,
        frame: Frame,
        arena: &mut Arena,
        result: Result<RxVerdict, DropReason>,
    ) {
        match result {
            Ok(RxVerdict::Deliver(delivery)) => {
                self.udp_deliver(arena, Payload::Frame(frame), &delivery);
            }
            Ok(RxVerdict::Forward(forward_meta)) => self.queue_transit(arena, frame, forward_meta),
            Ok(verdict) => {
                arena.free(frame);
                self.finish_deferred(now_ns, arena, verdict);
            }
            Err(reason) => {
                arena.free(frame);
                self.counters.drops.count(reason);
                self.flush_reply(now_ns, arena);
            }
        }
    }

    /// Completes the work for a packet that was deferred while its frame was borrowed.
    fn finish_deferred(&mut self, now_ns: u64, arena: &mut Arena, verdict: RxVerdict) {
        let result = match verdict {
            RxVerdict::Arp(packet) => self.arp_input(now_ns, arena, &packet),
            RxVerdict::NeighbourSeen(ip, mac) => {
                let outcome = self.neighbours.learn(now_ns, ip, mac);
                self.apply_claim_outcome(now_ns, arena, ip, outcome)
            }
            RxVerdict::NeighbourClaim(claim) => {
                let outcome = self.neighbours.apply_claim(now_ns, &mut self.rng, claim);
                self.apply_claim_outcome(now_ns, arena, claim.ip, outcome)
            }
            RxVerdict::Reassembled(packet) => {
                return self.ingest_reassembled(now_ns, arena, packet);
            }
            RxVerdict::FragmentHeld => return,
            // Reassembled packets are never forwarded.
            RxVerdict::Handled | RxVerdict::Deliver(_) | RxVerdict::Forward(_) => Ok(()),
        };
        self.flush_reply(now_ns, arena);
        match result {
            Ok(()) => self.counters.handled += 1,
            Err(reason) => self.counters.drops.count(reason),
        }
    }

    #[inline]
    fn link_input(
        &mut self,
        now_ns: u64,
        frame: &mut Frame,
        arena: &Arena,
    ) -> Result<RxVerdict, DropReason> {
        let (ethertype, link_meta) = match self.medium {
            Medium::Ethernet => {
                let (header, _) = EthernetHeader::parse(arena.bytes(frame))?;
                let link_meta = self.ethernet_input(&header, frame)?;
                frame.advance(header.header_bytes());
                frame.set_checksum(rebase_checksum(frame.checksum(), header.header_bytes()));
                (header.ethertype, link_meta)
            }
            Medium::Ip => LinkMeta::of_ip_frame(arena.bytes(frame), frame)?,
        };
        let packet = arena.bytes(frame);
        match ethertype {
            EtherType::IPV4 => self.ipv4_input(now_ns, packet, &link_meta),
            EtherType::IPV6 => self.ipv6_input(now_ns, packet, &link_meta),
            EtherType::ARP if self.medium == Medium::Ethernet => {
                ArpPacket::parse(packet).map(|(packet, _)| RxVerdict::Arp(packet))
            }
            _ => Err(DropReason::EtherTypeUnknown),
        }
    }

    /// Processes a packet that was reassembled from fragments.
    fn ingest_reassembled(&mut self, now_ns: u64, arena: &mut Arena, packet: Vec<u8>) {
        // The source address was checked with each fragment, so that a local one is genuine.
        let unknown = LinkMeta::new(Checksum::Unknown);
        let link_meta = LinkMeta { is_reassembled: true, is_loopback: true, ..unknown };
        let result = match packet.first().map(|first| first >> 4) {
            Some(4) => self.ipv4_input(now_ns, &packet, &link_meta),
            _ => self.ipv6_input(now_ns, &packet, &link_meta),
        };
        match result {
            Ok(RxVerdict::Deliver(delivery)) => {
                self.udp_deliver(arena, Payload::Owned(packet.into()), &delivery);
            }
            Ok(verdict) => self.finish_deferred(now_ns, arena, verdict),
            Err(reason) => {
                self.counters.drops.count(reason);
                self.flush_reply(now_ns, arena);
            }
        }
    }

    /// Stores a fragment until its packet is complete.
    pub(crate) fn fragment_input(
        &mut self,
        now_ns: u64,
        key: FragmentKey,
        fragment: &Fragment<'_>,
    ) -> Result<RxVerdict, DropReason> {
        let inserted = self.reassembly.insert(now_ns, key, fragment);
        self.counters.held -= inserted.dropped.total();
        self.counters.drops.merge(&inserted.dropped);
        let Some(whole) = inserted.result? else {
            self.counters.held += 1;
            return Ok(RxVerdict::FragmentHeld);
        };
        self.counters.held -= whole.fragments - 1;
        self.counters.merged += whole.fragments - 1;
        let packet = match key.source {
            IpAddr::V4(_) => ipv4::build_reassembled(&whole),
            IpAddr::V6(_) => ipv6::build_reassembled(&whole),
        };
        packet.map(RxVerdict::Reassembled).ok_or(DropReason::FragmentTooBig)
    }

    fn on_reassembly_timeout(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        timeout: &ExpiredReassembly,
    ) {
        self.counters.held -= timeout.fragments;
        self.counters.drops.add(DropReason::FragmentTimeout, timeout.fragments);
        let Some(quote) = &timeout.quote else { return };
        let link_meta = LinkMeta::new(Checksum::Unknown);
        match quote.first().map(|first| first >> 4) {
            Some(4) => {
                self.send_icmp_error_v4(
                    now_ns,
                    quote,
                    &link_meta,
                    IcmpErrorKind::ReassemblyTimeout,
                );
            }
            _ => {
                self.send_icmp_error_v6(
                    now_ns,
                    quote,
                    &link_meta,
                    IcmpErrorKind::ReassemblyTimeout,
                );
            }
        }
        self.flush_reply(now_ns, arena);
    }

    /// Time in nanoseconds at which to call [`Stack::handle_timeout`]; `None` without timers.
    pub fn next_timeout(&self) -> Option<u64> {
        let timeouts = [
            self.neighbours.next_timeout(),
            self.reassembly.next_timeout(),
            self.mld.due_ns,
            self.tcp.next_timeout(),
            self.tentative.iter().map(|tentative| tentative.until_ns).min(),
        ];
        // This runs once per burst: one minimum, without a branch per timer.
        let next_ns = timeouts.map(|timeout_ns| timeout_ns.unwrap_or(u64::MAX)).into_iter().min();
        next_ns.filter(|&next_ns| next_ns < u64::MAX)
    }

    /// Processes all timers that have expired at `now_ns`.
    pub fn handle_timeout(&mut self, now_ns: u64, arena: &mut Arena) {
        while let Some(expired) = self.neighbours.poll_expired(now_ns) {
            match expired {
                NeighbourTimeout::Solicit(action) => self.solicit_neighbour(now_ns, arena, action),
                NeighbourTimeout::Unreachable(lost) => {
                    self.on_neighbour_unreachable(now_ns, arena, lost);
                }
            }
        }
        while let Some(timeout) = self.reassembly.poll_expired(now_ns) {
            self.on_reassembly_timeout(now_ns, arena, &timeout);
        }
        self.detect_duplicates(now_ns, arena);
        self.send_mld_reports(now_ns, arena);
        self.tcp.expire(now_ns);
        self.tcp_flush(now_ns, arena);
    }

    /// Transmit queue of the device, oldest frame first. Take frames from the front.
    #[inline]
    pub fn transmit_queue(&mut self) -> &mut Fifo<Frame> {
        &mut self.transmit
    }

    /// Frames that the stack sends to its own addresses, oldest first. Pass them to
    /// [`Stack::ingest_burst`] of this stack. If several stacks have the same addresses, pass them
    /// to the stack that has the device.
    #[inline]
    pub fn loopback_queue(&mut self) -> &mut Fifo<Frame> {
        &mut self.loopback
    }

    /// True if frames wait in [`Stack::loopback_queue`].
    #[inline]
    pub fn has_loopback_frames(&self) -> bool {
        !self.loopback.is_empty()
    }

    /// Hardware address of the interface; all zero on [`Medium::Ip`].
    pub fn mac(&self) -> MacAddr {
        self.mac
    }

    /// Packet counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Sets the hardware address of a neighbour, or marks it as unreachable with `None`: for
    /// [`AddressOwnership::Shared`], and for preconfigured entries.
    pub fn set_neighbour(
        &mut self,
        now_ns: u64,
        ip: IpAddr,
        mac: Option<MacAddr>,
        arena: &mut Arena,
    ) {
        match self.neighbours.set(now_ns, &mut self.rng, ip, mac) {
            Ok(outcome) => {
                // The caller has authority, so there is no error here.
                let _ = self.apply_claim_outcome(now_ns, arena, ip, outcome);
            }
            Err(unreachable) => self.on_neighbour_unreachable(now_ns, arena, unreachable),
        }
    }

    /// Enables [`Event::PeerConfirmed`] for each completed TCP handshake.
    pub fn report_confirmed_peers(&mut self) {
        self.tcp.reports_confirmed_peers = true;
    }

    /// True if an event is queued.
    #[inline]
    pub fn has_events(&self) -> bool {
        !(self.events.is_empty() && self.tcp.events.is_empty())
    }

    /// Removes the next event from the queue.
    #[inline]
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front().or_else(|| self.tcp.events.pop_front())?;
        self.rearm_event(event);
        Some(event)
    }

    /// Allows the same event to be queued again.
    fn rearm_event(&mut self, event: Event) {
        match event {
            Event::NeighbourUnresolved(ip) => {
                self.queued_address_events.remove(&(false, ip));
            }
            Event::AddressConflict(ip) => {
                self.queued_address_events.remove(&(true, ip));
            }
            Event::UdpReadable(id) => {
                if let Some(socket) = self.udp.get_mut(id) {
                    socket.readable_notified = false;
                }
            }
            Event::UdpError(id) => {
                if let Some(socket) = self.udp.get_mut(id) {
                    socket.error_notified = false;
                }
            }
            Event::TcpReadable(_) | Event::TcpWritable(_) | Event::TcpAcceptable(_) => {
                self.tcp.rearm_event(event);
            }
            // Queued each time; nothing to re-arm.
            Event::PeerConfirmed(_) => {}
        }
    }

    /// Returns all frames to the arena. Call before dropping the stack.
    pub fn release(mut self, arena: &mut Arena) {
        let queued = self.neighbours.drain().chain(self.transmit.drain(..));
        let queued = queued.chain(self.loopback.drain(..)).chain(self.forwarding.drain());
        queued.for_each(|frame| arena.free(frame));
        self.udp.release(arena);
    }

    /// Acts on the result of a neighbour claim.
    pub(crate) fn apply_claim_outcome(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        ip: IpAddr,
        outcome: ClaimOutcome,
    ) -> Result<(), DropReason> {
        match outcome {
            ClaimOutcome::Unchanged => {}
            ClaimOutcome::Changed => self.paths.invalidate(),
            ClaimOutcome::Verify(action) => self.solicit_neighbour(now_ns, arena, action),
            ClaimOutcome::Resolved(mac, waiting) => {
                for frame in waiting {
                    self.send_to_mac(arena, mac, ip.is_ipv4(), frame);
                }
            }
            ClaimOutcome::Unsolicited if ip.is_ipv4() => return Err(DropReason::ArpUnsolicited),
            ClaimOutcome::Unsolicited => return Err(DropReason::NdpUnsolicited),
        }
        Ok(())
    }

    fn on_neighbour_unreachable(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        unreachable: UnreachableNeighbour,
    ) {
        self.paths.invalidate();
        for frame in unreachable.waiting {
            if self.forwarding.enabled {
                self.send_unreachable(now_ns, arena, &frame);
            }
            let packet = arena.bytes(&frame);
            let quote = if unreachable.ip.is_ipv4() {
                parse_quote_v4(packet)
            } else {
                parse_quote_v6(packet)
            };
            if let Ok(quote) = quote {
                // Echo replies and ICMP errors have no socket to notify.
                let _ = self.on_icmp_error(now_ns, ReceivedIcmpError::HostUnreachable, &quote);
            }
            self.counters.transmit_drops.count(DropReason::NeighbourUnreachable);
            arena.free(frame);
        }
    }

    /// Queues an event about an address, unless it is queued already.
    pub(crate) fn queue_event_once(&mut self, event: Event) {
        let key = match event {
            Event::NeighbourUnresolved(ip) => (false, ip),
            Event::AddressConflict(ip) => (true, ip),
            _ => return,
        };
        // Addresses come from received packets, so their events need a bound. A lost event is
        // queued again with the next packet.
        if self.queued_address_events.len() < self.limits.neighbours.max(1024)
            && self.queued_address_events.insert(key)
        {
            self.events.push_back(event);
        }
    }
}
