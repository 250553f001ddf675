//! Limits of an HTTP server.

use std::time::Duration;

use tidegate::TcpOptions;

/// Bytes that a body or a response has to move within its time-out.
pub(super) const PROGRESS_BYTES: u64 = 16 << 10;

/// Size of hyper's read buffer in bytes: also the largest request head, and the bytes of a response
/// from which on hyper takes no more of its body.
pub(super) const READ_BUFFER_BYTES: usize = 16 << 10;

/// Send buffer of a new connection, in bytes. A peer that takes data gets more.
pub(super) const MIN_SEND_BUFFER_BYTES: u32 = 16 << 10;

/// Receive buffer of a connection, in bytes.
const RECEIVE_BUFFER_BYTES: u32 = 64 << 10;

/// Limits of one HTTP server.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Concurrent connections; one more ends a stalled one, or waits to be accepted.
    pub max_connections: usize,
    /// Memory of all connections together in bytes, with all that waits in their buffers.
    pub memory_bytes: usize,
    /// Send buffer of one connection in bytes, while there is memory for it.
    pub max_send_buffer_bytes: u32,
    /// Time limit for a request head, from its first byte on.
    pub header_timeout: Duration,
    /// Time limit for the next 16 KiB of a request body, or for its end.
    pub body_timeout: Duration,
    /// Time limit in which the client has to take 16 KiB of a response, or its end.
    pub write_timeout: Duration,
    /// Time limit for silence before a request.
    pub idle_timeout: Duration,
}

/// Time by which TCP waits longer than the server.
const USER_TIMEOUT_MARGIN: Duration = Duration::from_secs(1);

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            max_connections: 65_536,
            memory_bytes: 192 << 20,
            max_send_buffer_bytes: 1 << 20,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(30),
        }
    }
}

impl HttpLimits {
    /// Options for the listeners of a server with these limits.
    pub fn tcp_options(&self) -> TcpOptions {
        TcpOptions::default()
            .no_delay(true)
            .send_buffer_bytes(MIN_SEND_BUFFER_BYTES)
            .receive_buffer_bytes(RECEIVE_BUFFER_BYTES)
            .user_timeout_ms(self.user_timeout_ms())
    }

    /// Limit for TCP's buffers of all connections together, in bytes. TCP becomes sparing in the
    /// last quarter of its memory; the server has evicted connections before.
    pub fn tcp_buffer_bytes(&self) -> usize {
        self.memory_bytes.saturating_add(self.memory_bytes / 3)
    }

    /// Part of one of several cores that serve together: connections and memory are divided.
    pub fn share_of(self, cores: usize) -> Self {
        let cores = cores.max(1);
        Self {
            max_connections: self.max_connections.div_ceil(cores),
            memory_bytes: self.memory_bytes / cores,
            ..self
        }
    }

    /// Lowers the number of connections to `max_connections`.
    pub(super) fn within_descriptors(self, max_connections: usize) -> Self {
        Self { max_connections: self.max_connections.min(max_connections), ..self }
    }

    /// Time in milliseconds after which TCP ends a connection whose peer takes nothing: longer than
    /// the server itself waits, which counts its time-outs.
    pub(super) fn user_timeout_ms(&self) -> u32 {
        let timeout = self.write_timeout + USER_TIMEOUT_MARGIN;
        u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX)
    }
}
