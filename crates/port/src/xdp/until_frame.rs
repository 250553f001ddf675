//! Busy polling until a frame is let in.
//!
//! While nearly all that comes is refused, the program on the interface is
//! where the work is. A port that looked now and then would leave the device
//! alone in between, and a ring of a few hundred frames is full in some
//! microseconds: what comes next is lost unseen, whoever sent it. So the port
//! looks without a break, and is called away by the first frame that is let in.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use io_uring::IoUring;
use io_uring::types::{Napi, NapiTracking, SubmitArgs, Timespec};

use super::netdev::Netdev;
use super::sys;

/// How long one call polls when nothing is let in.
const POLL_US: u32 = 100;

/// Runs the receive path of a device inside its own calls until a frame came.
pub(super) struct FramePoller {
    ring: IoUring,
    /// Whether the ring will say when the socket of this number is readable.
    watched: Vec<bool>,
    /// When the last call ended.
    ended: Instant,
    worked_ns: u64,
}

/// A longer time between two calls was not spent serving frames.
const WORK_MAX_NS: u64 = 100_000_000;

impl FramePoller {
    /// A poller for all NAPI instances of an interface, which feed so many
    /// sockets.
    ///
    /// # Errors
    /// When the kernel is older than 6.13, does not let this process have an
    /// `io_uring`, or knows of no instance.
    pub(super) fn of(interface_index: u32, sockets: usize) -> io::Result<Self> {
        let napis = Netdev::open()?.napis(interface_index)?;
        if napis.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let ring = IoUring::new(sockets.next_power_of_two() as u32)?;
        let mut settings = Napi::new()
            .set_busy_poll_timeout(POLL_US)
            .set_prefer_busy_poll(true)
            .set_tracking(NapiTracking::Static);
        ring.submitter().register_napi(&mut settings)?;
        for napi in napis {
            ring.submitter().register_napi_add_id(napi.id)?;
        }
        Ok(Self { ring, watched: vec![false; sockets], ended: Instant::now(), worked_ns: 0 })
    }

    /// Polls until a frame has come for one of the sockets, or for a while.
    ///
    /// # Errors
    /// Never in practice: the ring is ours alone.
    pub(super) fn poll<'fd>(
        &mut self,
        sockets: impl Iterator<Item = BorrowedFd<'fd>>,
    ) -> io::Result<()> {
        // The ring says only once that a socket is readable.
        for said in self.ring.completion() {
            if let Some(watched) = self.watched.get_mut(said.user_data() as usize) {
                *watched = false;
            }
        }
        for (number, fd) in sockets.enumerate() {
            let Some(watched) = self.watched.get_mut(number) else { break };
            *watched = *watched || sys::uring_watch(&mut self.ring, fd, number as u64);
        }
        let work_ns = self.ended.elapsed().as_nanos() as u64;
        self.worked_ns += if work_ns < WORK_MAX_NS { work_ns } else { 0 };
        let waited = self.wait();
        self.ended = Instant::now();
        waited
    }

    /// The time between calls, in nanoseconds.
    pub(super) fn worked_ns(&self) -> u64 {
        self.worked_ns
    }

    fn wait(&self) -> io::Result<()> {
        let timeout = Timespec::new().nsec(POLL_US * 1000);
        let arguments = SubmitArgs::new().timespec(&timeout);
        match self.ring.submitter().submit_with_args(1, &arguments) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR) => Ok(()),
                _ => Err(error),
            },
        }
    }
}
