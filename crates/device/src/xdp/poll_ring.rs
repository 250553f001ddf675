//! An `io_uring` whose waits poll NAPI instances.
//!
//! Its requests are restricted to those of this module: a ring is a way around filters of system
//! calls.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::types::{Napi, NapiTracking, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};

use super::sys;

/// `IORING_REGISTER_NAPI` of `linux/io_uring.h`.
const REGISTER_NAPI: u8 = 27;

/// Ring of one poll time.
pub(super) struct PollRing {
    ring: IoUring,
    poll_time: Timespec,
    /// Sockets whose frames end a wait.
    sockets: Vec<OwnedFd>,
    is_enabled: bool,
}

impl PollRing {
    /// Creates a ring whose waits take `poll_time`.
    ///
    /// # Errors
    /// The kernel is older than 6.13, or denies this process an `io_uring`.
    pub(super) fn for_time(napis: &[u32], poll_time: Duration) -> io::Result<Self> {
        let mut ring = Self::new(napis, poll_time, Vec::new())?;
        ring.enable()?;
        Ok(ring)
    }

    /// Creates a ring whose waits end with the first frames that arrive in one of the sockets, after
    /// `poll_time` at the latest. It belongs to the thread that waits first.
    ///
    /// # Errors
    /// As [`PollRing::for_time`].
    pub(super) fn until_arrival(
        napis: &[u32],
        poll_time: Duration,
        sockets: &[BorrowedFd<'_>],
    ) -> io::Result<Self> {
        let sockets: io::Result<_> = sockets.iter().map(BorrowedFd::try_clone_to_owned).collect();
        Self::new(napis, poll_time, sockets?)
    }

    fn new(napis: &[u32], poll_time: Duration, sockets: Vec<OwnedFd>) -> io::Result<Self> {
        let ring = sys::create_uring(sockets.len().max(1) as u32, !sockets.is_empty())?;
        let submitter = ring.submitter();
        let napi = Napi::new()
            .set_busy_poll_timeout(poll_time.as_micros() as u32)
            .set_prefer_busy_poll(true);
        submitter.register_napi(&mut napi.set_tracking(NapiTracking::Static))?;
        napis.iter().try_for_each(|&napi| submitter.register_napi_add_id(napi))?;
        let mut permitted = [
            Restriction::sqe_op(opcode::PollAdd::CODE),
            Restriction::sqe_op(opcode::PollRemove::CODE),
            Restriction::register_op(REGISTER_NAPI),
        ];
        submitter.register_restrictions(&mut permitted)?;
        Ok(Self { ring, poll_time: poll_time.into(), sockets, is_enabled: false })
    }

    /// Polls the NAPI instances `new` instead of `old`, which may be gone. A ring that belongs to
    /// another thread stays as it is.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn replace_napis(&self, old: &[u32], new: &[u32]) -> io::Result<()> {
        let submitter = self.ring.submitter();
        for &napi in old {
            let _ = submitter.register_napi_del_id(napi);
        }
        let mut added = new.iter().map(|&napi| submitter.register_napi_add_id(napi));
        added.try_for_each(|added| match added {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            other => other,
        })
    }

    fn enable(&mut self) -> io::Result<()> {
        self.ring.submitter().register_enable_rings()?;
        self.is_enabled = true;
        (0..self.sockets.len()).try_for_each(|number| self.watch(number))
    }

    fn watch(&mut self, number: usize) -> io::Result<()> {
        match self.sockets.get(number) {
            Some(socket) => sys::watch(&mut self.ring, socket.as_fd(), number as u64),
            None => Ok(()),
        }
    }

    /// Polls the NAPI instances. Returns false, doing nothing, if the ring belongs to another thread.
    ///
    /// # Errors
    /// The sandbox of the process denies the call.
    pub(super) fn wait(&mut self) -> io::Result<bool> {
        if !self.is_enabled {
            self.enable()?;
        }
        let arguments = SubmitArgs::new().timespec(&self.poll_time);
        match self.ring.submitter().submit_with_args(1, &arguments) {
            Ok(_) => {}
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR) => return Ok(true),
                Some(libc::EEXIST) => return Ok(false),
                _ => return Err(error),
            },
        }
        loop {
            let Some(completion) = self.ring.completion().next() else { break };
            if !cqueue::more(completion.flags()) {
                self.watch(completion.user_data() as usize)?;
            }
        }
        Ok(true)
    }
}

impl Drop for PollRing {
    /// Ends the requests, which would keep the sockets open until the kernel has freed the ring.
    fn drop(&mut self) {
        if !self.is_enabled || self.sockets.is_empty() {
            return;
        }
        for number in 0..self.sockets.len() {
            let _ = sys::unwatch(&mut self.ring, number as u64);
        }
        // On another thread the kernel refuses.
        let _ = self.ring.submit_and_wait(self.sockets.len());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Far longer than any test.
    const FOREVER: Duration = Duration::from_secs(600);

    /// Ring that waits for ever, unless bytes arrive in one of two streams, and their other ends.
    /// `None`, with the reason printed, where that cannot be.
    fn ring() -> Option<(PollRing, [UnixStream; 2])> {
        let [(mine, a), (other, b)] = [(); 2].map(|()| UnixStream::pair().unwrap());
        match PollRing::until_arrival(&[], FOREVER, &[mine.as_fd(), other.as_fd()]) {
            Ok(ring) => Some((ring, [a, b])),
            Err(error) => {
                tidegate_needs::skip("linux-6_13", error);
                None
            }
        }
    }

    #[test]
    fn every_arrival_ends_a_wait() {
        let Some((mut ring, mut ends)) = ring() else { return };
        for number in [0, 1, 1, 0, 0, 1] {
            ends[number].write_all(b"x").unwrap();
            assert!(ring.wait().unwrap());
        }
    }

    #[test]
    fn ring_belongs_to_the_thread_that_waits_first() {
        let Some((mut ring, mut ends)) = ring() else { return };
        std::thread::scope(|scope| {
            ends[0].write_all(b"x").unwrap();
            let first = scope.spawn(|| ring.wait().unwrap());
            assert!(first.join().unwrap());
        });
        ends[1].write_all(b"x").unwrap();
        assert!(!ring.wait().unwrap());
    }

    #[test]
    fn dropped_ring_closes_its_sockets_at_once() {
        let Some((mut ring, ends)) = ring() else { return };
        (&ends[0]).write_all(b"x").unwrap();
        ring.wait().unwrap();
        drop(ring);
        for mut end in ends {
            end.set_nonblocking(true).unwrap();
            let result = end.read(&mut [0; 1]);
            let is_closed = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionReset;
            assert!(
                matches!(&result, Ok(0)) || result.as_ref().is_err_and(is_closed),
                "{result:?}"
            );
        }
    }

    #[test]
    fn enabled_ring_polls_other_instances() {
        let Some((mut ring, mut ends)) = ring() else { return };
        ends[0].write_all(b"x").unwrap();
        ring.wait().unwrap();
        let (first, second) = (u32::MAX - 1, u32::MAX);
        ring.replace_napis(&[], &[first]).unwrap();
        ring.replace_napis(&[first], &[second]).unwrap();
        let napis = ring.ring.submitter();
        assert!(napis.register_napi_del_id(first).is_err(), "it is not polled any more");
        napis.register_napi_del_id(second).unwrap();
    }

    #[test]
    fn ring_refuses_other_requests() {
        let Some((mut ring, mut ends)) = ring() else { return };
        ends[0].write_all(b"x").unwrap();
        ring.wait().unwrap();
        let nothing = opcode::Nop::new().build().user_data(7);
        sys::push(&mut ring.ring, nothing).unwrap();
        ring.ring.submit_and_wait(1).unwrap();
        let completion = ring.ring.completion().next().unwrap();
        assert_eq!((completion.user_data(), completion.result()), (7, -libc::EACCES));
    }
}
