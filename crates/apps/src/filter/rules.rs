//! Rules of a packet filter.
//!
//! A TOML file; the first matching rule decides:
//!
//! ```
//! let rules: tidegate_apps::filter::FilterRules = r#"
//!     default = "deny"
//!
//!     [[rule]]
//!     action = "allow"
//!     source = "10.0.0.0/8"
//!     protocol = "udp"
//!     destination-port = 53
//!
//!     [[rule]]
//!     action = "allow"
//!     protocol = "icmp"
//! "#.parse()?;
//! assert_eq!(rules.len(), 2);
//! # Ok::<(), tidegate_apps::filter::FilterRulesError>(())
//! ```

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};
use tidegate::IpCidr;
use tidegate_wire::ipv6_extension::{Extension, ExtensionWalk};
use tidegate_wire::{Ipv4Header, Ipv6Header, Protocol};
use toml::Spanned;

/// Most rules. More are a mistake: each packet is compared with all of them.
const MAX_RULES: usize = 10_000;

/// Action of a rule on matching packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FilterAction {
    /// Passes the packet.
    Allow,
    /// Drops the packet silently: no ICMP error is sent.
    Deny,
}

/// Verdict on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The packet is forwarded.
    Pass,
    /// The packet is dropped.
    Refuse,
}

/// Protocols that a rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolMatch {
    /// ICMP of either family.
    Icmp,
    /// IP protocol number.
    Number(u8),
}

/// Inclusive range of UDP or TCP ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRange(pub RangeInclusive<u16>);

/// One rule. An absent field matches every packet.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FilterRule {
    /// Action on matching packets.
    pub action: FilterAction,
    /// Prefix of the source address.
    #[serde(default, deserialize_with = "prefix")]
    pub source: Option<IpCidr>,
    /// Prefix of the destination address.
    #[serde(default, deserialize_with = "prefix")]
    pub destination: Option<IpCidr>,
    /// Transport protocol.
    #[serde(default)]
    pub protocol: Option<ProtocolMatch>,
    /// Source port of UDP or TCP.
    #[serde(default)]
    pub source_port: Option<PortRange>,
    /// Destination port of UDP or TCP.
    #[serde(default)]
    pub destination_port: Option<PortRange>,
}

/// Rules of a packet filter, in order of evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct FilterRules {
    rules: Vec<FilterRule>,
    default: FilterAction,
}

/// Errors in filter rules.
#[derive(Debug, thiserror::Error)]
pub enum FilterRulesError {
    /// The file is no valid TOML, or contains unknown keys or values.
    #[error("{0}")]
    Syntax(#[from] toml::de::Error),
    /// A rule can never match.
    #[error("rule {number}{}: {problem}", line.map_or_else(String::new, |line| format!(" at line {line}")))]
    InvalidRule {
        /// Number of the rule, from 1.
        number: usize,
        /// Line of the file at which the rule begins, from 1; `None` without a file.
        line: Option<usize>,
        /// Problem with the rule, and its remedy.
        problem: String,
    },
    /// More rules than the maximum.
    #[error("{0} rules: at most {MAX_RULES}; merge prefixes and port ranges")]
    TooMany(usize),
}

impl FilterRules {
    /// Creates rules without a file.
    ///
    /// # Errors
    /// When a rule can never match, or there are too many rules.
    pub fn new(rules: Vec<FilterRule>, default: FilterAction) -> Result<Self, FilterRulesError> {
        if rules.len() > MAX_RULES {
            return Err(FilterRulesError::TooMany(rules.len()));
        }
        for (index, rule) in rules.iter().enumerate() {
            rule.check().map_err(|problem| FilterRulesError::InvalidRule {
                number: index + 1,
                line: None,
                problem,
            })?;
        }
        Ok(Self { rules, default })
    }

    /// Number of rules.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// True when there are no rules, so that the default action applies to every packet.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Evaluates the packet that begins with these bytes. Refuses a packet whose headers cannot be
    /// parsed completely, whatever the rules: they would be compared with other fields than the
    /// receiver sees.
    pub fn evaluate(&self, packet: &[u8]) -> Verdict {
        let Some(fields) = MatchFields::parse(packet) else { return Verdict::Refuse };
        let first = self.rules.iter().find(|rule| rule.matches(&fields));
        match first.map_or(self.default, |rule| rule.action) {
            FilterAction::Allow => Verdict::Pass,
            FilterAction::Deny => Verdict::Refuse,
        }
    }
}

impl FromStr for FilterRules {
    type Err = FilterRulesError;

    fn from_str(text: &str) -> Result<Self, FilterRulesError> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct File {
            default: FilterAction,
            #[serde(default)]
            rule: Vec<Spanned<FilterRule>>,
        }
        let file: File = toml::from_str(text)?;
        let starts: Vec<usize> = file.rule.iter().map(|rule| rule.span().start).collect();
        let rules = file.rule.into_iter().map(Spanned::into_inner).collect();
        Self::new(rules, file.default).map_err(|error| match error {
            FilterRulesError::InvalidRule { number, problem, .. } => {
                let before = starts.get(number - 1).and_then(|&start| text.get(..start));
                let line = before.map(|before| before.matches('\n').count() + 1);
                FilterRulesError::InvalidRule { number, line, problem }
            }
            other => other,
        })
    }
}

impl FilterRule {
    fn check(&self) -> Result<(), String> {
        let has_ports = self.source_port.is_some() || self.destination_port.is_some();
        let carries_ports = matches!(self.protocol, None | Some(ProtocolMatch::Number(6 | 17)));
        if has_ports && !carries_ports {
            return Err("only udp and tcp have ports: leave the ports out".into());
        }
        if let (Some(source), Some(destination)) = (self.source, self.destination)
            && source.address().is_ipv4() != destination.address().is_ipv4()
        {
            return Err(format!(
                "no packet goes from {source} to {destination}: use addresses of one family"
            ));
        }
        Ok(())
    }

    fn matches(&self, fields: &MatchFields) -> bool {
        let inside = |prefix: Option<IpCidr>, address| prefix.is_none_or(|p| p.contains(address));
        inside(self.source, fields.source)
            && inside(self.destination, fields.destination)
            && self.protocol.is_none_or(|protocol| protocol.matches(fields.protocol))
            && self.ports_match(fields)
    }

    fn ports_match(&self, fields: &MatchFields) -> bool {
        if self.source_port.is_none() && self.destination_port.is_none() {
            return true;
        }
        let Some((source, destination)) = fields.ports else { return false };
        let inside = |ports: &Option<PortRange>, port| {
            ports.as_ref().is_none_or(|ports| ports.0.contains(&port))
        };
        inside(&self.source_port, source) && inside(&self.destination_port, destination)
    }
}

impl ProtocolMatch {
    fn matches(self, protocol: Protocol) -> bool {
        match self {
            Self::Icmp => matches!(protocol, Protocol::ICMPV4 | Protocol::ICMPV6),
            Self::Number(number) => protocol.0 == number,
        }
    }
}

/// Header fields of a packet that rules match.
struct MatchFields {
    source: IpAddr,
    destination: IpAddr,
    protocol: Protocol,
    /// Source and destination port of UDP and TCP; `None` for later fragments.
    ports: Option<(u16, u16)>,
}

impl MatchFields {
    fn parse(packet: &[u8]) -> Option<Self> {
        if packet.first()? >> 4 == 4 {
            let (header, payload) = Ipv4Header::parse_quoted(packet).ok()?;
            let ports = match header.fragment_offset_bytes {
                0 => parse_ports(header.protocol, payload, header.more_fragments)?,
                _ => None,
            };
            return Some(Self {
                source: header.source.into(),
                destination: header.destination.into(),
                protocol: header.protocol,
                ports,
            });
        }
        let (header, payload) = Ipv6Header::parse_quoted(packet).ok()?;
        let mut walk = ExtensionWalk::new(header.next_header, payload);
        let (mut is_later, mut more_fragments) = (false, false);
        for extension in &mut walk {
            if let Extension::Fragment(fragment) = extension.ok()? {
                (is_later, more_fragments) = (fragment.offset_bytes != 0, fragment.more_fragments);
                if is_later {
                    break;
                }
            }
        }
        let rest = walk.remainder();
        let ports =
            if is_later { None } else { parse_ports(rest.protocol, rest.payload, more_fragments)? };
        Some(Self {
            source: header.source.into(),
            destination: header.destination.into(),
            protocol: rest.protocol,
            ports,
        })
    }
}

/// Ports of the packet, if its protocol has ports; outer `None` when they are cut off. A first
/// fragment that ends before the rest of the transport header hides it (RFC 1858).
fn parse_ports(
    protocol: Protocol,
    payload: &[u8],
    is_first_fragment: bool,
) -> Option<Option<(u16, u16)>> {
    if !matches!(protocol, Protocol::UDP | Protocol::TCP) {
        return Some(None);
    }
    if is_first_fragment && payload.len() < 8 {
        return None;
    }
    let &[a, b, c, d, ..] = payload else { return None };
    Some(Some((u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))))
}

fn prefix<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<IpCidr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let cidr = text.parse().map_err(|error| {
        serde::de::Error::custom(format!("{text:?}: {error}; write 10.0.0.0/8 or one address"))
    })?;
    Ok(Some(cidr))
}

impl<'de> Deserialize<'de> for ProtocolMatch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = ProtocolMatch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"udp\", \"tcp\", \"icmp\" or a protocol number up to 255")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ProtocolMatch, E> {
                match text {
                    "icmp" => Ok(ProtocolMatch::Icmp),
                    "tcp" => Ok(ProtocolMatch::Number(Protocol::TCP.0)),
                    "udp" => Ok(ProtocolMatch::Number(Protocol::UDP.0)),
                    other => Err(E::invalid_value(serde::de::Unexpected::Str(other), &self)),
                }
            }

            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<ProtocolMatch, E> {
                u8::try_from(number)
                    .map(ProtocolMatch::Number)
                    .map_err(|_| E::invalid_value(serde::de::Unexpected::Signed(number), &self))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl<'de> Deserialize<'de> for PortRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = PortRange;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a port, or a range such as \"1000-2000\"")
            }

            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<PortRange, E> {
                u16::try_from(number)
                    .map(|port| PortRange(port..=port))
                    .map_err(|_| E::invalid_value(serde::de::Unexpected::Signed(number), &self))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<PortRange, E> {
                let refused = || E::invalid_value(serde::de::Unexpected::Str(text), &self);
                let (first, last) = text.split_once('-').ok_or_else(refused)?;
                let number = |part: &str| part.trim().parse::<u16>().map_err(|_| refused());
                let (first, last) = (number(first)?, number(last)?);
                if first > last {
                    return Err(E::custom(format!("{text:?}: the first port is above the last")));
                }
                Ok(PortRange(first..=last))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_wire::ipv6_extension::FragmentHeader;
    use tidegate_wire::{UdpHeader, checksum};

    use super::*;

    fn rules(text: &str) -> FilterRules {
        text.parse().unwrap()
    }

    fn packet(source: &str, destination: &str, protocol: Protocol, payload: &[u8]) -> Vec<u8> {
        match (source.parse().unwrap(), destination.parse().unwrap()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let header = Ipv4Header::new(source, destination, protocol, payload.len()).unwrap();
                let mut bytes = vec![0; 20 + payload.len()];
                header.emit(&mut bytes).unwrap().copy_from_slice(payload);
                bytes
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let header = Ipv6Header::new(source, destination, protocol, payload.len()).unwrap();
                let mut bytes = vec![0; 40 + payload.len()];
                header.emit(&mut bytes).unwrap().copy_from_slice(payload);
                bytes
            }
            _ => panic!("addresses of two families"),
        }
    }

    fn udp(source: &str, destination: &str, ports: (u16, u16)) -> Vec<u8> {
        let mut datagram = vec![0; 12];
        UdpHeader::new(ports.0, ports.1, 4).unwrap().emit(&mut datagram).unwrap();
        packet(source, destination, Protocol::UDP, &datagram)
    }

    #[test]
    fn first_match_decides_in_both_families() {
        let rules = rules(
            "default = 'deny'\n\
             [[rule]]\naction = 'deny'\nsource = '10.0.0.66'\n\
             [[rule]]\naction = 'allow'\nsource = '10.0.0.0/24'\nprotocol = 'udp'\n\
             destination-port = '50-60'\n\
             [[rule]]\naction = 'allow'\ndestination = 'fd00::/64'\nsource-port = 9\n\
             [[rule]]\naction = 'allow'\nprotocol = 'icmp'\n",
        );
        for (packet, verdict) in [
            (udp("10.0.0.1", "192.0.2.1", (9, 53)), Verdict::Pass),
            (udp("10.0.0.1", "192.0.2.1", (9, 61)), Verdict::Refuse),
            (udp("10.0.0.66", "192.0.2.1", (9, 53)), Verdict::Refuse),
            (udp("10.0.1.1", "192.0.2.1", (9, 53)), Verdict::Refuse),
            (udp("fd01::1", "fd00::1", (9, 53)), Verdict::Pass),
            (udp("fd01::1", "fd00::1", (8, 53)), Verdict::Refuse),
            (packet("10.0.0.1", "192.0.2.1", Protocol::TCP, &[0, 9, 0, 53]), Verdict::Refuse),
            (packet("10.9.0.1", "192.0.2.1", Protocol::ICMPV4, &[8, 0]), Verdict::Pass),
            (packet("fd01::1", "fd02::1", Protocol::ICMPV6, &[128, 0]), Verdict::Pass),
        ] {
            assert_eq!(rules.evaluate(&packet), verdict, "{packet:02x?}");
        }
    }

    #[test]
    fn refuses_unreadable_headers() {
        let open = rules("default = 'allow'");
        let whole = udp("10.0.0.1", "192.0.2.1", (9, 53));
        assert_eq!(open.evaluate(&whole), Verdict::Pass);
        assert_eq!(open.evaluate(&whole[..22]), Verdict::Refuse, "the ports are cut off");
        assert_eq!(open.evaluate(&whole[..12]), Verdict::Refuse);
        assert_eq!(open.evaluate(&[]), Verdict::Refuse);
        let cut = packet("fd00::1", "fd00::2", Protocol::HOP_BY_HOP, &[17, 9]);
        assert_eq!(open.evaluate(&cut), Verdict::Refuse);
    }

    #[test]
    fn later_fragments_have_no_ports() {
        let by_port =
            rules("default = 'deny'\n[[rule]]\naction = 'allow'\ndestination-port = 53\n");
        let by_protocol = rules("default = 'deny'\n[[rule]]\naction = 'allow'\nprotocol = 'udp'\n");
        let whole = udp("10.0.0.1", "192.0.2.1", (9, 53));
        let (mut header, payload) = Ipv4Header::parse(&whole).unwrap();
        header.fragment_offset_bytes = 1480;
        let mut later = whole.clone();
        header.emit(&mut later).unwrap().copy_from_slice(payload);
        let fragment =
            FragmentHeader { offset_bytes: 1480, more_fragments: false, identification: 7 };
        let mut fragment_payload = vec![0; 20];
        fragment.emit(Protocol::UDP, &mut fragment_payload).unwrap()[..4]
            .copy_from_slice(&[0, 9, 0, 53]);
        let later_v6 = packet("fd00::1", "fd00::2", Protocol::FRAGMENT, &fragment_payload);
        for later in [later, later_v6] {
            assert_eq!(by_port.evaluate(&later), Verdict::Refuse);
            assert_eq!(by_protocol.evaluate(&later), Verdict::Pass);
        }
    }

    #[test]
    fn rejects_rules_that_never_match() {
        for (text, words) in [
            ("default = 'maybe'", "allow"),
            ("", "default"),
            ("default = 'deny'\n[[rule]]\naction = 'allow'\nsuorce = '::1'", "suorce"),
            ("default = 'deny'\n[[rule]]\naction = 'allow'\nsource = '10.0.0.300'", "10.0.0.300"),
            ("default = 'deny'\n[[rule]]\naction = 'allow'\nprotocol = 'upd'", "udp"),
            ("default = 'deny'\n[[rule]]\naction = 'allow'\nprotocol = 256", "255"),
            ("default = 'deny'\n[[rule]]\naction = 'allow'\nsource-port = '9-5'", "above"),
            ("default = 'deny'\n[[rule]]\naction = 'allow'\nsource-port = 70000", "port"),
            (
                "default = 'deny'\n[[rule]]\naction = 'allow'\nprotocol = 'icmp'\nsource-port = 1",
                "rule 1 at line 2: only udp and tcp have ports",
            ),
            (
                "default = 'deny'\n\n[[rule]]\naction = 'allow'\n\n[[rule]]\n# Why.\n\
                 action = 'deny'\nprotocol = 'icmp'\ndestination-port = 7",
                "rule 2 at line 6",
            ),
            ("default = 'deny'\n[[rule]]\naction = 'perhaps'", "line 3"),
            (
                "default = 'deny'\n[[rule]]\naction = 'allow'\nsource = '::1'\ndestination = '10.0.0.1'",
                "one family",
            ),
        ] {
            let error = text.parse::<FilterRules>().expect_err(text).to_string();
            assert!(error.contains(words), "{words:?} is not in: {error}");
        }
    }

    proptest! {
        #[test]
        fn evaluates_arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..128)) {
            let _ = rules("default = 'allow'").evaluate(&bytes);
        }

        /// A prefix matches exactly by its bits.
        #[test]
        fn prefix_matches_by_its_bits(source: [u8; 4], network: [u8; 4], bits in 0..=32_u8) {
            let cidr = IpCidr::new(IpAddr::from(network), bits).unwrap();
            let rule = FilterRule {
                action: FilterAction::Allow,
                source: Some(cidr),
                destination: None,
                protocol: None,
                source_port: None,
                destination_port: None,
            };
            let rules = FilterRules::new(vec![rule], FilterAction::Deny).unwrap();
            let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
            let inside = u32::from_be_bytes(source) & mask == u32::from_be_bytes(network) & mask;
            let text = std::net::Ipv4Addr::from(source).to_string();
            let verdict = rules.evaluate(&udp(&text, "192.0.2.1", (1, 2)));
            prop_assert_eq!(verdict == Verdict::Pass, inside);
        }
    }

    /// Receivers check checksums; the filter does not.
    #[test]
    fn ignores_checksums() {
        let mut packet = udp("10.0.0.1", "192.0.2.1", (9, 53));
        packet[10] ^= checksum::Sum::of(&packet[..20]).checksum() as u8 | 1;
        assert_eq!(rules("default = 'allow'").evaluate(&packet), Verdict::Pass);
    }
}
