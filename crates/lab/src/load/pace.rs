//! When each packet is meant to leave.

/// The schedule of an open-loop generator: packets leave by the clock, not when
/// the last answer arrives.
///
/// The intended time of a packet depends on its number alone. A generator or
/// a server that stalls does not move it, so the stall shows in the latency of
/// every packet that had to wait (no coordinated omission).
#[derive(Clone, Debug)]
pub struct Pacer {
    start_ns: u64,
    end_ns: u64,
    interval_ns: Option<f64>,
    sent: u64,
}

impl Pacer {
    /// A schedule from `start_ns` to `end_ns` at `rate_pps`; `None` is as fast
    /// as it goes. Rates that are not above zero send nothing.
    pub fn new(start_ns: u64, end_ns: u64, rate_pps: Option<f64>) -> Self {
        let interval_ns = rate_pps.map(|rate| if rate > 0.0 { 1e9 / rate } else { f64::INFINITY });
        Self { start_ns, end_ns, interval_ns, sent: 0 }
    }

    /// How many packets should leave now, at most `limit`.
    #[inline]
    pub fn due(&self, now_ns: u64, limit: usize) -> usize {
        if now_ns < self.start_ns || now_ns >= self.end_ns {
            return 0;
        }
        let Some(interval_ns) = self.interval_ns else { return limit };
        // The packet with number n leaves at start + n * interval, so one is
        // due at the start already.
        let due = ((now_ns - self.start_ns) as f64 / interval_ns) as u64 + 1;
        let due = if interval_ns.is_finite() { due } else { 0 };
        due.saturating_sub(self.sent).min(limit as u64) as usize
    }

    /// Counts one packet as sent and returns when it was meant to leave.
    #[inline]
    pub fn send(&mut self, now_ns: u64) -> u64 {
        let number = self.sent;
        self.sent += 1;
        match self.interval_ns {
            Some(interval_ns) => self.start_ns + (number as f64 * interval_ns) as u64,
            None => now_ns,
        }
    }

    /// Packets sent so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// How far behind the schedule we are, in nanoseconds.
    pub fn lag_ns(&self, now_ns: u64) -> u64 {
        let Some(interval_ns) = self.interval_ns else { return 0 };
        let next_ns = self.start_ns as f64 + self.sent as f64 * interval_ns;
        (now_ns.min(self.end_ns) as f64 - next_ns).max(0.0) as u64
    }

    /// Whether the last packet has been due.
    #[inline]
    pub fn is_over(&self, now_ns: u64) -> bool {
        now_ns >= self.end_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Walks a virtual clock in steps and sends whatever is due.
    fn walk(pacer: &mut Pacer, from_ns: u64, to_ns: u64, step_ns: u64) -> Vec<(u64, u64)> {
        let mut sent = Vec::new();
        for now in (from_ns..to_ns).step_by(step_ns as usize) {
            for _ in 0..pacer.due(now, 64) {
                sent.push((now, pacer.send(now)));
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
    fn a_stall_is_made_up_and_keeps_the_intended_times() {
        let mut pacer = Pacer::new(0, SECOND, Some(1000.0));
        assert_eq!(walk(&mut pacer, 0, 100_000_000, 1_000_000).len(), 100);
        // Nothing for 50 ms, then one look at the clock.
        let now = 150_000_000;
        assert_eq!(pacer.due(now, 1000), 51);
        assert_eq!(pacer.lag_ns(now), 50_000_000);
        assert_eq!(pacer.due(now, 16), 16, "in bursts of at most the limit");
        assert_eq!(pacer.send(now), 100_000_000, "not the time of the stall's end");
    }

    #[test]
    fn the_maximum_is_the_limit_at_every_look() {
        let mut pacer = Pacer::new(0, SECOND, None);
        assert_eq!(pacer.due(5, 64), 64);
        assert_eq!(pacer.send(5), 5);
        assert_eq!(pacer.lag_ns(SECOND), 0);
        assert_eq!(pacer.due(SECOND, 64), 0);
        assert!(pacer.is_over(SECOND));
    }

    #[test]
    fn a_rate_of_zero_sends_nothing() {
        for rate in [0.0, -1.0, f64::NAN] {
            assert_eq!(Pacer::new(0, SECOND, Some(rate)).due(SECOND / 2, 64), 0, "{rate}");
        }
    }
}
