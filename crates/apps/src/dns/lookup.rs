//! Lookup from a question to its prepared answer: all names of all zones, compiled.

use super::answer_store::{AnswerStore, PrepareError, PreparedAnswer};
use super::catalog::{self, Catalog, NameMatch};
use super::error::{DnsError, Warning, ZoneFileLocation};
use super::message::{Rcode, rtype};
use super::name::{self, Name};
use super::table::NameTable;
use super::zone::{Zone, ZoneNode};
use super::{DnsConfig, ZoneSource};

/// Prepared answers of a name.
#[derive(Clone, Copy)]
struct Node {
    /// Index of the first entry of this name in the table of types.
    first_type: u32,
    type_count: u16,
    kind: NodeKind,
    /// Index of the prepared answer for every other type.
    default_answer: u32,
    /// Index used for nonexistent names below this name; `kind` says of which table.
    subtree_index: u32,
}

/// Kind of a node: how names below the node and questions of type ANY are answered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NodeKind {
    /// Name of the zone; `subtree_index` is the prepared answer NXDOMAIN.
    Ordinary,
    /// Name of the zone; `subtree_index` is the node of the wildcard directly below.
    HasWildcard,
    /// Delegation; `subtree_index` is the prepared referral.
    ZoneCut,
    /// Owner of a DNAME record; `subtree_index` is the index of the record.
    HasDname,
}

/// Prepared answer for one type of a name.
#[derive(Clone, Copy)]
struct TypeAnswer {
    rtype: u16,
    prepared: u32,
}

/// DNAME record: redirects all names below its owner (RFC 6672).
pub(super) struct DnameRecord {
    /// Index among the DNAME records of all zones.
    pub index: u32,
    /// Owner of the record, in wire format.
    pub owner: Box<[u8]>,
    pub target: Box<[u8]>,
    pub ttl: u32,
}

/// Result of looking up a question.
pub(super) enum LookupResult<'a> {
    /// A prepared answer.
    Prepared(&'a PreparedAnswer),
    /// The name is below this DNAME record.
    Dname(&'a DnameRecord),
    /// The name is in none of the served zones.
    NotAuthoritative,
}

/// All zones, compiled for lookup.
pub(super) struct CompiledZones {
    table: NameTable,
    nodes: Vec<Node>,
    types: Vec<TypeAnswer>,
    dnames: Vec<DnameRecord>,
    pub store: AnswerStore,
    /// Largest number of labels of any name in the table.
    max_labels: usize,
    pub warnings: Vec<Warning>,
    pub zone_count: usize,
}

impl CompiledZones {
    /// Loads all zones and prepares all answers.
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
                    Name::from_text(text)
                        .ok_or_else(|| DnsError::InvalidOrigin { text: text.clone() })?,
                ),
            };
            zones.push(Zone::load(path, origin.as_ref(), &mut warnings)?);
        }
        CompiledZones::compile(&Catalog::new(zones)?, config.hash_seed, warnings)
    }

    /// Prepares all answers of the zones in `catalog`.
    pub(super) fn compile(
        catalog: &Catalog,
        hash_seed: u64,
        warnings: Vec<Warning>,
    ) -> Result<Self, DnsError> {
        let names = catalog.zones.iter().map(|zone| zone.nodes.len()).sum();
        let mut zones = CompiledZones {
            table: NameTable::with_capacity(names, hash_seed),
            nodes: Vec::with_capacity(names),
            types: Vec::with_capacity(names),
            dnames: Vec::new(),
            store: AnswerStore::default(),
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
        let refused = |error| to_dns_error(&error, zone, &zone.apex);
        let mut prepare = |rcode| {
            self.store.prepare(&catalog::negative_answer(zone, rcode), apex, false).map_err(refused)
        };
        let (no_data, nxdomain) = (prepare(Rcode::NoError)?, prepare(Rcode::NxDomain)?);
        // Names below this key do not belong to this zone: they are delegated or below a DNAME.
        let mut occluded: Option<&[u8]> = None;
        for node in &zone.nodes {
            if occluded.is_some_and(|key| node.key.starts_with(key)) {
                continue;
            }
            occluded = None;
            if catalog.zone_of(&node.key).is_none_or(|owner| !std::ptr::eq(owner, zone)) {
                // The apex of another served zone occludes all names below it.
                occluded = Some(&node.key);
                continue;
            }
            self.add_node(catalog, zone, node, no_data, nxdomain)
                .map_err(|error| to_dns_error(&error, zone, &node.name))?;
            if zone.is_zone_cut(node) || node.set(rtype::DNAME).is_some() {
                occluded = Some(&node.key);
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
        nxdomain: u32,
    ) -> Result<(), PrepareError> {
        let wire = node.name.wire();
        let is_wildcard = wire.starts_with(b"\x01*");
        // A wildcard's answers serve all names below its parent.
        let suffix = if is_wildcard { name::parent(wire).unwrap_or(wire) } else { wire };
        let is_cut = zone.is_zone_cut(node);
        let found =
            if is_cut { NameMatch::ZoneCut(zone, node) } else { NameMatch::Node(zone, node) };
        let first = self.types.len();
        let mut types = catalog.types_of(found);
        // The first answer is the answer for ANY: the name's own types come first.
        types.sort_by_key(|&rtype| (node.set(rtype).is_none(), rtype));
        for rtype in types {
            let found = match rtype {
                rtype::DS if is_cut => NameMatch::Node(zone, node),
                rtype::DS if zone.is_apex(node) => continue,
                _ => found,
            };
            self.add_type(rtype, &catalog.resolve(found, rtype), suffix, !is_wildcard)?;
        }
        if zone.is_apex(node) {
            let above = catalog.delegation_in_parent(zone).or(node.set(rtype::DS).map(|_| found));
            if let Some(found) = above {
                self.add_type(rtype::DS, &catalog.resolve(found, rtype::DS), suffix, true)?;
            }
        }
        let default_answer = if is_cut || node.set(rtype::CNAME).is_some() {
            // Type 0 is reserved, so this prepares the answer for every type without data.
            self.store.prepare(&catalog.resolve(found, 0), suffix, !is_cut && !is_wildcard)?
        } else {
            no_data
        };
        let (kind, subtree_index) = if is_cut {
            (NodeKind::ZoneCut, default_answer)
        } else if let Some(dname) = node.set(rtype::DNAME) {
            let index = u32::try_from(self.dnames.len()).map_err(|_| PrepareError::StoreFull)?;
            let (target, ttl) = (dname.data[0].clone(), dname.ttl);
            self.dnames.push(DnameRecord { index, owner: wire.into(), target, ttl });
            (NodeKind::HasDname, index)
        } else {
            (NodeKind::Ordinary, nxdomain)
        };
        self.max_labels = self.max_labels.max(name::label_count(wire));
        let type_count =
            u16::try_from(self.types.len() - first).map_err(|_| PrepareError::StoreFull)?;
        let first_type = u32::try_from(first).map_err(|_| PrepareError::StoreFull)?;
        self.table.insert(wire).ok_or(PrepareError::StoreFull)?;
        self.nodes.push(Node { first_type, type_count, kind, default_answer, subtree_index });
        Ok(())
    }

    fn add_type(
        &mut self,
        rtype: u16,
        answer: &catalog::Answer<'_>,
        suffix: &[u8],
        is_exact: bool,
    ) -> Result<(), PrepareError> {
        let prepared = self.store.prepare(answer, suffix, is_exact)?;
        self.types.push(TypeAnswer { rtype, prepared });
        Ok(())
    }

    /// Links each wildcard to its parent node.
    fn link_wildcards(&mut self, zone: &Zone) {
        for node in zone.nodes.iter().filter(|node| node.name.wire().starts_with(b"\x01*")) {
            let wire = node.name.wire();
            let Some(parent) = name::parent(wire) else { continue };
            let wildcard = self.table.find(wire);
            let parent = self.table.find(parent);
            if let (Some(wildcard), Some(parent)) = (wildcard, parent) {
                let parent = &mut self.nodes[parent as usize];
                if parent.kind == NodeKind::Ordinary {
                    parent.kind = NodeKind::HasWildcard;
                    parent.subtree_index = wildcard;
                }
            }
        }
    }

    /// Looks up a question for a name in wire format.
    #[inline]
    pub(super) fn find(&self, wire: &[u8], rtype: u16) -> LookupResult<'_> {
        match self.table.find(wire) {
            Some(index) => LookupResult::Prepared(
                self.store.get(self.answer_at_node(&self.nodes[index as usize], rtype)),
            ),
            None => self.find_closest_encloser(wire, rtype),
        }
    }

    /// Index of the prepared answer for a name in the table.
    #[inline]
    fn answer_at_node(&self, node: &Node, rtype: u16) -> u32 {
        let first = node.first_type as usize;
        let types = &self.types[first..first + usize::from(node.type_count)];
        for answer in types {
            if answer.rtype == rtype {
                return answer.prepared;
            }
        }
        // RFC 8482 section 4.1: ANY is answered with one record set of the name.
        match types.first() {
            Some(answer) if rtype == rtype::ANY && node.kind != NodeKind::ZoneCut => {
                answer.prepared
            }
            _ => node.default_answer,
        }
    }

    /// Answers for a name that is not in the table, from its closest ancestor in the table.
    #[cold]
    fn find_closest_encloser(&self, wire: &[u8], rtype: u16) -> LookupResult<'_> {
        let mut rest = wire;
        // No name in the table has more labels. So a hostile name of 127 labels costs no more
        // lookups than the depth of the zones.
        let skipped = name::label_count(wire).saturating_sub(self.max_labels + 1);
        for _ in 0..skipped {
            rest = name::parent(rest).unwrap_or(rest);
        }
        while let Some(parent) = name::parent(rest) {
            rest = parent;
            let Some(index) = self.table.find(rest) else { continue };
            let node = &self.nodes[index as usize];
            let prepared = match node.kind {
                NodeKind::Ordinary | NodeKind::ZoneCut => node.subtree_index,
                NodeKind::HasWildcard => {
                    self.answer_at_node(&self.nodes[node.subtree_index as usize], rtype)
                }
                NodeKind::HasDname => {
                    return LookupResult::Dname(&self.dnames[node.subtree_index as usize]);
                }
            };
            return LookupResult::Prepared(self.store.get(prepared));
        }
        LookupResult::NotAuthoritative
    }

    /// Number of names that can be queried, including empty non-terminals.
    pub(super) fn name_count(&self) -> usize {
        self.nodes.len()
    }

    /// Memory used by the tables and answers, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.table.memory_bytes()
            + self.nodes.capacity() * size_of::<Node>()
            + self.types.capacity() * size_of::<TypeAnswer>()
            + self.store.memory_bytes()
    }
}

fn to_dns_error(error: &PrepareError, zone: &Zone, name: &Name) -> DnsError {
    match error {
        PrepareError::StoreFull => DnsError::TooLarge,
        PrepareError::AnswerTooLong => DnsError::InvalidZone {
            location: ZoneFileLocation { path: zone.path.clone(), line: 0, column: 0 },
            problem: format!(
                "an answer for {name} would be longer than a DNS message: remove records"
            ),
        },
    }
}
