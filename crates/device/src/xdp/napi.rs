//! Busy polling of NAPI instances that are not associated with a socket.
//!
//! An AF_XDP socket polls the NAPI instance of its queue if the driver has told the kernel
//! which instance that is (mandatory since Linux 6.13). Some drivers did not, veth among
//! them. An `io_uring` can be given the instances by ID (Linux 6.13): a thread that waits on
//! the ring polls the instances on its own core, and stops when the wait ends. Nothing is
//! ever submitted to the ring.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::sys;
use crate::netlink::NetdevSocket;

/// Minimum frames of a productive short poll, which justifies longer polls.
const PRODUCTIVE_FRAMES: usize = 16;
/// Maximum number of consecutive productive short polls required before a longer poll is
/// tried again after an unproductive longer poll.
const MAX_PRODUCTIVE_POLLS: u32 = 64;
/// Frames in full bursts, beyond those of the last poll, from which a softirq is assumed to
/// feed the socket.
const SOFTIRQ_FRAMES: usize = 256;
/// Maximum of that threshold, after repeated polls to make the softirq yield. Exceeds a
/// socket's ring, so that the delivered frames can be received before more arrive.
const MAX_SOFTIRQ_FRAMES: usize = 4096;

/// Duration of a poll. The kernel takes eight packets at a time and checks the clock between
/// batches. Each poll also costs two timers, which take more than ten microseconds in a
/// virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PollTime {
    /// Cost of polling an idle device.
    Short,
    /// Steady traffic.
    Medium,
    /// Arrivals exceed what is received: queued frames are late already.
    Long,
}

impl PollTime {
    const ALL: [Self; 3] = [Self::Short, Self::Medium, Self::Long];

    const fn us(self) -> u32 {
        match self {
            Self::Short => 10,
            Self::Medium => 60,
            Self::Long => 250,
        }
    }
}

/// Runs the receive path of a driver inside its own system calls.
pub struct NapiPoller {
    /// One `io_uring` for each [`PollTime`].
    rings: [OwnedFd; 3],
    pacer: PollPacer,
}

/// Decides when to poll, and for how long.
#[derive(Debug)]
struct PollPacer {
    next: PollTime,
    /// Consecutive productive short polls, and the number required to poll for longer.
    productive_polls: u32,
    productive_polls_needed: u32,
    /// Frames that the last poll delivered and that were not received yet.
    unread_frames: usize,
    /// Frames received in full bursts since the last poll, beyond the frames of that poll.
    softirq_frames: usize,
    /// Value of `softirq_frames` from which a poll is due.
    softirq_limit: usize,
}

impl NapiPoller {
    /// Creates a poller for all NAPI instances of an interface.
    ///
    /// # Errors
    /// The kernel is older than 6.13, denies this process an `io_uring`, or reports no instance.
    pub fn for_interface(interface_index: u32) -> io::Result<Self> {
        let napis = NetdevSocket::open()?.napis(interface_index)?;
        if napis.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let ring = |poll_time: PollTime| {
            let ring = sys::create_uring()?;
            sys::uring_register_napi(ring.as_fd(), poll_time.us())?;
            napis.iter().try_for_each(|napi| sys::uring_add_napi(ring.as_fd(), napi.id))?;
            io::Result::Ok(ring)
        };
        let [short, medium, long] = PollTime::ALL.map(ring);
        Ok(Self { rings: [short?, medium?, long?], pacer: PollPacer::new() })
    }

    /// Returns true if a poll is due after a burst of `frames` out of at most `quota`.
    pub(super) fn is_due(&mut self, frames: usize, quota: usize) -> bool {
        self.pacer.is_due(frames, quota)
    }

    /// Polls for a duration that depends on the result of the last poll.
    ///
    /// # Errors
    /// None in practice: the rings belong to this poller alone.
    pub(super) fn poll(&mut self) -> io::Result<()> {
        self.poll_for(self.pacer.next)
    }

    /// Polls for the shortest duration.
    ///
    /// # Errors
    /// None in practice: the rings belong to this poller alone.
    pub(super) fn poll_short(&self) -> io::Result<()> {
        self.poll_for(PollTime::Short)
    }

    /// Polls for 250 microseconds: for a core that does nothing else.
    ///
    /// # Errors
    /// None in practice: the rings belong to this poller alone.
    pub fn poll_long(&self) -> io::Result<()> {
        self.poll_for(PollTime::Long)
    }

    fn poll_for(&self, poll_time: PollTime) -> io::Result<()> {
        sys::uring_wait(self.rings[poll_time as usize].as_fd(), poll_time.us() * 1000)
    }

    /// Records the pending frames before and after a poll.
    pub(super) fn on_poll(&mut self, before: usize, after: usize) {
        self.pacer.on_poll(before, after);
    }
}

impl PollPacer {
    fn new() -> Self {
        let (next, softirq_limit) = (PollTime::Short, SOFTIRQ_FRAMES);
        Self {
            next,
            productive_polls: 0,
            productive_polls_needed: 1,
            unread_frames: 0,
            softirq_frames: 0,
            softirq_limit,
        }
    }

    fn on_poll(&mut self, before: usize, after: usize) {
        let received = after.saturating_sub(before);
        self.next = self.next_poll_time(received);
        self.unread_frames += received;
    }

    /// Duration of the next poll, after a poll that delivered `received` frames.
    ///
    /// Many frames may be all that was pending: replies of peers that send the next request
    /// only after a reply. A longer poll then wastes time, and is tried less often.
    fn next_poll_time(&mut self, received: usize) -> PollTime {
        if self.next == PollTime::Short {
            self.productive_polls =
                if received >= PRODUCTIVE_FRAMES { self.productive_polls + 1 } else { 0 };
            return if received >= PollTime::Medium.us() as usize {
                PollTime::Long
            } else if self.productive_polls >= self.productive_polls_needed {
                PollTime::Medium
            } else {
                PollTime::Short
            };
        }
        self.productive_polls = 0;
        if received >= self.next.us() as usize {
            // A frame each microsecond, or more: the queue never ran empty.
            self.productive_polls_needed = 1;
            PollTime::Long
        } else if received >= PollTime::Medium.us() as usize {
            PollTime::Medium
        } else {
            self.productive_polls_needed =
                (2 * self.productive_polls_needed).min(MAX_PRODUCTIVE_POLLS);
            PollTime::Short
        }
    }

    fn is_due(&mut self, frames: usize, quota: usize) -> bool {
        let expected = self.unread_frames.min(frames);
        self.unread_frames -= expected;
        if frames < quota {
            (self.unread_frames, self.softirq_frames, self.softirq_limit) = (0, 0, SOFTIRQ_FRAMES);
            return frames == 0 || self.next != PollTime::Short;
        }
        // Further frames arrive without polls of this device: the softirq of some core polls the
        // driver, and continues as long as the queue never runs empty. The softirq yields to a
        // poll. Too frequent polls would deliver more frames than are received.
        self.softirq_frames += frames - expected;
        let due = self.softirq_frames >= self.softirq_limit;
        if due {
            self.softirq_frames = 0;
            self.softirq_limit = (2 * self.softirq_limit).min(MAX_SOFTIRQ_FRAMES);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_when_the_socket_is_empty() {
        let mut pacer = PollPacer::new();
        assert!(pacer.is_due(0, 64));
        assert!(!pacer.is_due(1, 64), "a lone frame is not delayed by a poll");
        pacer.on_poll(0, PRODUCTIVE_FRAMES);
        assert!(pacer.is_due(1, 64), "the last poll was productive");
    }

    /// Numbers of the bursts after which a poll was due, out of `bursts`.
    fn due(pacer: &mut PollPacer, bursts: usize, quota: usize) -> Vec<usize> {
        (1..=bursts).filter(|_| pacer.is_due(quota, quota)).collect()
    }

    #[test]
    fn polls_when_a_softirq_feeds_the_socket() {
        let mut pacer = PollPacer::new();
        assert_eq!(due(&mut pacer, 200, 64), [4, 12, 28, 60, 124, 188]);
        assert!(!pacer.is_due(1, 64));
        assert_eq!(due(&mut pacer, 8, 64), [4], "the limit is reset after a partial burst");
        pacer.is_due(1, 64);
        assert_eq!(due(&mut pacer, 100, 5), [52], "counts frames, not bursts");
    }

    #[test]
    fn polls_longer_while_the_queue_never_runs_empty() {
        use PollTime::{Long, Medium, Short};
        let mut pacer = PollPacer::new();
        for (received, next) in [
            (PRODUCTIVE_FRAMES - 1, Short),
            (PRODUCTIVE_FRAMES, Medium),
            (60, Long),
            (250, Long),
            (249, Medium),
            (400, Long),
            (0, Short),
            (60, Long),
        ] {
            pacer.on_poll(7, 7 + received);
            assert_eq!(pacer.next, next, "{received}");
        }
    }

    #[test]
    fn backs_off_after_an_unproductive_longer_poll() {
        let mut pacer = PollPacer::new();
        let mut longer = Vec::new();
        for call in 0..200 {
            if pacer.next != PollTime::Short {
                longer.push(call);
            }
            pacer.on_poll(0, 30);
        }
        assert_eq!(longer, [1, 4, 9, 18, 35, 68, 133, 198]);
        pacer.on_poll(0, 0);
        (0..MAX_PRODUCTIVE_POLLS).for_each(|_| pacer.on_poll(0, PRODUCTIVE_FRAMES));
        assert_eq!(pacer.next, PollTime::Medium);
        pacer.on_poll(0, 60);
        pacer.on_poll(0, 0);
        (0..2).for_each(|_| pacer.on_poll(0, PRODUCTIVE_FRAMES));
        assert_eq!(
            pacer.next,
            PollTime::Medium,
            "the back-off was reset by a productive longer poll"
        );
    }

    #[test]
    fn frames_of_the_last_poll_are_not_counted_as_softirq_frames() {
        let mut pacer = PollPacer::new();
        pacer.on_poll(0, 400);
        assert_eq!(due(&mut pacer, 80, 5), []);
        assert_eq!(due(&mut pacer, 60, 5), [52], "these frames arrived without a poll");
        let mut pacer = PollPacer::new();
        pacer.on_poll(2000, 2000);
        assert_eq!(
            due(&mut pacer, 8, 64),
            [4],
            "the poll found the NAPI instance owned by a softirq"
        );
    }
}
