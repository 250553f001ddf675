//! ICMP code that both families share: deferred replies, rate limits of errors, and delivery of
//! received errors to sockets.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, Checksum};
use tidegate_wire::{DropReason, Icmpv4Message, MacAddr, Protocol, UdpHeader};

use crate::fast_path::template::HeaderTemplate;
use crate::ip::packet::Packet;
use crate::ip::path::Path;
use crate::{Event, SocketError, Stack};

/// Reply prepared while a received packet is still borrowed, and sent after that packet is
/// processed.
#[derive(Default)]
pub(crate) struct PendingReply {
    /// Payload of the IP packet.
    pub(crate) payload: Vec<u8>,
    /// Header fields; `None` when there is nothing to send.
    pub(crate) packet: Option<Packet>,
    /// Destination hardware address, if known without a lookup.
    pub(crate) mac: Option<MacAddr>,
}

/// ICMP error received about a packet that this host sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceivedIcmpError {
    /// No socket listens on the port, or the protocol is not supported.
    PortUnreachable,
    /// The host cannot be reached.
    HostUnreachable,
    /// The network cannot be reached.
    NetworkUnreachable,
    /// The packet exceeds the next hop's MTU: this many bytes, or 0 when not reported.
    TooBig(usize),
}

/// Packet quoted by an ICMP error: addresses, protocol, packet length, and the bytes behind the IP
/// headers.
pub(crate) struct QuotedPacket<'a> {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) protocol: Protocol,
    pub(crate) packet_bytes: usize,
    pub(crate) payload: &'a [u8],
}

impl Stack {
    /// Prepares an ICMPv4 reply.
    pub(crate) fn prepare_icmpv4(&mut self, packet: Packet, message: &Icmpv4Message<'_>) {
        self.reply.payload.resize(message.message_bytes(), 0);
        let written = message.emit(&mut self.reply.payload).is_some();
        debug_assert!(written, "the buffer has the length of the message");
        self.reply.packet = Some(packet);
        self.reply.mac = None;
    }

    /// Sends the prepared reply, if any.
    #[inline]
    pub(crate) fn flush_reply(&mut self, now_ns: u64, arena: &mut Arena) {
        if let Some(packet) = self.reply.packet.take() {
            self.send_reply(now_ns, arena, packet);
        }
    }

    fn send_reply(&mut self, now_ns: u64, arena: &mut Arena, packet: Packet) {
        let payload = std::mem::take(&mut self.reply.payload);
        if self.reply.mac.is_none() && self.needs_router_lookup(packet.destination) {
            return self.queue_local_packet(packet, payload);
        }
        let path = match self.reply.mac.take() {
            Some(mac) => Ok(Path {
                destination: packet.destination,
                source: packet.source,
                next_hop: packet.destination,
                mac: Some(mac),
                is_loopback: false,
                mtu: self.mtu,
                routers_fragment: false,
                template: HeaderTemplate::NONE,
                max_plain_frame_bytes: 0,
                valid_until_ns: 0,
            }),
            None => self.path(now_ns, arena, packet.destination),
        };
        match path {
            Ok(path) => self.send_payload(arena, &packet, &path, &payload),
            Err(_) => self.counters.transmit_drops.count(DropReason::NoRoute),
        }
        // Keeps the buffer for the next reply.
        self.reply.payload = payload;
    }

    /// Sends the payload of an IP packet in one new frame, or in fragments.
    pub(crate) fn send_payload(
        &mut self,
        arena: &mut Arena,
        packet: &Packet,
        path: &Path,
        payload: &[u8],
    ) {
        if payload.len() + packet.header_bytes() > path.mtu {
            if self.send_fragments(arena, packet, path, payload).is_err() {
                self.counters.transmit_drops.count(DropReason::TransmitQueueFull);
            }
            return;
        }
        match arena.alloc_from(payload) {
            Some(mut frame) => {
                frame.set_checksum(Checksum::Unknown);
                self.send_frame(arena, packet, path, None, frame);
            }
            None => self.counters.transmit_drops.count(DropReason::NoBuffer),
        }
    }

    /// Applies the rate limits of ICMP errors: true if one may be sent to `destination` now.
    pub(crate) fn allow_icmp_error(&mut self, now_ns: u64, destination: IpAddr) -> bool {
        let allowed = self.icmp_error_limiter.allow(now_ns, &mut self.rng, destination);
        if allowed {
            self.counters.icmp_errors_sent += 1;
        } else {
            self.counters.transmit_drops.count(DropReason::IcmpRateLimited);
        }
        allowed
    }

    /// Delivers a received ICMP error to the socket that sent the quoted packet (RFC 1122 section
    /// 4.1.3.3), after the checks of RFC 5927 section 4 that apply to UDP. The quoted datagram must
    /// belong to a bound local address and port and, for a connected socket, to its peer.
    ///
    /// # Errors
    /// [`DropReason::IcmpQuote`] when no socket can have sent the quoted packet,
    /// [`DropReason::IcmpMtu`] for an impossible path MTU.
    pub(crate) fn on_icmp_error(
        &mut self,
        now_ns: u64,
        icmp_error: ReceivedIcmpError,
        quote: &QuotedPacket<'_>,
    ) -> Result<(), DropReason> {
        if quote.protocol == Protocol::TCP {
            return self.on_tcp_icmp_error(now_ns, icmp_error, quote);
        }
        if quote.protocol != Protocol::UDP {
            return Err(DropReason::IcmpQuote);
        }
        let udp = UdpHeader::parse_quoted(quote.payload).map_err(|_| DropReason::IcmpQuote)?;
        let local = SocketAddr::new(quote.source, udp.source_port);
        let remote = SocketAddr::new(quote.destination, udp.destination_port);
        let index = self.udp.find(local, remote).ok_or(DropReason::IcmpQuote)?;
        if let ReceivedIcmpError::TooBig(mtu) = icmp_error {
            self.learn_path_mtu(now_ns, mtu, quote)?;
        }
        let limit_bytes = self.path_mtu(now_ns, quote.destination).0;
        let Some((id, socket)) = self.udp.by_index(index) else {
            return Err(DropReason::IcmpQuote);
        };
        let presented = socket.to_app_address(remote);
        let error = match icmp_error {
            ReceivedIcmpError::PortUnreachable => SocketError::ConnectionRefused(presented),
            ReceivedIcmpError::HostUnreachable => SocketError::HostUnreachable(presented),
            ReceivedIcmpError::NetworkUnreachable => SocketError::NetworkUnreachable(presented),
            // Only sockets that forbid fragmentation need the error; the others continue with
            // smaller fragments.
            ReceivedIcmpError::TooBig(_) if !socket.options.dont_fragment => return Ok(()),
            ReceivedIcmpError::TooBig(_) => {
                let headers = if quote.destination.is_ipv4() { 28 } else { 48 };
                let limit_bytes = limit_bytes.saturating_sub(headers);
                SocketError::MessageTooLong { remote: presented, limit_bytes }
            }
        };
        if socket.remote.is_none() && !socket.options.report_errors {
            return Ok(());
        }
        socket.error = Some(error);
        if !socket.error_notified {
            socket.error_notified = true;
            self.events.push_back(Event::UdpError(id));
        }
        Ok(())
    }

    pub(crate) fn learn_path_mtu(
        &mut self,
        now_ns: u64,
        mtu: usize,
        quote: &QuotedPacket<'_>,
    ) -> Result<(), DropReason> {
        let (current, _, _) = self.path_mtu(now_ns, quote.destination);
        self.path_mtus.learn(now_ns, quote.destination, mtu, quote.packet_bytes, current)?;
        self.paths.invalidate();
        Ok(())
    }

    /// Path MTU of a destination in bytes, whether routers on the path must fragment, and the
    /// expiry time of this entry.
    pub(crate) fn path_mtu(&self, now_ns: u64, destination: IpAddr) -> (usize, bool, u64) {
        match self.path_mtus.get(now_ns, destination) {
            Some(known) => (known.mtu.min(self.mtu), known.routers_fragment, known.until_ns),
            None => (self.mtu, false, u64::MAX),
        }
    }
}
