//! Path MTU discovery by probing (RFC 4821, RFC 8899 section 5.3): the search for a larger
//! segment size after a path has swallowed large segments.
//!
//! If no large segment gets through and no router reports why, the connection falls back to
//! small segments ([`Recovery::on_black_hole`]). From then on, a segment of new data is
//! occasionally larger than the size known to work. An acknowledged probe sets the new size.
//! A lost probe means that its size was too large, not that there is congestion (RFC 4821
//! section 7.5); the search then continues between the two sizes.

use super::flight::Flight;
use super::{Recovery, RecoveryPhase};
use crate::tcp::send::{DEFAULT_MSS, SendState};
use crate::tcp::seq::Seq;

/// Precision at which a search ends, in bytes.
const SEARCH_PRECISION_BYTES: u16 = 32;

/// Time until the next search, because the path may have changed (RFC 4821 section 7.4).
const SEARCH_INTERVAL_NS: u64 = 600_000_000_000;

/// Segments that must follow a probe, so that its loss is detected without a time-out
/// (RFC 4821 section 7.4).
const SEGMENTS_BEHIND_PROBE: u32 = 3;

/// State of the search while small segments go out. Sizes are payload and options of a
/// segment in bytes, without other headers.
#[derive(Debug)]
pub(super) struct MtuSearch {
    /// Smallest size that was lost; 0 if none.
    min_failed_bytes: u16,
    /// Size of the probe in flight, and its sequence range below; 0 if none is in flight.
    probe_bytes: u16,
    probe_start: Seq,
    probe_end: Seq,
    is_probe_lost: bool,
    /// Earliest time of the next probe.
    not_before_ns: u64,
}

impl MtuSearch {
    /// Next size to try: `working` gets through, and sizes above `max` are of no use. `None` when
    /// the search is finished.
    fn next_size(&self, working: u16, max: u16) -> Option<u16> {
        if self.min_failed_bytes == 0 || self.min_failed_bytes > max {
            return (working < max).then_some(max);
        }
        let middle = working.midpoint(self.min_failed_bytes);
        (self.min_failed_bytes.saturating_sub(working) > SEARCH_PRECISION_BYTES).then_some(middle)
    }

    /// True if the probe accounts for all lost bytes.
    fn only_probe_lost(&self, flight: &mut Flight) -> bool {
        let lost = flight.lost_bytes();
        let first = flight.first_lost().map(|sent| sent.start);
        self.probe_bytes > 0
            && first.is_some_and(|first| {
                self.probe_start.is_at_or_before(first) && first.is_before(self.probe_end)
            })
            && lost <= self.probe_end.since(self.probe_start)
    }
}

impl Recovery {
    /// Search in progress.
    #[inline]
    pub(super) fn mtu_search(&self) -> Option<&MtuSearch> {
        self.after_loss.as_ref()?.mtu_search.as_ref()
    }

    #[inline]
    fn mtu_search_mut(&mut self) -> Option<&mut MtuSearch> {
        self.after_loss.as_mut()?.mtu_search.as_mut()
    }

    fn end_mtu_search(&mut self) {
        if let Some(after_loss) = &mut self.after_loss {
            after_loss.mtu_search = None;
        }
    }

    /// Starts a search without any known upper bound. `una` is SND.UNA.
    pub(super) fn begin_mtu_search(&mut self, now_ns: u64, una: Seq) {
        self.after_loss.get_or_insert_default().mtu_search = Some(MtuSearch {
            min_failed_bytes: 0,
            probe_bytes: 0,
            probe_start: una,
            probe_end: una,
            is_probe_lost: false,
            not_before_ns: now_ns,
        });
    }

    /// Reacts to repeated time-outs: the path may swallow large packets (RFC 4821 section 7.7).
    /// Falls back to the segment size that every host must accept: if any size gets through, this
    /// one does. `sack`: both sides use SACK.
    pub(crate) fn on_black_hole(
        &mut self,
        now_ns: u64,
        send: &mut SendState,
        is_v4: bool,
        sack: bool,
    ) {
        send.mss_limit = DEFAULT_MSS[usize::from(!is_v4)];
        // Without SACK, the loss of a probe cannot be told from other losses (RFC 4821
        // section 7.5).
        match sack && send.mss_limit < send.max_mss {
            true => self.begin_mtu_search(now_ns, send.una),
            false => self.end_mtu_search(),
        }
    }

    /// Payload bytes of a probe, if a probe may be sent now as the next data segment.
    #[inline]
    pub(crate) fn mtu_probe_bytes(
        &self,
        now_ns: u64,
        send: &SendState,
        sack: bool,
        usable: u32,
    ) -> Option<u32> {
        let search = self.mtu_search()?;
        let working = send.mss_limit.min(send.max_mss);
        let size = search.next_size(working, send.max_mss)?;
        let payload_bytes = u32::from(size - (working - send.mss));
        let needed = payload_bytes + SEGMENTS_BEHIND_PROBE * u32::from(send.mss);
        let fits = self.pipe(send, sack) + needed <= self.controller.window.cwnd;
        let is_due = search.probe_bytes == 0 && search.not_before_ns <= now_ns;
        let is_undisturbed = self.phase == RecoveryPhase::Open;
        (is_due && is_undisturbed && fits && needed <= send.unsent().min(usable))
            .then_some(payload_bytes)
    }

    /// Records that a probe was sent with the sequence numbers `start..end`.
    pub(crate) fn on_mtu_probe_sent(&mut self, send: &SendState, start: Seq, end: Seq) {
        let options = send.mss_limit.min(send.max_mss) - send.mss;
        if let Some(search) = self.mtu_search_mut() {
            search.probe_bytes = end.since(start) as u16 + options;
            (search.probe_start, search.probe_end, search.is_probe_lost) = (start, end, false);
        }
    }

    /// True if the only loss detected is an oversized probe. The data of the probe is sent again
    /// in smaller segments, and the congestion window stays unchanged.
    #[inline]
    pub(crate) fn lost_only_mtu_probe(&mut self) -> bool {
        let search = self.after_loss.as_mut().and_then(|after_loss| after_loss.mtu_search.as_mut());
        let (Some(search), Some(flight)) = (search, &mut self.flight) else { return false };
        let only_probe_lost = search.only_probe_lost(flight);
        search.is_probe_lost |= only_probe_lost;
        only_probe_lost
    }

    /// True while a probe is in flight.
    pub(super) fn has_mtu_probe(&self) -> bool {
        self.mtu_search().is_some_and(|search| search.probe_bytes > 0)
    }

    /// Reacts to a retransmission time-out: a probe in flight counts as lost.
    pub(crate) fn on_mtu_probe_timeout(&mut self) {
        if let Some(search) = self.mtu_search_mut() {
            search.is_probe_lost |= search.probe_bytes > 0;
        }
    }

    /// Evaluates the probe once its sequence numbers are acknowledged.
    #[inline]
    pub(crate) fn finish_mtu_probe(&mut self, now_ns: u64, send: &mut SendState) {
        let Some(search) = self.mtu_search_mut() else { return };
        if search.probe_bytes == 0 || send.una.is_before(search.probe_end) {
            return;
        }
        let size = std::mem::take(&mut search.probe_bytes);
        if search.is_probe_lost {
            search.min_failed_bytes = size;
        } else {
            send.mss_limit = size;
        }
        if send.mss_limit >= send.max_mss {
            send.mss_limit = u16::MAX;
            self.end_mtu_search();
        } else if search.next_size(send.mss_limit, send.max_mss).is_none() {
            (search.min_failed_bytes, search.not_before_ns) =
                (0, now_ns.saturating_add(SEARCH_INTERVAL_NS));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_largest_size_first_then_bisects() {
        let mut search = MtuSearch {
            min_failed_bytes: 0,
            probe_bytes: 0,
            probe_start: Seq(0),
            probe_end: Seq(0),
            is_probe_lost: false,
            not_before_ns: 0,
        };
        // The path carries segments of 1400 bytes.
        let (mut known, mut tried) = (536, Vec::new());
        while let Some(size) = search.next_size(known, 1460) {
            tried.push(size);
            match size <= 1400 {
                true => known = size,
                false => search.min_failed_bytes = size,
            }
        }
        assert_eq!(tried, [1460, 998, 1229, 1344, 1402, 1373]);
        assert_eq!(known, 1373);
    }
}
