//! Reads the records of zone files, with the scanner of the crate `domain`.
//!
//! The scanner gets one entry at a time. So errors in the syntax or in the rules of a zone can
//! name the line of the record.

use std::borrow::Cow;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use domain::base::iana::{Class, Rtype};
use domain::base::name::{ParsedName, ToLabelIter};
use domain::base::rdata::{ComposeRecordData, ParseAnyRecordData};
use domain::dep::octseq::Parser;
use domain::rdata::AllRecordData;
use domain::zonefile::inplace::{self, ScannedRecord, Zonefile};

use super::entries::{Entries, FileEntry, UnclosedEntry};
use super::error::{DnsError, ZoneFileLocation};
use super::message::rtype;
use super::name::{self, Name};
use super::rdata;

/// Maximum depth of included files.
const MAX_INCLUDE_DEPTH: usize = 8;

/// Maximum number of files that one zone file includes, at all depths together.
const MAX_INCLUDES: usize = 1000;

/// Record of a zone file.
#[derive(Debug)]
pub(super) struct FileRecord {
    pub owner: Name,
    pub rtype: u16,
    pub ttl: u32,
    /// Record data in wire format, with uncompressed names.
    pub data: Box<[u8]>,
    /// File of the record: the zone file, or a file that it includes.
    pub file: Arc<Path>,
    /// Line where the record begins, from 1.
    pub line: usize,
}

impl FileRecord {
    /// Location of the record.
    pub(super) fn location(&self) -> ZoneFileLocation {
        ZoneFileLocation::at_line(&self.file, self.line)
    }
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

/// Reads all records from the text of a zone file at `path`, and of the files that it includes.
pub(super) fn scan_records(
    path: &Path,
    text: &[u8],
    origin: Option<&Name>,
) -> Result<Vec<FileRecord>, DnsError> {
    let mut reader = Reader { zone_path: path, records: Vec::new(), includes: 0 };
    reader.scan_file(&path.into(), text, origin.cloned(), None, 0)?;
    Ok(reader.records)
}

/// Reader of a zone file and the files that it includes.
struct Reader<'a> {
    zone_path: &'a Path,
    records: Vec<FileRecord>,
    includes: usize,
}

impl Reader<'_> {
    /// Reads one file, `depth` levels below the zone file, with this origin and default TTL.
    fn scan_file(
        &mut self,
        path: &Arc<Path>,
        text: &[u8],
        origin: Option<Name>,
        ttl: Option<Vec<u8>>,
        depth: usize,
    ) -> Result<(), DnsError> {
        // Capacity for the whole text: the scanner hands out parts of its buffer.
        let mut scanner = Zonefile::with_capacity(text.len() + 1);
        scanner.set_default_class(Class::IN);
        if let Some(origin) = origin
            && let Ok(origin) = domain::base::Name::from_octets(origin.wire().to_vec().into())
        {
            scanner.set_origin(origin);
        }
        let mut ttl = ttl;
        let mut entries = Entries::new(text);
        let mut lines_scanned = 0;
        if let Some(ttl) = &ttl {
            scanner.extend_from_slice(&[b"$TTL ", &ttl[..], b"\n"].concat());
            lines_scanned = 1;
        }
        while let Some(entry) =
            entries.next().map_err(|unclosed| unclosed_error(path, &unclosed))?
        {
            if entry.is_directive(b"$INCLUDE") {
                self.include(path, &entry, current_origin(&scanner), ttl.clone(), depth)?;
                entries.recycle(entry);
                continue;
            }
            let normalized = in_scanner_form(path, &entry, &scanner)?;
            if entry.is_directive(b"$TTL") {
                ttl = normalized.split(|byte| b" \t".contains(byte)).nth(1).map(<[u8]>::to_vec);
            }
            scanner.extend_from_slice(&normalized);
            let (line, _) = entry.position(0);
            loop {
                match scanner.next_entry() {
                    Ok(None) => break,
                    Ok(Some(inplace::Entry::Record(record))) => {
                        self.records.push(convert(path, line, &record)?);
                    }
                    // Directives of this kind do not reach the scanner.
                    Ok(Some(inplace::Entry::Include { .. })) => {}
                    Err(error) => {
                        let message = error.to_string();
                        let text = &normalized;
                        return Err(scanner_error(path, &entry, text, lines_scanned, &message));
                    }
                }
            }
            lines_scanned += normalized.iter().filter(|&&byte| byte == b'\n').count();
            drop(normalized);
            entries.recycle(entry);
        }
        Ok(())
    }

    /// Reads the file of an `$INCLUDE FILE [ORIGIN]` directive in the file at `path` (RFC 1035
    /// section 5.1). Its origin and default TTL end with the included file.
    fn include(
        &mut self,
        path: &Path,
        entry: &FileEntry<'_>,
        origin: Option<Name>,
        ttl: Option<Vec<u8>>,
        depth: usize,
    ) -> Result<(), DnsError> {
        let fail = |token, problem: String| Err(syntax_error(path, entry, token, problem));
        let file = match entry.decoded_token(1) {
            Some(file) if !file.is_empty() && !file.contains(&0) => {
                PathBuf::from(OsString::from_vec(file))
            }
            _ => return fail(1, "expected the name of a file after $INCLUDE".to_owned()),
        };
        let origin = match entry.token(2) {
            [] => origin,
            text => match std::str::from_utf8(text)
                .ok()
                .and_then(|text| name::complete(text, origin.as_ref()))
            {
                Some(origin) => Some(origin),
                None => return fail(2, "expected a domain name as origin".to_owned()),
            },
        };
        if !entry.token(3).is_empty() {
            return fail(3, "expected the end of the $INCLUDE directive".to_owned());
        }
        self.includes += 1;
        if depth >= MAX_INCLUDE_DEPTH || self.includes > MAX_INCLUDES {
            return fail(
                0,
                format!(
                    "expected at most {MAX_INCLUDE_DEPTH} levels and {MAX_INCLUDES} included \
                     files: does a file include itself?"
                ),
            );
        }
        let file = path.parent().unwrap_or(Path::new("")).join(file);
        let text = match read_included(self.zone_path, &file) {
            Ok(text) => text,
            Err(error) => return fail(1, format!("cannot include {}: {error}", file.display())),
        };
        self.scan_file(&file.into(), &text, origin, ttl, depth + 1)
    }
}

/// Reads an included file. The file must lie below the folder of the zone file, symbolic links
/// followed, so that a zone file cannot make errors show parts of other files.
fn read_included(zone_path: &Path, file: &Path) -> io::Result<Vec<u8>> {
    let folder = match zone_path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let (folder, file) = (folder.canonicalize()?, file.canonicalize()?);
    if !file.starts_with(&folder) {
        return Err(io::Error::other(format!(
            "the file is outside {}, the folder of the zone file: move it there",
            folder.display()
        )));
    }
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("expected a regular file"));
    }
    std::fs::read(file)
}

/// Origin at the scanner's position.
fn current_origin(scanner: &Zonefile) -> Option<Name> {
    Name::from_wire(scanner.origin().ok()?.as_slice())
}

/// Text of an entry in the form that the scanner expects.
fn in_scanner_form<'a>(
    path: &Path,
    entry: &'a FileEntry<'_>,
    scanner: &Zonefile,
) -> Result<Cow<'a, [u8]>, DnsError> {
    let origin = || current_origin(scanner);
    match rdata::to_generic_form(entry, origin) {
        Ok(Some(text)) => Ok(Cow::Owned(text)),
        Ok(None) => Ok(entry.normalized()),
        Err(error) => {
            let expected = error.expected;
            Err(match entry.token(error.token) {
                [] => {
                    let last = error.token - 1;
                    let problem =
                        format!("expected {expected} after `{}`", shown(entry.token(last)));
                    syntax_error(path, entry, last, problem)
                }
                found => {
                    let problem = format!("expected {expected}, found `{}`", shown(found));
                    syntax_error(path, entry, error.token, problem)
                }
            })
        }
    }
}

/// Text of a token in an error message.
fn shown(token: &[u8]) -> String {
    String::from_utf8_lossy(token).chars().take(64).collect()
}

fn convert(path: &Arc<Path>, line: usize, record: &ScannedRecord) -> Result<FileRecord, DnsError> {
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
    let (ttl, data, file) = (record.ttl().as_secs(), data.into(), Arc::clone(path));
    Ok(FileRecord { owner, rtype, ttl, data, file, line })
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
    normalized: &[u8],
    lines_scanned: usize,
    message: &str,
) -> DnsError {
    let mut parts = message.splitn(3, ':');
    let mut number = || parts.next().and_then(|part| part.trim().parse::<usize>().ok());
    let (line, column) = (number().unwrap_or(0), number().unwrap_or(0));
    let reason = parts.next().unwrap_or(message).trim();
    let line = line.saturating_sub(lines_scanned);
    let mut token = FileEntry::token_at_scanner_position(normalized, line, column);
    if reason == "trailing tokens" {
        // The scanner has not read the unexpected token.
        token += 1;
    }
    let text = shown(entry.token(token));
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
            format!("expected $ORIGIN, $TTL or $INCLUDE, found `{text}`")
        }
        other if other.starts_with("different class") => {
            "expected class IN: no other class is served".to_owned()
        }
        other => format!("{other}, found `{text}`"),
    };
    syntax_error(path, entry, token, problem)
}
