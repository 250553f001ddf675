//! Flag by which a waiting process requests to be woken by its peer.

use super::SharedWords;
use crate::sync::{Ordering, fence};

/// A word that the waiting side sets before its last check, and that the other side clears
/// after it has made progress.
///
/// Either the last check of the waiting side sees the progress, or the other side sees the
/// request. An untrusted peer can at worst cause too many wake-ups, or none.
pub struct WakeFlag<M>(M);

impl<M: SharedWords> WakeFlag<M> {
    /// Uses the first of these words; `None` when there is none.
    pub fn new(words: M) -> Option<Self> {
        words.words().first()?;
        Some(Self(words))
    }

    /// Requests a wake-up. Check once more after this call.
    #[inline]
    pub fn request(&self) {
        self.0.words()[0].store(1, Ordering::Relaxed);
        // Pairs with the fence in `take`.
        fence(Ordering::SeqCst);
    }

    /// Withdraws the request.
    #[inline]
    pub fn clear(&self) {
        self.0.words()[0].store(0, Ordering::Relaxed);
    }

    /// True while a request of the other side is pending.
    #[inline]
    pub fn is_requested(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.words()[0].load(Ordering::Relaxed) != 0
    }

    /// Takes a pending request after progress was made; true if the other side must be woken.
    /// Returns true once for each request.
    #[inline]
    pub fn take(&self) -> bool {
        fence(Ordering::SeqCst);
        let word = &self.0.words()[0];
        word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Relaxed) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::{Arc, AtomicU64};

    fn words() -> Arc<Vec<AtomicU64>> {
        Arc::new((0..2).map(|_| AtomicU64::new(0)).collect())
    }

    #[cfg(not(loom))]
    #[test]
    fn take_reports_each_request_once() {
        let flag = WakeFlag::new(words()).unwrap();
        assert!(!flag.take());
        flag.request();
        assert!(flag.is_requested());
        assert!(flag.take());
        assert!(!flag.is_requested());
        assert!(!flag.take());
        flag.request();
        flag.clear();
        assert!(!flag.take());
    }

    /// No side waits for progress that was already made.
    #[cfg(loom)]
    #[test]
    fn loses_no_wakeup() {
        loom::model(|| {
            let words = words();
            let theirs = Arc::clone(&words);
            let thread = loom::thread::spawn(move || {
                theirs[1].store(1, Ordering::Release);
                WakeFlag::new(theirs).unwrap().take()
            });
            let flag = WakeFlag::new(Arc::clone(&words)).unwrap();
            flag.request();
            let saw = words[1].load(Ordering::Acquire) == 1;
            let woken = thread.join().unwrap();
            assert!(saw || woken);
        });
    }
}
