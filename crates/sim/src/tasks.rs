//! Tasks of a core and their states.

use tidegate_gate::{Mode, Turn};

use crate::processor::{PriorityLevel, Processor, TaskId};
use crate::setup::{BackgroundTask, Setup};

/// Tasks that every core has.
#[derive(Clone, Copy)]
pub(crate) struct CoreTasks {
    pub(crate) interrupt: TaskId,
    pub(crate) software: TaskId,
    pub(crate) poller: TaskId,
    pub(crate) tick: TaskId,
}

impl CoreTasks {
    /// Adds the tasks to a processor.
    pub(crate) fn new(setup: &Setup, mode: Mode, processor: &mut Processor) -> Self {
        Self {
            interrupt: processor.add(PriorityLevel::Device),
            software: processor.add(match setup.protocol_thread {
                true => PriorityLevel::Kernel,
                false => PriorityLevel::Software,
            }),
            poller: processor.add(poller_level(mode)),
            tick: processor.add(PriorityLevel::Device),
        }
    }
}

/// Returns the priority level of the polling loop.
pub(crate) fn poller_level(mode: Mode) -> PriorityLevel {
    match mode {
        Mode::Napi => PriorityLevel::Software,
        _ => PriorityLevel::Kernel,
    }
}

/// State of the interrupt handler.
#[derive(Clone, Copy)]
pub(crate) enum InterruptHandler {
    /// Entering the handler.
    Enter,
    /// Taking packets, up to this many more.
    Take(u32),
    /// Reclaiming transmit descriptors; afterwards taking up to `take` packets.
    Reclaim { descriptors: u32, take: u32 },
}

/// State of the polling loop.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PollLoop {
    /// Current turn and the number of packets taken in it.
    pub(crate) turn: Option<(Turn, u32)>,
    /// The turn has just begun, and the loop is checking the ring.
    pub(crate) checking_ring: bool,
    /// The current packet is being refused.
    pub(crate) refusing: bool,
    /// Number of packets refused in the turn.
    pub(crate) refused: usize,
}

/// State of a background task.
pub(crate) struct BackgroundState {
    pub(crate) background: BackgroundTask,
    pub(crate) task: TaskId,
    /// Packets that are due and not sent.
    pub(crate) due: u64,
    pub(crate) sent: u64,
}

impl BackgroundState {
    /// Adds the task to a processor; a computing task runs at once.
    pub(crate) fn new(background: BackgroundTask, processor: &mut Processor) -> Self {
        let task = processor.add(PriorityLevel::Application);
        if background == BackgroundTask::Compute {
            processor.wake(task);
        }
        Self { background, task, due: 0, sent: 0 }
    }
}
