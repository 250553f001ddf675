//! The rules of a packet screen.
//!
//! A file of TOML; the first rule that matches decides:
//!
//! ```
//! let rules: tidegate_apps::screen::Rules = r#"
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
//! # Ok::<(), tidegate_apps::screen::RulesError>(())
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

/// More rules than this are a mistake: each packet is held against all.
const RULES_MAX: usize = 10_000;

/// What a rule says about the packets that it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// They pass.
    Allow,
    /// They do not; nobody is told.
    Deny,
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It passes.
    Pass,
    /// It does not.
    Refuse,
}

/// Which protocols a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolMatch {
    /// ICMP of either family.
    Icmp,
    /// This one.
    Number(u8),
}

/// A range of ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ports(pub RangeInclusive<u16>);

/// One rule. What it does not name, it does not ask for.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rule {
    /// What to do.
    pub action: Action,
    /// Where the packet comes from.
    #[serde(default, deserialize_with = "prefix")]
    pub source: Option<IpCidr>,
    /// Where it goes to.
    #[serde(default, deserialize_with = "prefix")]
    pub destination: Option<IpCidr>,
    /// What it carries.
    #[serde(default)]
    pub protocol: Option<ProtocolMatch>,
    /// The source port of UDP or TCP.
    #[serde(default)]
    pub source_port: Option<Ports>,
    /// The destination port of UDP or TCP.
    #[serde(default)]
    pub destination_port: Option<Ports>,
}

/// The rules of a screen, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    rules: Vec<Rule>,
    default: Action,
}

/// Why rules are refused.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// The file is no TOML, or has something in it that is unknown.
    #[error("{0}")]
    Syntax(#[from] toml::de::Error),
    /// A rule can never match.
    #[error("rule {number}{}: {problem}", line.map_or_else(String::new, |line| format!(" at line {line}")))]
    Rule {
        /// Which one, from 1.
        number: usize,
        /// The line of the file that it begins at, from 1; none without a file.
        line: Option<usize>,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// There are too many.
    #[error("{0} rules: at most {RULES_MAX}; join prefixes and port ranges")]
    TooMany(usize),
}

impl Rules {
    /// Rules without a file.
    ///
    /// # Errors
    /// When one of them can never match, or there are too many.
    pub fn new(rules: Vec<Rule>, default: Action) -> Result<Self, RulesError> {
        if rules.len() > RULES_MAX {
            return Err(RulesError::TooMany(rules.len()));
        }
        for (at, rule) in rules.iter().enumerate() {
            rule.check().map_err(|problem| RulesError::Rule {
                number: at + 1,
                line: None,
                problem,
            })?;
        }
        Ok(Self { rules, default })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there are none, so that the default decides alone.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// What becomes of the packet that begins with these bytes. One whose
    /// headers cannot be read to their end does not pass, whatever the rules:
    /// they would be held against something else than its receiver sees.
    pub fn judge(&self, packet: &[u8]) -> Verdict {
        let Some(facts) = Facts::of(packet) else { return Verdict::Refuse };
        let first = self.rules.iter().find(|rule| rule.matches(&facts));
        match first.map_or(self.default, |rule| rule.action) {
            Action::Allow => Verdict::Pass,
            Action::Deny => Verdict::Refuse,
        }
    }
}

impl FromStr for Rules {
    type Err = RulesError;

    fn from_str(text: &str) -> Result<Self, RulesError> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct File {
            default: Action,
            #[serde(default)]
            rule: Vec<Spanned<Rule>>,
        }
        let file: File = toml::from_str(text)?;
        let starts: Vec<usize> = file.rule.iter().map(|rule| rule.span().start).collect();
        let rules = file.rule.into_iter().map(Spanned::into_inner).collect();
        Self::new(rules, file.default).map_err(|error| match error {
            RulesError::Rule { number, problem, .. } => {
                let before = starts.get(number - 1).and_then(|&start| text.get(..start));
                let line = before.map(|before| before.matches('\n').count() + 1);
                RulesError::Rule { number, line, problem }
            }
            other => other,
        })
    }
}

impl Rule {
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
                "no packet goes from {source} to {destination}: give both in one family"
            ));
        }
        Ok(())
    }

    fn matches(&self, facts: &Facts) -> bool {
        let inside = |prefix: Option<IpCidr>, address| prefix.is_none_or(|p| p.contains(address));
        inside(self.source, facts.source)
            && inside(self.destination, facts.destination)
            && self.protocol.is_none_or(|protocol| protocol.is(facts.protocol))
            && self.ports_match(facts)
    }

    fn ports_match(&self, facts: &Facts) -> bool {
        if self.source_port.is_none() && self.destination_port.is_none() {
            return true;
        }
        let Some((source, destination)) = facts.ports else { return false };
        let inside = |ports: &Option<Ports>, port| {
            ports.as_ref().is_none_or(|ports| ports.0.contains(&port))
        };
        inside(&self.source_port, source) && inside(&self.destination_port, destination)
    }
}

impl ProtocolMatch {
    fn is(self, protocol: Protocol) -> bool {
        match self {
            Self::Icmp => matches!(protocol, Protocol::ICMPV4 | Protocol::ICMPV6),
            Self::Number(number) => protocol.0 == number,
        }
    }
}

/// What rules ask about a packet.
struct Facts {
    source: IpAddr,
    destination: IpAddr,
    protocol: Protocol,
    /// Those of UDP and TCP; later fragments have none.
    ports: Option<(u16, u16)>,
}

impl Facts {
    fn of(packet: &[u8]) -> Option<Self> {
        if packet.first()? >> 4 == 4 {
            let (header, payload) = Ipv4Header::parse_quoted(packet).ok()?;
            let ports = match header.fragment_offset_bytes {
                0 => ports(header.protocol, payload, header.more_fragments)?,
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
        let (mut later, mut more) = (false, false);
        for extension in &mut walk {
            if let Extension::Fragment(fragment) = extension.ok()? {
                (later, more) = (fragment.offset_bytes != 0, fragment.more_fragments);
                if later {
                    break;
                }
            }
        }
        let rest = walk.remainder();
        let ports = if later { None } else { ports(rest.protocol, rest.payload, more)? };
        Some(Self {
            source: header.source.into(),
            destination: header.destination.into(),
            protocol: rest.protocol,
            ports,
        })
    }
}

/// The ports, if the protocol has them; `None` when they are cut off. A first
/// fragment that ends before the rest of the header hides it (RFC 1858).
fn ports(protocol: Protocol, payload: &[u8], fragment: bool) -> Option<Option<(u16, u16)>> {
    if !matches!(protocol, Protocol::UDP | Protocol::TCP) {
        return Some(None);
    }
    if fragment && payload.len() < 8 {
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

impl<'de> Deserialize<'de> for Ports {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Ports;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a port, or a range as \"1000-2000\"")
            }

            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Ports, E> {
                u16::try_from(number)
                    .map(|port| Ports(port..=port))
                    .map_err(|_| E::invalid_value(serde::de::Unexpected::Signed(number), &self))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Ports, E> {
                let refused = || E::invalid_value(serde::de::Unexpected::Str(text), &self);
                let (first, last) = text.split_once('-').ok_or_else(refused)?;
                let number = |part: &str| part.trim().parse::<u16>().map_err(|_| refused());
                let (first, last) = (number(first)?, number(last)?);
                if first > last {
                    return Err(E::custom(format!("{text:?}: the first port is above the last")));
                }
                Ok(Ports(first..=last))
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

    fn rules(text: &str) -> Rules {
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
    fn the_first_match_decides_in_both_families() {
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
            assert_eq!(rules.judge(&packet), verdict, "{packet:02x?}");
        }
    }

    #[test]
    fn headers_that_cannot_be_read_do_not_pass() {
        let open = rules("default = 'allow'");
        let whole = udp("10.0.0.1", "192.0.2.1", (9, 53));
        assert_eq!(open.judge(&whole), Verdict::Pass);
        assert_eq!(open.judge(&whole[..22]), Verdict::Refuse, "the ports are cut off");
        assert_eq!(open.judge(&whole[..12]), Verdict::Refuse);
        assert_eq!(open.judge(&[]), Verdict::Refuse);
        let cut = packet("fd00::1", "fd00::2", Protocol::HOP_BY_HOP, &[17, 9]);
        assert_eq!(open.judge(&cut), Verdict::Refuse);
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
        let mut behind = vec![0; 20];
        fragment.emit(Protocol::UDP, &mut behind).unwrap()[..4].copy_from_slice(&[0, 9, 0, 53]);
        let later_v6 = packet("fd00::1", "fd00::2", Protocol::FRAGMENT, &behind);
        for later in [later, later_v6] {
            assert_eq!(by_port.judge(&later), Verdict::Refuse);
            assert_eq!(by_protocol.judge(&later), Verdict::Pass);
        }
    }

    #[test]
    fn what_can_never_match_is_refused_with_its_number() {
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
            let error = text.parse::<Rules>().expect_err(text).to_string();
            assert!(error.contains(words), "{words:?} is not in: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_get_a_verdict(bytes in prop::collection::vec(any::<u8>(), 0..128)) {
            let _ = rules("default = 'allow'").judge(&bytes);
        }

        /// A prefix decides exactly by its bits.
        #[test]
        fn a_prefix_is_its_bits(source: [u8; 4], network: [u8; 4], bits in 0..=32_u8) {
            let cidr = IpCidr::new(IpAddr::from(network), bits).unwrap();
            let rule = Rule {
                action: Action::Allow,
                source: Some(cidr),
                destination: None,
                protocol: None,
                source_port: None,
                destination_port: None,
            };
            let rules = Rules::new(vec![rule], Action::Deny).unwrap();
            let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
            let inside = u32::from_be_bytes(source) & mask == u32::from_be_bytes(network) & mask;
            let text = std::net::Ipv4Addr::from(source).to_string();
            let verdict = rules.judge(&udp(&text, "192.0.2.1", (1, 2)));
            prop_assert_eq!(verdict == Verdict::Pass, inside);
        }
    }

    /// Checksums are not the screen's business: receivers check them.
    #[test]
    fn a_wrong_checksum_is_not_judged() {
        let mut packet = udp("10.0.0.1", "192.0.2.1", (9, 53));
        packet[10] ^= checksum::Sum::of(&packet[..20]).checksum() as u8 | 1;
        assert_eq!(rules("default = 'allow'").judge(&packet), Verdict::Pass);
    }
}
