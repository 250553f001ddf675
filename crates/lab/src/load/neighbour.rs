//! Just enough neighbour discovery for a load generator: finds the target's
//! hardware address and answers for the generator's own addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::template::{Addressing, fold, sum};

/// What a frame that is not an answer means to the generator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The neighbour that we look for has this hardware address.
    Found([u8; 6]),
    /// Somebody asked for an address of ours: send this frame.
    Reply(Vec<u8>),
}

const BROADCAST: [u8; 6] = [0xff; 6];
const ARP_REQUEST: u8 = 1;
const ARP_REPLY: u8 = 2;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Where the ICMPv6 message begins behind Ethernet and IPv6 headers.
const ICMP: usize = 14 + 40;

/// The frame that asks for the hardware address of `target`.
pub fn request(source_mac: [u8; 6], source: IpAddr, target: IpAddr) -> Vec<u8> {
    match (source, target) {
        (IpAddr::V4(source), IpAddr::V4(target)) => {
            arp(BROADCAST, ARP_REQUEST, (source_mac, source), ([0; 6], target))
        }
        (source, target) => {
            let (source, target) = (to_v6(source), to_v6(target));
            // RFC 4861, 7.2.2: to the solicited-node group of the target.
            let last = target.octets();
            let group =
                Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(last[13]), low(&last));
            let group_mac = [0x33, 0x33, 0xff, last[13], last[14], last[15]];
            let message = Discovery { kind: NEIGHBOUR_SOLICITATION, flags: 0, target };
            ndp(group_mac, source_mac, source, group, &message)
        }
    }
}

/// Looks at a frame that is not an answer to the load. `looking_for` is the
/// address that we asked for.
pub fn read(frame: &[u8], addressing: &Addressing, looking_for: IpAddr) -> Option<Event> {
    match frame.get(12..14)? {
        [0x08, 0x06] => read_arp(frame, addressing, looking_for),
        [0x86, 0xdd] => read_ndp(frame, addressing, looking_for),
        _ => None,
    }
}

fn read_arp(frame: &[u8], addressing: &Addressing, looking_for: IpAddr) -> Option<Event> {
    let packet = frame.get(14..42)?;
    // Ethernet, IPv4, 6 and 4 bytes (RFC 826).
    if packet[..6] != [0, 1, 8, 0, 6, 4] {
        return None;
    }
    let sender_mac: [u8; 6] = packet[8..14].try_into().ok()?;
    let sender = Ipv4Addr::from(<[u8; 4]>::try_from(&packet[14..18]).ok()?);
    let target = Ipv4Addr::from(<[u8; 4]>::try_from(&packet[24..28]).ok()?);
    if packet[7] == ARP_REQUEST && addressing.source_index(target.into()).is_some() {
        let own = (addressing.source_mac, target);
        return Some(Event::Reply(arp(sender_mac, ARP_REPLY, own, (sender_mac, sender))));
    }
    (packet[7] == ARP_REPLY && looking_for == IpAddr::V4(sender))
        .then_some(Event::Found(sender_mac))
}

fn read_ndp(frame: &[u8], addressing: &Addressing, looking_for: IpAddr) -> Option<Event> {
    let message = frame.get(ICMP..ICMP + 24)?;
    // RFC 4861, 7.1: ICMPv6, hop limit 255, code 0.
    if frame[20] != 58 || frame[21] != 255 || message[1] != 0 {
        return None;
    }
    let target = Ipv6Addr::from(<[u8; 16]>::try_from(&message[8..24]).ok()?);
    let sender_mac: [u8; 6] = frame[6..12].try_into().ok()?;
    match message[0] {
        NEIGHBOUR_SOLICITATION => {
            addressing.source_index(target.into())?;
            let sender = Ipv6Addr::from(<[u8; 16]>::try_from(&frame[22..38]).ok()?);
            // Solicited, override (RFC 4861, 4.4).
            let message = Discovery { kind: NEIGHBOUR_ADVERTISEMENT, flags: 0x60, target };
            Some(Event::Reply(ndp(sender_mac, addressing.source_mac, target, sender, &message)))
        }
        NEIGHBOUR_ADVERTISEMENT if looking_for == IpAddr::V6(target) => {
            // The target link-layer address option, if it is there.
            let option = frame.get(ICMP + 24..ICMP + 32).filter(|option| option[..2] == [2, 1]);
            let mac = option.and_then(|option| option[2..8].try_into().ok());
            Some(Event::Found(mac.unwrap_or(sender_mac)))
        }
        _ => None,
    }
}

fn arp(
    to: [u8; 6],
    operation: u8,
    sender: ([u8; 6], Ipv4Addr),
    target: ([u8; 6], Ipv4Addr),
) -> Vec<u8> {
    let mut frame = Vec::with_capacity(42);
    frame.extend(to);
    frame.extend(sender.0);
    frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, operation]);
    frame.extend(sender.0);
    frame.extend(sender.1.octets());
    frame.extend(target.0);
    frame.extend(target.1.octets());
    frame
}

struct Discovery {
    kind: u8,
    flags: u8,
    target: Ipv6Addr,
}

fn ndp(
    to: [u8; 6],
    source_mac: [u8; 6],
    source: Ipv6Addr,
    destination: Ipv6Addr,
    message: &Discovery,
) -> Vec<u8> {
    let mut frame = Vec::with_capacity(ICMP + 32);
    frame.extend(to);
    frame.extend(source_mac);
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 32, 58, 255]);
    frame.extend(source.octets());
    frame.extend(destination.octets());
    frame.extend([message.kind, 0, 0, 0, message.flags, 0, 0, 0]);
    frame.extend(message.target.octets());
    // Source link-layer address in a solicitation, target's in an answer.
    let option = if message.kind == NEIGHBOUR_SOLICITATION { 1 } else { 2 };
    frame.extend([option, 1]);
    frame.extend(source_mac);
    let pseudo_header = sum(&frame[22..54]) + 32 + 58;
    let checksum = !fold(pseudo_header + sum(&frame[ICMP..]));
    frame[ICMP + 2..ICMP + 4].copy_from_slice(&checksum.to_be_bytes());
    frame
}

fn to_v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

fn low(octets: &[u8; 16]) -> u16 {
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
            sources: 2,
            first_port: 1,
            ports: 1,
            target: (source, 53).into(),
        }
    }

    #[test]
    fn a_request_is_answered_and_the_answer_understood() {
        for (a, b) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::abcd:ef12")] {
            let (a, b): (IpAddr, IpAddr) = (a.parse().unwrap(), b.parse().unwrap());
            let ours = addressing(MAC_A, &a.to_string());
            let theirs = addressing(MAC_B, &b.to_string());
            let asked = request(MAC_A, a, b);
            let Some(Event::Reply(reply)) = read(&asked, &theirs, a) else {
                panic!("no reply for {b}")
            };
            assert_eq!(reply[..6], MAC_A, "to who asked");
            assert_eq!(read(&reply, &ours, b), Some(Event::Found(MAC_B)));
            // An address that is not theirs is left alone.
            let other = request(MAC_A, a, theirs.source_at(2));
            assert_eq!(read(&other, &theirs, a), None);
            // Cut anywhere, nothing panics and nothing is made up.
            for length in 0..asked.len() {
                let _ = read(&asked[..length], &theirs, a);
            }
        }
    }

    #[test]
    fn discovery_messages_have_right_checksums() {
        let frame = request(MAC_A, "fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
        let total = sum(&frame[22..54]) + 32 + 58 + sum(&frame[ICMP..]);
        assert_eq!(fold(total), 0xffff);
        assert_eq!(frame[..6], [0x33, 0x33, 0xff, 0, 0, 2]);
    }

    #[test]
    fn a_message_from_another_link_is_ignored() {
        let mut frame = request(MAC_A, "fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
        let theirs = addressing(MAC_B, "fd00::2");
        frame[21] = 254;
        assert_eq!(read(&frame, &theirs, "fd00::1".parse().unwrap()), None);
    }
}
