//! The stack: joins the interface with UDP and TCP. Frame input, timers and events.

mod observe;
mod socket_list;
mod tcp;
mod transmit;
mod udp;

use std::net::IpAddr;
use std::sync::Arc;

use tidegate_memory::{Arena, Checksum, Fifo, Frame};
use tidegate_wire::{ArpPacket, DropReason, EtherType, EthernetHeader, MacAddr, Medium, Protocol};

use crate::fast_path::may_be_plain_tcp;
use crate::icmp::{QuotedPacket, ReceivedIcmpError};
use crate::interface::Interface;
use crate::ip::address::AddressKind;
use crate::ip::forward::rebase_checksum;
use crate::ip::packet::{IcmpErrorKind, IpInput, RxVerdict};
use crate::ip::path_mtu::QuotedKind;
use crate::ip::transit::TransitPacket;
use crate::ip::version::is_ipv4;
use crate::link::LinkMeta;
use crate::neighbour::{NeighbourTimeout, UnreachableNeighbour};
use crate::ports::{PortGroups, PortGroupsHandle, ReservedPorts};
use crate::tcp::TcpTable;
use crate::transmit::TransmitClasses;
use crate::udp::{Payload, UdpTable};
use crate::{
    AddressProbe, Config, ConfigError, Counters, Event, OwnAddresses, SocketError, Transport,
};

/// Network stack of one interface of one host. See the [crate documentation](crate).
pub struct Stack {
    pub(crate) interface: Interface,
    pub(crate) udp: UdpTable,
    pub(crate) tcp: TcpTable,
}

impl Stack {
    /// Creates a stack.
    ///
    /// # Errors
    /// When the configuration is invalid.
    pub fn new(config: Config, now_ns: u64) -> Result<Stack, ConfigError> {
        config.check()?;
        let mut interface = Interface::new(config, now_ns);
        let Interface { rng, limits, mtu, .. } = &mut interface;
        let udp = UdpTable::new(rng.hash_key(), limits.sockets);
        let tcp = TcpTable::new(rng, limits, *mtu, now_ns);
        Ok(Stack { interface, udp, tcp })
    }

    /// Processes a received frame: consumes it, answers it, queues it for a socket, or drops it for
    /// a counted reason. [`Stack::handle_burst`] costs less per frame.
    pub fn handle_frame(&mut self, now_ns: u64, frame: Frame, arena: &mut Arena) {
        self.handle_alone(now_ns, frame, arena);
        self.finish_input(now_ns, arena);
    }

    /// Processes a frame outside of a burst, without the output.
    fn handle_alone(&mut self, now_ns: u64, frame: Frame, arena: &mut Arena) {
        self.interface.counters.received += 1;
        let Self { interface, tcp, .. } = self;
        let frame = match may_be_plain_tcp(arena.bytes(&frame)) {
            true => tcp.handle_plain(interface, now_ns, frame, arena),
            false => Some(frame),
        };
        if let Some(frame) = frame {
            self.handle_padded_or_slow(now_ns, frame, arena);
        }
    }

    /// Processes all frames of a burst like [`Stack::handle_frame`].
    #[inline]
    pub fn handle_burst(&mut self, now_ns: u64, burst: &mut Fifo<Frame>, arena: &mut Arena) {
        self.interface.counters.received += burst.len() as u64;
        while let Some(first) = burst.front() {
            if may_be_plain_tcp(arena.bytes(first)) {
                let Some(frame) = burst.pop_front() else { break };
                let Self { interface, tcp, .. } = self;
                if let Some(frame) = tcp.handle_plain(interface, now_ns, frame, arena) {
                    self.handle_slow(now_ns, frame, arena);
                }
                continue;
            }
            self.udp.handle_plain(&mut self.interface, burst, arena);
            let Some(frame) = burst.pop_front() else { break };
            self.handle_padded_or_slow(now_ns, frame, arena);
        }
        self.finish_input(now_ns, arena);
    }

    #[inline]
    fn finish_input(&mut self, now_ns: u64, arena: &mut Arena) {
        self.udp.trim_queues_if_scarce(&mut self.interface.counters, arena);
        self.tcp_flush(now_ns, arena);
    }

    fn handle_padded_or_slow(&mut self, now_ns: u64, frame: Frame, arena: &mut Arena) {
        if let Some(frame) = self.udp.handle_padded(&mut self.interface, frame, arena) {
            self.handle_slow(now_ns, frame, arena);
        }
    }

    /// Processes a frame on the slow path.
    #[inline(never)]
    fn handle_slow(&mut self, now_ns: u64, mut frame: Frame, arena: &mut Arena) {
        let result = self.handle_link(now_ns, &mut frame, arena);
        self.apply_verdict(now_ns, frame, arena, result);
    }

    /// Passes a frame on according to its verdict.
    fn apply_verdict(
        &mut self,
        now_ns: u64,
        frame: Frame,
        arena: &mut Arena,
        result: Result<RxVerdict, DropReason>,
    ) {
        let Self { interface, udp, .. } = self;
        match result {
            Ok(RxVerdict::Deliver(delivery)) => {
                udp.deliver(interface, arena, Payload::Frame(frame), &delivery);
            }
            Ok(RxVerdict::Forward(meta)) => interface.queue_transit(arena, frame, meta),
            Ok(verdict) => {
                arena.free(frame);
                self.finish_deferred(now_ns, arena, verdict);
            }
            Err(reason) => {
                arena.free(frame);
                interface.counters.count_drop(reason);
                interface.flush_reply(now_ns, arena);
            }
        }
    }

    /// Completes the work for a packet that was deferred while its frame was borrowed.
    fn finish_deferred(&mut self, now_ns: u64, arena: &mut Arena, verdict: RxVerdict) {
        let interface = &mut self.interface;
        let result = match verdict {
            RxVerdict::Arp(packet) => interface.handle_arp(now_ns, arena, &packet),
            RxVerdict::NeighbourSeen(ip, mac) => {
                let outcome = interface.neighbours.learn(now_ns, ip, mac);
                interface.apply_claim_outcome(now_ns, arena, ip, outcome)
            }
            RxVerdict::NeighbourClaim(claim) => {
                let outcome = interface.neighbours.apply_claim(now_ns, &mut interface.rng, claim);
                interface.apply_claim_outcome(now_ns, arena, claim.ip, outcome)
            }
            RxVerdict::Reassembled(packet) => {
                return self.handle_reassembled(now_ns, arena, packet);
            }
            RxVerdict::FragmentHeld => return,
            // Reassembled packets are never forwarded.
            RxVerdict::Handled | RxVerdict::Deliver(_) | RxVerdict::Forward(_) => Ok(()),
        };
        interface.flush_reply(now_ns, arena);
        match result {
            Ok(()) => interface.counters.handled += 1,
            Err(reason) => interface.counters.count_drop(reason),
        }
    }

    #[inline]
    fn handle_link(
        &mut self,
        now_ns: u64,
        frame: &mut Frame,
        arena: &Arena,
    ) -> Result<RxVerdict, DropReason> {
        let medium = self.interface.medium;
        let (ethertype, link_meta) = match medium {
            Medium::Ethernet => {
                let (header, _) = EthernetHeader::parse(arena.bytes(frame))?;
                let link_meta = self.interface.handle_ethernet(&header, frame)?;
                frame.advance(header.header_bytes());
                frame.set_checksum(rebase_checksum(frame.checksum(), header.header_bytes()));
                (header.ethertype, link_meta)
            }
            Medium::Ip => LinkMeta::of_ip_frame(arena.bytes(frame), frame)?,
        };
        let packet = arena.bytes(frame);
        match ethertype {
            EtherType::IPV4 => self.handle_ip(now_ns, packet, &link_meta, true),
            EtherType::IPV6 => self.handle_ip(now_ns, packet, &link_meta, false),
            EtherType::ARP if medium == Medium::Ethernet => {
                ArpPacket::parse(packet).map(|(packet, _)| RxVerdict::Arp(packet))
            }
            _ => Err(DropReason::EtherTypeUnknown),
        }
    }

    /// Passes an IP packet through IP to its transport protocol.
    #[inline]
    fn handle_ip(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        link_meta: &LinkMeta,
        is_v4: bool,
    ) -> Result<RxVerdict, DropReason> {
        let Self { interface, udp, tcp } = self;
        let input = match is_v4 {
            true => interface.handle_ipv4(now_ns, packet, link_meta)?,
            false => interface.handle_ipv6(now_ns, packet, link_meta)?,
        };
        match input {
            IpInput::Transport(transport) if transport.protocol == Protocol::TCP => {
                tcp.handle_packet(interface, now_ns, &transport, link_meta)
            }
            IpInput::Transport(transport) => {
                let result = udp.handle_packet(transport, link_meta);
                if matches!(result, Err(DropReason::UdpNoSocket)) {
                    let error = IcmpErrorKind::PortUnreachable;
                    interface.send_icmp_error(now_ns, packet, link_meta, error);
                }
                result
            }
            IpInput::IcmpError(error, quote) => {
                self.handle_icmp_error(now_ns, error, &quote).map(|()| RxVerdict::Handled)
            }
            IpInput::Verdict(verdict) => Ok(verdict),
        }
    }

    /// Passes an ICMP error to the transport protocol of the packet that it quotes.
    fn handle_icmp_error(
        &mut self,
        now_ns: u64,
        error: ReceivedIcmpError,
        quote: &QuotedPacket<'_>,
    ) -> Result<(), DropReason> {
        let Self { interface, udp, tcp } = self;
        match quote.protocol {
            Protocol::TCP => tcp.handle_icmp_error(interface, now_ns, error, quote),
            Protocol::UDP => udp.handle_icmp_error(interface, now_ns, error, quote),
            _ => Err(DropReason::IcmpQuote),
        }
    }

    /// Processes a packet that was reassembled from fragments.
    fn handle_reassembled(&mut self, now_ns: u64, arena: &mut Arena, packet: Vec<u8>) {
        // The source address was checked with each fragment, so that a local one is genuine.
        let unknown = LinkMeta::new(Checksum::Unknown);
        let link_meta = LinkMeta { is_reassembled: true, is_loopback: true, ..unknown };
        match self.handle_ip(now_ns, &packet, &link_meta, is_ipv4(&packet)) {
            Ok(RxVerdict::Deliver(delivery)) => {
                let payload = Payload::Owned(packet.into());
                self.udp.deliver(&mut self.interface, arena, payload, &delivery);
            }
            Ok(verdict) => self.finish_deferred(now_ns, arena, verdict),
            Err(reason) => {
                self.interface.counters.count_drop(reason);
                self.interface.flush_reply(now_ns, arena);
            }
        }
    }

    /// Processes a packet that entered by another interface and is addressed to this interface.
    pub(crate) fn handle_transit(
        &mut self,
        now_ns: u64,
        transit: TransitPacket,
        arena: &mut Arena,
    ) {
        self.interface.counters.received += 1;
        let TransitPacket { frame, forward_meta, .. } = transit;
        let link_meta = LinkMeta::new(frame.checksum());
        let is_v4 = forward_meta.destination.is_ipv4();
        let result = self.handle_ip(now_ns, arena.bytes(&frame), &link_meta, is_v4);
        self.apply_verdict(now_ns, frame, arena, result);
    }

    /// Begins to probe the own addresses. Those that nobody claims are announced: neighbours that
    /// know another hardware address for one of them replace it. Call [`Stack::handle_timeout`]
    /// afterwards.
    pub fn claim_addresses(&mut self, now_ns: u64, probe: AddressProbe) {
        self.interface.claim_addresses(now_ns, probe);
    }

    /// Returns whether the own addresses are unique.
    pub fn own_addresses(&self) -> OwnAddresses {
        self.interface.own_addresses()
    }

    /// Time in nanoseconds at which to call [`Stack::handle_timeout`]; `None` without timers.
    pub fn next_timeout(&self) -> Option<u64> {
        self.earliest(self.tcp.next_timeout())
    }

    /// Time in nanoseconds until which a sleep may last; `None` without deadlines. Never before
    /// [`Stack::next_timeout`], which comes early for connections whose deadlines have moved back.
    pub fn next_deadline(&self) -> Option<u64> {
        self.earliest(self.tcp.next_deadline())
    }

    /// Earliest of the time of TCP and those of the interface.
    #[inline]
    fn earliest(&self, of_tcp_ns: Option<u64>) -> Option<u64> {
        let interface = &self.interface;
        let timeouts = [
            interface.neighbours.next_timeout(),
            interface.reassembly.next_timeout(),
            interface.mld.next_timeout(),
            of_tcp_ns,
            interface.address_timers.next_timeout(),
        ];
        // This runs once per burst: one minimum, without a branch per timer.
        let next_ns = timeouts.map(|timeout_ns| timeout_ns.unwrap_or(u64::MAX)).into_iter().min();
        next_ns.filter(|&next_ns| next_ns < u64::MAX)
    }

    /// Processes all timers that have expired at `now_ns`.
    pub fn handle_timeout(&mut self, now_ns: u64, arena: &mut Arena) {
        while let Some(expired) = self.interface.neighbours.poll_expired(now_ns) {
            match expired {
                NeighbourTimeout::Solicit(action) => {
                    self.interface.solicit_neighbour(now_ns, arena, action);
                }
                NeighbourTimeout::Unreachable(lost) => {
                    self.handle_unreachable(now_ns, arena, lost);
                }
            }
        }
        while let Some(timeout) = self.interface.reassembly.poll_expired(now_ns) {
            self.interface.handle_reassembly_timeout(now_ns, arena, &timeout);
        }
        self.interface.handle_address_timers(now_ns, arena);
        self.interface.send_mld_reports(now_ns, arena);
        self.tcp.expire(now_ns);
        self.tcp_flush(now_ns, arena);
    }

    /// Drops the packets that wait for a neighbour that does not answer, and tells their senders:
    /// local sockets, or the hosts whose packets are forwarded.
    fn handle_unreachable(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        unreachable: UnreachableNeighbour,
    ) {
        self.interface.paths.invalidate();
        for frame in unreachable.waiting {
            if self.interface.forwarding.enabled {
                self.interface.send_unreachable(now_ns, arena, &frame);
            }
            if let Ok(quote) = QuotedPacket::parse(arena.bytes(&frame)) {
                // Echo replies and ICMP errors have no socket to notify.
                let _ = self.handle_icmp_error(now_ns, ReceivedIcmpError::HostUnreachable, &quote);
            }
            self.interface.counters.count_transmit_drop(DropReason::NeighbourUnreachable);
            arena.free(frame);
        }
    }

    /// Transmit queue of the device, oldest frame first. Take frames from the front.
    #[inline]
    pub fn transmit_queue(&mut self) -> &mut Fifo<Frame> {
        match &mut self.interface.transmit_classes {
            None => &mut self.interface.transmit,
            Some(classes) => classes.ready(),
        }
    }

    /// Number of frames that the stack has made and the device has not taken. With transmit classes,
    /// those that wait for their turn do not count.
    #[inline]
    pub fn frames_to_send(&self) -> usize {
        let classes = self.interface.transmit_classes.as_deref();
        self.interface.transmit.len() + classes.map_or(0, TransmitClasses::ready_len)
    }

    /// Frames that the stack sends to its own addresses, oldest first. Pass them to
    /// [`Stack::handle_burst`] of this stack. If several stacks have the same addresses, pass them
    /// to the stack that has the device.
    #[inline]
    pub fn loopback_queue(&mut self) -> &mut Fifo<Frame> {
        &mut self.interface.loopback
    }

    /// True if frames wait in [`Stack::loopback_queue`].
    #[inline]
    pub fn has_loopback_frames(&self) -> bool {
        !self.interface.loopback.is_empty()
    }

    /// Hardware address of the interface; all zero on [`Medium::Ip`].
    pub fn mac(&self) -> MacAddr {
        self.interface.mac
    }

    /// Packet counters.
    pub fn counters(&self) -> &Counters {
        &self.interface.counters
    }

    /// True if `address` is a local address that is ready for use.
    pub fn has_address(&self, address: IpAddr) -> bool {
        self.interface.addresses.kind(address) == AddressKind::Local
    }

    /// True if a datagram socket can be bound to `address`: a local or a broadcast address.
    pub fn has_datagram_address(&self, address: IpAddr) -> bool {
        let kind = self.interface.addresses.kind(address);
        matches!(kind, AddressKind::Local | AddressKind::Broadcast)
    }

    /// Longest packet to `destination` that is not fragmented, as far as is known; of a datagram.
    pub fn path_mtu(&self, now_ns: u64, destination: IpAddr) -> usize {
        self.interface.path_mtu(now_ns, QuotedKind::Datagram, destination).0
    }

    /// Source address of packets to `destination`; `None` without a route.
    pub fn source_for(&self, destination: IpAddr) -> Option<IpAddr> {
        self.interface.source_for(destination)
    }

    /// Joins a multicast group: datagrams to the group reach sockets bound to the unspecified
    /// address and the destination port. IPv6 groups are reported to routers (RFC 3810). IPv4
    /// groups are not, so they work only within the link.
    ///
    /// # Errors
    /// [`SocketError::AddressNotAvailable`] when the address is not multicast.
    pub fn join_group(&mut self, now_ns: u64, group: IpAddr) -> Result<(), SocketError> {
        self.interface.join_group(now_ns, group)
    }

    /// Leaves a group, unless IPv6 itself requires the group.
    pub fn leave_group(&mut self, group: IpAddr) {
        self.interface.addresses.leave(group);
    }

    /// Sets the hardware address of a neighbour, or marks it as unreachable with `None`: for
    /// [`crate::AddressOwnership::Shared`], and for preconfigured entries.
    pub fn set_neighbour(
        &mut self,
        now_ns: u64,
        ip: IpAddr,
        mac: Option<MacAddr>,
        arena: &mut Arena,
    ) {
        let interface = &mut self.interface;
        match interface.neighbours.set(now_ns, &mut interface.rng, ip, mac) {
            Ok(outcome) => {
                // The caller has authority, so there is no error here.
                let _ = interface.apply_claim_outcome(now_ns, arena, ip, outcome);
            }
            Err(unreachable) => self.handle_unreachable(now_ns, arena, unreachable),
        }
    }

    /// Hardware address of a neighbour, if known.
    pub fn neighbour(&self, ip: IpAddr) -> Option<MacAddr> {
        self.interface.neighbours.mac(ip)
    }

    /// Excludes the ports for which `is_reserved` returns true from ephemeral port selection: for
    /// stacks that share their addresses.
    pub fn set_reserved_ports(
        &mut self,
        is_reserved: impl Fn(Transport, u16) -> bool + Send + 'static,
    ) {
        self.interface.reserved_ports = ReservedPorts::new(is_reserved);
    }

    /// Sets the registry of sockets with `reuse_port`: existing sockets are reported at once, later
    /// ones as they open and close.
    pub fn set_port_groups(&mut self, groups: Arc<dyn PortGroups>) {
        let handle = PortGroupsHandle::new(groups);
        self.udp.set_port_groups(handle.clone());
        self.tcp.set_port_groups(handle);
    }

    /// True if frames wait for the answer of a neighbour.
    pub fn awaits_neighbours(&self) -> bool {
        self.interface.neighbours.has_waiting()
    }

    /// True if an event is queued.
    #[inline]
    pub fn has_events(&self) -> bool {
        !(self.interface.events.is_empty() && self.tcp.events.is_empty())
    }

    /// Removes the next event from the queue.
    #[inline]
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.interface.events.pop_front().or_else(|| self.tcp.events.pop_front())?;
        self.rearm_event(event);
        Some(event)
    }

    /// Allows the same event to be queued again.
    #[inline]
    fn rearm_event(&mut self, event: Event) {
        match event {
            Event::NeighbourUnresolved(_) | Event::AddressConflict(_) => {
                self.interface.rearm_event(event);
            }
            Event::UdpReadable(id) => self.udp.rearm_readable(id),
            Event::UdpError(id) => self.udp.rearm_error(id),
            Event::TcpReadable(_) | Event::TcpWritable(_) | Event::TcpAcceptable(_) => {
                self.tcp.rearm_event(event);
            }
            // Queued each time; nothing to re-arm.
            Event::PeerConfirmed(_) | Event::TcpEnded(_) => {}
        }
    }

    /// Returns all frames to the arena. Call before dropping the stack.
    pub fn release(self, arena: &mut Arena) {
        let Self { mut interface, mut udp, .. } = self;
        interface.release(arena);
        udp.release(arena);
    }
}
