//! `tidegate upgrade`: a new daemon takes over from the running daemon.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::Args;
use tidegate_service::attachment::DEFAULT_PATH;
use tidegate_service::daemon::{DaemonReport, Versions};

use crate::Failure;
use crate::announce::{DEFAULT_SOCKET, drain};
use crate::output::print_line;
use crate::service_manager;

/// Interval of the checks for the new daemon.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Long help of `upgrade`.
const WHAT_HAPPENS: &str = "The new daemon is the program that runs this command. It takes over \
the sockets, the connections and the attached applications, which notice a pause of some \
hundredths of a second. If it fails, whatever the reason, the old daemon continues, and this \
command reports the reason and fails. The new daemon may be of a newer version: this command \
reports both versions, and refuses before anything stops if the new daemon cannot take over.\n\nRun it as root, with the files that the old daemon was started with: \
the configuration file is read again. The new daemon may have another number of cores. On DPDK this \
works with the devices net_memif and net_af_packet; a daemon on another device reports why it has to be \
restarted.";

/// Flags of `upgrade`.
#[derive(Args)]
#[command(after_long_help = WHAT_HAPPENS)]
pub(crate) struct Upgrade {
    /// Unix socket of the daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH)]
    socket: PathBuf,
    /// If the upgrade would cost connections, and so is refused, withdraw the addresses of this server
    /// through `tidegate announce`: the restart that has to follow then costs no client
    #[arg(long)]
    drain: bool,
    /// Socket of `tidegate announce`, for --drain
    #[arg(long, value_name = "SOCKET", default_value = DEFAULT_SOCKET)]
    announce: PathBuf,
    /// Flags of `tidegate daemon` for the new daemon [default: those of the old daemon]
    #[arg(last = true, value_name = "FLAGS")]
    flags: Vec<String>,
}

/// Flag that makes a new daemon take over from the daemon at its socket.
const TAKE_OVER: &str = "--take-over";

impl Upgrade {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let old = DaemonReport::query(&self.socket)?;
        let versions =
            old.versions.as_ref().map_or("an earlier version".into(), Versions::to_string);
        print_line!(
            "process {} is of {versions}; this program is of {}",
            old.pid,
            Versions::own()
        )?;
        if let Err(reason) = old.check_upgrade() {
            return Err(self.drain_for_restart(reason.into()));
        }
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("daemon");
        if self.flags.is_empty() {
            command.args(flags_of(&old)?).current_dir(&old.folder);
        } else {
            command.args(&self.flags);
            if !self.flags.iter().any(|flag| is_socket_flag(flag)) {
                command.arg("--socket").arg(&self.socket);
            }
        }
        service_manager::inherit_from(old.pid, &mut command);
        command.arg(TAKE_OVER).stdin(Stdio::null()).stdout(Stdio::null());
        let mut new = command.spawn()?;
        if let Err(reason) = wait_until_serving(&self.socket, &mut new) {
            return Err(self.drain_for_restart(reason));
        }
        print_line!("process {} has taken over from process {}", new.id(), old.pid)?;
        // A program has an attachment for each network core.
        let names = old.older_applications().map(|app| app.identity.to_string());
        let names = names.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(", ");
        if !names.is_empty() {
            print_line!(
                "still with the library of an earlier version: {names}; restart these programs before \
                 an upgrade to a version that no longer serves it"
            )?;
        }
        Ok(())
    }
}

impl Upgrade {
    /// Drains this server after an upgrade that has failed for `reason`, if asked to. Returns the
    /// error of the command.
    fn drain_for_restart(&self, reason: Failure) -> Failure {
        if !self.drain {
            return reason;
        }
        match drain(&self.announce) {
            Ok(()) => format!(
                "{reason}. The addresses are withdrawn: restart the daemon, then run `tidegate drain \
                 --undo`"
            )
            .into(),
            Err(error) => format!("{reason}. The addresses are not withdrawn: {error}").into(),
        }
    }
}

fn is_socket_flag(flag: &str) -> bool {
    flag == "--socket" || flag.starts_with("--socket=")
}

/// Returns the flags of the old daemon: its arguments after the subcommand.
fn flags_of(old: &DaemonReport) -> Result<Vec<String>, Failure> {
    let unusable = "the daemon does not report how it was started: give its flags, as `tidegate \
                    upgrade -- --iface NAME --address ADDRESS/BITS`";
    match old.arguments.split_first() {
        // A daemon of an earlier version was started by `serve`.
        Some((command, flags)) if matches!(command.as_str(), "daemon" | "serve") => {
            // Arguments that were not UTF-8 cannot be reproduced.
            if flags.iter().any(|flag| flag.contains(char::REPLACEMENT_CHARACTER)) {
                return Err(unusable.into());
            }
            Ok(flags.iter().filter(|flag| *flag != TAKE_OVER).cloned().collect())
        }
        _ => Err(unusable.into()),
    }
}

/// Waits until the new daemon serves.
fn wait_until_serving(socket: &Path, new: &mut Child) -> Result<(), Failure> {
    loop {
        if let Some(status) = new.try_wait()? {
            return Err(format!(
                "the new daemon has failed ({status}), for the reason above; the old daemon continues"
            )
            .into());
        }
        // During the takeover there may be no daemon that answers.
        if DaemonReport::query(socket).is_ok_and(|report| report.pid == new.id()) {
            return Ok(());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(arguments: &[&str]) -> Result<Vec<String>, Failure> {
        let arguments = arguments.iter().map(|&text| text.to_owned()).collect();
        flags_of(&DaemonReport { arguments, ..DaemonReport::default() })
    }

    #[test]
    fn reuses_flags_of_old_daemon() {
        let expected = ["--iface", "eth0"];
        for command in ["daemon", "serve"] {
            assert_eq!(flags(&[command, "--iface", "eth0"]).unwrap(), expected);
            assert_eq!(flags(&[command, "--iface", "eth0", TAKE_OVER]).unwrap(), expected);
        }
        for unusable in [&["lab", "chaos"] as &[&str], &[], &["daemon", "--iface", "\u{fffd}"]] {
            assert!(flags(unusable).unwrap_err().to_string().contains("give its flags"));
        }
    }
}
