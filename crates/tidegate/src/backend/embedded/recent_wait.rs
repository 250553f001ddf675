//! Calls that find nothing shortly after a wait for events.

/// Age of the last round of the stack, up to which an empty call needs no round of its own.
const MAX_AGE_NS: u64 = 300_000;

/// Maximum number of such calls after one wait. A program that goes on asking without a wait gets
/// a round with each call again.
const MAX_EMPTY_CALLS: u32 = 1024;

/// The last wait for events, which ran the stack.
///
/// A program that waits for events reads each ready socket until nothing is left. The last of
/// these calls is empty. If each ran the stack, a program with many connections would run it
/// once per connection, beside the round that its next wait makes anyway.
#[derive(Debug, Default)]
pub(crate) struct RecentWait {
    ran_at_ns: u64,
    empty_calls_left: u32,
}

impl RecentWait {
    /// Records that a wait has ended, having run the stack at `now_ns`.
    pub(super) fn on_wait_end(&mut self, now_ns: u64) {
        *self = Self { ran_at_ns: now_ns, empty_calls_left: MAX_EMPTY_CALLS };
    }

    /// True while calls that find nothing are counted: after a wait, up to the maximum.
    pub(super) fn is_counting(&self) -> bool {
        self.empty_calls_left > 0
    }

    /// Returns true if a call that does not wait and has found nothing at `now_ns` is to run the
    /// stack.
    pub(super) fn needs_round(&mut self, now_ns: u64) -> bool {
        if !self.is_counting() {
            return true;
        }
        self.empty_calls_left -= 1;
        let needs_round = now_ns.saturating_sub(self.ran_at_ns) > MAX_AGE_NS;
        if needs_round {
            self.ran_at_ns = now_ns;
        }
        needs_round
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_that_never_waits_runs_the_stack_with_each_call() {
        let mut wait = RecentWait::default();
        assert!((0..10).all(|now_ns| wait.needs_round(now_ns)));
    }

    #[test]
    fn empty_calls_after_a_wait_run_the_stack_once_per_age() {
        let mut wait = RecentWait::default();
        wait.on_wait_end(1_000);
        assert!(!wait.needs_round(1_000));
        assert!(!wait.needs_round(1_000 + MAX_AGE_NS));
        assert!(wait.needs_round(1_001 + MAX_AGE_NS));
        assert!(!wait.needs_round(1_001 + 2 * MAX_AGE_NS));
        assert!(wait.needs_round(1_002 + 2 * MAX_AGE_NS));
    }

    #[test]
    fn program_that_goes_on_without_a_wait_runs_the_stack_again() {
        let mut wait = RecentWait::default();
        wait.on_wait_end(0);
        assert!((0..MAX_EMPTY_CALLS).all(|_| !wait.needs_round(0)));
        assert!(wait.needs_round(0));
        wait.on_wait_end(0);
        assert!(!wait.needs_round(0));
    }
}
