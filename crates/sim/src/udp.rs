//! UDP service on the real stack: takes frames, returns datagrams.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{Config, Datagram, Route, Stack, UdpId, UdpOptions};
use tidegate_wire::{
    DropReason, EtherType, EthernetHeader, IpCidr, Ipv4Header, Ipv6Header, MacAddr, Protocol,
    UdpHeader, checksum, udp,
};

use crate::error::SetupError;
use crate::load::{
    FIRST_READER_PORT, IpFamily, Packet, flow_endpoints, flow_of_source, reader_of_flow,
};

/// Maximum number of frames in the stack's transmit queue.
const TRANSMIT_FRAMES: usize = 512;
/// Frames for the stack's own packets.
const SPARE_FRAMES: u32 = 64;
const HOST_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const GATEWAY_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);

/// Stack with one socket per reader.
pub(crate) struct UdpService {
    family: IpFamily,
    stack: Stack,
    arena: Arena,
    /// Sockets of the readers.
    readers: Vec<ReaderSocket>,
    capacity: u32,
    /// Buffer of the frame being built.
    frame: Vec<u8>,
    /// Packets lost for want of a buffer, or when their reader exited.
    lost: u64,
}

/// Datagram that a reader has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServedDatagram {
    /// Arrival time at the NIC.
    pub(crate) arrived_ns: u64,
    /// Flow number.
    pub(crate) flow: u32,
    /// A requested reply was sent.
    pub(crate) answered: bool,
}

/// Socket of a reader.
struct ReaderSocket {
    /// Bound socket; `None` after the reader's exit.
    socket: Option<UdpId>,
    /// Datagram in processing.
    current: Option<Datagram>,
}

impl UdpService {
    /// Creates a stack with an address, and one socket per reader, each with a queue of
    /// `socket_queue` datagrams.
    pub(crate) fn new(
        family: IpFamily,
        readers: u32,
        socket_queue: u32,
        seed: u64,
    ) -> Result<Self, SetupError> {
        let waiting = u64::from(socket_queue) * u64::from(readers.max(1));
        let waiting = u32::try_from(waiting).unwrap_or(u32::MAX / 2);
        let frames = waiting + TRANSMIT_FRAMES as u32 + SPARE_FRAMES;
        let mut arena =
            Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false })?;
        let mut key = [0; 16];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        let mut config = Config::ethernet(HOST_MAC, key);
        config.limits.transmit_frames = TRANSMIT_FRAMES;
        let (_, (address, _)) = flow_endpoints(family, 0, 1);
        let (gateway, any_address, bits) = match family {
            IpFamily::V4 => (IpAddr::from([198, 19, 0, 254]), IpAddr::from([0; 4]), 24),
            IpFamily::V6 => {
                (IpAddr::from([0x2001, 2, 0, 1, 0, 0, 0, 0xfe]), IpAddr::from([0_u16; 8]), 64)
            }
        };
        let prefix = |ip, bits| IpCidr::new(ip, bits).into_iter();
        config.addresses.extend(prefix(address, bits));
        config
            .routes
            .extend(prefix(any_address, 0).map(|prefix| Route { prefix, gateway: Some(gateway) }));
        let mut stack = Stack::new(config, 0)?;
        stack.set_neighbour(0, gateway, Some(GATEWAY_MAC), &mut arena);
        let bind = |reader: u32| {
            let options = UdpOptions::default().queue_packets(socket_queue as usize);
            let at = SocketAddr::new(address, FIRST_READER_PORT + reader as u16);
            let socket = Some(stack.udp_bind(at, options)?);
            Ok::<_, SetupError>(ReaderSocket { socket, current: None })
        };
        let readers = (0..readers).map(bind).collect::<Result<_, _>>()?;
        let (frame, capacity) = (Vec::with_capacity(128), socket_queue);
        Ok(Self { family, stack, arena, readers, capacity, frame, lost: 0 })
    }

    /// Passes the frame of a packet to the stack. Returns the packet's reader.
    pub(crate) fn handle_packet(&mut self, now_ns: u64, packet: Packet) -> usize {
        let readers = self.readers.len() as u32;
        let reader = reader_of_flow(packet.flow, readers);
        if write_frame(&mut self.frame, self.family, packet, readers).is_none() {
            self.lost += 1;
            return reader;
        }
        match self.arena.alloc_from(&self.frame) {
            Some(frame) => self.stack.handle_frame(now_ns, frame, &mut self.arena),
            None => self.lost += 1,
        }
        while self.stack.poll_event().is_some() {}
        reader
    }

    fn socket(&self, reader: usize) -> Option<UdpId> {
        self.readers.get(reader)?.socket
    }

    /// Number of readers.
    pub(crate) fn readers(&self) -> usize {
        self.readers.len()
    }

    /// Returns the number of datagrams queued for a reader, and the capacity of the queue.
    pub(crate) fn level(&self, reader: usize) -> (u32, u32) {
        let waiting = self.socket(reader).map_or(0, |socket| self.stack.udp_queue_len(socket));
        (waiting as u32, self.capacity)
    }

    /// Takes the next datagram for processing. Returns false if there is none.
    pub(crate) fn read(&mut self, reader: usize) -> bool {
        let Some(socket) = self.socket(reader) else { return false };
        let datagram = self.stack.udp_recv(&self.arena, socket);
        let found = datagram.is_some();
        self.readers[reader].current = datagram;
        found
    }

    /// Closes the socket of an exited reader; the datagram in processing is lost.
    pub(crate) fn close(&mut self, reader: usize) {
        let Some(reader) = self.readers.get_mut(reader) else { return };
        if let Some(datagram) = reader.current.take() {
            datagram.release(&mut self.arena);
            self.lost += 1;
        }
        if let Some(socket) = reader.socket.take() {
            self.stack.udp_close(socket, &mut self.arena);
        }
    }

    /// Finishes the datagram in processing; replies to it if `answers`.
    pub(crate) fn finish(
        &mut self,
        now_ns: u64,
        reader: usize,
        answers: bool,
    ) -> Option<ServedDatagram> {
        let reader = self.readers.get_mut(reader)?;
        let datagram = reader.current.take()?;
        let stamp = datagram.bytes(&self.arena).first_chunk::<8>().copied().unwrap_or_default();
        let answered = answers
            && reader.socket.is_some_and(|socket| {
                let to = Some(datagram.remote);
                self.stack.udp_send(now_ns, &mut self.arena, socket, to, None, &stamp).is_ok()
            });
        let flow = flow_of_source(datagram.remote);
        datagram.release(&mut self.arena);
        Some(ServedDatagram { arrived_ns: u64::from_be_bytes(stamp), flow, answered })
    }

    /// Takes the next frame to transmit. Returns false if there is none.
    pub(crate) fn next_output(&mut self) -> bool {
        let frame = self.stack.transmit_queue().pop_front();
        let found = frame.is_some();
        frame.into_iter().for_each(|frame| self.arena.free(frame));
        found
    }

    /// Time at which the stack's timers are due.
    pub(crate) fn next_timeout_ns(&self) -> Option<u64> {
        self.stack.next_timeout()
    }

    /// Handles the stack's due timers.
    pub(crate) fn handle_timeout(&mut self, now_ns: u64) {
        self.stack.handle_timeout(now_ns, &mut self.arena);
        while self.stack.poll_event().is_some() {}
    }

    /// Packets queued in sockets or in processing.
    pub(crate) fn in_flight(&self) -> u64 {
        let current = self.readers.iter().filter(|reader| reader.current.is_some()).count();
        self.stack.counters().held + current as u64
    }

    /// Packets dropped on socket queue overflow.
    pub(crate) fn socket_drops(&self) -> u64 {
        self.stack.counters().drops.get(DropReason::SocketQueueFull)
    }

    /// Packets that the stack dropped for any other reason.
    pub(crate) fn other_drops(&self) -> u64 {
        self.stack.counters().drops.total() - self.socket_drops() + self.lost
    }
}

/// Writes the frame of a packet: UDP with the arrival time as payload. `None` would mean that
/// the headers do not fit, which cannot happen.
fn write_frame(frame: &mut Vec<u8>, family: IpFamily, packet: Packet, readers: u32) -> Option<()> {
    let (from, to) = flow_endpoints(family, packet.flow, readers);
    // The minimum Ethernet frame without its check sequence is 60 bytes.
    let payload_bytes = match family {
        IpFamily::V4 => 60 - EthernetHeader::BYTES - 20 - 8,
        IpFamily::V6 => 8,
    };
    let (udp_bytes, ip_bytes) = match family {
        IpFamily::V4 => (8 + payload_bytes, 20),
        IpFamily::V6 => (8 + payload_bytes, 40),
    };
    frame.clear();
    frame.resize(EthernetHeader::BYTES + ip_bytes + udp_bytes, 0);
    let ethertype = match family {
        IpFamily::V4 => EtherType::IPV4,
        IpFamily::V6 => EtherType::IPV6,
    };
    let ethernet =
        EthernetHeader { destination: HOST_MAC, source: GATEWAY_MAC, vlan: None, ethertype };
    let ip = ethernet.emit(frame)?;
    let (segment, pseudo) = match (from.0, to.0) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let header = Ipv4Header::new(source, destination, Protocol::UDP, udp_bytes)?;
            let sum =
                checksum::pseudo_header_v4(source, destination, Protocol::UDP, udp_bytes as u16);
            (header.emit(ip)?, sum)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let header = Ipv6Header::new(source, destination, Protocol::UDP, udp_bytes)?;
            let sum =
                checksum::pseudo_header_v6(source, destination, Protocol::UDP, udp_bytes as u32);
            (header.emit(ip)?, sum)
        }
        _ => return None,
    };
    let header = UdpHeader::new(from.1, to.1, payload_bytes)?;
    let payload = header.emit(segment)?;
    payload.get_mut(..8)?.copy_from_slice(&packet.arrived_ns.to_be_bytes());
    udp::fill_checksum(pseudo, segment);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delivers_datagrams_with_their_arrival_times() {
        for family in [IpFamily::V4, IpFamily::V6] {
            let mut service = UdpService::new(family, 1, 2, 1).unwrap();
            for flow in [3, 700, 65_535] {
                let packet = Packet { arrived_ns: 1_000_000 + u64::from(flow), flow };
                service.handle_packet(2_000_000, packet);
            }
            assert_eq!(service.level(0), (2, 2), "{family:?}");
            assert_eq!((service.socket_drops(), service.other_drops()), (1, 0));
            for flow in [3, 700] {
                assert!(service.read(0));
                let flow = flow as u32;
                let arrived_ns = 1_000_000 + u64::from(flow);
                let served = Some(ServedDatagram { arrived_ns, flow, answered: true });
                assert_eq!(service.finish(3_000_000, 0, true), served);
            }
            assert!(!service.read(0));
            assert!(service.next_output(), "replies wait for the NIC");
        }
    }

    #[test]
    fn drops_every_packet_without_a_socket() {
        let mut service = UdpService::new(IpFamily::V4, 0, 1, 1).unwrap();
        service.handle_packet(1, Packet { arrived_ns: 0, flow: 1 });
        assert_eq!((service.in_flight(), service.other_drops()), (0, 1));
    }
}
