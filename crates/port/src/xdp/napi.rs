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

/// So many frames from one look are a reason to poll for longer.
const MUCH: usize = 16;
/// So many looks in a row must have brought as many, at most, before a longer call is
/// tried again that was in vain.
const LOOKS_MAX: u32 = 64;
/// So many frames in full bursts, besides those that the last call brought, mean
/// that a softirq feeds the socket.
const FED_FRAMES: usize = 256;
/// The same, when it was asked several times to give way. More than a socket
/// holds, so that what it was fed can be taken before it is fed more.
const FED_FRAMES_MAX: usize = 4096;

/// How long a call polls. The kernel takes eight packets at a time and looks at
/// the time in between; a call costs two timers besides, which in a virtual
/// machine take more than ten microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    /// What an idle device costs.
    Look,
    /// Something comes all the time.
    Turn,
    /// More comes than is taken: what waits is late already.
    Long,
}

impl Length {
    const ALL: [Self; 3] = [Self::Look, Self::Turn, Self::Long];

    const fn us(self) -> u32 {
        match self {
            Self::Look => 10,
            Self::Turn => 60,
            Self::Long => 250,
        }
    }
}

/// Runs the receive path of a device inside its own calls.
pub struct NapiPoller {
    /// One for each [`Length`].
    rings: [OwnedFd; 3],
    pace: Pace,
}

/// When to poll, and for how long.
#[derive(Debug)]
struct Pace {
    next: Length,
    /// Looks in a row that brought much, and how many of them are a reason to poll for
    /// longer.
    looks: u32,
    enough_looks: u32,
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
    pub fn of(interface_index: u32) -> io::Result<Self> {
        let napis = Netdev::open()?.napis(interface_index)?;
        if napis.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let ring = |length: Length| {
            let ring = sys::uring()?;
            sys::uring_poll_napis(ring.as_fd(), length.us())?;
            napis.iter().try_for_each(|napi| sys::uring_add_napi(ring.as_fd(), napi.id))?;
            io::Result::Ok(ring)
        };
        let [look, turn, long] = Length::ALL.map(ring);
        Ok(Self { rings: [look?, turn?, long?], pace: Pace::new() })
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
        self.poll_for(self.pace.next)
    }

    /// Polls as shortly as can be.
    ///
    /// # Errors
    /// Never in practice: the rings are ours alone.
    pub(super) fn look(&self) -> io::Result<()> {
        self.poll_for(Length::Look)
    }

    /// Polls for 250 microseconds: for a core that does nothing else.
    ///
    /// # Errors
    /// Never in practice: the rings are ours alone.
    pub fn poll_long(&self) -> io::Result<()> {
        self.poll_for(Length::Long)
    }

    fn poll_for(&self, length: Length) -> io::Result<()> {
        sys::uring_wait(self.rings[length as usize].as_fd(), length.us() * 1000)
    }

    /// So many frames waited before a call, and so many after it.
    pub(super) fn on_call(&mut self, before: usize, after: usize) {
        self.pace.on_call(before, after);
    }
}

impl Pace {
    fn new() -> Self {
        let (next, patience) = (Length::Look, FED_FRAMES);
        Self { next, looks: 0, enough_looks: 1, brought: 0, fed: 0, patience }
    }

    fn on_call(&mut self, before: usize, after: usize) {
        let brought = after.saturating_sub(before);
        self.next = self.length_after(brought);
        self.brought += brought;
    }

    /// How long to poll after a call that brought so many frames.
    ///
    /// Many frames may be all that waited: the answers of peers who ask nothing before
    /// they are answered. Then a longer call is time lost, and is tried more rarely.
    fn length_after(&mut self, brought: usize) -> Length {
        if self.next == Length::Look {
            self.looks = if brought >= MUCH { self.looks + 1 } else { 0 };
            return if brought >= Length::Turn.us() as usize {
                Length::Long
            } else if self.looks >= self.enough_looks {
                Length::Turn
            } else {
                Length::Look
            };
        }
        self.looks = 0;
        if brought >= self.next.us() as usize {
            // A frame each microsecond, or more: the device never ran empty.
            self.enough_looks = 1;
            Length::Long
        } else if brought >= Length::Turn.us() as usize {
            Length::Turn
        } else {
            self.enough_looks = (2 * self.enough_looks).min(LOOKS_MAX);
            Length::Look
        }
    }

    fn is_due(&mut self, frames: usize, quota: usize) -> bool {
        let expected = self.brought.min(frames);
        self.brought -= expected;
        if frames < quota {
            (self.brought, self.fed, self.patience) = (0, 0, FED_FRAMES);
            return frames == 0 || self.next != Length::Look;
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
    fn a_device_that_never_runs_empty_is_polled_for_longer() {
        use Length::{Long, Look, Turn};
        let mut pace = Pace::new();
        for (brought, next) in [
            (MUCH - 1, Look),
            (MUCH, Turn),
            (60, Long),
            (250, Long),
            (249, Turn),
            (400, Long),
            (0, Look),
            (60, Long),
        ] {
            pace.on_call(7, 7 + brought);
            assert_eq!(pace.next, next, "{brought}");
        }
    }

    #[test]
    fn a_longer_call_in_vain_is_tried_again_later() {
        let mut pace = Pace::new();
        let mut longer = Vec::new();
        for call in 0..200 {
            if pace.next != Length::Look {
                longer.push(call);
            }
            pace.on_call(0, 30);
        }
        assert_eq!(longer, [1, 4, 9, 18, 35, 68, 133, 198]);
        pace.on_call(0, 0);
        (0..LOOKS_MAX).for_each(|_| pace.on_call(0, MUCH));
        assert_eq!(pace.next, Length::Turn);
        pace.on_call(0, 60);
        pace.on_call(0, 0);
        (0..2).for_each(|_| pace.on_call(0, MUCH));
        assert_eq!(pace.next, Length::Turn, "it was right once");
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
