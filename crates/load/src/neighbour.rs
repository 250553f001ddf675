//! Minimal ARP and NDP for a load generator: resolves the target's hardware address and answers
//! for the generator's own addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::template::{Addressing, fold, sum};

/// Result of a frame that concerns neighbour discovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NeighbourEvent {
    /// The awaited neighbour has this hardware address.
    Resolved([u8; 6]),
    /// A neighbour requested one of the generator's addresses: send this frame.
    Reply(Vec<u8>),
}

const BROADCAST: [u8; 6] = [0xff; 6];
const ARP_REQUEST: u8 = 1;
const ARP_REPLY: u8 = 2;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Offset of the ICMPv6 message behind Ethernet and IPv6 headers.
const ICMPV6_OFFSET: usize = 14 + 40;

/// Builds the frame that requests the hardware address of `target` (ARP or NDP).
pub fn request(source_mac: [u8; 6], source: IpAddr, target: IpAddr) -> Vec<u8> {
    match (source, target) {
        (IpAddr::V4(source), IpAddr::V4(target)) => {
            build_arp(BROADCAST, ARP_REQUEST, (source_mac, source), ([0; 6], target))
        }
        (source, target) => {
            let (source, target) = (to_v6(source), to_v6(target));
            // To the solicited-node group of the target (RFC 4861, section 7.2.2).
            let octets = target.octets();
            let group = Ipv6Addr::new(
                0xff02,
                0,
                0,
                0,
                0,
                1,
                0xff00 | u16::from(octets[13]),
                low_word(&octets),
            );
            let group_mac = [0x33, 0x33, 0xff, octets[13], octets[14], octets[15]];
            let message = NdpMessage { message_type: NEIGHBOUR_SOLICITATION, flags: 0, target };
            build_ndp(group_mac, source_mac, source, group, &message)
        }
    }
}

/// Parses a frame that is not a response to the load. `wanted_address` is the address being
/// resolved. Returns `None` for frames that do not concern neighbour discovery.
pub fn parse(
    frame: &[u8],
    addressing: &Addressing,
    wanted_address: IpAddr,
) -> Option<NeighbourEvent> {
    match frame.get(12..14)? {
        [0x08, 0x06] => parse_arp(frame, addressing, wanted_address),
        [0x86, 0xdd] => parse_ndp(frame, addressing, wanted_address),
        _ => None,
    }
}

fn parse_arp(
    frame: &[u8],
    addressing: &Addressing,
    wanted_address: IpAddr,
) -> Option<NeighbourEvent> {
    let packet = frame.get(14..42)?;
    // Ethernet, IPv4, address lengths 6 and 4 (RFC 826).
    if packet[..6] != [0, 1, 8, 0, 6, 4] {
        return None;
    }
    let sender_mac: [u8; 6] = packet[8..14].try_into().ok()?;
    let sender = Ipv4Addr::from(<[u8; 4]>::try_from(&packet[14..18]).ok()?);
    let target = Ipv4Addr::from(<[u8; 4]>::try_from(&packet[24..28]).ok()?);
    if packet[7] == ARP_REQUEST && addressing.source_index(target.into()).is_some() {
        let own = (addressing.source_mac, target);
        return Some(NeighbourEvent::Reply(build_arp(
            sender_mac,
            ARP_REPLY,
            own,
            (sender_mac, sender),
        )));
    }
    (packet[7] == ARP_REPLY && wanted_address == IpAddr::V4(sender))
        .then_some(NeighbourEvent::Resolved(sender_mac))
}

fn parse_ndp(
    frame: &[u8],
    addressing: &Addressing,
    wanted_address: IpAddr,
) -> Option<NeighbourEvent> {
    let message = frame.get(ICMPV6_OFFSET..ICMPV6_OFFSET + 24)?;
    // ICMPv6, hop limit 255, code 0 (RFC 4861, section 7.1).
    if frame[20] != 58 || frame[21] != 255 || message[1] != 0 {
        return None;
    }
    let target = Ipv6Addr::from(<[u8; 16]>::try_from(&message[8..24]).ok()?);
    let sender_mac: [u8; 6] = frame[6..12].try_into().ok()?;
    match message[0] {
        NEIGHBOUR_SOLICITATION => {
            addressing.source_index(target.into())?;
            let sender = Ipv6Addr::from(<[u8; 16]>::try_from(&frame[22..38]).ok()?);
            // Flags Solicited and Override (RFC 4861, section 4.4).
            let message = NdpMessage { message_type: NEIGHBOUR_ADVERTISEMENT, flags: 0x60, target };
            Some(NeighbourEvent::Reply(build_ndp(
                sender_mac,
                addressing.source_mac,
                target,
                sender,
                &message,
            )))
        }
        NEIGHBOUR_ADVERTISEMENT if wanted_address == IpAddr::V6(target) => {
            // Target link-layer address option, if present.
            let option = frame
                .get(ICMPV6_OFFSET + 24..ICMPV6_OFFSET + 32)
                .filter(|option| option[..2] == [2, 1]);
            let mac = option.and_then(|option| option[2..8].try_into().ok());
            Some(NeighbourEvent::Resolved(mac.unwrap_or(sender_mac)))
        }
        _ => None,
    }
}

fn build_arp(
    destination_mac: [u8; 6],
    operation: u8,
    sender: ([u8; 6], Ipv4Addr),
    target: ([u8; 6], Ipv4Addr),
) -> Vec<u8> {
    let mut frame = Vec::with_capacity(42);
    frame.extend(destination_mac);
    frame.extend(sender.0);
    frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, operation]);
    frame.extend(sender.0);
    frame.extend(sender.1.octets());
    frame.extend(target.0);
    frame.extend(target.1.octets());
    frame
}

struct NdpMessage {
    message_type: u8,
    flags: u8,
    target: Ipv6Addr,
}

fn build_ndp(
    destination_mac: [u8; 6],
    source_mac: [u8; 6],
    source: Ipv6Addr,
    destination: Ipv6Addr,
    message: &NdpMessage,
) -> Vec<u8> {
    let mut frame = Vec::with_capacity(ICMPV6_OFFSET + 32);
    frame.extend(destination_mac);
    frame.extend(source_mac);
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 32, 58, 255]);
    frame.extend(source.octets());
    frame.extend(destination.octets());
    frame.extend([message.message_type, 0, 0, 0, message.flags, 0, 0, 0]);
    frame.extend(message.target.octets());
    // Source link-layer address option in a solicitation, target's in an advertisement.
    let option = if message.message_type == NEIGHBOUR_SOLICITATION { 1 } else { 2 };
    frame.extend([option, 1]);
    frame.extend(source_mac);
    let pseudo_header = sum(&frame[22..54]) + 32 + 58;
    let checksum = !fold(pseudo_header + sum(&frame[ICMPV6_OFFSET..]));
    frame[ICMPV6_OFFSET + 2..ICMPV6_OFFSET + 4].copy_from_slice(&checksum.to_be_bytes());
    frame
}

fn to_v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

fn low_word(octets: &[u8; 16]) -> u16 {
    u16::from_be_bytes([octets[14], octets[15]])
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC_A: [u8; 6] = [2, 0, 0, 0, 0, 0xa];
    const MAC_B: [u8; 6] = [2, 0, 0, 0, 0, 0xb];

    fn addressing(mac: [u8; 6], source: &str) -> Addressing {
        let source: IpAddr = source.parse().unwrap();
        Addressing {
            source_mac: mac,
            target_mac: [0; 6],
            source,
            source_count: 2,
            first_port: 1,
            port_count: 1,
            target: (source, 53).into(),
        }
    }

    #[test]
    fn answers_requests_and_parses_replies() {
        for (a, b) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::abcd:ef12")] {
            let (a, b): (IpAddr, IpAddr) = (a.parse().unwrap(), b.parse().unwrap());
            let ours = addressing(MAC_A, &a.to_string());
            let theirs = addressing(MAC_B, &b.to_string());
            let request_frame = request(MAC_A, a, b);
            let Some(NeighbourEvent::Reply(reply)) = parse(&request_frame, &theirs, a) else {
                panic!("no reply for {b}")
            };
            assert_eq!(reply[..6], MAC_A, "sent to the requester");
            assert_eq!(parse(&reply, &ours, b), Some(NeighbourEvent::Resolved(MAC_B)));
            // A request for a foreign address gets no reply.
            let other = request(MAC_A, a, theirs.source_at(2));
            assert_eq!(parse(&other, &theirs, a), None);
            // Truncated frames cause no panic.
            for length in 0..request_frame.len() {
                let _ = parse(&request_frame[..length], &theirs, a);
            }
        }
    }

    #[test]
    fn ndp_messages_have_valid_checksums() {
        let frame = request(MAC_A, "fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
        let total = sum(&frame[22..54]) + 32 + 58 + sum(&frame[ICMPV6_OFFSET..]);
        assert_eq!(fold(total), 0xffff);
        assert_eq!(frame[..6], [0x33, 0x33, 0xff, 0, 0, 2]);
    }

    #[test]
    fn ignores_ndp_messages_with_hop_limit_below_255() {
        let mut frame = request(MAC_A, "fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
        let theirs = addressing(MAC_B, "fd00::2");
        frame[21] = 254;
        assert_eq!(parse(&frame, &theirs, "fd00::1".parse().unwrap()), None);
    }
}
