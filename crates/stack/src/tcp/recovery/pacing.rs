//! Pacing: new data leaves no faster than the window allows per round trip, but for short bursts.
//! Without it, a window that opens at once, after a pause or when a hole is closed, would leave as
//! one burst and overflow a queue on the path.
//!
//! Sending takes credit, which returns with time. The rate is that of Linux: twice the window per
//! round trip in slow start, so that the window can double, and 1.2 times the window after it.

use super::Recovery;
use crate::tcp::congestion::INITIAL_WINDOW_SEGMENTS;
use crate::tcp::send::SendState;
use crate::tcp::timers::NS_PER_MS;

/// Round-trip time up to which nothing is paced. On such paths the processor is the limit, and a
/// tick of the timers is as long as the path.
const MAX_UNPACED_RTT_NS: u64 = 1_000_000;
/// Time whose data may leave as one burst: the delay of a timer on a busy machine.
const BURST_MS: u64 = 4;

/// Credit of a connection for new data, while data is in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pacing {
    credit_bytes: u64,
    /// Time up to which the credit is counted; 0 before the first use.
    counted_ns: u64,
    /// Time of the next attempt to send; 0 when nothing waits for credit.
    deadline_ns: u64,
}

impl Pacing {
    /// Takes credit for `bytes` bytes; returns false, and sets the deadline, if there is too little.
    fn take(&mut self, now_ns: u64, bytes_per_ms: u64, burst_bytes: u64, bytes: u64) -> bool {
        let elapsed_ns = now_ns.saturating_sub(self.counted_ns);
        let returned_bytes = bytes_per_ms.saturating_mul(elapsed_ns) / NS_PER_MS;
        if self.counted_ns == 0 || self.credit_bytes + returned_bytes >= burst_bytes {
            (self.credit_bytes, self.counted_ns) = (burst_bytes, now_ns.max(1));
        } else {
            self.credit_bytes += returned_bytes;
            self.counted_ns += returned_bytes * NS_PER_MS / bytes_per_ms;
        }
        let Some(left_bytes) = self.credit_bytes.checked_sub(bytes) else {
            let wait_ns = (bytes - self.credit_bytes) * NS_PER_MS / bytes_per_ms;
            self.deadline_ns = now_ns.saturating_add(wait_ns.max(1));
            return false;
        };
        (self.credit_bytes, self.deadline_ns) = (left_bytes, 0);
        true
    }
}

impl Recovery {
    /// Takes pacing credit for a segment of new data; returns false if the segment has to wait.
    /// The first segment of a flight needs no credit.
    #[inline]
    pub(crate) fn take_pacing_credit(&mut self, now_ns: u64, send: &SendState, bytes: u32) -> bool {
        match self.rtt.smoothed_ns() {
            Some(rtt_ns) if rtt_ns > MAX_UNPACED_RTT_NS => self.pace(now_ns, send, bytes, rtt_ns),
            _ => true,
        }
    }

    fn pace(&mut self, now_ns: u64, send: &SendState, bytes: u32, rtt_ns: u64) -> bool {
        let window = self.controller.window;
        let Some(flight) = &mut self.flight else { return true };
        let percent = if window.cwnd < window.ssthresh / 2 { 200 } else { 120 };
        let window_bytes = u64::from(window.cwnd.max(send.outstanding()));
        let bytes_per_ms = (window_bytes * percent * (NS_PER_MS / 100) / rtt_ns).max(1);
        let segments_bytes = u64::from(INITIAL_WINDOW_SEGMENTS) * u64::from(send.mss);
        let burst_bytes = segments_bytes.max(BURST_MS * bytes_per_ms);
        flight.pacing.take(now_ns, bytes_per_ms, burst_bytes, bytes.into())
    }

    /// Time at which data that waits for pacing credit may be sent; `None` when none waits.
    #[inline]
    pub(crate) fn pacing_deadline_ns(&self) -> Option<u64> {
        self.flight.as_ref().map(|flight| flight.pacing.deadline_ns).filter(|&at_ns| at_ns != 0)
    }

    /// Ends the wait for pacing credit.
    pub(crate) fn end_pacing_wait(&mut self) {
        if let Some(flight) = &mut self.flight {
            flight.pacing.deadline_ns = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_leaves_at_once_and_the_rest_at_the_rate() {
        let mut pacing = Pacing::default();
        let mut sent_ms = Vec::new();
        let mut now_ns = 5 * NS_PER_MS;
        while sent_ms.len() < 15 {
            if pacing.take(now_ns, 500, 10_000, 1000) {
                assert_eq!(pacing.deadline_ns, 0);
                sent_ms.push(now_ns / NS_PER_MS);
            } else {
                now_ns = pacing.deadline_ns;
            }
        }
        assert_eq!(sent_ms, [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 7, 9, 11, 13, 15]);
        // A long pause gives one burst, not more.
        now_ns += 1000 * NS_PER_MS;
        let burst = (0..20).filter(|_| pacing.take(now_ns, 500, 10_000, 1000)).count();
        assert_eq!(burst, 10);
    }

    #[test]
    fn credit_returns_in_small_steps_too() {
        let mut pacing = Pacing::default();
        assert!(pacing.take(NS_PER_MS, 500, 1000, 1000));
        let first =
            (1..=2_100_000).step_by(700).find(|&ns| pacing.take(NS_PER_MS + ns, 500, 1000, 1000));
        let first_ns = first.expect("the credit returns");
        assert!((2_000_000..2_010_000).contains(&first_ns), "{first_ns}");
    }
}
