//! Intended send time of each packet.

/// Schedule of an open-loop generator: packets leave by the clock, not on the previous response.
///
/// The intended send time of a packet depends on its number alone. A stall of the generator or
/// of the server does not move the time, so the stall shows in the latency of every packet that
/// it delays (no coordinated omission).
#[derive(Clone, Debug)]
pub struct Pacer {
    start_ns: u64,
    end_ns: u64,
    interval_ns: Option<f64>,
    sent: u64,
}

impl Pacer {
    /// Creates a schedule from `start_ns` to `end_ns` at `rate_pps` packets per second.
    ///
    /// `None` is the maximum rate; a rate that is not above zero sends nothing.
    pub fn new(start_ns: u64, end_ns: u64, rate_pps: Option<f64>) -> Self {
        let interval_ns = rate_pps.map(|rate| if rate > 0.0 { 1e9 / rate } else { f64::INFINITY });
        Self { start_ns, end_ns, interval_ns, sent: 0 }
    }

    /// Returns the number of packets due now, at most `limit`.
    #[inline]
    pub fn due(&self, now_ns: u64, limit: usize) -> usize {
        if now_ns < self.start_ns || now_ns >= self.end_ns {
            return 0;
        }
        let Some(interval_ns) = self.interval_ns else { return limit };
        // Packet n leaves at start + n * interval, so packet 0 is due at the start.
        let due = ((now_ns - self.start_ns) as f64 / interval_ns) as u64 + 1;
        let due = if interval_ns.is_finite() { due } else { 0 };
        due.saturating_sub(self.sent).min(limit as u64) as usize
    }

    /// Counts one packet as sent and returns its intended send time in nanoseconds.
    #[inline]
    pub fn record_sent(&mut self, now_ns: u64) -> u64 {
        let number = self.sent;
        self.sent += 1;
        match self.interval_ns {
            Some(interval_ns) => self.start_ns + (number as f64 * interval_ns) as u64,
            None => now_ns,
        }
    }

    /// Returns the number of packets sent so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Returns the delay behind the schedule, in nanoseconds.
    pub fn lag_ns(&self, now_ns: u64) -> u64 {
        let Some(interval_ns) = self.interval_ns else { return 0 };
        let next_ns = self.start_ns as f64 + self.sent as f64 * interval_ns;
        (now_ns.min(self.end_ns) as f64 - next_ns).max(0.0) as u64
    }

    /// True when the end of the schedule has passed.
    #[inline]
    pub fn is_finished(&self, now_ns: u64) -> bool {
        now_ns >= self.end_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Advances a virtual clock in steps and sends all packets due.
    fn walk(pacer: &mut Pacer, from_ns: u64, to_ns: u64, step_ns: u64) -> Vec<(u64, u64)> {
        let mut sent = Vec::new();
        for now in (from_ns..to_ns).step_by(step_ns as usize) {
            for _ in 0..pacer.due(now, 64) {
                sent.push((now, pacer.record_sent(now)));
            }
        }
        sent
    }

    #[test]
    fn the_rate_is_met_exactly() {
        let mut pacer = Pacer::new(SECOND, 2 * SECOND, Some(1000.0));
        let sent = walk(&mut pacer, 0, 3 * SECOND, 100_000);
        assert_eq!(sent.len(), 1000);
        assert_eq!(sent[0].1, SECOND);
        assert_eq!(sent[999].1, SECOND + 999_000_000);
        assert!(sent.iter().all(|(now, intended)| now >= intended));
    }

    #[test]
    fn catches_up_after_a_stall_with_intended_times() {
        let mut pacer = Pacer::new(0, SECOND, Some(1000.0));
        assert_eq!(walk(&mut pacer, 0, 100_000_000, 1_000_000).len(), 100);
        // Nothing for 50 ms, then one read of the clock.
        let now = 150_000_000;
        assert_eq!(pacer.due(now, 1000), 51);
        assert_eq!(pacer.lag_ns(now), 50_000_000);
        assert_eq!(pacer.due(now, 16), 16, "in bursts of at most the limit");
        assert_eq!(pacer.record_sent(now), 100_000_000, "not the time of the stall's end");
    }

    #[test]
    fn unlimited_rate_fills_every_burst() {
        let mut pacer = Pacer::new(0, SECOND, None);
        assert_eq!(pacer.due(5, 64), 64);
        assert_eq!(pacer.record_sent(5), 5);
        assert_eq!(pacer.lag_ns(SECOND), 0);
        assert_eq!(pacer.due(SECOND, 64), 0);
        assert!(pacer.is_finished(SECOND));
    }

    #[test]
    fn a_rate_of_zero_sends_nothing() {
        for rate in [0.0, -1.0, f64::NAN] {
            assert_eq!(Pacer::new(0, SECOND, Some(rate)).due(SECOND / 2, 64), 0, "{rate}");
        }
    }
}
