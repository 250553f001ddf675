//! Zones and questions generated from a seed, for tests and measurements.
//!
//! Name number `n` depends only on the seed and on `n`, so the same seed yields the same list of
//! questions.

use std::fmt;
use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr};

use domain::base::iana::Rtype;

use super::message::{CLASS_IN, rtype};
use super::name::Name;
use super::splitmix64::SplitMix64;

/// Zone generated from a seed.
///
/// # Examples
/// ```
/// use tidegate_apps::dns::synthetic::SyntheticZone;
///
/// let zone = SyntheticZone { origin: "lab.test".into(), name_count: 10, seed: 3 };
/// let mut file = Vec::new();
/// zone.write_zone(&mut file)?;
/// assert!(file.starts_with(b"$ORIGIN lab.test."));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntheticZone {
    /// Name of the zone.
    pub origin: String,
    /// Number of generated names, without the names of the zone itself (apex, servers, mail host).
    pub name_count: u64,
    /// Seed of the generator; each seed yields another zone.
    pub seed: u64,
}

/// Question for a DNS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Queried name.
    pub name: Name,
    /// Queried record type.
    pub rtype: u16,
}

impl fmt::Display for Question {
    /// Writes the name and the type, as in an input line of `dnsperf`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, Rtype::from_int(self.rtype))
    }
}

impl Question {
    /// Builds a query message in class IN. `edns_bytes` adds an OPT record that advertises this UDP
    /// payload size.
    pub fn to_message(&self, id: u16, edns_bytes: Option<u16>) -> Vec<u8> {
        let mut message = Vec::with_capacity(64);
        message.extend_from_slice(&id.to_be_bytes());
        message.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(edns_bytes.is_some())]);
        message.extend_from_slice(self.name.wire());
        message.extend_from_slice(&self.rtype.to_be_bytes());
        message.extend_from_slice(&CLASS_IN.to_be_bytes());
        if let Some(size) = edns_bytes {
            message.extend_from_slice(&[0, 0, rtype::OPT as u8]);
            message.extend_from_slice(&size.to_be_bytes());
            message.extend_from_slice(&[0; 6]);
        }
        message
    }
}

/// Kind of a generated name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NameKind {
    Address,
    BothAddresses,
    Mail,
    Text,
    Alias,
    Delegation,
    Wildcard,
    /// Name two labels below its parent, so that an empty non-terminal lies between.
    Deep,
    Service,
}

impl SyntheticZone {
    /// Writes the zone file.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn write_zone(&self, out: &mut impl Write) -> io::Result<()> {
        let origin = self.origin.trim_end_matches('.');
        writeln!(out, "$ORIGIN {origin}.\n$TTL 3600")?;
        writeln!(out, "@ SOA ns1 hostmaster 1 7200 3600 1209600 300")?;
        writeln!(out, "@ NS ns1\n@ NS ns2\n@ MX 10 mail\n@ TXT \"seed {}\"", self.seed)?;
        writeln!(out, "ns1 A 192.0.2.1\nns1 AAAA 2001:db8::1")?;
        writeln!(out, "ns2 A 192.0.2.2\nns2 AAAA 2001:db8::2\nmail A 192.0.2.3")?;
        for number in 0..self.name_count {
            self.write_name(number, out)?;
        }
        Ok(())
    }

    fn write_name(&self, number: u64, out: &mut impl Write) -> io::Result<()> {
        let mut random = self.rng(number);
        let kind = self.kind(number);
        let name = self.label(number);
        let v4 = ipv4(random.next());
        let v6 = ipv6(random.next());
        match kind {
            NameKind::Address => writeln!(out, "{name} A {v4}"),
            NameKind::BothAddresses => writeln!(out, "{name} A {v4}\n{name} AAAA {v6}"),
            NameKind::Mail => {
                writeln!(out, "{name} MX 10 mail\n{name} MX 20 mx.{name}\nmx.{name} A {v4}")
            }
            NameKind::Text => {
                let len = 20 + random.below(180) as usize;
                writeln!(out, "{name} TXT \"{number:x>len$}\" \"v={number}\"")
            }
            NameKind::Alias => {
                writeln!(out, "{name} CNAME {}", self.label(self.alias_target(number)))
            }
            NameKind::Delegation => {
                writeln!(out, "{name} NS a.ns.{name}\n{name} NS ns2")?;
                writeln!(out, "a.ns.{name} A {v4}\na.ns.{name} AAAA {v6}")
            }
            NameKind::Wildcard => writeln!(out, "*.{name} A {v4}\n*.{name} TXT \"wild {number}\""),
            NameKind::Deep => writeln!(out, "host.below.{name} A {v4}"),
            NameKind::Service => writeln!(out, "_sip._udp.{name} SRV 1 2 5060 mail"),
        }
    }

    /// Returns question number `index` of an endless series. The first `name_count` questions cover
    /// every name once, each with an answer in the zone. Later questions are random and include
    /// nonexistent names and types.
    pub fn question(&self, index: u64) -> Question {
        if index < self.name_count {
            return self.answerable_question(index);
        }
        let mut random = self.rng(index ^ 0x5eed << 32);
        let number = random.below(self.name_count.max(1));
        let label = self.label(number);
        let (text, rtype) = match random.below(12) {
            0 => (format!("no-{label}"), rtype::A),
            1 => (format!("a.b.{label}"), rtype::AAAA),
            2 => (label, 99),
            3 => (label, rtype::ANY),
            4 => (label, rtype::DS),
            5 => (label, rtype::NS),
            6 => (format!("below.{label}"), rtype::A),
            7 => (format!("*.{label}"), rtype::TXT),
            8 => (label.to_uppercase(), rtype::TXT),
            9 => (label, rtype::CNAME),
            10 => (String::new(), [rtype::SOA, rtype::NS, rtype::MX][random.below(3) as usize]),
            _ => return self.answerable_question(number),
        };
        self.question_for(&text, rtype)
    }

    /// Returns a question about name `number` for which the zone has an answer.
    fn answerable_question(&self, number: u64) -> Question {
        let label = self.label(number);
        let mut random = self.rng(number ^ 1 << 40);
        let (text, rtype) = match self.kind(number) {
            NameKind::Address | NameKind::Alias => (label, rtype::A),
            NameKind::BothAddresses => {
                (label, if random.below(2) == 0 { rtype::A } else { rtype::AAAA })
            }
            NameKind::Mail => (label, rtype::MX),
            NameKind::Text => (label, rtype::TXT),
            NameKind::Delegation => (format!("www.{label}"), rtype::A),
            NameKind::Wildcard => (format!("any{}.{label}", random.below(1000)), rtype::A),
            NameKind::Deep => (format!("host.below.{label}"), rtype::A),
            NameKind::Service => (format!("_sip._udp.{label}"), rtype::SRV),
        };
        self.question_for(&text, rtype)
    }

    fn question_for(&self, label: &str, rtype: u16) -> Question {
        let dot = if label.is_empty() { "" } else { "." };
        let text = format!("{label}{dot}{}", self.origin);
        // The generated labels are valid and short; only an invalid origin can fail.
        Question { name: Name::from_text(&text).unwrap_or_else(Name::root), rtype }
    }

    /// Writes the first `count` questions as input lines for `dnsperf`.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn write_queries(&self, count: u64, out: &mut impl Write) -> io::Result<()> {
        (0..count).try_for_each(|index| writeln!(out, "{}", self.question(index)))
    }

    fn kind(&self, number: u64) -> NameKind {
        match self.rng(number).below(100) {
            0..45 => NameKind::Address,
            45..65 => NameKind::BothAddresses,
            65..73 => NameKind::Mail,
            73..81 => NameKind::Text,
            81..89 => NameKind::Alias,
            89..93 => NameKind::Delegation,
            93..96 => NameKind::Wildcard,
            96..98 => NameKind::Deep,
            _ => NameKind::Service,
        }
    }

    /// Target of a CNAME: usually a name with a lower number, so that chains end.
    fn alias_target(&self, number: u64) -> u64 {
        self.rng(number ^ 2 << 40).below(number.max(1))
    }

    fn label(&self, number: u64) -> String {
        const WORDS: [&str; 8] =
            ["www", "host", "shop", "api", "cdn-edge", "mail-in", "x", "customer"];
        let word = WORDS[self.rng(number ^ 3 << 40).below(8) as usize];
        format!("{word}{number}")
    }

    fn rng(&self, number: u64) -> SplitMix64 {
        let mut random = SplitMix64::new(self.seed ^ number.wrapping_mul(0xd134_2543_de82_ef95));
        random.next();
        random
    }
}

/// Address from the block for benchmarks (RFC 2544).
fn ipv4(random: u64) -> Ipv4Addr {
    let [low, high, ..] = random.to_le_bytes();
    Ipv4Addr::new(198, 18, high, low)
}

/// Address from the block for documentation (RFC 3849).
fn ipv6(random: u64) -> Ipv6Addr {
    let net = (random >> 16) as u16;
    Ipv6Addr::new(0x2001, 0xdb8, net, 0, 0, 0, 0, random as u16)
}

#[cfg(test)]
mod tests {
    use super::super::{DnsConfig, DnsServer, Query, Rcode, ZoneSource};
    use super::*;
    use crate::Responder;

    fn zone() -> SyntheticZone {
        SyntheticZone { origin: "lab.test".into(), name_count: 2000, seed: 3 }
    }

    fn zone_text(zone: &SyntheticZone) -> Vec<u8> {
        let mut text = Vec::new();
        zone.write_zone(&mut text).unwrap();
        text
    }

    #[test]
    fn same_seed_makes_same_zone_and_questions() {
        assert_eq!(zone_text(&zone()), zone_text(&zone()));
        let other = SyntheticZone { seed: 4, ..zone() };
        assert_ne!(zone_text(&zone()), zone_text(&other));
        let questions = |zone: &SyntheticZone| {
            let mut lines = Vec::new();
            zone.write_queries(3000, &mut lines).unwrap();
            String::from_utf8(lines).unwrap()
        };
        assert_eq!(questions(&zone()), questions(&zone()));
        assert_ne!(questions(&zone()), questions(&other));
        let lines = questions(&zone());
        assert_eq!(lines.lines().count(), 3000);
        assert!(lines.lines().all(|line| line.contains("lab.test. ")));
    }

    #[test]
    fn first_questions_have_answers_later_questions_are_mixed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("zone");
        std::fs::write(&path, zone_text(&zone())).unwrap();
        let zones = vec![ZoneSource { origin: None, path }];
        let server = DnsServer::load(&DnsConfig { zones, ..DnsConfig::default() }).unwrap();
        assert!(server.warnings().is_empty());
        let query_range = |range: std::ops::Range<u64>| {
            let mut server = server.share();
            for index in range {
                let message = zone().question(index).to_message(1, Some(1232));
                assert!(Query::parse(&message).is_ok());
                let from = "192.0.2.1:4000".parse().unwrap();
                server.respond(&message, from, &mut [0; 4096]).unwrap();
            }
            server.counters().clone()
        };
        let first = query_range(0..2000);
        assert_eq!(first.replies_with(Rcode::NoError), 2000);
        let later = query_range(2000..6000);
        assert!(later.replies_with(Rcode::NxDomain) > 200);
        assert!(later.replies_with(Rcode::NoError) > 2000);
        assert_eq!(later.replies(), 4000);
    }
}
