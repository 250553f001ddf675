//! A flag by which one side asks the other to be told.

use super::Words;
use crate::sync::{Ordering, fence};

/// A word that one side sets before it looks for the last time and waits, and
/// that the other side takes after it has done something.
///
/// Either the one that looks sees what was done, or the other sees that it is to
/// tell. The other side may lie: then it is told too often, or never.
pub struct Wanted<M>(M);

impl<M: Words> Wanted<M> {
    /// The first of these words; `None` when there is none.
    pub fn new(words: M) -> Option<Self> {
        words.words().first()?;
        Some(Self(words))
    }

    /// Asks to be told. Look once more after this call.
    #[inline]
    pub fn ask(&self) {
        self.0.words()[0].store(1, Ordering::Relaxed);
        // Pairs with the fence in `take`.
        fence(Ordering::SeqCst);
    }

    /// Does not wait any more.
    #[inline]
    pub fn clear(&self) {
        self.0.words()[0].store(0, Ordering::Relaxed);
    }

    /// Whether the other side has asked; it stays so until it is told.
    #[inline]
    pub fn is_asked(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.words()[0].load(Ordering::Relaxed) != 0
    }

    /// After something was done: whether the other side is to be told of it.
    /// That is so once for each time that it asked.
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
    fn who_asks_is_told_once() {
        let wanted = Wanted::new(words()).unwrap();
        assert!(!wanted.take());
        wanted.ask();
        assert!(wanted.is_asked());
        assert!(wanted.take());
        assert!(!wanted.is_asked());
        assert!(!wanted.take());
        wanted.ask();
        wanted.clear();
        assert!(!wanted.take());
    }

    /// Nobody waits for what was done already.
    #[cfg(loom)]
    #[test]
    fn no_interleaving_misses_the_other_side() {
        loom::model(|| {
            let words = words();
            let theirs = Arc::clone(&words);
            let thread = loom::thread::spawn(move || {
                theirs[1].store(1, Ordering::Release);
                Wanted::new(theirs).unwrap().take()
            });
            let wanted = Wanted::new(Arc::clone(&words)).unwrap();
            wanted.ask();
            let saw = words[1].load(Ordering::Acquire) == 1;
            let told = thread.join().unwrap();
            assert!(saw || told);
        });
    }
}
