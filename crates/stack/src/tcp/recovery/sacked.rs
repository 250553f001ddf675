//! Ranges of sequence numbers that are selectively acknowledged.

use std::collections::VecDeque;

use crate::tcp::seq::Seq;

/// Disjoint ranges in order, neither empty nor adjacent.
#[derive(Debug, Default)]
pub(super) struct SackedRanges {
    ranges: VecDeque<(Seq, Seq)>,
}

impl SackedRanges {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    #[inline]
    pub(super) fn clear(&mut self) {
        if !self.is_empty() {
            self.ranges.clear();
        }
    }

    /// Forgets what lies before `una`, the first number not acknowledged in order.
    pub(super) fn advance(&mut self, una: Seq) {
        while self.ranges.front().is_some_and(|range| range.1.is_at_or_before(una)) {
            self.ranges.pop_front();
        }
    }

    /// First part of `start..end` that lies in no range.
    pub(super) fn first_gap(&self, start: Seq, end: Seq) -> Option<(Seq, Seq)> {
        let at = self.ranges.partition_point(|range| range.1.is_at_or_before(start));
        let Some(&(known_start, known_end)) = self.ranges.get(at) else {
            return start.is_before(end).then_some((start, end));
        };
        if start.is_before(known_start) {
            return start.is_before(end).then_some((start, end.min(known_start)));
        }
        let next = self.ranges.get(at + 1).map_or(end, |range| range.0.min(end));
        known_end.is_before(next).then_some((known_end, next))
    }

    /// Adds a range.
    pub(super) fn insert(&mut self, start: Seq, end: Seq) {
        let at = self.ranges.partition_point(|range| range.1.is_before(start));
        let count =
            self.ranges.range(at..).take_while(|range| range.0.is_at_or_before(end)).count();
        if count == 0 {
            return self.ranges.insert(at, (start, end));
        }
        let merged_end = self.ranges[at + count - 1].1.max(end);
        self.ranges[at] = (self.ranges[at].0.min(start), merged_end);
        self.ranges.drain(at + 1..at + count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(ranges: &SackedRanges, start: u32, end: u32) -> Vec<(u32, u32)> {
        let (mut from, end) = (Seq(start), Seq(end));
        let mut gaps = Vec::new();
        while let Some((start, gap_end)) = ranges.first_gap(from, end) {
            gaps.push((start.0, gap_end.0));
            from = gap_end;
        }
        gaps
    }

    #[test]
    fn gaps_are_what_no_range_covers() {
        let mut ranges = SackedRanges::default();
        for start in [100, 300, 500] {
            ranges.insert(Seq(start), Seq(start + 100));
        }
        assert_eq!(gaps(&ranges, 0, 700), [(0, 100), (200, 300), (400, 500), (600, 700)]);
        assert_eq!(gaps(&ranges, 150, 350), [(200, 300)]);
        assert_eq!(gaps(&ranges, 300, 400), []);
        ranges.insert(Seq(200), Seq(300));
        assert_eq!(ranges.ranges, [(Seq(100), Seq(400)), (Seq(500), Seq(600))]);
        ranges.insert(Seq(50), Seq(900));
        assert_eq!(ranges.ranges, [(Seq(50), Seq(900))]);
        ranges.advance(Seq(900));
        assert_eq!(gaps(&ranges, 850, 950), [(850, 950)]);
    }
}
