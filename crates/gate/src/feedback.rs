//! Feedback: a queue that fills pauses receiving until its reader has caught up.
//!
//! Mogul and Ramakrishnan, section 6.6.1: a packet that would only be dropped at a full queue
//! is better left with the device, before any work is spent on it.
//!
//! A stalled reader must not block other readers, so a queue whose reader takes nothing for a
//! timeout no longer pauses receiving. On the same processor, however, a reader may only seem
//! stalled, because it never runs while packets are received. So receiving is paused for the
//! queue again from time to time, until its reader takes something. All stalled readers are
//! retried at the same time, and only after receiving went on for long enough. However many
//! readers are stalled, and however rarely the clock is read, the pause is no longer than for
//! one reader.
//!
//! Where independent applications share the processor that receives, a pause for one of them takes
//! packets from all others. There the pauses are bounded in time ([`Feedback::bound_pauses`]),
//! however many readers are slow and however much each of them reads.

/// Maximum number of watched queues. Queues that fill beyond it drop on overflow, as without
/// feedback.
const MAX_WATCHED_QUEUES: usize = 256;

/// Number of timeouts after which receiving is paused again, for one timeout, for a stalled
/// reader. It doubles with each failed retry, up to a maximum number of doublings.
const RETRY_AFTER_TIMEOUTS: u64 = 8;
const MAX_RETRY_DOUBLINGS: u32 = 4;

/// Minimum time without a pause after a bounded pause, as a multiple of the pause.
const UNPAUSED_PER_PAUSED: u64 = 9;

/// Identifier of a queue between the stack and an application, chosen by the caller.
pub type QueueId = u64;

/// Queues for which receiving may be paused.
#[derive(Clone, Debug)]
pub(crate) struct Feedback {
    high_percent: u32,
    low_percent: u32,
    timeout_ns: u64,
    /// Watched queues, sorted by `queue` for binary search.
    watched: Vec<WatchedQueue>,
    /// Start of the time in which receiving goes on without a pause; `None` while receiving is
    /// paused.
    unpaused_since_ns: Option<u64>,
    /// Bound on pauses, where independent applications share the processor.
    bound: Option<PauseBound>,
}

/// Bound on pauses: at most one timeout at a time, and a tenth of the time.
#[derive(Clone, Copy, Debug, Default)]
struct PauseBound {
    /// Start of the current pause.
    since_ns: Option<u64>,
    /// Time before which no pause begins.
    next_ns: u64,
}

impl PauseBound {
    /// Returns the end of the pause, at most `timeout_ns` after its start, if receiving may be
    /// paused at `now_ns`. Without the bound it would be paused until `wanted_ns`.
    fn limit(&mut self, now_ns: u64, wanted_ns: Option<u64>, timeout_ns: u64) -> Option<u64> {
        let rest_ns = timeout_ns.saturating_mul(UNPAUSED_PER_PAUSED);
        // A clock that stepped back must extend neither a pause nor the time without one.
        self.next_ns = self.next_ns.min(now_ns.saturating_add(rest_ns));
        let since_ns = self.since_ns.map_or(now_ns, |since_ns| since_ns.min(now_ns));
        let end_ns = since_ns.saturating_add(timeout_ns);
        let until_ns = wanted_ns.map(|until_ns| until_ns.min(end_ns));
        let until_ns = until_ns.filter(|&until_ns| until_ns > now_ns && now_ns >= self.next_ns);
        match (until_ns, self.since_ns) {
            (Some(_), _) => self.since_ns = Some(since_ns),
            (None, Some(_)) => {
                let paused_ns = (now_ns - since_ns).min(timeout_ns);
                self.next_ns = now_ns.saturating_add(paused_ns * UNPAUSED_PER_PAUSED);
                self.since_ns = None;
            }
            (None, None) => {}
        }
        until_ns
    }
}

/// Queue that went above the high mark and has not yet come down to the low mark.
#[derive(Clone, Debug)]
struct WatchedQueue {
    queue: QueueId,
    /// Last reported fill level.
    packets: u32,
    /// Start of the wait for the reader: the first pause for this queue, the reader's last read
    /// or the last retry. `None` before the first pause, because until then the reader may not
    /// have had CPU time.
    waiting_since_ns: Option<u64>,
    /// Number of consecutive retries in which the reader took nothing.
    failed_retries: u32,
}

impl Feedback {
    pub(crate) fn new(high_percent: u32, low_percent: u32, timeout_ns: u64) -> Self {
        Self {
            high_percent,
            low_percent,
            timeout_ns,
            watched: Vec::new(),
            unpaused_since_ns: None,
            bound: None,
        }
    }

    /// Changes the marks. Watched queues stay watched by the old marks until their next report.
    pub(crate) fn set_marks(&mut self, high_percent: u32, low_percent: u32, timeout_ns: u64) {
        (self.high_percent, self.low_percent) = (high_percent, low_percent);
        self.timeout_ns = timeout_ns;
    }

    /// Bounds pauses: each by the timeout, and all together by a tenth of the time.
    pub(crate) fn bound_pauses(&mut self) {
        self.bound.get_or_insert_default();
    }

    /// Reports that a queue holds `packets` of `capacity`.
    pub(crate) fn on_level(&mut self, now_ns: u64, queue: QueueId, packets: u32, capacity: u32) {
        let percent = u64::from(packets) * 100;
        let is_above = |mark: u32| percent > u64::from(mark) * u64::from(capacity);
        let reaches = |mark: u32| percent >= u64::from(mark) * u64::from(capacity);
        let position = self.watched.binary_search_by_key(&queue, |watched| watched.queue);
        match position {
            Ok(index) if !is_above(self.low_percent) => {
                self.watched.remove(index);
            }
            Ok(index) => {
                let watched = &mut self.watched[index];
                if packets < watched.packets {
                    watched.failed_retries = 0;
                }
                if let Some(since_ns) = &mut watched.waiting_since_ns
                    && (packets < watched.packets || now_ns < *since_ns)
                {
                    *since_ns = now_ns;
                }
                watched.packets = packets;
            }
            Err(index) if reaches(self.high_percent) && self.watched.len() < MAX_WATCHED_QUEUES => {
                self.watched.insert(
                    index,
                    WatchedQueue { queue, packets, waiting_since_ns: None, failed_retries: 0 },
                );
            }
            Err(_) => {}
        }
    }

    /// Removes a closed queue.
    pub(crate) fn remove(&mut self, queue: QueueId) {
        self.watched.retain(|watched| watched.queue != queue);
    }

    /// True if the queue is watched, whether or not it still pauses receiving.
    pub(crate) fn watches_queue(&self, queue: QueueId) -> bool {
        self.watched.binary_search_by_key(&queue, |watched| watched.queue).is_ok()
    }

    /// True if any queue is watched.
    #[inline]
    pub(crate) fn watches_any(&self) -> bool {
        !self.watched.is_empty()
    }

    /// Time until which receiving is paused unless a reader makes progress; `None` if receiving
    /// is not paused.
    #[inline]
    pub(crate) fn paused_until(&mut self, now_ns: u64) -> Option<u64> {
        let retry = self.should_retry(now_ns);
        let mut until_ns = None;
        for watched in &mut self.watched {
            // A clock that stepped back must not extend the pause beyond the timeout.
            let mut since_ns = watched.waiting_since_ns.unwrap_or(now_ns).min(now_ns);
            if retry && now_ns - since_ns >= self.timeout_ns {
                since_ns = now_ns;
                watched.failed_retries += 1;
            }
            watched.waiting_since_ns = Some(since_ns);
            let end_ns = since_ns.saturating_add(self.timeout_ns);
            until_ns = until_ns.max((end_ns > now_ns).then_some(end_ns));
        }
        if let Some(bound) = &mut self.bound {
            until_ns = bound.limit(now_ns, until_ns, self.timeout_ns);
        }
        self.unpaused_since_ns = match (until_ns, self.unpaused_since_ns) {
            (Some(_), _) => None,
            // A clock that stepped back must not extend this time.
            (None, since_ns) => Some(since_ns.map_or(now_ns, |since_ns| since_ns.min(now_ns))),
        };
        until_ns
    }

    /// True if receiving is to be paused again for all stalled readers.
    fn should_retry(&self, now_ns: u64) -> bool {
        let Some(unpaused_since_ns) = self.unpaused_since_ns else { return false };
        let has_passed = |since_ns: u64, timeouts: u64| {
            now_ns.saturating_sub(since_ns) >= self.timeout_ns.saturating_mul(timeouts)
        };
        let is_retry_due = |watched: &WatchedQueue| {
            let timeouts =
                1 + (RETRY_AFTER_TIMEOUTS << watched.failed_retries.min(MAX_RETRY_DOUBLINGS));
            watched.waiting_since_ns.is_some_and(|since_ns| has_passed(since_ns, timeouts))
        };
        has_passed(unpaused_since_ns, RETRY_AFTER_TIMEOUTS) && self.watched.iter().any(is_retry_due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn feedback() -> Feedback {
        Feedback::new(75, 25, MS)
    }

    #[test]
    fn pauses_at_the_high_mark_and_resumes_at_the_low_mark() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 23, 32);
        assert_eq!(feedback.paused_until(0), None);
        feedback.on_level(0, 1, 24, 32);
        assert_eq!(feedback.paused_until(0), Some(MS));
        feedback.on_level(10, 1, 9, 32);
        assert_eq!(
            feedback.paused_until(10),
            Some(MS + 10),
            "between the marks the pause continues"
        );
        feedback.on_level(20, 1, 8, 32);
        assert_eq!(feedback.paused_until(20), None);
        feedback.on_level(30, 1, 23, 32);
        assert_eq!(feedback.paused_until(30), None, "rising levels pause only at the high mark");
    }

    #[test]
    fn stalled_reader_blocks_others_for_one_timeout_only() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 32, 32);
        assert_eq!(feedback.paused_until(0), Some(MS));
        assert!(feedback.paused_until(MS - 1).is_some());
        assert_eq!(feedback.paused_until(MS), None);
        feedback.on_level(2 * MS, 1, 32, 32);
        assert_eq!(feedback.paused_until(2 * MS), None, "still stalled: no further pause");
        feedback.on_level(3 * MS, 1, 30, 32);
        assert!(feedback.paused_until(3 * MS).is_some(), "the reader reads again");
    }

    /// On the same processor a reader that missed its chance once would otherwise never run
    /// again, while packets are received in vain.
    #[test]
    fn retries_a_reader_that_seemed_stalled() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 32, 32);
        let mut paused_ms = Vec::new();
        for ms in 0..500 {
            feedback.on_level(ms * MS, 1, 32, 32);
            if feedback.paused_until(ms * MS).is_some() {
                paused_ms.push(ms);
            }
        }
        assert_eq!(paused_ms, [0, 9, 26, 59, 124, 253, 382], "ever more rarely, but without end");
        assert!(feedback.paused_until(511 * MS).is_some());
        feedback.on_level(511 * MS, 1, 31, 32);
        assert!((511..515).all(|ms| {
            feedback.on_level(ms * MS, 1, 542 - ms as u32, 32);
            feedback.paused_until(ms * MS).is_some()
        }));
        let stuck_again = 515 * MS;
        feedback.on_level(stuck_again, 1, 32, 32);
        let is_paused = (1..12).any(|ms| feedback.paused_until(stuck_again + ms * MS).is_some());
        assert!(is_paused, "a reader that read since is waited for soon");
    }

    /// Each queue fills when a packet gets through, so each reader stalls at a different time.
    #[test]
    fn many_stalled_readers_pause_no_longer_than_one() {
        const STALLED_READERS: u64 = 100;
        let mut feedback = feedback();
        let (mut filled, mut quarters, mut paused) = (0, 0, 0);
        while quarters < 9 * 4 * 10 {
            let now_ns = (filled + quarters) * MS / 4;
            (0..filled).for_each(|queue| feedback.on_level(now_ns, queue, 32, 32));
            let is_paused = feedback.paused_until(now_ns).is_some();
            if filled < STALLED_READERS {
                // The first pause for each queue is its own.
                let now_ns = if is_paused { now_ns + MS } else { now_ns };
                feedback.on_level(now_ns, filled, 32, 32);
                filled += 1;
            } else {
                quarters += 1;
                paused += u64::from(is_paused);
            }
        }
        assert!(paused <= quarters / 9 + 4, "paused for {paused} of {quarters}");
    }

    /// A round may take longer than all the timeouts.
    #[test]
    fn receives_between_two_polls_that_are_far_apart() {
        let mut feedback = feedback();
        let mut paused = 0;
        for poll in 0..100 {
            let now_ns = poll * 20 * MS;
            feedback.on_level(now_ns, 1, 32, 32);
            paused += u64::from(feedback.paused_until(now_ns).is_some());
        }
        assert!(paused <= 50, "paused at {paused} of 100 polls");
    }

    /// Polling may go on for longer than the timeout after the mark was passed, and a reader on
    /// the same processor cannot read meanwhile.
    #[test]
    fn timeout_starts_when_receiving_is_paused() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 24, 32);
        feedback.on_level(2 * MS, 1, 32, 32);
        assert_eq!(feedback.paused_until(3 * MS), Some(4 * MS));
        assert_eq!(feedback.paused_until(4 * MS), None);
    }

    #[test]
    fn slow_reader_pauses_receiving_for_as_long_as_it_reads() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 32, 32);
        for step in 1..=20 {
            let now_ns = step * MS / 2;
            feedback.on_level(now_ns, 1, 32 - step as u32, 32);
            assert!(feedback.paused_until(now_ns).is_some(), "step {step}");
        }
        feedback.on_level(20 * MS, 1, 8, 32);
        assert_eq!(feedback.paused_until(20 * MS), None);
    }

    /// A reader that takes a little again and again, and one that keeps up, on shared processors.
    #[test]
    fn bounded_pauses_take_a_tenth_of_the_time_however_much_is_read() {
        const CAPACITY: u32 = 4096;
        for reads in [0, 4, 400, 4000] {
            let mut feedback = feedback();
            feedback.bound_pauses();
            let (mut paused, mut longest, mut current) = (0, 0, 0);
            let mut level = CAPACITY;
            for step in 0..100_000 {
                let now_ns = step * MS / 100;
                if step % 90 == 0 {
                    level = level.saturating_sub(reads);
                    feedback.on_level(now_ns, 1, level, CAPACITY);
                }
                let is_paused = feedback.paused_until(now_ns).is_some();
                paused += u32::from(is_paused);
                current = if is_paused { current + 1 } else { 0 };
                longest = longest.max(current);
                if !is_paused {
                    level = CAPACITY;
                    feedback.on_level(now_ns, 1, level, CAPACITY);
                }
            }
            assert!(paused <= 10_100, "{reads}: paused for {paused} of 100,000 steps");
            assert!(longest <= 100, "{reads}: {longest} steps at a time");
            assert!(reads == 0 || paused > 1_000, "{reads}: paused for {paused} steps");
        }
    }

    #[test]
    fn clock_jump_extends_no_bounded_pause() {
        let mut feedback = feedback();
        feedback.bound_pauses();
        feedback.on_level(1000 * MS, 1, 32, 32);
        assert_eq!(feedback.paused_until(1000 * MS), Some(1001 * MS));
        assert_eq!(feedback.paused_until(1001 * MS), None);
        feedback.on_level(0, 1, 31, 32);
        let paused = (0..100).filter(|&ms| {
            feedback.on_level(ms * MS, 1, 31 - (ms % 2) as u32, 32);
            feedback.paused_until(ms * MS).is_some()
        });
        assert!((5..=11).contains(&paused.count()), "back by a second");
    }

    #[test]
    fn closed_queue_no_longer_pauses_receiving() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 32, 32);
        feedback.on_level(0, 2, 32, 32);
        feedback.remove(1);
        assert!(feedback.paused_until(0).is_some());
        feedback.remove(2);
        assert_eq!(feedback.paused_until(0), None);
    }

    #[test]
    fn clock_jump_never_pauses_longer_than_the_timeout() {
        let mut feedback = feedback();
        feedback.on_level(1000 * MS, 1, 32, 32);
        assert_eq!(feedback.paused_until(0), Some(MS), "back by a second");
        feedback.on_level(0, 1, 32, 32);
        assert_eq!(feedback.paused_until(MS), None);
        feedback.on_level(u64::MAX - 1, 1, 32, 32);
        assert_eq!(feedback.paused_until(u64::MAX), None, "forward by centuries");
    }

    #[test]
    fn watched_list_is_bounded() {
        let mut feedback = feedback();
        for queue in 0..10_000 {
            feedback.on_level(0, queue, 32, 32);
        }
        assert_eq!(feedback.watched.len(), MAX_WATCHED_QUEUES);
    }
}
