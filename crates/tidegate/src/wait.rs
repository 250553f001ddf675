//! Sleeping threads and their wake-ups.
//!
//! Several threads may sleep at once, each on the device's descriptors and on a doorbell of
//! its own. The thread that runs the stack rings the doorbells of the others.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_memory::Doorbell;
use tidegate_stack::{Event, TcpId, TcpListenerId, UdpId};

use crate::readiness::Sleeper;

/// Identifier of a poll set ([`crate::Poll`]). Small, because every registration holds it.
pub(crate) type PollSetId = u32;

/// Source that can be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SocketId {
    Udp(UdpId),
    Listener(TcpListenerId),
    Stream(TcpId),
    /// A poll set.
    Poll(PollSetId),
}

/// Hash map keyed by socket.
pub(crate) type SocketMap<V> = HashMap<SocketId, V, BuildHasherDefault<IdHasher>>;

/// Fast hash for handles that the stack assigns: no peer or application can choose handles that
/// collide.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl IdHasher {
    fn add(&mut self, word: u64) {
        // Multiplier of rustc's FxHash.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        // Hash tables use the highest and the lowest bits.
        self.0 ^ self.0 >> 32
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.add(byte.into()));
    }

    fn write_u32(&mut self, word: u32) {
        self.add(word.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.add(word);
    }

    fn write_isize(&mut self, word: isize) {
        self.add(word as u64);
    }
}

impl SocketId {
    /// Socket that an event concerns.
    pub(crate) fn of_event(event: Event) -> Option<Self> {
        match event {
            Event::UdpReadable(id) | Event::UdpError(id) => Some(Self::Udp(id)),
            Event::TcpReadable(id) | Event::TcpWritable(id) => Some(Self::Stream(id)),
            Event::TcpAcceptable(id) => Some(Self::Listener(id)),
            _ => None,
        }
    }
}

/// Time limit of a wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Deadline {
    /// Do not wait.
    Now,
    /// Wait until this time.
    At(Instant),
    /// Wait without limit.
    Never,
}

/// Timeout shared by threads, initially none. Stored as whole milliseconds, as in kernel socket
/// options, to stay small: each stream has two.
pub(crate) struct SharedTimeout(AtomicU32);

impl SharedTimeout {
    pub(crate) const fn none() -> Self {
        Self(AtomicU32::new(u32::MAX))
    }

    pub(crate) fn get(&self) -> Option<Duration> {
        let ms = self.0.load(Ordering::Relaxed);
        (ms != u32::MAX).then(|| Duration::from_millis(ms.into()))
    }

    /// Sets the timeout, rounded up to milliseconds; above 49 days it is none.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a timeout of zero.
    pub(crate) fn set(&self, timeout: Option<Duration>) -> io::Result<()> {
        if timeout.is_some_and(|timeout| timeout.is_zero()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a timeout of zero is invalid: use set_nonblocking instead",
            ));
        }
        // Rounded up, never shorter than requested; more than 49 days is no timeout.
        let ms = timeout.map(|timeout| timeout.as_nanos().div_ceil(1_000_000));
        let ms = ms.and_then(|ms| u32::try_from(ms).ok());
        self.0.store(ms.unwrap_or(u32::MAX), Ordering::Relaxed);
        Ok(())
    }
}

impl Deadline {
    pub(crate) fn after(timeout: Option<Duration>) -> Self {
        match timeout {
            Some(timeout) => Instant::now().checked_add(timeout).map_or(Self::Never, Self::At),
            None => Self::Never,
        }
    }

    /// Time from now to the deadline; `None` without limit.
    pub(crate) fn remaining(self) -> Option<Duration> {
        match self {
            Self::Now => Some(Duration::ZERO),
            Self::At(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
            Self::Never => None,
        }
    }
}

/// Sleeping threads, each with the sockets that it waits for.
#[derive(Default)]
pub(crate) struct Waiters(Vec<Waiter>);

struct Waiter {
    bell: Arc<Doorbell>,
    sockets: Vec<SocketId>,
}

impl Waiters {
    /// Rings for every thread that waits for this socket.
    pub(crate) fn wake(&self, id: SocketId) {
        for waiter in self.0.iter().filter(|waiter| waiter.sockets.contains(&id)) {
            waiter.bell.ring();
        }
    }

    /// Rings for every thread.
    pub(crate) fn wake_all(&self) {
        for waiter in &self.0 {
            waiter.bell.ring();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a thread: its doorbell is rung for these sockets until [`Waiters::leave`].
    pub(crate) fn enter(&mut self, bell: Arc<Doorbell>, sockets: &[SocketId]) {
        self.0.push(Waiter { bell, sockets: sockets.to_vec() });
    }

    /// Removes a thread.
    pub(crate) fn leave(&mut self, bell: &Arc<Doorbell>) {
        self.0.retain(|waiter| !Arc::ptr_eq(&waiter.bell, bell));
    }
}

/// Sleeps until a descriptor is readable, the doorbell rings, or the timeout expires.
pub(crate) fn sleep<'a>(
    descriptors: impl IntoIterator<Item = BorrowedFd<'a>>,
    bell: &'a Doorbell,
    timeout: Option<Duration>,
) -> io::Result<()> {
    let wake: Vec<BorrowedFd<'_>> = descriptors.into_iter().chain([bell.as_fd()]).collect();
    PollSleeper.sleep(&wake, timeout).map(|_| ())
}

/// Sleeper based on `ppoll(2)`, without events of its own.
pub(crate) struct PollSleeper;

impl Sleeper for PollSleeper {
    fn sleep(&mut self, wake: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool> {
        sleep_on(wake, timeout).map(|()| false)
    }
}

fn sleep_on(wake: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
    let fds = wake.iter().copied();
    let mut fds: Vec<PollFd<'_>> =
        fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: timeout.as_secs().min(i32::MAX as u64) as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    match poll(&mut fds, timeout.as_ref()) {
        // A signal does not end the wait: its handler has run.
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

thread_local!(static BELL: RefCell<Option<Arc<Doorbell>>> = const { RefCell::new(None) });

/// Forgets the thread's doorbell in a forked child: it is the parent's.
pub(crate) fn forget_thread_bell() {
    // A terminating thread has none.
    let _ = BELL.try_with(RefCell::take);
}

/// Doorbell of this thread, created at its first sleep.
pub(crate) fn thread_bell() -> io::Result<Arc<Doorbell>> {
    let own = BELL.try_with(|bell| {
        let mut bell = bell.borrow_mut();
        if let Some(bell) = &*bell {
            return Ok(Arc::clone(bell));
        }
        let new = Arc::new(Doorbell::new()?);
        *bell = Some(Arc::clone(&new));
        Ok(new)
    });
    // A terminating thread cannot keep one.
    own.unwrap_or_else(|_| Ok(Arc::new(Doorbell::new()?)))
}
