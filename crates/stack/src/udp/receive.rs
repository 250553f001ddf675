//! Input of datagrams.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, Checksum};
use tidegate_wire::{DropReason, UdpHeader, udp};

use super::{Datagram, Payload};
use crate::Stack;
use crate::ip::packet::{Delivery, IpInfo, RxVerdict};
use crate::link::LinkMeta;

impl Stack {
    /// Parses and checks a datagram that begins `datagram_offset` bytes into its packet.
    #[inline]
    pub(crate) fn udp_input(
        &mut self,
        info: IpInfo,
        link_meta: &LinkMeta,
        datagram: &[u8],
        datagram_offset: usize,
    ) -> Result<RxVerdict, DropReason> {
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
        let socket = self.udp.find(local, remote);
        if socket.is_none()
            && (info.is_unicast || self.udp.nth_group_socket(local, remote, 0).is_none())
        {
            return Err(DropReason::UdpNoSocket);
        }
        Ok(RxVerdict::Deliver(Delivery {
            info,
            source_port: header.source_port,
            destination_port: header.destination_port,
            socket: socket.filter(|_| info.is_unicast),
            payload_offset: datagram_offset + UdpHeader::BYTES,
            payload_len: payload.len(),
        }))
    }

    /// Queues a datagram at its socket, or a copy at each socket of the group.
    #[inline]
    pub(crate) fn udp_deliver(&mut self, arena: &mut Arena, mut packet: Payload, to: &Delivery) {
        packet.narrow(to.payload_offset, to.payload_len);
        match to.socket {
            Some(index) => self.udp_enqueue(arena, packet, to, index),
            None => self.udp_deliver_copies(arena, packet, to),
        }
    }

    fn udp_deliver_copies(&mut self, arena: &mut Arena, packet: Payload, to: &Delivery) {
        let local = SocketAddr::new(to.info.destination, to.destination_port);
        let remote = SocketAddr::new(to.info.source, to.source_port);
        let mut delivered = 0;
        while let Some(index) = self.udp.nth_group_socket(local, remote, delivered) {
            delivered += 1;
            self.counters.copied += 1;
            let copy = match &packet {
                Payload::Frame(frame) => arena.copy_of(frame).map(Payload::Frame),
                Payload::Owned(bytes) => Some(Payload::Owned(bytes.clone())),
            };
            match copy {
                Some(copy) => self.udp_enqueue(arena, copy, to, index),
                None => self.counters.drops.count(DropReason::NoBuffer),
            }
        }
        self.counters.handled += 1;
        packet.release(arena);
    }

    #[inline]
    fn udp_enqueue(&mut self, arena: &mut Arena, packet: Payload, to: &Delivery, index: u32) {
        let Some((id, socket)) = self.udp.by_index(index) else {
            debug_assert!(false, "a lookup returned a slot without a socket");
            self.counters.drops.count(DropReason::UdpNoSocket);
            return packet.release(arena);
        };
        if let Err(reason) = socket.check_space(to.payload_len) {
            self.counters.drops.count(reason);
            return packet.release(arena);
        }
        let datagram = Datagram {
            payload: packet,
            remote: SocketAddr::new(socket.to_app_ip(to.info.source), to.source_port),
            local: socket.to_app_ip(to.info.destination),
            hop_limit: to.info.hop_limit,
            traffic_class: to.info.traffic_class,
        };
        self.counters.held += 1;
        if socket.push(datagram) {
            socket.notify_readable(id, &mut self.events);
        }
    }
}
