//! Protocol numbers of Ethernet and IP.

use core::fmt;

/// EtherType: the protocol of an Ethernet frame's payload.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct EtherType(pub u16);

impl EtherType {
    /// Internet Protocol version 4 (RFC 894).
    pub const IPV4: EtherType = EtherType(0x0800);
    /// Address Resolution Protocol (RFC 826).
    pub const ARP: EtherType = EtherType(0x0806);
    /// A VLAN tag (IEEE 802.1Q).
    pub const VLAN: EtherType = EtherType(0x8100);
    /// Outer tag of two VLAN tags (IEEE 802.1ad), not supported by the stack.
    pub const SERVICE_VLAN: EtherType = EtherType(0x88a8);
    /// Internet Protocol version 6 (RFC 2464).
    pub const IPV6: EtherType = EtherType(0x86dd);
}

impl fmt::Debug for EtherType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::IPV4 => f.write_str("IPv4"),
            Self::ARP => f.write_str("ARP"),
            Self::VLAN => f.write_str("802.1Q"),
            Self::SERVICE_VLAN => f.write_str("802.1ad"),
            Self::IPV6 => f.write_str("IPv6"),
            EtherType(other) => write!(f, "0x{other:04x}"),
        }
    }
}

/// IP protocol number: the Protocol field of IPv4, the Next Header field of IPv6.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Protocol(pub u8);

impl Protocol {
    /// IPv6 hop-by-hop options (RFC 8200 section 4.3).
    pub const HOP_BY_HOP: Protocol = Protocol(0);
    /// ICMP for IPv4 (RFC 792).
    pub const ICMPV4: Protocol = Protocol(1);
    /// Transmission Control Protocol (RFC 9293).
    pub const TCP: Protocol = Protocol(6);
    /// User Datagram Protocol (RFC 768).
    pub const UDP: Protocol = Protocol(17);
    /// IPv6 routing header (RFC 8200 section 4.4).
    pub const ROUTING: Protocol = Protocol(43);
    /// IPv6 fragment header (RFC 8200 section 4.5).
    pub const FRAGMENT: Protocol = Protocol(44);
    /// ICMP for IPv6 (RFC 4443).
    pub const ICMPV6: Protocol = Protocol(58);
    /// No next header (RFC 8200 section 4.7).
    pub const NO_NEXT_HEADER: Protocol = Protocol(59);
    /// IPv6 destination options (RFC 8200 section 4.6).
    pub const DESTINATION_OPTIONS: Protocol = Protocol(60);
}

impl fmt::Debug for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::HOP_BY_HOP => f.write_str("hop-by-hop"),
            Self::ICMPV4 => f.write_str("ICMP"),
            Self::TCP => f.write_str("TCP"),
            Self::UDP => f.write_str("UDP"),
            Self::ROUTING => f.write_str("routing"),
            Self::FRAGMENT => f.write_str("fragment"),
            Self::ICMPV6 => f.write_str("ICMPv6"),
            Self::NO_NEXT_HEADER => f.write_str("no next header"),
            Self::DESTINATION_OPTIONS => f.write_str("destination options"),
            Protocol(other) => write!(f, "protocol {other}"),
        }
    }
}
