//! Zone files to records, by the scanner of the crate `domain`.
//!
//! What the scanner does not do is done here: line numbers for every record,
//! so that a later check can say where, and bounds on what is read.

use std::path::Path;

use domain::base::iana::Class;
use domain::base::name::ToLabelIter;
use domain::base::rdata::ComposeRecordData;
use domain::zonefile::inplace::{Entry, ScannedRecord, Zonefile};

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
    // The scanner wants the last line to have an end.
    let mut file = Zonefile::with_capacity(text.len() + 1);
    file.extend_from_slice(text);
    if !text.ends_with(b"\n") {
        file.extend_from_slice(b"\n");
    }
    file.set_default_class(Class::IN);
    if let Some(origin) = origin {
        let octets = origin.wire().to_vec().into();
        if let Ok(origin) = domain::base::Name::from_octets(octets) {
            file.set_origin(origin);
        }
    }
    let mut lines = LineCounter { text, offset: 0, line: 1 };
    let mut records = Vec::new();
    loop {
        let line = lines.entry_after(file.current_offset());
        match file.next_entry() {
            Ok(None) => return Ok(records),
            Ok(Some(Entry::Record(record))) => records.push(convert(path, line, &record)?),
            Ok(Some(Entry::Include { .. })) => {
                let problem =
                    "$INCLUDE is not supported: put the records into this file".to_owned();
                return Err(DnsError::Syntax { place: Place::line(path, line), problem });
            }
            Err(error) => return Err(syntax_error(path, text, &error.to_string())),
        }
    }
}

fn convert(path: &Path, line: usize, record: &ScannedRecord) -> Result<FileRecord, DnsError> {
    let refuse = |problem| DnsError::Zone { place: Place::line(path, line), problem };
    let mut owner = Vec::with_capacity(32);
    for label in record.owner().iter_labels() {
        owner.push(label.len() as u8);
        owner.extend_from_slice(label.as_slice());
    }
    let owner = Name::from_wire(&owner)
        .ok_or_else(|| refuse("the owner is longer than 255 octets".to_owned()))?;
    let rtype = record.rtype().to_int();
    // RFC 6895 section 3.1: types of questions and of the protocol itself.
    if rtype == 0 || rtype == rtype::OPT || (128..=255).contains(&rtype) {
        return Err(refuse(format!("type {} cannot be stored in a zone", record.rtype())));
    }
    let mut data = Vec::with_capacity(16);
    if record.data().compose_rdata(&mut data).is_err() || data.len() > usize::from(u16::MAX) {
        return Err(refuse("the record data is longer than 65,535 octets".to_owned()));
    }
    Ok(FileRecord { owner, rtype, ttl: record.ttl().as_secs(), data: data.into(), line })
}

/// Counts lines up to where the scanner is.
struct LineCounter<'a> {
    text: &'a [u8],
    offset: usize,
    line: usize,
}

impl LineCounter<'_> {
    /// The line on which the next entry begins, when the scanner has read
    /// `offset` bytes: white space and comments are passed over.
    fn entry_after(&mut self, offset: usize) -> usize {
        let offset = offset.clamp(self.offset, self.text.len());
        self.line += count_lines(&self.text[self.offset..offset]);
        self.offset = offset;
        while let Some(&byte) = self.text.get(self.offset) {
            match byte {
                b'\n' => self.line += 1,
                b';' => {
                    let rest = &self.text[self.offset..];
                    let len = rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
                    self.offset += len;
                    continue;
                }
                byte if byte.is_ascii_whitespace() => {}
                _ => break,
            }
            self.offset += 1;
        }
        self.line
    }
}

fn count_lines(text: &[u8]) -> usize {
    text.iter().filter(|&&byte| byte == b'\n').count()
}

/// Says where and what from the scanner's message, `line:column: what`.
fn syntax_error(path: &Path, text: &[u8], message: &str) -> DnsError {
    let mut parts = message.splitn(3, ':');
    let mut number = || parts.next().and_then(|part| part.trim().parse::<usize>().ok());
    let (line, column) = (number().unwrap_or(0), number().unwrap_or(0));
    let what = parts.next().unwrap_or(message).trim();
    let token = token_at(text, line, column);
    let problem = match what {
        "expected rtype" if is_ttl_with_unit(token) => {
            format!("`{token}` is a TTL with a unit: write it in seconds")
        }
        "expected rtype" => format!("expected a TTL, a class or a record type, found `{token}`"),
        "missing origin" => format!(
            "expected $ORIGIN before the relative name `{token}`, or the zone's name given with the file"
        ),
        "missing last owner" => "expected an owner: the first record cannot go without".to_owned(),
        "unexpected end of entry" => "expected more fields before the end of the record".to_owned(),
        "trailing tokens" => format!("expected the end of the record, found `{token}`"),
        "short buffer" => "expected more before the end of the file".to_owned(),
        "unbalanced parens" => "expected parentheses in pairs".to_owned(),
        "different class" => "expected class IN".to_owned(),
        other if token.is_empty() => other.to_owned(),
        other => format!("{other}, at `{token}`"),
    };
    DnsError::Syntax { place: Place { path: path.to_owned(), line, column }, problem }
}

/// The token at a place of the text, cut to what fits a message. Near the
/// place: the scanner may stand in the middle of it.
fn token_at(text: &[u8], line: usize, column: usize) -> &str {
    let mut lines = text.split(|&byte| byte == b'\n');
    let Some(content) = lines.nth(line.saturating_sub(1)) else { return "" };
    let at = column.saturating_sub(1).min(content.len());
    let start =
        content[..at].iter().rposition(u8::is_ascii_whitespace).map_or(0, |position| position + 1);
    let rest = &content[start..];
    let len = rest.iter().position(u8::is_ascii_whitespace).unwrap_or(rest.len()).min(64);
    std::str::from_utf8(&rest[..len]).unwrap_or("")
}

/// Whether a token is a TTL like `1h` or `2d12h`, which other servers allow.
fn is_ttl_with_unit(token: &str) -> bool {
    token.starts_with(|first: char| first.is_ascii_digit())
        && token.ends_with(['s', 'm', 'h', 'd', 'w', 'S', 'M', 'H', 'D', 'W'])
        && token.chars().all(|c| c.is_ascii_digit() || "smhdwSMHDW".contains(c))
}
