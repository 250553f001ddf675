//! Times of arrivals, for the service times of servers.

use crate::Engine;

impl Engine {
    /// Reads the clock when a burst has arrived, from now on. The device may wait for frames, so that
    /// the clock's last reading can be older.
    #[inline]
    pub fn measure_arrivals(&mut self) {
        if self.arrival_ns.is_none() {
            self.arrival_ns = Some(self.now_ns);
            self.update_special_ways();
        }
    }

    /// Time at which the last burst arrived; 0 unless [`Engine::measure_arrivals`] was called.
    #[inline]
    pub fn arrival_ns(&self) -> u64 {
        self.arrival_ns.unwrap_or(0)
    }

    /// Time now. The time of the round does not change.
    #[inline]
    pub fn time_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Notes the arrival of a burst of `frames`.
    #[inline]
    pub(crate) fn time_arrival(&mut self, frames: usize) {
        if frames > 0 && self.arrival_ns.is_some() {
            self.arrival_ns = Some(self.clock.now_ns());
        }
    }
}
