//! Busy polling of NAPI instances that no socket is tied to.
//!
//! An AF_XDP socket polls the NAPI instance of its queue, if the driver has
//! told the kernel which one that is (since Linux 6.13 it has to). Some have
//! not, veth among them. An `io_uring` can be told the instances by number
//! (Linux 6.13): whoever waits on it polls them, on his own core, and stops
//! when he stops waiting. Nothing is ever submitted to the ring.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::netdev::Netdev;
use super::sys;

/// How long a look at the device takes: what an idle one costs.
const LOOK_US: u32 = 10;
/// How long a turn takes when there is much to do. The kernel takes eight
/// packets at a time and looks at the time in between; a call costs two timers
/// and a change of context besides, more than a look.
const TURN_US: u32 = 60;
/// So many frames from one call are much to do.
const MUCH: usize = 16;
/// So many frames in full bursts without a call mean that another core feeds the
/// socket: more than a call brings.
const FED_FRAMES: usize = 256;

/// Runs the receive path of a device inside its own calls.
pub(super) struct NapiPoller {
    look: OwnedFd,
    turn: OwnedFd,
    pace: Pace,
}

/// When to poll, and for how long.
#[derive(Debug, Default)]
struct Pace {
    /// The last call brought much.
    busy: bool,
    /// Frames that came in full bursts since the last call.
    fed: usize,
}

impl NapiPoller {
    /// A poller for all NAPI instances of an interface.
    ///
    /// # Errors
    /// When the kernel is older than 6.13, does not let this process have an
    /// `io_uring`, or knows of no instance.
    pub(super) fn of(interface_index: u32) -> io::Result<Self> {
        let napis = Netdev::open()?.napis(interface_index)?;
        if napis.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let ring = |us| {
            let ring = sys::uring()?;
            sys::uring_poll_napis(ring.as_fd(), us)?;
            napis.iter().try_for_each(|napi| sys::uring_add_napi(ring.as_fd(), napi.id))?;
            io::Result::Ok(ring)
        };
        Ok(Self { look: ring(LOOK_US)?, turn: ring(TURN_US)?, pace: Pace::default() })
    }

    /// Whether to poll, when a burst of `frames` has been taken of up to
    /// `quota`.
    pub(super) fn is_due(&mut self, frames: usize, quota: usize) -> bool {
        self.pace.is_due(frames, quota)
    }

    /// Polls for a moment, longer if there was much to do the last time.
    ///
    /// # Errors
    /// Never in practice: the rings are ours alone.
    pub(super) fn poll(&mut self) -> io::Result<()> {
        if self.pace.busy {
            sys::uring_wait(self.turn.as_fd(), TURN_US * 1000)
        } else {
            self.look()
        }
    }

    /// Polls as shortly as can be.
    ///
    /// # Errors
    /// As [`NapiPoller::poll`].
    pub(super) fn look(&self) -> io::Result<()> {
        sys::uring_wait(self.look.as_fd(), LOOK_US * 1000)
    }

    /// The last call brought so many frames.
    pub(super) fn on_frames(&mut self, frames: usize) {
        self.pace.busy = frames >= MUCH;
    }
}

impl Pace {
    fn is_due(&mut self, frames: usize, quota: usize) -> bool {
        if frames == quota {
            // Frames come without us: the softirq of another core polls the
            // device, and will as long as it never runs empty. It gives way
            // to whoever asks.
            self.fed += frames;
            let due = self.fed >= FED_FRAMES;
            self.fed %= FED_FRAMES;
            return due;
        }
        self.fed = 0;
        frames == 0 || self.busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_socket_is_a_reason_to_poll() {
        let mut pace = Pace::default();
        assert!(pace.is_due(0, 64));
        assert!(!pace.is_due(1, 64), "a lone frame does not wait for more");
        pace.busy = true;
        assert!(pace.is_due(1, 64), "more have come since");
    }

    #[test]
    fn a_socket_that_others_feed_is_taken_over() {
        let mut pace = Pace::default();
        let due: Vec<bool> = (0..8).map(|_| pace.is_due(64, 64)).collect();
        assert_eq!(due, [false, false, false, true, false, false, false, true]);
        assert!(!pace.is_due(64, 64));
        pace.is_due(0, 64);
        assert!(!pace.is_due(64, 64) && !pace.is_due(64, 64) && !pace.is_due(64, 64));
        assert!(pace.is_due(64, 64));
        let small = (0..512).filter(|_| pace.is_due(5, 5)).count();
        assert_eq!(small, 10, "by frames, however few a burst has");
    }
}
