//! Interrupt handler of the NIC, and the software interrupt behind it.

use tidegate_gate::{InterruptAction, Ring};

use super::SimCore;
use crate::processor::TaskId;
use crate::report::DropPoint;
use crate::tasks::InterruptHandler;

impl SimCore {
    pub(super) fn begin_interrupt(&mut self) -> Option<u64> {
        match self.handler {
            InterruptHandler::Enter => Some(self.costs.interrupt_ns),
            InterruptHandler::Take(limit) if limit > 0 && self.nic.waiting() > 0 => {
                Some(self.costs.receive_ns + self.detour_ns())
            }
            InterruptHandler::Take(take) if self.nic.reclaimable() > 0 => {
                let descriptors = self.nic.reclaimable();
                self.handler = InterruptHandler::Reclaim { descriptors, take };
                Some(u64::from(descriptors) * self.costs.transmit_done_ns)
            }
            InterruptHandler::Take(_) => None,
            InterruptHandler::Reclaim { .. } => None,
        }
    }

    pub(super) fn finish_interrupt(&mut self) {
        match self.handler {
            InterruptHandler::Enter => {
                let clock_ns = self.clock_ns();
                match self.gate.on_interrupt(clock_ns, 0) {
                    InterruptAction::Take { limit } => self.handler = InterruptHandler::Take(limit),
                    InterruptAction::StartPolling => {
                        self.nic.interrupt_enabled = false;
                        self.gate.on_ready(Ring::Transmit(0));
                        self.processor.wake(self.tasks.poller);
                        self.sleep_task(self.tasks.interrupt);
                    }
                }
            }
            InterruptHandler::Take(limit) => {
                self.handler = InterruptHandler::Take(limit - 1);
                let Some(packet) = self.nic.take() else { return };
                if self.input.len() < self.input_queue {
                    self.input.push_back(packet);
                    self.processor.wake(self.tasks.software);
                } else {
                    self.count_drop(DropPoint::InputQueue);
                }
            }
            InterruptHandler::Reclaim { descriptors, take } => {
                self.nic.reclaim(descriptors);
                self.start_output();
                self.handler = InterruptHandler::Take(take);
            }
        }
    }

    pub(super) fn begin_software(&mut self) -> Option<u64> {
        if self.input.is_empty() {
            return None;
        }
        let start_ns = if self.software_running { 0 } else { self.costs.software_ns };
        self.software_running = true;
        Some(start_ns + self.protocol_ns())
    }

    pub(super) fn finish_software(&mut self) {
        if let Some(packet) = self.input.pop_front() {
            self.deliver(packet);
        }
    }

    /// Puts a task without work to sleep.
    pub(super) fn sleep_task(&mut self, task: TaskId) {
        self.processor.block(task);
        if task == self.tasks.interrupt {
            self.handler = InterruptHandler::Enter;
            self.nic.interrupt_raised = false;
            self.raise_interrupt();
        } else if task == self.tasks.software {
            self.software_running = false;
        }
    }
}
