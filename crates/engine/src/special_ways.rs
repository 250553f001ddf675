//! Receiving otherwise than the plain way: with times of arrivals, through admission, with a capture.

use std::io;

use tidegate_device::Device;

use crate::Engine;
use crate::admission::Role;
use crate::arrival_times::ArrivalTimes;
use crate::clock::Clock;
use crate::receive_way::ReceiveWay;

impl Engine {
    /// Reads the clock when a burst has arrived, from now on; of large bursts when one of eight has. The
    /// device may wait for frames, so that the clock's last reading can be older.
    #[inline]
    pub fn measure_arrivals(&mut self) {
        if self.arrivals.is_none() {
            self.arrivals = Some(ArrivalTimes::from(self.now_ns));
            self.update_special_ways();
        }
    }

    /// Time at which the last burst arrived; `None` if that was not measured.
    #[inline]
    pub fn arrival_ns(&self) -> Option<u64> {
        self.arrivals?.last_ns
    }

    /// Clock of the engine, by which arrivals are measured.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Time now. The time of the round does not change.
    #[inline]
    pub fn time_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Notes a burst of `frames`, which may be none, if arrivals are measured.
    #[inline]
    pub(crate) fn note_arrival(&mut self, frames: usize) {
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.note(frames, || self.clock.now_ns());
        }
    }

    /// Receives, and notes the time of the arrival.
    #[inline(never)]
    pub(crate) fn receive_timed(&mut self, max: usize) -> io::Result<usize> {
        let frames = self.device.receive(&mut self.arena, &mut self.incoming, max)?;
        self.note_arrival(frames);
        Ok(frames)
    }

    /// Updates the way in which frames are received and sent.
    pub(crate) fn update_special_ways(&mut self) {
        let is_captured = self.captures.is_some();
        self.receive_way = match (&self.admission, is_captured, &self.arrivals) {
            (Role::None, false, None) => ReceiveWay::Plain,
            (Role::None, false, Some(_)) => ReceiveWay::Timed,
            _ => ReceiveWay::Special,
        };
        self.stack.set_captured(is_captured);
        if let Role::Leader(admitter) = &mut self.admission {
            admitter.keep_refused(is_captured);
        }
    }
}
