//! Ticket lock, first come, first served: each thread takes a ticket number and waits until
//! that number is served.

use super::{Lock, LockKind, spin_then_yield};
use crate::sync::{AtomicUsize, Ordering, UnsafeCell};

/// Ticket locks.
pub struct Ticket;

impl LockKind for Ticket {
    type Lock<T: Send> = TicketLock<T>;
    const NAME: &'static str = "ticket";
}

/// A lock with a counter for tickets issued and one for the ticket served.
pub struct TicketLock<T> {
    next_ticket: AtomicUsize,
    serving: AtomicUsize,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only by the thread whose ticket is served, and each ticket is
// issued once; acquire and release order the uses.
unsafe impl<T: Send> Sync for TicketLock<T> {}
// SAFETY: the lock owns its value.
unsafe impl<T: Send> Send for TicketLock<T> {}

/// Serves the next ticket, also when the user of the value panics.
struct ReleaseGuard<'a> {
    serving: &'a AtomicUsize,
    ticket: usize,
}

impl Drop for ReleaseGuard<'_> {
    fn drop(&mut self) {
        self.serving.store(self.ticket.wrapping_add(1), Ordering::Release);
    }
}

impl<T> TicketLock<T> {
    #[inline(always)]
    fn run_locked<R>(&self, ticket: usize, using: impl FnOnce(&mut T) -> R) -> R {
        let _release = ReleaseGuard { serving: &self.serving, ticket };
        // SAFETY: `ticket` is served now, and `_release` serves the next one later.
        self.value.with_mut(|value| using(unsafe { &mut *value }))
    }
}

impl<T: Send> Lock<T> for TicketLock<T> {
    fn new(value: T) -> Self {
        Self {
            next_ticket: AtomicUsize::new(0),
            serving: AtomicUsize::new(0),
            value: UnsafeCell::new(value),
        }
    }

    #[inline]
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        let mut spins = 0;
        while self.serving.load(Ordering::Acquire) != ticket {
            spin_then_yield(&mut spins);
        }
        self.run_locked(ticket, using)
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
        let ticket = self.serving.load(Ordering::Acquire);
        // Only the ticket that is served now acquires the lock without waiting.
        let acquired = self.next_ticket.compare_exchange(
            ticket,
            ticket.wrapping_add(1),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        if acquired.is_err() {
            return Err(using);
        }
        Ok(self.run_locked(ticket, using))
    }
}
