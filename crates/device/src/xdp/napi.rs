//! Busy polling of NAPI instances that are not associated with a socket.
//!
//! An AF_XDP socket polls the NAPI instance of its queue if the driver has told the kernel
//! which instance that is (mandatory since Linux 6.13). Some drivers did not, veth among
//! them. An `io_uring` can be given the instances by ID (Linux 6.13): a thread that waits on
//! the ring polls the instances on its own core, and stops when the wait ends.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::poll_ring::PollRing;
use crate::netlink::NetdevSocket;

/// Frames of a poll from which the next poll waits for more of them: larger bursts cost less for
/// each frame.
const SEVERAL_FRAMES: usize = 4;

/// Minimum frames of a productive short poll, which justifies longer polls.
const PRODUCTIVE_FRAMES: usize = 16;
/// Maximum number of consecutive productive polls required before a longer poll is tried again
/// after an unproductive longer poll.
const MAX_PRODUCTIVE_POLLS: u32 = 64;
/// Frames of a medium poll that is productive: one each microsecond.
const STEADY_FRAMES: usize = PollTime::Medium.us();
/// Frames in full bursts, beyond those of the last poll, from which a softirq is assumed to
/// feed the socket.
const SOFTIRQ_FRAMES: usize = 256;
/// Maximum of that threshold, after repeated polls to make the softirq yield. Exceeds a
/// socket's ring, so that the delivered frames can be received before more arrive.
const MAX_SOFTIRQ_FRAMES: usize = 4096;

/// Duration of a poll. The kernel takes eight packets at a time and checks the clock between
/// batches. A poll that takes its whole time also costs two timers, more than ten microseconds in
/// a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PollTime {
    /// Cost of polling an idle device. Where frames come one by one, ends with the first.
    Short,
    /// Steady traffic.
    Medium,
    /// The queue is refilled faster than it is emptied.
    Long,
}

impl PollTime {
    const ALL: [Self; 3] = [Self::Short, Self::Medium, Self::Long];

    const fn us(self) -> usize {
        match self {
            Self::Short => 10,
            Self::Medium => 60,
            Self::Long => 250,
        }
    }

    fn duration(self) -> Duration {
        Duration::from_micros(self.us() as u64)
    }
}

/// Runs the receive path of a driver inside its own system calls.
pub struct NapiPoller {
    /// One for each [`PollTime`].
    rings: [PollRing; 3],
    /// For short polls that end with the first frame.
    until_arrival: Option<PollRing>,
    /// IDs of the NAPI instances.
    napis: Vec<u32>,
    pacer: PollPacer,
}

/// Decides when to poll, and for how long.
#[derive(Debug)]
struct PollPacer {
    next: PollTime,
    /// Frames that the last poll delivered.
    last_frames: usize,
    /// Change from short to medium polls, and from medium to long ones.
    to_medium: Lengthening,
    to_long: Lengthening,
    /// Frames in 16 microseconds that the driver delivers while its queue has some, about: the
    /// most of any longer poll, which fades.
    full_rate: usize,
    /// Frames that the last poll delivered and that were not received yet.
    unread_frames: usize,
    /// Frames received in full bursts since the last poll, beyond the frames of that poll.
    softirq_frames: usize,
    /// Value of `softirq_frames` from which a poll is due.
    softirq_limit: usize,
}

/// Consecutive productive polls after which polls become longer.
#[derive(Debug)]
struct Lengthening {
    productive: u32,
    needed: u32,
}

impl Lengthening {
    fn new() -> Self {
        Self { productive: 0, needed: 1 }
    }

    /// Counts a poll. Returns true if the next one may be longer.
    fn count(&mut self, is_productive: bool) -> bool {
        self.productive = if is_productive { self.productive + 1 } else { 0 };
        self.productive >= self.needed
    }

    /// Records the result of a longer poll.
    fn record(&mut self, was_productive: bool) {
        let needed = if was_productive { 1 } else { 2 * self.needed };
        *self = Self { productive: 0, needed: needed.min(MAX_PRODUCTIVE_POLLS) };
    }
}

impl NapiPoller {
    /// Creates a poller for all NAPI instances of an interface.
    ///
    /// # Errors
    /// The kernel is older than 6.13, denies this process an `io_uring`, or reports no instance.
    pub fn for_interface(interface_index: u32) -> io::Result<Self> {
        Self::new(interface_index, None, &[])
    }

    /// Creates a poller for some NAPI instances of an interface, or for all, which deliver frames to
    /// `sockets`.
    ///
    /// # Errors
    /// As [`NapiPoller::for_interface`].
    pub(super) fn new(
        interface_index: u32,
        napis: Option<&[u32]>,
        sockets: &[BorrowedFd<'_>],
    ) -> io::Result<Self> {
        let of_interface = || {
            let napis = NetdevSocket::open()?.napis(interface_index)?;
            io::Result::Ok(napis.iter().map(|napi| napi.id).collect())
        };
        let napis = napis.map_or_else(of_interface, |napis| Ok(napis.to_vec()))?;
        if napis.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let [short, medium, long] =
            PollTime::ALL.map(|poll_time| PollRing::for_time(&napis, poll_time.duration()));
        let until_arrival = match sockets {
            [] => None,
            _ => Some(PollRing::until_arrival(&napis, PollTime::Short.duration(), sockets)?),
        };
        let rings = [short?, medium?, long?];
        Ok(Self { rings, until_arrival, napis, pacer: PollPacer::new() })
    }

    /// Polls other NAPI instances from now on: those that the driver has made in place of the
    /// former. To be called by the thread that polls.
    ///
    /// # Errors
    /// The kernel refuses; the poller is then of no use.
    pub(super) fn replace_napis(&mut self, napis: Vec<u32>) -> io::Result<()> {
        let mut rings = self.rings.iter().chain(&self.until_arrival);
        rings.try_for_each(|ring| ring.replace_napis(&self.napis, &napis))?;
        (self.napis, self.pacer) = (napis, PollPacer::new());
        Ok(())
    }

    /// Returns true if a poll is due after a burst of `frames` out of at most `quota`.
    pub(super) fn is_due(&mut self, frames: usize, quota: usize) -> bool {
        self.pacer.is_due(frames, quota)
    }

    /// Polls for a duration that depends on the result of the last poll. `pending` is the number of
    /// frames that were delivered and not received.
    ///
    /// # Errors
    /// The sandbox of the process denies the call.
    pub(super) fn poll(&mut self, mut pending: impl FnMut() -> usize) -> io::Result<()> {
        let before = pending();
        let has_polled = match &mut self.until_arrival {
            Some(ring) if self.pacer.ends_with_arrival() => ring.wait()?,
            _ => false,
        };
        if !has_polled {
            self.poll_for(self.pacer.next)?;
        }
        self.pacer.on_poll(before, pending());
        Ok(())
    }

    /// Polls for the shortest duration.
    ///
    /// # Errors
    /// As [`NapiPoller::poll`].
    pub(super) fn poll_short(&mut self) -> io::Result<()> {
        self.poll_for(PollTime::Short)
    }

    /// Polls for 250 microseconds: for a core that does nothing else.
    ///
    /// # Errors
    /// The sandbox of the process denies the call.
    pub fn poll_long(&mut self) -> io::Result<()> {
        self.poll_for(PollTime::Long)
    }

    fn poll_for(&mut self, poll_time: PollTime) -> io::Result<()> {
        self.rings[poll_time as usize].wait().map(drop)
    }
}

impl PollPacer {
    fn new() -> Self {
        let (next, softirq_limit) = (PollTime::Short, SOFTIRQ_FRAMES);
        Self {
            next,
            last_frames: 0,
            to_medium: Lengthening::new(),
            to_long: Lengthening::new(),
            full_rate: 0,
            unread_frames: 0,
            softirq_frames: 0,
            softirq_limit,
        }
    }

    fn on_poll(&mut self, before: usize, after: usize) {
        let received = after.saturating_sub(before);
        self.next = self.next_poll_time(received);
        self.last_frames = received;
        self.unread_frames += received;
    }

    /// True if the next poll is to end with the first frame: a frame that comes alone is not
    /// delayed.
    fn ends_with_arrival(&self) -> bool {
        self.next == PollTime::Short && self.last_frames < SEVERAL_FRAMES
    }

    /// Duration of the next poll, after a poll that delivered `received` frames.
    ///
    /// Many frames may be all that was pending: replies of peers that send the next request
    /// only after a reply. A longer poll then wastes time, and is tried less often.
    ///
    /// A long poll pays only while the queue never runs empty. Else it waits for frames that
    /// arrive more slowly than it takes them, and the queue overflows while they are served: at a
    /// load just above what the application can serve.
    fn next_poll_time(&mut self, received: usize) -> PollTime {
        use PollTime::{Long, Medium, Short};
        if self.next == Short {
            let may_lengthen = self.to_medium.count(received >= PRODUCTIVE_FRAMES);
            return if may_lengthen { Medium } else { Short };
        }
        let never_ran_empty = self.learn_rate(received);
        let is_steady = received >= STEADY_FRAMES;
        self.to_medium.record(is_steady);
        let is_long = match self.next {
            Long => {
                self.to_long.record(never_ran_empty);
                never_ran_empty
            }
            _ => self.to_long.count(is_steady && never_ran_empty),
        };
        match (is_long, is_steady) {
            (true, _) => Long,
            (false, true) => Medium,
            (false, false) => Short,
        }
    }

    /// Learns the rate of a full queue from a longer poll. Returns true if the queue never ran
    /// empty in it, about.
    fn learn_rate(&mut self, received: usize) -> bool {
        let rate = received * 16 / self.next.us();
        self.full_rate = rate.max(self.full_rate - self.full_rate.div_ceil(64));
        received > 0 && 4 * rate >= 3 * self.full_rate
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

    #[test]
    fn poll_ends_with_a_frame_where_frames_come_one_by_one() {
        let mut pacer = PollPacer::new();
        for (received, ends) in [(1, true), (SEVERAL_FRAMES, false), (0, true), (100, false)] {
            pacer.on_poll(0, received);
            assert_eq!(pacer.ends_with_arrival(), ends, "{received}");
        }
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

    /// Poll times after polls that receive these numbers of frames.
    fn poll_times(pacer: &mut PollPacer, received: &[usize]) -> Vec<PollTime> {
        let poll = |&frames: &usize| {
            pacer.on_poll(7, 7 + frames);
            pacer.next
        };
        received.iter().map(poll).collect()
    }

    #[test]
    fn polls_longer_while_the_queue_never_runs_empty() {
        use PollTime::{Long, Medium, Short};
        let mut pacer = PollPacer::new();
        let received = [PRODUCTIVE_FRAMES - 1, PRODUCTIVE_FRAMES, 240, 1_000, 900, 700];
        let expected = [Short, Medium, Long, Long, Long, Medium];
        assert_eq!(poll_times(&mut pacer, &received), expected, "700 in 250 us: it ran empty");
        assert_eq!(poll_times(&mut pacer, &[59, 16]), [Short, Short], "less than one each us");
    }

    /// A load just above what the application can serve: each poll finds a full queue of 256
    /// frames, and one further frame each microsecond.
    #[test]
    fn long_polls_become_rare_while_frames_arrive_more_slowly_than_they_are_taken() {
        let mut pacer = PollPacer::new();
        poll_times(&mut pacer, &[PRODUCTIVE_FRAMES]);
        let mut long = 0;
        for _ in 0..1_000 {
            long += usize::from(pacer.next == PollTime::Long);
            let received = 256 + pacer.next.us();
            poll_times(&mut pacer, &[received]);
            assert_ne!(pacer.next, PollTime::Short);
        }
        assert!(long < 25, "{long} of 1,000");
        for _ in 0..=MAX_PRODUCTIVE_POLLS {
            let received = 5 * pacer.next.us();
            poll_times(&mut pacer, &[received]);
        }
        assert_eq!(pacer.next, PollTime::Long, "the queue is refilled faster than it is emptied");
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
        pacer.on_poll(0, PRODUCTIVE_FRAMES);
        pacer.on_poll(0, PRODUCTIVE_FRAMES);
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
