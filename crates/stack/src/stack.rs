//! The stack as a whole: what it holds, and the way in.

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;

use tidegate_memory::{Arena, Checksum, Fifo, Frame};
use tidegate_wire::{
    ArpPacket, DropReason, EtherType, EthernetHeader, IpCidr, MacAddr, Medium, VlanTag,
};

use crate::address::{ALL_ROUTERS, Addresses, Kind, is_link_local};
use crate::chance::{Chance, HashKey};
use crate::ethernet::Arrival;
use crate::fast_path::PlainLink;
use crate::forward::{Forwarding, checksum_behind};
use crate::fragment::{Fragment, Key, Reassembly, Timeout};
use crate::icmp::{Reply, Report};
use crate::icmpv4::quote_v4;
use crate::icmpv6::quote_v6;
use crate::mld::Reports;
use crate::ndp::Tentative;
use crate::neighbour::{Claimed, Expired, Lost, Neighbours};
use crate::output::IDENTIFICATIONS;
use crate::packet::{Complaint, Fate};
use crate::path::Paths;
use crate::path_mtu::PathMtus;
use crate::rate::{ErrorLimits, TokenBucket};
use crate::reserved::ReservedPorts;
use crate::route::Routes;
use crate::tcp::{LARGEST_TRAIN_BYTES, TcpTable, may_be_plain_tcp};
use crate::udp::{Payload, UdpTable};
use crate::{Config, ConfigError, Counters, Event, Limits, Ownership, Route, ipv4, ipv6};

/// One interface of one host. See the [crate documentation](crate).
pub struct Stack {
    pub(crate) medium: Medium,
    pub(crate) mac: MacAddr,
    pub(crate) mtu: usize,
    pub(crate) vlan: Option<VlanTag>,
    pub(crate) ownership: Ownership,
    pub(crate) transmit_checksum: bool,
    /// As in the configuration; no more than an IP packet holds.
    pub(crate) segmentation_bytes: usize,
    pub(crate) hop_limit: u8,
    pub(crate) limits: Limits,
    pub(crate) chance: Chance,
    pub(crate) addresses: Addresses,
    pub(crate) routes: Routes,
    pub(crate) neighbours: Neighbours,
    pub(crate) paths: Paths,
    pub(crate) path_mtus: PathMtus,
    pub(crate) reassembly: Reassembly,
    pub(crate) error_limits: ErrorLimits,
    pub(crate) echo_limit: TokenBucket,
    pub(crate) tentative: Vec<Tentative>,
    pub(crate) mld: Reports,
    pub(crate) reply: Reply,
    /// What [`crate::fast_path`] compares the front of a frame with.
    pub(crate) plain_link: PlainLink,
    pub(crate) forwarding: Forwarding,
    pub(crate) udp: UdpTable,
    pub(crate) tcp: TcpTable,
    pub(crate) transmit: Fifo<Frame>,
    /// Frames that we send to ourselves.
    pub(crate) looped: Fifo<Frame>,
    pub(crate) events: VecDeque<Event>,
    /// Neighbours and conflicts with an event in the queue.
    pub(crate) told: HashSet<(bool, IpAddr)>,
    pub(crate) counters: Counters,
    pub(crate) hash_key: HashKey,
    pub(crate) identifications: Box<[u32]>,
    pub(crate) reserved_ports: ReservedPorts,
}

impl Stack {
    /// Makes a stack.
    ///
    /// # Errors
    /// When the configuration contradicts itself.
    pub fn new(config: Config, now_ns: u64) -> Result<Stack, ConfigError> {
        config.check()?;
        let limits = config.limits;
        let mut chance = Chance::new(config.seed);
        let neighbours = Neighbours::new(
            chance.hash_key(),
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
            segmentation_bytes: match config.transmit_checksum {
                true => config.segmentation_bytes.min(LARGEST_TRAIN_BYTES),
                false => 0,
            },
            hop_limit: config.hop_limit,
            addresses: Addresses::new(chance.hash_key()),
            routes: Routes::new(chance.hash_key()),
            neighbours,
            paths: Paths::new(chance.hash_key()),
            path_mtus: PathMtus::new(
                chance.hash_key(),
                limits.path_mtus,
                limits.path_mtu_timeout_ns,
            ),
            reassembly: Reassembly::new(chance.hash_key(), &limits),
            error_limits: ErrorLimits::new(
                now_ns,
                chance.hash_key(),
                limits.icmp_errors_pps,
                limits.icmp_errors_per_destination_pps,
            ),
            echo_limit: TokenBucket::new(now_ns, limits.icmp_echo_pps),
            tentative: Vec::new(),
            mld: Reports::default(),
            reply: Reply::default(),
            plain_link: PlainLink::new(config.medium, config.mac, config.vlan),
            forwarding: Forwarding::new(config.forwarding),
            udp: UdpTable::new(chance.hash_key(), limits.sockets),
            tcp: TcpTable::new(&mut chance, &limits, config.mtu, now_ns),
            transmit: Fifo::with_capacity(limits.transmit_frames.min(1 << 16)),
            looped: Fifo::new(),
            events: VecDeque::new(),
            told: HashSet::new(),
            counters: Counters::default(),
            hash_key: chance.hash_key(),
            identifications: (0..IDENTIFICATIONS).map(|_| chance.random()).collect(),
            reserved_ports: ReservedPorts::default(),
            chance,
            limits,
        };
        stack.add_addresses(now_ns, &config.addresses, config.duplicate_address_detection);
        for route in config.routes {
            stack.routes.add(route);
        }
        Ok(stack)
    }

    /// Takes its addresses. An interface that speaks IPv6 has a link-local
    /// address (RFC 4291 section 2.1): one is made if none was given.
    fn add_addresses(&mut self, now_ns: u64, addresses: &[IpCidr], detect: bool) {
        let alone = self.ownership == Ownership::Own && self.medium == Medium::Ethernet;
        let has_v6 = addresses.iter().any(|cidr| cidr.address().is_ipv6());
        let has_link_local =
            addresses.iter().any(|cidr| cidr.address().is_ipv6() && is_link_local(cidr.address()));
        let made = (alone && has_v6 && !has_link_local)
            .then(|| IpCidr::new(self.mac.link_local().into(), 64).ok())
            .flatten();
        for &cidr in addresses.iter().chain(&made) {
            self.routes.add(Route { prefix: cidr, gateway: None });
            match cidr.address() {
                IpAddr::V6(address) if alone && detect => {
                    self.addresses.add(cidr, Kind::Tentative);
                    self.tentative.push(Tentative { address, until_ns: now_ns, asked: false });
                }
                _ => self.addresses.add(cidr, Kind::Ours),
            }
        }
        if self.forwarding.enabled && has_v6 {
            self.addresses.join(ALL_ROUTERS.into());
        }
        self.report_groups(now_ns);
    }

    /// Takes a received frame: uses it, answers it, keeps it for a socket, or
    /// drops it for a reason that is counted. [`Stack::ingest_burst`] does so
    /// with many for less.
    pub fn ingest(&mut self, now_ns: u64, frame: Frame, arena: &mut Arena) {
        self.counters.received += 1;
        let frame = match may_be_plain_tcp(arena.bytes(&frame)) {
            true => self.ingest_plain_tcp(now_ns, frame, arena),
            false => Some(frame),
        };
        if let Some(frame) = frame {
            self.ingest_one(now_ns, frame, arena);
        }
        self.udp_share_frames(arena);
        self.tcp_flush(now_ns, arena);
    }

    /// Takes all frames of a burst, as [`Stack::ingest`] does.
    #[inline]
    pub fn ingest_burst(&mut self, now_ns: u64, burst: &mut Fifo<Frame>, arena: &mut Arena) {
        self.counters.received += burst.len() as u64;
        while let Some(first) = burst.front() {
            if may_be_plain_tcp(arena.bytes(first)) {
                let Some(frame) = burst.pop_front() else { break };
                if let Some(frame) = self.ingest_plain_tcp(now_ns, frame, arena) {
                    self.ingest_any(now_ns, frame, arena);
                }
                continue;
            }
            self.ingest_plain(burst, arena);
            let Some(frame) = burst.pop_front() else { break };
            self.ingest_one(now_ns, frame, arena);
        }
        self.udp_share_frames(arena);
        self.tcp_flush(now_ns, arena);
    }

    fn ingest_one(&mut self, now_ns: u64, frame: Frame, arena: &mut Arena) {
        if let Some(frame) = self.ingest_padded(frame, arena) {
            self.ingest_any(now_ns, frame, arena);
        }
    }

    /// Takes a frame that may be anything.
    #[inline(never)]
    fn ingest_any(&mut self, now_ns: u64, mut frame: Frame, arena: &mut Arena) {
        let result = self.link_input(now_ns, &mut frame, arena);
        self.settle(now_ns, frame, arena, result);
    }

    /// Brings a frame to where it was decided that it goes.
    pub(crate) fn settle(
        &mut self,
        now_ns: u64,
        frame: Frame,
        arena: &mut Arena,
        result: Result<Fate, DropReason>,
    ) {
        match result {
            Ok(Fate::Deliver(delivery)) => {
                self.udp_deliver(arena, Payload::Frame(frame), &delivery);
            }
            Ok(Fate::Forward(onward)) => self.hand_over(arena, frame, onward),
            Ok(fate) => {
                arena.free(frame);
                self.finish(now_ns, arena, fate);
            }
            Err(reason) => {
                arena.free(frame);
                self.counters.drops.count(reason);
                self.flush_reply(now_ns, arena);
            }
        }
    }

    /// Does for a packet what could not be done while it was being read.
    fn finish(&mut self, now_ns: u64, arena: &mut Arena, fate: Fate) {
        let result = match fate {
            Fate::Arp(packet) => self.arp_input(now_ns, arena, &packet),
            Fate::Heard(ip, mac) => {
                let heard = self.neighbours.heard(now_ns, ip, mac);
                self.neighbour_claimed(now_ns, arena, ip, heard)
            }
            Fate::Claim(claim) => {
                let claimed = self.neighbours.claim(now_ns, &mut self.chance, claim);
                self.neighbour_claimed(now_ns, arena, claim.ip, claimed)
            }
            Fate::Rebuilt(packet) => return self.ingest_rebuilt(now_ns, arena, packet),
            Fate::Held => return,
            // Fragments are never put together for others.
            Fate::Handled | Fate::Deliver(_) | Fate::Forward(_) => Ok(()),
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
    ) -> Result<Fate, DropReason> {
        let (ethertype, arrival) = match self.medium {
            Medium::Ethernet => {
                let (header, _) = EthernetHeader::parse(arena.bytes(frame))?;
                let arrival = self.ethernet_input(&header, frame)?;
                frame.advance(header.header_bytes());
                frame.set_checksum(checksum_behind(frame.checksum(), header.header_bytes()));
                (header.ethertype, arrival)
            }
            Medium::Ip => Arrival::without_link(arena.bytes(frame), frame)?,
        };
        let packet = arena.bytes(frame);
        match ethertype {
            EtherType::IPV4 => self.ipv4_input(now_ns, packet, &arrival),
            EtherType::IPV6 => self.ipv6_input(now_ns, packet, &arrival),
            EtherType::ARP if self.medium == Medium::Ethernet => {
                ArpPacket::parse(packet).map(|(packet, _)| Fate::Arp(packet))
            }
            _ => Err(DropReason::EtherTypeUnknown),
        }
    }

    /// Reads a packet that was put together from fragments.
    fn ingest_rebuilt(&mut self, now_ns: u64, arena: &mut Arena, packet: Vec<u8>) {
        // Of the parts from the wire none came from an address of ours.
        let plain = Arrival::plain(Checksum::Unknown);
        let arrival = Arrival { rebuilt: true, looped: true, ..plain };
        let result = match packet.first().map(|first| first >> 4) {
            Some(4) => self.ipv4_input(now_ns, &packet, &arrival),
            _ => self.ipv6_input(now_ns, &packet, &arrival),
        };
        match result {
            Ok(Fate::Deliver(delivery)) => {
                self.udp_deliver(arena, Payload::Owned(packet.into()), &delivery);
            }
            Ok(fate) => self.finish(now_ns, arena, fate),
            Err(reason) => {
                self.counters.drops.count(reason);
                self.flush_reply(now_ns, arena);
            }
        }
    }

    /// Keeps a fragment until its packet is complete.
    pub(crate) fn fragment_input(
        &mut self,
        now_ns: u64,
        key: Key,
        fragment: &Fragment<'_>,
    ) -> Result<Fate, DropReason> {
        let inserted = self.reassembly.insert(now_ns, key, fragment);
        self.counters.held -= inserted.released.total();
        self.counters.drops.merge(&inserted.released);
        let Some(whole) = inserted.result? else {
            self.counters.held += 1;
            return Ok(Fate::Held);
        };
        self.counters.held -= whole.fragments - 1;
        self.counters.merged += whole.fragments - 1;
        let packet = match key.source {
            IpAddr::V4(_) => ipv4::rebuild(&whole),
            IpAddr::V6(_) => ipv6::rebuild(&whole),
        };
        packet.map(Fate::Rebuilt).ok_or(DropReason::FragmentTooBig)
    }

    fn reassembly_timed_out(&mut self, now_ns: u64, arena: &mut Arena, timeout: &Timeout) {
        self.counters.held -= timeout.fragments;
        self.counters.drops.add(DropReason::FragmentTimeout, timeout.fragments);
        let Some(quote) = &timeout.quote else { return };
        let arrival = Arrival::plain(Checksum::Unknown);
        match quote.first().map(|first| first >> 4) {
            Some(4) => self.complain_v4(now_ns, quote, &arrival, Complaint::Reassembly),
            _ => self.complain_v6(now_ns, quote, &arrival, Complaint::Reassembly),
        }
        self.flush_reply(now_ns, arena);
    }

    /// When [`Stack::handle_timeout`] wants to be called; `None` when nothing
    /// waits for time to pass.
    pub fn next_timeout(&self) -> Option<u64> {
        let timeouts = [
            self.neighbours.next_timeout(),
            self.reassembly.next_timeout(),
            self.mld.due_ns,
            self.tcp.next_timeout(),
            self.tentative.iter().map(|tentative| tentative.until_ns).min(),
        ];
        // Once for each burst: without a branch for each of them.
        let next_ns = timeouts.map(|timeout_ns| timeout_ns.unwrap_or(u64::MAX)).into_iter().min();
        next_ns.filter(|&next_ns| next_ns < u64::MAX)
    }

    /// Does everything that is due at `now_ns`.
    pub fn handle_timeout(&mut self, now_ns: u64, arena: &mut Arena) {
        while let Some(expired) = self.neighbours.poll_expired(now_ns) {
            match expired {
                Expired::Ask(action) => self.ask_neighbour(now_ns, arena, action),
                Expired::Lost(lost) => self.neighbour_lost(now_ns, arena, lost),
            }
        }
        while let Some(timeout) = self.reassembly.poll_expired(now_ns) {
            self.reassembly_timed_out(now_ns, arena, &timeout);
        }
        self.detect_duplicates(now_ns, arena);
        self.send_reports(now_ns, arena);
        self.tcp.expire(now_ns);
        self.tcp_flush(now_ns, arena);
    }

    /// The frames for the port, oldest first. Take them from the front.
    #[inline]
    pub fn transmit_queue(&mut self) -> &mut Fifo<Frame> {
        &mut self.transmit
    }

    /// The frames that the stack sends to its own addresses, oldest first. They
    /// come back in by [`Stack::ingest_burst`], of this stack or, where several
    /// have the same addresses, of the one that has the port.
    #[inline]
    pub fn looped_queue(&mut self) -> &mut Fifo<Frame> {
        &mut self.looped
    }

    /// Whether frames wait in [`Stack::looped_queue`].
    #[inline]
    pub fn has_looped(&self) -> bool {
        !self.looped.is_empty()
    }

    /// The hardware address that neighbours know; all zero on [`Medium::Ip`].
    pub fn mac(&self) -> MacAddr {
        self.mac
    }

    /// What became of every packet.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Tells the hardware address of a neighbour, or that it has none: for
    /// [`Ownership::Shared`], and for entries that shall be there from the
    /// start.
    pub fn set_neighbour(
        &mut self,
        now_ns: u64,
        ip: IpAddr,
        mac: Option<MacAddr>,
        arena: &mut Arena,
    ) {
        match self.neighbours.tell(now_ns, &mut self.chance, ip, mac) {
            Ok(claimed) => {
                // Whoever tells has the last word, so there is no error here.
                let _ = self.neighbour_claimed(now_ns, arena, ip, claimed);
            }
            Err(lost) => self.neighbour_lost(now_ns, arena, lost),
        }
    }

    /// From now on each finished TCP handshake is an
    /// [`Event::PeerConfirmed`].
    pub fn tell_confirmed_peers(&mut self) {
        self.tcp.tells_confirmed = true;
    }

    /// Whether there is something that the outside should know.
    #[inline]
    pub fn has_events(&self) -> bool {
        !(self.events.is_empty() && self.tcp.events.is_empty())
    }

    /// The next thing that the outside should know.
    #[inline]
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front().or_else(|| self.tcp.events.pop_front())?;
        self.on_taken(event);
        Some(event)
    }

    /// Lets the same thing be told again.
    fn on_taken(&mut self, event: Event) {
        match event {
            Event::NeighbourWanted(ip) => {
                self.told.remove(&(false, ip));
            }
            Event::AddressConflict(ip) => {
                self.told.remove(&(true, ip));
            }
            Event::Readable(id) => {
                if let Some(socket) = self.udp.get_mut(id) {
                    socket.readable_told = false;
                }
            }
            Event::Error(id) => {
                if let Some(socket) = self.udp.get_mut(id) {
                    socket.error_told = false;
                }
            }
            Event::TcpReadable(_) | Event::TcpWritable(_) | Event::TcpAcceptable(_) => {
                self.tcp.on_taken(event);
            }
            // It is told each time.
            Event::PeerConfirmed(_) => {}
        }
    }

    /// Gives every frame that the stack holds back to the arena: before it is
    /// dropped.
    pub fn release(mut self, arena: &mut Arena) {
        let queued = self.neighbours.drain().chain(self.transmit.drain(..));
        let queued = queued.chain(self.looped.drain(..)).chain(self.forwarding.drain());
        queued.for_each(|frame| arena.free(frame));
        self.udp.release(arena);
    }

    /// Does what the neighbour cache asks for after a claim.
    pub(crate) fn neighbour_claimed(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        ip: IpAddr,
        claimed: Claimed,
    ) -> Result<(), DropReason> {
        match claimed {
            Claimed::Noted => {}
            Claimed::Changed => self.paths.forget(),
            Claimed::Doubted(action) => self.ask_neighbour(now_ns, arena, action),
            Claimed::Resolved(mac, waiting) => {
                for frame in waiting {
                    self.send_to(arena, mac, ip.is_ipv4(), frame);
                }
            }
            Claimed::Unsolicited if ip.is_ipv4() => return Err(DropReason::ArpUnsolicited),
            Claimed::Unsolicited => return Err(DropReason::NdpUnsolicited),
        }
        Ok(())
    }

    fn neighbour_lost(&mut self, now_ns: u64, arena: &mut Arena, lost: Lost) {
        self.paths.forget();
        for frame in lost.waiting {
            if self.forwarding.enabled {
                self.tell_unreachable(now_ns, arena, &frame);
            }
            let packet = arena.bytes(&frame);
            let quote = if lost.ip.is_ipv4() { quote_v4(packet) } else { quote_v6(packet) };
            if let Ok(quote) = quote {
                // Echo replies and errors have no socket to be told.
                let _ = self.report(now_ns, Report::Host, &quote);
            }
            self.counters.transmit_drops.count(DropReason::NeighbourUnreachable);
            arena.free(frame);
        }
    }

    /// Queues an event about an address, unless it is in the queue already.
    pub(crate) fn tell_once(&mut self, event: Event) {
        let key = match event {
            Event::NeighbourWanted(ip) => (false, ip),
            Event::AddressConflict(ip) => (true, ip),
            _ => return,
        };
        // Addresses come from the wire, so even the events about them need a
        // bound: a lost event is asked for again with the next packet.
        if self.told.len() < self.limits.neighbours.max(1024) && self.told.insert(key) {
            self.events.push_back(event);
        }
    }
}
