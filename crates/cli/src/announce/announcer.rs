//! State of all that is watched, and the announcement that follows from it.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::event::Event;
use super::policy::{CheckState, Policy, WithdrawReason};
use super::routing::Announcement;
use super::state::{AnnounceState, CheckReport};
use crate::Failure;
use crate::health_check::HealthCheck;
use crate::metrics::Latest;
use crate::metrics::table::{self, Readings};
use crate::output::print_line;
use crate::service_manager;

/// Interval of the attempts to make the routing daemon obey.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which announced addresses are announced again, for a routing daemon that has
/// started anew.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// Keeps the announcement in step with the policy.
pub(super) struct Announcer {
    policy: Policy,
    announcement: Announcement,
    addresses: Vec<IpAddr>,
    checks: Vec<(HealthCheck, IpAddr)>,
    /// Error of the last attempt of each check.
    errors: Vec<Option<String>>,
    service_pid: Option<u32>,
    began: Instant,
    /// Reason that was last put into effect; `None` while announced.
    reason: Option<WithdrawReason>,
    routing_error: Option<String>,
    /// Time of the last command to the routing daemon.
    applied: Instant,
    withdrawals: [u64; WithdrawReason::ALL.len()],
    prints_changes: bool,
    latest: Option<Latest<Readings>>,
}

impl Announcer {
    /// Everything is withdrawn at first.
    pub(super) fn new(
        policy: Policy,
        announcement: Announcement,
        addresses: &[IpAddr],
        checks: Vec<(HealthCheck, IpAddr)>,
    ) -> Self {
        Self {
            policy,
            announcement,
            addresses: addresses.to_vec(),
            errors: vec![None; checks.len()],
            checks,
            service_pid: None,
            began: Instant::now(),
            reason: Some(WithdrawReason::Starting),
            routing_error: None,
            applied: Instant::now(),
            withdrawals: [0; WithdrawReason::ALL.len()],
            prints_changes: false,
            latest: None,
        }
    }

    /// Prints each change of the state as JSON, if `prints_changes`.
    pub(super) fn print_changes(&mut self, prints_changes: bool) -> &mut Self {
        self.prints_changes = prints_changes;
        self
    }

    /// Publishes the metrics from now on.
    pub(super) fn publish(&mut self, latest: Latest<Readings>) {
        latest.publish(self.readings());
        self.latest = Some(latest);
    }

    /// Handles an event, and puts into effect what follows.
    ///
    /// # Errors
    /// Nobody reads the output any more.
    pub(super) fn handle(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Checked(index, result) => self.record_check(index, result),
            Event::ServiceRuns(pid) => {
                if self.service_pid != Some(pid) {
                    tracing::info!("service: process {pid}");
                }
                self.service_pid = Some(pid);
                self.policy.record_start();
            }
            Event::ServiceEnded(error) => {
                tracing::warn!("service: no process answers at its control socket: {error}");
                self.service_pid = None;
                self.policy.record_end();
            }
            Event::Refusal(is_refusing) => {
                self.policy.record_refusal(is_refusing, self.began.elapsed());
            }
            Event::Request(is_drained, reply) => {
                if let Some(is_drained) = is_drained {
                    self.policy.set_drained(is_drained);
                }
                self.update()?;
                // The client may have gone.
                let _ = reply.send(self.state());
                return Ok(());
            }
        }
        self.update()
    }

    fn record_check(&mut self, index: usize, result: Result<(), String>) {
        let changed = self.policy.record_check(index, result.is_ok());
        self.errors[index] = result.err();
        let (check, address) = &self.checks[index];
        match changed {
            Some(CheckState::Passed) => tracing::info!("check {check} of {address} passes"),
            Some(_) => {
                let error = self.errors[index].as_deref().unwrap_or_default();
                tracing::warn!("check {check} of {address} fails: {error}");
            }
            None => {}
        }
        if let Some(latest) = self.latest.as_ref().filter(|_| changed.is_some()) {
            latest.publish(self.readings());
        }
    }

    /// Puts the decision into effect.
    ///
    /// # Errors
    /// As [`Announcer::handle`].
    pub(super) fn update(&mut self) -> Result<(), Failure> {
        let reason = self.policy.withdraw_reason(self.began.elapsed());
        let routing_error = self.routing_error.is_some();
        let crosses = reason.is_none() != self.reason.is_none();
        let interval = match (&self.routing_error, reason) {
            (Some(_), _) => Some(RETRY_INTERVAL),
            (None, None) => self.announcement.needs_refresh().then_some(REFRESH_INTERVAL),
            (None, Some(_)) => None,
        };
        let is_due = interval.is_some_and(|interval| self.applied.elapsed() >= interval);
        if crosses || is_due {
            self.apply(reason.is_none());
        }
        if reason == self.reason && routing_error == self.routing_error.is_some() {
            return Ok(());
        }
        if let Some(reason) = reason.filter(|_| crosses) {
            let index = WithdrawReason::ALL.iter().position(|&one| one == reason);
            index.into_iter().for_each(|index| self.withdrawals[index] += 1);
        }
        self.reason = reason;
        let state = self.state();
        tracing::info!("{state}");
        service_manager::notify_status(&state.to_string());
        if let Some(latest) = &self.latest {
            latest.publish(self.readings());
        }
        if self.prints_changes {
            print_line!("{}", serde_json::to_string(&state)?)?;
        }
        Ok(())
    }

    fn apply(&mut self, is_announced: bool) {
        self.applied = Instant::now();
        let error = self.announcement.set(is_announced).err().map(|error| error.to_string());
        match &error {
            Some(error) if self.routing_error.as_ref() != Some(error) => {
                tracing::warn!("routing daemon: {error}");
            }
            None if self.routing_error.is_some() => tracing::info!("routing daemon: obeys again"),
            _ => {}
        }
        self.routing_error = error;
    }

    /// Withdraws the addresses for good. True if they were announced before.
    ///
    /// # Errors
    /// As [`Announcer::handle`].
    pub(super) fn stop(&mut self) -> Result<bool, Failure> {
        let was_announced = self.reason.is_none();
        self.policy.set_stopping();
        self.update()?;
        Ok(was_announced)
    }

    /// True if the addresses are to be announced, and the routing daemon obeys.
    fn is_announced(&self) -> bool {
        self.reason.is_none() && self.routing_error.is_none()
    }

    fn state(&self) -> AnnounceState {
        let report = |(index, (check, address)): (usize, &(HealthCheck, IpAddr))| CheckReport {
            check: check.to_string(),
            address: Some(*address),
            healthy: self.policy.check_state(index) == CheckState::Passed,
            error: self.errors[index].clone(),
        };
        AnnounceState {
            announced: self.is_announced(),
            reason: self.reason.map(|reason| reason.name().to_owned()),
            sentence: self.reason.map(|reason| reason.to_string()),
            addresses: self.addresses.clone(),
            checks: self.checks.iter().enumerate().map(report).collect(),
            service_pid: self.service_pid,
            routing_error: self.routing_error.clone(),
        }
    }

    fn readings(&self) -> Readings {
        let mut readings = Readings::of_command("announce");
        for address in &self.addresses {
            let is_announced = u64::from(self.is_announced());
            readings.add(&table::ANNOUNCED, [address.to_string().as_str()], is_announced);
        }
        for (index, (check, address)) in self.checks.iter().enumerate() {
            let is_healthy = self.policy.check_state(index) == CheckState::Passed;
            let labels = [check.to_string(), address.to_string()];
            let labels = labels.each_ref().map(String::as_str);
            readings.add(&table::ANNOUNCE_HEALTHY, labels, u64::from(is_healthy));
        }
        for (reason, count) in WithdrawReason::ALL.iter().zip(self.withdrawals) {
            readings.add(&table::ANNOUNCE_WITHDRAWALS, [reason.name()], count);
        }
        readings
    }
}
