//! Work of the applications that packets are for.

use super::SimCore;
use crate::application::ReaderState;
use crate::error::SetupError;
use crate::processor::TaskId;
use crate::report::DropPoint;
use crate::router::FilterQueue;
use crate::service::Service;
use crate::udp::ServedDatagram;

impl SimCore {
    /// Returns the index of the reader that runs as a task.
    #[inline]
    pub(super) fn reader_of(&self, task: TaskId) -> Option<usize> {
        self.applications.iter().position(|application| application.task == task)
    }

    /// Wakes a reader, because its queue is not empty.
    #[inline]
    pub(super) fn wake_reader(&mut self, reader: usize) {
        if let Some(application) = self.applications.get(reader)
            && application.state == ReaderState::Running
        {
            self.processor.wake(application.task);
        }
    }

    /// Stops a reader, lets it run again, or ends it.
    pub(crate) fn set_reader(&mut self, number: u32, state: ReaderState) -> Result<(), SetupError> {
        let reader = number as usize;
        let applications = match &self.service {
            Service::Udp { inline: true, .. } => 0,
            Service::Udp { udp, .. } => udp.readers(),
            Service::Router(router) => usize::from(router.filter.is_some()),
        };
        let application = self.applications.get_mut(reader).filter(|_| reader < applications);
        let application = application.ok_or(SetupError::NoSuchReader(number))?;
        if application.state == ReaderState::Exited {
            return Ok(());
        }
        application.state = state;
        let task = application.task;
        match state {
            ReaderState::Running => self.processor.wake(task),
            ReaderState::Stopped => self.processor.block(task),
            ReaderState::Exited => {
                self.processor.block(task);
                self.close(reader);
                self.gate.on_queue_closed(reader as u64);
                self.resume_if_not_paused();
            }
        }
        Ok(())
    }

    fn close(&mut self, reader: usize) {
        match &mut self.service {
            Service::Udp { udp, .. } => udp.close(reader),
            Service::Router(router) => {
                let lost = router.filter.as_mut().map_or(0, FilterQueue::close);
                self.drops[DropPoint::FilterQueue as usize] += lost;
            }
        }
    }

    /// Takes the next packet of an application. Returns the cost of taking and processing the
    /// packet in nanoseconds; `None` if there is no packet.
    pub(super) fn begin_application(&mut self, reader: usize) -> Option<u64> {
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
                let queue = router.filter.as_mut()?;
                queue.current = Some(queue.waiting.pop_front()?);
                let level = queue.waiting.len() as u32;
                let cost_ns = read_ns + self.costs.work_ns + self.costs.transmit_ns;
                (level, queue.capacity, cost_ns)
            }
        };
        self.gate.on_queue_level(clock_ns, reader as u64, level, capacity);
        self.resume_if_not_paused();
        Some(cost_ns)
    }

    /// Finishes the current packet of an application.
    pub(super) fn finish_application(&mut self, reader: usize) {
        let clock_ns = self.clock_ns();
        match &mut self.service {
            Service::Udp { udp, answers, .. } => {
                let Some(served) = udp.finish(clock_ns, reader, *answers) else { return };
                let ServedDatagram { arrived_ns, flow, answered } = served;
                self.peer_delivered += u64::from(flow >= self.peer_flow);
                self.answered += u64::from(answered);
                if let Some(application) = self.applications.get_mut(reader) {
                    application.delivered += 1;
                }
                self.count_delivered(arrived_ns);
                self.start_output();
            }
            Service::Router(router) => {
                let queue = router.filter.as_mut();
                if let Some(packet) = queue.and_then(|filter| filter.current.take()) {
                    self.forward(packet);
                }
            }
        }
    }
}
