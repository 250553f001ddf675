//! What a load generator sends through.

use std::io;

use super::workload::Payload;

/// A way out for requests and in for answers.
pub trait Line {
    /// How many different flows it sends on.
    fn flows(&self) -> u32;

    /// How many requests may be pushed now.
    fn room(&self) -> usize;

    /// Adds one request; `write` is given its flow and the room for its
    /// payload. Only when [`Line::room`] is not 0.
    fn push(&mut self, write: impl FnOnce(u32, &mut [u8]) -> Payload);

    /// Sends what was pushed.
    ///
    /// # Errors
    /// When nothing can be sent any more.
    fn flush(&mut self) -> io::Result<()>;

    /// Takes up to `quota` packets that have arrived and calls `answer` with
    /// the flow and payload of each that is for us.
    ///
    /// # Errors
    /// When nothing can be received any more.
    fn poll(&mut self, quota: usize, answer: impl FnMut(u32, &[u8])) -> io::Result<()>;
}
