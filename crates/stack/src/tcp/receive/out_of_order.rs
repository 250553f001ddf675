//! Out-of-order queue: which data beyond a gap has arrived (RFC 2018).

use std::collections::VecDeque;

use super::MAX_SACK_BLOCKS;
use crate::tcp::seq::Seq;

/// Maximum number of out-of-order ranges per connection: every second segment of a window of the
/// default size may be missing.
const MAX_RANGES: usize = 512;

/// Sequence ranges received beyond a gap. The data itself is in the receive buffer.
#[derive(Debug, Default)]
pub(crate) struct OutOfOrderQueue {
    /// Sorted, neither overlapping nor adjacent.
    ranges: VecDeque<(Seq, Seq)>,
    /// Start of the data received last, most recent first. The ranges that hold these numbers are
    /// the SACK blocks; a number in no range is stale.
    recent: [Option<Seq>; MAX_SACK_BLOCKS],
    /// Number of the peer's FIN, if the FIN has arrived. It is the last number of the last range.
    fin: Option<Seq>,
}

impl OutOfOrderQueue {
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
        self.recent = Default::default();
        self.fin = None;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Number of the peer's FIN, if the FIN has arrived.
    #[inline]
    pub(super) fn fin(&self) -> Option<Seq> {
        self.fin
    }

    /// Records the FIN with the number `seq`. Ignores a FIN where data has arrived or that
    /// contradicts an earlier FIN, so that no data lies beyond a recorded FIN.
    pub(super) fn insert_fin(&mut self, seq: Seq) {
        let is_known = self.fin == Some(seq);
        let is_last = self.ranges.back().is_none_or(|range| range.1.is_at_or_before(seq));
        if is_known || self.fin.is_none() && is_last {
            self.fin = Some(seq);
            self.insert(seq, seq + 1);
        }
    }

    /// Start and end of each range; those received last come last, most recent at the end.
    pub(crate) fn ranges_by_recency(&self) -> impl Iterator<Item = (Seq, Seq)> + use<> {
        let mut recent = [(Seq(0), Seq(0)); MAX_SACK_BLOCKS];
        let count = self.newest_blocks(&mut recent);
        let mut ranges: Vec<_> = self.ranges.iter().copied().collect();
        ranges.retain(|range| !recent[..count].contains(range));
        ranges.extend(recent[..count].iter().rev());
        ranges.into_iter()
    }

    /// True if a range can be recorded: there is space, or the range extends an existing range.
    pub(super) fn has_space(&self, start: Seq, end: Seq) -> bool {
        self.ranges.len() < MAX_RANGES || self.overlapping(start, end).0 > 0
    }

    /// Number of ranges that `start..end` overlaps or touches, and index of the first.
    fn overlapping(&self, start: Seq, end: Seq) -> (usize, usize) {
        let first = self.ranges.partition_point(|range| range.1.is_before(start));
        let adjoining = self.ranges.range(first..).take_while(|range| range.0.is_at_or_before(end));
        (adjoining.count(), first)
    }

    /// Returns the range that holds the number `seq`.
    fn range_of(&self, seq: Seq) -> Option<(Seq, Seq)> {
        let at = self.ranges.partition_point(|range| range.1.is_at_or_before(seq));
        self.ranges.get(at).copied().filter(|range| range.0.is_at_or_before(seq))
    }

    /// True if all of `start..end` was received already.
    pub(super) fn contains(&self, start: Seq, end: Seq) -> bool {
        self.range_of(start).is_some_and(|range| end.is_at_or_before(range.1))
    }

    /// First part of `start..end` that was received already.
    pub(super) fn first_duplicate(&self, start: Seq, end: Seq) -> Option<(Seq, Seq)> {
        let first = self.ranges.partition_point(|range| range.1.is_at_or_before(start));
        let range = self.ranges.get(first).filter(|range| range.0.is_before(end))?;
        Some((range.0.max(start), range.1.min(end)))
    }

    /// Records a range as received.
    pub(super) fn insert(&mut self, start: Seq, end: Seq) {
        self.note_recent(start);
        let (overlap_count, first) = self.overlapping(start, end);
        if overlap_count == 0 {
            return self.ranges.insert(first, (start, end));
        }
        let merged_end = self.ranges[first + overlap_count - 1].1.max(end);
        self.ranges[first] = (self.ranges[first].0.min(start), merged_end);
        self.ranges.drain(first + 1..first + overlap_count);
    }

    /// Puts `start` in front of the recent numbers, in place of an older number of the same range.
    pub(super) fn note_recent(&mut self, start: Seq) {
        let range = self.range_of(start);
        let is_replaced =
            |known: &Option<Seq>| known.is_none_or(|known| self.range_of(known) == range);
        let last = self.recent.len() - 1;
        let replaced = self.recent.iter().position(is_replaced).unwrap_or(last);
        self.recent[..=replaced].rotate_right(1);
        self.recent[0] = Some(start);
    }

    /// Removes the ranges that are in order once the data reaches `nxt`; returns the new end of
    /// the data in order.
    pub(super) fn advance(&mut self, nxt: Seq) -> Seq {
        let mut end = nxt;
        while let Some(range) = self.ranges.front().filter(|range| range.0.is_at_or_before(end)) {
            end = end.max(range.1);
            self.ranges.pop_front();
        }
        end
    }

    /// Fills `blocks` with SACK blocks, most recent first (RFC 2018 section 4); returns their
    /// number.
    pub(super) fn newest_blocks(&self, blocks: &mut [(Seq, Seq)]) -> usize {
        let recent = self.recent.iter().flatten().filter_map(|&seq| self.range_of(seq));
        // As many blocks as there is space for, also those received longer ago.
        let others = self.ranges.iter().rev().take(2 * MAX_SACK_BLOCKS).copied();
        let mut count = 0;
        for range in recent.chain(others) {
            if count < blocks.len() && !blocks[..count].contains(&range) {
                blocks[count] = range;
                count += 1;
            }
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(queue: &OutOfOrderQueue) -> Vec<(u32, u32)> {
        let mut blocks = [(Seq(0), Seq(0)); MAX_SACK_BLOCKS];
        let count = queue.newest_blocks(&mut blocks);
        blocks[..count].iter().map(|&(start, end)| (start.0, end.0)).collect()
    }

    #[test]
    fn rfc2018_4_newest_block_comes_first() {
        let mut queue = OutOfOrderQueue::default();
        for start in [100, 300, 500, 700, 900] {
            queue.insert(Seq(start), Seq(start + 50));
        }
        assert_eq!(blocks(&queue), [(900, 950), (700, 750), (500, 550), (300, 350)]);
        queue.insert(Seq(150), Seq(160));
        assert_eq!(blocks(&queue)[..2], [(100, 160), (900, 950)]);
        queue.insert(Seq(140), Seq(720));
        assert_eq!(blocks(&queue), [(100, 750), (900, 950)], "overlaps become one");
        assert!(queue.contains(Seq(100), Seq(750)) && !queue.contains(Seq(740), Seq(910)));
        assert_eq!(queue.advance(Seq(100)), Seq(750));
        assert_eq!(queue.advance(Seq(800)), Seq(800));
        assert_eq!(blocks(&queue), [(900, 950)]);
    }

    #[test]
    fn ranges_are_bounded_but_may_grow() {
        let mut queue = OutOfOrderQueue::default();
        for n in 0..MAX_RANGES as u32 {
            assert!(queue.has_space(Seq(n * 10), Seq(n * 10 + 1)));
            queue.insert(Seq(n * 10), Seq(n * 10 + 1));
        }
        assert!(!queue.has_space(Seq(5), Seq(6)));
        assert!(queue.has_space(Seq(1), Seq(6)));
    }

    #[test]
    fn ranges_handle_sequence_wrap() {
        let mut queue = OutOfOrderQueue::default();
        queue.insert(Seq(u32::MAX - 10), Seq(5));
        queue.insert(Seq(5), Seq(20));
        assert_eq!(blocks(&queue), [(u32::MAX - 10, 20)]);
        assert_eq!(queue.advance(Seq(u32::MAX - 10)), Seq(20));
    }
}
