//! Datagrams on their way in.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, Checksum};
use tidegate_wire::{DropReason, UdpHeader, udp};

use super::{Datagram, Payload};
use crate::Stack;
use crate::ethernet::Arrival;
use crate::packet::Fate;

/// What the IP header says about a packet.
#[derive(Clone, Copy)]
pub(crate) struct IpInfo {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    /// Whether it was sent to one address of ours, not to a group.
    pub(crate) unicast: bool,
}

/// Where a datagram goes, and which part of the packet it is.
pub(crate) struct Delivery {
    pub(crate) info: IpInfo,
    pub(crate) source_port: u16,
    pub(crate) destination_port: u16,
    /// The socket, when there is just one.
    pub(crate) socket: Option<u32>,
    /// Where the payload begins in the packet.
    pub(crate) at: usize,
    pub(crate) len: usize,
}

impl Stack {
    /// Reads a datagram, which stands `at` bytes into its packet.
    #[inline]
    pub(crate) fn udp_input(
        &mut self,
        info: IpInfo,
        arrival: &Arrival,
        datagram: &[u8],
        at: usize,
    ) -> Result<Fate, DropReason> {
        let (header, payload) = UdpHeader::parse(datagram)?;
        if arrival.checksum == Checksum::Unknown {
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
        if socket.is_none() && (info.unicast || self.udp.nth_listener(local, remote, 0).is_none()) {
            return Err(DropReason::UdpNoSocket);
        }
        Ok(Fate::Deliver(Delivery {
            info,
            source_port: header.source_port,
            destination_port: header.destination_port,
            socket: socket.filter(|_| info.unicast),
            at: at + UdpHeader::BYTES,
            len: payload.len(),
        }))
    }

    /// Brings a datagram to its socket, or copies of it to all that listen.
    #[inline]
    pub(crate) fn udp_deliver(&mut self, arena: &mut Arena, mut packet: Payload, to: &Delivery) {
        packet.cut(to.at, to.len);
        match to.socket {
            Some(index) => self.udp_enqueue(arena, packet, to, index),
            None => self.udp_deliver_copies(arena, packet, to),
        }
    }

    fn udp_deliver_copies(&mut self, arena: &mut Arena, packet: Payload, to: &Delivery) {
        let local = SocketAddr::new(to.info.destination, to.destination_port);
        let remote = SocketAddr::new(to.info.source, to.source_port);
        let mut taken = 0;
        while let Some(index) = self.udp.nth_listener(local, remote, taken) {
            taken += 1;
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
        let Some((id, socket)) = self.udp.at(index) else {
            debug_assert!(false, "a lookup gave a place without a socket");
            self.counters.drops.count(DropReason::UdpNoSocket);
            return packet.release(arena);
        };
        if let Err(reason) = socket.has_room(to.len) {
            self.counters.drops.count(reason);
            return packet.release(arena);
        }
        let datagram = Datagram {
            payload: packet,
            remote: SocketAddr::new(socket.present_ip(to.info.source), to.source_port),
            local: socket.present_ip(to.info.destination),
            hop_limit: to.info.hop_limit,
            traffic_class: to.info.traffic_class,
        };
        self.counters.held += 1;
        if socket.push(datagram) {
            socket.tell_readable(id, &mut self.events);
        }
    }
}
