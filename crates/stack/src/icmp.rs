//! What ICMP for both families has in common: answers made while a packet is
//! being read, the rules for errors, and errors that come back to sockets.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, Checksum};
use tidegate_wire::{DropReason, Icmpv4Message, MacAddr, Protocol, UdpHeader};

use crate::fast_path::Template;
use crate::packet::Packet;
use crate::path::Path;
use crate::{Event, SocketError, Stack};

/// An answer, made while the packet that it answers was being read, to be sent
/// when that is done.
#[derive(Default)]
pub(crate) struct Reply {
    /// The payload of the IP packet.
    pub(crate) payload: Vec<u8>,
    /// Its header; `None` when there is nothing to send.
    pub(crate) packet: Option<Packet>,
    /// Where to, when that is known without looking it up.
    pub(crate) mac: Option<MacAddr>,
}

/// An error that came back about a packet of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// Nobody listens there.
    Refused,
    /// The host cannot be reached.
    Host,
    /// The network cannot be reached.
    Network,
    /// The path carries at most this; 0 when not told.
    TooBig(usize),
}

/// What an ICMP error quotes: addresses, protocol, length of the packet and
/// the bytes behind its headers.
pub(crate) struct Quote<'a> {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) protocol: Protocol,
    pub(crate) packet_bytes: usize,
    pub(crate) payload: &'a [u8],
}

impl Stack {
    /// Makes an ICMPv4 answer ready.
    pub(crate) fn reply_v4(&mut self, packet: Packet, message: &Icmpv4Message<'_>) {
        self.reply.payload.resize(message.message_bytes(), 0);
        let written = message.emit(&mut self.reply.payload).is_some();
        debug_assert!(written, "the buffer has the length of the message");
        self.reply.packet = Some(packet);
        self.reply.mac = None;
    }

    /// Sends the answer that was made ready, if there is one.
    #[inline]
    pub(crate) fn flush_reply(&mut self, now_ns: u64, arena: &mut Arena) {
        if let Some(packet) = self.reply.packet.take() {
            self.send_reply(now_ns, arena, packet);
        }
    }

    fn send_reply(&mut self, now_ns: u64, arena: &mut Arena, packet: Packet) {
        let payload = std::mem::take(&mut self.reply.payload);
        if self.reply.mac.is_none() && self.leaves_by_router(packet.destination) {
            return self.hand_over_own(packet, payload);
        }
        let path = match self.reply.mac.take() {
            Some(mac) => Ok(Path {
                destination: packet.destination,
                source: packet.source,
                next_hop: packet.destination,
                mac: Some(mac),
                loops: false,
                mtu: self.mtu,
                routers_fragment: false,
                template: Template::NONE,
                plain_bytes: 0,
                valid_until_ns: 0,
            }),
            None => self.path(now_ns, arena, packet.destination),
        };
        match path {
            Ok(path) => self.send_payload(arena, &packet, &path, &payload),
            Err(_) => self.counters.transmit_drops.count(DropReason::NoRoute),
        }
        // The buffer is used again.
        self.reply.payload = payload;
    }

    /// Sends a payload in a frame of its own, or in fragments.
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

    /// Whether an ICMP error may be sent to this address now.
    pub(crate) fn allow_error(&mut self, now_ns: u64, destination: IpAddr) -> bool {
        let allowed = self.error_limits.allow(now_ns, &mut self.chance, destination);
        if allowed {
            self.counters.icmp_errors_sent += 1;
        } else {
            self.counters.transmit_drops.count(DropReason::IcmpRateLimited);
        }
        allowed
    }

    /// Brings a report about a packet that we sent to the socket that sent it
    /// (RFC 1122 section 4.1.3.3), after the checks of RFC 5927 section 4 that
    /// UDP allows: the quote must be of a datagram between an address and port
    /// of ours that a socket has, and, when the socket is connected, its peer.
    ///
    /// # Errors
    /// [`DropReason::IcmpQuote`] when we sent no such packet,
    /// [`DropReason::IcmpMtu`] for a path MTU that cannot be.
    pub(crate) fn report(
        &mut self,
        now_ns: u64,
        report: Report,
        quote: &Quote<'_>,
    ) -> Result<(), DropReason> {
        if quote.protocol == Protocol::TCP {
            return self.tcp_report(now_ns, report, quote);
        }
        if quote.protocol != Protocol::UDP {
            return Err(DropReason::IcmpQuote);
        }
        let udp = UdpHeader::parse_quoted(quote.payload).map_err(|_| DropReason::IcmpQuote)?;
        let local = SocketAddr::new(quote.source, udp.source_port);
        let remote = SocketAddr::new(quote.destination, udp.destination_port);
        let index = self.udp.find(local, remote).ok_or(DropReason::IcmpQuote)?;
        if let Report::TooBig(told) = report {
            self.path_mtu_told(now_ns, told, quote)?;
        }
        let limit_bytes = self.path_mtu(now_ns, quote.destination).0;
        let Some((id, socket)) = self.udp.at(index) else { return Err(DropReason::IcmpQuote) };
        let presented = socket.present(remote);
        let error = match report {
            Report::Refused => SocketError::ConnectionRefused(presented),
            Report::Host => SocketError::HostUnreachable(presented),
            Report::Network => SocketError::NetworkUnreachable(presented),
            // Only who forbids fragments has to know; the others go on with
            // smaller ones.
            Report::TooBig(_) if !socket.options.dont_fragment => return Ok(()),
            Report::TooBig(_) => {
                let headers = if quote.destination.is_ipv4() { 28 } else { 48 };
                let limit_bytes = limit_bytes.saturating_sub(headers);
                SocketError::MessageTooLong { remote: presented, limit_bytes }
            }
        };
        if socket.remote.is_none() && !socket.options.report_errors {
            return Ok(());
        }
        socket.error = Some(error);
        if !socket.error_told {
            socket.error_told = true;
            self.events.push_back(Event::Error(id));
        }
        Ok(())
    }

    pub(crate) fn path_mtu_told(
        &mut self,
        now_ns: u64,
        told: usize,
        quote: &Quote<'_>,
    ) -> Result<(), DropReason> {
        let (current, _, _) = self.path_mtu(now_ns, quote.destination);
        self.path_mtus.learn(now_ns, quote.destination, told, quote.packet_bytes, current)?;
        self.paths.forget();
        Ok(())
    }

    /// The path MTU to a destination, whether routers on the way must
    /// fragment, and how long that is believed.
    pub(crate) fn path_mtu(&self, now_ns: u64, destination: IpAddr) -> (usize, bool, u64) {
        match self.path_mtus.get(now_ns, destination) {
            Some(known) => (known.mtu.min(self.mtu), known.routers_fragment, known.until_ns),
            None => (self.mtu, false, u64::MAX),
        }
    }
}
