//! Resolves questions against the zones: the algorithm of RFC 1034 section 4.3.2 with the
//! wildcards of RFC 4592. The server runs it once for every name and type at startup.

use std::collections::HashMap;

use super::error::DnsError;
use super::message::{Rcode, rtype};
use super::name;
use super::zone::{RecordSet, Zone, ZoneNode};

/// Maximum number of CNAME records followed for one question.
const MAX_ALIASES: usize = 16;

/// All zones of a server.
pub(super) struct Catalog {
    pub zones: Vec<Zone>,
    /// Tree key of an apex to the index of its zone.
    by_apex: HashMap<Box<[u8]>, usize>,
}

/// Result of a name lookup in the zones.
#[derive(Clone, Copy)]
pub(super) enum NameMatch<'a> {
    /// In none of the served zones.
    NotAuthoritative,
    /// A name with records, or an empty non-terminal.
    Node(&'a Zone, &'a ZoneNode),
    /// No such name, but this wildcard matches.
    Wildcard(&'a Zone, &'a ZoneNode),
    /// At or below this delegation.
    ZoneCut(&'a Zone, &'a ZoneNode),
    /// Below a DNAME record.
    BelowDname,
    /// No such name in the zone.
    NoSuchName(&'a Zone),
}

/// The owner of a record set in an answer.
#[derive(Clone, Copy)]
pub(super) enum OwnerName<'a> {
    /// The queried name (QNAME), in whatever form the query has it.
    Qname,
    /// This name, in wire format.
    Name(&'a [u8]),
}

/// Reference to a record set in a section of an answer.
#[derive(Clone, Copy)]
pub(super) struct RecordSetRef<'a> {
    pub owner: OwnerName<'a>,
    pub set: &'a RecordSet,
    /// TTL to send, in seconds; may differ from the TTL of the set.
    pub ttl: u32,
}

impl<'a> RecordSetRef<'a> {
    pub(super) fn new(owner: OwnerName<'a>, set: &'a RecordSet) -> Self {
        RecordSetRef { owner, set, ttl: set.ttl }
    }
}

/// Answer to a question, before it is encoded.
pub(super) struct Answer<'a> {
    pub rcode: Rcode,
    pub authoritative: bool,
    pub answer: Vec<RecordSetRef<'a>>,
    pub authority: Vec<RecordSetRef<'a>>,
    /// Record sets, each with a flag: true when the answer is of no use without the set, as for
    /// glue inside the delegated zone (RFC 9471).
    pub additional: Vec<(RecordSetRef<'a>, bool)>,
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
    /// Indexes zones by apex.
    ///
    /// # Errors
    /// When two zones have the same apex.
    pub(super) fn new(zones: Vec<Zone>) -> Result<Self, DnsError> {
        let mut by_apex: HashMap<Box<[u8]>, usize> = HashMap::with_capacity(zones.len());
        for (index, zone) in zones.iter().enumerate() {
            if let Some(first) = by_apex.insert(zone.apex_key.clone(), index) {
                return Err(DnsError::DuplicateZone {
                    origin: zone.apex.to_string(),
                    first: zones[first].path.clone(),
                    second: zone.path.clone(),
                });
            }
        }
        Ok(Catalog { zones, by_apex })
    }

    /// Returns the zone that a name belongs to: the zone with the longest matching apex.
    pub(super) fn zone_of(&self, key: &[u8]) -> Option<&Zone> {
        let longest = prefixes(key).filter_map(|prefix| self.by_apex.get(prefix)).last();
        longest.map(|&index| &self.zones[index])
    }

    /// Returns the zone above the apex of `zone`, if this server has that zone.
    pub(super) fn parent_zone(&self, zone: &Zone) -> Option<&Zone> {
        let apexes = prefixes(&zone.apex_key).filter(|prefix| prefix.len() < zone.apex_key.len());
        apexes.filter_map(|prefix| self.by_apex.get(prefix)).last().map(|&index| &self.zones[index])
    }

    /// Looks up a name in the zones.
    pub(super) fn find(&self, wire: &[u8]) -> NameMatch<'_> {
        let key = name::tree_key(wire);
        match self.zone_of(&key) {
            Some(zone) => find_in_zone(zone, &key),
            None => NameMatch::NotAuthoritative,
        }
    }

    /// Answers a question of type `rtype` for a name that was looked up.
    pub(super) fn resolve<'a>(&'a self, found: NameMatch<'a>, rtype: u16) -> Answer<'a> {
        let mut answer = Answer::new();
        let mut found = found;
        let mut owner = OwnerName::Qname;
        let question = match found {
            NameMatch::Node(_, node) => Some(node.name.wire()),
            _ => None,
        };
        loop {
            match found {
                NameMatch::NotAuthoritative | NameMatch::BelowDname => break,
                NameMatch::NoSuchName(zone) => {
                    answer.rcode = Rcode::NxDomain;
                    add_soa(&mut answer, zone);
                    break;
                }
                NameMatch::ZoneCut(zone, node) => {
                    self.add_referral(&mut answer, zone, node);
                    break;
                }
                NameMatch::Node(zone, node) | NameMatch::Wildcard(zone, node) => {
                    if let Some(set) = node.set(rtype) {
                        answer.answer.push(RecordSetRef::new(owner, set));
                        self.add_additional_addresses(&mut answer, set);
                        break;
                    }
                    let Some(alias) = node.set(rtype::CNAME) else {
                        add_soa(&mut answer, zone);
                        break;
                    };
                    answer.answer.push(RecordSetRef::new(owner, alias));
                    let target: &[u8] = &alias.data[0];
                    let is_loop = answer.answer.iter().any(|set_ref| match set_ref.owner {
                        OwnerName::Qname => question.is_some_and(|name| eq_names(name, target)),
                        OwnerName::Name(name) => eq_names(name, target),
                    });
                    if is_loop || answer.answer.len() > MAX_ALIASES {
                        break;
                    }
                    owner = OwnerName::Name(target);
                    found = self.find_for_type(target, rtype);
                }
            }
        }
        answer
    }

    /// Returns the types with an answer of their own at this name or at the names of its CNAME
    /// chain.
    pub(super) fn types_of<'a>(&'a self, found: NameMatch<'a>) -> Vec<u16> {
        let mut types = Vec::new();
        let mut found = found;
        for _ in 0..=MAX_ALIASES {
            match found {
                NameMatch::Node(_, node) | NameMatch::Wildcard(_, node) => {
                    types.extend(node.sets.iter().map(|set| set.rtype));
                    let Some(alias) = node.set(rtype::CNAME) else { break };
                    found = self.find(&alias.data[0]);
                }
                NameMatch::ZoneCut(..) => {
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

    /// As [`Catalog::find`], except that the DS records of a delegation are data of the parent zone
    /// (RFC 4035 section 3.1.4.1).
    fn find_for_type<'a>(&'a self, wire: &[u8], rtype: u16) -> NameMatch<'a> {
        let found = self.find(wire);
        if rtype != rtype::DS {
            return found;
        }
        match found {
            NameMatch::ZoneCut(zone, node) if eq_names(node.name.wire(), wire) => {
                NameMatch::Node(zone, node)
            }
            NameMatch::Node(zone, node) if zone.is_apex(node) => {
                self.delegation_in_parent(zone).unwrap_or(found)
            }
            _ => found,
        }
    }

    /// Looks up the apex of `zone` in its parent zone, where the apex is a delegation.
    pub(super) fn delegation_in_parent<'a>(&'a self, zone: &Zone) -> Option<NameMatch<'a>> {
        let above = self.parent_zone(zone)?;
        let node = above.node(&zone.apex_key)?;
        above.is_zone_cut(node).then_some(NameMatch::Node(above, node))
    }

    /// Adds a referral: the servers of a delegated zone (RFC 1034 section 4.3.2 step 3b).
    fn add_referral<'a>(&'a self, answer: &mut Answer<'a>, zone: &'a Zone, cut: &'a ZoneNode) {
        let Some(servers) = cut.set(rtype::NS) else { return };
        // The AA bit describes the first name in the answer (RFC 1035 section 4.1.1), so it stays
        // set after a CNAME of a served zone.
        answer.authoritative = !answer.answer.is_empty();
        answer.authority.push(RecordSetRef::new(OwnerName::Name(cut.name.wire()), servers));
        let mut optional = Vec::new();
        for target in &servers.data {
            let key = name::tree_key(target);
            let is_inside = key.starts_with(&cut.key);
            // Glue is in the file of the delegating zone. Other addresses come from the zones
            // that hold them.
            let glue = zone.node(&key).or_else(|| match self.find(target) {
                NameMatch::Node(_, node) => Some(node),
                _ => None,
            });
            for set in glue.iter().flat_map(|node| address_sets(node)) {
                let set_ref = RecordSetRef::new(OwnerName::Name(target), set);
                if is_inside {
                    answer.additional.push((set_ref, true));
                } else {
                    optional.push((set_ref, false));
                }
            }
        }
        answer.additional.append(&mut optional);
    }

    /// Adds the addresses of the hosts named in the data of a record set.
    fn add_additional_addresses<'a>(&'a self, answer: &mut Answer<'a>, set: &'a RecordSet) {
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
                NameMatch::Node(_, node) => node,
                // The glue of a delegation holds addresses of its hosts too.
                NameMatch::ZoneCut(zone, _) => match zone.node(&key) {
                    Some(node) => node,
                    None => continue,
                },
                _ => continue,
            };
            for set in address_sets(node) {
                let is_new =
                    answer.additional.iter().all(|(set_ref, _)| !std::ptr::eq(set_ref.set, set));
                if is_new {
                    answer
                        .additional
                        .push((RecordSetRef::new(OwnerName::Name(target), set), false));
                }
            }
        }
    }
}

/// Looks up a name in the zone that the name belongs to.
fn find_in_zone<'a>(zone: &'a Zone, key: &[u8]) -> NameMatch<'a> {
    let Some(mut encloser) = zone.nodes.first() else { return NameMatch::NotAuthoritative };
    for prefix in prefixes(key).filter(|prefix| prefix.len() > zone.apex_key.len()) {
        if encloser.set(rtype::DNAME).is_some() {
            return NameMatch::BelowDname;
        }
        let Some(node) = zone.node(prefix) else {
            // RFC 4592 section 4.3.3: the wildcard directly below the closest encloser matches
            // every nonexistent name below that encloser.
            let wildcard = [&encloser.key, &b"\x01*"[..]].concat();
            return match zone.node(&wildcard) {
                Some(node) => NameMatch::Wildcard(zone, node),
                None => NameMatch::NoSuchName(zone),
            };
        };
        if zone.is_zone_cut(node) {
            return NameMatch::ZoneCut(zone, node);
        }
        encloser = node;
    }
    NameMatch::Node(zone, encloser)
}

/// Prefixes of a tree key that are keys themselves, from the root's key down.
fn prefixes(key: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut next = Some(0);
    std::iter::from_fn(move || {
        let end = next?;
        next = key.get(end).map(|&len| end + 1 + usize::from(len));
        key.get(..end)
    })
}

fn address_sets(node: &ZoneNode) -> impl Iterator<Item = &RecordSet> {
    node.sets.iter().filter(|set| matches!(set.rtype, rtype::A | rtype::AAAA))
}

fn eq_names(one: &[u8], other: &[u8]) -> bool {
    one.eq_ignore_ascii_case(other)
}

/// Adds the SOA record of a negative answer, with the TTL of the negative answer (RFC 2308
/// section 3).
fn add_soa<'a>(answer: &mut Answer<'a>, zone: &'a Zone) {
    let Some(soa) = zone.soa() else { return };
    let set_ref = RecordSetRef::new(OwnerName::Name(zone.apex.wire()), soa);
    answer.authority.push(RecordSetRef { ttl: soa.ttl.min(soa_minimum(&soa.data[0])), ..set_ref });
}

/// Last field of an SOA record (MINIMUM): the TTL of negative answers, in seconds.
fn soa_minimum(data: &[u8]) -> u32 {
    data.last_chunk::<4>().map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

/// Answer of a zone for a name or type that does not exist in the zone.
pub(super) fn negative_answer(zone: &Zone, rcode: Rcode) -> Answer<'_> {
    let mut answer = Answer::new();
    answer.rcode = rcode;
    add_soa(&mut answer, zone);
    answer
}
