//! Buffers of a ring: all of one size, in one piece of memory, named by index.

use std::io;

/// Buffer of a ring, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferIndex(pub u32);

/// Holder of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    /// Nobody: free for the next receive.
    Pool,
    /// The program.
    Program,
    /// A send that is queued or in flight.
    Ring,
}

/// Buffers of a ring.
pub(super) struct BufferTable {
    bytes: Box<[u8]>,
    buffer_bytes: usize,
    holders: Box<[Holder]>,
    free: Vec<u32>,
}

impl BufferTable {
    /// Allocates `count` buffers.
    pub(super) fn new(count: u32, buffer_bytes: usize) -> Self {
        Self {
            bytes: vec![0; count as usize * buffer_bytes].into(),
            buffer_bytes,
            holders: vec![Holder::Pool; count as usize].into(),
            // The last one is taken first: begin with the first ones.
            free: (0..count).rev().collect(),
        }
    }

    pub(super) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Takes a free buffer for the program.
    pub(super) fn take(&mut self) -> Option<BufferIndex> {
        let index = self.free.pop()?;
        self.holders[index as usize] = Holder::Program;
        Some(BufferIndex(index))
    }

    /// Lets `receive` write to a free buffer. The buffer goes to the program if `receive`
    /// succeeds. Returns `None` if no buffer is free.
    pub(super) fn fill<R, E>(
        &mut self,
        receive: impl FnOnce(&mut [u8]) -> Result<R, E>,
    ) -> Option<Result<(BufferIndex, R), E>> {
        let index = BufferIndex(*self.free.last()?);
        Some(receive(self.bytes_mut(index)).map(|received| {
            self.take();
            (index, received)
        }))
    }

    /// Gives a buffer of the program to a send.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the program does not hold the buffer, or it is shorter
    /// than `len`.
    pub(super) fn lend(&mut self, index: BufferIndex, len: usize) -> io::Result<()> {
        let invalid = |text| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        match self.holders.get_mut(index.0 as usize) {
            Some(_) if len > self.buffer_bytes => invalid(
                "a send is longer than a buffer: split it, or raise RingConfig::buffer_bytes",
            ),
            Some(holder) if *holder == Holder::Program => {
                *holder = Holder::Ring;
                Ok(())
            }
            _ => invalid("the program does not hold the buffer: get one by Ring::take_buffer"),
        }
    }

    /// Returns the buffer of a send to the program.
    pub(super) fn give_back(&mut self, index: BufferIndex) {
        self.holders[index.0 as usize] = Holder::Program;
    }

    /// Frees a buffer that the program holds. Returns false if it does not.
    pub(super) fn release(&mut self, index: BufferIndex) -> bool {
        let Some(holder) = self.holders.get_mut(index.0 as usize) else { return false };
        let is_held = *holder == Holder::Program;
        if is_held {
            *holder = Holder::Pool;
            self.free.push(index.0);
        }
        is_held
    }

    /// Whole buffer.
    ///
    /// # Panics
    /// If there is no such buffer.
    pub(super) fn bytes(&self, index: BufferIndex) -> &[u8] {
        &self.bytes[index.0 as usize * self.buffer_bytes..][..self.buffer_bytes]
    }

    /// Whole buffer, to be written.
    ///
    /// # Panics
    /// If there is no such buffer.
    pub(super) fn bytes_mut(&mut self, index: BufferIndex) -> &mut [u8] {
        &mut self.bytes[index.0 as usize * self.buffer_bytes..][..self.buffer_bytes]
    }
}
