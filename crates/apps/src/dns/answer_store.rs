//! Store of prepared answers, so that a query costs one lookup and one copy.
//!
//! A prepared answer is the part of a message after the question. All its compression pointers
//! lead into the answer itself or into the question's name, so they depend only on the end of the
//! question.
//!
//! An answer is written for one length of the question. Some answers are used for other lengths
//! too: for a wildcard, a nonexistent name, or a name below a delegation. The pointers listed with
//! the answer (fixups) are then relocated by the difference. A pointer to the whole name of the
//! question is always 12 and needs no relocation.

use super::catalog::{Answer, OwnerName, RecordSetRef};
use super::message::{HEADER_BYTES, Rcode, rtype};
use super::name;

/// Largest offset that a compression pointer may have: 14 bits, less space for a question that is
/// longer than the question the answer was written for.
const MAX_POINTER_OFFSET: usize = 0x3fff - name::MAX_NAME_BYTES;

/// Maximum number of names of one message kept as targets for compression. Bounds the work for
/// sets with thousands of names.
const MAX_COMPRESSION_TARGETS: usize = 128;

/// Size of the largest prepared answer, in bytes: with header, question and OPT record, the
/// answer must fit a DNS message.
const MAX_PREPARED_BYTES: usize = 65_535 - HEADER_BYTES - name::MAX_NAME_BYTES - 4 - 11;

/// Compression pointer to the name of the question.
const QUESTION_POINTER: [u8; 2] = [0xc0, HEADER_BYTES as u8];

/// Prepared answer: offsets and lengths of its parts in the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreparedAnswer {
    bytes_start: u32,
    fixups_start: u32,
    truncation_points_start: u32,
    /// Length of all three sections, in bytes.
    len: u16,
    /// Length without the additional section, in bytes.
    needed_len: u16,
    fixup_count: u16,
    truncation_point_count: u16,
    /// End of the question that this answer was written for, in bytes from the start of the
    /// message.
    pub question_end: u16,
    /// Number of records in the answer, authority and additional sections.
    pub counts: [u16; 3],
    pub rcode: Rcode,
    pub authoritative: bool,
}

impl PreparedAnswer {
    /// Identity of the answer in its store.
    #[inline]
    pub(super) fn id(&self) -> u32 {
        self.bytes_start
    }

    /// Length of all three sections, in bytes.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len.into()
    }
}

/// End of a record set in the additional section, where the answer may be truncated.
#[derive(Clone, Copy, Debug)]
pub(super) struct TruncationPoint {
    /// Length of the answer up to here, in bytes.
    pub len: u16,
    /// Number of additional records up to here.
    pub additional_count: u16,
    /// The answer is of no use without this set.
    pub is_needed: bool,
}

/// Store of all prepared answers, in contiguous arrays.
#[derive(Default)]
pub(super) struct AnswerStore {
    bytes: Vec<u8>,
    fixups: Vec<u16>,
    truncation_points: Vec<TruncationPoint>,
    prepared: Vec<PreparedAnswer>,
}

/// Reason why an answer could not be prepared.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PrepareError {
    /// The record sets do not fit one DNS message.
    AnswerTooLong,
    /// The store is full.
    StoreFull,
}

impl AnswerStore {
    #[inline]
    pub(super) fn get(&self, index: u32) -> &PreparedAnswer {
        &self.prepared[index as usize]
    }

    #[inline]
    pub(super) fn bytes(&self, prepared: &PreparedAnswer) -> &[u8] {
        let start = prepared.bytes_start as usize;
        &self.bytes[start..start + usize::from(prepared.len)]
    }

    /// Offsets of the pointers that depend on the length of the question.
    #[inline]
    pub(super) fn fixups(&self, prepared: &PreparedAnswer) -> &[u16] {
        let start = prepared.fixups_start as usize;
        &self.fixups[start..start + usize::from(prepared.fixup_count)]
    }

    /// Returns the part of an answer that fits into `max_len` bytes, or `None` when the answer and
    /// authority sections do not fit.
    pub(super) fn fit(&self, prepared: &PreparedAnswer, max_len: usize) -> Option<Fit> {
        if usize::from(prepared.needed_len) > max_len {
            return None;
        }
        let start = prepared.truncation_points_start as usize;
        let points =
            &self.truncation_points[start..start + usize::from(prepared.truncation_point_count)];
        let fitting = points.partition_point(|point| usize::from(point.len) <= max_len);
        let (len, additional_count) = match fitting.checked_sub(1) {
            Some(last) => (points[last].len, points[last].additional_count),
            None => (prepared.needed_len, 0),
        };
        Some(Fit {
            len: len.into(),
            additional_count,
            is_truncated: points[fitting..].iter().any(|point| point.is_needed),
        })
    }

    /// Encodes an answer and returns its index. `suffix` is the known part of the question's name:
    /// the whole name, or the common end of all names that the answer serves. With `is_exact` the
    /// answer is used only for `suffix` itself.
    pub(super) fn prepare(
        &mut self,
        answer: &Answer<'_>,
        suffix: &[u8],
        is_exact: bool,
    ) -> Result<u32, PrepareError> {
        let index = u32::try_from(self.prepared.len()).map_err(|_| PrepareError::StoreFull)?;
        let mut writer = Writer::new(suffix);
        let mut counts = [0; 3];
        for set_ref in &answer.answer {
            counts[0] += writer.write_set(set_ref)?;
        }
        for set_ref in &answer.authority {
            counts[1] += writer.write_set(set_ref)?;
        }
        let needed_len = writer.bytes.len();
        let mut truncation_points = Vec::with_capacity(answer.additional.len());
        for (set_ref, is_needed) in &answer.additional {
            match writer.write_set(set_ref) {
                Ok(count) => counts[2] += count,
                // An optional set that is too large is left out for good.
                Err(PrepareError::AnswerTooLong) if !is_needed => break,
                Err(error) => return Err(error),
            }
            let len = writer.bytes.len() as u16;
            truncation_points.push(TruncationPoint {
                len,
                additional_count: counts[2],
                is_needed: *is_needed,
            });
        }
        if is_exact {
            writer.fixups.clear();
        }
        let offset = |len: usize| u32::try_from(len).map_err(|_| PrepareError::StoreFull);
        self.prepared.push(PreparedAnswer {
            bytes_start: offset(self.bytes.len())?,
            fixups_start: offset(self.fixups.len())?,
            truncation_points_start: offset(self.truncation_points.len())?,
            len: writer.bytes.len() as u16,
            needed_len: needed_len as u16,
            fixup_count: writer.fixups.len() as u16,
            truncation_point_count: truncation_points.len() as u16,
            question_end: writer.question_end as u16,
            counts,
            rcode: answer.rcode,
            authoritative: answer.authoritative,
        });
        self.bytes.append(&mut writer.bytes);
        self.fixups.append(&mut writer.fixups);
        self.truncation_points.append(&mut truncation_points);
        Ok(index)
    }

    /// Frees memory reserved for more answers.
    pub(super) fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
        self.fixups.shrink_to_fit();
        self.truncation_points.shrink_to_fit();
        self.prepared.shrink_to_fit();
    }

    /// Memory used by the answers, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.bytes.capacity()
            + self.fixups.capacity() * size_of::<u16>()
            + self.truncation_points.capacity() * size_of::<TruncationPoint>()
            + self.prepared.capacity() * size_of::<PreparedAnswer>()
    }
}

/// Part of an answer that fits a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    pub len: usize,
    pub additional_count: u16,
    /// A required record set was left out, so the reply needs the TC bit.
    pub is_truncated: bool,
}

/// Encoder of record sets, with name compression.
struct Writer<'a> {
    bytes: Vec<u8>,
    fixups: Vec<u16>,
    question_end: usize,
    /// Targets of compression pointers: names and their offsets in the message.
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
        writer.add_targets(suffix, HEADER_BYTES);
        writer
    }

    /// Adds the name at offset `at` of the message and its parent names as pointer targets.
    fn add_targets(&mut self, wire: &'a [u8], at: usize) {
        let (mut rest, mut at) = (wire, at);
        while let Some((label, parent)) = name::split_label(rest) {
            if at > MAX_POINTER_OFFSET || self.targets.len() >= MAX_COMPRESSION_TARGETS {
                return;
            }
            if self.find_target(rest).is_none() {
                self.targets.push((rest, at));
            }
            at += label.len() + 1;
            rest = parent;
        }
    }

    fn find_target(&self, wire: &[u8]) -> Option<usize> {
        let found = self.targets.iter().find(|(target, _)| target.eq_ignore_ascii_case(wire));
        found.map(|&(_, at)| at)
    }

    fn write_name(&mut self, wire: &'a [u8]) {
        let start = self.question_end + self.bytes.len();
        let mut rest = wire;
        while let Some((label, parent)) = name::split_label(rest) {
            if let Some(target) = self.find_target(rest) {
                self.fixups.push(self.bytes.len() as u16);
                self.bytes.extend_from_slice(&(0xc000 | target as u16).to_be_bytes());
                self.add_targets(wire, start);
                return;
            }
            self.bytes.push(label.len() as u8);
            self.bytes.extend_from_slice(label);
            rest = parent;
        }
        self.bytes.push(0);
        self.add_targets(wire, start);
    }

    /// Writes a record set and returns the number of its records.
    fn write_set(&mut self, set_ref: &RecordSetRef<'a>) -> Result<u16, PrepareError> {
        let (start, fixups) = (self.bytes.len(), self.fixups.len());
        let rtype = set_ref.set.rtype;
        for data in &set_ref.set.data {
            match set_ref.owner {
                OwnerName::Qname => self.bytes.extend_from_slice(&QUESTION_POINTER),
                OwnerName::Name(name) => self.write_name(name),
            }
            self.bytes.extend_from_slice(&rtype.to_be_bytes());
            self.bytes.extend_from_slice(&super::message::CLASS_IN.to_be_bytes());
            self.bytes.extend_from_slice(&set_ref.ttl.to_be_bytes());
            let len_at = self.bytes.len();
            self.bytes.extend_from_slice(&[0; 2]);
            self.write_data(rtype, data);
            let len = self.bytes.len() - len_at - 2;
            if self.bytes.len() > MAX_PREPARED_BYTES {
                self.bytes.truncate(start);
                self.fixups.truncate(fixups);
                let end = self.question_end + start;
                self.targets.retain(|&(_, at)| at < end);
                return Err(PrepareError::AnswerTooLong);
            }
            self.bytes[len_at..len_at + 2].copy_from_slice(&(len as u16).to_be_bytes());
        }
        Ok(set_ref.set.data.len() as u16)
    }

    /// Writes record data. Names are compressed only in the types of RFC 1035 (RFC 3597 section 4).
    fn write_data(&mut self, rtype: u16, data: &'a [u8]) {
        let names_at = match rtype {
            rtype::NS | rtype::CNAME | rtype::PTR | rtype::SOA => 0,
            rtype::MX => 2,
            _ => return self.bytes.extend_from_slice(data),
        };
        let name_count = if rtype == rtype::SOA { 2 } else { 1 };
        // Data given in hexadecimal may hold anything: malformed data is sent unchanged.
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

/// Returns the end of `count` names that begin at `at`, or `None` when a name is malformed.
fn names_end(data: &[u8], at: usize, count: usize) -> Option<usize> {
    (0..count).try_fold(at, |at, _| Some(at + name::wire_len(data.get(at..)?)?))
}
