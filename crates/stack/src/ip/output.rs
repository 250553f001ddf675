//! IP output: path lookup, IP header, fragmentation, next hop.

use std::net::IpAddr;

use tidegate_memory::{Arena, Frame, HEADROOM_BYTES};
use tidegate_wire::ipv6_extension::FragmentHeader;
use tidegate_wire::{DropReason, EtherType, Ipv4Header, Ipv6Header, Protocol};

use crate::fast_path::template::HeaderTemplate;
use crate::interface::Interface;
use crate::ip::address::AddressKind;
use crate::ip::packet::Packet;
use crate::ip::path::Path;
use crate::ip::path_mtu::QuotedKind;
use crate::{AddressOwnership, SendError};

impl Interface {
    /// Maximum length of the headers in front of a UDP payload, in bytes.
    #[inline]
    pub(crate) fn max_header_bytes(&self) -> usize {
        self.link_header_bytes() + Ipv6Header::BYTES + 8
    }

    /// Number of frames that datagrams may still queue on a path. Loopback leaves half of the queue
    /// to TCP, which sends nothing while the other half is full.
    #[inline]
    pub(crate) fn transmit_space(&self, path: &Path) -> usize {
        let max_frames = self.limits.transmit_frames;
        match path.is_loopback {
            false => max_frames.saturating_sub(self.transmit.len()),
            true => (max_frames / 2).saturating_sub(self.loopback.len()),
        }
    }

    /// Checks for space in the queue of a path.
    ///
    /// [`SendError::WouldBlock`] when the queue of the path is full.
    #[inline]
    pub(crate) fn check_transmit_space(&self, path: &Path) -> Result<(), SendError> {
        if self.transmit_space(path) > 0 { Ok(()) } else { Err(SendError::WouldBlock) }
    }

    /// Path to a destination, from the cache or newly resolved.
    #[inline]
    pub(crate) fn path(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        destination: IpAddr,
    ) -> Result<Path, SendError> {
        match self.paths.get(now_ns, destination) {
            Some(path) => Ok(*path),
            None => self.find_path(now_ns, arena, destination),
        }
    }

    #[cold]
    fn find_path(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        destination: IpAddr,
    ) -> Result<Path, SendError> {
        let next_hop =
            self.next_hop(destination).ok_or(SendError::NetworkUnreachable(destination))?;
        let source = self
            .addresses
            .source_for(destination, next_hop)
            .ok_or(SendError::NoSource(destination))?;
        let is_loopback = self.addresses.kind(next_hop) == AddressKind::Local;
        let (mac, resolved_until_ns) = match is_loopback {
            true => (Some(self.mac), u64::MAX),
            false => self.resolve(now_ns, arena, next_hop)?,
        };
        let (mtu, routers_fragment, mtu_until_ns) = match is_loopback {
            true => (self.mtu, false, u64::MAX),
            false => self.path_mtu(now_ns, QuotedKind::Datagram, destination),
        };
        let (segment_mtu, _, segment_mtu_until_ns) = match is_loopback {
            true => (self.mtu, false, u64::MAX),
            false => self.path_mtu(now_ns, QuotedKind::Segment, destination),
        };
        // A frame can hold less than the link's MTU.
        let max_bytes = arena.frame_bytes() - usize::from(HEADROOM_BYTES);
        let (mtu, segment_mtu) = (mtu.min(max_bytes), segment_mtu.min(max_bytes));
        let template = match mac {
            // The fast path only feeds the transmit queue.
            Some(mac)
                if self.plain_link.has_plain_frames() && !routers_fragment && !is_loopback =>
            {
                HeaderTemplate::new((self.mac, mac), (source, destination), self.hop_limit)
            }
            _ => None,
        };
        let path = Path {
            destination,
            source,
            next_hop,
            mac,
            is_loopback,
            mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
            segment_mtu: u16::try_from(segment_mtu).unwrap_or(u16::MAX),
            routers_fragment,
            template: template.unwrap_or(HeaderTemplate::NONE),
            max_plain_frame_bytes: if template.is_some() {
                mtu + self.link_header_bytes()
            } else {
                0
            },
            valid_until_ns: resolved_until_ns.min(mtu_until_ns).min(segment_mtu_until_ns),
        };
        if mac.is_some() {
            self.paths.insert(path);
        }
        Ok(path)
    }

    /// Next hop of packets to `destination`. Groups are on the link, and addresses of this
    /// interface are their own next hop.
    pub(crate) fn next_hop(&self, destination: IpAddr) -> Option<IpAddr> {
        match self.addresses.kind(destination) {
            AddressKind::Local if self.has_loopback() => Some(destination),
            AddressKind::Local | AddressKind::Tentative => None,
            AddressKind::Broadcast | AddressKind::JoinedGroup => Some(destination),
            AddressKind::Other if destination.is_unspecified() || destination.is_loopback() => None,
            AddressKind::Other if destination.is_multicast() => Some(destination),
            AddressKind::Other => self.routes.next_hop(destination),
        }
    }

    /// Source address of packets to `destination`; `None` without a route.
    pub(crate) fn source_for(&self, destination: IpAddr) -> Option<IpAddr> {
        let next_hop = self.next_hop(destination)?;
        self.addresses.source_for(destination, next_hop)
    }

    /// Checks that packets to `to` may have the source address `from`; returns `from`.
    pub(crate) fn check_source(&self, from: IpAddr, to: IpAddr) -> Result<IpAddr, SendError> {
        if self.addresses.kind(from) != AddressKind::Local || from.is_ipv4() != to.is_ipv4() {
            return Err(SendError::SourceNotLocal(from));
        }
        Ok(from)
    }

    /// True if packets to addresses of this interface are looped back. With shared addresses, they
    /// may be meant for the kernel. A router has no local sockets.
    pub(crate) fn has_loopback(&self) -> bool {
        self.ownership == AddressOwnership::Exclusive && !self.forwarding.enabled
    }

    /// Sends a frame that holds the payload of an IP packet within the path MTU, or one fragment of
    /// such a payload. An IPv6 fragment includes its fragment header.
    #[inline]
    pub(crate) fn send_frame(
        &mut self,
        arena: &mut Arena,
        packet: &Packet,
        path: &Path,
        fragment: Option<FragmentHeader>,
        mut frame: Frame,
    ) {
        let payload_bytes = frame.len();
        // Routers fragment packets without the "don't fragment" flag, so such packets need unique
        // identifications (RFC 6864 section 4).
        let fragment = match fragment {
            None if path.routers_fragment => Some(FragmentHeader {
                offset_bytes: 0,
                more_fragments: false,
                identification: self.identifications.next(packet.source, packet.destination),
            }),
            other => other,
        };
        match path.mac {
            Some(mac) => {
                let link_bytes = self.link_header_bytes();
                frame.retreat(link_bytes + packet.header_bytes());
                let bytes = arena.bytes_mut(&mut frame);
                let written = self
                    .emit_link_header(mac, packet.ethertype(), bytes)
                    .and_then(|rest| packet.emit(payload_bytes, fragment, rest));
                debug_assert!(written.is_some(), "a frame to send has headroom");
                self.push_to_path(arena, path, frame);
            }
            None => {
                frame.retreat(packet.header_bytes());
                let written = packet.emit(payload_bytes, fragment, arena.bytes_mut(&mut frame));
                debug_assert!(written.is_some(), "a frame to send has headroom");
                if let Some(dropped) = self.neighbours.queue_frame(path.next_hop, frame) {
                    self.counters.count_transmit_drop(DropReason::NeighbourQueueFull);
                    arena.free(dropped);
                }
            }
        }
    }

    /// Sends the payload of an IP packet in fragments, all of them or none (RFC 791, RFC 8200
    /// section 4.5).
    ///
    /// # Errors
    /// [`SendError::WouldBlock`] when there is no space for all fragments.
    pub(crate) fn send_fragments(
        &mut self,
        arena: &mut Arena,
        packet: &Packet,
        path: &Path,
        payload: &[u8],
    ) -> Result<(), SendError> {
        let headers = packet.header_bytes() + packet.fragment_header_bytes();
        let fragment_bytes = usize::from(path.mtu).saturating_sub(headers) & !7;
        if fragment_bytes == 0 {
            return Err(SendError::MessageTooLong { limit_bytes: 0 });
        }
        let count = payload.len().div_ceil(fragment_bytes);
        if count > self.transmit_space(path).min(arena.available()) {
            return Err(SendError::WouldBlock);
        }
        let identification = self.identifications.next(packet.source, packet.destination);
        for (index, data) in payload.chunks(fragment_bytes).enumerate() {
            let mut frame = arena.alloc_from(data).ok_or(SendError::WouldBlock)?;
            let fragment = FragmentHeader {
                offset_bytes: (index * fragment_bytes) as u16,
                more_fragments: index + 1 < count,
                identification,
            };
            if packet.destination.is_ipv6() {
                frame.retreat(FragmentHeader::BYTES);
                let written = fragment.emit(packet.protocol, arena.bytes_mut(&mut frame));
                debug_assert!(written.is_some(), "a frame to send has headroom");
            }
            self.send_frame(arena, packet, path, Some(fragment), frame);
        }
        Ok(())
    }
}

impl Packet {
    fn fragment_header_bytes(&self) -> usize {
        if self.destination.is_ipv4() { 0 } else { FragmentHeader::BYTES }
    }

    #[inline]
    pub(crate) fn header_bytes(&self) -> usize {
        if self.destination.is_ipv4() { Ipv4Header::BYTES } else { Ipv6Header::BYTES }
    }

    #[inline]
    fn ethertype(&self) -> EtherType {
        if self.destination.is_ipv4() { EtherType::IPV4 } else { EtherType::IPV6 }
    }

    /// Writes the IP header of a packet or fragment and returns the rest.
    #[inline]
    fn emit<'b>(
        &self,
        payload_bytes: usize,
        fragment: Option<FragmentHeader>,
        bytes: &'b mut [u8],
    ) -> Option<&'b mut [u8]> {
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut header =
                    Ipv4Header::new(source, destination, self.protocol, payload_bytes)?;
                header.ttl = self.hop_limit;
                header.dscp_ecn = self.traffic_class;
                if let Some(fragment) = fragment {
                    header.dont_fragment = false;
                    header.identification = fragment.identification as u16;
                    header.more_fragments = fragment.more_fragments;
                    header.fragment_offset_bytes = fragment.offset_bytes;
                }
                header.emit(bytes)
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let next_header =
                    if fragment.is_some() { Protocol::FRAGMENT } else { self.protocol };
                let mut header = Ipv6Header::new(source, destination, next_header, payload_bytes)?;
                header.hop_limit = self.hop_limit;
                header.traffic_class = self.traffic_class;
                header.emit(bytes)
            }
            _ => None,
        }
    }
}
