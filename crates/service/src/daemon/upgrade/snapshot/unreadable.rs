//! Reasons why a snapshot is not read.

use std::io;

use super::{OLDEST_STATE_FORMAT, STATE_FORMAT};
use crate::daemon::snapshot_error::InvalidSnapshot;

/// Format of a state that this version does not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnreadableFormat {
    /// The state is of a newer version.
    #[error(
        "the running daemon has state format {0}, this version reads {OLDEST_STATE_FORMAT} to \
         {STATE_FORMAT}: upgrade with the running or a newer version, or restart the daemon with \
         this one"
    )]
    TooNew(u8),
    /// The state is of a version before the oldest that is read.
    #[error(
        "the running daemon has state format {0}, this version reads {OLDEST_STATE_FORMAT} to \
         {STATE_FORMAT}: upgrade to a version in between first, or restart the daemon"
    )]
    TooOld(u8),
}

impl UnreadableFormat {
    /// Checks that this version reads a format.
    ///
    /// # Errors
    /// If it does not.
    pub(in crate::daemon) fn check(format: u8) -> Result<(), Self> {
        match format {
            ..OLDEST_STATE_FORMAT => Err(Self::TooOld(format)),
            OLDEST_STATE_FORMAT..=STATE_FORMAT => Ok(()),
            _ => Err(Self::TooNew(format)),
        }
    }
}

/// Reason why bytes are no snapshot for this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::daemon) enum SnapshotError {
    #[error(transparent)]
    Format(#[from] UnreadableFormat),
    #[error(transparent)]
    Invalid(#[from] InvalidSnapshot),
}

impl From<SnapshotError> for io::Error {
    fn from(error: SnapshotError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}
