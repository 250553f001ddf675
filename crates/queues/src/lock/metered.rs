//! Metered locks: the six columns of Rivera's tables 3.1 to 3.10, as in the kernel's lock
//! statistics. [`LockMeter`] counts.

use std::marker::PhantomData;

use tidegate_memory::lock_meter::{ContentionStart, LockMeter, LockStatistics};

use super::{Lock, LockKind};

/// Locks of the kind `K` that keep statistics.
pub struct Metered<K>(PhantomData<K>);

impl<K: LockKind> LockKind for Metered<K> {
    type Lock<T: Send> = MeteredLock<T, K>;
    const NAME: &'static str = K::NAME;
}

/// A lock that keeps statistics.
pub struct MeteredLock<T: Send, K: LockKind> {
    lock: K::Lock<MeteredValue<T>>,
}

/// A value and the statistics of its lock.
struct MeteredValue<T> {
    value: T,
    meter: LockMeter,
}

impl<T> MeteredValue<T> {
    #[inline(always)]
    fn measure<R>(&mut self, using: impl FnOnce(&mut T) -> R) -> R {
        self.meter.on_acquired();
        let result = using(&mut self.value);
        self.meter.on_release();
        result
    }
}

impl<T: Send, K: LockKind> Lock<T> for MeteredLock<T, K> {
    fn new(value: T) -> Self {
        Self { lock: K::Lock::new(MeteredValue { value, meter: LockMeter::default() }) }
    }

    #[inline]
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        let using = match self.lock.try_with(|metered| metered.measure(using)) {
            Ok(result) => return result,
            Err(using) => using,
        };
        let contention_start = ContentionStart::now();
        self.lock.with(|metered| {
            metered.meter.on_contended(contention_start);
            using(metered)
        })
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
        // The closure must be returned unchanged if the lock is held.
        let mut using = Some(using);
        let use_it =
            |metered: &mut MeteredValue<T>| using.take().map(|using| metered.measure(using));
        let used = self.lock.try_with(use_it).ok().flatten();
        match (used, using) {
            (Some(result), _) => Ok(result),
            (None, Some(using)) => Err(using),
            (None, None) => unreachable!("a closure that ran has returned a result"),
        }
    }

    fn statistics(&self) -> Option<LockStatistics> {
        Some(self.lock.with(|metered| metered.meter.statistics()))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::Spin;
    use super::*;

    /// A lock whose `try_with` always fails.
    struct Busy;
    struct BusyLock<T>(std::sync::Mutex<T>);

    impl LockKind for Busy {
        type Lock<T: Send> = BusyLock<T>;
        const NAME: &'static str = "busy";
    }

    impl<T: Send> Lock<T> for BusyLock<T> {
        fn new(value: T) -> Self {
            Self(std::sync::Mutex::new(value))
        }

        fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
            using(&mut self.0.lock().unwrap())
        }

        fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
            Err(using)
        }
    }

    #[test]
    fn counts_acquisitions() {
        let lock = MeteredLock::<u32, Spin>::new(0);
        for _ in 0..3 {
            lock.with(|value| *value += 1);
        }
        assert!(lock.try_with(|value| *value += 1).is_ok());
        assert_eq!(lock.with(|value| *value), 4);
        let counted = lock.statistics().unwrap();
        assert_eq!((counted.acquisitions, counted.contentions), (5, 0));
        assert_eq!(counted.waited_ns, 0.0);
        assert!(counted.held_ns > 0.0);
    }

    #[test]
    fn counts_contentions() {
        let lock = MeteredLock::<u32, Busy>::new(0);
        for _ in 0..3 {
            lock.with(|value| *value += 1);
        }
        assert!(lock.try_with(|value| *value += 1).is_err());
        let counted = lock.statistics().unwrap();
        assert_eq!((counted.acquisitions, counted.contentions), (3, 3));
        assert!(counted.waited_ns > 0.0);
    }
}
