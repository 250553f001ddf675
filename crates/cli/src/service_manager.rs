//! Messages to the service manager that has started this process (`sd_notify(3)`). Without one,
//! nothing is sent.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::process::Command;
use std::time::Duration;

use sd_notify::NotifyState;

/// Variables by which the service manager and a process find each other, whatever the process ID.
const VARIABLES: [&str; 2] = ["NOTIFY_SOCKET", "WATCHDOG_USEC"];

/// Variable with the process ID that the watchdog is for.
const WATCHDOG_PID: &str = "WATCHDOG_PID";

/// Reports that this process serves.
pub(crate) fn notify_ready() {
    send(&[NotifyState::Ready]);
}

/// Reports that this process reads its configuration again; [`notify_ready`] reports the end of
/// that.
pub(crate) fn notify_reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => send(&[NotifyState::Reloading, now]),
        Err(error) => log_failure(&error),
    }
}

/// Reports that this process is about to end.
pub(crate) fn notify_stopping() {
    send(&[NotifyState::Stopping]);
}

/// Reports the state of this process in words.
pub(crate) fn notify_status(status: &str) {
    send(&[NotifyState::Status(status)]);
}

/// Reports the process that goes on in the place of this process.
pub(crate) fn notify_successor(pid: u32) {
    send(&[NotifyState::MainPid(pid)]);
}

fn send(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        log_failure(&error);
    }
}

fn log_failure(error: &io::Error) {
    tracing::warn!("cannot notify the service manager: {error}");
}

/// Watchdog of the service manager, which ends a process that sends no message for too long.
pub(crate) struct Watchdog {
    interval: Duration,
}

impl Watchdog {
    /// Watchdog of this process, if the service manager has one.
    pub(crate) fn of_this_process() -> Option<Self> {
        let limit = sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero())?;
        Some(Self { interval: limit / 2 })
    }

    /// Interval of the messages: half of the time that the service manager waits for one.
    pub(crate) fn interval(&self) -> Duration {
        self.interval
    }

    /// Reports that this process works. A lost message counts as none, so a failure is ignored.
    pub(crate) fn notify(&self) {
        let _ = sd_notify::notify(&[NotifyState::Watchdog]);
    }
}

/// Takes the service manager away from a process that `command` starts.
pub(crate) fn hide_from(command: &mut Command) {
    for name in VARIABLES.into_iter().chain([WATCHDOG_PID]) {
        command.env_remove(name);
    }
}

/// Makes a process that `command` starts a service of the manager that has started the process
/// `pid`. Without permission to read the environment of that process, or without a manager, the
/// new process has none.
pub(crate) fn inherit_from(pid: u32, command: &mut Command) {
    hide_from(command);
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    command.envs(variables_in(&environment));
}

/// Returns the service manager's variables in an environment, as `/proc` shows it.
fn variables_in(environment: &[u8]) -> Vec<(&'static str, OsString)> {
    let value_of = |name: &str| {
        let mut variables = environment.split(|&byte| byte == 0);
        variables.find_map(|variable| variable.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
    };
    let found = |name| Some((name, OsString::from_vec(value_of(name)?.to_vec())));
    VARIABLES.into_iter().filter_map(found).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn successor_gets_the_variables_without_the_process_id() {
        let environment = b"PATH=/bin\0NOTIFY_SOCKET=/run/n\0WATCHDOG_PID=7\0WATCHDOG_USEC=2000\0";
        let expected = [("NOTIFY_SOCKET", "/run/n"), ("WATCHDOG_USEC", "2000")];
        let expected = expected.map(|(name, value)| (name, OsString::from(value)));
        assert_eq!(variables_in(environment), expected);
        for without in [&b""[..], b"\0", b"NOTIFY_SOCKETS=/run/n\0NOTIFY=1"] {
            assert!(variables_in(without).is_empty());
        }
    }

    #[test]
    fn successor_of_a_process_without_a_manager_has_none() {
        let mut command = Command::new("true");
        command.env("NOTIFY_SOCKET", "/run/of-another-service");
        inherit_from(0, &mut command);
        let notify = command.get_envs().find(|(name, _)| *name == "NOTIFY_SOCKET");
        assert_eq!(notify.and_then(|(_, value)| value), None);
    }
}
