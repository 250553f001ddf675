//! Writes replies: header and question of the query, a prepared answer, patched bytes.

use super::answer_store::PreparedAnswer;
use super::chaos::ServerIdentity;
use super::cookie::COOKIE_BYTES;
use super::lookup::{CompiledZones, DnameRecord, LookupResult};
use super::message::{CLASS_CHAOS, CLASS_IN, Edns, HEADER_BYTES, Query, Rcode, option_code, rtype};
use super::name::MAX_NAME_BYTES;
use super::rate_limit::ContentId;

/// Length of an OPT record without options, in bytes.
const OPT_BYTES: usize = 11;

/// Length, response code and TC bit of a reply that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WrittenReply {
    pub len: usize,
    pub rcode: Rcode,
    pub is_truncated: bool,
}

/// Header fields that differ between replies.
#[derive(Clone, Copy)]
struct ReplyHeader {
    rcode: Rcode,
    authoritative: bool,
    truncated: bool,
    /// Record counts of the answer, authority and additional sections, without the OPT record.
    counts: [u16; 3],
}

impl ReplyHeader {
    fn error(rcode: Rcode) -> Self {
        ReplyHeader { rcode, authoritative: false, truncated: false, counts: [0; 3] }
    }
}

/// OPT record of a reply.
#[derive(Clone, Copy)]
pub(super) struct ReplyOpt<'a> {
    pub edns: Edns,
    pub advertised_udp_bytes: u16,
    /// Options, encoded.
    pub options: &'a [u8],
}

impl ReplyOpt<'_> {
    /// Length of the record, in bytes.
    fn len(&self) -> usize {
        OPT_BYTES + self.options.len()
    }
}

/// Length of the OPT record of a reply, in bytes.
fn opt_len(opt: Option<ReplyOpt<'_>>) -> usize {
    opt.map_or(0, |opt| opt.len())
}

/// Extended error of refused queries (RFC 8914): code 0, other, and a text.
const OVERLOAD_ERROR: &[u8; 10] = b"\0\0overload";

/// Space for the options of a reply, in bytes.
const OPTIONS_BYTES: usize =
    4 + COOKIE_BYTES + 4 + ServerIdentity::MAX_BYTES + 4 + OVERLOAD_ERROR.len();

/// Buffer for the options of a reply: a cookie, a server identity and an error.
#[derive(Default)]
pub(super) struct OptionBuffer {
    bytes: OptionBytes,
    len: usize,
}

/// Space for the options of a reply.
struct OptionBytes([u8; OPTIONS_BYTES]);

impl Default for OptionBytes {
    fn default() -> Self {
        OptionBytes([0; OPTIONS_BYTES])
    }
}

impl OptionBuffer {
    /// Adds the COOKIE option.
    pub(super) fn add_cookie(&mut self, cookie: &[u8; COOKIE_BYTES]) {
        self.add(option_code::COOKIE, cookie);
    }

    /// Adds the NSID option.
    pub(super) fn add_nsid(&mut self, identity: &[u8]) {
        self.add(option_code::NSID, identity);
    }

    /// Adds the extended error of a query that is refused for the load of the server.
    pub(super) fn add_overload_error(&mut self) {
        self.add(option_code::EXTENDED_ERROR, OVERLOAD_ERROR);
    }

    fn add(&mut self, code: u16, data: &[u8]) {
        let [code_high, code_low] = code.to_be_bytes();
        let [len_high, len_low] = (data.len() as u16).to_be_bytes();
        let end = self.len + 4 + data.len();
        let Some(out) = self.bytes.0.get_mut(self.len..end) else { return };
        out[..4].copy_from_slice(&[code_high, code_low, len_high, len_low]);
        out[4..].copy_from_slice(data);
        self.len = end;
    }

    /// Options, encoded.
    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes.0[..self.len]
    }
}

/// Content of the reply to a query.
#[derive(Clone, Copy)]
pub(super) enum Content<'a> {
    /// A prepared answer.
    Prepared(&'a PreparedAnswer),
    /// The name is below this DNAME record.
    Dname(&'a DnameRecord),
    /// Text about the server itself, in class CH.
    ServerText(&'a [u8]),
    /// No records.
    Error(Rcode),
}

/// Identity of replies without records, for rate limiting.
pub(super) const ERROR_CONTENT: ContentId = 1 << 32;
const SERVER_TEXT_CONTENT: ContentId = 2 << 32;
const DNAME_CONTENT: ContentId = 3 << 32;

impl Content<'_> {
    /// Identity of the content, for rate limiting. Names that get one and the same answer, as
    /// nonexistent names of a zone, have one identity.
    #[inline]
    pub(super) fn id(&self) -> ContentId {
        match self {
            Content::Prepared(prepared) => prepared.id().into(),
            Content::Dname(dname) => DNAME_CONTENT | u64::from(dname.index),
            Content::ServerText(_) => SERVER_TEXT_CONTENT,
            Content::Error(_) => ERROR_CONTENT,
        }
    }

    /// Length of the records, in bytes.
    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Content::Prepared(prepared) => prepared.len(),
            Content::Dname(dname) => dname.owner.len() + 2 * dname.target.len() + 24,
            Content::ServerText(text) => text.len(),
            Content::Error(_) => 0,
        }
    }
}

/// Looks up the content of the reply to a query.
#[inline]
pub(super) fn find_content<'a>(
    zones: &'a CompiledZones,
    identity: &'a ServerIdentity,
    query: &Query<'_>,
) -> Content<'a> {
    if !is_common(query)
        && let Some(content) = uncommon_content(identity, query)
    {
        return content;
    }
    match zones.find(query.name(), query.rtype) {
        LookupResult::Prepared(prepared) => Content::Prepared(prepared),
        LookupResult::Dname(dname) => Content::Dname(dname),
        LookupResult::NotAuthoritative => Content::Error(Rcode::Refused),
    }
}

/// Writes the reply to a query, at most `max_len` bytes. Returns `None` when `reply` cannot hold
/// even an empty answer.
#[inline]
pub(super) fn write_reply(
    zones: &CompiledZones,
    query: &Query<'_>,
    content: Content<'_>,
    opt: Option<ReplyOpt<'_>>,
    max_len: usize,
    reply: &mut [u8],
) -> Option<WrittenReply> {
    let max_len = max_len.min(reply.len());
    let reply = &mut reply[..max_len];
    match content {
        Content::Prepared(prepared) => write_prepared(zones, query, prepared, opt, reply),
        Content::Dname(dname) => write_dname_reply(query, dname, opt, reply),
        Content::ServerText(text) => write_server_text(query, text, opt, reply),
        Content::Error(rcode) => {
            let front = query.header_and_question;
            finish(front, front.len(), opt, ReplyHeader::error(rcode), reply)
        }
    }
}

/// Writes an empty reply with the TC bit, after which a real client repeats its query over TCP.
#[cold]
pub(super) fn write_truncated(
    query: &Query<'_>,
    opt: Option<ReplyOpt<'_>>,
    reply: &mut [u8],
) -> Option<WrittenReply> {
    let head = ReplyHeader { truncated: true, ..ReplyHeader::error(Rcode::NoError) };
    finish(query.header_and_question, query.header_and_question.len(), opt, head, reply)
}

/// Writes an error reply to a message that cannot be looked up: header, question if present, and
/// the response code. `header_and_question` is the header with or without the question.
pub(super) fn write_error(
    header_and_question: &[u8],
    rcode: Rcode,
    reply: &mut [u8],
) -> Option<WrittenReply> {
    finish(header_and_question, header_and_question.len(), None, ReplyHeader::error(rcode), reply)
}

/// True for a query of a data type in class IN, which is looked up.
#[inline]
fn is_common(query: &Query<'_>) -> bool {
    // Data types below 249 (RFC 6895 section 3.1). Types from 249 on, ANY among them, are left to
    // the slow check.
    let is_data = query.rtype < rtype::TKEY && query.rtype != rtype::OPT && query.rtype != 0;
    let is_version_0 = query.edns.is_none_or(|edns| edns.version == 0);
    is_data && is_version_0 && query.class == CLASS_IN
}

/// Content of the reply to an uncommon query; `None` when it is looked up.
#[cold]
fn uncommon_content<'a>(identity: &'a ServerIdentity, query: &Query<'_>) -> Option<Content<'a>> {
    if query.edns.is_some_and(|edns| edns.version != 0) {
        return Some(Content::Error(Rcode::BadVers));
    }
    if query.class == CLASS_CHAOS
        && let Some(text) = identity.text_for(query.name(), query.rtype)
    {
        return Some(Content::ServerText(text));
    }
    if query.class != CLASS_IN {
        return Some(Content::Error(Rcode::Refused));
    }
    let rcode = match query.rtype {
        rtype::AXFR | rtype::IXFR => Rcode::Refused,
        rtype::MAILA | rtype::MAILB | rtype::TKEY | rtype::TSIG => Rcode::NotImp,
        0 | rtype::OPT => Rcode::FormErr,
        _ => return None,
    };
    Some(Content::Error(rcode))
}

#[inline]
fn write_prepared(
    zones: &CompiledZones,
    query: &Query<'_>,
    prepared: &PreparedAnswer,
    opt: Option<ReplyOpt<'_>>,
    reply: &mut [u8],
) -> Option<WrittenReply> {
    let (front_len, max_len) = (query.header_and_question.len(), reply.len());
    let bytes = zones.store.bytes(prepared);
    let mut head = ReplyHeader {
        rcode: prepared.rcode,
        authoritative: prepared.authoritative,
        truncated: false,
        counts: prepared.counts,
    };
    let reserved = front_len + opt_len(opt);
    let mut len = bytes.len();
    if reserved + len > max_len {
        match zones.store.fit(prepared, max_len.saturating_sub(reserved)) {
            Some(fit) => {
                len = fit.len;
                head.counts[2] = fit.additional_count;
                head.truncated = fit.is_truncated;
            }
            // RFC 2181 section 9: a whole record set or nothing. The client retries over TCP.
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
        relocate_pointers(
            body,
            zones.store.fixups(prepared),
            front_len,
            prepared.question_end.into(),
        );
    }
    finish(query.header_and_question, front_len + len, opt, head, reply)
}

/// Relocates the compression pointers of an answer that was prepared for a question with
/// another end.
fn relocate_pointers(
    body: &mut [u8],
    fixups: &[u16],
    question_end: usize,
    prepared_question_end: usize,
) {
    let shift = (question_end as u16).wrapping_sub(prepared_question_end as u16);
    for &at in fixups {
        let at = usize::from(at);
        if let Some(pointer) = body.get_mut(at..at + 2) {
            let relocated = u16::from_be_bytes([pointer[0], pointer[1]]).wrapping_add(shift);
            pointer.copy_from_slice(&relocated.to_be_bytes());
        }
    }
}

/// Writes the reply for a name below a DNAME record: the record, and the CNAME synthesized for
/// the queried name (RFC 6672 section 3.2). The client then queries the new name.
#[cold]
fn write_dname_reply(
    query: &Query<'_>,
    dname: &DnameRecord,
    opt: Option<ReplyOpt<'_>>,
    reply: &mut [u8],
) -> Option<WrittenReply> {
    let (front_len, max_len) = (query.header_and_question.len(), reply.len());
    let prefix_len = query.name().len() - dname.owner.len();
    let prefix = &query.name()[..prefix_len];
    let owner_pointer = 0xc000 | (HEADER_BYTES + prefix_len) as u16;
    let is_too_long = prefix_len + dname.target.len() > MAX_NAME_BYTES;
    let mut body = ReplyBody { bytes: reply, len: front_len };
    let mut head = ReplyHeader {
        rcode: if is_too_long { Rcode::YxDomain } else { Rcode::NoError },
        authoritative: true,
        truncated: false,
        counts: [1, 0, 0],
    };
    body.append_record(owner_pointer, (rtype::DNAME, CLASS_IN), dname.ttl, &[&dname.target])?;
    if !is_too_long {
        let question = 0xc000 | HEADER_BYTES as u16;
        let data = [prefix, &dname.target];
        body.append_record(question, (rtype::CNAME, CLASS_IN), dname.ttl, &data)?;
        head.counts[0] = 2;
    }
    let mut len = body.len;
    if len + opt_len(opt) > max_len {
        head.counts = [0; 3];
        head.truncated = true;
        len = front_len;
    }
    finish(query.header_and_question, len, opt, head, reply)
}

/// Writes the reply to a question in class CH about the server (RFC 4892).
#[cold]
fn write_server_text(
    query: &Query<'_>,
    text: &[u8],
    opt: Option<ReplyOpt<'_>>,
    reply: &mut [u8],
) -> Option<WrittenReply> {
    let front_len = query.header_and_question.len();
    let mut body = ReplyBody { bytes: reply, len: front_len };
    let question = 0xc000 | HEADER_BYTES as u16;
    let data = [&[text.len() as u8][..], text];
    body.append_record(question, (rtype::TXT, CLASS_CHAOS), 0, &data)?;
    let len = body.len;
    let head = ReplyHeader { counts: [1, 0, 0], ..ReplyHeader::error(Rcode::NoError) };
    finish(query.header_and_question, len, opt, head, reply)
}

/// Reply under construction.
struct ReplyBody<'a> {
    bytes: &'a mut [u8],
    len: usize,
}

impl ReplyBody<'_> {
    fn append(&mut self, bytes: &[u8]) -> Option<()> {
        let end = self.len + bytes.len();
        self.bytes.get_mut(self.len..end)?.copy_from_slice(bytes);
        self.len = end;
        Some(())
    }

    /// Appends a record of a type and class.
    fn append_record(
        &mut self,
        owner: u16,
        (rtype, class): (u16, u16),
        ttl: u32,
        data: &[&[u8]],
    ) -> Option<()> {
        let data_len: usize = data.iter().map(|part| part.len()).sum();
        self.append(&owner.to_be_bytes())?;
        self.append(&rtype.to_be_bytes())?;
        self.append(&class.to_be_bytes())?;
        self.append(&ttl.to_be_bytes())?;
        self.append(&(data_len as u16).to_be_bytes())?;
        data.iter().try_for_each(|part| self.append(part))
    }
}

/// Completes a reply: copies the query's header and question, patches the header, and appends
/// the OPT record after the first `len` bytes of the reply.
#[inline]
fn finish(
    header_and_question: &[u8],
    len: usize,
    opt: Option<ReplyOpt<'_>>,
    head: ReplyHeader,
    reply: &mut [u8],
) -> Option<WrittenReply> {
    let (header, question) = header_and_question.split_first_chunk::<HEADER_BYTES>()?;
    let out = reply.get_mut(..header_and_question.len())?;
    let (out_header, out_question) = out.split_first_chunk_mut::<HEADER_BYTES>()?;
    out_question.copy_from_slice(question);
    // RFC 1035 section 4.1.1: QR set, opcode and RD copied, then AA and TC. CD copied (RFC 4035
    // section 3.1.6), then the response code. RA, Z and AD are clear.
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
    if let Some(opt) = opt {
        let record = reply.get_mut(len..)?.first_chunk_mut::<OPT_BYTES>()?;
        *record = opt_record(opt, head.rcode);
        len += OPT_BYTES;
        if !opt.options.is_empty() {
            reply.get_mut(len..len + opt.options.len())?.copy_from_slice(opt.options);
            len += opt.options.len();
        }
    }
    Some(WrittenReply { len, rcode: head.rcode, is_truncated: head.truncated })
}

/// Builds the front of the OPT record of a reply, without its options (RFC 6891 section 6.1.2).
/// The DO bit is copied from the query (RFC 3225).
#[inline]
fn opt_record(opt: ReplyOpt<'_>, rcode: Rcode) -> [u8; OPT_BYTES] {
    let [size_high, size_low] = opt.advertised_udp_bytes.to_be_bytes();
    let [len_high, len_low] = (opt.options.len() as u16).to_be_bytes();
    let flags = if opt.edns.dnssec_ok { 0x80 } else { 0 };
    [0, 0, rtype::OPT as u8, size_high, size_low, rcode as u8 >> 4, 0, flags, 0, len_high, len_low]
}
