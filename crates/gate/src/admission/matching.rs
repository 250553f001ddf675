//! Rules that assign packets to classes.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use tidegate_wire::{IpCidr, Protocol};

use super::packet_meta::{PacketKind, PacketMeta};
use super::payload::{CompiledPayload, PAYLOAD_WINDOW, PayloadBytes};

/// Inclusive range of numbers: `53` or `1024-65535`; for ports also `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberRange {
    /// First number of the range.
    pub low: u32,
    /// Last number of the range.
    pub high: u32,
}

impl NumberRange {
    /// No port: fragments, and protocols without ports.
    pub const NONE: Self = Self { low: CompiledRule::NO_PORT, high: CompiledRule::NO_PORT };

    fn covers(self, other: Self) -> bool {
        self.low <= other.low && other.high <= self.high
    }

    /// True if the range has this number.
    pub(crate) fn contains(self, number: u32) -> bool {
        (self.low..=self.high).contains(&number)
    }
}

impl fmt::Display for NumberRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NONE => f.write_str("none"),
            Self { low, high } if low == high => write!(f, "{low}"),
            Self { low, high } => write!(f, "{low}-{high}"),
        }
    }
}

impl FromStr for NumberRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("invalid range {text:?}: write a number or a range, such as 53 or 1024-65535")
        };
        if text == "none" {
            return Ok(Self::NONE);
        }
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
        let (low, high) = match text.split_once('-') {
            Some((low, high)) => (number(low)?, number(high)?),
            None => (number(text)?, number(text)?),
        };
        if low > high {
            return Err(format!("the range {text:?} is empty: write the smaller number first"));
        }
        Ok(Self { low, high })
    }
}

/// Protocol condition: a name (`neighbour`, `icmp`, `udp`, `tcp`) or an IP protocol number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolMatch(PacketKind);

impl ProtocolMatch {
    /// ARP, neighbour discovery and router discovery.
    pub const NEIGHBOUR: Self = Self(PacketKind::Neighbour);
    /// ICMP of both families, except neighbour discovery.
    pub const ICMP: Self = Self(PacketKind::Icmp);
    /// UDP.
    pub const UDP: Self = Self(PacketKind::Ip(Protocol::UDP));
    /// TCP.
    pub const TCP: Self = Self(PacketKind::Ip(Protocol::TCP));

    fn has_ports(self) -> bool {
        self == Self::UDP || self == Self::TCP
    }

    /// True if packets of this kind match.
    pub(crate) fn matches(self, kind: PacketKind) -> bool {
        self.0 == kind
    }
}

impl fmt::Display for ProtocolMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NEIGHBOUR => f.write_str("neighbour"),
            Self::ICMP => f.write_str("icmp"),
            Self::UDP => f.write_str("udp"),
            Self::TCP => f.write_str("tcp"),
            Self(kind) => write!(f, "{}", kind.number()),
        }
    }
}

impl FromStr for ProtocolMatch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "neighbour" => Self::NEIGHBOUR,
            "icmp" | "1" | "58" => Self::ICMP,
            "udp" => Self::UDP,
            "tcp" => Self::TCP,
            _ => Self(PacketKind::Ip(Protocol(text.parse().map_err(|_| {
                format!(
                    "unknown protocol {text:?}: write neighbour, icmp, udp, tcp, or the number of \
                     a protocol above IP"
                )
            })?))),
        })
    }
}

/// Match conditions of a rule. All conditions that are present must hold; absent conditions
/// match every packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields, rename_all = "kebab-case"))]
#[non_exhaustive]
#[must_use]
pub struct Match {
    /// Protocol.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub protocol: Option<ProtocolMatch>,
    /// Destination port range of UDP or TCP; `none` matches packets without a port, such as
    /// fragments.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub port: Option<NumberRange>,
    /// Source network.
    #[cfg_attr(
        feature = "serde",
        serde(with = "crate::serialize::cidr", skip_serializing_if = "Option::is_none")
    )]
    pub source: Option<IpCidr>,
    /// `true` matches known sources only, `false` unknown sources only.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub known: Option<bool>,
    /// Packet length in bytes, IP header included.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub size: Option<NumberRange>,
    /// Bytes of the payload of UDP or TCP, at [`Match::payload_at`]; letters match in both cases. A
    /// packet with less payload does not match.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub payload: Option<PayloadBytes>,
    /// Offset of these bytes in the payload. They end within the first [`PAYLOAD_WINDOW`] bytes.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "is_zero"))]
    pub payload_at: u32,
}

#[cfg(feature = "serde")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Match {
    /// Sets the protocol; `None` matches every protocol.
    pub fn protocol(self, protocol: impl Into<Option<ProtocolMatch>>) -> Self {
        Self { protocol: protocol.into(), ..self }
    }

    /// Sets the destination port range of UDP or TCP; `None` matches every packet.
    pub fn port(self, port: impl Into<Option<NumberRange>>) -> Self {
        Self { port: port.into(), ..self }
    }

    /// Sets the source network; `None` matches every source.
    pub fn source(self, source: impl Into<Option<IpCidr>>) -> Self {
        Self { source: source.into(), ..self }
    }

    /// Sets whether known sources match, or unknown sources; `None` matches both.
    pub fn known(self, known: impl Into<Option<bool>>) -> Self {
        Self { known: known.into(), ..self }
    }

    /// Sets the range of packet lengths in bytes, IP header included; `None` matches every length.
    pub fn size(self, size: impl Into<Option<NumberRange>>) -> Self {
        Self { size: size.into(), ..self }
    }

    /// Sets the bytes of the payload at an offset; `None` matches every packet.
    pub fn payload(self, at: u32, payload: impl Into<Option<PayloadBytes>>) -> Self {
        Self { payload: payload.into(), payload_at: at, ..self }
    }

    /// Returns true if `self` matches every packet that `other` matches.
    pub(super) fn covers(&self, other: &Self) -> bool {
        fn field<T: Copy>(own: Option<T>, other: Option<T>, holds: fn(T, T) -> bool) -> bool {
            match (own, other) {
                (None, _) => true,
                (Some(ours), Some(other)) => holds(ours, other),
                (Some(_), None) => false,
            }
        }
        field(self.protocol, other.protocol, |a, b| a == b)
            && field(self.port, other.port, NumberRange::covers)
            && field(self.known, other.known, |a, b| a == b)
            && field(self.size, other.size, NumberRange::covers)
            && field(self.source, other.source, |a, b| {
                a.prefix_bits() <= b.prefix_bits() && a.contains(b.address())
            })
            && (self.payload.is_none() || self.payload_at == other.payload_at)
            && field(self.payload, other.payload, PayloadBytes::covers)
    }

    /// Describes a mistake in the conditions; `None` if there is none.
    pub(super) fn fault(&self) -> Option<String> {
        if let Some(port) = self.port {
            if port.high > 65_535 && port != NumberRange::NONE {
                return Some(format!("port {} is out of range: at most 65535", port.high));
            }
            if let Some(protocol) = self.protocol
                && !protocol.has_ports()
                && port != NumberRange::NONE
            {
                return Some(format!(
                    "{protocol} has no ports: leave out port, or use protocol udp or tcp"
                ));
            }
        }
        if self.size == Some(NumberRange::NONE) {
            return Some("size none is invalid: leave size out, or write a range of bytes".into());
        }
        self.payload_fault()
    }

    fn payload_fault(&self) -> Option<String> {
        let Some(payload) = self.payload else {
            let is_set = self.payload_at != 0;
            return is_set
                .then(|| "payload-at without payload: give payload, or leave it out".into());
        };
        let end = u64::from(self.payload_at) + payload.as_slice().len() as u64;
        if end > PAYLOAD_WINDOW as u64 {
            return Some(format!(
                "payload ends at byte {end}: only the first {PAYLOAD_WINDOW} bytes are compared"
            ));
        }
        let protocol = self.protocol.filter(|protocol| !protocol.has_ports());
        if let Some(protocol) = protocol {
            return Some(format!("the payload of {protocol} is not read: use protocol udp or tcp"));
        }
        let is_fragment = self.port == Some(NumberRange::NONE);
        is_fragment.then(|| "port none has no payload: leave out port, or give a port".into())
    }

    pub(super) fn compile(&self, class: usize) -> CompiledRule {
        let (family, value, mask) = match self.source.map(|cidr| (cidr.address(), cidr)) {
            None => (0, 0, 0),
            Some((IpAddr::V4(address), cidr)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(cidr.prefix_bits())).unwrap_or(0);
                (4, u128::from(address.to_bits() & mask), u128::from(mask))
            }
            Some((IpAddr::V6(address), cidr)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(cidr.prefix_bits())).unwrap_or(0);
                (6, address.to_bits() & mask, mask)
            }
        };
        let ports = self.port.unwrap_or(NumberRange { low: 0, high: CompiledRule::NO_PORT });
        let size = self.size.unwrap_or(NumberRange { low: 0, high: u32::MAX });
        CompiledRule {
            class: class as u8,
            family,
            known: self.known.map_or(0, |known| if known { 1 } else { 2 }),
            protocol: self
                .protocol
                .map_or(CompiledRule::ANY_PROTOCOL, |protocol| protocol.0.number()),
            port_low: ports.low,
            port_high: ports.high,
            size_low: size.low,
            size_high: size.high,
            source: value,
            source_mask: mask,
            payload: self.payload.map_or(CompiledPayload::ANY, |payload| {
                CompiledPayload::new(self.payload_at as usize, payload)
            }),
        }
    }
}

/// Compiled form of a [`Match`]: numbers to compare with, as the BPF program reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompiledRule {
    /// Class of packets that match.
    pub class: u8,
    /// Address family of the source: 4 or 6; 0 matches any source.
    pub family: u8,
    /// 1 matches known sources, 2 unknown sources, 0 both.
    pub known: u8,
    /// [`PacketKind::number`], or [`CompiledRule::ANY_PROTOCOL`].
    pub protocol: u16,
    /// First port of the range.
    pub port_low: u32,
    /// Last port of the range.
    pub port_high: u32,
    /// Minimum packet length in bytes.
    pub size_low: u32,
    /// Maximum packet length in bytes.
    pub size_high: u32,
    /// Source network address as a number; IPv4 in the lowest 32 bits.
    pub source: u128,
    /// Mask of the bits of `source` that are compared.
    pub source_mask: u128,
    /// Bytes of the payload.
    pub payload: CompiledPayload,
}

impl CompiledRule {
    /// Protocol number that matches every protocol.
    pub const ANY_PROTOCOL: u16 = u16::MAX;
    /// Port number of packets without a port, above every valid port.
    pub const NO_PORT: u32 = 1 << 16;

    /// True if the rule depends on known sources.
    #[inline]
    pub(super) fn uses_known_sources(&self) -> bool {
        self.known != 0
    }

    /// Returns true if a packet matches. `known` is true if the packet's source is known.
    #[inline]
    pub fn matches(&self, meta: &PacketMeta<'_>, known: bool) -> bool {
        let port = meta.destination_port.map_or(Self::NO_PORT, u32::from);
        (self.protocol == Self::ANY_PROTOCOL || self.protocol == meta.kind.number())
            && (self.port_low..=self.port_high).contains(&port)
            && (self.size_low..=self.size_high).contains(&meta.packet_bytes)
            && (self.known == 0 || (self.known == 1) == known)
            && self.is_from(meta.source)
            && self.payload.matches(meta.payload)
    }

    #[inline]
    fn is_from(&self, source: Option<IpAddr>) -> bool {
        let (family, bits) = match source {
            _ if self.family == 0 => return true,
            Some(IpAddr::V4(address)) => (4, u128::from(address.to_bits())),
            Some(IpAddr::V6(address)) => (6, address.to_bits()),
            None => return false,
        };
        family == self.family && (bits ^ self.source) & self.source_mask == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_protocols_round_trip_as_text() {
        for text in ["53", "1024-65535", "0-0", "none"] {
            let range: NumberRange = text.parse().unwrap();
            assert!(range.low <= range.high);
            assert_eq!(range.to_string().parse(), Ok(range));
        }
        for text in ["", "-", "5-4", "a", "1-2-3", "99999999999"] {
            assert!(text.parse::<NumberRange>().is_err(), "{text}");
        }
        for text in ["neighbour", "icmp", "udp", "tcp", "132"] {
            assert_eq!(text.parse::<ProtocolMatch>().unwrap().to_string(), text);
        }
        assert_eq!("58".parse(), Ok(ProtocolMatch::ICMP), "one name for both families");
        for text in ["256", "UDP", "arp", "-1"] {
            assert!(text.parse::<ProtocolMatch>().is_err(), "{text}");
        }
    }

    #[test]
    fn rule_matches_only_if_every_condition_holds() {
        let rule = |text: &str| toml::from_str::<Match>(text).unwrap().compile(0);
        let meta = PacketMeta {
            kind: PacketKind::Ip(Protocol::UDP),
            source: "192.0.2.77".parse().ok(),
            destination_port: Some(53),
            packet_bytes: 60,
            payload: b"\xab\xcd\x01\0\0\x01\0\0\0\0\0\0\x07example\x03org\0",
        };
        let v6 = PacketMeta { source: "2001:db8::1".parse().ok(), ..meta };
        for (text, v4_matches, v6_matches) in [
            ("", true, true),
            ("protocol = 'udp'", true, true),
            ("protocol = 'tcp'", false, false),
            ("port = 53", true, true),
            ("port = '54-60'", false, false),
            ("size = '60-100'", true, true),
            ("size = '61-100'", false, false),
            ("source = '192.0.2.0/24'", true, false),
            ("source = '192.0.2.64/28'", true, false),
            ("source = '192.0.2.0/28'", false, false),
            ("source = '0.0.0.0/0'", true, false),
            ("source = '2001:db8::/32'", false, true),
            ("source = '::/0'", false, true),
            ("known = true", true, true),
            ("known = false", false, false),
            ("known = true\nport = 54", false, false),
            (
                r"payload = '\x07Example\x03'
               payload-at = 12",
                true,
                true,
            ),
            (r"payload = '\x07example'", false, false),
            (
                r"payload = '\x03org\x00'
               payload-at = 20",
                true,
                true,
            ),
            (
                r"payload = '\x03org\x00\x00'
               payload-at = 20",
                false,
                false,
            ),
        ] {
            assert_eq!(rule(text).matches(&meta, true), v4_matches, "{text}");
            assert_eq!(rule(text).matches(&v6, true), v6_matches, "{text}");
        }
        assert!(rule("known = false").matches(&meta, false));
        let fragment = PacketMeta { destination_port: None, ..meta };
        assert!(!rule("port = '0-65535'").matches(&fragment, true), "no port at all");
        assert!(rule("protocol = 'udp'").matches(&fragment, true));
        assert!(rule("protocol = 'udp'\nport = 'none'").matches(&fragment, true));
        assert!(!rule("port = 'none'").matches(&meta, true));
        let no_source = PacketMeta { source: None, ..meta };
        assert!(!rule("source = '0.0.0.0/0'").matches(&no_source, true));
    }
}
