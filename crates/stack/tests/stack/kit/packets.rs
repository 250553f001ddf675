//! Builders of test packets.

use std::net::IpAddr;

use tidegate_wire::ipv6_extension::FragmentHeader;
use tidegate_wire::{
    ArpOperation, ArpPacket, EtherType, EthernetHeader, Icmpv4Message, Icmpv6Message, Ipv4Header,
    Ipv6Header, MacAddr, NdpMessage, Protocol, UdpHeader, checksum, udp,
};

use super::{Family, mac};

/// Ethernet frame from host 2 to host 1 around an IP packet.
pub fn frame(packet: &[u8]) -> Vec<u8> {
    frame_to(mac(1), packet)
}

/// Ethernet frame from host 2 around an IP packet.
pub fn frame_to(destination: MacAddr, packet: &[u8]) -> Vec<u8> {
    let ethertype = if packet[0] >> 4 == 6 { EtherType::IPV6 } else { EtherType::IPV4 };
    ethernet(destination, mac(2), ethertype, packet)
}

pub fn ethernet(to: MacAddr, from: MacAddr, ethertype: EtherType, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; EthernetHeader::BYTES + payload.len()];
    let header = EthernetHeader { destination: to, source: from, vlan: None, ethertype };
    header.emit(&mut bytes).unwrap().copy_from_slice(payload);
    bytes
}

/// IP packet of either family.
pub fn ip(source: IpAddr, destination: IpAddr, protocol: Protocol, payload: &[u8]) -> Vec<u8> {
    ip_with_hops(source, destination, protocol, 64, payload)
}

pub fn ip_with_hops(
    source: IpAddr,
    destination: IpAddr,
    protocol: Protocol,
    hops: u8,
    payload: &[u8],
) -> Vec<u8> {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut header = Ipv4Header::new(source, destination, protocol, payload.len()).unwrap();
            header.ttl = hops;
            let mut bytes = vec![0; 20 + payload.len()];
            header.emit(&mut bytes).unwrap().copy_from_slice(payload);
            bytes
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut header = Ipv6Header::new(source, destination, protocol, payload.len()).unwrap();
            header.hop_limit = hops;
            let mut bytes = vec![0; 40 + payload.len()];
            header.emit(&mut bytes).unwrap().copy_from_slice(payload);
            bytes
        }
        _ => panic!("addresses of two families"),
    }
}

/// UDP datagram with its checksum.
pub fn udp(source: IpAddr, destination: IpAddr, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let bytes = 8 + payload.len();
    let mut datagram = vec![0; bytes];
    let header = UdpHeader::new(ports.0, ports.1, payload.len()).unwrap();
    header.emit(&mut datagram).unwrap().copy_from_slice(payload);
    udp::fill_checksum(pseudo(source, destination, bytes), &mut datagram);
    datagram
}

/// IP packet of either family with a traffic class.
pub fn ip_with_class(
    source: IpAddr,
    destination: IpAddr,
    protocol: Protocol,
    class: u8,
    payload: &[u8],
) -> Vec<u8> {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut header = Ipv4Header::new(source, destination, protocol, payload.len()).unwrap();
            header.dscp_ecn = class;
            let mut bytes = vec![0; 20 + payload.len()];
            header.emit(&mut bytes).unwrap().copy_from_slice(payload);
            bytes
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut header = Ipv6Header::new(source, destination, protocol, payload.len()).unwrap();
            header.traffic_class = class;
            let mut bytes = vec![0; 40 + payload.len()];
            header.emit(&mut bytes).unwrap().copy_from_slice(payload);
            bytes
        }
        _ => panic!("addresses of two families"),
    }
}

/// ICMP host unreachable error about the packet `quote`.
pub fn host_unreachable(from: IpAddr, to: IpAddr, quote: &[u8]) -> Vec<u8> {
    match from {
        IpAddr::V4(_) => {
            let message = Icmpv4Message::DestinationUnreachable { code: 1, next_hop_mtu: 0, quote };
            icmpv4(from, to, &message)
        }
        IpAddr::V6(_) => {
            icmpv6(from, to, &Icmpv6Message::DestinationUnreachable { code: 3, quote })
        }
    }
}

/// ICMP error of a router whose policy forbids to reach the host, about the packet `quote`.
pub fn host_prohibited(from: IpAddr, to: IpAddr, quote: &[u8]) -> Vec<u8> {
    match from {
        IpAddr::V4(_) => {
            let message =
                Icmpv4Message::DestinationUnreachable { code: 13, next_hop_mtu: 0, quote };
            icmpv4(from, to, &message)
        }
        IpAddr::V6(_) => {
            icmpv6(from, to, &Icmpv6Message::DestinationUnreachable { code: 1, quote })
        }
    }
}

pub fn pseudo(source: IpAddr, destination: IpAddr, bytes: usize) -> tidegate_wire::Sum {
    transport_pseudo(Protocol::UDP, source, destination, bytes)
}

pub fn transport_pseudo(
    protocol: Protocol,
    source: IpAddr,
    destination: IpAddr,
    bytes: usize,
) -> tidegate_wire::Sum {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            checksum::pseudo_header_v4(source, destination, protocol, bytes as u16)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            checksum::pseudo_header_v6(source, destination, protocol, bytes as u32)
        }
        _ => panic!("addresses of two families"),
    }
}

/// IP packet with a UDP datagram.
pub fn udp_packet(from: IpAddr, to: IpAddr, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    ip(from, to, Protocol::UDP, &udp(from, to, ports, payload))
}

/// Frame with a UDP datagram from host 2 to host 1.
pub fn udp_frame(family: Family, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    frame(&udp_packet(family.host(2), family.host(1), ports, payload))
}

pub fn icmpv4(from: IpAddr, to: IpAddr, message: &Icmpv4Message<'_>) -> Vec<u8> {
    let mut payload = vec![0; message.message_bytes()];
    message.emit(&mut payload).unwrap();
    ip(from, to, Protocol::ICMPV4, &payload)
}

pub fn icmpv6(from: IpAddr, to: IpAddr, message: &Icmpv6Message<'_>) -> Vec<u8> {
    icmpv6_with_hops(from, to, 64, message)
}

pub fn icmpv6_with_hops(
    from: IpAddr,
    to: IpAddr,
    hops: u8,
    message: &Icmpv6Message<'_>,
) -> Vec<u8> {
    let (IpAddr::V6(source), IpAddr::V6(destination)) = (from, to) else {
        panic!("ICMPv6 goes between IPv6 addresses");
    };
    let mut payload = vec![0; message.message_bytes()];
    message.emit(source, destination, &mut payload).unwrap();
    ip_with_hops(from, to, Protocol::ICMPV6, hops, &payload)
}

/// Frame with a neighbour discovery message for host 1.
pub fn ndp_frame(from: IpAddr, to: IpAddr, message: NdpMessage<'_>) -> Vec<u8> {
    frame(&icmpv6_with_hops(from, to, 255, &Icmpv6Message::Ndp(message)))
}

/// Echo request of either family.
pub fn echo_request(from: IpAddr, to: IpAddr, data: &[u8]) -> Vec<u8> {
    match from {
        IpAddr::V4(_) => {
            icmpv4(from, to, &Icmpv4Message::EchoRequest { identifier: 7, sequence: 9, data })
        }
        IpAddr::V6(_) => {
            icmpv6(from, to, &Icmpv6Message::EchoRequest { identifier: 7, sequence: 9, data })
        }
    }
}

/// Data of an echo reply with the identifier and sequence number of [`echo_request`].
pub fn echo_reply_data(packet: &[u8]) -> Option<Vec<u8>> {
    match packet[0] >> 4 {
        4 => match Icmpv4Message::parse(Ipv4Header::parse(packet).ok()?.1).ok()? {
            Icmpv4Message::EchoReply { identifier: 7, sequence: 9, data } => Some(data.to_vec()),
            _ => None,
        },
        _ => {
            let (header, payload) = Ipv6Header::parse(packet).ok()?;
            match Icmpv6Message::parse(&header, payload).ok()? {
                Icmpv6Message::EchoReply { identifier: 7, sequence: 9, data } => {
                    Some(data.to_vec())
                }
                _ => None,
            }
        }
    }
}

/// ICMP port unreachable error about the packet `quote`.
pub fn port_unreachable(from: IpAddr, to: IpAddr, quote: &[u8]) -> Vec<u8> {
    match from {
        IpAddr::V4(_) => {
            let message = Icmpv4Message::DestinationUnreachable { code: 3, next_hop_mtu: 0, quote };
            icmpv4(from, to, &message)
        }
        IpAddr::V6(_) => {
            icmpv6(from, to, &Icmpv6Message::DestinationUnreachable { code: 4, quote })
        }
    }
}

/// ICMP time exceeded error, in transit, about the packet `quote`.
pub fn time_exceeded(from: IpAddr, to: IpAddr, quote: &[u8]) -> Vec<u8> {
    match from {
        IpAddr::V4(_) => icmpv4(from, to, &Icmpv4Message::TimeExceeded { code: 0, quote }),
        IpAddr::V6(_) => icmpv6(from, to, &Icmpv6Message::TimeExceeded { code: 0, quote }),
    }
}

/// ICMP packet too big error with `mtu` about the packet `quote`.
pub fn packet_too_big(from: IpAddr, to: IpAddr, mtu: u16, quote: &[u8]) -> Vec<u8> {
    match from {
        IpAddr::V4(_) => {
            let message =
                Icmpv4Message::DestinationUnreachable { code: 4, next_hop_mtu: mtu, quote };
            icmpv4(from, to, &message)
        }
        IpAddr::V6(_) => icmpv6(from, to, &Icmpv6Message::PacketTooBig { mtu: mtu.into(), quote }),
    }
}

/// Fragment of the payload of a UDP packet.
pub fn fragment(
    from: IpAddr,
    to: IpAddr,
    id: u32,
    offset_bytes: usize,
    more: bool,
    data: &[u8],
) -> Vec<u8> {
    fragment_with_protocol(Protocol::UDP, from, to, id, offset_bytes, more, data)
}

pub fn fragment_with_protocol(
    protocol: Protocol,
    from: IpAddr,
    to: IpAddr,
    id: u32,
    offset_bytes: usize,
    more_fragments: bool,
    data: &[u8],
) -> Vec<u8> {
    match (from, to) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut header = Ipv4Header::new(source, destination, protocol, data.len()).unwrap();
            header.identification = id as u16;
            header.dont_fragment = false;
            header.more_fragments = more_fragments;
            header.fragment_offset_bytes = offset_bytes as u16;
            let mut bytes = vec![0; 20 + data.len()];
            header.emit(&mut bytes).unwrap().copy_from_slice(data);
            bytes
        }
        _ => {
            let header = FragmentHeader {
                offset_bytes: offset_bytes as u16,
                more_fragments,
                identification: id,
            };
            let mut payload = vec![0; 8 + data.len()];
            header.emit(protocol, &mut payload).unwrap().copy_from_slice(data);
            ip(from, to, Protocol::FRAGMENT, &payload)
        }
    }
}

/// Frame with an ARP packet.
pub fn arp_frame(to: MacAddr, packet: ArpPacket) -> Vec<u8> {
    let mut payload = vec![0; ArpPacket::BYTES];
    assert!(packet.emit(&mut payload).is_some());
    ethernet(to, packet.sender_mac, EtherType::ARP, &payload)
}

/// ARP packet from host `n` about host `target`.
pub fn arp(operation: ArpOperation, n: u8, target: u8) -> ArpPacket {
    let v4 = |n| match Family::V4.host(n) {
        IpAddr::V4(address) => address,
        IpAddr::V6(_) => unreachable!("an IPv4 host has an IPv4 address"),
    };
    ArpPacket {
        operation,
        sender_mac: mac(n),
        sender_ip: v4(n),
        target_mac: if operation == ArpOperation::Reply { mac(target) } else { MacAddr::default() },
        target_ip: v4(target),
    }
}

/// IP packet in a frame.
pub fn packet_of(frame: &[u8]) -> &[u8] {
    EthernetHeader::parse(frame).unwrap().1
}
