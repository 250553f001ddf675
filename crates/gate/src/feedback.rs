//! Feedback: a queue that fills stops receiving until its reader has caught up.
//!
//! Mogul and Ramakrishnan, section 6.6.1: packets that would only be dropped
//! at a full queue are better left with the card, before any work went into
//! them. A reader that is stuck must not block the others, so a queue whose
//! reader takes nothing for a while loses its say. But a reader on the same
//! processor may only seem stuck, because it never runs while receiving goes
//! on. So it is waited for once more now and then, and has its say again when
//! it takes something. All that are stuck are waited for at the same time, and
//! only after receiving went on for long enough: however many there are, and
//! however late the clock is looked at, they hold receiving no longer than one.

/// The queues whose fill level has a say are kept in a list of this size. Those
/// that fill when the list is full drop what does not fit, as without feedback.
const FILLING_MAX: usize = 256;

/// Queues that lost their say have it again, for one time-out, after so many
/// time-outs; after twice as many each time that it was in vain, up to so many
/// doublings.
const LOST_TIMEOUTS: u64 = 8;
const DOUBLINGS: u32 = 4;

/// A queue between the stack and an application, by a number of the caller's.
pub type QueueId = u64;

/// Which queues hold receiving back.
#[derive(Clone, Debug)]
pub(crate) struct Feedback {
    high_percent: u32,
    low_percent: u32,
    timeout_ns: u64,
    /// In the order of their numbers, so that one is found among many.
    filling: Vec<Filling>,
    /// Since when receiving goes on with nobody waited for; `None` while it is
    /// held back.
    open_since_ns: Option<u64>,
}

/// A queue that went over the high mark and has not yet come down to the low one.
#[derive(Clone, Debug)]
struct Filling {
    queue: QueueId,
    /// The fill level when it was last told.
    packets: u32,
    /// Since when its reader is waited for: since it was first held back for,
    /// or since the reader last took something, or since it was given another
    /// chance. Until then the reader may not have had the processor at all, so
    /// nothing can be said against it.
    waited_since_ns: Option<u64>,
    /// How often in a row its reader was waited for again and took nothing.
    in_vain: u32,
}

impl Feedback {
    pub(crate) fn new(high_percent: u32, low_percent: u32, timeout_ns: u64) -> Self {
        Self { high_percent, low_percent, timeout_ns, filling: Vec::new(), open_since_ns: None }
    }

    /// Changes the marks; what is filling stays so by the marks of before
    /// until its level is told again.
    pub(crate) fn set(&mut self, high_percent: u32, low_percent: u32, timeout_ns: u64) {
        (self.high_percent, self.low_percent) = (high_percent, low_percent);
        self.timeout_ns = timeout_ns;
    }

    /// A queue holds `packets` of `capacity`.
    pub(crate) fn on_level(&mut self, now_ns: u64, queue: QueueId, packets: u32, capacity: u32) {
        let percent = u64::from(packets) * 100;
        let over = |mark: u32| percent > u64::from(mark) * u64::from(capacity);
        let reaches = |mark: u32| percent >= u64::from(mark) * u64::from(capacity);
        let known = self.filling.binary_search_by_key(&queue, |filling| filling.queue);
        match known {
            Ok(index) if !over(self.low_percent) => {
                self.filling.remove(index);
            }
            Ok(index) => {
                let filling = &mut self.filling[index];
                if packets < filling.packets {
                    filling.in_vain = 0;
                }
                if let Some(since_ns) = &mut filling.waited_since_ns
                    && (packets < filling.packets || now_ns < *since_ns)
                {
                    *since_ns = now_ns;
                }
                filling.packets = packets;
            }
            Err(index) if reaches(self.high_percent) && self.filling.len() < FILLING_MAX => {
                self.filling
                    .insert(index, Filling { queue, packets, waited_since_ns: None, in_vain: 0 });
            }
            Err(_) => {}
        }
    }

    /// The queue is gone.
    pub(crate) fn forget(&mut self, queue: QueueId) {
        self.filling.retain(|filling| filling.queue != queue);
    }

    /// Whether this queue has a say, or had it and lost it.
    pub(crate) fn watches_queue(&self, queue: QueueId) -> bool {
        self.filling.binary_search_by_key(&queue, |filling| filling.queue).is_ok()
    }

    /// Whether any queue has a say.
    #[inline]
    pub(crate) fn watches(&self) -> bool {
        !self.filling.is_empty()
    }

    /// Until when receiving is held back, if no reader does anything; `None`
    /// when it is not.
    #[inline]
    pub(crate) fn held_until(&mut self, now_ns: u64) -> Option<u64> {
        let again = self.waits_again(now_ns);
        let mut until_ns = None;
        for filling in &mut self.filling {
            // A clock that stepped back must not hold for longer than the time-out.
            let mut since_ns = filling.waited_since_ns.unwrap_or(now_ns).min(now_ns);
            if again && now_ns - since_ns >= self.timeout_ns {
                since_ns = now_ns;
                filling.in_vain += 1;
            }
            filling.waited_since_ns = Some(since_ns);
            let end_ns = since_ns.saturating_add(self.timeout_ns);
            until_ns = until_ns.max((end_ns > now_ns).then_some(end_ns));
        }
        self.open_since_ns = match (until_ns, self.open_since_ns) {
            (Some(_), _) => None,
            // A clock that stepped back must not make it longer.
            (None, since_ns) => Some(since_ns.map_or(now_ns, |since_ns| since_ns.min(now_ns))),
        };
        until_ns
    }

    /// Whether all queues that lost their say have it again from now on.
    fn waits_again(&self, now_ns: u64) -> bool {
        let Some(open_since_ns) = self.open_since_ns else { return false };
        let after = |since_ns: u64, timeouts: u64| {
            now_ns.saturating_sub(since_ns) >= self.timeout_ns.saturating_mul(timeouts)
        };
        let is_over = |filling: &Filling| {
            let timeouts = 1 + (LOST_TIMEOUTS << filling.in_vain.min(DOUBLINGS));
            filling.waited_since_ns.is_some_and(|since_ns| after(since_ns, timeouts))
        };
        after(open_since_ns, LOST_TIMEOUTS) && self.filling.iter().any(is_over)
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
    fn it_stops_at_the_high_mark_and_goes_on_at_the_low_one() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 23, 32);
        assert_eq!(feedback.held_until(0), None);
        feedback.on_level(0, 1, 24, 32);
        assert_eq!(feedback.held_until(0), Some(MS));
        feedback.on_level(10, 1, 9, 32);
        assert_eq!(feedback.held_until(10), Some(MS + 10), "between the marks it goes on holding");
        feedback.on_level(20, 1, 8, 32);
        assert_eq!(feedback.held_until(20), None);
        feedback.on_level(30, 1, 23, 32);
        assert_eq!(feedback.held_until(30), None, "on the way up the low mark has no say");
    }

    #[test]
    fn a_reader_that_stops_blocks_others_for_one_time_out_only() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 32, 32);
        assert_eq!(feedback.held_until(0), Some(MS));
        assert!(feedback.held_until(MS - 1).is_some());
        assert_eq!(feedback.held_until(MS), None);
        feedback.on_level(2 * MS, 1, 32, 32);
        assert_eq!(feedback.held_until(2 * MS), None, "still stuck: it has lost its say");
        feedback.on_level(3 * MS, 1, 30, 32);
        assert!(feedback.held_until(3 * MS).is_some(), "it reads again");
    }

    /// On the same processor a reader that missed its time once would else
    /// never run again: receiving goes on, for nothing.
    #[test]
    fn a_reader_that_seemed_stuck_is_given_another_chance() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 32, 32);
        let mut held_ms = Vec::new();
        for ms in 0..500 {
            feedback.on_level(ms * MS, 1, 32, 32);
            if feedback.held_until(ms * MS).is_some() {
                held_ms.push(ms);
            }
        }
        assert_eq!(held_ms, [0, 9, 26, 59, 124, 253, 382], "ever less, but not never");
        assert!(feedback.held_until(511 * MS).is_some());
        feedback.on_level(511 * MS, 1, 31, 32);
        assert!((511..515).all(|ms| {
            feedback.on_level(ms * MS, 1, 542 - ms as u32, 32);
            feedback.held_until(ms * MS).is_some()
        }));
        let stuck_again = 515 * MS;
        feedback.on_level(stuck_again, 1, 32, 32);
        let is_held = (1..12).any(|ms| feedback.held_until(stuck_again + ms * MS).is_some());
        assert!(is_held, "who read since is waited for soon");
    }

    /// Each fills when something gets through, so each is stuck at another time.
    #[test]
    fn many_that_are_stuck_hold_no_longer_than_one() {
        const STUCK: u64 = 100;
        let mut feedback = feedback();
        let (mut filled, mut quarters, mut held) = (0, 0, 0);
        while quarters < 9 * 4 * 10 {
            let now_ns = (filled + quarters) * MS / 4;
            (0..filled).for_each(|queue| feedback.on_level(now_ns, queue, 32, 32));
            let is_held = feedback.held_until(now_ns).is_some();
            if filled < STUCK {
                // The first hold of each is its own.
                let now_ns = if is_held { now_ns + MS } else { now_ns };
                feedback.on_level(now_ns, filled, 32, 32);
                filled += 1;
            } else {
                quarters += 1;
                held += u64::from(is_held);
            }
        }
        assert!(held <= quarters / 9 + 4, "held for {held} of {quarters}");
    }

    /// A round may take longer than all the time-outs.
    #[test]
    fn there_is_receiving_between_two_looks_that_are_far_apart() {
        let mut feedback = feedback();
        let mut held = 0;
        for look in 0..100 {
            let now_ns = look * 20 * MS;
            feedback.on_level(now_ns, 1, 32, 32);
            held += u64::from(feedback.held_until(now_ns).is_some());
        }
        assert!(held <= 50, "held at {held} of 100 looks");
    }

    /// Polling may go on for longer than the time-out after the mark was
    /// passed, and a reader on the same processor cannot read meanwhile.
    #[test]
    fn the_time_out_begins_with_holding_back() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 24, 32);
        feedback.on_level(2 * MS, 1, 32, 32);
        assert_eq!(feedback.held_until(3 * MS), Some(4 * MS));
        assert_eq!(feedback.held_until(4 * MS), None);
    }

    #[test]
    fn a_slow_reader_holds_as_long_as_it_reads() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 32, 32);
        for step in 1..=20 {
            let now_ns = step * MS / 2;
            feedback.on_level(now_ns, 1, 32 - step as u32, 32);
            assert!(feedback.held_until(now_ns).is_some(), "step {step}");
        }
        feedback.on_level(20 * MS, 1, 8, 32);
        assert_eq!(feedback.held_until(20 * MS), None);
    }

    #[test]
    fn a_reader_that_dies_is_forgotten() {
        let mut feedback = feedback();
        feedback.on_level(0, 1, 32, 32);
        feedback.on_level(0, 2, 32, 32);
        feedback.forget(1);
        assert!(feedback.held_until(0).is_some());
        feedback.forget(2);
        assert_eq!(feedback.held_until(0), None);
    }

    #[test]
    fn a_clock_that_jumps_never_holds_for_longer_than_the_time_out() {
        let mut feedback = feedback();
        feedback.on_level(1000 * MS, 1, 32, 32);
        assert_eq!(feedback.held_until(0), Some(MS), "back by a second");
        feedback.on_level(0, 1, 32, 32);
        assert_eq!(feedback.held_until(MS), None);
        feedback.on_level(u64::MAX - 1, 1, 32, 32);
        assert_eq!(feedback.held_until(u64::MAX), None, "forward by centuries");
    }

    #[test]
    fn the_list_is_bounded() {
        let mut feedback = feedback();
        for queue in 0..10_000 {
            feedback.on_level(0, queue, 32, 32);
        }
        assert_eq!(feedback.filling.len(), FILLING_MAX);
    }
}
