//! Memory that another process may write to while it is copied.

/// Memory that is reached by copies only.
pub trait Bytes {
    /// How many bytes there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `from` to there, from byte `at` on. What does not fit is left out.
    fn put(&self, at: usize, from: &[u8]);

    /// Copies into `to`, from byte `at` on. What is not there stays as it is.
    fn get(&self, at: usize, to: &mut [u8]);
}
