//! Start and pause of receiving: the interrupt of the NIC, and the pauses of the gate.

use super::SimCore;
use crate::timers::{NEVER_NS, Timer};

impl SimCore {
    /// Raises the NIC's interrupt if one is needed, now or as soon as moderation allows.
    #[inline]
    pub(super) fn raise_interrupt(&mut self) {
        if !self.nic.should_interrupt() {
            return;
        }
        let now_ns = self.now_ns();
        let allowed_ns = self.virtual_time_of(self.gate.next_interrupt_ns(self.clock_ns()));
        let at_ns = allowed_ns.max(self.nic.next_interrupt_ns());
        if at_ns <= now_ns {
            self.nic.on_interrupt_raised(now_ns);
            self.processor.wake(self.tasks.interrupt);
        } else {
            self.set_timer(Timer::Interrupt, at_ns);
        }
    }

    /// Resumes receiving if the gate no longer pauses it.
    #[inline]
    pub(super) fn resume_if_not_paused(&mut self) {
        let clock_ns = self.clock_ns();
        if self.receive_paused && self.gate.paused_until(clock_ns).is_none() {
            self.resume_receiving();
        }
    }

    pub(super) fn resume_receiving(&mut self) {
        self.receive_paused = false;
        self.set_timer(Timer::ReceivePaused, NEVER_NS);
        self.processor.wake(self.tasks.poller);
    }
}
