//! Service times of the datagrams of a socket.

use std::collections::VecDeque;
use std::time::Duration;

/// Datagrams that arrived together.
#[derive(Clone, Copy, Debug)]
struct ArrivedBurst {
    datagrams: usize,
    arrival_ns: u64,
}

/// Service times of one socket, from the arrival of a datagram in the core until the device has the
/// reply: see [`UdpSocket::exchange_timed`](crate::UdpSocket::exchange_timed).
#[derive(Debug, Default)]
pub struct ServiceTimes {
    /// Bursts of which datagrams still wait, in the order of arrival.
    waiting: VecDeque<ArrivedBurst>,
    /// Sum of the datagrams in `waiting`.
    queued: usize,
    last: Vec<(usize, Duration)>,
}

impl ServiceTimes {
    /// Datagrams that the last exchange took: how many arrived together, and their service time.
    /// Empty on a stack that is not embedded.
    pub fn last(&self) -> &[(usize, Duration)] {
        &self.last
    }

    pub(crate) fn clear_last(&mut self) {
        self.last.clear();
    }

    /// Notes that `queued` datagrams wait, the newest of which arrived at `arrival_ns`.
    pub(crate) fn on_queued(&mut self, queued: usize, arrival_ns: u64) {
        if queued < self.queued {
            // The stack has dropped some, the oldest first.
            self.take(self.queued - queued, |_, _| ());
        } else if queued > self.queued {
            let datagrams = queued - self.queued;
            self.waiting.push_back(ArrivedBurst { datagrams, arrival_ns });
            self.queued = queued;
        }
    }

    /// Notes that the device has the replies to `taken` datagrams at `now_ns`.
    pub(crate) fn on_answered(&mut self, taken: usize, now_ns: u64) {
        let mut last = std::mem::take(&mut self.last);
        self.take(taken, |datagrams, arrival_ns| {
            let time = Duration::from_nanos(now_ns.saturating_sub(arrival_ns));
            last.push((datagrams, time));
        });
        self.last = last;
    }

    /// Removes the oldest datagrams. Calls `each` with those that arrived together.
    fn take(&mut self, count: usize, mut each: impl FnMut(usize, u64)) {
        let mut left = count.min(self.queued);
        self.queued -= left;
        while let Some(burst) = self.waiting.front_mut().filter(|_| left > 0) {
            let taken = burst.datagrams.min(left);
            each(taken, burst.arrival_ns);
            burst.datagrams -= taken;
            left -= taken;
            if burst.datagrams == 0 {
                self.waiting.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(times: &mut ServiceTimes) -> Vec<(usize, u128)> {
        let last = times.last().iter().map(|(count, time)| (*count, time.as_nanos())).collect();
        times.clear_last();
        last
    }

    #[test]
    fn datagrams_count_from_their_own_arrival() {
        let mut times = ServiceTimes::default();
        times.on_queued(100, 1_000);
        times.on_answered(64, 5_000);
        assert_eq!(last(&mut times), [(64, 4_000)]);
        times.on_queued(36 + 10, 6_000);
        times.on_answered(46, 9_000);
        assert_eq!(last(&mut times), [(36, 8_000), (10, 3_000)]);
        assert!(times.waiting.is_empty() && times.queued == 0);
    }

    #[test]
    fn dropped_datagrams_have_no_time() {
        let mut times = ServiceTimes::default();
        times.on_queued(5, 1_000);
        times.on_queued(8, 2_000);
        times.on_queued(2, 3_000);
        times.on_answered(2, 4_000);
        assert_eq!(last(&mut times), [(2, 2_000)]);
    }

    #[test]
    fn more_answers_than_datagrams_are_ignored() {
        let mut times = ServiceTimes::default();
        times.on_queued(1, 1_000);
        times.on_answered(3, 500);
        assert_eq!(last(&mut times), [(1, 0)]);
        times.on_answered(1, 900);
        assert_eq!(last(&mut times), []);
    }
}
