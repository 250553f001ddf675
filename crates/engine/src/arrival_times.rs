//! Times of arrivals, for the service times of servers.

/// Frames from which a burst is large: of these one of [`LARGE_BURSTS_PER_TIME`] is measured, so that
/// a busy server reads the clock seldom.
const LARGE_BURST_FRAMES: usize = 16;
const LARGE_BURSTS_PER_TIME: u8 = 8;

/// Arrivals, while they are measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArrivalTimes {
    /// Time of the last burst; `None` if that was not measured.
    pub(crate) last_ns: Option<u64>,
    /// Bursts to come that are not measured.
    unmeasured: u8,
}

impl ArrivalTimes {
    /// As if a burst had arrived at `now_ns`.
    pub(crate) fn from(now_ns: u64) -> Self {
        Self { last_ns: Some(now_ns), unmeasured: 0 }
    }

    /// Notes a burst of `frames`, which may be none.
    #[inline]
    pub(crate) fn note(&mut self, frames: usize, now_ns: impl FnOnce() -> u64) {
        if frames == 0 {
            return;
        }
        if let Some(left) = self.unmeasured.checked_sub(1) {
            (self.unmeasured, self.last_ns) = (left, None);
            return;
        }
        self.last_ns = Some(now_ns());
        if frames >= LARGE_BURST_FRAMES {
            self.unmeasured = LARGE_BURSTS_PER_TIME - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_small_burst_is_measured_and_one_of_eight_large_ones() {
        let mut arrivals = ArrivalTimes::from(0);
        let mut measured = |frames, count: u64| -> Vec<u64> {
            let times = (0..count).filter_map(|time| {
                arrivals.note(frames, || time);
                arrivals.last_ns
            });
            times.collect()
        };
        assert_eq!(measured(15, 3), [0, 1, 2]);
        assert_eq!(measured(16, 17), [0, 8, 16]);
        assert_eq!(measured(1, 9), [7, 8], "seven more after a large one");
    }
}
