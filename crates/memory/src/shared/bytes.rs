//! Memory that another process may write to while it is copied.

/// Memory that is accessed by copying only.
pub trait SharedBytes {
    /// Length in bytes.
    fn len(&self) -> usize;

    /// True if there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `from` into the memory, starting at byte `offset`. Bytes beyond the end are left out.
    fn write_at(&self, offset: usize, from: &[u8]);

    /// Copies into `to` from the memory, starting at byte `offset`. Bytes of `to` beyond the end of
    /// the memory stay as they are.
    fn read_at(&self, offset: usize, to: &mut [u8]);
}
