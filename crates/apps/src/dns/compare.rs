//! Whether two servers say the same to the same question.
//!
//! Messages may differ in ways that mean nothing: the order of records, where
//! names are compressed, courtesies in the authority and additional sections.
//! What a resolver would notice is a [`Difference`].

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fmt;

use domain::base::iana::{Class, Rtype};
use domain::base::name::ToName;
use domain::base::rdata::ComposeRecordData;
use domain::base::{Message, ParsedName, Ttl};
use domain::rdata::AllRecordData;

/// What a resolver would notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// One of the messages cannot be read.
    Unreadable {
        /// Which: `expected` or `got`.
        which: &'static str,
        /// Why.
        problem: String,
    },
    /// A field of the header or the question.
    Field {
        /// Its name.
        field: &'static str,
        /// What the reference says.
        expected: String,
        /// What the server says.
        got: String,
    },
    /// The records of a section.
    Section {
        /// The name of the section.
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
            Difference::Unreadable { which, problem } => {
                write!(f, "the {which} answer cannot be read: {problem}")
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

/// A record in a form where equal means the same: names in lower case and
/// uncompressed.
#[derive(Clone, Debug)]
struct Canonical {
    owner: Vec<u8>,
    rtype: Rtype,
    class: Class,
    ttl: Ttl,
    data: Vec<u8>,
    /// For people, in the case of the message: not compared.
    text: String,
}

impl Ord for Canonical {
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

impl PartialOrd for Canonical {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Canonical {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Canonical {}

type Section = BTreeSet<Canonical>;

/// A response, as far as it matters.
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

/// Compares an answer with that of a reference server to the same query.
///
/// These differences are allowed, each because RFCs leave it to the server:
/// * The question may be missing from errors about malformed queries.
/// * Sections are not compared when both answers are truncated: how much of a
///   truncated answer to send is up to the server (RFC 2181 section 9).
/// * A positive answer needs no authority section: servers may send the zone's
///   NS records or not.
/// * Additional records are a courtesy (RFC 1034 section 4.3.2 step 6), so some
///   or all may be missing, but none may be there that the reference would not
///   send; only the glue of a referral that lies inside the delegated zone is
///   needed (RFC 9471).
/// * ANY may be answered with a part of what there is (RFC 8482), and not the
///   same part; a type that both send must have the same records.
///
/// # Errors
/// The first difference that a resolver would notice.
pub fn compare(expected: &[u8], got: &[u8]) -> Result<(), Difference> {
    let expected = read("expected", expected)?;
    let got = read("got", got)?;
    same("id", &expected.id, &got.id)?;
    same("rcode", &expected.rcode, &got.rcode)?;
    if let (Some(expected), Some(got)) = (&expected.question, &got.question) {
        same("question", expected, got)?;
    }
    same("AA", &expected.authoritative, &got.authoritative)?;
    same("TC", &expected.truncated, &got.truncated)?;
    same("EDNS", &expected.has_opt, &got.has_opt)?;
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
        check("answer", &expected_part, &expected_part, &got_part)?;
        return Ok(());
    }
    check("answer", &expected.answer, &expected.answer, &got.answer)?;
    let is_positive = !expected.answer.is_empty();
    let needed_authority = if is_positive { &none } else { &expected.authority };
    check("authority", needed_authority, &expected.authority, &got.authority)?;
    check("additional", &needed_glue(expected), &expected.additional, &got.additional)
}

/// The records of both sections whose types are in both.
fn shared_types(one: &Section, other: &Section) -> (Section, Section) {
    let only = |section: &Section, of: &Section| {
        let is_shared = |record: &&Canonical| of.iter().any(|o| o.rtype == record.rtype);
        section.iter().filter(is_shared).cloned().collect()
    };
    (only(one, other), only(other, one))
}

/// The additional records of a referral without which it leads nowhere.
fn needed_glue(response: &Response) -> Section {
    if response.authoritative || !response.answer.is_empty() {
        return Section::new();
    }
    let cuts: Vec<&Canonical> =
        response.authority.iter().filter(|record| record.rtype == Rtype::NS).collect();
    let is_inside = |glue: &&Canonical| {
        cuts.iter().any(|cut| cut.data == glue.owner && ends_with_name(&glue.owner, &cut.owner))
    };
    response.additional.iter().filter(is_inside).cloned().collect()
}

/// Whether `name` is `end` or under it.
fn ends_with_name(name: &[u8], end: &[u8]) -> bool {
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

fn same<T: PartialEq + fmt::Debug>(
    field: &'static str,
    expected: &T,
    got: &T,
) -> Result<(), Difference> {
    if expected == got {
        return Ok(());
    }
    Err(Difference::Field { field, expected: format!("{expected:?}"), got: format!("{got:?}") })
}

/// All of `needed` must be there and nothing outside `allowed`.
fn check(
    section: &'static str,
    needed: &Section,
    allowed: &Section,
    got: &Section,
) -> Result<(), Difference> {
    let texts = |records: &mut dyn Iterator<Item = &Canonical>| {
        records.map(|record| record.text.clone()).collect::<Vec<_>>()
    };
    let missing = texts(&mut needed.difference(got));
    let extra = texts(&mut got.difference(allowed));
    if missing.is_empty() && extra.is_empty() {
        return Ok(());
    }
    Err(Difference::Section { section, missing, extra })
}

fn read(which: &'static str, bytes: &[u8]) -> Result<Response, Difference> {
    read_response(bytes)
        .map_err(|problem| Difference::Unreadable { which, problem: problem.to_string() })
}

fn read_response(bytes: &[u8]) -> Result<Response, Box<dyn std::error::Error>> {
    let message = Message::from_octets(bytes).map_err(|_| "shorter than a header")?;
    let header = message.header();
    if !header.qr() {
        return Err("not a response".into());
    }
    let question = match message.question().next() {
        Some(question) => {
            let question = question?;
            let name: Vec<u8> = lower(question.qname());
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
            into.insert(Canonical {
                owner: lower(record.owner()),
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

fn lower(name: &impl ToName) -> Vec<u8> {
    let mut wire = Vec::with_capacity(32);
    for label in name.iter_labels() {
        wire.push(label.len() as u8);
        wire.extend(label.as_slice().iter().map(u8::to_ascii_lowercase));
    }
    wire
}

#[cfg(test)]
mod tests;
