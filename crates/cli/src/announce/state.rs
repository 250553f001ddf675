//! State of the announcement, as operators and programs get it.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// State of the announcement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct AnnounceState {
    /// True if the routing daemon was made to announce the addresses.
    pub(super) announced: bool,
    /// Reason of the withdrawal: its name, and a sentence.
    pub(super) reason: Option<String>,
    pub(super) sentence: Option<String>,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) checks: Vec<CheckReport>,
    /// Process of the service, if that is watched and runs.
    pub(super) service_pid: Option<u32>,
    /// Error of the routing daemon, which is asked again every second.
    pub(super) routing_error: Option<String>,
}

/// Last result of a check.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct CheckReport {
    pub(super) check: String,
    /// Address that was checked.
    pub(super) address: Option<IpAddr>,
    /// True once the check has passed often enough, until it has failed often enough.
    pub(super) healthy: bool,
    /// Error of the last attempt.
    pub(super) error: Option<String>,
}

impl fmt::Display for AnnounceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<_> = self.addresses.iter().map(IpAddr::to_string).collect();
        let addresses = addresses.join(", ");
        match (&self.sentence, &self.routing_error) {
            (None, None) => write!(f, "announced: {addresses}"),
            (Some(sentence), _) => write!(f, "withdrawn: {addresses}: {sentence}"),
            (None, Some(_)) => write!(f, "healthy, but not announced: {addresses}"),
        }
    }
}
