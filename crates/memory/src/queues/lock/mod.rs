//! Locks around one value: the ones that receive queues have been built with,
//! behind one interface.
//!
//! A lock is used through a closure, so that it is released whatever happens,
//! and so that what a waiting thread needs can lie on its own stack.
//!
//! [`Spin`], [`Ticket`] and [`Mcs`] wait in a loop. That is right only while
//! every thread has a processor: when the holder has lost its own, the others
//! burn theirs. [`Sleeping`] gives the processor away.

mod counted;
mod mcs;
mod mutex;
mod spin;
mod ticket;
mod ticks;

pub use counted::{Counted, CountedLock, FoundTaken, LockMeter, LockStatistics};
pub use mcs::{Mcs, McsLock};
pub use mutex::{Sleeping, SleepingLock};
pub use spin::{Spin, SpinLock};
pub use ticket::{Ticket, TicketLock};

/// A kind of lock.
pub trait LockKind: Send + Sync + 'static {
    /// The lock of this kind around a `T`.
    type Lock<T: Send>: Lock<T>;
    /// The name in tables.
    const NAME: &'static str;
}

/// One value that one thread at a time may use.
pub trait Lock<T>: Send + Sync {
    /// A free lock around `value`.
    fn new(value: T) -> Self;

    /// Waits until no other thread uses the value, then uses it.
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R;

    /// Uses the value if no other thread does.
    ///
    /// # Errors
    /// Gives `using` back, not called, when another thread uses the value.
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F>;

    /// What was counted, if this kind of lock counts.
    fn statistics(&self) -> Option<LockStatistics> {
        None
    }
}

/// Turns of waiting after which a queue of waiters gives its processor away:
/// the one whose turn it is may have none.
const TURNS_BEFORE_YIELD: u32 = 256;

/// One turn of waiting in a lock that serves its waiters in order.
fn wait_in_order(turn: &mut u32) {
    *turn = turn.saturating_add(1);
    if *turn < TURNS_BEFORE_YIELD { crate::sync::relax() } else { crate::sync::yield_now() }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const THREADS: usize = 4;
    const TURNS: usize = if cfg!(miri) { 8 } else { 5_000 };

    fn excludes<K: LockKind>() {
        let lock = K::Lock::new((0, 0));
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let lock = &lock;
                scope.spawn(move || {
                    for turn in 0..TURNS {
                        let add = |both: &mut (usize, usize)| {
                            assert_eq!(both.0, both.1, "two threads at once");
                            both.0 += 1;
                            both.1 += 1;
                        };
                        // Both ways in, so that each meets the other.
                        if (turn + thread) % 2 == 0
                            && let Err(add) = lock.try_with(add)
                        {
                            lock.with(add);
                        } else if (turn + thread) % 2 == 1 {
                            lock.with(add);
                        }
                    }
                });
            }
        });
        assert_eq!(lock.with(|both| *both), (THREADS * TURNS, THREADS * TURNS), "{}", K::NAME);
        let tried = lock.with(|_| lock.try_with(|_| ()).is_err());
        assert!(tried, "{}: a taken lock was taken", K::NAME);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lock.with(|_| panic!("on purpose"));
        }));
        assert!(panicked.is_err());
        lock.with(|both| both.0 += 1);
    }

    #[test]
    fn every_kind_excludes_and_survives_a_panic() {
        excludes::<Spin>();
        excludes::<Ticket>();
        excludes::<Mcs>();
        excludes::<Sleeping>();
        excludes::<Counted<Spin>>();
        excludes::<Counted<Sleeping>>();
    }
}

/// Every interleaving of small runs.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Two threads: loom lets two that spin wait for each other's turn for ever.
    fn excludes<K: LockKind>(turns: [usize; 2]) {
        loom::model(move || {
            let lock = Arc::new(K::Lock::new(0usize));
            let other = {
                let lock = Arc::clone(&lock);
                thread::spawn(move || (0..turns[0]).for_each(|_| lock.with(|count| *count += 1)))
            };
            (0..turns[1]).for_each(|_| lock.with(|count| *count += 1));
            other.join().unwrap();
            assert_eq!(lock.with(|count| *count), turns[0] + turns[1]);
        });
    }

    fn trying_excludes<K: LockKind>() {
        loom::model(|| {
            let lock = Arc::new(K::Lock::new(0usize));
            let other = {
                let lock = Arc::clone(&lock);
                thread::spawn(move || lock.try_with(|count| *count += 1).is_ok())
            };
            lock.with(|count| *count += 1);
            let both = 1 + usize::from(other.join().unwrap());
            assert_eq!(lock.with(|count| *count), both);
        });
    }

    #[test]
    fn the_spinlock_excludes() {
        excludes::<Spin>([1, 2]);
        trying_excludes::<Spin>();
    }

    #[test]
    fn the_ticket_lock_excludes() {
        excludes::<Ticket>([1, 2]);
        trying_excludes::<Ticket>();
    }

    #[test]
    fn the_mcs_lock_excludes() {
        excludes::<Mcs>([1, 2]);
        trying_excludes::<Mcs>();
    }
}
