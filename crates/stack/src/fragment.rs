//! Putting fragmented packets together again (RFC 791, RFC 815, RFC 8200
//! section 4.5), with RFC 5722 for both families: a packet with overlapping
//! fragments is dropped whole, and so is every fragment of it that comes later.
//!
//! Fragments are copied out of their frames, so that a sender of fragments
//! that never come together cannot hold the frames that others need. The
//! memory has a limit; when it is reached, the oldest packet goes.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use tidegate_wire::{DropCounters, DropReason};

use crate::Limits;
use crate::chance::HashKey;

/// What a fragment costs besides its bytes, and an incomplete packet besides
/// its fragments: what the tables use, generously.
const PIECE_COST_BYTES: usize = 64;
const PARTIAL_COST_BYTES: usize = 256;
/// The most of the headers of a first fragment that is kept to be quoted.
const QUOTED_HEADERS_BYTES: usize = 256;

/// What all fragments of a packet have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) identification: u32,
    /// For IPv4 alone (RFC 791); 0 for IPv6.
    pub(crate) protocol: u8,
}

/// One fragment as it arrived.
pub(crate) struct Fragment<'a> {
    pub(crate) offset_bytes: usize,
    pub(crate) more: bool,
    /// The protocol of the whole, as this fragment tells it.
    pub(crate) protocol: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    /// All headers in front of the data.
    pub(crate) headers: &'a [u8],
    pub(crate) data: &'a [u8],
    /// The largest payload that the whole packet may have.
    pub(crate) limit_bytes: usize,
}

/// A packet whose fragments are all here.
#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) key: Key,
    pub(crate) protocol: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) payload: Vec<u8>,
    /// How many fragments it came in.
    pub(crate) fragments: u64,
}

/// A packet whose time was up, or that was pushed out.
#[derive(Debug)]
pub(crate) struct Timeout {
    /// The first fragment, if it arrived: what an ICMP error may quote.
    pub(crate) quote: Option<Vec<u8>>,
    /// Fragments that were held.
    pub(crate) fragments: u64,
}

struct Piece {
    offset_bytes: usize,
    data: Box<[u8]>,
}

struct Partial {
    serial: u64,
    until_ns: u64,
    /// In the order of their offsets, without overlap.
    pieces: Vec<Piece>,
    data_bytes: usize,
    /// Known when the last fragment is here.
    total_bytes: Option<usize>,
    first: Option<First>,
    /// Fragments overlapped: all that still comes is dropped.
    poisoned: bool,
}

struct First {
    protocol: u8,
    hop_limit: u8,
    traffic_class: u8,
    headers: Box<[u8]>,
}

/// Every packet of which some fragments are here.
pub(crate) struct Reassembly {
    partials: HashMap<Key, Partial, HashKey>,
    /// Oldest first: all have the same time, so this is also the order in
    /// which their time is up.
    order: BTreeMap<u64, Key>,
    next_serial: u64,
    used_bytes: usize,
    limit_bytes: usize,
    limit_packets: usize,
    limit_pieces: usize,
    timeout_ns: u64,
}

/// What came of a fragment.
pub(crate) struct Inserted {
    pub(crate) result: Result<Option<Whole>, DropReason>,
    /// Fragments held before that are dropped now, by reason.
    pub(crate) released: DropCounters,
}

impl Reassembly {
    pub(crate) fn new(key: HashKey, limits: &Limits) -> Self {
        Self {
            partials: HashMap::with_hasher(key),
            order: BTreeMap::new(),
            next_serial: 0,
            used_bytes: 0,
            limit_bytes: limits.fragment_bytes,
            limit_packets: limits.fragment_packets,
            limit_pieces: limits.fragments_per_packet,
            timeout_ns: limits.fragment_timeout_ns,
        }
    }

    /// Takes a fragment. `Ok(None)` means that it is held. An error drops
    /// this fragment; others of the same packet, or of older ones, may be
    /// dropped with it.
    pub(crate) fn insert(&mut self, now_ns: u64, key: Key, fragment: &Fragment<'_>) -> Inserted {
        let mut released = DropCounters::new();
        let result = self.try_insert(now_ns, key, fragment, &mut released);
        Inserted { result, released }
    }

    fn try_insert(
        &mut self,
        now_ns: u64,
        key: Key,
        fragment: &Fragment<'_>,
        released: &mut DropCounters,
    ) -> Result<Option<Whole>, DropReason> {
        check_form(fragment)?;
        if !self.partials.contains_key(&key) {
            self.make_room(PARTIAL_COST_BYTES, None, released)?;
            self.start(now_ns, key);
        }
        let cost = PIECE_COST_BYTES + fragment.data.len() + fragment.headers.len();
        self.make_room(cost, Some(&key), released)?;
        let Some(partial) = self.partials.get_mut(&key) else {
            return Err(DropReason::FragmentMemory);
        };
        let before = partial.cost();
        let result = partial.insert(fragment, self.limit_pieces);
        if let Err(reason) = result
            && reason != DropReason::FragmentDuplicate
        {
            released.add(reason, partial.poison());
        }
        let complete = partial.is_complete();
        self.used_bytes = self.used_bytes + partial.cost() - before;
        result?;
        Ok(if complete { self.remove(&key).and_then(|partial| partial.join(key)) } else { None })
    }

    fn start(&mut self, now_ns: u64, key: Key) {
        let serial = self.next_serial;
        self.next_serial += 1;
        self.order.insert(serial, key);
        let partial = Partial {
            serial,
            until_ns: now_ns.saturating_add(self.timeout_ns),
            pieces: Vec::new(),
            data_bytes: 0,
            total_bytes: None,
            first: None,
            poisoned: false,
        };
        self.used_bytes += partial.cost();
        self.partials.insert(key, partial);
    }

    /// Makes room for `bytes` by giving up the oldest packets, but never
    /// `keep`.
    fn make_room(
        &mut self,
        bytes: usize,
        keep: Option<&Key>,
        released: &mut DropCounters,
    ) -> Result<(), DropReason> {
        let one_more = usize::from(keep.is_none());
        while self.used_bytes + bytes > self.limit_bytes
            || self.partials.len() + one_more > self.limit_packets
        {
            let oldest = self.order.values().find(|key| Some(*key) != keep).copied();
            let oldest = oldest.ok_or(DropReason::FragmentMemory)?;
            let partial = self.remove(&oldest).ok_or(DropReason::FragmentMemory)?;
            released.add(DropReason::FragmentMemory, partial.pieces.len() as u64);
        }
        Ok(())
    }

    fn remove(&mut self, key: &Key) -> Option<Partial> {
        let partial = self.partials.remove(key)?;
        self.order.remove(&partial.serial);
        self.used_bytes -= partial.cost();
        Some(partial)
    }

    /// When the oldest packet's time is up.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        let (_, key) = self.order.first_key_value()?;
        self.partials.get(key).map(|partial| partial.until_ns)
    }

    /// The next packet whose time is up, until there is none.
    pub(crate) fn poll_expired(&mut self, now_ns: u64) -> Option<Timeout> {
        if self.next_timeout()? > now_ns {
            return None;
        }
        let key = *self.order.first_key_value()?.1;
        let partial = self.remove(&key)?;
        Some(Timeout { fragments: partial.pieces.len() as u64, quote: partial.quote() })
    }

    /// Memory in use, as it is counted against the limit.
    #[cfg(test)]
    fn used_bytes(&self) -> usize {
        self.used_bytes
    }
}

/// Rules that one fragment must keep by itself.
fn check_form(fragment: &Fragment<'_>) -> Result<(), DropReason> {
    let len = fragment.data.len();
    if len == 0 || fragment.more && !len.is_multiple_of(8) {
        return Err(DropReason::FragmentInvalid);
    }
    if fragment.offset_bytes + len > fragment.limit_bytes {
        return Err(DropReason::FragmentTooBig);
    }
    Ok(())
}

impl Partial {
    fn cost(&self) -> usize {
        let headers = self.first.as_ref().map_or(0, |first| first.headers.len());
        PARTIAL_COST_BYTES + self.pieces.len() * PIECE_COST_BYTES + self.data_bytes + headers
    }

    fn insert(&mut self, fragment: &Fragment<'_>, limit_pieces: usize) -> Result<(), DropReason> {
        if self.poisoned {
            return Err(DropReason::FragmentOverlap);
        }
        let (start, end) = (fragment.offset_bytes, fragment.offset_bytes + fragment.data.len());
        let at = self.pieces.partition_point(|piece| piece.offset_bytes < start);
        self.check_overlap(at, start, end, fragment.data)?;
        let known_end = self.pieces.last().map_or(0, Piece::end);
        let total = if fragment.more { self.total_bytes } else { Some(end) };
        let contradicts = self.total_bytes.is_some_and(|known| Some(known) != total || end > known)
            || total.is_some_and(|total| known_end > total);
        if contradicts {
            return Err(DropReason::FragmentInvalid);
        }
        if self.pieces.len() >= limit_pieces {
            return Err(DropReason::FragmentMemory);
        }
        self.total_bytes = total;
        self.data_bytes += fragment.data.len();
        self.pieces.insert(at, Piece { offset_bytes: start, data: fragment.data.into() });
        if start == 0 {
            let kept = fragment.headers.len().min(QUOTED_HEADERS_BYTES);
            self.first = Some(First {
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
        let after = self.pieces.get(at);
        if let Some(same) = after.filter(|piece| piece.offset_bytes == start)
            && *same.data == *data
        {
            // RFC 8200 section 4.5 lets an exact duplicate be ignored:
            // networks do duplicate packets.
            return Err(DropReason::FragmentDuplicate);
        }
        let before = at.checked_sub(1).and_then(|at| self.pieces.get(at));
        let overlaps = after.is_some_and(|piece| piece.offset_bytes < end)
            || before.is_some_and(|piece| piece.end() > start);
        if overlaps { Err(DropReason::FragmentOverlap) } else { Ok(()) }
    }

    /// Gives up everything but the memory that this packet is bad. Returns how
    /// many fragments were held.
    fn poison(&mut self) -> u64 {
        self.poisoned = true;
        (self.first, self.total_bytes, self.data_bytes) = (None, None, 0);
        std::mem::take(&mut self.pieces).len() as u64
    }

    fn is_complete(&self) -> bool {
        self.total_bytes == Some(self.data_bytes)
    }

    fn join(self, key: Key) -> Option<Whole> {
        let first = self.first?;
        let mut payload = Vec::with_capacity(self.data_bytes);
        for piece in &self.pieces {
            payload.extend_from_slice(&piece.data);
        }
        Some(Whole {
            key,
            protocol: first.protocol,
            hop_limit: first.hop_limit,
            traffic_class: first.traffic_class,
            payload,
            fragments: self.pieces.len() as u64,
        })
    }

    fn quote(&self) -> Option<Vec<u8>> {
        let (first, piece) = (self.first.as_ref()?, self.pieces.first()?);
        Some([&*first.headers, &*piece.data].concat())
    }
}

impl Piece {
    fn end(&self) -> usize {
        self.offset_bytes + self.data.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    fn reassembly(limit_bytes: usize) -> Reassembly {
        let limits =
            Limits { fragment_bytes: limit_bytes, fragment_packets: 8, ..Limits::default() };
        Reassembly::new(Chance::new([0; 16]).hash_key(), &limits)
    }

    fn key(identification: u32) -> Key {
        let (source, destination) = ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
        Key { source, destination, identification, protocol: 17 }
    }

    fn put(r: &mut Reassembly, id: u32, offset: usize, more: bool, data: &[u8]) -> Inserted {
        let fragment = Fragment {
            offset_bytes: offset,
            more,
            protocol: 17,
            hop_limit: 64,
            traffic_class: 0,
            headers: &[0; 20],
            data,
            limit_bytes: 65_515,
        };
        r.insert(0, key(id), &fragment)
    }

    #[test]
    fn every_order_of_fragments_gives_the_same_packet() {
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
    fn overlap_of_any_kind_drops_the_packet_and_what_follows() {
        for (offset, len, more) in [(0, 16, true), (8, 8, true), (8, 24, false), (0, 32, true)] {
            let mut r = reassembly(1 << 20);
            assert!(put(&mut r, 1, 0, true, &[1; 8]).result.unwrap().is_none());
            assert!(put(&mut r, 1, 8, true, &[1; 16]).result.unwrap().is_none());
            let hit = put(&mut r, 1, offset, more, &vec![9; len]);
            assert_eq!(hit.result.unwrap_err(), DropReason::FragmentOverlap);
            assert_eq!(hit.released.get(DropReason::FragmentOverlap), 2);
            let late = put(&mut r, 1, 24, false, &[1; 8]);
            assert_eq!(late.result.unwrap_err(), DropReason::FragmentOverlap);
        }
    }

    #[test]
    fn duplicates_are_ignored_and_do_no_harm() {
        let mut r = reassembly(1 << 20);
        assert!(put(&mut r, 1, 0, true, &[1; 8]).result.unwrap().is_none());
        let again = put(&mut r, 1, 0, true, &[1; 8]);
        assert_eq!(again.result.unwrap_err(), DropReason::FragmentDuplicate);
        assert!(put(&mut r, 1, 8, false, &[2; 3]).result.unwrap().is_some());
    }

    #[test]
    fn two_ends_and_data_behind_the_end_are_refused() {
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
    fn impossible_fragments_are_refused_before_anything_is_kept() {
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
    fn memory_has_a_limit_and_the_oldest_packet_goes_first() {
        let mut r = reassembly(10_000);
        let mut dropped = 0;
        for id in 0..1000 {
            dropped += put(&mut r, id, 8, true, &[0; 1024]).released.total();
            assert!(r.used_bytes() <= 10_000, "{}", r.used_bytes());
        }
        assert_eq!(dropped + r.partials.len() as u64, 1000);
        assert!(r.partials.contains_key(&key(999)));
        assert!(!r.partials.contains_key(&key(0)));
    }

    #[test]
    fn many_tiny_fragments_of_one_packet_are_limited() {
        let mut r = reassembly(1 << 20);
        let refused =
            (0..100).filter(|n| put(&mut r, 1, 16 * n, true, &[0; 8]).result.is_err()).count();
        assert_eq!(refused, 100 - 64);
    }

    #[test]
    fn time_is_up_in_the_order_of_arrival() {
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
