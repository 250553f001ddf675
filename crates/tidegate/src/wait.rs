//! Sleeping and being woken.
//!
//! Several threads may sleep at once, each on the port's descriptors and on a
//! doorbell of its own. Whoever runs the stack rings for the others.

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

/// The name of a set of sockets ([`crate::Poll`]). Each of its members holds it,
/// so it is small.
pub(crate) type SetNumber = u32;

/// What can be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SocketId {
    Udp(UdpId),
    Listener(TcpListenerId),
    Stream(TcpId),
    /// A set of sockets, by its number.
    Poll(SetNumber),
}

/// A table by socket.
pub(crate) type ById<V> = HashMap<SocketId, V, BuildHasherDefault<IdHasher>>;

/// A quick hash for names that we give ourselves: nobody else can choose them
/// so that they collide.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl IdHasher {
    fn add(&mut self, word: u64) {
        // The multiplier of rustc's own hash.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        // Tables look at the highest and the lowest bits.
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
    /// The socket that an event is about.
    pub(crate) fn of_event(event: Event) -> Option<Self> {
        match event {
            Event::Readable(id) | Event::Error(id) => Some(Self::Udp(id)),
            Event::TcpReadable(id) | Event::TcpWritable(id) => Some(Self::Stream(id)),
            Event::TcpAcceptable(id) => Some(Self::Listener(id)),
            _ => None,
        }
    }
}

/// How long a call may wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    /// Not at all.
    None,
    /// Until then.
    Until(Instant),
    /// For ever.
    Forever,
}

/// A time-out that threads share; none to begin with. In whole milliseconds, as
/// kernels have it: there are two in each stream.
pub(crate) struct SharedTimeout(AtomicU32);

impl SharedTimeout {
    pub(crate) const fn none() -> Self {
        Self(AtomicU32::new(u32::MAX))
    }

    pub(crate) fn get(&self) -> Option<Duration> {
        let ms = self.0.load(Ordering::Relaxed);
        (ms != u32::MAX).then(|| Duration::from_millis(ms.into()))
    }

    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a time-out of zero.
    pub(crate) fn set(&self, timeout: Option<Duration>) -> io::Result<()> {
        if timeout.is_some_and(|timeout| timeout.is_zero()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a time-out of zero: use set_nonblocking",
            ));
        }
        // Not shorter than it was asked for, and longer than 49 days is for ever.
        let ms = timeout.map(|timeout| timeout.as_nanos().div_ceil(1_000_000));
        let ms = ms.and_then(|ms| u32::try_from(ms).ok());
        self.0.store(ms.unwrap_or(u32::MAX), Ordering::Relaxed);
        Ok(())
    }
}

impl Patience {
    pub(crate) fn timeout(timeout: Option<Duration>) -> Self {
        match timeout {
            Some(timeout) => Instant::now().checked_add(timeout).map_or(Self::Forever, Self::Until),
            None => Self::Forever,
        }
    }

    /// How long from now; `None` is for ever.
    pub(crate) fn left(self) -> Option<Duration> {
        match self {
            Self::None => Some(Duration::ZERO),
            Self::Until(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
            Self::Forever => None,
        }
    }
}

/// The threads that sleep, and for which sockets.
#[derive(Default)]
pub(crate) struct Waiters(Vec<Waiter>);

struct Waiter {
    bell: Arc<Doorbell>,
    sockets: Vec<SocketId>,
}

impl Waiters {
    /// Rings for everybody who waits for this socket.
    pub(crate) fn wake(&self, id: SocketId) {
        for waiter in self.0.iter().filter(|waiter| waiter.sockets.contains(&id)) {
            waiter.bell.ring();
        }
    }

    /// Rings for everybody.
    pub(crate) fn wake_all(&self) {
        for waiter in &self.0 {
            waiter.bell.ring();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Until [`Waiters::leave`], the bell is rung for these sockets.
    pub(crate) fn enter(&mut self, bell: Arc<Doorbell>, sockets: &[SocketId]) {
        self.0.push(Waiter { bell, sockets: sockets.to_vec() });
    }

    /// The bell is rung no more.
    pub(crate) fn leave(&mut self, bell: &Arc<Doorbell>) {
        self.0.retain(|waiter| !Arc::ptr_eq(&waiter.bell, bell));
    }
}

/// Sleeps until a descriptor is readable, the bell rings or the time is over.
pub(crate) fn sleep<'a>(
    descriptors: impl IntoIterator<Item = BorrowedFd<'a>>,
    bell: &'a Doorbell,
    timeout: Option<Duration>,
) -> io::Result<()> {
    let wake: Vec<BorrowedFd<'_>> = descriptors.into_iter().chain([bell.as_fd()]).collect();
    JustSleep.sleep(&wake, timeout).map(|_| ())
}

/// Sleeps, and waits for nothing of its own.
pub(crate) struct JustSleep;

impl Sleeper for JustSleep {
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
        // A signal is no reason to end the wait: its handler has run.
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

thread_local!(static BELL: RefCell<Option<Arc<Doorbell>>> = const { RefCell::new(None) });

/// In a child that was forked: the bell is the parent's.
pub(crate) fn forget_thread_bell() {
    // A thread that is about to end has none.
    let _ = BELL.try_with(RefCell::take);
}

/// The doorbell of this thread, made at its first sleep.
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
    // A thread that is about to end keeps none.
    own.unwrap_or_else(|_| Ok(Arc::new(Doorbell::new()?)))
}
