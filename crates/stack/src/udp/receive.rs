//! Input of datagrams.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, Checksum};
use tidegate_wire::{DropReason, UdpHeader, udp};

use super::{Datagram, Payload, UdpTable};
use crate::interface::Interface;
use crate::ip::packet::{Delivery, RxVerdict, TransportPacket};
use crate::link::LinkMeta;

impl UdpTable {
    /// Parses and checks a received datagram, and finds its socket.
    #[inline]
    pub(crate) fn handle_packet(
        &self,
        packet: TransportPacket<'_>,
        link_meta: &LinkMeta,
    ) -> Result<RxVerdict, DropReason> {
        let TransportPacket { info, bytes: datagram, offset, .. } = packet;
        let (header, payload) = UdpHeader::parse(datagram)?;
        if link_meta.checksum == Checksum::Unknown {
            let whole = datagram.get(..usize::from(header.length_bytes)).unwrap_or(datagram);
            match (info.source, info.destination) {
                (IpAddr::V4(source), IpAddr::V4(destination)) => {
                    udp::verify_v4(source, destination, whole)?;
                }
                (IpAddr::V6(source), IpAddr::V6(destination)) => {
                    udp::verify_v6(source, destination, whole)?;
                }
                _ => debug_assert!(false, "a packet has two addresses of one family"),
            }
        }
        if header.destination_port == 0 {
            return Err(DropReason::UdpPortZero);
        }
        let local = SocketAddr::new(info.destination, header.destination_port);
        let remote = SocketAddr::new(info.source, header.source_port);
        let socket = self.find(local, remote);
        if socket.is_none()
            && (info.is_unicast || self.nth_group_socket(local, remote, 0).is_none())
        {
            return Err(DropReason::UdpNoSocket);
        }
        Ok(RxVerdict::Deliver(Delivery {
            info,
            source_port: header.source_port,
            destination_port: header.destination_port,
            socket: socket.filter(|_| info.is_unicast),
            payload_offset: offset + UdpHeader::BYTES,
            payload_len: payload.len(),
        }))
    }

    /// Queues a datagram at its socket, or a copy at each socket of the group.
    #[inline]
    pub(crate) fn deliver(
        &mut self,
        interface: &mut Interface,
        arena: &mut Arena,
        mut packet: Payload,
        to: &Delivery,
    ) {
        packet.narrow(to.payload_offset, to.payload_len);
        match to.socket {
            Some(index) => self.enqueue(interface, arena, packet, to, index),
            None => self.deliver_copies(interface, arena, packet, to),
        }
    }

    fn deliver_copies(
        &mut self,
        interface: &mut Interface,
        arena: &mut Arena,
        packet: Payload,
        to: &Delivery,
    ) {
        let local = SocketAddr::new(to.info.destination, to.destination_port);
        let remote = SocketAddr::new(to.info.source, to.source_port);
        let mut delivered = 0;
        while let Some(index) = self.nth_group_socket(local, remote, delivered) {
            delivered += 1;
            interface.counters.copied += 1;
            let copy = match &packet {
                Payload::Frame(frame) => arena.copy_of(frame).map(Payload::Frame),
                Payload::Owned(bytes) => Some(Payload::Owned(bytes.clone())),
            };
            match copy {
                Some(copy) => self.enqueue(interface, arena, copy, to, index),
                None => interface.counters.count_drop(DropReason::NoBuffer),
            }
        }
        interface.counters.handled += 1;
        packet.release(arena);
    }

    #[inline]
    fn enqueue(
        &mut self,
        interface: &mut Interface,
        arena: &mut Arena,
        packet: Payload,
        to: &Delivery,
        index: u32,
    ) {
        let Some((id, socket)) = self.by_index(index) else {
            debug_assert!(false, "a lookup returned a slot without a socket");
            interface.counters.count_drop(DropReason::UdpNoSocket);
            return packet.release(arena);
        };
        if let Err(reason) = socket.check_space(to.payload_len) {
            interface.counters.count_drop(reason);
            return packet.release(arena);
        }
        let datagram = Datagram {
            payload: packet,
            remote: SocketAddr::new(socket.to_app_ip(to.info.source), to.source_port),
            local: socket.to_app_ip(to.info.destination),
            hop_limit: to.info.hop_limit,
            traffic_class: to.info.traffic_class,
        };
        interface.counters.held += 1;
        if socket.push(datagram) {
            socket.notify_readable(id, &mut interface.events);
        }
    }
}
