//! Compares the replies of two servers to the same query.
//!
//! Some differences have no meaning: the order of records, name compression, and optional records
//! in the authority and additional sections. A [`Difference`] is one that a resolver would notice.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fmt;

use domain::base::iana::{Class, Rtype};
use domain::base::name::ToName;
use domain::base::rdata::ComposeRecordData;
use domain::base::{Message, ParsedName, Ttl};
use domain::rdata::AllRecordData;

/// Difference between two replies that a resolver would notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// One of the messages cannot be parsed.
    Unreadable {
        /// Side of the comparison: `expected` or `got`.
        side: &'static str,
        /// Reason of the failure.
        problem: String,
    },
    /// A field of the header or the question differs.
    Field {
        /// Name of the field.
        field: &'static str,
        /// Value from the reference server.
        expected: String,
        /// Value from the tested server.
        got: String,
    },
    /// The records of a section differ.
    Section {
        /// Name of the section.
        section: &'static str,
        /// Records that the server should have sent.
        missing: Vec<String>,
        /// Records that the server should not have sent.
        extra: Vec<String>,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Unreadable { side, problem } => {
                write!(f, "the {side} answer cannot be read: {problem}")
            }
            Difference::Field { field, expected, got } => {
                write!(f, "{field}: expected {expected}, got {got}")
            }
            Difference::Section { section, missing, extra } => {
                write!(f, "{section} section: missing {missing:?}, extra {extra:?}")
            }
        }
    }
}

impl std::error::Error for Difference {}

/// Record in canonical form: equal records compare equal. Names are uncompressed and in lower
/// case.
#[derive(Clone, Debug)]
struct CanonicalRecord {
    owner: Vec<u8>,
    rtype: Rtype,
    class: Class,
    ttl: Ttl,
    data: Vec<u8>,
    /// Presentation format for error messages, in the case of the message; not compared.
    text: String,
}

impl Ord for CanonicalRecord {
    fn cmp(&self, other: &Self) -> Ordering {
        (&self.owner, self.rtype, self.class, self.ttl, &self.data).cmp(&(
            &other.owner,
            other.rtype,
            other.class,
            other.ttl,
            &other.data,
        ))
    }
}

impl PartialOrd for CanonicalRecord {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for CanonicalRecord {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for CanonicalRecord {}

type Section = BTreeSet<CanonicalRecord>;

/// Parsed response, reduced to the compared parts.
struct Response {
    id: u16,
    rcode: u16,
    authoritative: bool,
    truncated: bool,
    question: Option<(Vec<u8>, Rtype, Class)>,
    answer: Section,
    authority: Section,
    additional: Section,
    has_opt: bool,
}

/// Compares a reply with the reply of a reference server to the same query.
///
/// The RFCs leave these differences to the server, so they are allowed:
/// * Errors about malformed queries may lack the question.
/// * Sections are not compared when both replies are truncated. The server decides how much of a
///   truncated reply to send (RFC 2181 section 9).
/// * A positive answer needs no authority section: a server may send the zone's NS records or not.
/// * Additional records are optional (RFC 1034 section 4.3.2 step 6), so some or all may be
///   missing. Records that the reference does not send are an error. In a referral, glue inside
///   the delegated zone is required (RFC 9471).
/// * ANY may be answered with part of the record sets (RFC 8482), and the parts may differ. A
///   type that both servers send must have the same records.
///
/// # Errors
/// Returns the first difference that a resolver would notice.
pub fn compare(expected: &[u8], got: &[u8]) -> Result<(), Difference> {
    let expected = parse_side("expected", expected)?;
    let got = parse_side("got", got)?;
    compare_field("id", &expected.id, &got.id)?;
    compare_field("rcode", &expected.rcode, &got.rcode)?;
    if let (Some(expected), Some(got)) = (&expected.question, &got.question) {
        compare_field("question", expected, got)?;
    }
    compare_field("AA", &expected.authoritative, &got.authoritative)?;
    compare_field("TC", &expected.truncated, &got.truncated)?;
    compare_field("EDNS", &expected.has_opt, &got.has_opt)?;
    if expected.truncated {
        return Ok(());
    }
    compare_sections(&expected, &got)
}

fn compare_sections(expected: &Response, got: &Response) -> Result<(), Difference> {
    let none = Section::new();
    let is_any = matches!(expected.question, Some((_, Rtype::ANY, _)));
    if is_any && !got.answer.is_empty() && !expected.answer.is_empty() {
        let (expected_part, got_part) = shared_types(&expected.answer, &got.answer);
        compare_records("answer", &expected_part, &expected_part, &got_part)?;
        return Ok(());
    }
    compare_records("answer", &expected.answer, &expected.answer, &got.answer)?;
    let is_positive = !expected.answer.is_empty();
    let needed_authority = if is_positive { &none } else { &expected.authority };
    compare_records("authority", needed_authority, &expected.authority, &got.authority)?;
    compare_records("additional", &needed_glue(expected), &expected.additional, &got.additional)
}

/// Records of each section whose types are in both sections.
fn shared_types(one: &Section, other: &Section) -> (Section, Section) {
    let only = |section: &Section, of: &Section| {
        let is_shared = |record: &&CanonicalRecord| of.iter().any(|o| o.rtype == record.rtype);
        section.iter().filter(is_shared).cloned().collect()
    };
    (only(one, other), only(other, one))
}

/// Glue without which a referral cannot be followed.
fn needed_glue(response: &Response) -> Section {
    if response.authoritative || !response.answer.is_empty() {
        return Section::new();
    }
    let cuts: Vec<&CanonicalRecord> =
        response.authority.iter().filter(|record| record.rtype == Rtype::NS).collect();
    let is_inside = |glue: &&CanonicalRecord| {
        cuts.iter().any(|cut| cut.data == glue.owner && is_at_or_below(&glue.owner, &cut.owner))
    };
    response.additional.iter().filter(is_inside).cloned().collect()
}

/// True when `name` is `end` or a name below `end`.
fn is_at_or_below(name: &[u8], end: &[u8]) -> bool {
    let mut rest = name;
    loop {
        if rest == end {
            return true;
        }
        match super::name::parent(rest) {
            Some(parent) => rest = parent,
            None => return false,
        }
    }
}

fn compare_field<T: PartialEq + fmt::Debug>(
    field: &'static str,
    expected: &T,
    got: &T,
) -> Result<(), Difference> {
    if expected == got {
        return Ok(());
    }
    Err(Difference::Field { field, expected: format!("{expected:?}"), got: format!("{got:?}") })
}

/// Checks that `got` has all records of `needed` and no record outside `allowed`.
fn compare_records(
    section: &'static str,
    needed: &Section,
    allowed: &Section,
    got: &Section,
) -> Result<(), Difference> {
    let texts = |records: &mut dyn Iterator<Item = &CanonicalRecord>| {
        records.map(|record| record.text.clone()).collect::<Vec<_>>()
    };
    let missing = texts(&mut needed.difference(got));
    let extra = texts(&mut got.difference(allowed));
    if missing.is_empty() && extra.is_empty() {
        return Ok(());
    }
    Err(Difference::Section { section, missing, extra })
}

fn parse_side(side: &'static str, bytes: &[u8]) -> Result<Response, Difference> {
    parse_response(bytes)
        .map_err(|problem| Difference::Unreadable { side, problem: problem.to_string() })
}

fn parse_response(bytes: &[u8]) -> Result<Response, Box<dyn std::error::Error>> {
    let message = Message::from_octets(bytes).map_err(|_| "shorter than a header")?;
    let header = message.header();
    if !header.qr() {
        return Err("not a response".into());
    }
    let question = match message.question().next() {
        Some(question) => {
            let question = question?;
            let name: Vec<u8> = lowercase_wire(question.qname());
            Some((name, question.qtype(), question.qclass()))
        }
        None => None,
    };
    let mut sections = [Section::new(), Section::new(), Section::new()];
    let (answer, authority, additional) =
        (message.answer()?, message.authority()?, message.additional()?);
    let mut has_opt = false;
    let mut count = 0;
    for (records, into) in [answer, authority, additional].into_iter().zip(&mut sections) {
        for record in records {
            let record = record?;
            count += 1;
            if record.rtype() == Rtype::OPT {
                has_opt = true;
                continue;
            }
            let record = record
                .to_any_record::<AllRecordData<_, ParsedName<_>>>()
                .map_err(|error| format!("record {count}: {error}"))?;
            let mut data = Vec::new();
            record.data().compose_canonical_rdata(&mut data)?;
            into.insert(CanonicalRecord {
                owner: lowercase_wire(record.owner()),
                rtype: record.rtype(),
                class: record.class(),
                ttl: record.ttl(),
                data,
                text: record.to_string(),
            });
        }
    }
    let [answer, authority, additional] = sections;
    Ok(Response {
        id: header.id(),
        rcode: message.opt_rcode().to_int(),
        authoritative: header.aa(),
        truncated: header.tc(),
        question,
        answer,
        authority,
        additional,
        has_opt,
    })
}

fn lowercase_wire(name: &impl ToName) -> Vec<u8> {
    let mut wire = Vec::with_capacity(32);
    for label in name.iter_labels() {
        wire.push(label.len() as u8);
        wire.extend(label.as_slice().iter().map(u8::to_ascii_lowercase));
    }
    wire
}

#[cfg(test)]
mod tests;
