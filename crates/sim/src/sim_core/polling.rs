//! Polling loop: performs the actions of the gate.

use tidegate_gate::{GateAction, Mode, Ring, Turn};

use super::SimCore;
use crate::processor::PriorityLevel;
use crate::report::DropPoint;
use crate::tasks::{PollLoop, poller_level};
use crate::timers::Timer;

impl SimCore {
    /// Assigns the polling loop its next piece of work, or puts it to sleep.
    pub(super) fn poll(&mut self) {
        loop {
            let Some((turn, taken)) = self.polling.turn else { return self.query_gate() };
            let continues = taken < turn.quota && !self.is_turn_paused(turn);
            let cost_ns = if continues { self.begin_packet(turn.ring) } else { None };
            if let Some(cost_ns) = cost_ns {
                return self.processor.assign(self.tasks.poller, cost_ns);
            }
            self.polling.turn = None;
            if matches!(turn.ring, Ring::Receive(_)) {
                self.backlog_meter.on_turn(taken as usize, taken < turn.quota);
            }
            let clock_ns = self.clock_ns();
            self.gate.on_served(turn, taken, clock_ns);
            if self.has_work(turn.ring) {
                self.gate.on_ready(turn.ring);
            }
        }
    }

    /// True if receiving is paused within a receive turn. A quota may exceed the size of the queue
    /// that fills.
    fn is_turn_paused(&mut self, turn: Turn) -> bool {
        let clock_ns = self.clock_ns();
        matches!(turn.ring, Ring::Receive(_)) && self.gate.paused_until(clock_ns).is_some()
    }

    fn has_work(&self, ring: Ring) -> bool {
        matches!(ring, Ring::Receive(_)) && self.nic.waiting() > 0
    }

    fn query_gate(&mut self) {
        let clock_ns = self.clock_ns();
        match self.gate.next(clock_ns) {
            GateAction::Serve(turn) => {
                self.polling =
                    PollLoop { turn: Some((turn, 0)), checking_ring: true, ..PollLoop::default() };
                self.processor.assign(self.tasks.poller, self.costs.poll_ns);
            }
            // The loop continues as the last in the order of the applications, and queries the
            // gate when its turn comes.
            GateAction::Yield => {
                self.processor.set_level(self.tasks.poller, PriorityLevel::Application);
            }
            GateAction::Wait { paused_until_ns } => self.sleep(paused_until_ns),
        }
    }

    /// Puts the loop to sleep until an interrupt or the end of the pause.
    fn sleep(&mut self, paused_until_ns: Option<u64>) {
        let poller = self.tasks.poller;
        self.processor.block(poller);
        self.processor.set_level(poller, poller_level(self.mode));
        match paused_until_ns {
            Some(clock_ns) => {
                self.receive_paused = true;
                self.set_timer(Timer::ReceivePaused, self.virtual_time_of(clock_ns));
            }
            None if self.mode == Mode::Dedicated => self.processor.wake(poller),
            None => {
                self.nic.interrupt_enabled = true;
                self.raise_interrupt();
            }
        }
    }

    /// Cost of the next packet of a ring; `None` if the ring is empty.
    fn begin_packet(&mut self, ring: Ring) -> Option<u64> {
        match ring {
            Ring::Receive(_) => self.begin_receive(),
            Ring::Transmit(_) => {
                (self.nic.reclaimable() > 0).then_some(self.costs.transmit_done_ns)
            }
            Ring::Application(_) => self.begin_application(0),
        }
    }

    /// Cost of the next packet of the NIC; `None` if the ring is empty, or a whole ring of packets
    /// was refused in this turn.
    fn begin_receive(&mut self) -> Option<u64> {
        let packet = self.nic.first()?;
        if self.examines_at_poll() && self.admission_stage.is_some() {
            if self.polling.refused >= self.nic.capacity() {
                return None;
            }
            if !self.is_admitted(packet) {
                self.polling.refusing = true;
                self.polling.refused += 1;
                return Some(self.costs.refuse_ns);
            }
        }
        Some(self.costs.poll_receive_ns + self.detour_ns() + self.protocol_ns())
    }

    /// Finishes a piece of work of the polling loop.
    pub(super) fn finish_poller(&mut self) {
        if std::mem::take(&mut self.polling.checking_ring) {
            return;
        }
        if std::mem::take(&mut self.polling.refusing) {
            self.nic.take();
            return self.count_drop(DropPoint::Admission);
        }
        let Some((turn, taken)) = &mut self.polling.turn else { return };
        *taken += 1;
        match turn.ring {
            Ring::Receive(_) => {
                if let Some(packet) = self.nic.take() {
                    self.deliver(packet);
                }
            }
            Ring::Transmit(_) => {
                self.nic.reclaim(1);
                self.start_output();
            }
            Ring::Application(_) => self.finish_application(0),
        }
    }
}
