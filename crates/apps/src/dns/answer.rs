//! Puts a reply together: the front of the query, a prepared answer, patched
//! bytes.

use super::compile::Prepared;
use super::lookup::{Rename, Reply, Zones};
use super::message::{CLASS_IN, Edns, HEADER_BYTES, Query, Rcode, rtype};
use super::name::MAX_NAME_BYTES;

/// The length of an OPT record without options.
const OPT_BYTES: usize = 11;

/// A reply that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Written {
    pub len: usize,
    pub rcode: Rcode,
    pub is_truncated: bool,
}

/// Header fields of a reply that differ from one to another.
#[derive(Clone, Copy)]
struct Head {
    rcode: Rcode,
    authoritative: bool,
    truncated: bool,
    /// Records in the answer, authority and additional sections, OPT not
    /// counted.
    counts: [u16; 3],
}

impl Head {
    fn error(rcode: Rcode) -> Self {
        Head { rcode, authoritative: false, truncated: false, counts: [0; 3] }
    }
}

/// Answers a query with at most `max_len` bytes. `None` when `reply` cannot
/// even hold an empty answer.
#[inline]
pub(super) fn answer(
    zones: &Zones,
    query: &Query<'_>,
    offered_bytes: u16,
    max_len: usize,
    reply: &mut [u8],
) -> Option<Written> {
    let max_len = max_len.min(reply.len());
    let reply = &mut reply[..max_len];
    let opt = query.edns.map(|edns| (edns, offered_bytes));
    if let Some(rcode) = refusal(query) {
        return finish(query.front, query.front.len(), opt, Head::error(rcode), reply);
    }
    match zones.find(query.name(), query.rtype) {
        Reply::Prepared(prepared) => write_prepared(zones, query, prepared, opt, reply),
        Reply::Renamed(rename) => write_renamed(query, rename, opt, reply),
        Reply::Foreign => {
            finish(query.front, query.front.len(), opt, Head::error(Rcode::Refused), reply)
        }
    }
}

/// Answers what is not a query that can be looked up: header and question,
/// with an error code. `front` is the header with or without the question.
pub(super) fn error(front: &[u8], rcode: Rcode, reply: &mut [u8]) -> Option<Written> {
    finish(front, front.len(), None, Head::error(rcode), reply)
}

/// Why a well-formed query is not looked up.
#[inline]
fn refusal(query: &Query<'_>) -> Option<Rcode> {
    // Types from 249 on are no data (RFC 6895 section 3.1), but for ANY.
    let is_data = query.rtype < rtype::TKEY && query.rtype != rtype::OPT && query.rtype != 0;
    let is_version_0 = query.edns.is_none_or(|edns| edns.version == 0);
    if is_data && is_version_0 && query.class == CLASS_IN {
        return None;
    }
    refusal_of_the_unusual(query)
}

/// As [`refusal`], for all that is not an everyday query.
#[cold]
fn refusal_of_the_unusual(query: &Query<'_>) -> Option<Rcode> {
    if query.edns.is_some_and(|edns| edns.version != 0) {
        return Some(Rcode::BadVers);
    }
    if query.class != CLASS_IN {
        return Some(Rcode::Refused);
    }
    match query.rtype {
        rtype::AXFR | rtype::IXFR => Some(Rcode::Refused),
        rtype::MAILA | rtype::MAILB | rtype::TKEY | rtype::TSIG => Some(Rcode::NotImp),
        0 | rtype::OPT => Some(Rcode::FormErr),
        _ => None,
    }
}

#[inline]
fn write_prepared(
    zones: &Zones,
    query: &Query<'_>,
    prepared: &Prepared,
    opt: Option<(Edns, u16)>,
    reply: &mut [u8],
) -> Option<Written> {
    let (front_len, max_len) = (query.front.len(), reply.len());
    let bytes = zones.store.bytes(prepared);
    let mut head = Head {
        rcode: prepared.rcode,
        authoritative: prepared.authoritative,
        truncated: false,
        counts: prepared.counts,
    };
    let reserved = front_len + if opt.is_some() { OPT_BYTES } else { 0 };
    let mut len = bytes.len();
    if reserved + len > max_len {
        match zones.store.fit(prepared, max_len.saturating_sub(reserved)) {
            Some(fit) => {
                len = fit.len;
                head.counts[2] = fit.additional_count;
                head.truncated = fit.is_cut;
            }
            // RFC 2181 section 9: whole sets or nothing; the client asks again.
            None => {
                head.counts = [0; 3];
                head.truncated = true;
                len = 0;
            }
        }
    }
    let body = reply.get_mut(front_len..front_len + len)?;
    body.copy_from_slice(&bytes[..len]);
    if front_len != usize::from(prepared.question_end) {
        move_pointers(body, zones.store.fixups(prepared), front_len, prepared.question_end.into());
    }
    finish(query.front, front_len + len, opt, head, reply)
}

/// Moves the pointers of an answer that was written for a question with
/// another end.
fn move_pointers(body: &mut [u8], fixups: &[u16], question_end: usize, written_for: usize) {
    let shift = (question_end as u16).wrapping_sub(written_for as u16);
    for &at in fixups {
        let at = usize::from(at);
        if let Some(pointer) = body.get_mut(at..at + 2) {
            let moved = u16::from_be_bytes([pointer[0], pointer[1]]).wrapping_add(shift);
            pointer.copy_from_slice(&moved.to_be_bytes());
        }
    }
}

/// Answers for a name under a DNAME record: the record, and the alias that it
/// makes for this name (RFC 6672 section 3.2). The client asks again for the
/// new name.
#[cold]
fn write_renamed(
    query: &Query<'_>,
    rename: &Rename,
    opt: Option<(Edns, u16)>,
    reply: &mut [u8],
) -> Option<Written> {
    let (front_len, max_len) = (query.front.len(), reply.len());
    let prefix_len = query.name().len() - rename.owner.len();
    let prefix = &query.name()[..prefix_len];
    let owner_pointer = 0xc000 | (HEADER_BYTES + prefix_len) as u16;
    let is_too_long = prefix_len + rename.target.len() > MAX_NAME_BYTES;
    let mut body = Body { bytes: reply, len: front_len };
    let mut head = Head {
        rcode: if is_too_long { Rcode::YxDomain } else { Rcode::NoError },
        authoritative: true,
        truncated: false,
        counts: [1, 0, 0],
    };
    body.put_record(owner_pointer, rtype::DNAME, rename.ttl, &[&rename.target])?;
    if !is_too_long {
        let question = 0xc000 | HEADER_BYTES as u16;
        body.put_record(question, rtype::CNAME, rename.ttl, &[prefix, &rename.target])?;
        head.counts[0] = 2;
    }
    let mut len = body.len;
    if len + if opt.is_some() { OPT_BYTES } else { 0 } > max_len {
        head.counts = [0; 3];
        head.truncated = true;
        len = front_len;
    }
    finish(query.front, len, opt, head, reply)
}

/// A reply that is being written.
struct Body<'a> {
    bytes: &'a mut [u8],
    len: usize,
}

impl Body<'_> {
    fn put(&mut self, bytes: &[u8]) -> Option<()> {
        let end = self.len + bytes.len();
        self.bytes.get_mut(self.len..end)?.copy_from_slice(bytes);
        self.len = end;
        Some(())
    }

    fn put_record(&mut self, owner: u16, rtype: u16, ttl: u32, data: &[&[u8]]) -> Option<()> {
        let data_len: usize = data.iter().map(|part| part.len()).sum();
        self.put(&owner.to_be_bytes())?;
        self.put(&rtype.to_be_bytes())?;
        self.put(&CLASS_IN.to_be_bytes())?;
        self.put(&ttl.to_be_bytes())?;
        self.put(&(data_len as u16).to_be_bytes())?;
        data.iter().try_for_each(|part| self.put(part))
    }
}

/// Writes what is the same in all replies: the query's front with its header
/// patched, and the OPT record behind the `len` bytes that are there already.
#[inline]
fn finish(
    front: &[u8],
    len: usize,
    opt: Option<(Edns, u16)>,
    head: Head,
    reply: &mut [u8],
) -> Option<Written> {
    let (header, question) = front.split_first_chunk::<HEADER_BYTES>()?;
    let out = reply.get_mut(..front.len())?;
    let (out_header, out_question) = out.split_first_chunk_mut::<HEADER_BYTES>()?;
    out_question.copy_from_slice(question);
    // RFC 1035 section 4.1.1: QR set, opcode and RD as they came, AA, TC; then
    // CD as it came (RFC 4035 section 3.1.6) and the code. RA, Z and AD: no.
    let flags = 0x80
        | header[2] & 0x79
        | if head.authoritative { 0x04 } else { 0 }
        | if head.truncated { 0x02 } else { 0 };
    let code = header[3] & 0x10 | head.rcode as u8 & 0x0f;
    let questions = u8::from(!question.is_empty());
    let [answers, authorities, additionals] = head.counts;
    let additionals = additionals + u16::from(opt.is_some());
    let [an_high, an_low] = answers.to_be_bytes();
    let [ns_high, ns_low] = authorities.to_be_bytes();
    let [ar_high, ar_low] = additionals.to_be_bytes();
    *out_header = [
        header[0], header[1], flags, code, 0, questions, an_high, an_low, ns_high, ns_low, ar_high,
        ar_low,
    ];
    let mut len = len;
    if let Some((edns, offered_bytes)) = opt {
        let record = reply.get_mut(len..)?.first_chunk_mut::<OPT_BYTES>()?;
        *record = opt_record(edns, offered_bytes, head.rcode);
        len += OPT_BYTES;
    }
    Some(Written { len, rcode: head.rcode, is_truncated: head.truncated })
}

/// RFC 6891 section 6.1.2. The DO bit goes back as it came (RFC 3225).
#[inline]
fn opt_record(edns: Edns, offered_bytes: u16, rcode: Rcode) -> [u8; OPT_BYTES] {
    let [size_high, size_low] = offered_bytes.to_be_bytes();
    let flags = if edns.dnssec_ok { 0x80 } else { 0 };
    [0, 0, rtype::OPT as u8, size_high, size_low, rcode as u8 >> 4, 0, flags, 0, 0, 0]
}
