//! Mutex of the operating system: waiters sleep.

use std::sync::{PoisonError, TryLockError};

use super::{Lock, LockKind};
use crate::sync::Mutex;

/// Mutexes.
pub struct Sleeping;

impl LockKind for Sleeping {
    type Lock<T: Send> = SleepingLock<T>;
    const NAME: &'static str = "mutex";
}

/// A mutex, used even if a thread panicked while it held it.
pub struct SleepingLock<T>(Mutex<T>);

impl<T: Send> Lock<T> for SleepingLock<T> {
    fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    #[inline]
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        using(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
        match self.0.try_lock() {
            Ok(mut value) => Ok(using(&mut *value)),
            Err(TryLockError::Poisoned(poisoned)) => Ok(using(&mut *poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => Err(using),
        }
    }
}
