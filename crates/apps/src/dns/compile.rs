//! Answers written down ahead, so that a query costs a lookup and a copy.
//!
//! A prepared answer is the part of a message behind its question. All its
//! compression pointers lead into itself or to the end of the question's name,
//! so they depend only on where the question ends. An answer is written for
//! one length of the question; when it is used for another (a wildcard, a name
//! that does not exist, a name under a delegation), the pointers listed with
//! it are moved by the difference. A pointer to the whole of the question's
//! name is 12 for every length and needs no moving.

use super::catalog::{Answer, Owner, Shown};
use super::message::{HEADER_BYTES, Rcode, rtype};
use super::name;

/// Where compression pointers may lead: 14 bits, less room for the question to
/// be longer than the answer was written for.
const MAX_POINTER_TARGET: usize = 0x3fff - name::MAX_NAME_BYTES;

/// How many names of one message are remembered for compression. Bounds the
/// work for sets with thousands of names.
const MAX_REMEMBERED: usize = 128;

/// The largest prepared answer: with header, question and OPT record it must
/// fit a DNS message.
const MAX_PREPARED_BYTES: usize = 65_535 - HEADER_BYTES - name::MAX_NAME_BYTES - 4 - 11;

/// A pointer to the name of the question.
const QUESTION_POINTER: [u8; 2] = [0xc0, HEADER_BYTES as u8];

/// One prepared answer: where its parts lie in the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prepared {
    start: u32,
    fixups: u32,
    cuts: u32,
    /// The length in bytes of all three sections.
    len: u16,
    /// The length in bytes without the additional section.
    needed_len: u16,
    fixup_count: u16,
    cut_count: u16,
    /// The end of the question that this was written for.
    pub question_end: u16,
    /// The number of records in each section.
    pub counts: [u16; 3],
    pub rcode: Rcode,
    pub authoritative: bool,
}

/// The end of one set of the additional section, where it may be cut off.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// The length in bytes of the answer up to here.
    pub len: u16,
    /// The number of additional records up to here.
    pub count: u16,
    /// The answer is of no use without this set.
    pub is_needed: bool,
}

/// All prepared answers, one after the other.
#[derive(Default)]
pub(super) struct Store {
    bytes: Vec<u8>,
    fixups: Vec<u16>,
    cuts: Vec<Cut>,
    prepared: Vec<Prepared>,
}

/// Why an answer could not be prepared.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CompileError {
    /// The record sets do not fit one DNS message.
    AnswerTooLong,
    /// The store is full.
    StoreFull,
}

impl Store {
    #[inline]
    pub(super) fn get(&self, index: u32) -> &Prepared {
        &self.prepared[index as usize]
    }

    #[inline]
    pub(super) fn bytes(&self, prepared: &Prepared) -> &[u8] {
        let start = prepared.start as usize;
        &self.bytes[start..start + usize::from(prepared.len)]
    }

    /// Where the pointers are that depend on the length of the question.
    #[inline]
    pub(super) fn fixups(&self, prepared: &Prepared) -> &[u16] {
        let start = prepared.fixups as usize;
        &self.fixups[start..start + usize::from(prepared.fixup_count)]
    }

    /// What is left of an answer when only `room` bytes may be sent. `None`
    /// when the answer or authority section does not fit.
    pub(super) fn fit(&self, prepared: &Prepared, room: usize) -> Option<Fit> {
        if usize::from(prepared.needed_len) > room {
            return None;
        }
        let start = prepared.cuts as usize;
        let cuts = &self.cuts[start..start + usize::from(prepared.cut_count)];
        let kept = cuts.partition_point(|cut| usize::from(cut.len) <= room);
        let (len, count) = match kept.checked_sub(1) {
            Some(last) => (cuts[last].len, cuts[last].count),
            None => (prepared.needed_len, 0),
        };
        Some(Fit {
            len: len.into(),
            additional_count: count,
            is_cut: cuts[kept..].iter().any(|cut| cut.is_needed),
        })
    }

    /// Writes an answer down. `suffix` is what is known of the question's
    /// name: all of it, or the end that all names share for which the answer
    /// is meant. `is_exact` says that the answer is only used for `suffix`.
    pub(super) fn prepare(
        &mut self,
        answer: &Answer<'_>,
        suffix: &[u8],
        is_exact: bool,
    ) -> Result<u32, CompileError> {
        let index = u32::try_from(self.prepared.len()).map_err(|_| CompileError::StoreFull)?;
        let mut writer = Writer::new(suffix);
        let mut counts = [0; 3];
        for shown in &answer.answer {
            counts[0] += writer.write_set(shown)?;
        }
        for shown in &answer.authority {
            counts[1] += writer.write_set(shown)?;
        }
        let needed_len = writer.bytes.len();
        let mut cuts = Vec::with_capacity(answer.additional.len());
        for (shown, is_needed) in &answer.additional {
            match writer.write_set(shown) {
                Ok(count) => counts[2] += count,
                // What is only a courtesy may be left out for good.
                Err(CompileError::AnswerTooLong) if !is_needed => break,
                Err(error) => return Err(error),
            }
            let len = writer.bytes.len() as u16;
            cuts.push(Cut { len, count: counts[2], is_needed: *is_needed });
        }
        if is_exact {
            writer.fixups.clear();
        }
        let place = |len: usize| u32::try_from(len).map_err(|_| CompileError::StoreFull);
        self.prepared.push(Prepared {
            start: place(self.bytes.len())?,
            fixups: place(self.fixups.len())?,
            cuts: place(self.cuts.len())?,
            len: writer.bytes.len() as u16,
            needed_len: needed_len as u16,
            fixup_count: writer.fixups.len() as u16,
            cut_count: cuts.len() as u16,
            question_end: writer.question_end as u16,
            counts,
            rcode: answer.rcode,
            authoritative: answer.authoritative,
        });
        self.bytes.append(&mut writer.bytes);
        self.fixups.append(&mut writer.fixups);
        self.cuts.append(&mut cuts);
        Ok(index)
    }

    /// Gives back memory that was set aside for more answers.
    pub(super) fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
        self.fixups.shrink_to_fit();
        self.cuts.shrink_to_fit();
        self.prepared.shrink_to_fit();
    }

    /// How much memory the answers take.
    pub(super) fn memory_bytes(&self) -> usize {
        self.bytes.capacity()
            + self.fixups.capacity() * size_of::<u16>()
            + self.cuts.capacity() * size_of::<Cut>()
            + self.prepared.capacity() * size_of::<Prepared>()
    }
}

/// How much of an answer fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    pub len: usize,
    pub additional_count: u16,
    /// Something was cut off that the client should ask for again.
    pub is_cut: bool,
}

/// Writes record sets with compressed names.
struct Writer<'a> {
    bytes: Vec<u8>,
    fixups: Vec<u16>,
    question_end: usize,
    /// Names that pointers can lead to, and where they are in the message.
    targets: Vec<(&'a [u8], usize)>,
}

impl<'a> Writer<'a> {
    fn new(suffix: &'a [u8]) -> Self {
        let mut writer = Writer {
            bytes: Vec::with_capacity(64),
            fixups: Vec::new(),
            question_end: HEADER_BYTES + suffix.len() + 4,
            targets: Vec::new(),
        };
        writer.remember(suffix, HEADER_BYTES);
        writer
    }

    /// Makes a name that stands at `at` in the message, and the names above
    /// it, targets of pointers.
    fn remember(&mut self, wire: &'a [u8], at: usize) {
        let (mut rest, mut at) = (wire, at);
        while let Some((label, parent)) = name::split_label(rest) {
            if at > MAX_POINTER_TARGET || self.targets.len() >= MAX_REMEMBERED {
                return;
            }
            if self.find(rest).is_none() {
                self.targets.push((rest, at));
            }
            at += label.len() + 1;
            rest = parent;
        }
    }

    fn find(&self, wire: &[u8]) -> Option<usize> {
        let found = self.targets.iter().find(|(target, _)| target.eq_ignore_ascii_case(wire));
        found.map(|&(_, at)| at)
    }

    fn write_name(&mut self, wire: &'a [u8]) {
        let start = self.question_end + self.bytes.len();
        let mut rest = wire;
        while let Some((label, parent)) = name::split_label(rest) {
            if let Some(target) = self.find(rest) {
                self.fixups.push(self.bytes.len() as u16);
                self.bytes.extend_from_slice(&(0xc000 | target as u16).to_be_bytes());
                self.remember(wire, start);
                return;
            }
            self.bytes.push(label.len() as u8);
            self.bytes.extend_from_slice(label);
            rest = parent;
        }
        self.bytes.push(0);
        self.remember(wire, start);
    }

    /// Writes a record set and returns how many records it has.
    fn write_set(&mut self, shown: &Shown<'a>) -> Result<u16, CompileError> {
        let (start, fixups) = (self.bytes.len(), self.fixups.len());
        let rtype = shown.set.rtype;
        for data in &shown.set.data {
            match shown.owner {
                Owner::Question => self.bytes.extend_from_slice(&QUESTION_POINTER),
                Owner::Name(name) => self.write_name(name),
            }
            self.bytes.extend_from_slice(&rtype.to_be_bytes());
            self.bytes.extend_from_slice(&super::message::CLASS_IN.to_be_bytes());
            self.bytes.extend_from_slice(&shown.ttl.to_be_bytes());
            let len_at = self.bytes.len();
            self.bytes.extend_from_slice(&[0; 2]);
            self.write_data(rtype, data);
            let len = self.bytes.len() - len_at - 2;
            if self.bytes.len() > MAX_PREPARED_BYTES {
                self.bytes.truncate(start);
                self.fixups.truncate(fixups);
                let end = self.question_end + start;
                self.targets.retain(|&(_, at)| at < end);
                return Err(CompileError::AnswerTooLong);
            }
            self.bytes[len_at..len_at + 2].copy_from_slice(&(len as u16).to_be_bytes());
        }
        Ok(shown.set.data.len() as u16)
    }

    /// Writes record data. Names are compressed only in the types of RFC 1035
    /// (RFC 3597 section 4).
    fn write_data(&mut self, rtype: u16, data: &'a [u8]) {
        let names_at = match rtype {
            rtype::NS | rtype::CNAME | rtype::PTR | rtype::SOA => 0,
            rtype::MX => 2,
            _ => return self.bytes.extend_from_slice(data),
        };
        let name_count = if rtype == rtype::SOA { 2 } else { 1 };
        // Data given in hexadecimal may be anything: what is not as it should
        // be is sent as it is.
        let Some(names_end) = names_end(data, names_at, name_count) else {
            return self.bytes.extend_from_slice(data);
        };
        self.bytes.extend_from_slice(&data[..names_at]);
        let mut at = names_at;
        for _ in 0..name_count {
            let len = name::wire_len(&data[at..]).unwrap_or(0);
            self.write_name(&data[at..at + len]);
            at += len;
        }
        self.bytes.extend_from_slice(&data[names_end..]);
    }
}

/// Where `count` names that begin at `at` end, when they are well formed.
fn names_end(data: &[u8], at: usize, count: usize) -> Option<usize> {
    (0..count).try_fold(at, |at, _| Some(at + name::wire_len(data.get(at..)?)?))
}
