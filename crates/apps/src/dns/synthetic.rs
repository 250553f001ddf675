//! Zones and questions made from a seed, for tests and measurements.
//!
//! What name number `n` is like depends only on the seed and on `n`, so a
//! list of questions needs nothing but the same seed.

use std::fmt;
use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr};

use domain::base::iana::Rtype;

use super::message::{CLASS_IN, rtype};
use super::name::Name;
use super::random::Random;

/// A zone made from a seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntheticZone {
    /// The name of the zone.
    pub origin: String,
    /// How many names, those of the zone itself not counted.
    pub names: u64,
    /// Other seeds make other zones.
    pub seed: u64,
}

/// A question for a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The name that is asked for.
    pub name: Name,
    /// The type that is asked for.
    pub rtype: u16,
}

impl fmt::Display for Question {
    /// A line as `dnsperf` reads it: the name and the type.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, Rtype::from_int(self.rtype))
    }
}

impl Question {
    /// The question as a message, with an EDNS record if the size of the
    /// largest answer is given.
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

/// What a name is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Address,
    BothAddresses,
    Mail,
    Text,
    Alias,
    Delegation,
    Wildcard,
    /// A name two labels down, so that there is an empty one above it.
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
        for number in 0..self.names {
            self.write_name(number, out)?;
        }
        Ok(())
    }

    fn write_name(&self, number: u64, out: &mut impl Write) -> io::Result<()> {
        let mut random = self.random(number);
        let kind = self.kind(number);
        let name = self.label(number);
        let v4 = ipv4(random.next());
        let v6 = ipv6(random.next());
        match kind {
            Kind::Address => writeln!(out, "{name} A {v4}"),
            Kind::BothAddresses => writeln!(out, "{name} A {v4}\n{name} AAAA {v6}"),
            Kind::Mail => {
                writeln!(out, "{name} MX 10 mail\n{name} MX 20 mx.{name}\nmx.{name} A {v4}")
            }
            Kind::Text => {
                let len = 20 + random.below(180) as usize;
                writeln!(out, "{name} TXT \"{number:x>len$}\" \"v={number}\"")
            }
            Kind::Alias => writeln!(out, "{name} CNAME {}", self.label(self.alias_of(number))),
            Kind::Delegation => {
                writeln!(out, "{name} NS a.ns.{name}\n{name} NS ns2")?;
                writeln!(out, "a.ns.{name} A {v4}\na.ns.{name} AAAA {v6}")
            }
            Kind::Wildcard => writeln!(out, "*.{name} A {v4}\n*.{name} TXT \"wild {number}\""),
            Kind::Deep => writeln!(out, "host.below.{name} A {v4}"),
            Kind::Service => writeln!(out, "_sip._udp.{name} SRV 1 2 5060 mail"),
        }
    }

    /// Question number `index` of an endless series. The first `names`
    /// questions ask once for something at every name; later ones ask at
    /// random, also for what does not exist.
    pub fn question(&self, index: u64) -> Question {
        if index < self.names {
            return self.question_at(index);
        }
        let mut random = self.random(index ^ 0x5eed << 32);
        let number = random.below(self.names.max(1));
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
            _ => return self.question_at(number),
        };
        self.make(&text, rtype)
    }

    /// A question that the zone has an answer for.
    fn question_at(&self, number: u64) -> Question {
        let label = self.label(number);
        let mut random = self.random(number ^ 1 << 40);
        let (text, rtype) = match self.kind(number) {
            Kind::Address | Kind::Alias => (label, rtype::A),
            Kind::BothAddresses => {
                (label, if random.below(2) == 0 { rtype::A } else { rtype::AAAA })
            }
            Kind::Mail => (label, rtype::MX),
            Kind::Text => (label, rtype::TXT),
            Kind::Delegation => (format!("www.{label}"), rtype::A),
            Kind::Wildcard => (format!("any{}.{label}", random.below(1000)), rtype::A),
            Kind::Deep => (format!("host.below.{label}"), rtype::A),
            Kind::Service => (format!("_sip._udp.{label}"), rtype::SRV),
        };
        self.make(&text, rtype)
    }

    fn make(&self, label: &str, rtype: u16) -> Question {
        let dot = if label.is_empty() { "" } else { "." };
        let text = format!("{label}{dot}{}", self.origin);
        // The labels are ours and short; only an odd origin can be refused.
        Question { name: Name::from_text(&text).unwrap_or_else(Name::root), rtype }
    }

    /// Writes the first `count` questions as `dnsperf` reads them.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn write_queries(&self, count: u64, out: &mut impl Write) -> io::Result<()> {
        (0..count).try_for_each(|index| writeln!(out, "{}", self.question(index)))
    }

    fn kind(&self, number: u64) -> Kind {
        match self.random(number).below(100) {
            0..45 => Kind::Address,
            45..65 => Kind::BothAddresses,
            65..73 => Kind::Mail,
            73..81 => Kind::Text,
            81..89 => Kind::Alias,
            89..93 => Kind::Delegation,
            93..96 => Kind::Wildcard,
            96..98 => Kind::Deep,
            _ => Kind::Service,
        }
    }

    /// What an alias stands for: usually a lower number, so that chains end.
    fn alias_of(&self, number: u64) -> u64 {
        self.random(number ^ 2 << 40).below(number.max(1))
    }

    fn label(&self, number: u64) -> String {
        const WORDS: [&str; 8] =
            ["www", "host", "shop", "api", "cdn-edge", "mail-in", "x", "customer"];
        let word = WORDS[self.random(number ^ 3 << 40).below(8) as usize];
        format!("{word}{number}")
    }

    fn random(&self, number: u64) -> Random {
        let mut random = Random::new(self.seed ^ number.wrapping_mul(0xd134_2543_de82_ef95));
        random.next();
        random
    }
}

/// An address from the block for benchmarks (RFC 2544).
fn ipv4(random: u64) -> Ipv4Addr {
    let [low, high, ..] = random.to_le_bytes();
    Ipv4Addr::new(198, 18, high, low)
}

/// An address from the block for documentation (RFC 3849).
fn ipv6(random: u64) -> Ipv6Addr {
    let net = (random >> 16) as u16;
    Ipv6Addr::new(0x2001, 0xdb8, net, 0, 0, 0, 0, random as u16)
}

#[cfg(test)]
mod tests {
    use super::super::{DnsConfig, Query, Rcode, Server, ZoneSource};
    use super::*;
    use crate::Responder;

    fn zone() -> SyntheticZone {
        SyntheticZone { origin: "lab.test".into(), names: 2000, seed: 3 }
    }

    fn text(zone: &SyntheticZone) -> Vec<u8> {
        let mut text = Vec::new();
        zone.write_zone(&mut text).unwrap();
        text
    }

    #[test]
    fn the_same_seed_makes_the_same_zone_and_questions() {
        assert_eq!(text(&zone()), text(&zone()));
        let other = SyntheticZone { seed: 4, ..zone() };
        assert_ne!(text(&zone()), text(&other));
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
    fn the_first_questions_have_answers_and_later_ones_are_mixed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("zone");
        std::fs::write(&path, text(&zone())).unwrap();
        let zones = vec![ZoneSource { origin: None, path }];
        let server = Server::load(&DnsConfig { zones, ..DnsConfig::default() }).unwrap();
        assert!(server.warnings().is_empty());
        let ask = |range: std::ops::Range<u64>| {
            let mut server = server.share();
            for index in range {
                let message = zone().question(index).to_message(1, Some(1232));
                assert!(Query::parse(&message).is_ok());
                let from = "192.0.2.1:4000".parse().unwrap();
                server.respond(&message, from, &mut [0; 4096]).unwrap();
            }
            server.counters().clone()
        };
        let first = ask(0..2000);
        assert_eq!(first.answers_with(Rcode::NoError), 2000);
        let later = ask(2000..6000);
        assert!(later.answers_with(Rcode::NxDomain) > 200);
        assert!(later.answers_with(Rcode::NoError) > 2000);
        assert_eq!(later.answers(), 4000);
    }
}
