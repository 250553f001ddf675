//! Where readers of an empty queue sleep, and how they are woken.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU32;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::thread::futex;

use crate::sync::{AtomicU64, Ordering, fence};

/// Counts wake-ups that sleepers wait for.
pub trait Semaphore: Send + Sync + Sized {
    /// The name in tables.
    const NAME: &'static str;
    /// The most pauses that a reader spends looking before it sleeps.
    const MOST_PAUSES: u32;
    /// Whether a reader that was woken and has not found anything yet keeps
    /// others asleep. It wakes the next one when it has found something.
    const ONE_SEARCHES: bool;

    /// A semaphore at zero.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    fn new() -> io::Result<Self>;

    /// Adds `count`.
    fn post(&self, count: u32);

    /// Waits until it is above zero, and takes one.
    fn wait(&self);
}

/// An `eventfd` in semaphore mode, without spinning: Rivera's.
pub struct Eventfd(OwnedFd);

impl Semaphore for Eventfd {
    const NAME: &'static str = "eventfd";
    const MOST_PAUSES: u32 = 0;
    const ONE_SEARCHES: bool = false;

    fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?))
    }

    fn post(&self, count: u32) {
        // It fails only when the counter is at 2^64 - 2.
        let _ = rustix::io::write(&self.0, &u64::from(count).to_ne_bytes());
    }

    fn wait(&self) {
        // A signal interrupts the read; anything else that fails would fail for
        // ever, and to go on looking is right then.
        while rustix::io::read(&self.0, &mut [0u8; 8]) == Err(Errno::INTR) {}
    }
}

/// A futex, with a short spin before.
pub struct Futex(AtomicU32);

impl Semaphore for Futex {
    const NAME: &'static str = "futex";
    const MOST_PAUSES: u32 = 256;
    const ONE_SEARCHES: bool = true;

    fn new() -> io::Result<Self> {
        Ok(Self(AtomicU32::new(0)))
    }

    fn post(&self, count: u32) {
        self.0.fetch_add(count, Ordering::Release);
        // Nothing can fail: the address is ours.
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, count);
    }

    fn wait(&self) {
        loop {
            let take = |count: u32| count.checked_sub(1);
            if self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, take).is_ok() {
                return;
            }
            // It comes back for signals, and when the count is not zero.
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, 0, None);
        }
    }
}

/// Readers that sleep, and those that were woken and still look.
pub(super) struct Bed<B> {
    /// How many sleep or are about to, and [`SEARCHING`] for each that looks.
    state: AtomicU64,
    semaphore: B,
}

const SEARCHING: u64 = 1 << 32;

fn asleep(state: u64) -> u32 {
    state as u32
}

impl<B: Semaphore> Bed<B> {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { state: AtomicU64::new(0), semaphore: B::new()? })
    }

    /// Before sleeping. The reader has to look once more after this, and then
    /// call [`Bed::sleep`] or [`Bed::leave`].
    pub(super) fn enter(&self, searching: bool) {
        let search = if searching { SEARCHING } else { 0 };
        // One step, so that no waker sees this reader in neither of the two.
        self.state.fetch_add(1u64.wrapping_sub(search), Ordering::AcqRel);
        // Pairs with the fence in `claim`: either the waker sees this reader
        // asleep, or this reader's next look sees what the waker put in.
        fence(Ordering::SeqCst);
    }

    /// After entering: sleeps until woken. The reader is searching then, if
    /// [`Semaphore::ONE_SEARCHES`].
    pub(super) fn sleep(&self) {
        self.semaphore.wait();
    }

    /// After entering: does not sleep after all. Says whether somebody has
    /// woken the reader meanwhile; then it is as after [`Bed::sleep`].
    pub(super) fn leave(&self) -> bool {
        let leave = |state| (asleep(state) > 0).then(|| state - 1);
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, leave).is_ok() {
            return false;
        }
        // Every sleeper is being woken: one of the wake-ups is for this one.
        self.semaphore.wait();
        true
    }

    /// A reader that was searching has found something.
    pub(super) fn stop_searching(&self) {
        self.state.fetch_sub(SEARCHING, Ordering::AcqRel);
    }

    /// After putting something in: wakes a reader, if one sleeps and no other
    /// looks already.
    #[inline]
    pub(super) fn wake_one(&self) {
        fence(Ordering::SeqCst);
        let state = self.state.load(Ordering::Relaxed);
        if asleep(state) > 0 && (!B::ONE_SEARCHES || state < SEARCHING) {
            self.claim(1);
        }
    }

    /// Wakes every reader that sleeps.
    pub(super) fn wake_all(&self) {
        fence(Ordering::SeqCst);
        self.claim(u32::MAX);
    }

    /// Wakes up to `most` readers.
    #[cold]
    fn claim(&self, most: u32) {
        let mut woken = 0;
        let take = |state| {
            woken = asleep(state).min(most);
            let only_one = most == 1 && B::ONE_SEARCHES && state >= SEARCHING;
            let search = if B::ONE_SEARCHES { SEARCHING } else { 0 };
            (woken > 0 && !only_one).then(|| state - u64::from(woken) + u64::from(woken) * search)
        };
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok() {
            self.semaphore.post(woken);
        }
    }
}

/// Every interleaving of small runs.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::*;
    use crate::sync::AtomicUsize;

    /// A semaphore that loom sees into.
    struct Visible<const ONE: bool> {
        count: Mutex<u32>,
        posted: Condvar,
    }

    impl<const ONE: bool> Semaphore for Visible<ONE> {
        const NAME: &'static str = "visible";
        const MOST_PAUSES: u32 = 0;
        const ONE_SEARCHES: bool = ONE;

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
        bed: Bed<Visible<ONE>>,
        work: AtomicUsize,
    }

    impl<const ONE: bool> World<ONE> {
        fn new() -> Arc<Self> {
            Arc::new(Self { bed: Bed::new().unwrap(), work: AtomicUsize::new(0) })
        }

        fn put(&self) {
            self.work.fetch_add(1, Ordering::Release);
            self.bed.wake_one();
        }

        fn take(&self) -> bool {
            let one = |work: usize| work.checked_sub(1);
            self.work.fetch_update(Ordering::AcqRel, Ordering::Acquire, one).is_ok()
        }

        /// As `Reader::pop_wait` does it.
        fn take_wait(&self) {
            let mut searching = false;
            while !self.take() {
                self.bed.enter(searching);
                if self.take() {
                    searching = self.bed.leave() && ONE;
                    break;
                }
                self.bed.sleep();
                searching = ONE;
            }
            if searching {
                self.bed.stop_searching();
                self.bed.wake_one();
            }
        }
    }

    /// Loom says so when a reader sleeps for ever.
    fn nobody_oversleeps<const ONE: bool>(readers: usize, bound: usize) {
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
        nobody_oversleeps::<true>(1, 4);
        nobody_oversleeps::<false>(1, 4);
    }

    #[test]
    fn two_readers_are_woken() {
        nobody_oversleeps::<true>(2, 2);
        nobody_oversleeps::<false>(2, 2);
    }
}
