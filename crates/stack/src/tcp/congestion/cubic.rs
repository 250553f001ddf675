//! CUBIC (RFC 9438).

use super::{Acked, Congestion, Window};

/// RFC 9438 section 5: how fast the window grows.
const C: f64 = 0.4;
/// RFC 9438 section 4.6: what is left of the window after a loss.
const BETA: f64 = 0.7;
/// RFC 9438 section 4.3: the additive increase that gives Reno's rate.
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

/// Windows are in segments here, as in the RFC.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cubic {
    /// When this growth began; 0 when it has not. In milliseconds that wrap.
    epoch_ms: u32,
    /// The window before the last loss.
    w_max: f32,
    /// How long it takes to come back to it, in seconds.
    k: f32,
    /// The window that Reno would have.
    w_est: f32,
    /// The window at the last loss, to see whether another flow needs room.
    w_last_max: f32,
}

fn milliseconds(ns: u64) -> u32 {
    (ns / 1_000_000) as u32
}

impl Cubic {
    fn begin(&mut self, now_ns: u64, cwnd: f64) {
        self.epoch_ms = milliseconds(now_ns).max(1);
        // Section 4.2, and 4.8 for a window beyond the last one.
        if f64::from(self.w_max) > cwnd {
            self.k = ((f64::from(self.w_max) - cwnd) / C).cbrt() as f32;
        } else {
            self.k = 0.0;
            self.w_max = cwnd as f32;
        }
        self.w_est = cwnd as f32;
    }

    /// The windows before the last loss and at it: what outlasts a growth.
    pub(super) fn windows(&self) -> (f32, f32) {
        (self.w_max, self.w_last_max)
    }

    /// One with these windows, whose growth has not begun.
    pub(super) fn with_windows(w_max: f32, w_last_max: f32) -> Self {
        Self { w_max, w_last_max, ..Self::default() }
    }

    /// Section 4.2, equation 1.
    fn w_cubic(&self, seconds: f64) -> f64 {
        C * (seconds - f64::from(self.k)).powi(3) + f64::from(self.w_max)
    }
}

impl Congestion for Cubic {
    fn on_ack(&mut self, window: &mut Window, acked: &Acked) {
        let mss = f64::from(acked.mss.max(1));
        let cwnd = f64::from(window.cwnd) / mss;
        let segments = f64::from(acked.bytes) / mss;
        if self.epoch_ms == 0 {
            self.begin(acked.now_ns, cwnd);
        }
        let elapsed_ms = milliseconds(acked.now_ns).wrapping_sub(self.epoch_ms) as i32;
        let seconds = f64::from(elapsed_ms.max(0)) / 1e3;
        // Section 4.3, equation 4.
        let alpha = if self.w_est >= self.w_max { 1.0 } else { ALPHA };
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

    fn on_congestion(&mut self, window: &Window, flight: u32, mss: u32) -> u32 {
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

    fn on_timeout(&mut self) {
        self.epoch_ms = 0;
    }

    /// Section 5.8: time without data does not count.
    fn on_idle(&mut self, idle_ns: u64) {
        if self.epoch_ms != 0 {
            self.epoch_ms = self.epoch_ms.wrapping_add(milliseconds(idle_ns)).max(1);
        }
    }
}
