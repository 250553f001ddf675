//! Raw frames to send, and matchers for received frames.

use std::net::IpAddr;

use tidegate_device::xdp::SteeringCounters;

const UDP: u8 = 17;
const TCP: u8 = 6;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const HOP_BY_HOP: u8 = 0;
const FRAGMENT: u8 = 44;
const NO_NEXT: u8 = 59;
const DESTINATION: u8 = 60;

const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const VLAN: u16 = 0x8100;
const IPV6: u16 = 0x86dd;

/// Turns a UDP frame into its own reply: swaps addresses and ports. Checksums stay valid, since
/// sums do not depend on the order.
pub fn reflect(frame: &mut [u8]) {
    let (destination, source) = frame.split_at_mut(6);
    destination.swap_with_slice(&mut source[..6]);
    let (first, len) = if frame[12..14] == IPV4.to_be_bytes() { (26, 4) } else { (22, 16) };
    let (source, destination) = frame[first..].split_at_mut(len);
    source.swap_with_slice(&mut destination[..len]);
    let (source, destination) = frame[first + 2 * len..].split_at_mut(2);
    source.swap_with_slice(&mut destination[..2]);
}

/// True for an ARP request or a neighbour solicitation for this address.
pub fn is_resolution_request_for(frame: &[u8], address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            frame[12..14] == ARP.to_be_bytes() && frame[38..42] == address.octets()
        }
        IpAddr::V6(address) => {
            frame[12..14] == IPV6.to_be_bytes()
                && (frame[20], frame.get(54)) == (ICMPV6, Some(&135))
                && frame[62..78] == address.octets()
        }
    }
}

/// True for a fragment, if the frame has no VLAN tag and no options.
pub fn is_fragment(frame: &[u8]) -> bool {
    match frame[12..14] == IPV4.to_be_bytes() {
        true => u16::from_be_bytes([frame[20], frame[21]]) & 0x3fff != 0,
        false => frame[12..14] == IPV6.to_be_bytes() && frame[20] == FRAGMENT,
    }
}

/// Payload bytes of a fragment.
pub fn fragment_bytes(frame: &[u8]) -> usize {
    match frame[12..14] == IPV4.to_be_bytes() {
        true => usize::from(u16::from_be_bytes([frame[16], frame[17]])) - 20,
        false => usize::from(u16::from_be_bytes([frame[18], frame[19]])) - 8,
    }
}

/// UDP datagram to this address and port, with or without a VLAN tag.
pub fn datagram(address: &str, port: u16, tag: Option<u16>) -> Vec<u8> {
    let payload = ip(address, UDP, &ports(port));
    match tag {
        None => ethernet(ethertype_of(address), &payload),
        Some(tag) => ethernet(VLAN, &tagged(tag, ethertype_of(address), &payload)),
    }
}

/// TCP segment to this address and port.
pub fn segment(address: &str, port: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
    const ACK: u8 = 0x10;
    let ports = [9999_u16.to_be_bytes(), port.to_be_bytes()].concat();
    let rest = [5 << 4, ACK, 1, 0, 0, 0, 0, 0];
    let segment = [&ports[..], &sequence.to_be_bytes(), &[0; 4], &rest, payload].concat();
    ethernet(ethertype_of(address), &ip(address, TCP, &segment))
}

fn ethertype_of(address: &str) -> u16 {
    if address.contains(':') { IPV6 } else { IPV4 }
}

/// Frame with a destination address that no host on the link has. The steering program ignores
/// that address, and the kernel does not answer a frame passed to it.
fn ethernet(ethertype: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 0x77, 2, 0, 0, 0, 0, 0x78];
    frame.extend(ethertype.to_be_bytes());
    frame.extend(payload);
    frame
}

fn tagged(tag: u16, ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&tag.to_be_bytes(), &ethertype.to_be_bytes(), payload].concat()
}

/// The first bytes of a UDP or TCP header, and some payload.
fn ports(destination: u16) -> Vec<u8> {
    [&9999_u16.to_be_bytes()[..], &destination.to_be_bytes(), &[0; 20]].concat()
}

fn ip(address: &str, protocol: u8, payload: &[u8]) -> Vec<u8> {
    match address.parse().unwrap() {
        IpAddr::V4(_) => ipv4(address, protocol, 0, 0, payload),
        IpAddr::V6(_) => ipv6(address, protocol, payload),
    }
}

fn ipv4(address: &str, protocol: u8, fragment: u16, options: usize, payload: &[u8]) -> Vec<u8> {
    let IpAddr::V4(address) = address.parse().unwrap() else { panic!("{address}") };
    let len = (20 + options + payload.len()) as u16;
    let mut packet = vec![0x45 + (options / 4) as u8, 0];
    packet.extend(len.to_be_bytes());
    packet.extend([0, 1]);
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, protocol, 0, 0, 192, 0, 2, 1]);
    packet.extend(address.octets());
    packet.extend(vec![1; options]);
    packet.extend(payload);
    packet
}

fn ipv6(address: &str, next: u8, payload: &[u8]) -> Vec<u8> {
    let IpAddr::V6(address) = address.parse().unwrap() else { panic!("{address}") };
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((payload.len() as u16).to_be_bytes());
    packet.extend([next, 255]);
    packet.extend([0xfd, 0x78, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    packet.extend(address.octets());
    packet.extend(payload);
    packet
}

/// An IPv6 extension header of `8 + 8 * more` bytes.
fn extension(next: u8, more: u8, payload: &[u8]) -> Vec<u8> {
    let mut header = vec![next, more];
    header.resize(8 + 8 * usize::from(more), 0);
    header.extend(payload);
    header
}

fn arp(operation: u16, sender: &str, target: &str) -> Vec<u8> {
    let octets = |address: &str| match address.parse().unwrap() {
        IpAddr::V4(address) => address.octets(),
        IpAddr::V6(address) => panic!("{address}"),
    };
    let mut packet = vec![0, 1, 8, 0, 6, 4];
    packet.extend(operation.to_be_bytes());
    packet.extend([2, 0, 0, 0, 0, 0x78]);
    packet.extend(octets(sender));
    packet.extend([0; 6]);
    packet.extend(octets(target));
    packet
}

fn neighbour(kind: u8, group: &str, target: &str) -> Vec<u8> {
    let IpAddr::V6(target) = target.parse().unwrap() else { panic!("{target}") };
    let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    message.extend(target.octets());
    ipv6(group, ICMPV6, &message)
}

/// Frame and its expected treatment by the steering program.
pub struct SteeringCase {
    pub name: &'static str,
    pub frame: Vec<u8>,
    pub taken: bool,
    pub counter: fn(&SteeringCounters) -> u64,
}

/// Test frames for a device with these rules: UDP port 53 of any address, TCP port 853 of the
/// addresses `shared`, and all traffic of the addresses `own`.
pub fn steering_cases(shared: [&str; 2], own: [&str; 2]) -> Vec<SteeringCase> {
    let mut cases = Vec::new();
    let mut case = |name, frame, counter: fn(&SteeringCounters) -> u64, taken| {
        cases.push(SteeringCase { name, frame, taken, counter });
    };
    let take: fn(&SteeringCounters) -> u64 = |counters| counters.redirected;
    let not_steered: fn(&SteeringCounters) -> u64 = |counters| counters.passed_not_steered;
    let other_protocol: fn(&SteeringCounters) -> u64 = |counters| counters.passed_other_protocol;
    let other_vlan: fn(&SteeringCounters) -> u64 = |counters| counters.passed_other_vlan;
    let fragment: fn(&SteeringCounters) -> u64 = |counters| counters.passed_fragment;
    let extensions: fn(&SteeringCounters) -> u64 = |counters| counters.passed_extension;
    let malformed: fn(&SteeringCounters) -> u64 = |counters| counters.passed_malformed;

    for (shared, own) in shared.into_iter().zip(own) {
        let ethertype = ethertype_of(shared);
        let frame = |packet: Vec<u8>| ethernet(ethertype, &packet);
        case("the UDP port", datagram(shared, 53, None), take, true);
        case("another UDP port", datagram(shared, 54, None), not_steered, false);
        case("the UDP port number on TCP", frame(ip(shared, TCP, &ports(53))), not_steered, false);
        case("the address's TCP port", frame(ip(shared, TCP, &ports(853))), take, true);
        let other = if ethertype == IPV4 { "10.77.0.9" } else { "fd77::9" };
        case("the TCP port elsewhere", frame(ip(other, TCP, &ports(853))), not_steered, false);
        case("the UDP port elsewhere", datagram(other, 53, None), take, true);
        case("another protocol", frame(ip(shared, 132, &ports(53))), other_protocol, false);
        case("a cut UDP header", frame(ip(shared, UDP, &[0, 1, 0])), malformed, false);
        case("a priority tag", datagram(shared, 53, Some(0xe000)), take, true);
        case("a VLAN", datagram(shared, 53, Some(5)), other_vlan, false);
        let two_tags = tagged(0, VLAN, &tagged(0, ethertype, &ip(shared, UDP, &ports(53))));
        case("two tags", ethernet(VLAN, &two_tags), other_protocol, false);
        case("an own address", frame(ip(own, 132, &[1; 30])), take, true);
        case("an own address's port", datagram(own, 54, None), take, true);
        let wrong = if ethertype == IPV4 { IPV6 } else { IPV4 };
        let packet = ip(shared, UDP, &ports(53));
        case("the wrong version", ethernet(wrong, &packet), malformed, false);
        case("a cut IP header", frame(packet[..19].to_vec()), malformed, false);
    }

    let v4 = |fragment, options, payload: &[u8]| {
        ethernet(IPV4, &ipv4(shared[0], UDP, fragment, options, payload))
    };
    case("IPv4 options", v4(0, 12, &ports(53)), take, true);
    case("maximum IPv4 options", v4(0, 40, &ports(53)), take, true);
    case("IPv4 options cut short", v4(0, 40, &[])[..50].to_vec(), malformed, false);
    case("do not fragment", v4(0x4000, 0, &ports(53)), take, true);
    case("a first fragment", v4(0x2000, 0, &ports(53)), fragment, false);
    case("a later fragment", v4(0x0010, 0, &ports(53)), fragment, false);
    let own_fragment = ipv4(own[0], UDP, 0x0010, 0, &[1; 30]);
    case("a fragment for an own address", ethernet(IPV4, &own_fragment), take, true);
    let mut short = ipv4(shared[0], UDP, 0, 0, &ports(53));
    short[0] = 0x44;
    case("an impossible IPv4 header length", ethernet(IPV4, &short), malformed, false);
    case("ICMP", ethernet(IPV4, &ipv4(shared[0], ICMP, 0, 0, &[8; 30])), other_protocol, false);

    let other_host = "10.77.0.9";
    case("ARP for an own address", ethernet(ARP, &arp(1, other_host, own[0])), take, true);
    case(
        "ARP for another address",
        ethernet(ARP, &arp(1, other_host, shared[0])),
        not_steered,
        false,
    );
    case("an ARP reply to an own address", ethernet(ARP, &arp(2, other_host, own[0])), take, true);
    case("a gratuitous ARP for an own address", ethernet(ARP, &arp(2, own[0], own[0])), take, true);
    case("ARP cut short", ethernet(ARP, &arp(1, other_host, own[0])[..27]), malformed, false);
    let mut ring = arp(1, other_host, own[0]);
    ring[4] = 8;
    case("ARP for other hardware", ethernet(ARP, &ring), other_protocol, false);

    let v6 = |next, payload: &[u8]| ethernet(IPV6, &ipv6(shared[1], next, payload));
    let udp = ports(53);
    case("a hop-by-hop header", v6(HOP_BY_HOP, &extension(UDP, 0, &udp)), take, true);
    case("a long header", v6(DESTINATION, &extension(UDP, 100, &udp)), take, true);
    let nested = |depth: usize| {
        (1..depth).fold(extension(UDP, 0, &udp), |inner, _| extension(DESTINATION, 0, &inner))
    };
    case("several headers", v6(DESTINATION, &nested(5)), take, true);
    case("too many headers", v6(DESTINATION, &nested(6)), extensions, false);
    case("a header past the end", v6(DESTINATION, &[UDP, 9, 0, 0, 0, 0, 0, 0]), malformed, false);
    case("an IPv6 fragment", v6(FRAGMENT, &extension(UDP, 0, &udp)), fragment, false);
    let behind = extension(FRAGMENT, 0, &extension(UDP, 0, &udp));
    case("a fragment behind options", v6(DESTINATION, &behind), fragment, false);
    case("ICMPv6", v6(ICMPV6, &[128; 30]), other_protocol, false);

    let group = "ff02::1:ff00:3";
    let solicitation = |target| ethernet(IPV6, &neighbour(135, group, target));
    case("a solicitation for an own address", solicitation(own[1]), take, true);
    case("a solicitation for another address", solicitation("fd77::aa00:3"), not_steered, false);
    let claim = neighbour(136, "ff02::1", own[1]);
    case("an advertisement of an own address", ethernet(IPV6, &claim), take, true);
    let router = neighbour(134, "ff02::1", own[1]);
    case("a router advertisement", ethernet(IPV6, &router), not_steered, false);

    let all_nodes = |next, payload: &[u8]| ethernet(IPV6, &ipv6("ff02::1", next, payload));
    case(
        "an echo request to all nodes",
        all_nodes(ICMPV6, &[128, 0, 0, 0, 0, 1, 0, 1]),
        take,
        true,
    );
    let echo_reply = all_nodes(ICMPV6, &[129, 0, 0, 0, 0, 1, 0, 1]);
    case("an echo reply to all nodes", echo_reply, not_steered, false);
    let echo_of_others = ipv6("ff02::2", ICMPV6, &[128, 0, 0, 0, 0, 1, 0, 1]);
    case("an echo request to a group", ethernet(IPV6, &echo_of_others), not_steered, false);
    let unknown_option = extension(NO_NEXT, 0, &[]);
    case("options to all nodes", all_nodes(DESTINATION, &unknown_option), take, true);
    let echo_behind = extension(ICMPV6, 0, &[128, 0, 0, 0, 0, 1, 0, 1]);
    case("options before an echo request", all_nodes(HOP_BY_HOP, &echo_behind), take, true);
    let mld_query = extension(ICMPV6, 0, &[130; 24]);
    case("an MLD query", all_nodes(HOP_BY_HOP, &mld_query), other_protocol, false);
    case("a datagram to all nodes", datagram("ff02::1", 54, None), not_steered, false);

    case("another EtherType", ethernet(0x88cc, &[0; 30]), other_protocol, false);
    cases
}
