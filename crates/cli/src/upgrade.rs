//! `tidegate upgrade`: another daemon goes on in the place of the one that runs.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::Args;
use tidegate_service::attachment::DEFAULT_PATH;
use tidegate_service::daemon::Report;

use crate::Failure;

/// How often to look whether the new daemon serves.
const LOOK: Duration = Duration::from_millis(10);

/// What is said of it in the help.
const WHAT_HAPPENS: &str = "The new daemon is the program that runs this command. It takes over \
the sockets, the connections and the programs that are attached; they notice a pause of some \
hundredths of a second. If it fails, whatever the reason, the old one goes on as before, and this \
command says why and fails.\n\nRun it as root, with what the daemon was started with at hand: \
the configuration file is read again. The new one may have another number of cores. On DPDK this \
works with the devices net_memif and net_af_packet; a daemon on another one says why it has to be \
restarted.";

/// Flags of `upgrade`.
#[derive(Args)]
#[command(after_long_help = WHAT_HAPPENS)]
pub(crate) struct Upgrade {
    /// The Unix socket of the daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH)]
    socket: PathBuf,
    /// Flags of `tidegate serve` for the new daemon [default: those of the old one]
    #[arg(last = true, value_name = "FLAGS")]
    flags: Vec<String>,
}

/// By which a new daemon knows that it is to go on in an old one's place.
const TAKE_OVER: &str = "--take-over";

impl Upgrade {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let old = Report::ask(&self.socket)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("serve");
        if self.flags.is_empty() {
            command.args(flags_of(&old)?).current_dir(&old.folder);
        } else {
            command.args(&self.flags);
            if !self.flags.iter().any(|flag| is_socket(flag)) {
                command.arg("--socket").arg(&self.socket);
            }
        }
        command.arg(TAKE_OVER).stdin(Stdio::null()).stdout(Stdio::null());
        let mut new = command.spawn()?;
        wait(&self.socket, &mut new)?;
        println!("process {} goes on in the place of process {}", new.id(), old.pid);
        Ok(())
    }
}

fn is_socket(flag: &str) -> bool {
    flag == "--socket" || flag.starts_with("--socket=")
}

/// What the old daemon was told after `serve`.
fn flags_of(old: &Report) -> Result<Vec<String>, Failure> {
    let unusable = "the daemon does not say how it was started: give its flags, as `tidegate \
                    upgrade -- --iface NAME --address ADDRESS/BITS`";
    match old.arguments.split_first() {
        Some((serve, flags)) if serve == "serve" => {
            // What is not text cannot be said again.
            if flags.iter().any(|flag| flag.contains(char::REPLACEMENT_CHARACTER)) {
                return Err(unusable.into());
            }
            Ok(flags.iter().filter(|flag| *flag != TAKE_OVER).cloned().collect())
        }
        _ => Err(unusable.into()),
    }
}

/// Waits until the new daemon serves.
fn wait(socket: &Path, new: &mut Child) -> Result<(), Failure> {
    loop {
        if let Some(status) = new.try_wait()? {
            return Err(format!(
                "the new daemon has failed ({status}), for the reason above; the old one goes on"
            )
            .into());
        }
        // Nobody may answer just now.
        if Report::ask(socket).is_ok_and(|report| report.pid == new.id()) {
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(arguments: &[&str]) -> Result<Vec<String>, Failure> {
        let arguments = arguments.iter().map(|&text| text.to_owned()).collect();
        flags_of(&Report { arguments, ..Report::default() })
    }

    #[test]
    fn a_daemon_is_started_as_the_last_one_was() {
        let expected = ["--iface", "eth0"];
        assert_eq!(flags(&["serve", "--iface", "eth0"]).unwrap(), expected);
        assert_eq!(flags(&["serve", "--iface", "eth0", TAKE_OVER]).unwrap(), expected);
        for unusable in [&["lab", "chaos"] as &[&str], &[], &["serve", "--iface", "\u{fffd}"]] {
            assert!(flags(unusable).unwrap_err().to_string().contains("give its flags"));
        }
    }
}
