//! Decision whether the addresses are announced: pure, with the time as argument.

use std::fmt;
use std::time::Duration;

/// Settings of a [`Policy`].
#[derive(Clone, Copy, Debug)]
pub(super) struct PolicyConfig {
    /// Successes in a row after which a check counts as passed.
    pub(super) rise: u32,
    /// Failures in a row after which a check counts as failed.
    pub(super) fall: u32,
    /// Time for which the gate refuses known traffic before the addresses are withdrawn; `None`
    /// never withdraws them for that. `rise` intervals in a row without a refusal begin it anew: a
    /// gate refuses with pauses.
    pub(super) refused_limit: Option<Duration>,
    /// Shortest time for which the addresses stay withdrawn after that.
    pub(super) hold: Duration,
}

/// Reason for which the addresses are withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WithdrawReason {
    /// No check has passed yet.
    Starting,
    /// The process of the service has ended.
    ServiceEnded,
    /// A check has failed.
    Unhealthy,
    /// The gate has refused known traffic for too long.
    KnownRefused,
    /// An operator has drained this server.
    Drained,
    /// This process is about to end.
    Stopping,
}

impl WithdrawReason {
    /// All reasons, the strongest last.
    pub(super) const ALL: [Self; 6] = [
        Self::Starting,
        Self::Unhealthy,
        Self::KnownRefused,
        Self::ServiceEnded,
        Self::Drained,
        Self::Stopping,
    ];

    /// Name in JSON and in metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::ServiceEnded => "service_ended",
            Self::Unhealthy => "unhealthy",
            Self::KnownRefused => "known_refused",
            Self::Drained => "drained",
            Self::Stopping => "stopping",
        }
    }
}

impl fmt::Display for WithdrawReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Starting => "the checks have not passed yet",
            Self::ServiceEnded => "the service has ended",
            Self::Unhealthy => "a check fails",
            Self::KnownRefused => "the gate refuses known traffic",
            Self::Drained => "drained; `tidegate drain --undo` announces again",
            Self::Stopping => "this process ends",
        })
    }
}

/// Result of a check so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum CheckState {
    /// Neither passed nor failed yet.
    #[default]
    Unknown,
    Passed,
    Failed,
}

#[derive(Clone, Copy, Debug, Default)]
struct CheckCount {
    state: CheckState,
    /// Equal results in a row, and whether they are successes.
    in_a_row: u32,
    is_success: bool,
}

/// State of everything that decides whether the addresses are announced. Time is the duration
/// since any fixed moment.
#[derive(Clone, Debug)]
pub(super) struct Policy {
    config: PolicyConfig,
    checks: Vec<CheckCount>,
    has_ended: bool,
    is_drained: bool,
    is_stopping: bool,
    refused_since: Option<Duration>,
    /// Intervals in a row without a refusal.
    quiet_intervals: u32,
    held_until: Option<Duration>,
}

impl Policy {
    pub(super) fn new(config: PolicyConfig, checks: usize) -> Self {
        Self {
            config,
            checks: vec![CheckCount::default(); checks],
            has_ended: false,
            is_drained: false,
            is_stopping: false,
            refused_since: None,
            quiet_intervals: 0,
            held_until: None,
        }
    }

    /// Records the result of a check; returns its new state if that has changed.
    pub(super) fn record_check(&mut self, check: usize, is_success: bool) -> Option<CheckState> {
        let count = &mut self.checks[check];
        if count.is_success != is_success {
            *count = CheckCount { is_success, in_a_row: 0, ..*count };
        }
        count.in_a_row = count.in_a_row.saturating_add(1);
        let (needed, state) = match is_success {
            true => (self.config.rise, CheckState::Passed),
            false => (self.config.fall, CheckState::Failed),
        };
        let has_changed = count.in_a_row >= needed && count.state != state;
        has_changed.then(|| {
            count.state = state;
            state
        })
    }

    /// State of a check.
    pub(super) fn check_state(&self, check: usize) -> CheckState {
        self.checks[check].state
    }

    /// Records that the process of the service has ended. Its checks begin anew.
    pub(super) fn record_end(&mut self) {
        self.has_ended = true;
        self.checks.fill(CheckCount::default());
    }

    /// Records that a process of the service runs.
    pub(super) fn record_start(&mut self) {
        self.has_ended = false;
    }

    /// Records whether the gate has refused known traffic in the interval that ends now.
    pub(super) fn record_refusal(&mut self, is_refusing: bool, now: Duration) {
        if !is_refusing {
            self.quiet_intervals = self.quiet_intervals.saturating_add(1);
            if self.quiet_intervals >= self.config.rise {
                self.refused_since = None;
            }
            return;
        }
        self.quiet_intervals = 0;
        let since = *self.refused_since.get_or_insert(now);
        if self.config.refused_limit.is_some_and(|limit| now.saturating_sub(since) >= limit) {
            self.held_until = Some(now + self.config.hold);
        }
    }

    pub(super) fn set_drained(&mut self, is_drained: bool) {
        self.is_drained = is_drained;
    }

    pub(super) fn set_stopping(&mut self) {
        self.is_stopping = true;
    }

    /// Reason to withdraw the addresses; `None` announces them.
    pub(super) fn withdraw_reason(&self, now: Duration) -> Option<WithdrawReason> {
        let is_any = |state| self.checks.iter().any(|check| check.state == state);
        let holds = |reason| match reason {
            WithdrawReason::Stopping => self.is_stopping,
            WithdrawReason::Drained => self.is_drained,
            WithdrawReason::ServiceEnded => self.has_ended,
            WithdrawReason::KnownRefused => self.held_until.is_some_and(|until| now < until),
            WithdrawReason::Unhealthy => is_any(CheckState::Failed),
            WithdrawReason::Starting => is_any(CheckState::Unknown),
        };
        WithdrawReason::ALL.into_iter().rev().find(|&reason| holds(reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn policy() -> Policy {
        let refused_limit = Some(10 * SECOND);
        Policy::new(PolicyConfig { rise: 2, fall: 3, refused_limit, hold: 60 * SECOND }, 2)
    }

    fn healthy() -> Policy {
        let mut policy = policy();
        for check in [0, 1, 0, 1] {
            policy.record_check(check, true);
        }
        assert_eq!(policy.withdraw_reason(Duration::ZERO), None);
        policy
    }

    #[test]
    fn every_check_has_to_rise_and_any_may_fall() {
        let mut policy = policy();
        for check in [0, 1, 0] {
            policy.record_check(check, true);
            assert_eq!(policy.withdraw_reason(SECOND), Some(WithdrawReason::Starting));
        }
        assert_eq!(policy.record_check(1, true), Some(CheckState::Passed));
        assert_eq!(policy.withdraw_reason(SECOND), None);
        for is_success in [false, false, true, false, false] {
            assert_eq!(policy.record_check(1, is_success), None, "a success begins anew");
        }
        assert_eq!(policy.record_check(1, false), Some(CheckState::Failed));
        assert_eq!(policy.withdraw_reason(SECOND), Some(WithdrawReason::Unhealthy));
        policy.record_check(1, true);
        policy.record_check(1, true);
        assert_eq!(policy.withdraw_reason(SECOND), None);
    }

    #[test]
    fn end_of_the_service_counts_at_once_and_its_checks_begin_anew() {
        let mut policy = healthy();
        policy.record_end();
        assert_eq!(policy.withdraw_reason(SECOND), Some(WithdrawReason::ServiceEnded));
        policy.record_start();
        assert_eq!(policy.withdraw_reason(SECOND), Some(WithdrawReason::Starting));
    }

    #[test]
    fn known_traffic_refused_for_long_withdraws_for_the_hold_time() {
        let mut policy = healthy();
        for second in 0..10 {
            policy.record_refusal(true, second * SECOND);
            assert_eq!(policy.withdraw_reason(second * SECOND), None);
        }
        for second in [10, 11] {
            policy.record_refusal(false, second * SECOND);
        }
        policy.record_refusal(true, 12 * SECOND);
        policy.record_refusal(true, 20 * SECOND);
        assert_eq!(policy.withdraw_reason(20 * SECOND), None, "two intervals without begin anew");
        policy.record_refusal(false, 21 * SECOND);
        policy.record_refusal(true, 22 * SECOND);
        let reason = Some(WithdrawReason::KnownRefused);
        assert_eq!(policy.withdraw_reason(22 * SECOND), reason, "one interval without is a pause");
        assert_eq!(policy.withdraw_reason(81 * SECOND), reason);
        assert_eq!(policy.withdraw_reason(82 * SECOND), None);
    }

    #[test]
    fn refused_traffic_without_a_limit_changes_nothing() {
        let mut policy = healthy();
        policy.config.refused_limit = None;
        policy.record_refusal(true, SECOND);
        policy.record_refusal(true, 1000 * SECOND);
        assert_eq!(policy.withdraw_reason(1000 * SECOND), None);
    }

    #[test]
    fn drained_server_stays_withdrawn_whatever_the_checks_say() {
        let mut policy = healthy();
        policy.set_drained(true);
        policy.record_end();
        assert_eq!(policy.withdraw_reason(SECOND), Some(WithdrawReason::Drained));
        policy.set_drained(false);
        policy.record_start();
        for check in [0, 1, 0, 1] {
            policy.record_check(check, true);
        }
        assert_eq!(policy.withdraw_reason(SECOND), None);
        policy.set_stopping();
        assert_eq!(policy.withdraw_reason(SECOND), Some(WithdrawReason::Stopping));
    }
}
