//! First come, first served: each thread takes a number and waits until it is
//! called.

use super::{Lock, LockKind, wait_in_order};
use crate::sync::{AtomicUsize, Ordering, UnsafeCell};

/// Ticket locks.
pub struct Ticket;

impl LockKind for Ticket {
    type Lock<T: Send> = TicketLock<T>;
    const NAME: &'static str = "ticket";
}

/// A lock with a counter for arrivals and one for departures.
pub struct TicketLock<T> {
    next: AtomicUsize,
    serving: AtomicUsize,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only by the thread whose number is called, and
// each number is given out once; acquire and release order the uses.
unsafe impl<T: Send> Sync for TicketLock<T> {}
// SAFETY: the lock owns its value.
unsafe impl<T: Send> Send for TicketLock<T> {}

/// Calls the next number, also when the user of the value panics.
struct CallNext<'a> {
    serving: &'a AtomicUsize,
    ticket: usize,
}

impl Drop for CallNext<'_> {
    fn drop(&mut self) {
        self.serving.store(self.ticket.wrapping_add(1), Ordering::Release);
    }
}

impl<T> TicketLock<T> {
    #[inline(always)]
    fn called<R>(&self, ticket: usize, using: impl FnOnce(&mut T) -> R) -> R {
        let _next = CallNext { serving: &self.serving, ticket };
        // SAFETY: `ticket` is called, and `_next` calls another one later.
        self.value.with_mut(|value| using(unsafe { &mut *value }))
    }
}

impl<T: Send> Lock<T> for TicketLock<T> {
    fn new(value: T) -> Self {
        Self {
            next: AtomicUsize::new(0),
            serving: AtomicUsize::new(0),
            value: UnsafeCell::new(value),
        }
    }

    #[inline]
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        let mut turn = 0;
        while self.serving.load(Ordering::Acquire) != ticket {
            wait_in_order(&mut turn);
        }
        self.called(ticket, using)
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
        let ticket = self.serving.load(Ordering::Acquire);
        // Only the number that is called now is worth having.
        let taken = self.next.compare_exchange(
            ticket,
            ticket.wrapping_add(1),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        if taken.is_err() {
            return Err(using);
        }
        Ok(self.called(ticket, using))
    }
}
