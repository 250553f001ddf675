//! Reasons to evict an application.

use tidegate_memory::shared::PeerError;

/// Reason to evict an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::daemon) enum ProtocolError {
    /// Ring indices or datagrams in its shared memory make no sense.
    #[error("invalid indices or datagrams in the shared memory")]
    CorruptMemory,
    /// Its command ring holds a command that does not exist.
    #[error("unknown command")]
    UnknownCommand,
}

impl From<PeerError> for ProtocolError {
    fn from(_: PeerError) -> Self {
        Self::CorruptMemory
    }
}
