//! Service times of the datagrams of a socket.

use std::collections::VecDeque;
use std::time::Duration;

/// Datagrams that arrived together.
#[derive(Clone, Copy, Debug)]
struct ArrivedBurst {
    datagrams: usize,
    /// `None`: not measured.
    arrival_ns: Option<u64>,
}

/// Service times of one socket, from the arrival of a datagram in the core until the device has the
/// reply: see [`UdpSocket::exchange_timed`](crate::UdpSocket::exchange_timed).
#[derive(Debug, Default)]
pub struct ServiceTimes {
    /// Bursts of which datagrams still wait, in the order of arrival.
    waiting: VecDeque<ArrivedBurst>,
    /// Sum of the datagrams in `waiting`.
    queued: usize,
    /// Datagrams without a time, which count with the next.
    untimed: usize,
    last: Vec<(usize, Duration)>,
}

impl ServiceTimes {
    /// Datagrams that the last exchange took: how many arrived together, and their service time.
    /// Empty on a stack that is not embedded. While bursts are large only one of eight is timed: the
    /// datagrams of the others count with the next that is.
    pub fn last(&self) -> &[(usize, Duration)] {
        &self.last
    }

    pub(crate) fn clear_last(&mut self) {
        self.last.clear();
    }

    /// Notes an exchange: before it `queued` datagrams waited, the newest of which arrived at
    /// `arrival_ns`, if that was measured, and it took `taken`. `now_ns` is read once the device has
    /// the replies, if a time is needed.
    #[inline]
    pub(crate) fn on_exchange(
        &mut self,
        queued: usize,
        arrival_ns: Option<u64>,
        taken: usize,
        now_ns: impl FnOnce() -> u64,
    ) {
        if self.queued == 0 && queued == taken && arrival_ns.is_none() {
            self.untimed += taken;
            return;
        }
        self.on_queued(queued, arrival_ns);
        self.on_answered(taken, now_ns);
    }

    /// Notes a datagram of an exchange that is still to be noted by
    /// [`ServiceTimes::on_answered`].
    #[inline]
    pub(crate) fn on_taken(&mut self, arrival_ns: Option<u64>) {
        self.queued += 1;
        match self.waiting.back_mut().filter(|burst| burst.arrival_ns == arrival_ns) {
            Some(burst) => burst.datagrams += 1,
            None => self.waiting.push_back(ArrivedBurst { datagrams: 1, arrival_ns }),
        }
    }

    fn on_queued(&mut self, queued: usize, arrival_ns: Option<u64>) {
        if queued < self.queued {
            // The stack has dropped some, the oldest first.
            self.take(self.queued - queued, |_, _| ());
        } else if queued > self.queued {
            let datagrams = queued - self.queued;
            self.waiting.push_back(ArrivedBurst { datagrams, arrival_ns });
            self.queued = queued;
        }
    }

    /// Notes that `taken` datagrams, the oldest, were answered. Reads the clock.
    // Not inlined: most exchanges of a busy server are not timed.
    #[inline(never)]
    pub(crate) fn on_answered(&mut self, taken: usize, now_ns: impl FnOnce() -> u64) {
        let (mut last, mut untimed) = (std::mem::take(&mut self.last), self.untimed);
        let now_ns = now_ns();
        self.take(taken, |datagrams, arrival_ns| match arrival_ns {
            Some(arrival_ns) => {
                let time = Duration::from_nanos(now_ns.saturating_sub(arrival_ns));
                last.push((datagrams + std::mem::take(&mut untimed), time));
            }
            None => untimed += datagrams,
        });
        (self.last, self.untimed) = (last, untimed);
    }

    /// Removes the oldest datagrams. Calls `each` with those that arrived together.
    fn take(&mut self, count: usize, mut each: impl FnMut(usize, Option<u64>)) {
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

    fn exchange(
        times: &mut ServiceTimes,
        (queued, arrival_ns): (usize, impl Into<Option<u64>>),
        (taken, now_ns): (usize, u64),
    ) -> Vec<(usize, u128)> {
        times.clear_last();
        times.on_exchange(queued, arrival_ns.into(), taken, || now_ns);
        times.last().iter().map(|(count, time)| (*count, time.as_nanos())).collect()
    }

    #[test]
    fn datagrams_count_from_their_own_arrival() {
        let mut times = ServiceTimes::default();
        assert_eq!(exchange(&mut times, (100, 1_000), (64, 5_000)), [(64, 4_000)]);
        let last = exchange(&mut times, (36 + 10, 6_000), (46, 9_000));
        assert_eq!(last, [(36, 8_000), (10, 3_000)]);
        assert!(times.waiting.is_empty() && times.queued == 0);
    }

    #[test]
    fn dropped_datagrams_have_no_time() {
        let mut times = ServiceTimes::default();
        times.on_queued(5, Some(1_000));
        times.on_queued(8, Some(2_000));
        assert_eq!(exchange(&mut times, (2, 3_000), (2, 4_000)), [(2, 2_000)]);
    }

    #[test]
    fn datagrams_of_bursts_that_were_not_timed_count_with_the_next() {
        let mut times = ServiceTimes::default();
        assert_eq!(exchange(&mut times, (32, None), (32, 5_000)), []);
        assert_eq!(exchange(&mut times, (64, None), (40, 6_000)), []);
        assert_eq!(exchange(&mut times, (24 + 8, 7_000), (30, 9_000)), [(96 + 6, 2_000)]);
        assert_eq!(exchange(&mut times, (2 + 1, 9_500), (3, 9_600)), [(2, 2_600), (1, 100)]);
    }

    #[test]
    fn datagrams_with_times_of_their_own_count_by_burst() {
        let mut times = ServiceTimes::default();
        for arrival_ns in [None, Some(1_000), Some(1_000), Some(3_000), None] {
            times.on_taken(arrival_ns);
        }
        times.on_answered(5, || 4_000);
        let last = |times: &ServiceTimes| -> Vec<_> {
            times.last().iter().map(|(count, time)| (*count, time.as_nanos())).collect()
        };
        assert_eq!(last(&times), [(3, 3_000), (1, 1_000)]);
        times.clear_last();
        times.on_taken(Some(5_000));
        times.on_answered(1, || 5_500);
        assert_eq!(last(&times), [(2, 500)], "with the one that was not timed");
    }

    #[test]
    fn more_answers_than_datagrams_are_ignored() {
        let mut times = ServiceTimes::default();
        assert_eq!(exchange(&mut times, (1, 1_000), (3, 500)), [(1, 0)]);
        assert_eq!(exchange(&mut times, (0, 1_000), (1, 900)), []);
    }
}
