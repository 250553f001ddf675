//! Applications that packets are for: the readers of the UDP service, or the filter process.

use crate::processor::TaskId;

/// State of a reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReaderState {
    /// Reads packets as they arrive.
    #[default]
    Running,
    /// Stopped at an arbitrary point; keeps its queue.
    Stopped,
    /// Exited, and its queue closed.
    Exited,
}

/// Application that reads packets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Application {
    pub(crate) task: TaskId,
    pub(crate) state: ReaderState,
    /// Packets that the application has finished.
    pub(crate) delivered: u64,
}

impl Application {
    pub(crate) fn new(task: TaskId) -> Self {
        Self { task, state: ReaderState::Running, delivered: 0 }
    }
}
