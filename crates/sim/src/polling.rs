//! The polling loop: what the gate says, done.

use tidegate_gate::{Mode, Next, Ring, Turn};

use crate::core::{Core, Timer, poller_level};
use crate::processor::Level;

/// Where the polling loop is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Polling {
    /// The turn that is being served, and what was taken in it.
    turn: Option<(Turn, u32)>,
    /// The turn has just begun: the ring is being looked at.
    looks: bool,
}

impl Core {
    /// Gives the polling loop its next piece of work, or lets it sleep.
    pub(crate) fn poll(&mut self) {
        loop {
            let Some((turn, taken)) = self.polling.turn else { return self.ask_gate() };
            let goes_on = taken < turn.quota && !self.is_held_in(turn);
            let cost_ns = if goes_on { self.begin_packet(turn.ring) } else { None };
            if let Some(cost_ns) = cost_ns {
                return self.processor.give(self.tasks.poller, cost_ns);
            }
            self.polling.turn = None;
            let clock_ns = self.clock_ns();
            self.gate.on_served(turn, taken, clock_ns);
            if self.has_work(turn.ring) {
                self.gate.on_ready(turn.ring);
            }
        }
    }

    /// A queue that fills ends the turn: a quota may be longer than the queue.
    fn is_held_in(&mut self, turn: Turn) -> bool {
        let clock_ns = self.clock_ns();
        matches!(turn.ring, Ring::Receive(_)) && self.gate.held_until(clock_ns).is_some()
    }

    fn has_work(&self, ring: Ring) -> bool {
        matches!(ring, Ring::Receive(_)) && self.card.waiting() > 0
    }

    fn ask_gate(&mut self) {
        let clock_ns = self.clock_ns();
        match self.gate.next(clock_ns) {
            Next::Serve(turn) => {
                self.polling = Polling { turn: Some((turn, 0)), looks: true };
                self.processor.give(self.tasks.poller, self.costs.poll_ns);
            }
            // It goes to the end of the programs' order, and asks again when
            // its turn comes.
            Next::Yield => self.processor.set_level(self.tasks.poller, Level::Program),
            Next::Wait { held_until_ns } => self.sleep(held_until_ns),
        }
    }

    /// Nothing may be done now.
    fn sleep(&mut self, held_until_ns: Option<u64>) {
        let poller = self.tasks.poller;
        self.processor.block(poller);
        self.processor.set_level(poller, poller_level(self.mode));
        match held_until_ns {
            Some(clock_ns) => {
                self.held = true;
                self.set_timer(Timer::Held, self.when_ns(clock_ns));
            }
            None if self.mode == Mode::Dedicated => self.processor.wake(poller),
            None => {
                self.card.enabled = true;
                self.raise();
            }
        }
    }

    /// What the next packet of a ring costs; `None` when there is none.
    fn begin_packet(&mut self, ring: Ring) -> Option<u64> {
        match ring {
            Ring::Receive(_) => {
                (self.card.waiting() > 0).then(|| self.costs.poll_receive_ns + self.protocol_ns())
            }
            Ring::Transmit(_) => (self.card.sent() > 0).then_some(self.costs.transmit_done_ns),
            Ring::Application(_) => self.begin_application(0),
        }
    }

    /// A piece of the polling loop's work is done.
    pub(crate) fn finish_poller(&mut self) {
        if std::mem::take(&mut self.polling.looks) {
            return;
        }
        let Some((turn, taken)) = &mut self.polling.turn else { return };
        *taken += 1;
        match turn.ring {
            Ring::Receive(_) => {
                if let Some(packet) = self.card.take() {
                    self.deliver(packet);
                }
            }
            Ring::Transmit(_) => {
                self.card.reclaim(1);
                self.start_output();
            }
            Ring::Application(_) => self.finish_application(0),
        }
    }
}
