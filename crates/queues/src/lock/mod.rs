//! Locks around one value, behind one interface: the kinds that receive queues have been built
//! with.
//!
//! A lock is used through a closure, so that it is always released, and so that the state of a
//! waiting thread can lie on its own stack.
//!
//! [`Spin`], [`Ticket`] and [`Mcs`] busy-wait. That is right only while every thread has a
//! processor: when the holder is preempted, the waiters burn their processors. [`Sleeping`]
//! yields the processor.

mod mcs;
mod metered;
mod mutex;
mod spin;
mod ticket;

pub use mcs::{Mcs, McsLock};
pub use metered::{Metered, MeteredLock};
pub use mutex::{Sleeping, SleepingLock};
pub use spin::{Spin, SpinLock};
pub use ticket::{Ticket, TicketLock};
pub use tidegate_memory::lock_meter::LockStatistics;

/// A kind of lock.
pub trait LockKind: Send + Sync + 'static {
    /// The lock of this kind around a `T`.
    type Lock<T: Send>: Lock<T>;
    /// Name in tables.
    const NAME: &'static str;
}

/// A value that one thread at a time may use.
pub trait Lock<T>: Send + Sync {
    /// Creates a free lock around `value`.
    fn new(value: T) -> Self;

    /// Waits until no other thread uses the value, then uses it.
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R;

    /// Uses the value if no other thread uses it.
    ///
    /// # Errors
    /// Returns `using`, not called, when another thread uses the value.
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F>;

    /// Statistics, if this kind of lock keeps them.
    fn statistics(&self) -> Option<LockStatistics> {
        None
    }
}

/// Spins after which a waiter in a fair lock yields its processor: the next thread in line may
/// have none.
const SPINS_BEFORE_YIELD: u32 = 256;

/// One pause of a waiter in a lock that serves its waiters in order.
fn spin_then_yield(spins: &mut u32) {
    *spins = spins.saturating_add(1);
    if *spins < SPINS_BEFORE_YIELD { crate::sync::relax() } else { crate::sync::yield_now() }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const THREADS: usize = 4;
    const ITERATIONS: usize = if cfg!(miri) { 8 } else { 5_000 };

    fn excludes<K: LockKind>() {
        let lock = K::Lock::new((0, 0));
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let lock = &lock;
                scope.spawn(move || {
                    for iteration in 0..ITERATIONS {
                        let add = |both: &mut (usize, usize)| {
                            assert_eq!(both.0, both.1, "two threads at once");
                            both.0 += 1;
                            both.1 += 1;
                        };
                        // Both entry points, so that each meets the other.
                        if (iteration + thread) % 2 == 0
                            && let Err(add) = lock.try_with(add)
                        {
                            lock.with(add);
                        } else if (iteration + thread) % 2 == 1 {
                            lock.with(add);
                        }
                    }
                });
            }
        });
        assert_eq!(
            lock.with(|both| *both),
            (THREADS * ITERATIONS, THREADS * ITERATIONS),
            "{}",
            K::NAME
        );
        let tried = lock.with(|_| lock.try_with(|_| ()).is_err());
        assert!(tried, "{}: try_with acquired a held lock", K::NAME);
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
        excludes::<Metered<Spin>>();
        excludes::<Metered<Sleeping>>();
    }
}

/// Explores every interleaving of small runs.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Two threads: loom lets two spinning threads wait for each other forever.
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
