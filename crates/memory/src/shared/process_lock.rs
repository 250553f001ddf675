//! Lock among processes, in memory that they share.

use std::io;
use std::marker::PhantomData;

use libc::{pthread_mutex_t, pthread_mutexattr_t};

use super::SharedWords;
use super::region::WordRange;

/// Words of a lock.
pub const LOCK_WORDS: usize = size_of::<pthread_mutex_t>().div_ceil(size_of::<u64>());

/// Exclusive lock among the threads of all processes that share the memory. A free lock is taken
/// without a system call. The kernel releases the lock of a thread that exits, however it exits.
#[derive(Clone)]
pub struct ProcessLock(WordRange);

/// Held [`ProcessLock`], released on drop by the thread that took it.
pub struct ProcessLockGuard {
    lock: ProcessLock,
    not_send: PhantomData<*const ()>,
}

fn check(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
}

impl ProcessLock {
    /// Lock in these words; `None` when they are not [`LOCK_WORDS`].
    pub fn new(words: WordRange) -> Option<Self> {
        (words.words().len() == LOCK_WORDS).then_some(Self(words))
    }

    fn mutex(&self) -> *mut pthread_mutex_t {
        // Atomic words may be written through a shared reference.
        self.0.words().as_ptr().cast_mut().cast()
    }

    /// Makes the lock usable. The creator of the memory calls this once, before other processes
    /// have the memory.
    ///
    /// # Errors
    /// The C library does not have such locks.
    pub fn initialize(&self) -> io::Result<()> {
        // SAFETY: plain integers, for which zero is valid; `pthread_mutexattr_init` sets them.
        let mut attributes: pthread_mutexattr_t = unsafe { std::mem::zeroed() };
        // SAFETY: the attributes are valid; the words have the size and the alignment of a mutex,
        // and no thread uses it yet.
        unsafe {
            check(libc::pthread_mutexattr_init(&raw mut attributes))?;
            let shared = libc::PTHREAD_PROCESS_SHARED;
            check(libc::pthread_mutexattr_setpshared(&raw mut attributes, shared))?;
            let robust = libc::PTHREAD_MUTEX_ROBUST;
            check(libc::pthread_mutexattr_setrobust(&raw mut attributes, robust))?;
            check(libc::pthread_mutex_init(self.mutex(), &raw const attributes))?;
            check(libc::pthread_mutexattr_destroy(&raw mut attributes))
        }
    }

    /// Waits until the lock is free, and takes it.
    ///
    /// # Errors
    /// Another process has destroyed the lock.
    pub fn lock(&self) -> io::Result<ProcessLockGuard> {
        // SAFETY: the words hold a mutex. Whatever another process writes there, the C library
        // reaches no other memory by them but that of this process's own list of held mutexes.
        let code = unsafe { libc::pthread_mutex_lock(self.mutex()) };
        if code == libc::EOWNERDEAD {
            // SAFETY: as above; this thread holds the mutex.
            check(unsafe { libc::pthread_mutex_consistent(self.mutex()) })?;
        } else {
            check(code)?;
        }
        Ok(ProcessLockGuard { lock: self.clone(), not_send: PhantomData })
    }
}

impl Drop for ProcessLockGuard {
    fn drop(&mut self) {
        // SAFETY: this thread holds the mutex. Unlocking a held mutex does not fail.
        unsafe { libc::pthread_mutex_unlock(self.lock.mutex()) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::shared::Region;

    fn lock_in(region: Region) -> (ProcessLock, WordRange) {
        let region = Arc::new(region);
        let lock = ProcessLock::new(WordRange::new(&region, 0..LOCK_WORDS).unwrap()).unwrap();
        (lock, WordRange::new(&region, LOCK_WORDS..LOCK_WORDS + 1).unwrap())
    }

    #[test]
    fn two_mappings_exclude_each_other() {
        let ours = Region::create(LOCK_WORDS + 1).unwrap();
        let theirs = ours.as_fd().try_clone_to_owned().unwrap();
        let theirs = lock_in(Region::open(theirs, LOCK_WORDS + 1).unwrap());
        let ours = lock_in(ours);
        ours.0.initialize().unwrap();
        const ROUNDS: u64 = 20_000;
        let count = |(lock, counter): &(ProcessLock, WordRange)| {
            for _ in 0..ROUNDS {
                let _guard = lock.lock().unwrap();
                let counter = &counter.words()[0];
                counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| count(&theirs));
            count(&ours);
        });
        assert_eq!(ours.1.words()[0].load(Ordering::Relaxed), 2 * ROUNDS);
    }

    #[test]
    fn thread_that_exits_releases_its_lock() {
        let (lock, _) = lock_in(Region::create(LOCK_WORDS + 1).unwrap());
        lock.initialize().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| std::mem::forget(lock.lock().unwrap()));
        });
        drop(lock.lock().unwrap());
        drop(lock.lock().unwrap());
    }
}
