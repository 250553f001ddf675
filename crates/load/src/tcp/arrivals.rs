//! Due times of the requests of an open loop.

use fastrand::Rng;

/// Due times: one at a random point of each interval, the first at once. Requests at fixed times
/// would be in step with the timers of the system, which count processor time by samples.
pub(super) struct Arrivals {
    interval_ns: u64,
    interval_start_ns: u64,
    next_ns: u64,
    rng: Rng,
}

impl Arrivals {
    /// Creates the due times of `rate` requests per second from `start_ns` on.
    pub(super) fn new(rate: f64, start_ns: u64) -> Self {
        let interval_ns = ((1e9 / rate) as u64).max(1);
        Self { interval_ns, interval_start_ns: start_ns, next_ns: start_ns, rng: Rng::with_seed(1) }
    }

    /// Due time of the next request, in nanoseconds.
    pub(super) fn next_ns(&self) -> u64 {
        self.next_ns
    }

    /// Takes the due time of the next request.
    pub(super) fn take(&mut self) -> u64 {
        self.interval_start_ns += self.interval_ns;
        let next_ns = self.interval_start_ns + self.rng.u64(..self.interval_ns);
        std::mem::replace(&mut self.next_ns, next_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_interval_has_one_request_at_no_fixed_time() {
        let mut arrivals = Arrivals::new(20_000.0, 7_000_000);
        assert_eq!(arrivals.next_ns(), 7_000_000, "the first at once");
        let times: Vec<u64> = (0..1000).map(|_| arrivals.take() - 7_000_000).collect();
        assert!((0..).zip(&times).all(|(n, time)| time / 50_000 == n));
        let early = times.iter().filter(|&time| time % 50_000 < 25_000).count();
        assert!((400..600).contains(&early), "{early} of 1000 in the first half of an interval");
    }
}
