//! Processor on which one side of an attachment ran last.
//!
//! Two sides on one processor must not busy-poll for each other: only one of them can run.

use std::sync::atomic::Ordering;

use tidegate_memory::shared::{SharedWords, WordRange};

/// Word with the number of a processor plus one; 0 while it is unknown.
///
/// The word is a hint. An untrusted side that writes a false number makes the other side sleep
/// where it could busy-poll, or busy-poll where it should sleep.
pub(crate) struct LastProcessor(WordRange);

impl LastProcessor {
    /// Uses the first of these words.
    pub(crate) fn new(words: WordRange) -> Self {
        Self(words)
    }

    /// Tells the other side that this side runs on `processor`.
    pub(crate) fn publish(&self, processor: usize) {
        let number = processor as u64 + 1;
        // Unchanged, as mostly, it stays in the caches of both sides.
        if self.load() != number
            && let Some(word) = self.0.words().first()
        {
            word.store(number, Ordering::Relaxed);
        }
    }

    /// True if the other side ran on `processor` last.
    pub(crate) fn is(&self, processor: usize) -> bool {
        self.load() == processor as u64 + 1
    }

    fn load(&self) -> u64 {
        self.0.words().first().map_or(0, |word| word.load(Ordering::Relaxed))
    }
}
