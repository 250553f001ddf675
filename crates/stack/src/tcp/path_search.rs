//! Finding the way back to large segments after a path swallowed them: path MTU
//! discovery by probing (RFC 4821, RFC 8899 section 5.3).
//!
//! Nothing large came through and no router said why, so small segments go out
//! ([`Connection::on_black_hole`]). From then on a segment of new data is now
//! and then larger than what is known to get through. When it arrives, that is
//! the new size; when it is lost, that was its size and not congestion (RFC 4821
//! section 7.5), and the truth lies between the two.

use super::connection::{Connection, DEFAULT_MSS, Is};
use super::flight::Flight;
use super::recovery::Phase;
use super::seq::Seq;

/// A search ends when it is known this well, in bytes.
const CLOSE_ENOUGH: u16 = 32;

/// After a search, the path may have changed (RFC 4821 section 7.4).
const AGAIN_NS: u64 = 600_000_000_000;

/// Segments that must follow a probe, so that its loss is found without a
/// time-out (RFC 4821 section 7.4).
const FOLLOWERS: u32 = 3;

/// What is known while small segments go out. Sizes are those of segments with
/// their options, without other headers.
#[derive(Debug)]
pub(crate) struct PathSearch {
    /// The least that was lost; 0 when nothing was.
    failed: u16,
    /// The size of the probe on its way, and its numbers; 0 when there is none.
    probe: u16,
    start: Seq,
    end: Seq,
    is_lost: bool,
    /// No probe before this.
    not_before_ns: u64,
}

impl PathSearch {
    /// The next size to try when `known` gets through and more than `most` is of
    /// no use.
    fn next(&self, known: u16, most: u16) -> Option<u16> {
        if self.failed == 0 || self.failed > most {
            return (known < most).then_some(most);
        }
        let between = known.midpoint(self.failed);
        (self.failed.saturating_sub(known) > CLOSE_ENOUGH).then_some(between)
    }

    /// Whether everything that is lost is the probe.
    fn explains(&self, flight: &mut Flight) -> bool {
        let lost = flight.lost_bytes();
        let first = flight.first_lost().map(|sent| sent.start);
        self.probe > 0
            && first.is_some_and(|first| self.start.is_up_to(first) && first.is_before(self.end))
            && lost <= self.end.since(self.start)
    }
}

impl Connection {
    /// Begins a search: nothing is known of sizes that are too large.
    pub(crate) fn begin_path_search(&mut self, now_ns: u64) {
        self.search = Some(Box::new(PathSearch {
            failed: 0,
            probe: 0,
            start: self.una,
            end: self.una,
            is_lost: false,
            not_before_ns: now_ns,
        }));
    }

    /// Time-out after time-out: the path may swallow large packets (RFC 4821
    /// section 7.7). The least that every host takes gets through if anything
    /// does.
    pub(crate) fn on_black_hole(&mut self, now_ns: u64) {
        self.mss_limit = DEFAULT_MSS[usize::from(!self.ends.is_v4())];
        // Without selective acknowledgements the loss of a probe cannot be told
        // from that of others (RFC 4821 section 7.5).
        let is_of_use = self.is.contains(Is::SACK) && self.mss_limit < self.mss_most;
        match is_of_use {
            true => self.begin_path_search(now_ns),
            false => self.search = None,
        }
    }

    /// The payload of a probe, if one may go out now with the next data.
    pub(crate) fn path_probe_bytes(&self, now_ns: u64, usable: u32) -> Option<u32> {
        let search = self.search.as_ref()?;
        let known = self.mss_limit.min(self.mss_most);
        let size = search.next(known, self.mss_most)?;
        let bytes = u32::from(size - (known - self.mss));
        let needed = bytes + FOLLOWERS * u32::from(self.mss);
        let fits = self.pipe() + needed <= self.controller.window.cwnd;
        let is_time = search.probe == 0 && search.not_before_ns <= now_ns;
        let is_calm = self.phase == Phase::Open && !self.is.contains(Is::TAIL_PROBE_NOW);
        (is_time && is_calm && fits && needed <= self.unsent().min(usable)).then_some(bytes)
    }

    /// A probe has gone out.
    pub(crate) fn on_path_probe_sent(&mut self, start: Seq, end: Seq) {
        let options = self.mss_limit.min(self.mss_most) - self.mss;
        if let Some(search) = &mut self.search {
            search.probe = end.since(start) as u16 + options;
            (search.start, search.end, search.is_lost) = (start, end, false);
        }
    }

    /// Whether what was found lost is only a probe that was too large. It goes
    /// again in smaller pieces, and the window stays what it is.
    pub(crate) fn lost_only_a_path_probe(&mut self) -> bool {
        let (Some(search), Some(flight)) = (&mut self.search, &mut self.flight) else {
            return false;
        };
        let explains = search.explains(flight);
        search.is_lost |= explains;
        explains
    }

    /// A time-out ran out, so whatever is on its way may be lost.
    pub(crate) fn on_path_probe_timeout(&mut self) {
        if let Some(search) = &mut self.search {
            search.is_lost |= search.probe > 0;
        }
    }

    /// Something was acknowledged: perhaps the probe.
    pub(crate) fn end_path_probe(&mut self, now_ns: u64) {
        let Some(search) = self.search.as_mut() else { return };
        if search.probe == 0 || self.una.is_before(search.end) {
            return;
        }
        let size = std::mem::take(&mut search.probe);
        if search.is_lost {
            search.failed = size;
        } else {
            self.mss_limit = size;
        }
        if self.mss_limit >= self.mss_most {
            (self.mss_limit, self.search) = (u16::MAX, None);
        } else if search.next(self.mss_limit, self.mss_most).is_none() {
            (search.failed, search.not_before_ns) = (0, now_ns.saturating_add(AGAIN_NS));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_takes_the_whole_first_and_then_halves() {
        let mut search = PathSearch {
            failed: 0,
            probe: 0,
            start: Seq(0),
            end: Seq(0),
            is_lost: false,
            not_before_ns: 0,
        };
        // The path takes 1400.
        let (mut known, mut tried) = (536, Vec::new());
        while let Some(size) = search.next(known, 1460) {
            tried.push(size);
            match size <= 1400 {
                true => known = size,
                false => search.failed = size,
            }
        }
        assert_eq!(tried, [1460, 998, 1229, 1344, 1402, 1373]);
        assert_eq!(known, 1373);
    }
}
