//! Sleeping and waking of readers of an empty queue.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU32;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::thread::futex;

use crate::sync::{AtomicU64, Ordering, fence};

/// Counter of wake-ups on which readers sleep.
pub trait Semaphore: Send + Sync + Sized {
    /// Name in tables.
    const NAME: &'static str;
    /// Most pauses that a reader spins before it sleeps.
    const MAX_SPIN_PAUSES: u32;
    /// True if at most one woken reader searches at a time, while the others stay asleep. The
    /// searching reader wakes the next one when it has found a packet.
    const SINGLE_SEARCHER: bool;

    /// Creates a semaphore at zero.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    fn new() -> io::Result<Self>;

    /// Adds `count`.
    fn post(&self, count: u32);

    /// Waits until the count is above zero, and subtracts one.
    fn wait(&self);
}

/// `eventfd` in semaphore mode, without spinning, as in Rivera's thesis.
pub struct Eventfd(OwnedFd);

impl Semaphore for Eventfd {
    const NAME: &'static str = "eventfd";
    const MAX_SPIN_PAUSES: u32 = 0;
    const SINGLE_SEARCHER: bool = false;

    fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?))
    }

    fn post(&self, count: u32) {
        // The write fails only when the counter is at 2^64 - 2.
        let _ = rustix::io::write(&self.0, &u64::from(count).to_ne_bytes());
    }

    fn wait(&self) {
        // A signal interrupts the read. Any other failure would be permanent; the reader then
        // returns and keeps polling.
        while rustix::io::read(&self.0, &mut [0u8; 8]) == Err(Errno::INTR) {}
    }
}

/// Futex, with a short spin before sleeping.
pub struct Futex(AtomicU32);

impl Semaphore for Futex {
    const NAME: &'static str = "futex";
    const MAX_SPIN_PAUSES: u32 = 256;
    const SINGLE_SEARCHER: bool = true;

    fn new() -> io::Result<Self> {
        Ok(Self(AtomicU32::new(0)))
    }

    fn post(&self, count: u32) {
        self.0.fetch_add(count, Ordering::Release);
        // The call cannot fail: the address belongs to this process.
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, count);
    }

    fn wait(&self) {
        loop {
            let take = |count: u32| count.checked_sub(1);
            if self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, take).is_ok() {
                return;
            }
            // The call returns on signals, and when the count is not zero.
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, 0, None);
        }
    }
}

/// State of the readers that sleep and of the woken readers that still search.
pub(super) struct Parker<B> {
    /// Number of readers asleep or about to sleep, plus [`SEARCHING`] for each that searches.
    state: AtomicU64,
    semaphore: B,
}

const SEARCHING: u64 = 1 << 32;

fn sleepers(state: u64) -> u32 {
    state as u32
}

impl<B: Semaphore> Parker<B> {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { state: AtomicU64::new(0), semaphore: B::new()? })
    }

    /// Announces that the reader is about to sleep. The reader must check once more after this,
    /// and then call [`Parker::park`] or [`Parker::cancel_park`].
    pub(super) fn prepare_to_park(&self, searching: bool) {
        let search = if searching { SEARCHING } else { 0 };
        // One step, so that every waker sees this reader either searching or asleep.
        self.state.fetch_add(1u64.wrapping_sub(search), Ordering::AcqRel);
        // Pairs with the fences in `wake_one` and `wake_all`: either the waker sees this reader
        // asleep, or this reader's next check sees the packet that the waker put in.
        fence(Ordering::SeqCst);
    }

    /// Sleeps until woken, after [`Parker::prepare_to_park`]. The reader is then searching if
    /// [`Semaphore::SINGLE_SEARCHER`].
    pub(super) fn park(&self) {
        self.semaphore.wait();
    }

    /// Cancels the sleep after [`Parker::prepare_to_park`]. Returns true if a waker has already
    /// chosen this reader; its state is then the same as after [`Parker::park`].
    pub(super) fn cancel_park(&self) -> bool {
        let leave = |state| (sleepers(state) > 0).then(|| state - 1);
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, leave).is_ok() {
            return false;
        }
        // Every sleeper is being woken: one of the wake-ups is for this reader.
        self.semaphore.wait();
        true
    }

    /// Records that a searching reader has finished its search.
    pub(super) fn stop_searching(&self) {
        self.state.fetch_sub(SEARCHING, Ordering::AcqRel);
    }

    /// Wakes a reader after a packet was put in, if one sleeps and no other reader searches.
    #[inline]
    pub(super) fn wake_one(&self) {
        fence(Ordering::SeqCst);
        let state = self.state.load(Ordering::Relaxed);
        if sleepers(state) > 0 && (!B::SINGLE_SEARCHER || state < SEARCHING) {
            self.wake_up_to(1);
        }
    }

    /// Wakes every sleeping reader.
    pub(super) fn wake_all(&self) {
        fence(Ordering::SeqCst);
        self.wake_up_to(u32::MAX);
    }

    /// Wakes up to `max` readers.
    #[cold]
    fn wake_up_to(&self, max: u32) {
        let mut woken = 0;
        let take = |state| {
            woken = sleepers(state).min(max);
            let only_one = max == 1 && B::SINGLE_SEARCHER && state >= SEARCHING;
            let search = if B::SINGLE_SEARCHER { SEARCHING } else { 0 };
            (woken > 0 && !only_one).then(|| state - u64::from(woken) + u64::from(woken) * search)
        };
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok() {
            self.semaphore.post(woken);
        }
    }
}

/// Explores every interleaving of small runs.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::*;
    use crate::sync::AtomicUsize;

    /// A semaphore that loom can observe.
    struct CondvarSemaphore<const ONE: bool> {
        count: Mutex<u32>,
        posted: Condvar,
    }

    impl<const ONE: bool> Semaphore for CondvarSemaphore<ONE> {
        const NAME: &'static str = "visible";
        const MAX_SPIN_PAUSES: u32 = 0;
        const SINGLE_SEARCHER: bool = ONE;

        fn new() -> io::Result<Self> {
            Ok(Self { count: Mutex::new(0), posted: Condvar::new() })
        }

        fn post(&self, count: u32) {
            *self.count.lock().unwrap() += count;
            self.posted.notify_all();
        }

        fn wait(&self) {
            let mut count = self.count.lock().unwrap();
            while *count == 0 {
                count = self.posted.wait(count).unwrap();
            }
            *count -= 1;
        }
    }

    struct World<const ONE: bool> {
        parker: Parker<CondvarSemaphore<ONE>>,
        work: AtomicUsize,
    }

    impl<const ONE: bool> World<ONE> {
        fn new() -> Arc<Self> {
            Arc::new(Self { parker: Parker::new().unwrap(), work: AtomicUsize::new(0) })
        }

        fn put(&self) {
            self.work.fetch_add(1, Ordering::Release);
            self.parker.wake_one();
        }

        fn take(&self) -> bool {
            let one = |work: usize| work.checked_sub(1);
            self.work.fetch_update(Ordering::AcqRel, Ordering::Acquire, one).is_ok()
        }

        /// Same protocol as `Reader::pop_wait`.
        fn take_wait(&self) {
            let mut searching = false;
            while !self.take() {
                self.parker.prepare_to_park(searching);
                if self.take() {
                    searching = self.parker.cancel_park() && ONE;
                    break;
                }
                self.parker.park();
                searching = ONE;
            }
            if searching {
                self.parker.stop_searching();
                self.parker.wake_one();
            }
        }
    }

    /// Loom reports a deadlock when a reader sleeps forever.
    fn check_no_lost_wakeup<const ONE: bool>(readers: usize, bound: usize) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(bound);
        model.check(move || {
            let world = World::<ONE>::new();
            let others: Vec<_> = (0..readers)
                .map(|_| {
                    let world = Arc::clone(&world);
                    thread::spawn(move || world.take_wait())
                })
                .collect();
            for _ in 0..readers {
                world.put();
            }
            others.into_iter().for_each(|other| other.join().unwrap());
            assert!(!world.take());
        });
    }

    #[test]
    fn one_reader_is_woken() {
        check_no_lost_wakeup::<true>(1, 4);
        check_no_lost_wakeup::<false>(1, 4);
    }

    #[test]
    fn two_readers_are_woken() {
        check_no_lost_wakeup::<true>(2, 2);
        check_no_lost_wakeup::<false>(2, 2);
    }
}
