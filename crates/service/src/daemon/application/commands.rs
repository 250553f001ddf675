//! Commands of an application: its ring, and the command that waits for a port query.

use tidegate_memory::shared::{Receiver, WordRange};

use super::protocol_error::ProtocolError;
use crate::ipc::command::{COMMAND_WORDS, Command};

/// Commands of an application that are not executed yet.
pub(in crate::daemon) struct CommandQueue {
    pub(super) ring: Receiver<WordRange, COMMAND_WORDS>,
    /// Command deferred while other cores are queried for its port, or due now.
    pub(super) deferred: Option<Command>,
    port_query: PortQueryState,
    /// The deferred command waits until workers have done their jobs.
    pub(super) waits_for_workers: bool,
    /// Commands taken from the ring so far.
    pub(super) taken: u64,
}

/// Progress of the query to other cores for the port that a command wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PortQueryState {
    NotStarted,
    /// Other cores are being queried.
    InProgress,
    Done,
}

impl CommandQueue {
    pub(super) fn new(ring: Receiver<WordRange, COMMAND_WORDS>) -> Self {
        Self {
            ring,
            deferred: None,
            port_query: PortQueryState::NotStarted,
            waits_for_workers: false,
            taken: 0,
        }
    }

    /// Next command, or `None` while a port query is in progress.
    pub(super) fn next(&mut self) -> Result<Option<Command>, ProtocolError> {
        if self.port_query == PortQueryState::InProgress {
            return Ok(None);
        }
        if let Some(command) = self.deferred.take() {
            return Ok(Some(command));
        }
        self.port_query = PortQueryState::NotStarted;
        let Some(words) = self.ring.pop()? else { return Ok(None) };
        self.taken += 1;
        Command::from_words(words).map(Some).ok_or(ProtocolError::UnknownCommand)
    }

    /// True if a command can run.
    pub(super) fn has_work(&mut self) -> bool {
        let wants = self.deferred.is_some() || !matches!(self.ring.is_empty(), Ok(true));
        wants && self.port_query != PortQueryState::InProgress
    }

    /// True while a command is deferred.
    pub(super) fn has_deferred(&self) -> bool {
        self.deferred.is_some() || self.waits_for_workers
    }

    /// Number of commands taken from the ring so far.
    pub(in crate::daemon) fn taken(&self) -> u64 {
        self.taken
    }

    /// Frees the ring slots of the commands taken.
    pub(in crate::daemon) fn release(&mut self) {
        self.ring.release();
    }

    /// True once other cores have been queried for the port that the current command wants.
    pub(in crate::daemon) fn has_queried_port(&self) -> bool {
        self.port_query == PortQueryState::Done
    }

    /// Defers a command until other cores have been queried.
    pub(in crate::daemon) fn defer_for_port_query(&mut self, command: Command) {
        (self.deferred, self.port_query) = (Some(command), PortQueryState::InProgress);
    }

    /// Defers a command to a later round: until no job of workers is pending, if there is one.
    pub(in crate::daemon) fn defer_to_later_round(&mut self, command: Command) {
        (self.deferred, self.waits_for_workers) = (Some(command), true);
    }

    /// Ends the port query: the deferred command runs next, whatever its outcome.
    pub(in crate::daemon) fn on_port_query_done(&mut self) {
        self.port_query = PortQueryState::Done;
    }

    /// Resets the port query after a migration: the new core has other cores to query.
    pub(in crate::daemon) fn reset_port_query(&mut self) {
        self.port_query = PortQueryState::NotStarted;
    }

    /// Drops the deferred command of an application that has exited.
    pub(in crate::daemon) fn cancel_deferred(&mut self) {
        (self.deferred, self.port_query) = (None, PortQueryState::NotStarted);
        self.waits_for_workers = false;
    }
}
