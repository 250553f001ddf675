//! Events that decide whether the addresses are announced.

use std::sync::mpsc::Sender;

use super::state::AnnounceState;

/// Event of a thread that watches something.
#[derive(Debug)]
pub(super) enum Event {
    /// Result of a check, by its index; the text says why it has failed.
    Checked(usize, Result<(), String>),
    /// A process of the service runs, with this process id.
    ServiceRuns(u32),
    /// The service has no process; the text says how that was found.
    ServiceEnded(String),
    /// The gate refuses known traffic, or does so no more.
    Refusal(bool),
    /// Request of an operator: the state, after draining or undoing that.
    Request(Option<bool>, Sender<AnnounceState>),
}
