//! DNS server: compiled zones and counters.

use std::net::SocketAddr;
use std::sync::Arc;

use super::error::{DnsError, Warning};
use super::lookup::CompiledZones;
use super::message::{Query, Rcode, Rejection};
use super::reply::{self, WrittenReply};
use super::{DnsConfig, MAX_UDP_BYTES_WITHOUT_EDNS};
use crate::Responder;

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
    zones: Arc<CompiledZones>,
    max_udp_bytes: usize,
    counters: DnsCounters,
}

/// Creates a server for another thread, with the same zones and counters of its own.
impl Clone for DnsServer {
    fn clone(&self) -> Self {
        Self {
            zones: Arc::clone(&self.zones),
            max_udp_bytes: self.max_udp_bytes,
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
        Ok(DnsServer::new(CompiledZones::load(config)?, config.max_udp_bytes))
    }

    pub(super) fn new(zones: CompiledZones, max_udp_bytes: usize) -> Self {
        DnsServer {
            zones: Arc::new(zones),
            max_udp_bytes: max_udp_bytes.clamp(MAX_UDP_BYTES_WITHOUT_EDNS, u16::MAX.into()),
            counters: DnsCounters::default(),
        }
    }

    /// Creates a server for another thread: shares the zones, has counters of its own.
    pub fn share(&self) -> Self {
        DnsServer {
            zones: Arc::clone(&self.zones),
            max_udp_bytes: self.max_udp_bytes,
            counters: DnsCounters::default(),
        }
    }

    /// Answers a well-formed query with at most `max_len` bytes, over any transport. Returns the
    /// length of the reply, or `None` when `reply` cannot hold even an empty answer.
    #[inline]
    pub fn answer(&mut self, query: &Query<'_>, max_len: usize, reply: &mut [u8]) -> Option<usize> {
        let advertised_udp_bytes = self.max_udp_bytes as u16;
        let written = reply::write_reply(&self.zones, query, advertised_udp_bytes, max_len, reply);
        self.count_reply(written)
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
        &self.zones.warnings
    }

    /// Number of zones served.
    pub fn zone_count(&self) -> usize {
        self.zones.zone_count
    }

    /// Number of names that can be queried, including empty non-terminals.
    pub fn name_count(&self) -> usize {
        self.zones.name_count()
    }

    /// Memory used by the prepared answers and their tables, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.zones.memory_bytes()
    }
}

impl Responder for DnsServer {
    #[inline]
    fn respond(&mut self, request: &[u8], _from: SocketAddr, reply: &mut [u8]) -> Option<usize> {
        self.counters.queries += 1;
        match Query::parse(request) {
            Ok(query) => {
                let max_len = query.udp_limit_bytes(self.max_udp_bytes);
                self.answer(&query, max_len, reply)
            }
            Err(rejection) => self.reject(rejection, reply),
        }
    }

    /// Answers over TCP, where no reply needs truncation (RFC 7766 section 8).
    fn respond_to_stream(
        &mut self,
        request: &[u8],
        _from: SocketAddr,
        reply: &mut [u8],
    ) -> Option<usize> {
        self.counters.queries += 1;
        match Query::parse(request) {
            Ok(query) => self.answer(&query, reply.len().min(u16::MAX.into()), reply),
            Err(rejection) => self.reject(rejection, reply),
        }
    }
}

#[cfg(test)]
mod tests;
