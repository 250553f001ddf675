//! Versions of a daemon.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Release of a daemon, and the versions of what it writes and serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// Release.
    pub release: String,
    /// Format of its state.
    pub state_format: u8,
    /// Oldest and current attach protocol that it serves.
    pub attach_protocols: [u8; 2],
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { release, state_format, attach_protocols: [oldest, current] } = self;
        write!(f, "{release}, state format {state_format}, attach protocols {oldest} to {current}")
    }
}
