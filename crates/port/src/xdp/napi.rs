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
/// So many frames in full bursts, besides those that the last call brought, mean
/// that a softirq feeds the socket.
const FED_FRAMES: usize = 256;
/// The same, when it was asked several times to give way. More than a socket
/// holds, so that what it was fed can be taken before it is fed more.
const FED_FRAMES_MAX: usize = 4096;

/// Runs the receive path of a device inside its own calls.
pub(super) struct NapiPoller {
    look: OwnedFd,
    turn: OwnedFd,
    pace: Pace,
}

/// When to poll, and for how long.
#[derive(Debug)]
struct Pace {
    /// The last call brought much.
    busy: bool,
    /// Frames that the last call brought and that were not taken yet.
    brought: usize,
    /// Frames that came in full bursts since then.
    fed: usize,
    /// How many of them are a reason to call.
    patience: usize,
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
        Ok(Self { look: ring(LOOK_US)?, turn: ring(TURN_US)?, pace: Pace::new() })
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

    /// So many frames waited before a call, and so many after it.
    pub(super) fn on_call(&mut self, before: usize, after: usize) {
        self.pace.on_call(before, after);
    }
}

impl Pace {
    fn new() -> Self {
        Self { busy: false, brought: 0, fed: 0, patience: FED_FRAMES }
    }

    fn on_call(&mut self, before: usize, after: usize) {
        let brought = after.saturating_sub(before);
        self.busy = brought >= MUCH;
        self.brought += brought;
    }

    fn is_due(&mut self, frames: usize, quota: usize) -> bool {
        let expected = self.brought.min(frames);
        self.brought -= expected;
        if frames < quota {
            (self.brought, self.fed, self.patience) = (0, 0, FED_FRAMES);
            return frames == 0 || self.busy;
        }
        // What comes besides comes without us: the softirq of some core polls
        // the device, and will as long as it never runs empty. It gives way to
        // whoever asks. Asked too often, the device would hand over more than
        // is taken.
        self.fed += frames - expected;
        let due = self.fed >= self.patience;
        if due {
            self.fed = 0;
            self.patience = (2 * self.patience).min(FED_FRAMES_MAX);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_socket_is_a_reason_to_poll() {
        let mut pace = Pace::new();
        assert!(pace.is_due(0, 64));
        assert!(!pace.is_due(1, 64), "a lone frame does not wait for more");
        pace.on_call(0, MUCH);
        assert!(pace.is_due(1, 64), "more have come since");
    }

    /// The bursts after which it was due, of so many.
    fn due(pace: &mut Pace, bursts: usize, quota: usize) -> Vec<usize> {
        (1..=bursts).filter(|_| pace.is_due(quota, quota)).collect()
    }

    #[test]
    fn a_socket_that_others_feed_is_taken_over() {
        let mut pace = Pace::new();
        assert_eq!(due(&mut pace, 200, 64), [4, 12, 28, 60, 124, 188]);
        assert!(!pace.is_due(1, 64));
        assert_eq!(due(&mut pace, 8, 64), [4], "patience begins anew when it was empty");
        pace.is_due(1, 64);
        assert_eq!(due(&mut pace, 100, 5), [52], "by frames, however few a burst has");
    }

    #[test]
    fn what_a_call_brought_is_taken_first() {
        let mut pace = Pace::new();
        pace.on_call(0, 400);
        assert_eq!(due(&mut pace, 80, 5), []);
        assert_eq!(due(&mut pace, 60, 5), [52], "these came without one");
        let mut pace = Pace::new();
        pace.on_call(2000, 2000);
        assert_eq!(due(&mut pace, 8, 64), [4], "a call that found the device taken");
    }
}
