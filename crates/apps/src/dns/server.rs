//! The server: prepared zones and a count of what was asked.

use std::net::SocketAddr;
use std::sync::Arc;

use super::answer::{self, Written};
use super::error::{DnsError, Warning};
use super::lookup::Zones;
use super::message::{Query, Rcode, Rejection};
use super::{DnsConfig, PLAIN_UDP_BYTES};
use crate::Responder;

/// What a server answered. Each thread counts for itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DnsCounters {
    /// Messages that arrived.
    pub queries: u64,
    /// Answers that were cut to fit, with the TC bit set.
    pub truncated: u64,
    /// Messages too short for a header, not answered.
    pub too_short: u64,
    /// Responses, not answered.
    pub responses: u64,
    /// Answers that the reply buffer could not hold, not sent.
    pub no_room: u64,
    /// Answers by response code; the index is the code.
    by_rcode: [u64; 17],
}

impl DnsCounters {
    /// How many answers had this code.
    pub fn answers_with(&self, rcode: Rcode) -> u64 {
        self.by_rcode[rcode as usize]
    }

    /// How many messages were answered.
    pub fn answers(&self) -> u64 {
        self.by_rcode.iter().sum()
    }

    /// Adds the counts of another thread.
    pub fn add(&mut self, other: &DnsCounters) {
        self.queries += other.queries;
        self.truncated += other.truncated;
        self.too_short += other.too_short;
        self.responses += other.responses;
        self.no_room += other.no_room;
        for (to, from) in self.by_rcode.iter_mut().zip(other.by_rcode) {
            *to += from;
        }
    }
}

/// An authoritative DNS server for the zones that it was loaded with.
pub struct Server {
    zones: Arc<Zones>,
    max_udp_bytes: usize,
    counters: DnsCounters,
}

/// A server for another thread: it shares the zones and counts for itself.
impl Clone for Server {
    fn clone(&self) -> Self {
        Self {
            zones: Arc::clone(&self.zones),
            max_udp_bytes: self.max_udp_bytes,
            counters: DnsCounters::default(),
        }
    }
}

impl Server {
    /// Reads the zone files and prepares all answers.
    ///
    /// # Errors
    /// When a zone file cannot be read, or is broken: says file, line and what
    /// was expected.
    pub fn load(config: &DnsConfig) -> Result<Self, DnsError> {
        Ok(Server::new(Zones::load(config)?, config.max_udp_bytes))
    }

    pub(super) fn new(zones: Zones, max_udp_bytes: usize) -> Self {
        Server {
            zones: Arc::new(zones),
            max_udp_bytes: max_udp_bytes.clamp(PLAIN_UDP_BYTES, u16::MAX.into()),
            counters: DnsCounters::default(),
        }
    }

    /// The same server for another thread: shares the zones, counts for
    /// itself.
    pub fn share(&self) -> Self {
        Server {
            zones: Arc::clone(&self.zones),
            max_udp_bytes: self.max_udp_bytes,
            counters: DnsCounters::default(),
        }
    }

    /// Answers a well-formed query with at most `max_len` bytes, whatever
    /// transport it came by. Returns the length, or `None` when `reply` cannot
    /// hold even an empty answer.
    #[inline]
    pub fn answer(&mut self, query: &Query<'_>, max_len: usize, reply: &mut [u8]) -> Option<usize> {
        let offered_bytes = self.max_udp_bytes as u16;
        let written = answer::answer(&self.zones, query, offered_bytes, max_len, reply);
        self.count(written)
    }

    /// Answers a message that is no well-formed query, if it is to be answered
    /// at all.
    #[cold]
    pub fn reject(&mut self, rejection: Rejection<'_>, reply: &mut [u8]) -> Option<usize> {
        match rejection {
            Rejection::Truncated => {
                self.counters.too_short += 1;
                None
            }
            Rejection::Response => {
                self.counters.responses += 1;
                None
            }
            Rejection::Error { rcode, front } => {
                let written = answer::error(front, rcode, reply);
                self.count(written)
            }
        }
    }

    #[inline]
    fn count(&mut self, written: Option<Written>) -> Option<usize> {
        let Some(written) = written else {
            self.counters.no_room += 1;
            return None;
        };
        self.counters.by_rcode[written.rcode as usize] += 1;
        self.counters.truncated += u64::from(written.is_truncated);
        Some(written.len)
    }

    /// What was asked of this share of the server.
    pub fn counters(&self) -> &DnsCounters {
        &self.counters
    }

    /// What is odd in the zone files.
    pub fn warnings(&self) -> &[Warning] {
        &self.zones.warnings
    }

    /// How many zones are served.
    pub fn zone_count(&self) -> usize {
        self.zones.zone_count
    }

    /// How many names can be asked for, empty non-terminals counted.
    pub fn name_count(&self) -> usize {
        self.zones.name_count()
    }

    /// How much memory the prepared answers and their tables take.
    pub fn memory_bytes(&self) -> usize {
        self.zones.memory_bytes()
    }
}

impl Responder for Server {
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

    /// Over TCP nothing need be cut (RFC 7766 section 8).
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
