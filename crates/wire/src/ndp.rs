//! Neighbour discovery for IPv6 (RFC 4861), carried in ICMPv6.
//!
//! Parsing applies all validation rules of sections 6.1, 7.1 and 8.1. A parsed message is
//! therefore as trustworthy as the link that delivered it.

use core::net::Ipv6Addr;

use crate::field::{ipv6_at, mac_at, u16_at, u32_at};
use crate::icmp::IcmpHeader;
use crate::{DropReason, Ipv6Header, MacAddr};

/// Hop limit of every NDP message: routers decrement it, so no off-link message can have it.
pub const HOP_LIMIT: u8 = 255;

/// Returns the solicited-node multicast group of `address`, which the owner of the address joins
/// (RFC 4291 section 2.7.1).
pub const fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let low = address.to_bits() & 0x00ff_ffff;
    Ipv6Addr::from_bits(0xff02_0000_0000_0000_0000_0001_ff00_0000 | low)
}

/// Neighbour discovery message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NdpMessage<'a> {
    /// A host's request for router advertisements.
    RouterSolicitation {
        /// Link-layer address of the sender.
        source_mac: Option<MacAddr>,
    },
    /// A router's announcement.
    RouterAdvertisement(RouterAdvertisement<'a>),
    /// Request for the link-layer address of `target`, or reachability probe.
    NeighbourSolicitation {
        /// Address to be resolved or probed.
        target: Ipv6Addr,
        /// Link-layer address of the sender; `None` if the sender has no IP address yet.
        source_mac: Option<MacAddr>,
    },
    /// Announcement of the target's link-layer address.
    NeighbourAdvertisement(NeighbourAdvertisement),
    /// A router's notification of a better first hop.
    Redirect {
        /// Better first hop; equal to `destination` if the destination is on the link.
        target: Ipv6Addr,
        /// Destination that is redirected.
        destination: Ipv6Addr,
        /// Options: link-layer address of the target, and the packet that caused the redirect.
        options: NdpOptions<'a>,
    },
}

/// Router advertisement (RFC 4861 section 4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterAdvertisement<'a> {
    /// Hop limit recommended to hosts; 0 if unspecified.
    pub hop_limit: u8,
    /// Flags: 0x80 for addresses by DHCPv6, 0x40 for other configuration by DHCPv6.
    pub flags: u8,
    /// Lifetime of the sender as a default router, in seconds; 0 if it is no default router.
    pub lifetime_s: u16,
    /// Time for which a neighbour counts as reachable, in milliseconds; 0 if unspecified.
    pub reachable_ms: u32,
    /// Interval between retransmitted solicitations, in milliseconds; 0 if unspecified.
    pub retransmit_ms: u32,
    /// Further options.
    pub options: NdpOptions<'a>,
}

/// Neighbour advertisement: reply to a solicitation, or unsolicited (RFC 4861 section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighbourAdvertisement {
    /// Router flag: the sender is a router.
    pub router: bool,
    /// Solicited flag: the message replies to a solicitation.
    pub solicited: bool,
    /// Override flag: the message replaces a cached link-layer address.
    pub overrides: bool,
    /// Advertised address.
    pub target: Ipv6Addr,
    /// Link-layer address of the target.
    pub target_mac: Option<MacAddr>,
}

impl<'a> NdpMessage<'a> {
    const ROUTER_SOLICITATION: u8 = 133;
    const ROUTER_ADVERTISEMENT: u8 = 134;
    const NEIGHBOUR_SOLICITATION: u8 = 135;
    const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    const REDIRECT: u8 = 137;

    /// Returns true if `kind` is the ICMPv6 type of an NDP message.
    pub(crate) const fn is_supported_type(kind: u8) -> bool {
        kind >= Self::ROUTER_SOLICITATION && kind <= Self::REDIRECT
    }

    /// Parses the message of ICMPv6 type `kind`; `body` is the part after the checksum.
    ///
    /// # Errors
    /// [`DropReason::NdpHopLimit`] for a hop limit other than 255, [`DropReason::NdpMalformed`] for
    /// the violation of another rule of RFC 4861.
    pub(crate) fn parse(
        ip: &Ipv6Header,
        kind: u8,
        code: u8,
        body: &'a [u8],
    ) -> Result<Self, DropReason> {
        if ip.hop_limit != HOP_LIMIT {
            return Err(DropReason::NdpHopLimit);
        }
        if code != 0 {
            return Err(DropReason::NdpMalformed);
        }
        let message = match kind {
            Self::ROUTER_SOLICITATION => Self::parse_router_solicitation(ip, body),
            Self::ROUTER_ADVERTISEMENT => Self::parse_router_advertisement(ip, body),
            Self::NEIGHBOUR_SOLICITATION => Self::parse_neighbour_solicitation(ip, body),
            Self::NEIGHBOUR_ADVERTISEMENT => Self::parse_neighbour_advertisement(ip, body),
            _ => Self::parse_redirect(ip, body),
        };
        message.ok_or(DropReason::NdpMalformed)
    }

    /// RFC 4861 section 6.1.1.
    fn parse_router_solicitation(ip: &Ipv6Header, body: &'a [u8]) -> Option<Self> {
        let (_reserved, options) = body.split_first_chunk::<4>()?;
        let source_mac = NdpOptions::parse(options)?.source_mac();
        let legal = !(ip.source.is_unspecified() && source_mac.is_some());
        legal.then_some(Self::RouterSolicitation { source_mac })
    }

    /// RFC 4861 section 6.1.2.
    fn parse_router_advertisement(ip: &Ipv6Header, body: &'a [u8]) -> Option<Self> {
        let (head, options) = body.split_first_chunk::<12>()?;
        let advertisement = RouterAdvertisement {
            hop_limit: head[0],
            flags: head[1],
            lifetime_s: u16_at(head, 2),
            reachable_ms: u32_at(head, 4),
            retransmit_ms: u32_at(head, 8),
            options: NdpOptions::parse(options)?,
        };
        ip.source.is_unicast_link_local().then_some(Self::RouterAdvertisement(advertisement))
    }

    /// RFC 4861 section 7.1.1.
    fn parse_neighbour_solicitation(ip: &Ipv6Header, body: &'a [u8]) -> Option<Self> {
        let (head, options) = body.split_first_chunk::<20>()?;
        let target = ipv6_at(head, 4);
        let source_mac = NdpOptions::parse(options)?.source_mac();
        // Without a source address, the message is a probe of duplicate address detection.
        let legal = !ip.source.is_unspecified()
            || (ip.destination == solicited_node(target) && source_mac.is_none());
        (legal && is_valid_host(target))
            .then_some(Self::NeighbourSolicitation { target, source_mac })
    }

    /// RFC 4861 section 7.1.2.
    fn parse_neighbour_advertisement(ip: &Ipv6Header, body: &'a [u8]) -> Option<Self> {
        let (head, options) = body.split_first_chunk::<20>()?;
        let advertisement = NeighbourAdvertisement {
            router: head[0] & 0x80 != 0,
            solicited: head[0] & 0x40 != 0,
            overrides: head[0] & 0x20 != 0,
            target: ipv6_at(head, 4),
            target_mac: NdpOptions::parse(options)?.target_mac(),
        };
        let legal = !(ip.destination.is_multicast() && advertisement.solicited)
            && is_valid_host(advertisement.target);
        legal.then_some(Self::NeighbourAdvertisement(advertisement))
    }

    /// RFC 4861 section 8.1.
    fn parse_redirect(ip: &Ipv6Header, body: &'a [u8]) -> Option<Self> {
        let (head, options) = body.split_first_chunk::<36>()?;
        let (target, destination) = (ipv6_at(head, 4), ipv6_at(head, 20));
        let options = NdpOptions::parse(options)?;
        let legal = ip.source.is_unicast_link_local()
            && is_valid_host(destination)
            && (target == destination || target.is_unicast_link_local());
        legal.then_some(Self::Redirect { target, destination, options })
    }

    /// Returns the header, with a zero checksum, and the body.
    pub(crate) fn header_and_body(&self) -> (IcmpHeader, &'a [u8]) {
        match *self {
            Self::RouterSolicitation { source_mac } => {
                let mut head = IcmpHeader::with_u32(Self::ROUTER_SOLICITATION, 0, 0);
                push_link_layer_address(
                    &mut head,
                    NdpOption::SOURCE_LINK_LAYER_ADDRESS,
                    source_mac,
                );
                (head, &[])
            }
            Self::RouterAdvertisement(advertisement) => {
                let first =
                    u32::from_be_bytes([advertisement.hop_limit, advertisement.flags, 0, 0]);
                let word = first | u32::from(advertisement.lifetime_s);
                let mut head = IcmpHeader::with_u32(Self::ROUTER_ADVERTISEMENT, 0, word);
                head.push(&advertisement.reachable_ms.to_be_bytes());
                head.push(&advertisement.retransmit_ms.to_be_bytes());
                (head, advertisement.options.bytes)
            }
            Self::NeighbourSolicitation { target, source_mac } => {
                let mut head = IcmpHeader::with_u32(Self::NEIGHBOUR_SOLICITATION, 0, 0);
                head.push(&target.octets());
                push_link_layer_address(
                    &mut head,
                    NdpOption::SOURCE_LINK_LAYER_ADDRESS,
                    source_mac,
                );
                (head, &[])
            }
            Self::NeighbourAdvertisement(advertisement) => {
                let flags = u32::from(advertisement.router) << 31
                    | u32::from(advertisement.solicited) << 30
                    | u32::from(advertisement.overrides) << 29;
                let mut head = IcmpHeader::with_u32(Self::NEIGHBOUR_ADVERTISEMENT, 0, flags);
                head.push(&advertisement.target.octets());
                push_link_layer_address(
                    &mut head,
                    NdpOption::TARGET_LINK_LAYER_ADDRESS,
                    advertisement.target_mac,
                );
                (head, &[])
            }
            Self::Redirect { target, destination, options } => {
                let mut head = IcmpHeader::with_u32(Self::REDIRECT, 0, 0);
                head.push(&target.octets());
                head.push(&destination.octets());
                (head, options.bytes)
            }
        }
    }
}

/// Returns true if a host may own `address`: not multicast, unspecified or loopback.
fn is_valid_host(address: Ipv6Addr) -> bool {
    !address.is_multicast() && !address.is_unspecified() && !address.is_loopback()
}

fn push_link_layer_address(head: &mut IcmpHeader, kind: u8, mac: Option<MacAddr>) {
    if let Some(MacAddr(octets)) = mac {
        head.push(&[kind, 1]);
        head.push(&octets);
    }
}

/// NDP option (RFC 4861 section 4.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NdpOption<'a> {
    /// Link-layer address of the sender.
    SourceLinkLayerAddress(MacAddr),
    /// Link-layer address of the target.
    TargetLinkLayerAddress(MacAddr),
    /// Prefix that is on the link or used for address autoconfiguration.
    Prefix(PrefixInformation),
    /// Beginning of the packet that caused a redirect.
    RedirectedHeader(&'a [u8]),
    /// MTU of the link in bytes.
    Mtu(u32),
    /// Any other option: its type and the bytes after its length field.
    Other(u8, &'a [u8]),
}

/// Prefix information option of a router advertisement (RFC 4861 section 4.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixInformation {
    /// Prefix length in bits, at most 128.
    pub prefix_bits: u8,
    /// Flags: 0x80 for on-link, 0x40 for address autoconfiguration.
    pub flags: u8,
    /// Valid lifetime of the prefix in seconds; all ones for infinity.
    pub valid_s: u32,
    /// Preferred lifetime of addresses generated from the prefix, in seconds; all ones for
    /// infinity.
    pub preferred_s: u32,
    /// Prefix; the bits after `prefix_bits` are not significant.
    pub prefix: Ipv6Addr,
}

impl<'a> NdpOption<'a> {
    const SOURCE_LINK_LAYER_ADDRESS: u8 = 1;
    const TARGET_LINK_LAYER_ADDRESS: u8 = 2;
    const PREFIX: u8 = 3;
    const REDIRECTED_HEADER: u8 = 4;
    const MTU: u8 = 5;

    /// Parses the first option of `bytes`.
    fn parse(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let &[kind, units, ..] = bytes else { return None };
        let (option, rest) = bytes.split_at_checked(usize::from(units) * 8)?;
        // An option length of zero fails here; otherwise iteration would not terminate.
        let body = option.get(2..)?;
        let option = match kind {
            Self::SOURCE_LINK_LAYER_ADDRESS => {
                Self::SourceLinkLayerAddress(parse_link_layer_address(body)?)
            }
            Self::TARGET_LINK_LAYER_ADDRESS => {
                Self::TargetLinkLayerAddress(parse_link_layer_address(body)?)
            }
            Self::PREFIX => Self::Prefix(PrefixInformation::parse(body)?),
            Self::REDIRECTED_HEADER => Self::RedirectedHeader(body.get(6..)?),
            Self::MTU => Self::Mtu(u32_at(<&[u8; 6]>::try_from(body).ok()?, 2)),
            _ => Self::Other(kind, body),
        };
        Some((option, rest))
    }
}

/// Parses a link-layer address, which must be a valid unicast address.
fn parse_link_layer_address(body: &[u8]) -> Option<MacAddr> {
    let mac = mac_at(<&[u8; 6]>::try_from(body).ok()?, 0);
    mac.is_valid_unicast().then_some(mac)
}

impl PrefixInformation {
    fn parse(body: &[u8]) -> Option<Self> {
        let body = <&[u8; 30]>::try_from(body).ok()?;
        (body[0] <= 128).then_some(Self {
            prefix_bits: body[0],
            flags: body[1],
            valid_s: u32_at(body, 2),
            preferred_s: u32_at(body, 6),
            prefix: ipv6_at(body, 14),
        })
    }
}

/// Iterator over the options of a message, validated by [`NdpOptions::parse`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NdpOptions<'a> {
    bytes: &'a [u8],
}

impl<'a> NdpOptions<'a> {
    /// Validates all options: every length is above zero and inside `bytes`, and every known option
    /// has the length of its type. `None` when an option is invalid.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let mut rest = bytes;
        while !rest.is_empty() {
            (_, rest) = NdpOption::parse(rest)?;
        }
        Some(Self { bytes })
    }

    /// Returns the link-layer address of the sender from its option.
    pub fn source_mac(mut self) -> Option<MacAddr> {
        self.find_map(|option| match option {
            NdpOption::SourceLinkLayerAddress(mac) => Some(mac),
            _ => None,
        })
    }

    /// Returns the link-layer address of the target from its option.
    pub fn target_mac(mut self) -> Option<MacAddr> {
        self.find_map(|option| match option {
            NdpOption::TargetLinkLayerAddress(mac) => Some(mac),
            _ => None,
        })
    }
}

impl<'a> Iterator for NdpOptions<'a> {
    type Item = NdpOption<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let (option, rest) = NdpOption::parse(self.bytes)?;
        self.bytes = rest;
        Some(option)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;
    use crate::{Icmpv6Message, Protocol};

    const HOST: &str = "fe80::1";
    const TARGET: &str = "2001:db8::2";
    const SOURCE_LINK_OPTION: [u8; 8] = [1, 1, 2, 0, 0, 0, 0, 1];
    const TARGET_LINK_OPTION: [u8; 8] = [2, 1, 2, 0, 0, 0, 0, 1];

    fn ip(source: &str, destination: &str) -> Ipv6Header {
        let (source, destination) = (source.parse().unwrap(), destination.parse().unwrap());
        Ipv6Header {
            hop_limit: HOP_LIMIT,
            ..Ipv6Header::new(source, destination, Protocol::ICMPV6, 0).unwrap()
        }
    }

    fn octets(address: &str) -> [u8; 16] {
        address.parse::<Ipv6Addr>().unwrap().octets()
    }

    /// Returns true if this body is accepted as a message of this type.
    fn is_accepted(ip: &Ipv6Header, kind: u8, body: &[&[u8]]) -> bool {
        let body: Vec<u8> = body.concat();
        match NdpMessage::parse(ip, kind, 0, &body) {
            Ok(message) => {
                // Every accepted message is emitted with the same content.
                let mut buf = [0; 200];
                let message = Icmpv6Message::Ndp(message);
                let bytes = message.message_bytes();
                assert!(message.emit(ip.source, ip.destination, &mut buf).is_some());
                assert_eq!(Icmpv6Message::parse(ip, &buf[..bytes]), Ok(message));
                true
            }
            Err(reason) => {
                assert_eq!(reason, DropReason::NdpMalformed);
                false
            }
        }
    }

    #[test]
    fn computes_solicited_node_group() {
        let group = solicited_node("2001:db8::1234:5678".parse().unwrap());
        assert_eq!(group, "ff02::1:ff34:5678".parse::<Ipv6Addr>().unwrap());
    }

    #[test]
    fn rejects_messages_from_off_link() {
        for hop_limit in [0, 1, 64, 254] {
            let ip = Ipv6Header { hop_limit, ..ip(HOST, "ff02::1") };
            for kind in 133..=137 {
                let refused = NdpMessage::parse(&ip, kind, 0, &[0; 40]);
                assert_eq!(refused, Err(DropReason::NdpHopLimit));
            }
        }
        let with_nonzero_code = NdpMessage::parse(&ip(HOST, "ff02::2"), 133, 1, &[0; 4]);
        assert_eq!(with_nonzero_code, Err(DropReason::NdpMalformed));
    }

    #[test]
    fn validates_neighbour_solicitations() {
        let (target, group) = (octets(TARGET), "ff02::1:ff00:2");
        assert!(is_accepted(&ip(HOST, group), 135, &[&[0; 4], &target, &SOURCE_LINK_OPTION]));
        assert!(is_accepted(&ip(HOST, TARGET), 135, &[&[0; 4], &target]));
        assert!(is_accepted(&ip("::", group), 135, &[&[0; 4], &target]));
        assert!(!is_accepted(&ip("::", group), 135, &[&[0; 4], &target, &SOURCE_LINK_OPTION]));
        assert!(!is_accepted(&ip("::", TARGET), 135, &[&[0; 4], &target]));
        assert!(!is_accepted(&ip("::", "ff02::1:ff00:3"), 135, &[&[0; 4], &target]));
        for target in ["ff02::1", "::", "::1"] {
            assert!(!is_accepted(&ip(HOST, group), 135, &[&[0; 4], &octets(target)]), "{target}");
        }
        assert!(!is_accepted(&ip(HOST, group), 135, &[&[0; 4], &target[..15]]));
    }

    #[test]
    fn validates_neighbour_advertisements() {
        let target = octets(TARGET);
        assert!(is_accepted(
            &ip(TARGET, HOST),
            136,
            &[&[0xe0, 0, 0, 0], &target, &TARGET_LINK_OPTION]
        ));
        assert!(is_accepted(
            &ip(TARGET, "ff02::1"),
            136,
            &[&[0x20, 0, 0, 0], &target, &TARGET_LINK_OPTION]
        ));
        assert!(!is_accepted(
            &ip(TARGET, "ff02::1"),
            136,
            &[&[0x40, 0, 0, 0], &target, &TARGET_LINK_OPTION]
        ));
        assert!(!is_accepted(&ip(TARGET, HOST), 136, &[&[0x40, 0, 0, 0], &octets("ff02::1")]));
        assert!(!is_accepted(&ip(TARGET, HOST), 136, &[&[0x40, 0, 0, 0], &target[..15]]));
    }

    #[test]
    fn validates_router_messages() {
        assert!(is_accepted(&ip(HOST, "ff02::2"), 133, &[&[0; 4], &SOURCE_LINK_OPTION]));
        assert!(is_accepted(&ip("::", "ff02::2"), 133, &[&[0; 4]]));
        assert!(!is_accepted(&ip("::", "ff02::2"), 133, &[&[0; 4], &SOURCE_LINK_OPTION]));
        assert!(!is_accepted(&ip(HOST, "ff02::2"), 133, &[&[0; 3]]));
        let head = [64, 0xc0, 7, 8, 0, 0, 0, 1, 0, 0, 0, 2];
        assert!(is_accepted(&ip(HOST, "ff02::1"), 134, &[&head, &SOURCE_LINK_OPTION]));
        assert!(!is_accepted(&ip(TARGET, "ff02::1"), 134, &[&head]), "not link-local");
        assert!(!is_accepted(&ip(HOST, "ff02::1"), 134, &[&head[..11]]));
    }

    #[test]
    fn validates_redirects() {
        let (destination, hop) = (octets(TARGET), octets("fe80::9"));
        let redirect = |from, target: &[u8; 16], destination: &[u8; 16]| {
            is_accepted(
                &ip(from, TARGET),
                137,
                &[&[0; 4], target, destination, &TARGET_LINK_OPTION],
            )
        };
        assert!(redirect(HOST, &hop, &destination));
        assert!(redirect(HOST, &destination, &destination));
        assert!(!redirect(TARGET, &hop, &destination), "not link-local");
        assert!(!redirect(HOST, &octets("2001:db8::9"), &destination));
        assert!(!redirect(HOST, &hop, &octets("ff02::1")));
    }

    #[test]
    fn rejects_options_of_invalid_length() {
        for option in [
            &[1, 0, 2, 0, 0, 0, 0, 1][..], // length 0: would iterate forever
            &[1, 2, 2, 0, 0, 0, 0, 1],     // past the message
            &[1],                          // no length
            &[1, 1, 2, 0],                 // truncated
            &[200, 0],                     // length 0 of an unknown type
            &[5, 2, 0, 0, 0, 0, 5, 220, 0, 0, 0, 0, 0, 0, 0, 0], // an MTU of 16 bytes
            &[3, 1, 64, 0, 0, 0, 0, 0],    // a prefix of 8 bytes
        ] {
            assert_eq!(NdpOptions::parse(option), None, "{option:?}");
            let after_valid_option: Vec<u8> = [&SOURCE_LINK_OPTION, option].concat();
            assert_eq!(NdpOptions::parse(&after_valid_option), None, "{option:?}");
        }
    }

    #[test]
    fn rejects_prefix_longer_than_address() {
        for (prefix_bits, is_valid) in [(0, true), (128, true), (129, false), (255, false)] {
            let mut option = [0; 32];
            option[..3].copy_from_slice(&[3, 4, prefix_bits]);
            assert_eq!(NdpOptions::parse(&option).is_some(), is_valid, "/{prefix_bits}");
        }
    }

    #[test]
    fn rejects_group_and_zero_mac_addresses() {
        for link in [[0xff; 6], [1, 0, 0x5e, 0, 0, 1], [0x33, 0x33, 0, 0, 0, 1], [0; 6]] {
            for kind in [1, 2] {
                let option: Vec<u8> = [&[kind, 1][..], &link].concat();
                assert_eq!(NdpOptions::parse(&option), None, "{link:?}");
            }
        }
    }

    #[test]
    fn yields_options_in_order() {
        let mut bytes = [
            TARGET_LINK_OPTION,
            SOURCE_LINK_OPTION,
            [5, 1, 0, 0, 0, 0, 5, 220],
            [14, 1, 1, 2, 3, 4, 5, 6],
        ]
        .concat();
        bytes.extend([3, 4, 64, 0xc0, 0, 0, 0, 9, 0, 0, 0, 8, 0, 0, 0, 0]);
        bytes.extend(octets("2001:db8::"));
        bytes.extend([4, 2, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let options = NdpOptions::parse(&bytes).unwrap();
        let mac = MacAddr([2, 0, 0, 0, 0, 1]);
        assert_eq!((options.source_mac(), options.target_mac()), (Some(mac), Some(mac)));
        assert_eq!(
            options.collect::<Vec<_>>(),
            [
                NdpOption::TargetLinkLayerAddress(mac),
                NdpOption::SourceLinkLayerAddress(mac),
                NdpOption::Mtu(1500),
                NdpOption::Other(14, &[1, 2, 3, 4, 5, 6]),
                NdpOption::Prefix(PrefixInformation {
                    prefix_bits: 64,
                    flags: 0xc0,
                    valid_s: 9,
                    preferred_s: 8,
                    prefix: "2001:db8::".parse().unwrap(),
                }),
                NdpOption::RedirectedHeader(&[1, 2, 3, 4, 5, 6, 7, 8]),
            ]
        );
    }
}
