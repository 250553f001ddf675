//! The programs that packets are for: the UDP service, or the screen.

use crate::core::{Core, Service};
use crate::error::SetupError;
use crate::processor::TaskId;
use crate::report::Place;
use crate::router::ScreenQueue;

/// What a reader does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReaderState {
    /// It reads, as a program should.
    #[default]
    Reads,
    /// It stands still, wherever it is, and holds on to its queue.
    Stopped,
    /// It is gone, its queue with it.
    Dead,
}

/// A program that reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    pub(crate) task: TaskId,
    pub(crate) state: ReaderState,
    /// The datagrams that it was done with.
    pub(crate) delivered: u64,
}

impl Program {
    pub(crate) fn new(task: TaskId) -> Self {
        Self { task, state: ReaderState::Reads, delivered: 0 }
    }
}

impl Core {
    /// Which reader a task is.
    #[inline]
    pub(crate) fn reader_of(&self, task: TaskId) -> Option<usize> {
        self.programs.iter().position(|program| program.task == task)
    }

    /// There is something to read.
    #[inline]
    pub(crate) fn wake_reader(&mut self, reader: usize) {
        if let Some(program) = self.programs.get(reader)
            && program.state == ReaderState::Reads
        {
            self.processor.wake(program.task);
        }
    }

    /// Stops a reader, lets it read again, or ends it.
    pub(crate) fn set_reader(&mut self, number: u32, state: ReaderState) -> Result<(), SetupError> {
        let reader = number as usize;
        let programs = match &self.service {
            Service::Udp { inline: true, .. } => 0,
            Service::Udp { udp, .. } => udp.readers(),
            Service::Router(router) => usize::from(router.screen.is_some()),
        };
        let program = self.programs.get_mut(reader).filter(|_| reader < programs);
        let program = program.ok_or(SetupError::Reader(number))?;
        if program.state == ReaderState::Dead {
            return Ok(());
        }
        program.state = state;
        let task = program.task;
        match state {
            ReaderState::Reads => self.processor.wake(task),
            ReaderState::Stopped => self.processor.block(task),
            ReaderState::Dead => {
                self.processor.block(task);
                self.close(reader);
                self.gate.on_queue_closed(reader as u64);
                self.release_if_not_held();
            }
        }
        Ok(())
    }

    fn close(&mut self, reader: usize) {
        match &mut self.service {
            Service::Udp { udp, .. } => udp.close(reader),
            Service::Router(router) => {
                let lost = router.screen.as_mut().map_or(0, ScreenQueue::close);
                self.drops[Place::ScreenQueue as usize] += lost;
            }
        }
    }

    /// A program takes its next packet. Returns what that and the work on it
    /// cost; `None` when there is none.
    pub(crate) fn begin_application(&mut self, reader: usize) -> Option<u64> {
        let clock_ns = self.clock_ns();
        let read_ns = self.costs.read_ns;
        let (level, capacity, cost_ns) = match &mut self.service {
            Service::Udp { udp, answers, inline } => {
                if !udp.read(reader) {
                    return None;
                }
                let (level, capacity) = udp.level(reader);
                let read_ns = if *inline { 0 } else { read_ns };
                let answer_ns = if *answers { self.costs.transmit_ns } else { 0 };
                (level, capacity, read_ns + self.costs.work_ns + answer_ns)
            }
            Service::Router(router) => {
                let screen = router.screen.as_mut()?;
                screen.current = Some(screen.waiting.pop_front()?);
                let level = screen.waiting.len() as u32;
                let cost_ns = read_ns + self.costs.work_ns + self.costs.transmit_ns;
                (level, screen.capacity, cost_ns)
            }
        };
        self.gate.on_queue_level(clock_ns, reader as u64, level, capacity);
        self.release_if_not_held();
        Some(cost_ns)
    }

    /// A program is done with a packet.
    pub(crate) fn finish_application(&mut self, reader: usize) {
        let clock_ns = self.clock_ns();
        match &mut self.service {
            Service::Udp { udp, answers, .. } => {
                let Some((arrived_ns, answered)) = udp.finish(clock_ns, reader, *answers) else {
                    return;
                };
                self.answered += u64::from(answered);
                if let Some(program) = self.programs.get_mut(reader) {
                    program.delivered += 1;
                }
                self.count_delivered(arrived_ns);
                self.start_output();
            }
            Service::Router(router) => {
                let screen = router.screen.as_mut();
                if let Some(packet) = screen.and_then(|screen| screen.current.take()) {
                    self.forward(packet);
                }
            }
        }
    }
}
