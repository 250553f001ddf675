//! Reads the records of zone files, with the scanner of the crate `domain`.
//!
//! The scanner gets one entry at a time. So errors in the syntax or in the rules of a zone can
//! name the line of the record.

use std::path::Path;

use domain::base::iana::{Class, Rtype};
use domain::base::name::{ParsedName, ToLabelIter};
use domain::base::rdata::{ComposeRecordData, ParseAnyRecordData};
use domain::dep::octseq::Parser;
use domain::rdata::AllRecordData;
use domain::zonefile::inplace::{self, ScannedRecord, Zonefile};

use super::entries::{Entries, FileEntry, UnclosedEntry};
use super::error::{DnsError, ZoneFileLocation};
use super::message::rtype;
use super::name::Name;

/// Record of a zone file.
#[derive(Debug)]
pub(super) struct FileRecord {
    pub owner: Name,
    pub rtype: u16,
    pub ttl: u32,
    /// Record data in wire format, with uncompressed names.
    pub data: Box<[u8]>,
    /// Line where the record begins, from 1.
    pub line: usize,
}

/// Reads all records of a zone file.
pub(super) fn read_records(
    path: &Path,
    origin: Option<&Name>,
) -> Result<Vec<FileRecord>, DnsError> {
    let text =
        std::fs::read(path).map_err(|source| DnsError::Read { path: path.to_owned(), source })?;
    scan_records(path, &text, origin)
}

/// Reads all records from the text of a zone file. `path` appears in error messages only.
pub(super) fn scan_records(
    path: &Path,
    text: &[u8],
    origin: Option<&Name>,
) -> Result<Vec<FileRecord>, DnsError> {
    // Capacity for the whole text: the scanner hands out parts of its buffer.
    let mut scanner = Zonefile::with_capacity(text.len() + 1);
    scanner.set_default_class(Class::IN);
    if let Some(origin) = origin
        && let Ok(origin) = domain::base::Name::from_octets(origin.wire().to_vec().into())
    {
        scanner.set_origin(origin);
    }
    let mut entries = Entries::new(text);
    let mut records = Vec::new();
    let mut lines_scanned = 0;
    while let Some(entry) = entries.next().map_err(|unclosed| unclosed_error(path, &unclosed))? {
        let normalized = entry.normalized();
        scanner.extend_from_slice(&normalized);
        let (line, _) = entry.position(0);
        loop {
            match scanner.next_entry() {
                Ok(None) => break,
                Ok(Some(inplace::Entry::Record(record))) => {
                    records.push(convert(path, line, &record)?);
                }
                Ok(Some(inplace::Entry::Include { .. })) => {
                    let problem = "$INCLUDE is not supported: put the records into this file";
                    return Err(syntax_error(path, &entry, 0, problem.to_owned()));
                }
                Err(error) => {
                    return Err(scanner_error(path, &entry, lines_scanned, &error.to_string()));
                }
            }
        }
        lines_scanned += normalized.iter().filter(|&&byte| byte == b'\n').count();
        drop(normalized);
        entries.recycle(entry);
    }
    Ok(records)
}

fn convert(path: &Path, line: usize, record: &ScannedRecord) -> Result<FileRecord, DnsError> {
    let zone_error = |problem| DnsError::InvalidZone {
        location: ZoneFileLocation::at_line(path, line),
        problem,
    };
    let mut owner = Vec::with_capacity(32);
    for label in record.owner().iter_labels() {
        owner.push(label.len() as u8);
        owner.extend_from_slice(label.as_slice());
    }
    let owner = Name::from_wire(&owner).ok_or_else(|| {
        zone_error("the owner name has an empty label, or more than 255 octets".to_owned())
    })?;
    let rtype = record.rtype().to_int();
    // RFC 6895 section 3.1: question types and meta-types cannot be stored.
    if rtype == 0 || rtype == rtype::OPT || (128..=255).contains(&rtype) {
        return Err(zone_error(format!("type {} cannot be stored in a zone", record.rtype())));
    }
    let mut data = Vec::with_capacity(16);
    if record.data().compose_rdata(&mut data).is_err() || data.len() > usize::from(u16::MAX) {
        return Err(zone_error("the record data is longer than 65,535 octets".to_owned()));
    }
    if !is_well_formed(record.rtype(), &data) {
        return Err(zone_error(format!(
            "the record data is malformed for type {}: check for two dots in a row, and for a \
             wrong length after \\#",
            record.rtype()
        )));
    }
    Ok(FileRecord { owner, rtype, ttl: record.ttl().as_secs(), data: data.into(), line })
}

/// True when a receiver parses this data back to the same data. The scanner accepts a name with
/// an empty label. For data of any type, it also accepts any octets in the form of RFC 3597, even
/// a compressed name.
fn is_well_formed(rtype: Rtype, data: &[u8]) -> bool {
    let mut parser = Parser::from_ref(data);
    let parsed = AllRecordData::<&[u8], ParsedName<&[u8]>>::parse_any_rdata(rtype, &mut parser);
    let mut again = Vec::with_capacity(data.len());
    parsed.is_ok_and(|parsed| parsed.compose_rdata(&mut again).is_ok())
        && parser.remaining() == 0
        && again == data
}

fn unclosed_error(path: &Path, unclosed: &UnclosedEntry) -> DnsError {
    let &UnclosedEntry { line, column, expected } = unclosed;
    let location = ZoneFileLocation { path: path.to_owned(), line, column };
    DnsError::Syntax {
        location,
        problem: format!("expected {expected} before the end of the file"),
    }
}

fn syntax_error(path: &Path, entry: &FileEntry<'_>, token: usize, problem: String) -> DnsError {
    let (line, column) = entry.position(token);
    DnsError::Syntax { location: ZoneFileLocation { path: path.to_owned(), line, column }, problem }
}

/// Builds a syntax error from the scanner's message, `line:column: reason`. The scanner has read
/// `lines_scanned` lines before this entry.
fn scanner_error(
    path: &Path,
    entry: &FileEntry<'_>,
    lines_scanned: usize,
    message: &str,
) -> DnsError {
    let mut parts = message.splitn(3, ':');
    let mut number = || parts.next().and_then(|part| part.trim().parse::<usize>().ok());
    let (line, column) = (number().unwrap_or(0), number().unwrap_or(0));
    let reason = parts.next().unwrap_or(message).trim();
    let line = line.saturating_sub(lines_scanned);
    let mut token = FileEntry::token_at_scanner_position(&entry.normalized(), line, column);
    if reason == "trailing tokens" {
        // The scanner has not read the unexpected token.
        token += 1;
    }
    let text = String::from_utf8_lossy(entry.token(token));
    let text: String = text.chars().take(64).collect();
    let problem = match reason {
        "expected rtype" => format!("expected a TTL, a class or a record type, found `{text}`"),
        "missing origin" => format!(
            "expected $ORIGIN before the relative name `{text}`, or the zone's name given with \
             the file"
        ),
        "missing last owner" => "expected an owner name: the first record needs one".to_owned(),
        "unexpected end of entry" => format!("expected more fields after `{text}`"),
        "trailing tokens" => format!("expected the end of the record, found `{text}`"),
        "unbalanced parens" => "expected an opening parenthesis before the closing one".to_owned(),
        other if other.starts_with("unknown control") => {
            format!("expected $ORIGIN or $TTL, found `{text}`")
        }
        other if other.starts_with("different class") => {
            "expected class IN: no other class is served".to_owned()
        }
        other => format!("{other}, found `{text}`"),
    };
    syntax_error(path, entry, token, problem)
}
