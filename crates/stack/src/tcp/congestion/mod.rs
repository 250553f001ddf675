//! How much may be on its way at one time (RFC 5681).
//!
//! One trait, [`Congestion`], for every algorithm: CUBIC (RFC 9438) and NewReno
//! (RFC 5681, RFC 6582). What is lost and what has arrived is found out
//! elsewhere; here is only what follows from it for the window.

mod cubic;
mod newreno;

use serde::{Deserialize, Serialize};

use cubic::Cubic;
use newreno::NewReno;

/// The window that a connection begins with, in segments (RFC 6928 section 2).
pub(crate) const INITIAL_SEGMENTS: u32 = 10;

/// Which algorithm a connection uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CongestionControl {
    /// RFC 9438.
    #[default]
    Cubic,
    /// RFC 5681 with RFC 6582.
    NewReno,
}

/// The window, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// What may be on its way.
    pub(crate) cwnd: u32,
    /// Up to here the window doubles with each round trip.
    pub(crate) ssthresh: u32,
}

/// What an acknowledgement says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acked {
    /// Bytes newly acknowledged.
    pub(crate) bytes: u32,
    /// The largest segment that is sent.
    pub(crate) mss: u32,
    pub(crate) now_ns: u64,
    /// The smoothed round trip.
    pub(crate) rtt_ns: u64,
}

/// An algorithm.
pub(crate) trait Congestion {
    /// The window grows in congestion avoidance.
    fn on_ack(&mut self, window: &mut Window, acked: &Acked);
    /// Something was lost or marked, the first time within a round trip:
    /// returns the new threshold.
    fn on_congestion(&mut self, window: &Window, flight: u32, mss: u32) -> u32;
    /// The retransmission time-out has run out: what was learnt is of no use.
    fn on_timeout(&mut self);
    /// Nothing was sent for a while.
    fn on_idle(&mut self, idle_ns: u64);
}

#[derive(Clone, Copy, Debug)]
enum Algorithm {
    Cubic(Cubic),
    NewReno(NewReno),
}

/// A [`Controller`] as plain data; windows of CUBIC's in segments.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SavedController {
    cwnd: u32,
    ssthresh: u32,
    w_max: f32,
    w_last_max: f32,
}

/// The window of a connection and the algorithm that moves it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Controller {
    pub(crate) window: Window,
    algorithm: Algorithm,
}

impl Controller {
    pub(crate) fn new(kind: CongestionControl, mss: u32) -> Self {
        let algorithm = match kind {
            CongestionControl::Cubic => Algorithm::Cubic(Cubic::default()),
            CongestionControl::NewReno => Algorithm::NewReno(NewReno),
        };
        let window = Window { cwnd: initial_window(mss), ssthresh: u32::MAX };
        Self { window, algorithm }
    }

    /// What there is to know about it.
    pub(crate) fn save(&self) -> SavedController {
        let (w_max, w_last_max) = match &self.algorithm {
            Algorithm::Cubic(cubic) => cubic.windows(),
            Algorithm::NewReno(_) => (0.0, 0.0),
        };
        let Window { cwnd, ssthresh } = self.window;
        SavedController { cwnd, ssthresh, w_max, w_last_max }
    }

    /// One that goes on where another was saved: with the same window, from
    /// which CUBIC begins to grow anew.
    pub(crate) fn restore(kind: CongestionControl, mss: u32, saved: &SavedController) -> Self {
        let mut controller = Self::new(kind, mss);
        controller.window = Window { cwnd: saved.cwnd.max(mss), ssthresh: saved.ssthresh };
        if let Algorithm::Cubic(cubic) = &mut controller.algorithm {
            *cubic = Cubic::with_windows(saved.w_max, saved.w_last_max);
        }
        controller
    }

    fn algorithm(&mut self) -> (&mut dyn Congestion, &mut Window) {
        let algorithm: &mut dyn Congestion = match &mut self.algorithm {
            Algorithm::Cubic(cubic) => cubic,
            Algorithm::NewReno(newreno) => newreno,
        };
        (algorithm, &mut self.window)
    }

    /// The largest segment is known now, before anything was sent.
    pub(crate) fn set_mss(&mut self, mss: u32) {
        self.window.cwnd = initial_window(mss);
    }

    /// Data was acknowledged, outside of recovery. `limited` says that the
    /// window was what kept us from sending more: only then it grows (RFC 9293
    /// section 3.8.2, RFC 7661).
    pub(crate) fn on_ack(&mut self, acked: &Acked, limited: bool) {
        if !limited {
            return;
        }
        let Window { cwnd, ssthresh } = self.window;
        if cwnd < ssthresh {
            // Slow start, by bytes (RFC 3465 with a limit of the whole
            // acknowledgement, as RFC 9406 has it).
            let grown = cwnd.saturating_add(acked.bytes);
            self.window.cwnd = grown.min(ssthresh.max(cwnd));
            return;
        }
        let (algorithm, window) = self.algorithm();
        algorithm.on_ack(window, acked);
    }

    /// Loss was found or a mark was seen, with `flight` bytes on their way.
    /// Sets the threshold; the window follows by [`Controller::end_recovery`]
    /// or as recovery goes.
    pub(crate) fn on_congestion(&mut self, flight: u32, mss: u32) {
        let (algorithm, window) = self.algorithm();
        window.ssthresh = algorithm.on_congestion(window, flight, mss).max(2 * mss);
    }

    /// The window is what the threshold says.
    pub(crate) fn end_recovery(&mut self) {
        self.window.cwnd = self.window.ssthresh;
    }

    /// The retransmission time-out has run out; `first` for the same data
    /// (RFC 5681 section 3.1, equation 4).
    pub(crate) fn on_timeout(&mut self, flight: u32, mss: u32, first: bool) {
        if first {
            self.on_congestion(flight, mss);
        }
        self.window.cwnd = mss;
        self.algorithm().0.on_timeout();
    }

    /// Nothing was sent for longer than the time-out: the window is stale
    /// (RFC 5681 section 4.1).
    pub(crate) fn restart(&mut self, mss: u32, idle_ns: u64) {
        self.window.cwnd = self.window.cwnd.min(initial_window(mss));
        self.algorithm().0.on_idle(idle_ns);
    }
}

/// RFC 6928 section 2.
fn initial_window(mss: u32) -> u32 {
    (INITIAL_SEGMENTS * mss).min((2 * mss).max(14_600))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1000;

    fn acked(bytes: u32, now_ns: u64) -> Acked {
        Acked { bytes, mss: MSS, now_ns, rtt_ns: 100_000_000 }
    }

    #[test]
    fn rfc6928_initial_window() {
        assert_eq!(initial_window(1460), 14_600);
        assert_eq!(initial_window(536), 5360);
        assert_eq!(initial_window(9000), 18_000);
    }

    #[test]
    fn slow_start_doubles_and_only_when_the_window_was_the_limit() {
        for kind in [CongestionControl::Cubic, CongestionControl::NewReno] {
            let mut controller = Controller::new(kind, MSS);
            controller.on_ack(&acked(10 * MSS, 0), false);
            assert_eq!(controller.window.cwnd, 10 * MSS);
            controller.on_ack(&acked(10 * MSS, 0), true);
            assert_eq!(controller.window.cwnd, 20 * MSS);
        }
    }

    #[test]
    fn a_time_out_starts_from_one_segment_and_keeps_the_first_threshold() {
        for kind in [CongestionControl::Cubic, CongestionControl::NewReno] {
            let mut controller = Controller::new(kind, MSS);
            controller.on_timeout(10 * MSS, MSS, true);
            let threshold = controller.window.ssthresh;
            assert!((5 * MSS..=7 * MSS).contains(&threshold), "{threshold}");
            assert_eq!(controller.window.cwnd, MSS);
            controller.on_timeout(MSS, MSS, false);
            assert_eq!(controller.window.ssthresh, threshold);
        }
    }

    #[test]
    fn rfc5681_congestion_avoidance_adds_a_segment_a_round_trip() {
        let mut controller = Controller::new(CongestionControl::NewReno, MSS);
        controller.on_congestion(20 * MSS, MSS);
        controller.end_recovery();
        assert_eq!(controller.window.cwnd, 10 * MSS);
        for _ in 0..10 {
            controller.on_ack(&acked(MSS, 0), true);
        }
        assert!(controller.window.cwnd.abs_diff(11 * MSS) < MSS / 10);
    }

    #[test]
    fn rfc9438_cubic_comes_back_to_the_old_window_and_then_beyond() {
        let mut controller = Controller::new(CongestionControl::Cubic, MSS);
        controller.window.cwnd = 1000 * MSS;
        controller.on_congestion(1000 * MSS, MSS);
        controller.end_recovery();
        assert_eq!(controller.window.cwnd, 700 * MSS, "section 4.6: times 0.7");
        // Section 4.2: K = cbrt(1000 * 0.3 / 0.4) is about 9.1 seconds.
        let mut now_ns = 0;
        let mut at_nine = 0;
        while now_ns < 14_000_000_000 {
            for _ in 0..10 {
                controller.on_ack(&acked(controller.window.cwnd / 10, now_ns), true);
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
    fn rfc9438_4_3_small_windows_are_no_slower_than_reno() {
        let mut cubic = Controller::new(CongestionControl::Cubic, MSS);
        cubic.on_congestion(10 * MSS, MSS);
        cubic.end_recovery();
        let begin = cubic.window.cwnd;
        let mut now_ns = 0;
        for _ in 0..20 {
            for _ in 0..begin / MSS {
                cubic.on_ack(&Acked { bytes: MSS, mss: MSS, now_ns, rtt_ns: 1_000_000 }, true);
            }
            now_ns += 1_000_000;
        }
        // RFC 9438 equation 4: at least 0.53 segments a round trip.
        assert!(cubic.window.cwnd > begin + 5 * MSS, "{}", cubic.window.cwnd);
    }
}
