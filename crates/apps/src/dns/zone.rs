//! Zones: the records of a zone file, checked and sorted.

use std::path::{Path, PathBuf};

use super::error::{DnsError, Warning, ZoneFileLocation};
use super::message::rtype;
use super::name::{self, Name};
use super::zonefile::{self, FileRecord};

/// Records with the same owner and type (RRset).
pub(super) struct RecordSet {
    pub rtype: u16,
    pub ttl: u32,
    /// Record data in wire format, with uncompressed names.
    pub data: Vec<Box<[u8]>>,
}

/// Name of a zone. A name without record sets is an empty non-terminal (RFC 4592 section 2.2.2).
pub(super) struct ZoneNode {
    /// Tree key of `name`: see [`name::tree_key`].
    pub key: Box<[u8]>,
    pub name: Name,
    pub sets: Vec<RecordSet>,
}

impl ZoneNode {
    pub(super) fn set(&self, rtype: u16) -> Option<&RecordSet> {
        self.sets.iter().find(|set| set.rtype == rtype)
    }
}

/// Zone: its names in tree order, each name directly before the names below it.
pub(super) struct Zone {
    pub path: PathBuf,
    pub apex: Name,
    pub apex_key: Box<[u8]>,
    /// All names with records, and the empty non-terminals between them. The apex is the first.
    pub nodes: Vec<ZoneNode>,
}

impl Zone {
    /// Loads and checks a zone file. `origin` is the name of the zone; when absent, the owner of
    /// the SOA record is the zone's name.
    ///
    /// # Errors
    /// When the file cannot be read or does not form a valid zone.
    pub(super) fn load(
        path: &Path,
        origin: Option<&Name>,
        warnings: &mut Vec<Warning>,
    ) -> Result<Self, DnsError> {
        let records = zonefile::read_records(path, origin)?;
        Zone::build(path, origin, records, warnings)
    }

    fn build(
        path: &Path,
        origin: Option<&Name>,
        records: Vec<FileRecord>,
        warnings: &mut Vec<Warning>,
    ) -> Result<Self, DnsError> {
        let apex = find_apex(path, origin, &records)?;
        let apex_key = name::tree_key(apex.wire());
        let mut keyed = Vec::with_capacity(records.len());
        for record in records {
            let key = name::tree_key(record.owner.wire());
            if !key.starts_with(&apex_key) {
                let problem = format!(
                    "{} is not in zone {apex}: remove the record or correct $ORIGIN",
                    record.owner
                );
                return Err(record_error(&record, problem));
            }
            keyed.push((key, record));
        }
        // Stable sort: records of a set stay in the order of the file.
        keyed.sort_by(|(key, record), (other_key, other)| {
            key.cmp(other_key).then(record.rtype.cmp(&other.rtype))
        });
        check_below_dnames(&keyed)?;
        let mut nodes: Vec<ZoneNode> = Vec::new();
        let mut at = 0;
        while at < keyed.len() {
            let len = keyed[at..].iter().take_while(|(key, _)| *key == keyed[at].0).count();
            let same_owner = &mut keyed[at..at + len];
            add_missing_ancestors(&mut nodes, &apex_key, &same_owner[0].0, &same_owner[0].1.owner);
            nodes.push(build_node(same_owner, &apex, warnings)?);
            at += len;
        }
        Ok(Zone { path: path.to_owned(), apex, apex_key, nodes })
    }

    /// Returns the node with this tree key.
    pub(super) fn node(&self, key: &[u8]) -> Option<&ZoneNode> {
        let index = self.nodes.binary_search_by(|node| (*node.key).cmp(key)).ok()?;
        self.nodes.get(index)
    }

    /// True when a node is the apex of the zone.
    pub(super) fn is_apex(&self, node: &ZoneNode) -> bool {
        node.key.len() == self.apex_key.len()
    }

    /// True when a node is a zone cut: the zone delegates the name.
    pub(super) fn is_zone_cut(&self, node: &ZoneNode) -> bool {
        !self.is_apex(node) && node.set(rtype::NS).is_some()
    }

    /// SOA record set; every built zone has one.
    pub(super) fn soa(&self) -> Option<&RecordSet> {
        self.nodes.first()?.set(rtype::SOA)
    }
}

/// Error of a record.
fn record_error(record: &FileRecord, problem: String) -> DnsError {
    DnsError::InvalidZone { location: record.location(), problem }
}

/// Location of `other` in an error of `record`: the line, and the file if it is another.
fn place_of(other: &FileRecord, record: &FileRecord) -> String {
    if other.file == record.file {
        format!("line {}", other.line)
    } else {
        other.location().to_string()
    }
}

/// Rejects records below a DNAME record, which would never be answered (RFC 6672 section 2.4).
/// `records` are in tree order.
fn check_below_dnames(records: &[(Box<[u8]>, FileRecord)]) -> Result<(), DnsError> {
    let mut last_dname: Option<&(Box<[u8]>, FileRecord)> = None;
    for pair in records {
        let (key, record) = pair;
        if let Some((above, dname)) = last_dname
            && key.len() > above.len()
            && key.starts_with(above)
        {
            let problem = format!(
                "{} is below the DNAME record of {} ({}): remove one of them (RFC 6672)",
                record.owner,
                dname.owner,
                place_of(dname, record)
            );
            return Err(record_error(record, problem));
        }
        if record.rtype == rtype::DNAME {
            last_dname = Some(pair);
        }
    }
    Ok(())
}

/// Finds the only SOA record and returns its owner, the name of the zone.
fn find_apex(path: &Path, origin: Option<&Name>, records: &[FileRecord]) -> Result<Name, DnsError> {
    let mut soas = records.iter().filter(|record| record.rtype == rtype::SOA);
    let Some(soa) = soas.next() else {
        let problem = "the zone has no SOA record: add one".to_owned();
        return Err(DnsError::InvalidZone {
            location: ZoneFileLocation::at_line(path, 0),
            problem,
        });
    };
    if let Some(second) = soas.next() {
        let problem = format!("a second SOA record: the first is on {}", place_of(soa, second));
        return Err(record_error(second, problem));
    }
    if let Some(origin) = origin
        && origin.to_lower() != soa.owner.to_lower()
    {
        let problem = format!(
            "the owner of the SOA record is {}, but the configured zone is {origin}",
            soa.owner
        );
        return Err(record_error(soa, problem));
    }
    let has_ns = |record: &FileRecord| {
        record.rtype == rtype::NS && record.owner.to_lower() == soa.owner.to_lower()
    };
    if !records.iter().any(has_ns) {
        let problem = format!("{} has no NS record: add at least one", soa.owner);
        return Err(record_error(soa, problem));
    }
    Ok(soa.owner.clone())
}

/// Adds the empty non-terminals between the zone's apex and a new name.
fn add_missing_ancestors(nodes: &mut Vec<ZoneNode>, apex_key: &[u8], key: &[u8], owner: &Name) {
    // Nodes are sorted, so an existing ancestor is the last node or an ancestor of the last node.
    let shared = nodes.last().map_or(apex_key.len(), |last| common_ancestor_len(&last.key, key));
    let mut ancestors = Vec::new();
    let mut wire = owner.wire();
    let mut len = key.len();
    while let Some((label, parent)) = name::split_label(wire) {
        len -= label.len() + 1;
        if len <= shared {
            break;
        }
        ancestors.push((len, parent));
        wire = parent;
    }
    for (len, wire) in ancestors.into_iter().rev() {
        if let Some(name) = Name::from_wire(wire) {
            nodes.push(ZoneNode { key: key[..len].into(), name, sets: Vec::new() });
        }
    }
}

/// Length of the longest tree key that is a prefix of both keys, in octets.
fn common_ancestor_len(one: &[u8], other: &[u8]) -> usize {
    let mut at = 0;
    while let Some(&len) = one.get(at) {
        let end = at + 1 + usize::from(len);
        if one.get(at..end) != other.get(at..end) {
            break;
        }
        at = end;
    }
    at
}

/// Builds a node from the records of one name, sorted by type.
fn build_node(
    records: &mut [(Box<[u8]>, FileRecord)],
    apex: &Name,
    warnings: &mut Vec<Warning>,
) -> Result<ZoneNode, DnsError> {
    let (key, owner) = (records[0].0.clone(), records[0].1.owner.clone());
    check_type_conflicts(records, apex)?;
    let mut sets: Vec<RecordSet> = Vec::new();
    for (_, record) in records {
        let data = std::mem::take(&mut record.data);
        match sets.last_mut().filter(|set| set.rtype == record.rtype) {
            None => sets.push(RecordSet { rtype: record.rtype, ttl: record.ttl, data: vec![data] }),
            Some(set) => {
                // RFC 2181 section 5.2: all TTLs of a set must be equal. The TTLs of signatures
                // follow the sets that they cover.
                if set.ttl != record.ttl && record.rtype != rtype::RRSIG {
                    let ttl = set.ttl.min(record.ttl);
                    warnings.push(Warning {
                        location: record.location(),
                        message: format!(
                            "the records of {owner} have TTLs {} and {}; using {ttl} for all",
                            set.ttl, record.ttl
                        ),
                    });
                    set.ttl = ttl;
                }
                if !set.data.contains(&data) {
                    set.data.push(data);
                }
            }
        }
    }
    Ok(ZoneNode { key, name: owner, sets })
}

/// Rejects record types that may not exist together at one name, and duplicate CNAME or DNAME
/// records.
fn check_type_conflicts(records: &[(Box<[u8]>, FileRecord)], apex: &Name) -> Result<(), DnsError> {
    let owner = &records[0].1.owner;
    let of_type = |wanted| records.iter().map(|(_, r)| r).filter(move |r| r.rtype == wanted);
    if let Some(cname) = of_type(rtype::CNAME).next() {
        // RFC 1034 section 3.6.2, RFC 4035 section 2.5.
        let allowed = [rtype::CNAME, rtype::RRSIG, rtype::NSEC, rtype::KEY, rtype::SIG];
        if let Some((_, other)) = records.iter().find(|(_, r)| !allowed.contains(&r.rtype)) {
            let (first, second) =
                if other.line < cname.line { (other, cname) } else { (cname, other) };
            let problem = format!(
                "{owner} has a CNAME record and other data ({}): keep one of them",
                place_of(first, second)
            );
            return Err(record_error(second, problem));
        }
        if let Some(second) = of_type(rtype::CNAME).find(|r| r.data != cname.data) {
            let problem = format!("{owner} has a second CNAME record: keep one");
            return Err(record_error(second, problem));
        }
    }
    if let Some(dname) = of_type(rtype::DNAME).next()
        && let Some(second) = of_type(rtype::DNAME).find(|r| r.data != dname.data)
    {
        let problem = format!("{owner} has a second DNAME record: keep one (RFC 6672)");
        return Err(record_error(second, problem));
    }
    if owner.wire().starts_with(b"\x01*") {
        for (kind, text) in [(rtype::NS, "NS"), (rtype::DNAME, "DNAME")] {
            if let Some(record) = of_type(kind).next() {
                let problem =
                    format!("{text} at the wildcard {owner} has no meaning (RFC 4592 section 4)");
                return Err(record_error(record, problem));
            }
        }
    }
    let is_apex = owner.to_lower() == apex.to_lower();
    if !is_apex
        && of_type(rtype::DNAME).next().is_some()
        && let Some(ns) = of_type(rtype::NS).next()
    {
        let problem = format!("{owner} has both DNAME and NS records: keep one (RFC 6672)");
        return Err(record_error(ns, problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
