//! Reassembly of fragmented packets (RFC 791, RFC 815, RFC 8200 section 4.5).
//!
//! RFC 5722 is applied to both families: overlapping fragments drop the whole packet and all of
//! its later fragments.
//!
//! Fragments are copied out of their frames, so that incomplete packets cannot exhaust the frame
//! arena. The memory has a limit; at the limit the oldest packet is evicted.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use tidegate_wire::{DropCounters, DropReason};

use crate::Limits;
use crate::random::HashKey;

/// Memory charged per fragment besides its data, and per incomplete packet besides its fragments:
/// an upper estimate of the table overhead.
const FRAGMENT_OVERHEAD_BYTES: usize = 64;
const PARTIAL_OVERHEAD_BYTES: usize = 256;
/// Maximum bytes of the first fragment's headers that are kept for an ICMP quote.
const MAX_QUOTED_HEADERS_BYTES: usize = 256;

/// Fields that all fragments of a packet share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FragmentKey {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) identification: u32,
    /// Protocol number for IPv4 (RFC 791); 0 for IPv6.
    pub(crate) protocol: u8,
}

/// One received fragment.
pub(crate) struct Fragment<'a> {
    pub(crate) offset_bytes: usize,
    pub(crate) more_fragments: bool,
    /// Protocol of the whole packet according to this fragment.
    pub(crate) protocol: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    /// All headers in front of the data.
    pub(crate) headers: &'a [u8],
    pub(crate) data: &'a [u8],
    /// Maximum payload of the reassembled packet in bytes.
    pub(crate) max_packet_payload_bytes: usize,
}

/// Packet reassembled from all of its fragments.
#[derive(Debug)]
pub(crate) struct ReassembledPacket {
    pub(crate) key: FragmentKey,
    pub(crate) protocol: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) payload: Vec<u8>,
    /// Number of fragments.
    pub(crate) fragments: u64,
}

/// Incomplete packet that was dropped at its timeout.
#[derive(Debug)]
pub(crate) struct ExpiredReassembly {
    /// Start of the packet for an ICMP error, if the first fragment arrived.
    pub(crate) quote: Option<Vec<u8>>,
    /// Number of stored fragments that were dropped.
    pub(crate) fragments: u64,
}

struct StoredFragment {
    offset_bytes: usize,
    data: Box<[u8]>,
}

struct PartialPacket {
    serial: u64,
    until_ns: u64,
    /// Sorted by offset, without overlap.
    fragments: Vec<StoredFragment>,
    data_bytes: usize,
    /// Total payload length, known once the last fragment has arrived.
    total_bytes: Option<usize>,
    first_fragment: Option<FirstFragment>,
    /// Fragments overlapped: all later fragments are dropped.
    poisoned: bool,
}

struct FirstFragment {
    protocol: u8,
    hop_limit: u8,
    traffic_class: u8,
    headers: Box<[u8]>,
}

/// Table of incomplete packets.
pub(crate) struct Reassembly {
    partials: HashMap<FragmentKey, PartialPacket, HashKey>,
    /// Keys by age. All packets have the same timeout, so this is also the order of expiry.
    order: BTreeMap<u64, FragmentKey>,
    next_serial: u64,
    used_bytes: usize,
    max_bytes: usize,
    max_packets: usize,
    max_fragments: usize,
    timeout_ns: u64,
}

/// Result of inserting a fragment.
pub(crate) struct InsertOutcome {
    pub(crate) result: Result<Option<ReassembledPacket>, DropReason>,
    /// Previously stored fragments that were dropped by this insertion, by reason.
    pub(crate) dropped: DropCounters,
}

impl Reassembly {
    pub(crate) fn new(key: HashKey, limits: &Limits) -> Self {
        Self {
            partials: HashMap::with_hasher(key),
            order: BTreeMap::new(),
            next_serial: 0,
            used_bytes: 0,
            max_bytes: limits.fragment_bytes,
            max_packets: limits.fragment_packets,
            max_fragments: limits.fragments_per_packet,
            timeout_ns: limits.fragment_timeout_ns,
        }
    }

    /// Inserts a fragment. `Ok(None)` means that the packet is still incomplete. An error drops
    /// this fragment, and possibly other fragments of the same packet or of older packets.
    pub(crate) fn insert(
        &mut self,
        now_ns: u64,
        key: FragmentKey,
        fragment: &Fragment<'_>,
    ) -> InsertOutcome {
        let mut dropped = DropCounters::new();
        let result = self.try_insert(now_ns, key, fragment, &mut dropped);
        InsertOutcome { result, dropped }
    }

    fn try_insert(
        &mut self,
        now_ns: u64,
        key: FragmentKey,
        fragment: &Fragment<'_>,
        dropped: &mut DropCounters,
    ) -> Result<Option<ReassembledPacket>, DropReason> {
        check_fragment(fragment)?;
        if !self.partials.contains_key(&key) {
            self.make_space(PARTIAL_OVERHEAD_BYTES, None, dropped)?;
            self.start_packet(now_ns, key);
        }
        let cost = FRAGMENT_OVERHEAD_BYTES + fragment.data.len() + fragment.headers.len();
        self.make_space(cost, Some(&key), dropped)?;
        let Some(partial) = self.partials.get_mut(&key) else {
            return Err(DropReason::FragmentMemory);
        };
        let before = partial.cost();
        let result = partial.insert(fragment, self.max_fragments);
        if let Err(reason) = result
            && reason != DropReason::FragmentDuplicate
        {
            dropped.add(reason, partial.poison());
        }
        let complete = partial.is_complete();
        self.used_bytes = self.used_bytes + partial.cost() - before;
        result?;
        Ok(if complete {
            self.remove(&key).and_then(|partial| partial.reassemble(key))
        } else {
            None
        })
    }

    fn start_packet(&mut self, now_ns: u64, key: FragmentKey) {
        let serial = self.next_serial;
        self.next_serial += 1;
        self.order.insert(serial, key);
        let partial = PartialPacket {
            serial,
            until_ns: now_ns.saturating_add(self.timeout_ns),
            fragments: Vec::new(),
            data_bytes: 0,
            total_bytes: None,
            first_fragment: None,
            poisoned: false,
        };
        self.used_bytes += partial.cost();
        self.partials.insert(key, partial);
    }

    /// Evicts the oldest packets until `bytes` more fit, but never evicts `keep`.
    fn make_space(
        &mut self,
        bytes: usize,
        keep: Option<&FragmentKey>,
        dropped: &mut DropCounters,
    ) -> Result<(), DropReason> {
        let one_more = usize::from(keep.is_none());
        while self.used_bytes + bytes > self.max_bytes
            || self.partials.len() + one_more > self.max_packets
        {
            let oldest = self.order.values().find(|key| Some(*key) != keep).copied();
            let oldest = oldest.ok_or(DropReason::FragmentMemory)?;
            let partial = self.remove(&oldest).ok_or(DropReason::FragmentMemory)?;
            dropped.add(DropReason::FragmentMemory, partial.fragments.len() as u64);
        }
        Ok(())
    }

    fn remove(&mut self, key: &FragmentKey) -> Option<PartialPacket> {
        let partial = self.partials.remove(key)?;
        self.order.remove(&partial.serial);
        self.used_bytes -= partial.cost();
        Some(partial)
    }

    /// Deadline of the oldest packet in nanoseconds.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        let (_, key) = self.order.first_key_value()?;
        self.partials.get(key).map(|partial| partial.until_ns)
    }

    /// Removes the next expired packet; `None` when no packet has expired.
    pub(crate) fn poll_expired(&mut self, now_ns: u64) -> Option<ExpiredReassembly> {
        if self.next_timeout()? > now_ns {
            return None;
        }
        let key = *self.order.first_key_value()?.1;
        let partial = self.remove(&key)?;
        Some(ExpiredReassembly {
            fragments: partial.fragments.len() as u64,
            quote: partial.quote(),
        })
    }

    /// Memory in use, as counted against the limit.
    #[cfg(test)]
    fn used_bytes(&self) -> usize {
        self.used_bytes
    }
}

/// Checks of a fragment that need no other fragment.
fn check_fragment(fragment: &Fragment<'_>) -> Result<(), DropReason> {
    let len = fragment.data.len();
    if len == 0 || fragment.more_fragments && !len.is_multiple_of(8) {
        return Err(DropReason::FragmentInvalid);
    }
    if fragment.offset_bytes + len > fragment.max_packet_payload_bytes {
        return Err(DropReason::FragmentTooBig);
    }
    Ok(())
}

impl PartialPacket {
    fn cost(&self) -> usize {
        let headers = self.first_fragment.as_ref().map_or(0, |first| first.headers.len());
        PARTIAL_OVERHEAD_BYTES
            + self.fragments.len() * FRAGMENT_OVERHEAD_BYTES
            + self.data_bytes
            + headers
    }

    fn insert(&mut self, fragment: &Fragment<'_>, max_fragments: usize) -> Result<(), DropReason> {
        if self.poisoned {
            return Err(DropReason::FragmentOverlap);
        }
        let (start, end) = (fragment.offset_bytes, fragment.offset_bytes + fragment.data.len());
        let at = self.fragments.partition_point(|stored| stored.offset_bytes < start);
        self.check_overlap(at, start, end, fragment.data)?;
        let stored_end = self.fragments.last().map_or(0, StoredFragment::end);
        let total = if fragment.more_fragments { self.total_bytes } else { Some(end) };
        let contradicts = self.total_bytes.is_some_and(|known| Some(known) != total || end > known)
            || total.is_some_and(|total| stored_end > total);
        if contradicts {
            return Err(DropReason::FragmentInvalid);
        }
        if self.fragments.len() >= max_fragments {
            return Err(DropReason::FragmentMemory);
        }
        self.total_bytes = total;
        self.data_bytes += fragment.data.len();
        self.fragments
            .insert(at, StoredFragment { offset_bytes: start, data: fragment.data.into() });
        if start == 0 {
            let kept = fragment.headers.len().min(MAX_QUOTED_HEADERS_BYTES);
            self.first_fragment = Some(FirstFragment {
                protocol: fragment.protocol,
                hop_limit: fragment.hop_limit,
                traffic_class: fragment.traffic_class,
                headers: fragment.headers[..kept].into(),
            });
        }
        Ok(())
    }

    fn check_overlap(
        &self,
        at: usize,
        start: usize,
        end: usize,
        data: &[u8],
    ) -> Result<(), DropReason> {
        let after = self.fragments.get(at);
        if let Some(same) = after.filter(|stored| stored.offset_bytes == start)
            && *same.data == *data
        {
            // RFC 8200 section 4.5 allows ignoring an exact duplicate: networks duplicate
            // packets.
            return Err(DropReason::FragmentDuplicate);
        }
        let before = at.checked_sub(1).and_then(|at| self.fragments.get(at));
        let overlaps = after.is_some_and(|stored| stored.offset_bytes < end)
            || before.is_some_and(|stored| stored.end() > start);
        if overlaps { Err(DropReason::FragmentOverlap) } else { Ok(()) }
    }

    /// Drops the stored fragments and marks the packet as bad. Returns the number of dropped
    /// fragments.
    fn poison(&mut self) -> u64 {
        self.poisoned = true;
        (self.first_fragment, self.total_bytes, self.data_bytes) = (None, None, 0);
        std::mem::take(&mut self.fragments).len() as u64
    }

    fn is_complete(&self) -> bool {
        self.total_bytes == Some(self.data_bytes)
    }

    fn reassemble(self, key: FragmentKey) -> Option<ReassembledPacket> {
        let first = self.first_fragment?;
        let mut payload = Vec::with_capacity(self.data_bytes);
        for fragment in &self.fragments {
            payload.extend_from_slice(&fragment.data);
        }
        Some(ReassembledPacket {
            key,
            protocol: first.protocol,
            hop_limit: first.hop_limit,
            traffic_class: first.traffic_class,
            payload,
            fragments: self.fragments.len() as u64,
        })
    }

    fn quote(&self) -> Option<Vec<u8>> {
        let (first, fragment) = (self.first_fragment.as_ref()?, self.fragments.first()?);
        Some([&*first.headers, &*fragment.data].concat())
    }
}

impl StoredFragment {
    fn end(&self) -> usize {
        self.offset_bytes + self.data.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    fn reassembly(limit_bytes: usize) -> Reassembly {
        let limits =
            Limits { fragment_bytes: limit_bytes, fragment_packets: 8, ..Limits::default() };
        Reassembly::new(SecretRng::new([0; 16]).hash_key(), &limits)
    }

    fn key(identification: u32) -> FragmentKey {
        let (source, destination) = ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
        FragmentKey { source, destination, identification, protocol: 17 }
    }

    fn put(
        r: &mut Reassembly,
        id: u32,
        offset: usize,
        more_fragments: bool,
        data: &[u8],
    ) -> InsertOutcome {
        let fragment = Fragment {
            offset_bytes: offset,
            more_fragments,
            protocol: 17,
            hop_limit: 64,
            traffic_class: 0,
            headers: &[0; 20],
            data,
            max_packet_payload_bytes: 65_515,
        };
        r.insert(0, key(id), &fragment)
    }

    #[test]
    fn reassembles_fragments_in_any_order() {
        let data: Vec<u8> = (0..40).collect();
        let cuts = [(0, 16, true), (16, 24, true), (24, 40, false)];
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut r = reassembly(1 << 20);
            let mut last = None;
            for at in order {
                let (from, to, more) = cuts[at];
                last = put(&mut r, 1, from, more, &data[from..to]).result.unwrap();
            }
            let whole = last.unwrap();
            assert_eq!((whole.payload, whole.fragments), (data.clone(), 3));
            assert_eq!(r.used_bytes(), 0);
        }
    }

    #[test]
    fn rejects_overlapping_fragments_and_later_ones() {
        for (offset, len, more) in [(0, 16, true), (8, 8, true), (8, 24, false), (0, 32, true)] {
            let mut r = reassembly(1 << 20);
            assert!(put(&mut r, 1, 0, true, &[1; 8]).result.unwrap().is_none());
            assert!(put(&mut r, 1, 8, true, &[1; 16]).result.unwrap().is_none());
            let hit = put(&mut r, 1, offset, more, &vec![9; len]);
            assert_eq!(hit.result.unwrap_err(), DropReason::FragmentOverlap);
            assert_eq!(hit.dropped.get(DropReason::FragmentOverlap), 2);
            let late = put(&mut r, 1, 24, false, &[1; 8]);
            assert_eq!(late.result.unwrap_err(), DropReason::FragmentOverlap);
        }
    }

    #[test]
    fn ignores_exact_duplicates() {
        let mut r = reassembly(1 << 20);
        assert!(put(&mut r, 1, 0, true, &[1; 8]).result.unwrap().is_none());
        let again = put(&mut r, 1, 0, true, &[1; 8]);
        assert_eq!(again.result.unwrap_err(), DropReason::FragmentDuplicate);
        assert!(put(&mut r, 1, 8, false, &[2; 3]).result.unwrap().is_some());
    }

    #[test]
    fn rejects_contradicting_total_lengths() {
        let mut r = reassembly(1 << 20);
        assert!(put(&mut r, 1, 16, false, &[1; 8]).result.is_ok());
        assert_eq!(
            put(&mut r, 1, 8, false, &[1; 8]).result.unwrap_err(),
            DropReason::FragmentInvalid
        );
        assert!(put(&mut r, 2, 16, false, &[1; 8]).result.is_ok());
        assert_eq!(
            put(&mut r, 2, 24, true, &[1; 8]).result.unwrap_err(),
            DropReason::FragmentInvalid
        );
        assert!(put(&mut r, 3, 24, true, &[1; 8]).result.is_ok());
        assert_eq!(
            put(&mut r, 3, 8, false, &[1; 8]).result.unwrap_err(),
            DropReason::FragmentInvalid
        );
    }

    #[test]
    fn rejects_malformed_fragments_without_using_memory() {
        let mut r = reassembly(1 << 20);
        for (offset, more, data, reason) in [
            (0, true, vec![], DropReason::FragmentInvalid),
            (8, true, vec![1; 7], DropReason::FragmentInvalid),
            (65_512, false, vec![1; 8], DropReason::FragmentTooBig),
        ] {
            assert_eq!(put(&mut r, 1, offset, more, &data).result.unwrap_err(), reason);
        }
        assert_eq!(r.used_bytes(), 0);
    }

    #[test]
    fn evicts_the_oldest_packet_at_the_memory_limit() {
        let mut r = reassembly(10_000);
        let mut dropped = 0;
        for id in 0..1000 {
            dropped += put(&mut r, id, 8, true, &[0; 1024]).dropped.total();
            assert!(r.used_bytes() <= 10_000, "{}", r.used_bytes());
        }
        assert_eq!(dropped + r.partials.len() as u64, 1000);
        assert!(r.partials.contains_key(&key(999)));
        assert!(!r.partials.contains_key(&key(0)));
    }

    #[test]
    fn limits_fragments_per_packet() {
        let mut r = reassembly(1 << 20);
        let rejected =
            (0..100).filter(|n| put(&mut r, 1, 16 * n, true, &[0; 8]).result.is_err()).count();
        assert_eq!(rejected, 100 - 64);
    }

    #[test]
    fn expires_packets_in_order_of_arrival() {
        let mut r = reassembly(1 << 20);
        assert!(put(&mut r, 1, 0, true, &[7; 8]).result.is_ok());
        assert!(put(&mut r, 2, 8, true, &[7; 8]).result.is_ok());
        let due = r.next_timeout().unwrap();
        assert_eq!(due, 60_000_000_000);
        assert!(r.poll_expired(due - 1).is_none());
        assert_eq!(r.poll_expired(due).unwrap().quote.unwrap().len(), 28);
        assert!(r.poll_expired(due).unwrap().quote.is_none(), "no first fragment, no quote");
        assert!(r.poll_expired(due).is_none());
        assert_eq!(r.used_bytes(), 0);
    }
}
