//! Netlink state and notifications, compared with the configuration that `ip` made.

mod sandbox;

use std::net::IpAddr;

use sandbox::{
    DEVICE_MAC, DEVICE_V4, DEVICE_V6, KERNEL_MAC, KERNEL_V4, KERNEL_V6, arena, enter_namespace,
    free_all, ip, receive_matching, transmit_all, veth, wait_for,
};
use tidegate_device::Medium;
use tidegate_device::netlink::{
    self, Change, Interface, Monitor, Neighbour, NeighbourState, NetlinkError, Route,
};
use tidegate_device::packet::{PacketConfig, PacketDevice};
use tidegate_wire::{
    ArpOperation, ArpPacket, EtherType, EthernetHeader, Icmpv6Message, IpCidr, Ipv6Header, MacAddr,
    NdpMessage, NeighbourAdvertisement, Protocol,
};

fn cidr(text: &str) -> IpCidr {
    text.parse().unwrap()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn reads_interface_properties() {
    if !enter_namespace() {
        return;
    }
    ip(
        "link add tg0 numrxqueues 3 numtxqueues 2 type veth peer name tg1 address 02:00:00:00:00:0b",
    );
    ip("link set tg1 mtu 1400");
    let near = Interface::by_name("tg0").unwrap();
    assert_eq!((near.receive_queues, near.transmit_queues), (3, 2));
    let far = Interface::by_name("tg1").unwrap();
    assert_eq!((far.mac, far.mtu), (MacAddr(KERNEL_MAC), 1400));
    assert_eq!((far.kind.as_deref(), far.medium), (Some("veth"), Some(Medium::Ethernet)));
    assert!(!far.up && !far.carrier && !far.loopback);
    ip("link set tg0 up");
    ip("link set tg1 up");
    let far = Interface::by_index(far.index).unwrap();
    assert!(far.up && far.carrier);
    assert!(Interface::by_name("lo").unwrap().loopback);
}

#[test]
fn unknown_name_error_lists_existing_interfaces() {
    if !enter_namespace() {
        return;
    }
    veth();
    let error = Interface::by_name("eth0").unwrap_err();
    let NetlinkError::NoSuchInterface { name, existing } = &error else { panic!("{error}") };
    assert_eq!(name, "eth0");
    assert!(["lo", "tg0", "tg1"].iter().all(|name| existing.iter().any(|e| e == name)));
    assert!(error.to_string().contains("tg1"), "{error}");
    assert!(matches!(Interface::by_index(999), Err(NetlinkError::NoSuchIndex { index: 999 })));
}

#[test]
fn reads_addresses_and_routes_of_one_interface() {
    if !enter_namespace() {
        return;
    }
    veth();
    ip("route add 198.51.100.0/24 via 10.9.0.7 dev tg1 metric 5");
    ip("route add 2001:db8::/32 via fd09::7 dev tg1 metric 5");
    ip("route add default via 10.9.0.8");
    ip("route add 203.0.113.0/24 nexthop via 10.9.0.5 dev tg1 nexthop via 10.9.0.6 dev tg1");
    ip("route add blackhole 192.0.2.0/24");
    let index = Interface::by_name("tg1").unwrap().index;
    let mut addresses = netlink::addresses(index).unwrap();
    addresses.sort();
    assert_eq!(addresses, [cidr("10.9.0.1/24"), cidr("fd09::1/64")]);
    assert!(netlink::addresses(Interface::by_name("tg0").unwrap().index).unwrap().is_empty());

    let routes = netlink::routes(index).unwrap();
    let to = |network: &str| -> Vec<&Route> {
        routes.iter().filter(|route| route.destination == cidr(network)).collect()
    };
    let on_link = to("10.9.0.0/24");
    assert_eq!(on_link[0].gateway, None);
    assert_eq!(on_link[0].source, Some(address(KERNEL_V4)));
    assert_eq!(to("198.51.100.0/24")[0].gateway, Some(address("10.9.0.7")));
    assert_eq!(to("198.51.100.0/24")[0].metric, 5);
    assert_eq!(to("2001:db8::/32")[0].gateway, Some(address("fd09::7")));
    assert_eq!(to("0.0.0.0/0")[0].gateway, Some(address("10.9.0.8")));
    let several: Vec<_> = to("203.0.113.0/24").iter().filter_map(|route| route.gateway).collect();
    assert_eq!(several, [address("10.9.0.5"), address("10.9.0.6")]);
    assert_eq!(to("fd09::/64")[0].gateway, None);
    assert!(to("192.0.2.0/24").is_empty(), "a blackhole leads nowhere");
    assert!(to("10.9.0.1/32").is_empty(), "the local table is not the main one");
}

#[test]
fn sets_addresses_link_state_and_mtu() {
    if !enter_namespace() {
        return;
    }
    ip("link add tg0 type veth peer name tg1");
    let index = Interface::by_name("tg0").unwrap().index;
    netlink::set_mtu(index, 1300).unwrap();
    netlink::set_up(index).unwrap();
    for text in ["192.0.2.9/28", "2001:db8::9/60"] {
        netlink::add_address(index, cidr(text)).unwrap();
        assert!(netlink::addresses(index).unwrap().contains(&cidr(text)));
    }
    let interface = Interface::by_index(index).unwrap();
    assert!(interface.up);
    assert_eq!(interface.mtu, 1300);
    assert!(netlink::set_up(999).is_err());
}

#[test]
fn lists_neighbours_with_their_state() {
    if !enter_namespace() {
        return;
    }
    veth();
    let index = Interface::by_name("tg1").unwrap().index;
    let all = netlink::neighbours(index).unwrap();
    for neighbour in [DEVICE_V4, DEVICE_V6] {
        assert!(all.contains(&Neighbour {
            address: address(neighbour),
            mac: Some(MacAddr(DEVICE_MAC)),
            state: NeighbourState::Permanent,
        }));
        let one = netlink::neighbour(index, address(neighbour)).unwrap();
        assert_eq!(one.map(|one| one.mac), Some(Some(MacAddr(DEVICE_MAC))));
    }
    for unknown in ["10.9.0.99", "fd09::99"] {
        assert!(netlink::neighbour(index, address(unknown)).is_err());
    }
}

#[test]
fn monitor_reports_every_kind_of_change() {
    if !enter_namespace() {
        return;
    }
    let mut monitor = Monitor::open().unwrap();
    assert_eq!(monitor.poll_change().unwrap(), None);
    veth();
    let index = Interface::by_name("tg1").unwrap().index;
    wait_for(&mut monitor, |change| match change {
        Change::Link(link) => (link.index == index && link.up).then_some(()),
        _ => None,
    });
    for (text, network) in [("192.0.2.1/24", "192.0.2.0/24"), ("2001:db8::1/64", "2001:db8::/64")] {
        ip(&format!("addr add {text} dev tg1"));
        let added = Change::Address(index, cidr(text));
        wait_for(&mut monitor, |change| (change == added).then_some(()));
        ip(&format!("addr del {text} dev tg1"));
        let removed = Change::AddressRemoved(index, cidr(text));
        wait_for(&mut monitor, |change| (change == removed).then_some(()));
        ip(&format!("route add {network} dev tg1"));
        wait_for(&mut monitor, |change| match change {
            Change::Route(at, route) => {
                (at == index && route.destination == cidr(network)).then_some(())
            }
            _ => None,
        });
        ip(&format!("route del {network} dev tg1"));
        wait_for(&mut monitor, |change| match change {
            Change::RouteRemoved(at, route) => {
                (at == index && route.destination == cidr(network)).then_some(())
            }
            _ => None,
        });
    }
    ip(&format!("neigh del {DEVICE_V4} dev tg1"));
    ip(&format!("neigh add {DEVICE_V4} lladdr 02:00:00:00:00:0c dev tg1"));
    wait_for(&mut monitor, |change| match change {
        Change::Neighbour(at, host) => {
            (at == index && host.mac == Some(MacAddr([2, 0, 0, 0, 0, 0xc]))).then_some(())
        }
        _ => None,
    });
    ip("link del tg1");
    wait_for(&mut monitor, |change| (change == Change::LinkRemoved(index)).then_some(()));
}

/// Hardware address in replies of [`answer`].
const NEIGHBOUR_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x77]);

/// Reply to an ARP request or neighbour solicitation of the kernel, as the target would send it.
fn resolution_reply(frame: &[u8]) -> Option<Vec<u8>> {
    let (ethernet, packet) = EthernetHeader::parse(frame).ok()?;
    let mut reply = vec![0; 14 + ArpPacket::BYTES];
    let mut reply_header = EthernetHeader {
        destination: ethernet.source,
        source: NEIGHBOUR_MAC,
        vlan: None,
        ethertype: ethernet.ethertype,
    };
    if ethernet.ethertype == EtherType::ARP {
        let (request, _) = ArpPacket::parse(packet).ok()?;
        let arp = ArpPacket {
            operation: ArpOperation::Reply,
            sender_mac: NEIGHBOUR_MAC,
            sender_ip: request.target_ip,
            target_mac: request.sender_mac,
            target_ip: request.sender_ip,
        };
        arp.emit(reply_header.emit(&mut reply)?)?;
        return Some(reply);
    }
    let (ip, message) = Ipv6Header::parse(packet).ok()?;
    let message = Icmpv6Message::parse(&ip, message).ok()?;
    let Icmpv6Message::Ndp(NdpMessage::NeighbourSolicitation { target, .. }) = message else {
        return None;
    };
    let advertisement =
        Icmpv6Message::Ndp(NdpMessage::NeighbourAdvertisement(NeighbourAdvertisement {
            router: false,
            solicited: true,
            overrides: true,
            target,
            target_mac: Some(NEIGHBOUR_MAC),
        }));
    let message_bytes = advertisement.message_bytes();
    reply.resize(14 + 40 + message_bytes, 0);
    reply_header.ethertype = EtherType::IPV6;
    let mut header = Ipv6Header::new(target, ip.source, Protocol::ICMPV6, message_bytes)?;
    // A receiver rejects neighbour discovery that crossed a router (RFC 4861).
    header.hop_limit = 255;
    let body = header.emit(reply_header.emit(&mut reply)?)?;
    advertisement.emit(target, ip.source, body)?;
    Some(reply)
}

#[test]
fn kernel_resolves_a_neighbour_on_request() {
    if !enter_namespace() {
        return;
    }
    veth();
    // The kernel solicits IPv6 neighbours from a link-local address.
    let mut monitor = Monitor::open().unwrap();
    ip("addr add fe80::b/64 dev tg1 nodad");
    wait_for(&mut monitor, |change| matches!(change, Change::Address(..)).then_some(()));
    let mut arena = arena(64);
    let mut device = PacketDevice::open(&PacketConfig::new("tg0"), &mut arena).unwrap();
    let index = Interface::by_name("tg1").unwrap().index;
    for neighbour in ["10.9.0.77", "fd09::77"] {
        netlink::resolve(index, address(neighbour)).unwrap();
        let mut reply = None;
        let mut burst = receive_matching(&mut device, &mut arena, 1, |frame| {
            reply = reply.take().or_else(|| resolution_reply(frame));
            reply.is_some()
        });
        free_all(&mut arena, &mut burst);
        burst.extend(arena.alloc_from(&reply.unwrap()));
        transmit_all(&mut device, &mut arena, &mut burst);
        let found = wait_for(&mut monitor, |change| match change {
            Change::Neighbour(at, host) if host.state.is_usable() => {
                (at == index && host.address == address(neighbour)).then_some(host)
            }
            _ => None,
        });
        assert_eq!((found.mac, found.state), (Some(NEIGHBOUR_MAC), NeighbourState::Reachable));
        assert!(netlink::neighbours(index).unwrap().contains(&found));
    }
    assert!(netlink::resolve(999, address(KERNEL_V6)).is_err());
    sandbox::drop_capabilities();
    let error = netlink::resolve(index, address("10.9.0.78")).unwrap_err();
    assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
}
