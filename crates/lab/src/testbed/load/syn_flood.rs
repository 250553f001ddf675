//! Frames of a SYN flood.

use std::net::{Ipv4Addr, SocketAddrV4};

use tidegate_wire::{MacAddr, TcpFlags};

use super::segment::Segment;
use crate::testbed::flood::LOAD_MAC;

/// First source address, from the range of RFC 2544.
const FIRST_SOURCE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);

/// Number of sources.
pub(crate) const SYN_SOURCES: u32 = 8_192;

/// Returns one SYN segment of each source.
pub(crate) fn syn_frames(mac: [u8; 6], target: SocketAddrV4) -> Vec<Vec<u8>> {
    let first = u32::from(FIRST_SOURCE);
    (0..SYN_SOURCES)
        .filter_map(|number| syn_frame((mac, target), (first + number).into(), number))
        .collect()
}

fn syn_frame(
    (mac, target): ([u8; 6], SocketAddrV4),
    source: Ipv4Addr,
    number: u32,
) -> Option<Vec<u8>> {
    let port = 1024 + (number.wrapping_mul(7919) % 60_000) as u16;
    let segment = Segment {
        source: (MacAddr(LOAD_MAC), SocketAddrV4::new(source, port)),
        target: (MacAddr(mac), target),
        sequence: number.wrapping_mul(0x9e37_79b9),
        acknowledgement: 0,
        flags: TcpFlags::SYN,
        payload: &[],
    };
    segment.frame()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_wire::tcp::verify_v4;
    use tidegate_wire::{EtherType, EthernetHeader, Ipv4Header, TcpHeader};

    #[test]
    fn flood_frames_are_valid_syn_segments() {
        let target = SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 3), 7);
        let frames = syn_frames([2, 0, 0, 0, 0, 1], target);
        assert_eq!(frames.len(), SYN_SOURCES as usize);
        let (ethernet, packet) = EthernetHeader::parse(&frames[8191]).unwrap();
        assert_eq!(ethernet.ethertype, EtherType::IPV4);
        let (ip, segment) = Ipv4Header::parse(packet).unwrap();
        assert!(verify_v4(ip.source, ip.destination, segment).is_ok());
        let (tcp, payload) = TcpHeader::parse(segment).unwrap();
        assert_eq!((tcp.flags, tcp.destination_port, payload.len()), (TcpFlags::SYN, 7, 0));
        assert_ne!(frames[0], frames[1]);
    }
}
