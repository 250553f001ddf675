//! Neighbour discovery for IPv6 (RFC 4861), carried in ICMPv6.
//!
//! Parsing applies the rules of sections 6.1, 7.1 and 8.1 whole, so a parsed
//! message is one that a host may believe, as far as it believes the link.

use core::net::Ipv6Addr;

use crate::field::{ipv6_at, mac_at, u16_at, u32_at};
use crate::icmp::IcmpHead;
use crate::{DropReason, Ipv6Header, MacAddr};

/// The hop limit of every message: one from off the link cannot have it.
pub const HOP_LIMIT: u8 = 255;

/// The group that an address's owner listens to for solicitations (RFC 4291
/// section 2.7.1).
pub const fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let low = address.to_bits() & 0x00ff_ffff;
    Ipv6Addr::from_bits(0xff02_0000_0000_0000_0000_0001_ff00_0000 | low)
}

/// A neighbour discovery message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NdpMessage<'a> {
    /// A host asks routers to announce themselves.
    RouterSolicitation {
        /// The sender's hardware address.
        source_link: Option<MacAddr>,
    },
    /// A router announces itself.
    RouterAdvertisement(RouterAdvertisement<'a>),
    /// Who has this address, or is it still there?
    NeighbourSolicitation {
        /// The address asked for.
        target: Ipv6Addr,
        /// The sender's hardware address; none when it has no address yet.
        source_link: Option<MacAddr>,
    },
    /// The sender has this address.
    NeighbourAdvertisement(NeighbourAdvertisement),
    /// A router knows a better first hop.
    Redirect {
        /// The better hop; the destination itself when it is on the link.
        target: Ipv6Addr,
        /// The destination that it is for.
        destination: Ipv6Addr,
        /// The hardware address of the target and the packet that caused this.
        options: NdpOptions<'a>,
    },
}

/// A router's announcement (RFC 4861 section 4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterAdvertisement<'a> {
    /// The hop limit that hosts should use; 0 when not told.
    pub hop_limit: u8,
    /// The flags: 0x80 for addresses by DHCPv6, 0x40 for other configuration.
    pub flags: u8,
    /// How long the sender is a default router, in seconds; 0 for not at all.
    pub lifetime_s: u16,
    /// How long a neighbour counts as reachable, in milliseconds; 0 when not
    /// told.
    pub reachable_ms: u32,
    /// The time between solicitations, in milliseconds; 0 when not told.
    pub retransmit_ms: u32,
    /// What else it tells.
    pub options: NdpOptions<'a>,
}

/// A neighbour's answer or announcement (RFC 4861 section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighbourAdvertisement {
    /// Whether the sender is a router.
    pub router: bool,
    /// Whether it answers a solicitation.
    pub solicited: bool,
    /// Whether it replaces a hardware address known before.
    pub overrides: bool,
    /// The address that it is about.
    pub target: Ipv6Addr,
    /// The hardware address of the target.
    pub target_link: Option<MacAddr>,
}

impl<'a> NdpMessage<'a> {
    const ROUTER_SOLICITATION: u8 = 133;
    const ROUTER_ADVERTISEMENT: u8 = 134;
    const NEIGHBOUR_SOLICITATION: u8 = 135;
    const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    const REDIRECT: u8 = 137;

    /// Whether ICMPv6 messages of this type are neighbour discovery.
    pub(crate) const fn has_type(kind: u8) -> bool {
        kind >= Self::ROUTER_SOLICITATION && kind <= Self::REDIRECT
    }

    /// Reads the message of type `kind`, of which `body` stands behind the
    /// checksum.
    ///
    /// # Errors
    /// When it breaks a rule of RFC 4861.
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
        let source_link = NdpOptions::parse(options)?.source_link();
        let legal = !(ip.source.is_unspecified() && source_link.is_some());
        legal.then_some(Self::RouterSolicitation { source_link })
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
        let source_link = NdpOptions::parse(options)?.source_link();
        // Without a source it is a probe for an address about to be used.
        let legal = !ip.source.is_unspecified()
            || (ip.destination == solicited_node(target) && source_link.is_none());
        (legal && is_host(target)).then_some(Self::NeighbourSolicitation { target, source_link })
    }

    /// RFC 4861 section 7.1.2.
    fn parse_neighbour_advertisement(ip: &Ipv6Header, body: &'a [u8]) -> Option<Self> {
        let (head, options) = body.split_first_chunk::<20>()?;
        let advertisement = NeighbourAdvertisement {
            router: head[0] & 0x80 != 0,
            solicited: head[0] & 0x40 != 0,
            overrides: head[0] & 0x20 != 0,
            target: ipv6_at(head, 4),
            target_link: NdpOptions::parse(options)?.target_link(),
        };
        let legal = !(ip.destination.is_multicast() && advertisement.solicited)
            && is_host(advertisement.target);
        legal.then_some(Self::NeighbourAdvertisement(advertisement))
    }

    /// RFC 4861 section 8.1.
    fn parse_redirect(ip: &Ipv6Header, body: &'a [u8]) -> Option<Self> {
        let (head, options) = body.split_first_chunk::<36>()?;
        let (target, destination) = (ipv6_at(head, 4), ipv6_at(head, 20));
        let options = NdpOptions::parse(options)?;
        let legal = ip.source.is_unicast_link_local()
            && is_host(destination)
            && (target == destination || target.is_unicast_link_local());
        legal.then_some(Self::Redirect { target, destination, options })
    }

    /// The header, checksum still zero, and what follows it.
    pub(crate) fn parts(&self) -> (IcmpHead, &'a [u8]) {
        match *self {
            Self::RouterSolicitation { source_link } => {
                let mut head = IcmpHead::word(Self::ROUTER_SOLICITATION, 0, 0);
                push_link(&mut head, NdpOption::SOURCE_LINK, source_link);
                (head, &[])
            }
            Self::RouterAdvertisement(it) => {
                let first = u32::from_be_bytes([it.hop_limit, it.flags, 0, 0]);
                let word = first | u32::from(it.lifetime_s);
                let mut head = IcmpHead::word(Self::ROUTER_ADVERTISEMENT, 0, word);
                head.push(&it.reachable_ms.to_be_bytes());
                head.push(&it.retransmit_ms.to_be_bytes());
                (head, it.options.bytes)
            }
            Self::NeighbourSolicitation { target, source_link } => {
                let mut head = IcmpHead::word(Self::NEIGHBOUR_SOLICITATION, 0, 0);
                head.push(&target.octets());
                push_link(&mut head, NdpOption::SOURCE_LINK, source_link);
                (head, &[])
            }
            Self::NeighbourAdvertisement(it) => {
                let flags = u32::from(it.router) << 31
                    | u32::from(it.solicited) << 30
                    | u32::from(it.overrides) << 29;
                let mut head = IcmpHead::word(Self::NEIGHBOUR_ADVERTISEMENT, 0, flags);
                head.push(&it.target.octets());
                push_link(&mut head, NdpOption::TARGET_LINK, it.target_link);
                (head, &[])
            }
            Self::Redirect { target, destination, options } => {
                let mut head = IcmpHead::word(Self::REDIRECT, 0, 0);
                head.push(&target.octets());
                head.push(&destination.octets());
                (head, options.bytes)
            }
        }
    }
}

/// Whether one host may have this address.
fn is_host(address: Ipv6Addr) -> bool {
    !address.is_multicast() && !address.is_unspecified() && !address.is_loopback()
}

fn push_link(head: &mut IcmpHead, kind: u8, link: Option<MacAddr>) {
    if let Some(MacAddr(link)) = link {
        head.push(&[kind, 1]);
        head.push(&link);
    }
}

/// One option of a message (RFC 4861 section 4.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NdpOption<'a> {
    /// The sender's hardware address.
    SourceLink(MacAddr),
    /// The target's hardware address.
    TargetLink(MacAddr),
    /// A prefix that is on the link or makes addresses.
    Prefix(PrefixInformation),
    /// The beginning of the packet that caused a redirect.
    Redirected(&'a [u8]),
    /// The MTU of the link in bytes.
    Mtu(u32),
    /// Any other option: its type and the bytes behind its length.
    Other(u8, &'a [u8]),
}

/// A prefix that a router announces (RFC 4861 section 4.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixInformation {
    /// The length of the prefix in bits, at most 128.
    pub prefix_bits: u8,
    /// The flags: 0x80 for on the link, 0x40 for making addresses.
    pub flags: u8,
    /// How long it is valid, in seconds; all ones for ever.
    pub valid_s: u32,
    /// How long addresses made from it are preferred, in seconds; all ones for
    /// ever.
    pub preferred_s: u32,
    /// The prefix.
    pub prefix: Ipv6Addr,
}

impl<'a> NdpOption<'a> {
    const SOURCE_LINK: u8 = 1;
    const TARGET_LINK: u8 = 2;
    const PREFIX: u8 = 3;
    const REDIRECTED: u8 = 4;
    const MTU: u8 = 5;

    /// Reads the option at the front.
    fn parse(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let &[kind, units, ..] = bytes else { return None };
        let (option, rest) = bytes.split_at_checked(usize::from(units) * 8)?;
        // A length of zero ends here, or the walk would never end.
        let body = option.get(2..)?;
        let option = match kind {
            Self::SOURCE_LINK => Self::SourceLink(parse_link(body)?),
            Self::TARGET_LINK => Self::TargetLink(parse_link(body)?),
            Self::PREFIX => Self::Prefix(PrefixInformation::parse(body)?),
            Self::REDIRECTED => Self::Redirected(body.get(6..)?),
            Self::MTU => Self::Mtu(u32_at(<&[u8; 6]>::try_from(body).ok()?, 2)),
            _ => Self::Other(kind, body),
        };
        Some((option, rest))
    }
}

/// Reads a hardware address, which must be one that a station can have.
fn parse_link(body: &[u8]) -> Option<MacAddr> {
    let link = mac_at(<&[u8; 6]>::try_from(body).ok()?, 0);
    link.is_station().then_some(link)
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

/// The options of a message, one by one. Their form was checked before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NdpOptions<'a> {
    bytes: &'a [u8],
}

impl<'a> NdpOptions<'a> {
    /// Checks all options: no length is zero or past the end, and the known
    /// ones have the length of their kind. `None` when one is wrong.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let mut rest = bytes;
        while !rest.is_empty() {
            (_, rest) = NdpOption::parse(rest)?;
        }
        Some(Self { bytes })
    }

    /// The sender's hardware address.
    pub fn source_link(mut self) -> Option<MacAddr> {
        self.find_map(|option| match option {
            NdpOption::SourceLink(link) => Some(link),
            _ => None,
        })
    }

    /// The target's hardware address.
    pub fn target_link(mut self) -> Option<MacAddr> {
        self.find_map(|option| match option {
            NdpOption::TargetLink(link) => Some(link),
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
    const LINK: [u8; 8] = [1, 1, 2, 0, 0, 0, 0, 1];
    const TARGET_LINK: [u8; 8] = [2, 1, 2, 0, 0, 0, 0, 1];

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

    /// Whether this body makes a message of this type.
    fn legal(ip: &Ipv6Header, kind: u8, body: &[&[u8]]) -> bool {
        let body: Vec<u8> = body.concat();
        match NdpMessage::parse(ip, kind, 0, &body) {
            Ok(message) => {
                // Every legal message is written as it came.
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
    fn makes_solicited_node_groups() {
        let group = solicited_node("2001:db8::1234:5678".parse().unwrap());
        assert_eq!(group, "ff02::1:ff34:5678".parse::<Ipv6Addr>().unwrap());
    }

    #[test]
    fn a_message_from_off_link_is_refused() {
        for hop_limit in [0, 1, 64, 254] {
            let ip = Ipv6Header { hop_limit, ..ip(HOST, "ff02::1") };
            for kind in 133..=137 {
                let refused = NdpMessage::parse(&ip, kind, 0, &[0; 40]);
                assert_eq!(refused, Err(DropReason::NdpHopLimit));
            }
        }
        let coded = NdpMessage::parse(&ip(HOST, "ff02::2"), 133, 1, &[0; 4]);
        assert_eq!(coded, Err(DropReason::NdpMalformed));
    }

    #[test]
    fn neighbour_solicitations() {
        let (target, group) = (octets(TARGET), "ff02::1:ff00:2");
        assert!(legal(&ip(HOST, group), 135, &[&[0; 4], &target, &LINK]));
        assert!(legal(&ip(HOST, TARGET), 135, &[&[0; 4], &target]));
        assert!(legal(&ip("::", group), 135, &[&[0; 4], &target]));
        assert!(!legal(&ip("::", group), 135, &[&[0; 4], &target, &LINK]));
        assert!(!legal(&ip("::", TARGET), 135, &[&[0; 4], &target]));
        assert!(!legal(&ip("::", "ff02::1:ff00:3"), 135, &[&[0; 4], &target]));
        for target in ["ff02::1", "::", "::1"] {
            assert!(!legal(&ip(HOST, group), 135, &[&[0; 4], &octets(target)]), "{target}");
        }
        assert!(!legal(&ip(HOST, group), 135, &[&[0; 4], &target[..15]]));
    }

    #[test]
    fn neighbour_advertisements() {
        let target = octets(TARGET);
        assert!(legal(&ip(TARGET, HOST), 136, &[&[0xe0, 0, 0, 0], &target, &TARGET_LINK]));
        assert!(legal(&ip(TARGET, "ff02::1"), 136, &[&[0x20, 0, 0, 0], &target, &TARGET_LINK]));
        assert!(!legal(&ip(TARGET, "ff02::1"), 136, &[&[0x40, 0, 0, 0], &target, &TARGET_LINK]));
        assert!(!legal(&ip(TARGET, HOST), 136, &[&[0x40, 0, 0, 0], &octets("ff02::1")]));
        assert!(!legal(&ip(TARGET, HOST), 136, &[&[0x40, 0, 0, 0], &target[..15]]));
    }

    #[test]
    fn router_messages() {
        assert!(legal(&ip(HOST, "ff02::2"), 133, &[&[0; 4], &LINK]));
        assert!(legal(&ip("::", "ff02::2"), 133, &[&[0; 4]]));
        assert!(!legal(&ip("::", "ff02::2"), 133, &[&[0; 4], &LINK]));
        assert!(!legal(&ip(HOST, "ff02::2"), 133, &[&[0; 3]]));
        let head = [64, 0xc0, 7, 8, 0, 0, 0, 1, 0, 0, 0, 2];
        assert!(legal(&ip(HOST, "ff02::1"), 134, &[&head, &LINK]));
        assert!(!legal(&ip(TARGET, "ff02::1"), 134, &[&head]), "not link-local");
        assert!(!legal(&ip(HOST, "ff02::1"), 134, &[&head[..11]]));
    }

    #[test]
    fn redirects() {
        let (destination, hop) = (octets(TARGET), octets("fe80::9"));
        let redirect = |from, target: &[u8; 16], destination: &[u8; 16]| {
            legal(&ip(from, TARGET), 137, &[&[0; 4], target, destination, &TARGET_LINK])
        };
        assert!(redirect(HOST, &hop, &destination));
        assert!(redirect(HOST, &destination, &destination));
        assert!(!redirect(TARGET, &hop, &destination), "not link-local");
        assert!(!redirect(HOST, &octets("2001:db8::9"), &destination));
        assert!(!redirect(HOST, &hop, &octets("ff02::1")));
    }

    #[test]
    fn options_of_impossible_length_are_refused() {
        for option in [
            &[1, 0, 2, 0, 0, 0, 0, 1][..], // length 0: a walk without end
            &[1, 2, 2, 0, 0, 0, 0, 1],     // past the message
            &[1],                          // no length
            &[1, 1, 2, 0],                 // cut
            &[200, 0],                     // length 0 of an unknown type
            &[5, 2, 0, 0, 0, 0, 5, 220, 0, 0, 0, 0, 0, 0, 0, 0], // an MTU of 16 bytes
            &[3, 1, 64, 0, 0, 0, 0, 0],    // a prefix of 8 bytes
        ] {
            assert_eq!(NdpOptions::parse(option), None, "{option:?}");
            let behind: Vec<u8> = [&LINK, option].concat();
            assert_eq!(NdpOptions::parse(&behind), None, "{option:?}");
        }
    }

    #[test]
    fn a_prefix_is_no_longer_than_an_address() {
        for (prefix_bits, legal) in [(0, true), (128, true), (129, false), (255, false)] {
            let mut option = [0; 32];
            option[..3].copy_from_slice(&[3, 4, prefix_bits]);
            assert_eq!(NdpOptions::parse(&option).is_some(), legal, "/{prefix_bits}");
        }
    }

    #[test]
    fn hardware_addresses_of_groups_are_refused() {
        for link in [[0xff; 6], [1, 0, 0x5e, 0, 0, 1], [0x33, 0x33, 0, 0, 0, 1], [0; 6]] {
            for kind in [1, 2] {
                let option: Vec<u8> = [&[kind, 1][..], &link].concat();
                assert_eq!(NdpOptions::parse(&option), None, "{link:?}");
            }
        }
    }

    #[test]
    fn options_are_read_in_order() {
        let mut bytes =
            [TARGET_LINK, LINK, [5, 1, 0, 0, 0, 0, 5, 220], [14, 1, 1, 2, 3, 4, 5, 6]].concat();
        bytes.extend([3, 4, 64, 0xc0, 0, 0, 0, 9, 0, 0, 0, 8, 0, 0, 0, 0]);
        bytes.extend(octets("2001:db8::"));
        bytes.extend([4, 2, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let options = NdpOptions::parse(&bytes).unwrap();
        let mac = MacAddr([2, 0, 0, 0, 0, 1]);
        assert_eq!((options.source_link(), options.target_link()), (Some(mac), Some(mac)));
        assert_eq!(
            options.collect::<Vec<_>>(),
            [
                NdpOption::TargetLink(mac),
                NdpOption::SourceLink(mac),
                NdpOption::Mtu(1500),
                NdpOption::Other(14, &[1, 2, 3, 4, 5, 6]),
                NdpOption::Prefix(PrefixInformation {
                    prefix_bits: 64,
                    flags: 0xc0,
                    valid_s: 9,
                    preferred_s: 8,
                    prefix: "2001:db8::".parse().unwrap(),
                }),
                NdpOption::Redirected(&[1, 2, 3, 4, 5, 6, 7, 8]),
            ]
        );
    }
}
