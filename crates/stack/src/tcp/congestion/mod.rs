//! Congestion control: the congestion window and its algorithms (RFC 5681).
//!
//! [`CongestionAlgorithm`] is implemented by CUBIC (RFC 9438) and NewReno (RFC 5681, RFC 6582).
//! Loss detection is elsewhere; this module only adapts the window.

mod cubic;
mod hystart;
mod newreno;

use cubic::Cubic;
use hystart::{HyStart, SlowStartStep};
use newreno::NewReno;

use crate::tcp::seq::Seq;

/// Initial window in segments (RFC 6928 section 2).
pub(crate) const INITIAL_WINDOW_SEGMENTS: u32 = 10;

/// Congestion control algorithm of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum CongestionControl {
    /// CUBIC (RFC 9438).
    #[default]
    Cubic,
    /// NewReno (RFC 5681 with RFC 6582).
    NewReno,
}

/// Congestion window and slow start threshold, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CongestionWindow {
    /// Most bytes that may be in flight.
    pub(crate) cwnd: u32,
    /// Below this window, slow start doubles the window each round trip.
    pub(crate) ssthresh: u32,
}

/// Input of a window increase: an acknowledgement of new data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AckInfo {
    /// Bytes newly acknowledged.
    pub(crate) bytes: u32,
    /// Largest segment that is sent, in bytes.
    pub(crate) mss: u32,
    pub(crate) now_ns: u64,
    /// Smoothed round-trip time.
    pub(crate) rtt_ns: u64,
    /// Round-trip time of the acknowledged segment, if it was sent once.
    pub(crate) sample_ns: Option<u64>,
    /// SND.UNA after the acknowledgement, and SND.NXT.
    pub(crate) una: Seq,
    pub(crate) nxt: Seq,
}

/// Congestion control algorithm.
pub(crate) trait CongestionAlgorithm {
    /// Grows the window in congestion avoidance.
    fn on_ack(&mut self, window: &mut CongestionWindow, acked: &AckInfo);
    /// Reacts to a loss or congestion mark, at most once per round trip, with `flight` bytes in
    /// flight. Returns the new slow start threshold.
    fn on_congestion(&mut self, window: &CongestionWindow, flight: u32, mss: u32) -> u32;
    /// Stops growth by time until the next [`CongestionAlgorithm::on_ack`]: after a time-out, and
    /// while the application does not use the window.
    fn pause_growth(&mut self);
}

#[derive(Clone, Copy, Debug)]
enum Algorithm {
    /// The initial slow start, before the first congestion event.
    InitialSlowStart(CongestionControl, HyStart),
    Cubic(Cubic),
    NewReno(NewReno),
}

/// Snapshot of a [`CongestionController`]; CUBIC's windows are in segments.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct ControllerSnapshot {
    cwnd: u32,
    ssthresh: u32,
    w_max: f32,
    w_last_max: f32,
}

/// Congestion window of a connection and the algorithm that adapts it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CongestionController {
    pub(crate) window: CongestionWindow,
    algorithm: Algorithm,
}

impl CongestionController {
    pub(crate) fn new(kind: CongestionControl, mss: u32) -> Self {
        let algorithm = Algorithm::InitialSlowStart(kind, HyStart::new());
        let window = CongestionWindow { cwnd: initial_window(mss), ssthresh: u32::MAX };
        Self { window, algorithm }
    }

    /// Takes a snapshot.
    pub(crate) fn save(&self) -> ControllerSnapshot {
        let (w_max, w_last_max) = match &self.algorithm {
            Algorithm::Cubic(cubic) => cubic.windows(),
            Algorithm::InitialSlowStart(..) | Algorithm::NewReno(_) => (0.0, 0.0),
        };
        let CongestionWindow { cwnd, ssthresh } = self.window;
        ControllerSnapshot { cwnd, ssthresh, w_max, w_last_max }
    }

    /// Restores a controller from a snapshot: the window is kept, CUBIC starts a new growth epoch.
    pub(crate) fn restore(kind: CongestionControl, mss: u32, saved: &ControllerSnapshot) -> Self {
        let mut controller = Self::new(kind, mss);
        controller.window =
            CongestionWindow { cwnd: saved.cwnd.max(mss), ssthresh: saved.ssthresh };
        if saved.ssthresh < u32::MAX {
            controller.end_initial_slow_start();
        }
        if let Algorithm::Cubic(cubic) = &mut controller.algorithm {
            *cubic = Cubic::with_windows(saved.w_max, saved.w_last_max);
        }
        controller
    }

    /// Goes over to the algorithm of congestion avoidance for good (RFC 9406 section 4.3).
    fn end_initial_slow_start(&mut self) {
        if let Algorithm::InitialSlowStart(kind, _) = self.algorithm {
            self.algorithm = match kind {
                CongestionControl::Cubic => Algorithm::Cubic(Cubic::default()),
                CongestionControl::NewReno => Algorithm::NewReno(NewReno),
            };
        }
    }

    /// Grows the window in congestion avoidance.
    fn grow(&mut self, acked: &AckInfo) {
        self.end_initial_slow_start();
        match &mut self.algorithm {
            Algorithm::Cubic(cubic) => cubic.on_ack(&mut self.window, acked),
            Algorithm::NewReno(newreno) => newreno.on_ack(&mut self.window, acked),
            Algorithm::InitialSlowStart(..) => {}
        }
    }

    /// Stops growth by time until the next [`CongestionController::on_ack`]: after a time-out, and
    /// after an acknowledgement while the congestion window does not limit transmission.
    #[inline]
    pub(crate) fn pause_growth(&mut self) {
        match &mut self.algorithm {
            Algorithm::Cubic(cubic) => cubic.pause_growth(),
            Algorithm::NewReno(newreno) => newreno.pause_growth(),
            Algorithm::InitialSlowStart(..) => {}
        }
    }

    /// Sets the segment size, once known and before data is sent.
    pub(crate) fn set_mss(&mut self, mss: u32) {
        self.window.cwnd = initial_window(mss);
    }

    /// Grows the window after an acknowledgement outside of recovery. Only for a window that limited
    /// transmission (RFC 9293 section 3.8.2, RFC 7661); otherwise call
    /// [`CongestionController::pause_growth`].
    pub(crate) fn on_ack(&mut self, acked: &AckInfo) {
        let CongestionWindow { cwnd, ssthresh } = self.window;
        if cwnd >= ssthresh {
            return self.grow(acked);
        }
        // Slow start by bytes (RFC 3465; the limit is the whole acknowledgement, as in RFC 9406).
        let step = match &mut self.algorithm {
            Algorithm::InitialSlowStart(_, hystart) => hystart.on_ack(acked),
            Algorithm::Cubic(_) | Algorithm::NewReno(_) => SlowStartStep::Grow(acked.bytes),
        };
        match step {
            SlowStartStep::Grow(bytes) => {
                self.window.cwnd = cwnd.saturating_add(bytes).min(ssthresh);
            }
            SlowStartStep::End => {
                self.window.ssthresh = cwnd;
                self.grow(acked);
            }
        }
    }

    /// Lowers the threshold after a loss or a congestion mark, with `flight` bytes in flight. The
    /// window follows during recovery or at [`CongestionController::end_recovery`].
    pub(crate) fn on_congestion(&mut self, flight: u32, mss: u32) {
        self.end_initial_slow_start();
        let ssthresh = match &mut self.algorithm {
            Algorithm::Cubic(cubic) => cubic.on_congestion(&self.window, flight, mss),
            Algorithm::NewReno(newreno) => newreno.on_congestion(&self.window, flight, mss),
            Algorithm::InitialSlowStart(..) => self.window.ssthresh,
        };
        self.window.ssthresh = ssthresh.max(2 * mss);
    }

    /// Sets the window to the threshold.
    pub(crate) fn end_recovery(&mut self) {
        self.window.cwnd = self.window.ssthresh;
    }

    /// Sets the window to one segment after a retransmission time-out. The threshold is lowered
    /// only at the `first` time-out for the same data (RFC 5681 section 3.1, equation 4).
    pub(crate) fn on_timeout(&mut self, flight: u32, mss: u32, first: bool) {
        if first {
            self.on_congestion(flight, mss);
        }
        self.window.cwnd = mss;
        self.pause_growth();
    }

    /// Limits the window to the initial window after a pause of transmission longer than the
    /// retransmission time-out (RFC 5681 section 4.1): what the path carries may have changed. Slow start returns to three quarters of the old window (RFC 7661 section 4.4.3).
    pub(crate) fn restart_after_idle(&mut self, mss: u32) {
        let CongestionWindow { cwnd, ssthresh } = self.window;
        self.window.ssthresh = ssthresh.max(cwnd - cwnd / 4);
        self.window.cwnd = self.window.cwnd.min(initial_window(mss));
        self.pause_growth();
    }
}

/// Initial window in bytes (RFC 6928 section 2).
fn initial_window(mss: u32) -> u32 {
    (INITIAL_WINDOW_SEGMENTS * mss).min((2 * mss).max(14_600))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1000;

    fn acked(bytes: u32, now_ns: u64) -> AckInfo {
        AckInfo {
            bytes,
            mss: MSS,
            now_ns,
            rtt_ns: 100_000_000,
            sample_ns: None,
            una: Seq(0),
            nxt: Seq(0),
        }
    }

    #[test]
    fn rfc6928_initial_window() {
        assert_eq!(initial_window(1460), 14_600);
        assert_eq!(initial_window(536), 5360);
        assert_eq!(initial_window(9000), 18_000);
    }

    #[test]
    fn slow_start_doubles_the_window() {
        for kind in [CongestionControl::Cubic, CongestionControl::NewReno] {
            let mut controller = CongestionController::new(kind, MSS);
            controller.on_ack(&acked(10 * MSS, 0));
            assert_eq!(controller.window.cwnd, 20 * MSS);
        }
    }

    #[test]
    fn timeout_restarts_at_one_segment_and_keeps_first_ssthresh() {
        for kind in [CongestionControl::Cubic, CongestionControl::NewReno] {
            let mut controller = CongestionController::new(kind, MSS);
            controller.on_timeout(10 * MSS, MSS, true);
            let threshold = controller.window.ssthresh;
            assert!((5 * MSS..=7 * MSS).contains(&threshold), "{threshold}");
            assert_eq!(controller.window.cwnd, MSS);
            controller.on_timeout(MSS, MSS, false);
            assert_eq!(controller.window.ssthresh, threshold);
        }
    }

    #[test]
    fn rfc5681_congestion_avoidance_adds_one_segment_per_round_trip() {
        let mut controller = CongestionController::new(CongestionControl::NewReno, MSS);
        controller.on_congestion(20 * MSS, MSS);
        controller.end_recovery();
        assert_eq!(controller.window.cwnd, 10 * MSS);
        for _ in 0..10 {
            controller.on_ack(&acked(MSS, 0));
        }
        assert!(controller.window.cwnd.abs_diff(11 * MSS) < MSS / 10);
    }

    #[test]
    fn rfc9438_cubic_regains_w_max_and_then_exceeds_it() {
        let mut controller = CongestionController::new(CongestionControl::Cubic, MSS);
        controller.window.cwnd = 1000 * MSS;
        controller.on_congestion(1000 * MSS, MSS);
        controller.end_recovery();
        assert_eq!(controller.window.cwnd, 700 * MSS, "section 4.6: times 0.7");
        // Section 4.2: K = cbrt(1000 * 0.3 / 0.4) is about 9.1 seconds.
        let mut now_ns = 0;
        let mut at_nine = 0;
        while now_ns < 14_000_000_000 {
            for _ in 0..10 {
                controller.on_ack(&acked(controller.window.cwnd / 10, now_ns));
            }
            now_ns += 100_000_000;
            if now_ns == 9_000_000_000 {
                at_nine = controller.window.cwnd;
            }
        }
        assert!(at_nine.abs_diff(1000 * MSS) < 20 * MSS, "{at_nine}");
        assert!(controller.window.cwnd > 1030 * MSS, "{}", controller.window.cwnd);
    }

    #[test]
    fn rfc9438_5_8_time_without_need_for_the_window_does_not_count() {
        for seconds_of_growth in [4, 14] {
            let mut controller = CongestionController::new(CongestionControl::Cubic, MSS);
            controller.window.cwnd = 1000 * MSS;
            controller.on_congestion(1000 * MSS, MSS);
            controller.end_recovery();
            let mut now_ns = 0;
            let mut grow = |controller: &mut CongestionController, steps: u64| {
                for _ in 0..steps {
                    controller.on_ack(&acked(controller.window.cwnd / 10, now_ns));
                    now_ns += 10_000_000;
                }
                now_ns
            };
            let paused_ns = grow(&mut controller, seconds_of_growth * 100);
            let (before, mut uninterrupted) = (controller.window.cwnd, controller);
            controller.pause_growth();
            grow(&mut uninterrupted, 100);
            for step in 0..100 {
                let resumed_ns = paused_ns + 600_000_000_000 + step * 10_000_000;
                controller.on_ack(&acked(controller.window.cwnd / 10, resumed_ns));
            }
            let (cwnd, expected) = (controller.window.cwnd, uninterrupted.window.cwnd);
            assert!(cwnd.abs_diff(expected) <= (expected - before) / 5 + MSS, "{cwnd} {expected}");
        }
    }

    #[test]
    fn rfc7661_4_4_3_slow_start_returns_to_three_quarters_of_the_window_before_a_pause() {
        for kind in [CongestionControl::Cubic, CongestionControl::NewReno] {
            let mut controller = CongestionController::new(kind, MSS);
            controller.on_congestion(40 * MSS, MSS);
            // Congestion avoidance has grown the window far beyond the threshold.
            controller.window.cwnd = 200 * MSS;
            controller.restart_after_idle(MSS);
            let CongestionWindow { cwnd, ssthresh } = controller.window;
            assert_eq!((cwnd, ssthresh), (10 * MSS, 150 * MSS), "{kind:?}");
            controller.restart_after_idle(MSS);
            assert_eq!(controller.window.ssthresh, 150 * MSS, "a second pause");
        }
    }

    #[test]
    fn rfc9438_4_3_small_windows_are_no_slower_than_reno() {
        let mut cubic = CongestionController::new(CongestionControl::Cubic, MSS);
        cubic.on_congestion(10 * MSS, MSS);
        cubic.end_recovery();
        let begin = cubic.window.cwnd;
        let mut now_ns = 0;
        for _ in 0..20 {
            for _ in 0..begin / MSS {
                cubic.on_ack(&AckInfo { rtt_ns: 1_000_000, ..acked(MSS, now_ns) });
            }
            now_ns += 1_000_000;
        }
        // RFC 9438 equation 4: at least 0.53 segments per round trip.
        assert!(cubic.window.cwnd > begin + 5 * MSS, "{}", cubic.window.cwnd);
    }
}
