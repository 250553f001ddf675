//! Interface between a load generator and its means of transmission.

use std::io;

use crate::workload::WrittenPayload;

/// Sends requests and receives responses, over kernel sockets or a device.
pub trait Link {
    /// Returns the number of flows: source address and port pairs.
    fn flow_count(&self) -> u32;

    /// Returns the number of requests that can be pushed now.
    fn space(&self) -> usize;

    /// Queues one request. `write` gets its flow and the buffer for its payload. Call only when
    /// [`Self::space`] is not 0.
    fn push(&mut self, write: impl FnOnce(u32, &mut [u8]) -> WrittenPayload);

    /// Sends the queued requests.
    ///
    /// # Errors
    /// When the link can no longer send.
    fn flush(&mut self) -> io::Result<()>;

    /// Receives up to `quota` packets and calls `on_response` with the flow and payload of each
    /// response.
    ///
    /// # Errors
    /// When the link can no longer receive.
    fn poll(&mut self, quota: usize, on_response: impl FnMut(u32, &[u8])) -> io::Result<()>;
}
