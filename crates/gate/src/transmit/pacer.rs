//! Rate limit of frames by the time at which the next one is due.

/// Time that a sender catches up at most, in nanoseconds: what it could have sent while the thread
/// was late leaves at once, as in the kernel's token buckets. Longer bursts would wait in the next
/// queue.
const MAX_CATCH_UP_NS: u64 = 1_000_000;

/// Rate limit: frames are due one after the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pacer {
    /// Bits per second; `None` without a limit.
    rate_bps: Option<u64>,
    due_ns: u64,
}

impl Pacer {
    pub(super) fn new(rate_bps: Option<u64>) -> Self {
        Self { rate_bps, due_ns: 0 }
    }

    /// True if a frame may leave.
    #[inline]
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        self.due_ns <= now_ns
    }

    /// Time at which the next frame may leave.
    #[inline]
    pub(super) fn due_ns(&self) -> u64 {
        self.due_ns
    }

    /// Counts a frame that leaves.
    #[inline]
    pub(super) fn on_sent(&mut self, now_ns: u64, bytes: u32) {
        let Some(rate_bps) = self.rate_bps else { return };
        let cost_ns = u64::from(bytes) * 8_000_000_000 / rate_bps;
        self.due_ns = self.due_ns.max(now_ns.saturating_sub(MAX_CATCH_UP_NS)) + cost_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that leave by `end_ns` in frames of 1,000 bytes, if the clock is read every `step_ns`.
    fn sent_bytes(rate_bps: u64, step_ns: u64, end_ns: u64) -> u64 {
        let mut pacer = Pacer::new(Some(rate_bps));
        let mut sent = 0;
        for now_ns in (0..end_ns).step_by(step_ns as usize) {
            while pacer.is_due(now_ns) {
                pacer.on_sent(now_ns, 1000);
                sent += 1000;
            }
        }
        sent
    }

    #[test]
    fn rate_holds_however_often_the_clock_is_read() {
        for step_ns in [1000, 10_000, 900_000] {
            let sent = sent_bytes(80_000_000, step_ns, 1_000_000_000);
            assert!((9_980_000..=10_012_000).contains(&sent), "{step_ns}: {sent}");
        }
        // A quarter of each 1.25 ms is lost for good: the burst is bounded.
        let sent = sent_bytes(80_000_000, 1_250_000, 1_000_000_000);
        assert!((8_000_000..10_000_000).contains(&sent), "{sent}");
    }

    #[test]
    fn no_rate_means_no_limit() {
        let mut pacer = Pacer::new(None);
        (0..100).for_each(|_| pacer.on_sent(7, u32::MAX));
        assert!(pacer.is_due(0));
    }
}
