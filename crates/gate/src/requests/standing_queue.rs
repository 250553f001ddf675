//! Overload of a server that takes its requests in the order of their arrival.

/// Time for which a queue has not been empty, as each level has to count it.
///
/// A request in such a queue waits at most as long as the queue has stood. While requests of a later
/// level are refused, the refusals are what empties the queue: an earlier level counts from the last of
/// them.
#[derive(Clone, Debug, Default)]
pub struct StandingQueue {
    was_empty: bool,
    standing_since_ns: u64,
    /// Time of the last refusal of each level.
    refused_ns: Vec<u64>,
}

impl StandingQueue {
    /// Creates the measurement for this many levels.
    pub fn new(level_count: usize) -> Self {
        Self { was_empty: true, standing_since_ns: 0, refused_ns: vec![0; level_count] }
    }

    /// Records that no request is left.
    pub fn on_empty(&mut self) {
        self.was_empty = true;
    }

    /// Begins a batch of requests.
    pub fn on_batch(&mut self, now_ns: u64) {
        // A clock that was set back must not make the queue empty for ever.
        if std::mem::take(&mut self.was_empty) || now_ns < self.standing_since_ns {
            self.standing_since_ns = now_ns;
        }
    }

    /// Longest wait that a request of a level has to expect.
    pub fn wait_ns(&self, level: usize, now_ns: u64) -> u64 {
        let refused_ns = self.refused_ns.iter().skip(level + 1).max().copied().unwrap_or(0);
        now_ns.saturating_sub(self.standing_since_ns.max(refused_ns))
    }

    /// Records the refusal of a request.
    pub fn on_refused(&mut self, level: usize, now_ns: u64) {
        self.refused_ns[level] = now_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_from_the_last_time_without_requests() {
        let mut queue = StandingQueue::new(1);
        queue.on_batch(100);
        queue.on_batch(150);
        assert_eq!(queue.wait_ns(0, 150), 50);
        queue.on_empty();
        queue.on_batch(180);
        assert_eq!(queue.wait_ns(0, 180), 0);
        queue.on_batch(40);
        queue.on_batch(60);
        assert_eq!(queue.wait_ns(0, 60), 20, "a clock set back");
    }

    /// A flood that is refused fills the queue as before: nobody else is refused for it.
    #[test]
    fn refusals_of_later_levels_excuse_the_earlier_ones() {
        let mut queue = StandingQueue::new(3);
        queue.on_batch(0);
        queue.on_refused(1, 70);
        assert_eq!([0, 1, 2].map(|level| queue.wait_ns(level, 100)), [30, 100, 100]);
        queue.on_refused(2, 90);
        assert_eq!([0, 1, 2].map(|level| queue.wait_ns(level, 100)), [10, 10, 100]);
    }
}
