//! Rate that a busy server serves: the measured capacity.

/// Time for which a measured capacity is believed. Then a higher total is tried.
const BELIEF_NS: u64 = 1_000_000_000;
/// The same for a doubtful one.
const DOUBT_NS: u64 = 50_000_000;

/// Rate served while the server was busy all the time, averaged over some periods.
///
/// A rate far below the one expected is doubtful: another program may have had the processor
/// meanwhile. If the server is busy again before it serves what is expected, less is expected.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BusyRate {
    pub(super) pps: u64,
    expected_pps: u64,
    is_doubtful: bool,
    /// Time for which the rate is still believed.
    left_ns: u64,
}

impl BusyRate {
    /// Ends a period with the rate served in it. `best_pps`, the best rate served before, is what is
    /// expected of the first measurement: another program may have the processor from the start.
    pub(super) fn update(
        &mut self,
        served_pps: u64,
        was_busy: bool,
        best_pps: u64,
        elapsed_ns: u64,
    ) {
        self.left_ns = self.left_ns.saturating_sub(elapsed_ns);
        let is_trial = self.left_ns == 0;
        if was_busy {
            if self.expected_pps == 0 {
                self.expected_pps = best_pps;
            }
            let believed_pps = if is_trial { served_pps } else { self.pps };
            self.pps = believed_pps - believed_pps / 8 + served_pps / 8;
            if is_trial && self.is_doubtful {
                self.expected_pps = self.expected_pps.midpoint(self.pps);
            }
            self.expected_pps = self.expected_pps.max(self.pps);
            self.is_doubtful = self.is_far_below_expected(self.pps);
            self.left_ns = if self.is_doubtful { DOUBT_NS } else { BELIEF_NS };
        } else if is_trial && self.is_doubtful && !self.is_far_below_expected(served_pps) {
            self.is_doubtful = false;
        }
    }

    fn is_far_below_expected(&self, pps: u64) -> bool {
        pps < self.expected_pps - self.expected_pps / 8
    }

    /// True if the server is expected to do far more than a total, against the last measurement.
    pub(super) fn is_doubtful_below(&self, total_pps: u64) -> bool {
        self.is_doubtful && self.is_far_below_expected(total_pps)
    }

    /// Highest total while the rate is believed: just below it.
    pub(super) fn max_total_pps(&self) -> Option<u64> {
        (self.left_ns > 0).then_some(self.pps - self.pps / 64)
    }
}
