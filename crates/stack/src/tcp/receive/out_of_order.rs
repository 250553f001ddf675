//! Out-of-order queue: which data beyond a gap has arrived (RFC 2018).

use crate::tcp::seq::Seq;

/// Maximum number of out-of-order ranges per connection.
const MAX_RANGES: usize = 64;

/// Sequence ranges received beyond a gap. The data itself is in the receive buffer.
#[derive(Debug, Default)]
pub(crate) struct OutOfOrderQueue {
    /// Sorted, neither overlapping nor adjacent.
    ranges: Vec<SeqRange>,
    recency: u32,
}

#[derive(Clone, Copy, Debug)]
struct SeqRange {
    start: Seq,
    end: Seq,
    /// Rank of the last update; larger is later.
    recency: u32,
}

impl OutOfOrderQueue {
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
        self.recency = 0;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Start and end of each range, least recently updated first.
    pub(crate) fn ranges_by_recency(&self) -> impl Iterator<Item = (Seq, Seq)> + use<> {
        let mut ranges = self.ranges.clone();
        ranges.sort_unstable_by_key(|range| range.recency);
        ranges.into_iter().map(|range| (range.start, range.end))
    }

    /// True if a range can be recorded: there is space, or the range extends an existing range.
    pub(super) fn has_space(&self, start: Seq, end: Seq) -> bool {
        self.ranges.len() < MAX_RANGES || self.overlapping(start, end).0 > 0
    }

    /// Number of ranges that `start..end` overlaps or touches, and index of the first.
    fn overlapping(&self, start: Seq, end: Seq) -> (usize, usize) {
        let first = self.ranges.partition_point(|range| range.end.is_before(start));
        let adjoining =
            self.ranges[first..].iter().take_while(|range| range.start.is_at_or_before(end));
        (adjoining.count(), first)
    }

    /// True if all of `start..end` was received already.
    pub(super) fn contains(&self, start: Seq, end: Seq) -> bool {
        self.ranges
            .iter()
            .any(|range| range.start.is_at_or_before(start) && end.is_at_or_before(range.end))
    }

    /// Records a range as received.
    pub(super) fn insert(&mut self, start: Seq, end: Seq) {
        self.recency = self.recency.wrapping_add(1);
        let (overlap_count, first) = self.overlapping(start, end);
        let overlapping = &self.ranges[first..first + overlap_count];
        let start = overlapping.first().map_or(start, |range| range.start.min(start));
        let end = overlapping.last().map_or(end, |range| range.end.max(end));
        let merged = SeqRange { start, end, recency: self.recency };
        self.ranges.splice(first..first + overlap_count, [merged]);
    }

    /// Removes the ranges that are in order once the data reaches `nxt`; returns the new end of
    /// the data in order.
    pub(super) fn advance(&mut self, nxt: Seq) -> Seq {
        let mut end = nxt;
        while let Some(range) = self.ranges.first().filter(|range| range.start.is_at_or_before(end))
        {
            end = end.max(range.end);
            self.ranges.remove(0);
        }
        end
    }

    /// Fills `blocks` with SACK blocks, most recent first (RFC 2018 section 4); returns their
    /// number.
    pub(super) fn newest_blocks(&self, blocks: &mut [(Seq, Seq)]) -> usize {
        let (mut count, mut before) = (0, u32::MAX);
        for block in blocks {
            let newest = self.ranges.iter().filter(|range| range.recency < before);
            let Some(range) = newest.max_by_key(|range| range.recency) else { break };
            *block = (range.start, range.end);
            before = range.recency;
            count += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::super::MAX_SACK_BLOCKS;
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
