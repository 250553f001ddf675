//! What the zones have to say to a question: the algorithm of RFC 1034
//! section 4.3.2 with the wildcards of RFC 4592, run once for every name and
//! type while the server starts.

use std::collections::HashMap;

use super::error::DnsError;
use super::message::{Rcode, rtype};
use super::name;
use super::zone::{RecordSet, Zone, ZoneNode};

/// How many aliases are followed for one question.
const MAX_ALIASES: usize = 16;

/// All zones of a server.
pub(super) struct Catalog {
    pub zones: Vec<Zone>,
    /// From the tree key of an apex to the index of its zone.
    by_apex: HashMap<Box<[u8]>, usize>,
}

/// What a name is to the zones.
#[derive(Clone, Copy)]
pub(super) enum Found<'a> {
    /// In none of our zones.
    Foreign,
    /// A name with records, or an empty non-terminal.
    Node(&'a Zone, &'a ZoneNode),
    /// No such name, but this wildcard stands for it.
    Wildcard(&'a Zone, &'a ZoneNode),
    /// At or under this delegation.
    Cut(&'a Zone, &'a ZoneNode),
    /// Under this DNAME record.
    Dname,
    /// No such name in the zone.
    Missing(&'a Zone),
}

/// The owner of a record set in an answer.
#[derive(Clone, Copy)]
pub(super) enum Owner<'a> {
    /// The name that was asked for, whatever it is.
    Question,
    /// This name.
    Name(&'a [u8]),
}

/// A record set in an answer.
#[derive(Clone, Copy)]
pub(super) struct Shown<'a> {
    pub owner: Owner<'a>,
    pub set: &'a RecordSet,
    /// The TTL to send: not always that of the set.
    pub ttl: u32,
}

impl<'a> Shown<'a> {
    pub(super) fn new(owner: Owner<'a>, set: &'a RecordSet) -> Self {
        Shown { owner, set, ttl: set.ttl }
    }
}

/// An answer before it is written down.
pub(super) struct Answer<'a> {
    pub rcode: Rcode,
    pub authoritative: bool,
    pub answer: Vec<Shown<'a>>,
    pub authority: Vec<Shown<'a>>,
    /// With each set, whether the answer is of no use without it: glue inside
    /// the delegated zone (RFC 9471).
    pub additional: Vec<(Shown<'a>, bool)>,
}

impl Answer<'_> {
    fn new() -> Self {
        Answer {
            rcode: Rcode::NoError,
            authoritative: true,
            answer: Vec::new(),
            authority: Vec::new(),
            additional: Vec::new(),
        }
    }
}

impl Catalog {
    /// Puts zones together.
    ///
    /// # Errors
    /// When two of them are the same zone.
    pub(super) fn new(zones: Vec<Zone>) -> Result<Self, DnsError> {
        let mut by_apex: HashMap<Box<[u8]>, usize> = HashMap::with_capacity(zones.len());
        for (index, zone) in zones.iter().enumerate() {
            if let Some(first) = by_apex.insert(zone.apex_key.clone(), index) {
                return Err(DnsError::Twice {
                    origin: zone.apex.to_string(),
                    first: zones[first].path.clone(),
                    second: zone.path.clone(),
                });
            }
        }
        Ok(Catalog { zones, by_apex })
    }

    /// The zone that a name belongs to: the one with the longest apex.
    pub(super) fn zone_of(&self, key: &[u8]) -> Option<&Zone> {
        let longest = prefixes(key).filter_map(|prefix| self.by_apex.get(prefix)).last();
        longest.map(|&index| &self.zones[index])
    }

    /// The zone above the apex of `zone`, if we have it.
    pub(super) fn zone_above(&self, zone: &Zone) -> Option<&Zone> {
        let apexes = prefixes(&zone.apex_key).filter(|prefix| prefix.len() < zone.apex_key.len());
        apexes.filter_map(|prefix| self.by_apex.get(prefix)).last().map(|&index| &self.zones[index])
    }

    /// What this name is to the zones.
    pub(super) fn find(&self, wire: &[u8]) -> Found<'_> {
        let key = name::tree_key(wire);
        match self.zone_of(&key) {
            Some(zone) => find_in(zone, &key),
            None => Found::Foreign,
        }
    }

    /// Answers a question of this type for a name that was found.
    pub(super) fn resolve<'a>(&'a self, found: Found<'a>, rtype: u16) -> Answer<'a> {
        let mut answer = Answer::new();
        let mut found = found;
        let mut owner = Owner::Question;
        let question = match found {
            Found::Node(_, node) => Some(node.name.wire()),
            _ => None,
        };
        loop {
            match found {
                Found::Foreign | Found::Dname => break,
                Found::Missing(zone) => {
                    answer.rcode = Rcode::NxDomain;
                    add_soa(&mut answer, zone);
                    break;
                }
                Found::Cut(zone, node) => {
                    self.refer(&mut answer, zone, node);
                    break;
                }
                Found::Node(zone, node) | Found::Wildcard(zone, node) => {
                    if let Some(set) = node.set(rtype) {
                        answer.answer.push(Shown::new(owner, set));
                        self.add_addresses(&mut answer, set);
                        break;
                    }
                    let Some(alias) = node.set(rtype::CNAME) else {
                        add_soa(&mut answer, zone);
                        break;
                    };
                    answer.answer.push(Shown::new(owner, alias));
                    let target: &[u8] = &alias.data[0];
                    let is_loop = answer.answer.iter().any(|shown| match shown.owner {
                        Owner::Question => question.is_some_and(|name| is_same(name, target)),
                        Owner::Name(name) => is_same(name, target),
                    });
                    if is_loop || answer.answer.len() > MAX_ALIASES {
                        break;
                    }
                    owner = Owner::Name(target);
                    found = self.find_for(target, rtype);
                }
            }
        }
        answer
    }

    /// The types for which this name, or the end of its chain of aliases, has
    /// an answer of its own.
    pub(super) fn types_of<'a>(&'a self, found: Found<'a>) -> Vec<u16> {
        let mut types = Vec::new();
        let mut found = found;
        for _ in 0..=MAX_ALIASES {
            match found {
                Found::Node(_, node) | Found::Wildcard(_, node) => {
                    types.extend(node.sets.iter().map(|set| set.rtype));
                    let Some(alias) = node.set(rtype::CNAME) else { break };
                    found = self.find(&alias.data[0]);
                }
                Found::Cut(..) => {
                    types.push(rtype::DS);
                    break;
                }
                _ => break,
            }
        }
        types.sort_unstable();
        types.dedup();
        types
    }

    /// Like [`Catalog::find`], but the DS records of a delegation are data of
    /// the zone above it (RFC 4035 section 3.1.4.1).
    fn find_for<'a>(&'a self, wire: &[u8], rtype: u16) -> Found<'a> {
        let found = self.find(wire);
        if rtype != rtype::DS {
            return found;
        }
        match found {
            Found::Cut(zone, node) if is_same(node.name.wire(), wire) => Found::Node(zone, node),
            Found::Node(zone, node) if zone.is_apex(node) => {
                self.found_above(zone).unwrap_or(found)
            }
            _ => found,
        }
    }

    /// The apex of a zone as a name of the zone above it.
    pub(super) fn found_above<'a>(&'a self, zone: &Zone) -> Option<Found<'a>> {
        let above = self.zone_above(zone)?;
        let node = above.node(&zone.apex_key)?;
        above.is_cut(node).then_some(Found::Node(above, node))
    }

    /// Says who serves a delegated zone (RFC 1034 section 4.3.2 step 3b).
    fn refer<'a>(&'a self, answer: &mut Answer<'a>, zone: &'a Zone, cut: &'a ZoneNode) {
        let Some(servers) = cut.set(rtype::NS) else { return };
        // The AA bit speaks of the first name in the answer (RFC 1035 section
        // 4.1.1), so an alias of ours keeps it.
        answer.authoritative = !answer.answer.is_empty();
        answer.authority.push(Shown::new(Owner::Name(cut.name.wire()), servers));
        let mut optional = Vec::new();
        for target in &servers.data {
            let key = name::tree_key(target);
            let is_inside = key.starts_with(&cut.key);
            // Glue stands in the zone file of the zone that delegates; other
            // addresses come from where they belong.
            let glue = zone.node(&key).or_else(|| match self.find(target) {
                Found::Node(_, node) => Some(node),
                _ => None,
            });
            for set in glue.iter().flat_map(|node| addresses(node)) {
                let shown = Shown::new(Owner::Name(target), set);
                if is_inside {
                    answer.additional.push((shown, true));
                } else {
                    optional.push((shown, false));
                }
            }
        }
        answer.additional.append(&mut optional);
    }

    /// Adds the addresses of the hosts that a record set names.
    fn add_addresses<'a>(&'a self, answer: &mut Answer<'a>, set: &'a RecordSet) {
        for data in &set.data {
            let target = match set.rtype {
                rtype::NS => Some(&data[..]),
                rtype::MX => data.get(2..),
                rtype::SRV => data.get(6..),
                _ => None,
            };
            let Some(target) = target.filter(|wire| name::wire_len(wire) == Some(wire.len()))
            else {
                continue;
            };
            let key = name::tree_key(target);
            let node = match self.find(target) {
                Found::Node(_, node) => node,
                // The glue of a delegation names its hosts too.
                Found::Cut(zone, _) => match zone.node(&key) {
                    Some(node) => node,
                    None => continue,
                },
                _ => continue,
            };
            for set in addresses(node) {
                let is_new =
                    answer.additional.iter().all(|(shown, _)| !std::ptr::eq(shown.set, set));
                if is_new {
                    answer.additional.push((Shown::new(Owner::Name(target), set), false));
                }
            }
        }
    }
}

/// What a name is to the zone that it belongs to.
fn find_in<'a>(zone: &'a Zone, key: &[u8]) -> Found<'a> {
    let Some(mut encloser) = zone.nodes.first() else { return Found::Foreign };
    for prefix in prefixes(key).filter(|prefix| prefix.len() > zone.apex_key.len()) {
        if encloser.set(rtype::DNAME).is_some() {
            return Found::Dname;
        }
        let Some(node) = zone.node(prefix) else {
            // RFC 4592 section 4.3.3: the wildcard right under the closest
            // name that exists stands for all that does not exist.
            let wildcard = [&encloser.key, &b"\x01*"[..]].concat();
            return match zone.node(&wildcard) {
                Some(node) => Found::Wildcard(zone, node),
                None => Found::Missing(zone),
            };
        };
        if zone.is_cut(node) {
            return Found::Cut(zone, node);
        }
        encloser = node;
    }
    Found::Node(zone, encloser)
}

/// All prefixes of a tree key that are keys: the root's first.
fn prefixes(key: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut next = Some(0);
    std::iter::from_fn(move || {
        let end = next?;
        next = key.get(end).map(|&len| end + 1 + usize::from(len));
        key.get(..end)
    })
}

fn addresses(node: &ZoneNode) -> impl Iterator<Item = &RecordSet> {
    node.sets.iter().filter(|set| matches!(set.rtype, rtype::A | rtype::AAAA))
}

fn is_same(one: &[u8], other: &[u8]) -> bool {
    one.eq_ignore_ascii_case(other)
}

/// Says that there is no such data, and for how long this holds (RFC 2308
/// section 3).
fn add_soa<'a>(answer: &mut Answer<'a>, zone: &'a Zone) {
    let Some(soa) = zone.soa() else { return };
    let shown = Shown::new(Owner::Name(zone.apex.wire()), soa);
    answer.authority.push(Shown { ttl: soa.ttl.min(minimum_of(&soa.data[0])), ..shown });
}

/// The last field of an SOA record: how long a negative answer is good.
fn minimum_of(data: &[u8]) -> u32 {
    data.last_chunk::<4>().map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

/// The answer of a zone to a name or type that it does not have.
pub(super) fn negative(zone: &Zone, rcode: Rcode) -> Answer<'_> {
    let mut answer = Answer::new();
    answer.rcode = rcode;
    add_soa(&mut answer, zone);
    answer
}
