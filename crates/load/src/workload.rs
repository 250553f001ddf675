//! Requests of a load and the matching of their responses.

use serde::Serialize;

use crate::pending::{PendingRequest, PendingTable};
use crate::query_file::{MAX_QUERY_BYTES, QuerySet};
use crate::template::sum;

/// Payload that was written into a packet.
#[derive(Clone, Copy, Debug)]
pub struct WrittenPayload {
    /// Length in bytes.
    pub len: usize,
    /// Unfolded sum of its 16-bit words.
    pub sum: u32,
}

/// Match of a received payload with the outstanding requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchResult {
    /// Response to an outstanding request.
    Response {
        /// Intended send time of the request, in nanoseconds.
        intended_ns: u64,
    },
    /// No outstanding request matches: late, duplicate, or foreign.
    Unmatched,
}

/// Source of requests that recognizes their responses.
pub trait Workload {
    /// Returns the maximum length of a request in bytes.
    fn max_request_bytes(&self) -> usize;

    /// Writes the next request for `flow`, with intended send time `intended_ns`. `buffer` holds at
    /// least [`Self::max_request_bytes`].
    fn write_request(&mut self, flow: u32, intended_ns: u64, buffer: &mut [u8]) -> WrittenPayload;

    /// Matches a payload received on `flow` with the outstanding requests.
    fn match_response(&mut self, flow: u32, payload: &[u8]) -> MatchResult;

    /// Returns the properties of the responses so far.
    fn summary(&self) -> WorkloadSummary;
}

/// Properties of the responses to a workload.
#[derive(Clone, Debug, Default, Serialize)]
pub struct WorkloadSummary {
    /// Responses by DNS response code; DNS only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rcodes: Vec<(String, u64)>,
    /// Responses with the TC bit; DNS only.
    pub truncated: u64,
    /// Responses that differ from their request: another DNS question, or a changed echo.
    pub wrong: u64,
}

/// Callback with the index of a query and its response.
pub type ResponseHook<'a> = Box<dyn FnMut(usize, &[u8]) + 'a>;

/// DNS queries from a set, repeated in order.
pub struct DnsWorkload<'a> {
    queries: &'a QuerySet,
    pending: PendingTable,
    next_query: usize,
    rcodes: [u64; 16],
    truncated: u64,
    wrong: u64,
    hook: Option<ResponseHook<'a>>,
}

impl<'a> DnsWorkload<'a> {
    /// Creates a workload of `queries` over `flows` flows.
    pub fn new(queries: &'a QuerySet, flows: u32) -> Self {
        Self {
            queries,
            pending: PendingTable::new(flows),
            next_query: 0,
            rcodes: [0; 16],
            truncated: 0,
            wrong: 0,
            hook: None,
        }
    }

    /// Calls `hook` with each response that matches a query, for a comparison with another server's
    /// response.
    #[must_use]
    pub fn with_hook(mut self, hook: ResponseHook<'a>) -> Self {
        self.hook = Some(hook);
        self
    }
}

const RCODE_NAMES: [&str; 6] = ["NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED"];

impl Workload for DnsWorkload<'_> {
    fn max_request_bytes(&self) -> usize {
        MAX_QUERY_BYTES
    }

    #[inline]
    fn write_request(&mut self, flow: u32, intended_ns: u64, buffer: &mut [u8]) -> WrittenPayload {
        let index = self.next_query;
        self.next_query = if index + 1 == self.queries.len() { 0 } else { index + 1 };
        let id = self.pending.insert(flow, PendingRequest { intended_ns, tag: index as u32 });
        let (query, query_sum) = self.queries.get(index);
        buffer[..query.len()].copy_from_slice(query);
        buffer[..2].copy_from_slice(&id.to_be_bytes());
        WrittenPayload { len: query.len(), sum: query_sum + u32::from(id) }
    }

    #[inline]
    fn match_response(&mut self, flow: u32, payload: &[u8]) -> MatchResult {
        let Some((header, _)) = payload.split_first_chunk::<12>() else {
            return MatchResult::Unmatched;
        };
        let id = u16::from_be_bytes([header[0], header[1]]);
        // QR bit: responses only.
        if header[2] & 0x80 == 0 {
            return MatchResult::Unmatched;
        }
        let Some(pending) = self.pending.take(flow, id) else { return MatchResult::Unmatched };
        self.rcodes[usize::from(header[3] & 0x0f)] += 1;
        self.truncated += u64::from(header[2] & 0x02 != 0);
        let index = pending.tag as usize;
        if !repeats_question(self.queries.get(index).0, payload) {
            self.wrong += 1;
        }
        if let Some(hook) = &mut self.hook {
            hook(index, payload);
        }
        MatchResult::Response { intended_ns: pending.intended_ns }
    }

    fn summary(&self) -> WorkloadSummary {
        let name = |code: usize| {
            RCODE_NAMES.get(code).map_or_else(|| format!("RCODE{code}"), |name| (*name).to_owned())
        };
        let seen = self.rcodes.iter().enumerate().filter(|(_, count)| **count > 0);
        WorkloadSummary {
            rcodes: seen.map(|(code, count)| (name(code), *count)).collect(),
            truncated: self.truncated,
            wrong: self.wrong,
        }
    }
}

/// True if a response repeats the question of `query` byte by byte, including letter case.
fn repeats_question(query: &[u8], answer: &[u8]) -> bool {
    // Header, name up to the root label, type and class. The generator's queries have no
    // compression, so walking the labels terminates.
    let mut end = 12;
    while let Some(&length) = query.get(end) {
        end += usize::from(length) + 1;
        if length == 0 {
            break;
        }
    }
    end += 4;
    answer.len() >= end && query.len() >= end && query[4..6] == answer[4..6] && {
        query[12..end] == answer[12..end]
    }
}

/// UDP packets of one size to an echo server.
pub struct EchoWorkload {
    pending: PendingTable,
    sent: u32,
    pattern: Vec<u8>,
    pattern_sum: u32,
    wrong: u64,
}

/// Length of the request id and the packet number at the front of an echo.
const ECHO_HEADER_BYTES: usize = 6;

impl EchoWorkload {
    /// Creates a workload of payloads of `bytes` bytes (at least 6) over `flows` flows.
    pub fn new(bytes: usize, flows: u32) -> Self {
        let mut pattern: Vec<u8> =
            (0..bytes.max(ECHO_HEADER_BYTES)).map(|i| (i as u8).wrapping_mul(37)).collect();
        pattern[..ECHO_HEADER_BYTES].fill(0);
        let pattern_sum = sum(&pattern);
        Self { pending: PendingTable::new(flows), sent: 0, pattern, pattern_sum, wrong: 0 }
    }
}

impl Workload for EchoWorkload {
    fn max_request_bytes(&self) -> usize {
        self.pattern.len()
    }

    #[inline]
    fn write_request(&mut self, flow: u32, intended_ns: u64, buffer: &mut [u8]) -> WrittenPayload {
        let number = self.sent;
        self.sent = number.wrapping_add(1);
        let id = self.pending.insert(flow, PendingRequest { intended_ns, tag: number });
        let payload = &mut buffer[..self.pattern.len()];
        payload.copy_from_slice(&self.pattern);
        payload[..2].copy_from_slice(&id.to_be_bytes());
        payload[2..6].copy_from_slice(&number.to_be_bytes());
        let header_sum = u32::from(id) + (number >> 16) + (number & 0xffff);
        WrittenPayload { len: payload.len(), sum: self.pattern_sum + header_sum }
    }

    #[inline]
    fn match_response(&mut self, flow: u32, payload: &[u8]) -> MatchResult {
        let Some((header, rest)) = payload.split_first_chunk::<ECHO_HEADER_BYTES>() else {
            return MatchResult::Unmatched;
        };
        let id = u16::from_be_bytes([header[0], header[1]]);
        let number = u32::from_be_bytes([header[2], header[3], header[4], header[5]]);
        let Some(pending) = self.pending.take(flow, id) else { return MatchResult::Unmatched };
        if pending.tag != number {
            // Late echo: the slot belongs to a newer request, which stays outstanding.
            self.pending.restore(flow, id, pending);
            return MatchResult::Unmatched;
        }
        if *rest != self.pattern[ECHO_HEADER_BYTES..] {
            self.wrong += 1;
        }
        MatchResult::Response { intended_ns: pending.intended_ns }
    }

    fn summary(&self) -> WorkloadSummary {
        WorkloadSummary { wrong: self.wrong, ..WorkloadSummary::default() }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn queries() -> QuerySet {
        QuerySet::parse("a.example A\nb.example AAAA\n", Path::new("q"), true).unwrap()
    }

    fn write_and_check(workload: &mut impl Workload, flow: u32, intended_ns: u64) -> Vec<u8> {
        let mut buffer = vec![0xaa; workload.max_request_bytes()];
        let payload = workload.write_request(flow, intended_ns, &mut buffer);
        buffer.truncate(payload.len);
        assert_eq!(crate::template::fold(sum(&buffer)), crate::template::fold(payload.sum));
        buffer
    }

    #[test]
    fn matches_and_counts_dns_responses() {
        let set = queries();
        let mut seen = Vec::new();
        {
            let mut dns = DnsWorkload::new(&set, 2)
                .with_hook(Box::new(|index, answer| seen.push((index, answer.len()))));
            let first = write_and_check(&mut dns, 0, 100);
            let second = write_and_check(&mut dns, 1, 200);
            let mut answer = second.clone();
            answer[2] |= 0x80;
            answer[3] = 3;
            assert_eq!(
                dns.match_response(1, &second),
                MatchResult::Unmatched,
                "a query is not a response"
            );
            assert_eq!(dns.match_response(1, &answer), MatchResult::Response { intended_ns: 200 });
            assert_eq!(dns.match_response(1, &answer), MatchResult::Unmatched, "a duplicate");
            let mut other = first.clone();
            other[2] |= 0x82;
            other[13] ^= 1;
            assert_eq!(dns.match_response(0, &other), MatchResult::Response { intended_ns: 100 });
            let summary = dns.summary();
            assert_eq!(summary.wrong, 1, "another question");
            assert_eq!(summary.truncated, 1);
            assert_eq!(summary.rcodes, [("NOERROR".into(), 1), ("NXDOMAIN".into(), 1)]);
            for length in 0..answer.len() {
                assert_eq!(dns.match_response(0, &answer[..length]), MatchResult::Unmatched);
            }
        }
        assert_eq!(seen.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [1, 0]);
    }

    #[test]
    fn an_echo_is_checked_byte_by_byte() {
        let mut echo = EchoWorkload::new(64, 1);
        let first = write_and_check(&mut echo, 0, 1);
        let mut second = write_and_check(&mut echo, 0, 2);
        assert_eq!(first.len(), 64);
        assert_eq!(echo.match_response(0, &first), MatchResult::Response { intended_ns: 1 });
        second[63] ^= 1;
        assert_eq!(echo.match_response(0, &second), MatchResult::Response { intended_ns: 2 });
        assert_eq!(echo.summary().wrong, 1);
        assert_eq!(echo.match_response(0, &[1, 2, 3]), MatchResult::Unmatched);
    }

    #[test]
    fn late_echo_does_not_match_a_newer_request() {
        let mut echo = EchoWorkload::new(6, 1);
        let old = write_and_check(&mut echo, 0, 1);
        // Wrap the ids once, so that the first slot is reused.
        let mut last = write_and_check(&mut echo, 0, 2);
        while last[..2] != old[..2] {
            last = write_and_check(&mut echo, 0, 3);
        }
        assert_eq!(echo.match_response(0, &old), MatchResult::Unmatched);
        assert_eq!(echo.match_response(0, &last), MatchResult::Response { intended_ns: 3 });
    }
}
