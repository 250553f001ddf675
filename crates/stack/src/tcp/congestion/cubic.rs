//! CUBIC congestion control (RFC 9438).

use super::{AckInfo, CongestionAlgorithm, CongestionWindow};
use crate::tcp::identity::milliseconds;

/// Growth constant in segments per second cubed (RFC 9438 section 5).
const C: f64 = 0.4;
/// Multiplicative decrease factor (RFC 9438 section 4.6).
const BETA: f64 = 0.7;
/// Additive increase that matches Reno's rate (RFC 9438 section 4.3).
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

/// CUBIC state. Windows are in segments, as in the RFC.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cubic {
    /// Start of the current growth epoch in milliseconds, wrapping; 0 when none has begun.
    epoch_ms: u32,
    /// Window before the last reduction.
    w_max: f32,
    /// Seconds from the start of the epoch until the window is at `w_max`.
    k: f32,
    /// Estimate of Reno's window.
    w_est: f32,
    /// Window at the last reduction (cwnd_prior). A smaller window at the next one means that another flow
    /// needs bandwidth (fast convergence).
    w_last_max: f32,
}

impl Cubic {
    /// Starts a growth epoch at the current window: on the curve to `w_max`, or on the same curve
    /// beyond `w_max`, where a growth epoch was interrupted (section 5.8).
    fn start_epoch(&mut self, now_ns: u64, cwnd: f64) {
        self.epoch_ms = milliseconds(now_ns).max(1);
        if self.w_max == 0.0 {
            // Section 4.8: no congestion event yet.
            self.w_max = cwnd as f32;
        }
        // Section 4.2, equation 2; negative beyond `w_max`.
        self.k = ((f64::from(self.w_max) - cwnd) / C).cbrt() as f32;
        self.w_est = cwnd as f32;
    }

    /// Returns `w_max` and `w_last_max`, the state that outlasts a growth epoch.
    pub(super) fn windows(&self) -> (f32, f32) {
        (self.w_max, self.w_last_max)
    }

    /// State with these windows and no growth epoch.
    pub(super) fn with_windows(w_max: f32, w_last_max: f32) -> Self {
        Self { w_max, w_last_max, ..Self::default() }
    }

    /// W_cubic(t) (section 4.2, equation 1).
    fn w_cubic(&self, seconds: f64) -> f64 {
        C * (seconds - f64::from(self.k)).powi(3) + f64::from(self.w_max)
    }
}

impl CongestionAlgorithm for Cubic {
    fn on_ack(&mut self, window: &mut CongestionWindow, acked: &AckInfo) {
        let mss = f64::from(acked.mss.max(1));
        let cwnd = f64::from(window.cwnd) / mss;
        let segments = f64::from(acked.bytes) / mss;
        if self.epoch_ms == 0 {
            self.start_epoch(acked.now_ns, cwnd);
        }
        let elapsed_ms = milliseconds(acked.now_ns).wrapping_sub(self.epoch_ms) as i32;
        let seconds = f64::from(elapsed_ms.max(0)) / 1e3;
        // Section 4.3, equation 4.
        let alpha = if self.w_est >= self.w_last_max { 1.0 } else { ALPHA };
        self.w_est += (alpha * segments / cwnd) as f32;
        let target = self.w_cubic(seconds + acked.rtt_ns as f64 / 1e9).clamp(cwnd, 1.5 * cwnd);
        // Sections 4.4 and 4.5: (target - cwnd) / cwnd for each segment.
        let grown = cwnd + (target - cwnd) / cwnd * segments;
        let grown = if self.w_cubic(seconds) < f64::from(self.w_est) {
            grown.max(self.w_est.into())
        } else {
            grown
        };
        window.cwnd = window.cwnd.max((grown * mss).min(f64::from(u32::MAX / 4)) as u32);
    }

    fn on_congestion(&mut self, window: &CongestionWindow, flight: u32, mss: u32) -> u32 {
        let mss = f64::from(mss.max(1));
        let cwnd = f64::from(window.cwnd.min(flight.max(1))) / mss;
        self.epoch_ms = 0;
        // Section 4.7, fast convergence.
        self.w_max = if cwnd < f64::from(self.w_last_max) {
            (cwnd * (1.0 + BETA) / 2.0) as f32
        } else {
            cwnd as f32
        };
        self.w_last_max = cwnd as f32;
        (cwnd * BETA * mss) as u32
    }

    /// Ends the growth epoch: time without need for a larger window does not count.
    fn pause_growth(&mut self) {
        self.epoch_ms = 0;
    }
}
