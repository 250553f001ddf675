//! From a question to its prepared answer: all names of all zones, compiled.

use super::catalog::{self, Catalog, Found};
use super::compile::{CompileError, Prepared, Store};
use super::error::{DnsError, Place, Warning};
use super::message::{Rcode, rtype};
use super::name::{self, Name};
use super::table::NameTable;
use super::zone::{Zone, ZoneNode};
use super::{DnsConfig, ZoneSource};

/// What a name has to say.
#[derive(Clone, Copy)]
struct Node {
    /// Where its types begin.
    types: u32,
    type_count: u16,
    kind: Kind,
    /// The answer for every other type.
    otherwise: u32,
    /// What stands for names under this one that do not exist.
    below: u32,
}

/// What a node does for the names under it, and for questions of type ANY.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A name of the zone; `below` is the answer NXDOMAIN.
    Plain,
    /// A name of the zone; `below` is the node of the wildcard under it.
    HasWildcard,
    /// A delegation: `below` is the referral.
    Cut,
    /// A DNAME record; `below` is its index.
    HasDname,
}

/// The prepared answer for one type.
#[derive(Clone, Copy)]
struct TypeAnswer {
    rtype: u16,
    prepared: u32,
}

/// A DNAME record: it renames whole subtrees (RFC 6672).
pub(super) struct Rename {
    /// The record's owner.
    pub owner: Box<[u8]>,
    pub target: Box<[u8]>,
    pub ttl: u32,
}

/// What the zones say to a question.
pub(super) enum Reply<'a> {
    /// A prepared answer.
    Prepared(&'a Prepared),
    /// The name is under a DNAME record.
    Renamed(&'a Rename),
    /// The name is in none of our zones.
    Foreign,
}

/// All zones, ready to be asked.
pub(super) struct Zones {
    table: NameTable,
    nodes: Vec<Node>,
    types: Vec<TypeAnswer>,
    renames: Vec<Rename>,
    pub store: Store,
    /// The number of labels of the longest name in the table.
    max_labels: usize,
    pub warnings: Vec<Warning>,
    pub zone_count: usize,
}

impl Zones {
    /// Reads all zones and prepares all answers.
    pub(super) fn load(config: &DnsConfig) -> Result<Self, DnsError> {
        if config.zones.is_empty() {
            return Err(DnsError::NoZones);
        }
        let mut warnings = Vec::new();
        let mut zones = Vec::with_capacity(config.zones.len());
        for ZoneSource { origin, path } in &config.zones {
            let origin = match origin {
                None => None,
                Some(text) => Some(
                    Name::from_text(text).ok_or_else(|| DnsError::Origin { text: text.clone() })?,
                ),
            };
            zones.push(Zone::load(path, origin.as_ref(), &mut warnings)?);
        }
        Zones::compile(&Catalog::new(zones)?, config.hash_seed, warnings)
    }

    /// Prepares all answers of these zones.
    pub(super) fn compile(
        catalog: &Catalog,
        hash_seed: u64,
        warnings: Vec<Warning>,
    ) -> Result<Self, DnsError> {
        let names = catalog.zones.iter().map(|zone| zone.nodes.len()).sum();
        let mut zones = Zones {
            table: NameTable::with_capacity(names, hash_seed),
            nodes: Vec::with_capacity(names),
            types: Vec::with_capacity(names),
            renames: Vec::new(),
            store: Store::default(),
            max_labels: 0,
            warnings,
            zone_count: catalog.zones.len(),
        };
        for zone in &catalog.zones {
            zones.add_zone(catalog, zone)?;
        }
        zones.store.shrink();
        zones.types.shrink_to_fit();
        Ok(zones)
    }

    fn add_zone(&mut self, catalog: &Catalog, zone: &Zone) -> Result<(), DnsError> {
        let apex = zone.apex.wire();
        let refused = |error| compile_error(&error, zone, &zone.apex);
        let mut prepare = |rcode| {
            self.store.prepare(&catalog::negative(zone, rcode), apex, false).map_err(refused)
        };
        let (no_data, no_name) = (prepare(Rcode::NoError)?, prepare(Rcode::NxDomain)?);
        // Names under this key are not this zone's: delegated or renamed.
        let mut hidden: Option<&[u8]> = None;
        for node in &zone.nodes {
            if hidden.is_some_and(|key| node.key.starts_with(key)) {
                continue;
            }
            hidden = None;
            if catalog.zone_of(&node.key).is_none_or(|owner| !std::ptr::eq(owner, zone)) {
                // The apex of another zone of ours hides what is under it.
                hidden = Some(&node.key);
                continue;
            }
            self.add_node(catalog, zone, node, no_data, no_name)
                .map_err(|error| compile_error(&error, zone, &node.name))?;
            if zone.is_cut(node) || node.set(rtype::DNAME).is_some() {
                hidden = Some(&node.key);
            }
        }
        self.link_wildcards(zone);
        Ok(())
    }

    fn add_node(
        &mut self,
        catalog: &Catalog,
        zone: &Zone,
        node: &ZoneNode,
        no_data: u32,
        no_name: u32,
    ) -> Result<(), CompileError> {
        let wire = node.name.wire();
        let is_wildcard = wire.starts_with(b"\x01*");
        // A wildcard's answers are for all names under its parent.
        let suffix = if is_wildcard { name::parent(wire).unwrap_or(wire) } else { wire };
        let is_cut = zone.is_cut(node);
        let found = if is_cut { Found::Cut(zone, node) } else { Found::Node(zone, node) };
        let first = self.types.len();
        let mut types = catalog.types_of(found);
        // So that the first answer is the one for ANY, see `Zones::at_node`.
        types.sort_by_key(|&rtype| (node.set(rtype).is_none(), rtype));
        for rtype in types {
            let found = match rtype {
                rtype::DS if is_cut => Found::Node(zone, node),
                rtype::DS if zone.is_apex(node) => continue,
                _ => found,
            };
            self.add_type(rtype, &catalog.resolve(found, rtype), suffix, !is_wildcard)?;
        }
        if zone.is_apex(node) {
            let above = catalog.found_above(zone).or(node.set(rtype::DS).map(|_| found));
            if let Some(found) = above {
                self.add_type(rtype::DS, &catalog.resolve(found, rtype::DS), suffix, true)?;
            }
        }
        let otherwise = if is_cut || node.set(rtype::CNAME).is_some() {
            // Type 0 is reserved, so this is the answer for what is not there.
            self.store.prepare(&catalog.resolve(found, 0), suffix, !is_cut && !is_wildcard)?
        } else {
            no_data
        };
        let (kind, below) = if is_cut {
            (Kind::Cut, otherwise)
        } else if let Some(dname) = node.set(rtype::DNAME) {
            let rename =
                Rename { owner: wire.into(), target: dname.data[0].clone(), ttl: dname.ttl };
            self.renames.push(rename);
            (Kind::HasDname, (self.renames.len() - 1) as u32)
        } else {
            (Kind::Plain, no_name)
        };
        self.max_labels = self.max_labels.max(name::label_count(wire));
        let type_count =
            u16::try_from(self.types.len() - first).map_err(|_| CompileError::StoreFull)?;
        let types = u32::try_from(first).map_err(|_| CompileError::StoreFull)?;
        self.table.insert(wire).ok_or(CompileError::StoreFull)?;
        self.nodes.push(Node { types, type_count, kind, otherwise, below });
        Ok(())
    }

    fn add_type(
        &mut self,
        rtype: u16,
        answer: &catalog::Answer<'_>,
        suffix: &[u8],
        is_exact: bool,
    ) -> Result<(), CompileError> {
        let prepared = self.store.prepare(answer, suffix, is_exact)?;
        self.types.push(TypeAnswer { rtype, prepared });
        Ok(())
    }

    /// Tells the parents of wildcards about them.
    fn link_wildcards(&mut self, zone: &Zone) {
        for node in zone.nodes.iter().filter(|node| node.name.wire().starts_with(b"\x01*")) {
            let wire = node.name.wire();
            let Some(parent) = name::parent(wire) else { continue };
            let wildcard = self.table.find(wire);
            let parent = self.table.find(parent);
            if let (Some(wildcard), Some(parent)) = (wildcard, parent) {
                let parent = &mut self.nodes[parent as usize];
                if parent.kind == Kind::Plain {
                    parent.kind = Kind::HasWildcard;
                    parent.below = wildcard;
                }
            }
        }
    }

    /// What the zones say to a question for a name in wire format.
    #[inline]
    pub(super) fn find(&self, wire: &[u8], rtype: u16) -> Reply<'_> {
        match self.table.find(wire) {
            Some(index) => {
                Reply::Prepared(self.store.get(self.at_node(&self.nodes[index as usize], rtype)))
            }
            None => self.find_encloser(wire, rtype),
        }
    }

    /// The answer for a name in the table.
    #[inline]
    fn at_node(&self, node: &Node, rtype: u16) -> u32 {
        let first = node.types as usize;
        let types = &self.types[first..first + usize::from(node.type_count)];
        for answer in types {
            if answer.rtype == rtype {
                return answer.prepared;
            }
        }
        // RFC 8482 section 4.1: ANY is answered with one set of the name.
        match types.first() {
            Some(answer) if rtype == rtype::ANY && node.kind != Kind::Cut => answer.prepared,
            _ => node.otherwise,
        }
    }

    /// The answer for a name that is not in the table: that of the longest
    /// name above it that is.
    #[cold]
    fn find_encloser(&self, wire: &[u8], rtype: u16) -> Reply<'_> {
        let mut rest = wire;
        // No name in the table has more labels, so a hostile name of 127
        // labels costs no more lookups than the zones are deep.
        let skipped = name::label_count(wire).saturating_sub(self.max_labels + 1);
        for _ in 0..skipped {
            rest = name::parent(rest).unwrap_or(rest);
        }
        while let Some(parent) = name::parent(rest) {
            rest = parent;
            let Some(index) = self.table.find(rest) else { continue };
            let node = &self.nodes[index as usize];
            let prepared = match node.kind {
                Kind::Plain | Kind::Cut => node.below,
                Kind::HasWildcard => self.at_node(&self.nodes[node.below as usize], rtype),
                Kind::HasDname => return Reply::Renamed(&self.renames[node.below as usize]),
            };
            return Reply::Prepared(self.store.get(prepared));
        }
        Reply::Foreign
    }

    /// How many names can be asked for, empty non-terminals counted.
    pub(super) fn name_count(&self) -> usize {
        self.nodes.len()
    }

    /// How much memory the tables and answers take.
    pub(super) fn memory_bytes(&self) -> usize {
        self.table.memory_bytes()
            + self.nodes.capacity() * size_of::<Node>()
            + self.types.capacity() * size_of::<TypeAnswer>()
            + self.store.memory_bytes()
    }
}

fn compile_error(error: &CompileError, zone: &Zone, name: &Name) -> DnsError {
    match error {
        CompileError::StoreFull => DnsError::TooLarge,
        CompileError::AnswerTooLong => DnsError::Zone {
            place: Place { path: zone.path.clone(), line: 0, column: 0 },
            problem: format!(
                "an answer for {name} would be longer than a DNS message: remove records"
            ),
        },
    }
}
