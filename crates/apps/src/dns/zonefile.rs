//! Zone files to records, by the scanner of the crate `domain`.
//!
//! The scanner is given one entry at a time, so that a record that breaks a
//! rule of its zone, or of the syntax, can be named with its line.

use std::path::Path;

use domain::base::iana::{Class, Rtype};
use domain::base::name::{ParsedName, ToLabelIter};
use domain::base::rdata::{ComposeRecordData, ParseAnyRecordData};
use domain::dep::octseq::Parser;
use domain::rdata::AllRecordData;
use domain::zonefile::inplace::{self, ScannedRecord, Zonefile};

use super::entries::{Entries, Entry, Unfinished};
use super::error::{DnsError, Place};
use super::message::rtype;
use super::name::Name;

/// One record of a zone file.
#[derive(Debug)]
pub(super) struct FileRecord {
    pub owner: Name,
    pub rtype: u16,
    pub ttl: u32,
    /// In wire format, names not compressed.
    pub data: Box<[u8]>,
    /// The line on which the record begins.
    pub line: usize,
}

/// Reads all records of a zone file.
pub(super) fn read(path: &Path, origin: Option<&Name>) -> Result<Vec<FileRecord>, DnsError> {
    let text =
        std::fs::read(path).map_err(|source| DnsError::Read { path: path.to_owned(), source })?;
    scan(path, &text, origin)
}

/// Reads all records of the text of a zone file. `path` is for messages.
pub(super) fn scan(
    path: &Path,
    text: &[u8],
    origin: Option<&Name>,
) -> Result<Vec<FileRecord>, DnsError> {
    // Room for all of it: the scanner hands out parts of its buffer.
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
    while let Some(entry) =
        entries.next().map_err(|unfinished| unfinished_error(path, &unfinished))?
    {
        let plain = entry.plain();
        scanner.extend_from_slice(&plain);
        let (line, _) = entry.place(0);
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
                    return Err(explain(path, &entry, lines_scanned, &error.to_string()));
                }
            }
        }
        lines_scanned += plain.iter().filter(|&&byte| byte == b'\n').count();
        drop(plain);
        entries.recycle(entry);
    }
    Ok(records)
}

fn convert(path: &Path, line: usize, record: &ScannedRecord) -> Result<FileRecord, DnsError> {
    let refuse = |problem| DnsError::Zone { place: Place::line(path, line), problem };
    let mut owner = Vec::with_capacity(32);
    for label in record.owner().iter_labels() {
        owner.push(label.len() as u8);
        owner.extend_from_slice(label.as_slice());
    }
    let owner = Name::from_wire(&owner).ok_or_else(|| {
        refuse("the owner has an empty label, or more than 255 octets".to_owned())
    })?;
    let rtype = record.rtype().to_int();
    // RFC 6895 section 3.1: types of questions and of the protocol itself.
    if rtype == 0 || rtype == rtype::OPT || (128..=255).contains(&rtype) {
        return Err(refuse(format!("type {} cannot be stored in a zone", record.rtype())));
    }
    let mut data = Vec::with_capacity(16);
    if record.data().compose_rdata(&mut data).is_err() || data.len() > usize::from(u16::MAX) {
        return Err(refuse("the record data is longer than 65,535 octets".to_owned()));
    }
    if !is_well_formed(record.rtype(), &data) {
        return Err(refuse(format!(
            "the record data is not what type {} has: look for two dots in a row, and for a \
             wrong length behind \\#",
            record.rtype()
        )));
    }
    Ok(FileRecord { owner, rtype, ttl: record.ttl().as_secs(), data: data.into(), line })
}

/// Whether a receiver reads this data as it was meant. The scanner takes a name
/// with an empty label, and anything in the form of RFC 3597, even a compressed
/// name, for data of any type.
fn is_well_formed(rtype: Rtype, data: &[u8]) -> bool {
    let mut parser = Parser::from_ref(data);
    let parsed = AllRecordData::<&[u8], ParsedName<&[u8]>>::parse_any_rdata(rtype, &mut parser);
    let mut again = Vec::with_capacity(data.len());
    parsed.is_ok_and(|parsed| parsed.compose_rdata(&mut again).is_ok())
        && parser.remaining() == 0
        && again == data
}

fn unfinished_error(path: &Path, unfinished: &Unfinished) -> DnsError {
    let &Unfinished { line, column, expected } = unfinished;
    let place = Place { path: path.to_owned(), line, column };
    DnsError::Syntax { place, problem: format!("expected {expected} before the end of the file") }
}

fn syntax_error(path: &Path, entry: &Entry<'_>, token: usize, problem: String) -> DnsError {
    let (line, column) = entry.place(token);
    DnsError::Syntax { place: Place { path: path.to_owned(), line, column }, problem }
}

/// Says where and what from the scanner's message, `line:column: what`. The
/// scanner has read `lines_scanned` lines before this entry.
fn explain(path: &Path, entry: &Entry<'_>, lines_scanned: usize, message: &str) -> DnsError {
    let mut parts = message.splitn(3, ':');
    let mut number = || parts.next().and_then(|part| part.trim().parse::<usize>().ok());
    let (line, column) = (number().unwrap_or(0), number().unwrap_or(0));
    let what = parts.next().unwrap_or(message).trim();
    let line = line.saturating_sub(lines_scanned);
    let mut token = Entry::token_before(&entry.plain(), line, column);
    if what == "trailing tokens" {
        // It has not read the token that it did not expect.
        token += 1;
    }
    let text = String::from_utf8_lossy(entry.token(token));
    let text: String = text.chars().take(64).collect();
    let problem = match what {
        "expected rtype" => format!("expected a TTL, a class or a record type, found `{text}`"),
        "missing origin" => format!(
            "expected $ORIGIN before the relative name `{text}`, or the zone's name given with \
             the file"
        ),
        "missing last owner" => "expected an owner: the first record cannot go without".to_owned(),
        "unexpected end of entry" => format!("expected more fields after `{text}`"),
        "trailing tokens" => format!("expected the end of the record, found `{text}`"),
        "unbalanced parens" => "expected an opening parenthesis before the closing one".to_owned(),
        other if other.starts_with("unknown control") => {
            format!("expected $ORIGIN or $TTL, found `{text}`")
        }
        other if other.starts_with("different class") => {
            "expected class IN: no other is served".to_owned()
        }
        other => format!("{other}, found `{text}`"),
    };
    syntax_error(path, entry, token, problem)
}
