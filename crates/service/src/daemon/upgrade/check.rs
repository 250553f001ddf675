//! Check of a running daemon before an upgrade to this program.

use super::snapshot::{OLDEST_STATE_FORMAT, STATE_FORMAT, UnreadableFormat};
use crate::daemon::report::{ApplicationReport, DaemonReport};
use crate::daemon::versions::Versions;
use crate::ipc::version::ProtocolVersion;

impl Versions {
    /// Versions of this program.
    pub fn own() -> Self {
        Self {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            state_format: STATE_FORMAT,
            attach_protocols: [ProtocolVersion::OLDEST, ProtocolVersion::CURRENT]
                .map(ProtocolVersion::number),
        }
    }
}

/// Reason why a running daemon cannot be upgraded to this program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UpgradeImpossible {
    /// This program does not read the state of the daemon.
    #[error(transparent)]
    State(#[from] UnreadableFormat),
    /// This program does not serve an attached program.
    #[error(
        "{program} speaks attach protocol {protocol}, this version serves {oldest} to {current}: \
         restart that program, then upgrade",
        oldest = ProtocolVersion::OLDEST.number(), current = ProtocolVersion::CURRENT.number()
    )]
    Program {
        /// Name and process of the program.
        program: String,
        /// Version of the attach protocol that it speaks.
        protocol: u8,
    },
}

impl DaemonReport {
    /// Checks that a daemon of this program can take over from the reported daemon.
    ///
    /// # Errors
    /// The first reason why it cannot.
    pub fn check_upgrade(&self) -> Result<(), UpgradeImpossible> {
        // A daemon that does not report its format has one from before the reports.
        let format = self.versions.as_ref().map_or(OLDEST_STATE_FORMAT, |old| old.state_format);
        UnreadableFormat::check(format)?;
        for ApplicationReport { identity, .. } in &self.applications {
            let protocol = identity.library.protocol.number();
            if ProtocolVersion::served(protocol).is_err() {
                let program = identity.to_string();
                return Err(UpgradeImpossible::Program { program, protocol });
            }
        }
        Ok(())
    }

    /// Applications that speak an older attach protocol than this program does: they go on after an
    /// upgrade to this program, and have to be restarted before the protocol is no longer served.
    pub fn older_applications(&self) -> impl Iterator<Item = &ApplicationReport> {
        let is_older =
            |app: &&ApplicationReport| app.identity.library.protocol < ProtocolVersion::CURRENT;
        self.applications.iter().filter(is_older)
    }
}
