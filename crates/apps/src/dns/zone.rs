//! Zones: what a zone file says, checked and sorted.

use std::path::{Path, PathBuf};

use super::error::{DnsError, Place, Warning};
use super::message::rtype;
use super::name::{self, Name};
use super::zonefile::{self, FileRecord};

/// All records of one owner and type.
pub(super) struct RecordSet {
    pub rtype: u16,
    pub ttl: u32,
    /// The record data in wire format, names not compressed.
    pub data: Vec<Box<[u8]>>,
}

/// A name of a zone. Without sets it is an empty non-terminal (RFC 4592
/// section 2.2.2).
pub(super) struct ZoneNode {
    /// `name` from the root down: see [`name::tree_key`].
    pub key: Box<[u8]>,
    pub name: Name,
    pub sets: Vec<RecordSet>,
}

impl ZoneNode {
    pub(super) fn set(&self, rtype: u16) -> Option<&RecordSet> {
        self.sets.iter().find(|set| set.rtype == rtype)
    }
}

/// One zone: its names in tree order, a name right before the names under it.
pub(super) struct Zone {
    pub path: PathBuf,
    pub apex: Name,
    pub apex_key: Box<[u8]>,
    /// All names with records and the empty non-terminals between them.
    /// The apex is the first.
    pub nodes: Vec<ZoneNode>,
}

impl Zone {
    /// Reads and checks a zone file. `origin` is the name of the zone; when it
    /// is not given, it is the owner of the SOA record.
    ///
    /// # Errors
    /// When the file cannot be read or makes no zone.
    pub(super) fn load(
        path: &Path,
        origin: Option<&Name>,
        warnings: &mut Vec<Warning>,
    ) -> Result<Self, DnsError> {
        let records = zonefile::read(path, origin)?;
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
                return Err(error_at(
                    path,
                    record.line,
                    format!(
                        "{} is not in zone {apex}: remove the record or correct $ORIGIN",
                        record.owner
                    ),
                ));
            }
            keyed.push((key, record));
        }
        // Stable, so that records stay in the order of the file.
        keyed.sort_by(|(key, record), (other_key, other)| {
            key.cmp(other_key).then(record.rtype.cmp(&other.rtype))
        });
        let mut nodes: Vec<ZoneNode> = Vec::new();
        let mut at = 0;
        while at < keyed.len() {
            let len = keyed[at..].iter().take_while(|(key, _)| *key == keyed[at].0).count();
            let owned = &mut keyed[at..at + len];
            add_missing_ancestors(&mut nodes, &apex_key, &owned[0].0, &owned[0].1.owner);
            nodes.push(build_node(path, owned, &apex, warnings)?);
            at += len;
        }
        Ok(Zone { path: path.to_owned(), apex, apex_key, nodes })
    }

    /// The node with this key.
    pub(super) fn node(&self, key: &[u8]) -> Option<&ZoneNode> {
        let index = self.nodes.binary_search_by(|node| (*node.key).cmp(key)).ok()?;
        self.nodes.get(index)
    }

    /// Whether a node is the top of the zone.
    pub(super) fn is_apex(&self, node: &ZoneNode) -> bool {
        node.key.len() == self.apex_key.len()
    }

    /// Whether the zone ends at this node, because it is delegated.
    pub(super) fn is_cut(&self, node: &ZoneNode) -> bool {
        !self.is_apex(node) && node.set(rtype::NS).is_some()
    }

    /// The SOA record set; every zone that was built has one.
    pub(super) fn soa(&self) -> Option<&RecordSet> {
        self.nodes.first()?.set(rtype::SOA)
    }
}

fn error_at(path: &Path, line: usize, problem: String) -> DnsError {
    DnsError::Zone { place: Place::line(path, line), problem }
}

/// Finds the one SOA record and with it the name of the zone.
fn find_apex(path: &Path, origin: Option<&Name>, records: &[FileRecord]) -> Result<Name, DnsError> {
    let mut soas = records.iter().filter(|record| record.rtype == rtype::SOA);
    let Some(soa) = soas.next() else {
        let problem = "the zone has no SOA record: every zone begins with one".to_owned();
        return Err(error_at(path, 0, problem));
    };
    if let Some(second) = soas.next() {
        let problem = format!("a second SOA record: the first stands on line {}", soa.line);
        return Err(error_at(path, second.line, problem));
    }
    if let Some(origin) = origin
        && origin.to_lower() != soa.owner.to_lower()
    {
        let problem = format!("the SOA record belongs to {}, but the zone is {origin}", soa.owner);
        return Err(error_at(path, soa.line, problem));
    }
    let has_ns = |record: &FileRecord| {
        record.rtype == rtype::NS && record.owner.to_lower() == soa.owner.to_lower()
    };
    if !records.iter().any(has_ns) {
        let problem = format!("{} has no NS record: name at least one server", soa.owner);
        return Err(error_at(path, soa.line, problem));
    }
    Ok(soa.owner.clone())
}

/// Adds the empty non-terminals between the zone's apex and a new name.
fn add_missing_ancestors(nodes: &mut Vec<ZoneNode>, apex_key: &[u8], key: &[u8], owner: &Name) {
    // Nodes are sorted, so an ancestor that exists is the last node or an
    // ancestor of it.
    let shared = nodes.last().map_or(apex_key.len(), |last| common_labels(&last.key, key));
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

/// The length of the longest key that is a prefix of both keys.
fn common_labels(one: &[u8], other: &[u8]) -> usize {
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

/// Makes a node of the records of one name, which are sorted by type.
fn build_node(
    path: &Path,
    records: &mut [(Box<[u8]>, FileRecord)],
    apex: &Name,
    warnings: &mut Vec<Warning>,
) -> Result<ZoneNode, DnsError> {
    let (key, owner) = (records[0].0.clone(), records[0].1.owner.clone());
    check_company(path, records, apex)?;
    let mut sets: Vec<RecordSet> = Vec::new();
    for (_, record) in records {
        let data = std::mem::take(&mut record.data);
        match sets.last_mut().filter(|set| set.rtype == record.rtype) {
            None => sets.push(RecordSet { rtype: record.rtype, ttl: record.ttl, data: vec![data] }),
            Some(set) => {
                // RFC 2181 section 5.2: the TTLs of a set must be the same.
                // Signatures follow the sets that they cover.
                if set.ttl != record.ttl && record.rtype != rtype::RRSIG {
                    let ttl = set.ttl.min(record.ttl);
                    warnings.push(Warning {
                        place: Place::line(path, record.line),
                        message: format!(
                            "the records of {owner} have TTLs {} and {}; all get {ttl}",
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

/// Checks which types stand together at one name.
fn check_company(
    path: &Path,
    records: &[(Box<[u8]>, FileRecord)],
    apex: &Name,
) -> Result<(), DnsError> {
    let owner = &records[0].1.owner;
    let of_type = |wanted| records.iter().map(|(_, r)| r).filter(move |r| r.rtype == wanted);
    if let Some(cname) = of_type(rtype::CNAME).next() {
        // RFC 1034 section 3.6.2, RFC 4035 section 2.5.
        let allowed = [rtype::CNAME, rtype::RRSIG, rtype::NSEC, rtype::KEY, rtype::SIG];
        if let Some((_, other)) = records.iter().find(|(_, r)| !allowed.contains(&r.rtype)) {
            let problem = format!(
                "{owner} has a CNAME record (line {}) and other data: keep one of them",
                cname.line
            );
            return Err(error_at(path, other.line.max(cname.line), problem));
        }
        if let Some(second) = of_type(rtype::CNAME).find(|r| r.data != cname.data) {
            let problem = format!("{owner} has a second CNAME record: keep one");
            return Err(error_at(path, second.line, problem));
        }
    }
    if let Some(dname) = of_type(rtype::DNAME).next()
        && let Some(second) = of_type(rtype::DNAME).find(|r| r.data != dname.data)
    {
        let problem = format!("{owner} has a second DNAME record: keep one (RFC 6672)");
        return Err(error_at(path, second.line, problem));
    }
    if owner.wire().starts_with(b"\x01*") {
        for (kind, text) in [(rtype::NS, "NS"), (rtype::DNAME, "DNAME")] {
            if let Some(record) = of_type(kind).next() {
                let problem =
                    format!("{text} at the wildcard {owner} has no meaning (RFC 4592 section 4)");
                return Err(error_at(path, record.line, problem));
            }
        }
    }
    let is_apex = owner.to_lower() == apex.to_lower();
    if !is_apex
        && of_type(rtype::DNAME).next().is_some()
        && let Some(ns) = of_type(rtype::NS).next()
    {
        let problem = format!("{owner} has both DNAME and NS records: keep one (RFC 6672)");
        return Err(error_at(path, ns.line, problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
