//! Error of a snapshot that another daemon handed over.

use std::io;

/// Error when a snapshot is inconsistent or unreadable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the snapshot from the other daemon is invalid: {0}; restart the daemon instead")]
pub(super) struct InvalidSnapshot(pub(super) &'static str);

impl From<InvalidSnapshot> for io::Error {
    fn from(damaged: InvalidSnapshot) -> Self {
        Self::new(io::ErrorKind::InvalidData, damaged)
    }
}
