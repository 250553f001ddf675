//! Course of a core: arriving packets, tasks, and timers.

use tidegate_gate::Ring;

use super::SimCore;
use crate::admission::LoadTotals;
use crate::load::Packet;
use crate::processor::{ProcessorStep, TaskId};
use crate::report::DropPoint;
use crate::service::Service;
use crate::timers::{NEVER_NS, Timer};

impl SimCore {
    /// Receives a packet at the current time.
    #[inline]
    pub(crate) fn arrive(&mut self, packet: Packet) {
        self.offered += 1;
        self.peer_offered += u64::from(packet.flow >= self.peer_flow);
        if !self.examines_at_poll() && !self.is_admitted(packet) {
            self.count_drop(DropPoint::Admission);
        } else if self.nic.arrive(packet) {
            self.raise_interrupt();
        } else {
            self.count_drop(DropPoint::NicRing);
        }
    }

    /// Runs the core up to `end_ns`.
    pub(crate) fn run_until(&mut self, end_ns: u64) {
        loop {
            if self.timers.next_ns() <= self.now_ns() {
                self.fire_timers();
            }
            if self.processor.is_idle() {
                self.on_idle();
            } else {
                self.idle_notified = false;
            }
            let limit_ns = end_ns.min(self.timers.next_ns());
            match self.processor.step(limit_ns) {
                ProcessorStep::NeedsWork(task) if task == self.tasks.poller => self.poll(),
                ProcessorStep::NeedsWork(task) => match self.begin(task) {
                    Some(ns) => self.processor.assign(task, ns),
                    None => self.sleep_task(task),
                },
                ProcessorStep::Done(task) => self.finish(task),
                ProcessorStep::LimitReached if self.now_ns() >= end_ns => return,
                ProcessorStep::LimitReached => {}
            }
        }
    }

    /// Notifies the gate that the processor is idle, which may resume receiving.
    #[inline]
    fn on_idle(&mut self) {
        if !self.idle_notified {
            self.idle_notified = true;
            let clock_ns = self.clock_ns();
            self.gate.on_idle_processor(clock_ns);
            self.resume_if_not_paused();
        }
    }

    fn begin(&mut self, task: TaskId) -> Option<u64> {
        if task == self.tasks.interrupt {
            self.begin_interrupt()
        } else if task == self.tasks.software {
            self.begin_software()
        } else if task == self.tasks.tick {
            None
        } else if let Some(reader) = self.reader_of(task) {
            self.begin_application(reader)
        } else {
            self.begin_background(task)
        }
    }

    fn finish(&mut self, task: TaskId) {
        if task == self.tasks.poller {
            self.finish_poller();
        } else if task == self.tasks.interrupt {
            self.finish_interrupt();
        } else if task == self.tasks.software {
            self.finish_software();
        } else if let Some(reader) = self.reader_of(task) {
            self.finish_application(reader);
        } else if task != self.tasks.tick {
            self.finish_background(task);
        }
    }

    fn on_transmitted(&mut self) {
        let now_ns = self.now_ns();
        let (packet, next_ns) = self.nic.on_transmitted(now_ns);
        self.set_timer(Timer::Transmitted, next_ns.unwrap_or(NEVER_NS));
        if let (Some(packet), Service::Router(_)) = (packet, &self.service) {
            self.count_delivered(packet.arrived_ns);
        }
        if self.mode.has_input_queue() || self.nic.interrupt_enabled {
            self.raise_interrupt();
        } else if self.nic.has_many_reclaimable() {
            self.gate.on_ready(Ring::Transmit(0));
            if !self.receive_paused {
                self.processor.wake(self.tasks.poller);
            } else {
                // Only receiving is paused.
                self.resume_receiving();
            }
        }
    }

    fn fire_timers(&mut self) {
        let now_ns = self.now_ns();
        if self.is_due(Timer::Transmitted) {
            self.on_transmitted();
        }
        if self.is_due(Timer::Interrupt) {
            self.set_timer(Timer::Interrupt, NEVER_NS);
            self.raise_interrupt();
        }
        if self.is_due(Timer::ReceivePaused) {
            self.resume_receiving();
        }
        if let Some(tick) = self.tick.filter(|_| self.is_due(Timer::Tick)) {
            self.set_timer(Timer::Tick, now_ns + tick.period_ns);
            self.processor.assign(self.tasks.tick, tick.cost_ns);
            self.processor.wake(self.tasks.tick);
        }
        if self.is_due(Timer::Stack) {
            let clock_ns = self.clock_ns();
            if let Service::Udp { udp, .. } = &mut self.service {
                udp.handle_timeout(clock_ns);
            }
            self.start_output();
            self.set_stack_timer();
        }
        if self.is_due(Timer::Admission) {
            self.on_admission_period();
        }
        self.on_background_timers();
        self.timers.find_next();
    }

    /// True if the polling loop examines packets; false if they are examined in front of the NIC.
    #[inline]
    pub(super) fn examines_at_poll(&self) -> bool {
        self.costs.refuse_ns > 0 && !self.mode.has_input_queue()
    }

    /// Returns true if admission control admits the packet.
    #[inline]
    pub(super) fn is_admitted(&mut self, packet: Packet) -> bool {
        let clock_ns = self.clock_ns();
        match &mut self.admission_stage {
            Some(stage) => stage.is_admitted(clock_ns, self.offered, packet),
            None => true,
        }
    }

    /// Reports the measurements of a period to the admission controller.
    fn on_admission_period(&mut self) {
        self.set_admission_timer();
        let clock_ns = self.clock_ns();
        let drops = |point: DropPoint| self.drops[point as usize];
        let (refused, rx_missed) = (drops(DropPoint::Admission), drops(DropPoint::NicRing));
        let own_drops: u64 = self.drops.iter().sum::<u64>() - refused - rx_missed;
        // In front of the NIC, the packets lost on a full ring were admitted.
        let (late, rx_missed) =
            if self.examines_at_poll() { (0, rx_missed) } else { (rx_missed, 0) };
        let totals = LoadTotals {
            served: self.delivered,
            late_drops: own_drops + late + self.service.socket_drops(),
            offered: self.offered,
            rx_missed,
        };
        let level_percent = self.service.max_level_percent();
        let backlog_percent = self.backlog_meter.take();
        if let Some(stage) = &mut self.admission_stage {
            stage.on_period(clock_ns, totals, level_percent, backlog_percent);
        }
    }
}
