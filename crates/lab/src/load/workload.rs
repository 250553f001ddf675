//! What is sent, and what counts as its answer.

use serde::Serialize;

use super::query_file::{MAX_QUERY_BYTES, QuerySet};
use super::slots::{Pending, Slots};
use super::template::sum;

/// A payload that was written into a packet.
#[derive(Clone, Copy, Debug)]
pub struct Payload {
    /// Its length in bytes.
    pub len: usize,
    /// The sum of its 16-bit words.
    pub sum: u32,
}

/// What an arrived payload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The answer to a request that was meant to leave at this time.
    Answer {
        /// The intended time of the request.
        intended_ns: u64,
    },
    /// No request waits for it: too late, a duplicate, or not for us.
    Unmatched,
}

/// Writes requests and recognises their answers.
pub trait Workload {
    /// The longest request in bytes.
    fn max_bytes(&self) -> usize;

    /// Writes the next request for `flow`, meant to leave at `intended_ns`.
    /// `room` holds at least [`Workload::max_bytes`].
    fn write(&mut self, flow: u32, intended_ns: u64, room: &mut [u8]) -> Payload;

    /// Looks at what came back on `flow`.
    fn read(&mut self, flow: u32, payload: &[u8]) -> Verdict;

    /// What to say about the answers at the end.
    fn summary(&self) -> WorkloadSummary;
}

/// What a workload says about the answers it saw.
#[derive(Clone, Debug, Default, Serialize)]
pub struct WorkloadSummary {
    /// Answers by DNS response code, only for DNS.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rcodes: Vec<(String, u64)>,
    /// Answers that had the truncation bit, only for DNS.
    pub truncated: u64,
    /// Answers that did not match their request: another question, or an echo
    /// that is not what was sent.
    pub wrong: u64,
}

/// Called with the number of each query and its answer.
pub type AnswerHook<'a> = Box<dyn FnMut(usize, &[u8]) + 'a>;

/// DNS queries from a set, round and round.
pub struct DnsWorkload<'a> {
    queries: &'a QuerySet,
    slots: Slots,
    next: usize,
    rcodes: [u64; 16],
    truncated: u64,
    wrong: u64,
    hook: Option<AnswerHook<'a>>,
}

impl<'a> DnsWorkload<'a> {
    /// Sends `queries` over `flows` flows.
    pub fn new(queries: &'a QuerySet, flows: u32) -> Self {
        Self {
            queries,
            slots: Slots::new(flows),
            next: 0,
            rcodes: [0; 16],
            truncated: 0,
            wrong: 0,
            hook: None,
        }
    }

    /// Calls `hook` with each answer that belongs to a query of ours, to
    /// compare it with what another server says.
    #[must_use]
    pub fn with_hook(mut self, hook: AnswerHook<'a>) -> Self {
        self.hook = Some(hook);
        self
    }
}

const RCODES: [&str; 6] = ["NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED"];

impl Workload for DnsWorkload<'_> {
    fn max_bytes(&self) -> usize {
        MAX_QUERY_BYTES
    }

    #[inline]
    fn write(&mut self, flow: u32, intended_ns: u64, room: &mut [u8]) -> Payload {
        let index = self.next;
        self.next = if index + 1 == self.queries.len() { 0 } else { index + 1 };
        let id = self.slots.send(flow, Pending { intended_ns, tag: index as u32 });
        let (query, query_sum) = self.queries.get(index);
        room[..query.len()].copy_from_slice(query);
        room[..2].copy_from_slice(&id.to_be_bytes());
        Payload { len: query.len(), sum: query_sum + u32::from(id) }
    }

    #[inline]
    fn read(&mut self, flow: u32, payload: &[u8]) -> Verdict {
        let Some((header, _)) = payload.split_first_chunk::<12>() else {
            return Verdict::Unmatched;
        };
        let id = u16::from_be_bytes([header[0], header[1]]);
        // QR: only answers.
        if header[2] & 0x80 == 0 {
            return Verdict::Unmatched;
        }
        let Some(pending) = self.slots.answer(flow, id) else { return Verdict::Unmatched };
        self.rcodes[usize::from(header[3] & 0x0f)] += 1;
        self.truncated += u64::from(header[2] & 0x02 != 0);
        let index = pending.tag as usize;
        if !repeats_question(self.queries.get(index).0, payload) {
            self.wrong += 1;
        }
        if let Some(hook) = &mut self.hook {
            hook(index, payload);
        }
        Verdict::Answer { intended_ns: pending.intended_ns }
    }

    fn summary(&self) -> WorkloadSummary {
        let name = |code: usize| {
            RCODES.get(code).map_or_else(|| format!("RCODE{code}"), |name| (*name).to_owned())
        };
        let seen = self.rcodes.iter().enumerate().filter(|(_, count)| **count > 0);
        WorkloadSummary {
            rcodes: seen.map(|(code, count)| (name(code), *count)).collect(),
            truncated: self.truncated,
            wrong: self.wrong,
        }
    }
}

/// Whether an answer repeats the question of `query` byte by byte, upper and
/// lower case as it was sent.
fn repeats_question(query: &[u8], answer: &[u8]) -> bool {
    // Header, name up to the root label, type and class. Our own queries have
    // no compression, so walking the labels ends.
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

/// UDP packets of one size that an echo server sends back.
pub struct EchoWorkload {
    slots: Slots,
    sent: u32,
    pattern: Vec<u8>,
    pattern_sum: u32,
    wrong: u64,
}

/// The id of the slot and the number of the packet.
const ECHO_HEAD_BYTES: usize = 6;

impl EchoWorkload {
    /// Payloads of `bytes` bytes (at least 6) over `flows` flows.
    pub fn new(bytes: usize, flows: u32) -> Self {
        let mut pattern: Vec<u8> =
            (0..bytes.max(ECHO_HEAD_BYTES)).map(|i| (i as u8).wrapping_mul(37)).collect();
        pattern[..ECHO_HEAD_BYTES].fill(0);
        let pattern_sum = sum(&pattern);
        Self { slots: Slots::new(flows), sent: 0, pattern, pattern_sum, wrong: 0 }
    }
}

impl Workload for EchoWorkload {
    fn max_bytes(&self) -> usize {
        self.pattern.len()
    }

    #[inline]
    fn write(&mut self, flow: u32, intended_ns: u64, room: &mut [u8]) -> Payload {
        let number = self.sent;
        self.sent = number.wrapping_add(1);
        let id = self.slots.send(flow, Pending { intended_ns, tag: number });
        let room = &mut room[..self.pattern.len()];
        room.copy_from_slice(&self.pattern);
        room[..2].copy_from_slice(&id.to_be_bytes());
        room[2..6].copy_from_slice(&number.to_be_bytes());
        let head = u32::from(id) + (number >> 16) + (number & 0xffff);
        Payload { len: room.len(), sum: self.pattern_sum + head }
    }

    #[inline]
    fn read(&mut self, flow: u32, payload: &[u8]) -> Verdict {
        let Some((head, rest)) = payload.split_first_chunk::<ECHO_HEAD_BYTES>() else {
            return Verdict::Unmatched;
        };
        let id = u16::from_be_bytes([head[0], head[1]]);
        let number = u32::from_be_bytes([head[2], head[3], head[4], head[5]]);
        let Some(pending) = self.slots.answer(flow, id) else { return Verdict::Unmatched };
        if pending.tag != number {
            // Late: the place belongs to a younger packet, which stays.
            self.slots.put_back(flow, id, pending);
            return Verdict::Unmatched;
        }
        if *rest != self.pattern[ECHO_HEAD_BYTES..] {
            self.wrong += 1;
        }
        Verdict::Answer { intended_ns: pending.intended_ns }
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

    fn write(workload: &mut impl Workload, flow: u32, intended_ns: u64) -> Vec<u8> {
        let mut room = vec![0xaa; workload.max_bytes()];
        let payload = workload.write(flow, intended_ns, &mut room);
        room.truncate(payload.len);
        assert_eq!(
            super::super::template::fold(sum(&room)),
            super::super::template::fold(payload.sum)
        );
        room
    }

    #[test]
    fn dns_answers_are_matched_counted_and_handed_on() {
        let set = queries();
        let mut seen = Vec::new();
        {
            let mut dns = DnsWorkload::new(&set, 2)
                .with_hook(Box::new(|index, answer| seen.push((index, answer.len()))));
            let first = write(&mut dns, 0, 100);
            let second = write(&mut dns, 1, 200);
            let mut answer = second.clone();
            answer[2] |= 0x80;
            answer[3] = 3;
            assert_eq!(dns.read(1, &second), Verdict::Unmatched, "a query is no answer");
            assert_eq!(dns.read(1, &answer), Verdict::Answer { intended_ns: 200 });
            assert_eq!(dns.read(1, &answer), Verdict::Unmatched, "a duplicate");
            let mut other = first.clone();
            other[2] |= 0x82;
            other[13] ^= 1;
            assert_eq!(dns.read(0, &other), Verdict::Answer { intended_ns: 100 });
            let summary = dns.summary();
            assert_eq!(summary.wrong, 1, "another question");
            assert_eq!(summary.truncated, 1);
            assert_eq!(summary.rcodes, [("NOERROR".into(), 1), ("NXDOMAIN".into(), 1)]);
            for length in 0..answer.len() {
                assert_eq!(dns.read(0, &answer[..length]), Verdict::Unmatched);
            }
        }
        assert_eq!(seen.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [1, 0]);
    }

    #[test]
    fn an_echo_is_checked_byte_by_byte() {
        let mut echo = EchoWorkload::new(64, 1);
        let first = write(&mut echo, 0, 1);
        let mut second = write(&mut echo, 0, 2);
        assert_eq!(first.len(), 64);
        assert_eq!(echo.read(0, &first), Verdict::Answer { intended_ns: 1 });
        second[63] ^= 1;
        assert_eq!(echo.read(0, &second), Verdict::Answer { intended_ns: 2 });
        assert_eq!(echo.summary().wrong, 1);
        assert_eq!(echo.read(0, &[1, 2, 3]), Verdict::Unmatched);
    }

    #[test]
    fn a_late_echo_does_not_take_the_place_of_a_younger_one() {
        let mut echo = EchoWorkload::new(6, 1);
        let old = write(&mut echo, 0, 1);
        // Go around once: the first place is taken again.
        let mut last = write(&mut echo, 0, 2);
        while last[..2] != old[..2] {
            last = write(&mut echo, 0, 3);
        }
        assert_eq!(echo.read(0, &old), Verdict::Unmatched);
        assert_eq!(echo.read(0, &last), Verdict::Answer { intended_ns: 3 });
    }
}
