//! DNS server: compiled zones and counters.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::DnsConfig;
use super::admission::QueryAdmission;
use super::cookie;
use super::error::{DnsError, Warning};
use super::message::{Query, Rcode, Rejection};
use super::query_log::QueryLog;
use super::rate_limit::Verdict;
use super::reply::{self, Content, ERROR_CONTENT, OptionBuffer, ReplyOpt, WrittenReply};
use super::served::{DnsReloader, Publication, Served};
use super::splitmix64::SplitMix64;
use crate::Responder;
use crate::requests::DnsRefusal;

/// Counters of a DNS server. Each thread has its own counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DnsCounters {
    /// Messages received.
    pub queries: u64,
    /// Replies truncated to fit, with the TC bit set.
    pub truncated: u64,
    /// Messages too short for a header; not answered.
    pub too_short: u64,
    /// Responses received; not answered.
    pub responses_received: u64,
    /// Replies that did not fit the reply buffer; not sent.
    pub no_reply_space: u64,
    /// Replies over the rate limit; not sent.
    pub rate_limited: u64,
    /// Replies over the rate limit that were sent empty, with the TC bit set.
    pub rate_truncated: u64,
    /// Queries over UDP with a valid server cookie.
    pub valid_cookies: u64,
    /// Queries that admission has refused.
    pub not_admitted: u64,
    /// Replies by response code; the code is the index.
    by_rcode: [u64; 17],
}

impl DnsCounters {
    /// Number of replies with this response code.
    pub fn replies_with(&self, rcode: Rcode) -> u64 {
        self.by_rcode[rcode as usize]
    }

    /// Number of messages answered.
    pub fn replies(&self) -> u64 {
        self.by_rcode.iter().sum()
    }

    /// Adds the counters of another thread.
    pub fn add(&mut self, other: &DnsCounters) {
        self.queries += other.queries;
        self.truncated += other.truncated;
        self.too_short += other.too_short;
        self.responses_received += other.responses_received;
        self.no_reply_space += other.no_reply_space;
        self.rate_limited += other.rate_limited;
        self.rate_truncated += other.rate_truncated;
        self.valid_cookies += other.valid_cookies;
        self.not_admitted += other.not_admitted;
        for (to, from) in self.by_rcode.iter_mut().zip(other.by_rcode) {
            *to += from;
        }
    }
}

/// Authoritative DNS server for the zones that it was loaded with.
///
/// # Examples
/// ```no_run
/// use tidegate_apps::dns::{DnsConfig, DnsServer, ZoneSource};
///
/// let zones = vec![ZoneSource { origin: None, path: "example.org.zone".into() }];
/// let server = DnsServer::load(&DnsConfig { zones, hash_seed: 0x5eed, ..DnsConfig::default() })?;
/// println!("{} names", server.name_count());
/// # Ok::<(), tidegate_apps::dns::DnsError>(())
/// ```
pub struct DnsServer {
    publication: Arc<Publication>,
    /// Version of the publication that `served` is.
    version: u64,
    served: Arc<Served>,
    /// Chooses the replies over the rate limit that are sent truncated.
    random: SplitMix64,
    /// Time of the current batch, since the Unix epoch.
    now_ns: u64,
    /// Admission of queries, if any.
    admission: Option<QueryAdmission>,
    log: Option<QueryLog>,
    counters: DnsCounters,
}

/// Creates a server for another thread, with the same zones and counters of its own.
impl Clone for DnsServer {
    fn clone(&self) -> Self {
        Self {
            publication: Arc::clone(&self.publication),
            version: self.version,
            served: Arc::clone(&self.served),
            random: self.random.clone(),
            now_ns: self.now_ns,
            admission: self.served.requests.as_ref().map(QueryAdmission::new),
            log: self.log.clone(),
            counters: DnsCounters::default(),
        }
    }
}

impl DnsServer {
    /// Loads the zone files and prepares all answers.
    ///
    /// # Errors
    /// When a zone file cannot be read or is invalid. The error names file, line and what was
    /// expected.
    pub fn load(config: &DnsConfig) -> Result<Self, DnsError> {
        let served = Arc::new(Served::load(config)?);
        Ok(DnsServer {
            publication: Arc::new(Publication::new(Arc::clone(&served))),
            version: 0,
            admission: served.requests.as_ref().map(QueryAdmission::new),
            served,
            random: SplitMix64::new(config.hash_seed),
            now_ns: 0,
            log: None,
            counters: DnsCounters::default(),
        })
    }

    /// Logs all messages and answers, also those of servers for other threads made from this one.
    #[must_use]
    pub fn with_log(self, log: Option<QueryLog>) -> Self {
        Self { log, ..self }
    }

    /// Creates a server for another thread: shares the zones, has counters of its own.
    pub fn share(&self) -> Self {
        self.clone()
    }

    /// Handle that replaces the zones of this server, and of all servers shared with it, while
    /// these serve. A server takes the new zones at the start of its next batch.
    pub fn reloader(&self) -> DnsReloader {
        DnsReloader::new(Arc::clone(&self.publication))
    }

    /// Answers a well-formed query with at most `max_len` bytes, over any transport, and without
    /// rate limit. Returns the length of the reply, or `None` when `reply` cannot hold even an
    /// empty answer.
    #[inline]
    pub fn answer(&mut self, query: &Query<'_>, max_len: usize, reply: &mut [u8]) -> Option<usize> {
        let content = reply::find_content(&self.served.zones, &self.served.identity, query);
        let opt = reply_opt(&self.served, query, &[]);
        let written = reply::write_reply(&self.served.zones, query, content, opt, max_len, reply);
        self.count_reply(written)
    }

    /// Answers a well-formed query of `client`. `is_stream` is true for TCP, where the address of
    /// the client is proven.
    #[inline]
    fn answer_client(
        &mut self,
        query: &Query<'_>,
        client: IpAddr,
        is_stream: bool,
        max_len: usize,
        reply: &mut [u8],
    ) -> Option<usize> {
        let refusal = self.refusal(query, client);
        let served = &*self.served;
        // Few queries have options: the buffer is made for these only.
        let mut options = None;
        let mut is_proven = is_stream;
        if query.options.cookie.is_some() || query.options.wants_nsid {
            let options = options.insert(OptionBuffer::default());
            is_proven |= add_options(served, query, client, self.now_ns, options);
            self.counters.valid_cookies += u64::from(is_proven && !is_stream);
        }
        if refusal.is_some() {
            options.get_or_insert_default().add_overload_error();
        }
        let opt = reply_opt(served, query, options.as_ref().map_or(&[], OptionBuffer::as_slice));
        let content = match refusal {
            None => reply::find_content(&served.zones, &served.identity, query),
            Some(_) => Content::Error(Rcode::Refused),
        };
        if let Some(limiter) = &served.limiter
            && !is_proven
        {
            let len = query.header_and_question.len() + content.len();
            let len = len.min(max_len);
            match limiter.check(client, content.id(), len, self.now_ns, &mut self.random) {
                Verdict::Send => {}
                Verdict::Truncate => {
                    self.counters.rate_truncated += 1;
                    let written = reply::write_truncated(query, opt, reply);
                    return self.count_reply(written);
                }
                Verdict::Drop => {
                    self.counters.rate_limited += 1;
                    return None;
                }
            }
        }
        let written = match refusal {
            Some(DnsRefusal::Truncated) if !is_stream => reply::write_truncated(query, opt, reply),
            _ => reply::write_reply(&served.zones, query, content, opt, max_len, reply),
        };
        self.count_reply(written)
    }

    /// Returns the way to refuse the query, unless it is admitted.
    #[inline]
    fn refusal(&mut self, query: &Query<'_>, client: IpAddr) -> Option<DnsRefusal> {
        let admission = self.admission.as_mut()?;
        if admission.admit(query, client, self.now_ns) {
            return None;
        }
        self.counters.not_admitted += 1;
        Some(admission.refusal())
    }

    /// Answers a message that is not a well-formed query. Returns the length of the reply, or
    /// `None` when the message gets no reply.
    #[cold]
    pub fn reject(&mut self, rejection: Rejection<'_>, reply: &mut [u8]) -> Option<usize> {
        match rejection {
            Rejection::TooShort => {
                self.counters.too_short += 1;
                None
            }
            Rejection::Response => {
                self.counters.responses_received += 1;
                None
            }
            Rejection::Error { rcode, header_and_question } => {
                let written = reply::write_error(header_and_question, rcode, reply);
                self.count_reply(written)
            }
        }
    }

    /// Applies the rate limit to an error reply, which is small and is dropped over the limit.
    #[cold]
    fn limit_rejection(&mut self, rejection: &Rejection<'_>, client: IpAddr) -> Option<()> {
        let (Some(limiter), Rejection::Error { header_and_question, .. }) =
            (&self.served.limiter, rejection)
        else {
            return Some(());
        };
        let len = header_and_question.len();
        let verdict = limiter.check(client, ERROR_CONTENT, len, self.now_ns, &mut self.random);
        let is_dropped = verdict == Verdict::Drop;
        self.counters.rate_limited += u64::from(is_dropped);
        (!is_dropped).then_some(())
    }

    #[inline]
    fn count_reply(&mut self, written: Option<WrittenReply>) -> Option<usize> {
        let Some(written) = written else {
            self.counters.no_reply_space += 1;
            return None;
        };
        self.counters.by_rcode[written.rcode as usize] += 1;
        self.counters.truncated += u64::from(written.is_truncated);
        Some(written.len)
    }

    /// Counters of this thread's server.
    pub fn counters(&self) -> &DnsCounters {
        &self.counters
    }

    /// Irregularities found in the zone files.
    pub fn warnings(&self) -> &[Warning] {
        &self.served.zones.warnings
    }

    /// Number of zones served.
    pub fn zone_count(&self) -> usize {
        self.served.zones.zone_count
    }

    /// Number of names that can be queried, including empty non-terminals.
    pub fn name_count(&self) -> usize {
        self.served.zones.name_count()
    }

    /// Memory used by the prepared answers and their tables, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.served.zones.memory_bytes()
    }
}

/// OPT record of the reply to a query, if the query has one.
#[inline]
fn reply_opt<'a>(served: &Served, query: &Query<'_>, options: &'a [u8]) -> Option<ReplyOpt<'a>> {
    let advertised_udp_bytes = served.max_udp_bytes as u16;
    query.edns.map(|edns| ReplyOpt { edns, advertised_udp_bytes, options })
}

/// Adds the options of the reply that the options of the query ask for. Returns true if a cookie
/// proves the client's address.
#[inline(never)]
fn add_options(
    served: &Served,
    query: &Query<'_>,
    client: IpAddr,
    now_ns: u64,
    options: &mut OptionBuffer,
) -> bool {
    // Options of another EDNS version may mean anything.
    if query.edns.is_none_or(|edns| edns.version != 0) {
        return false;
    }
    let now_seconds = (now_ns / 1_000_000_000) as u32;
    let checked = query
        .options
        .cookie
        .and_then(|cookie| cookie::check(&served.cookie_secrets, cookie, client, now_seconds));
    if let Some(checked) = &checked {
        options.add_cookie(&checked.reply);
    }
    if query.options.wants_nsid
        && let Some(identity) = served.identity.nsid()
    {
        options.add_nsid(identity);
    }
    checked.is_some_and(|checked| checked.is_valid)
}

impl Responder for DnsServer {
    #[inline]
    fn start_batch(&mut self, clock: &dyn Fn() -> u64) {
        self.now_ns = clock();
        if self.version != self.publication.version()
            && let Some((version, served)) = self.publication.try_get()
        {
            (self.version, self.served) = (version, served);
            self.admission = self.served.requests.as_ref().map(QueryAdmission::new);
        }
        if let Some(admission) = &mut self.admission {
            admission.on_batch(self.now_ns);
        }
    }

    fn on_idle(&mut self) {
        if let Some(admission) = &mut self.admission {
            admission.on_empty();
        }
    }

    #[inline]
    fn respond(&mut self, request: &[u8], from: SocketAddr, reply: &mut [u8]) -> Option<usize> {
        self.counters.queries += 1;
        let len = match Query::parse(request) {
            Ok(query) => {
                let max_len = query.udp_limit_bytes(self.served.max_udp_bytes);
                self.answer_client(&query, from.ip(), false, max_len, reply)
            }
            Err(rejection) => {
                let is_sent = self.limit_rejection(&rejection, from.ip());
                is_sent.and_then(|()| self.reject(rejection, reply))
            }
        };
        if let Some(log) = &self.log {
            log.write(request, from, false, self.now_ns, len.map(|len| &reply[..len]));
        }
        len
    }

    /// Answers over TCP, where no reply needs truncation (RFC 7766 section 8).
    fn respond_to_stream(
        &mut self,
        request: &[u8],
        from: SocketAddr,
        reply: &mut [u8],
    ) -> Option<usize> {
        self.counters.queries += 1;
        let len = match Query::parse(request) {
            Ok(query) => {
                let max_len = reply.len().min(u16::MAX.into());
                self.answer_client(&query, from.ip(), true, max_len, reply)
            }
            Err(rejection) => self.reject(rejection, reply),
        };
        if let Some(log) = &self.log {
            log.write(request, from, true, self.now_ns, len.map(|len| &reply[..len]));
        }
        len
    }
}

#[cfg(test)]
mod tests;
