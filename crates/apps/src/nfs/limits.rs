//! Limits of an NFS server.

use std::time::Duration;

use tidegate::TcpOptions;

/// Buffers of TCP for one connection, in bytes.
const SEND_BUFFER_BYTES: u32 = 256 << 10;
const RECEIVE_BUFFER_BYTES: u32 = 64 << 10;

/// Limits of one NFS server. The size of a call is bounded as well, by 16 KiB, and of a reply by
/// 64 KiB and its headers.
#[derive(Clone, Copy, Debug)]
pub struct NfsLimits {
    /// Concurrent connections. One more ends the connection that has been silent longest, of the
    /// source that has most.
    pub max_connections: usize,
    /// Memory in bytes for replies that clients have not taken, and once more for TCP's buffers.
    /// When it is used up, the connection that has taken nothing for longest ends.
    pub memory_bytes: usize,
    /// Time limit for silence.
    pub idle_timeout: Duration,
    /// Time limit for the rest of a call, and for the client to take replies.
    pub progress_timeout: Duration,
}

impl Default for NfsLimits {
    /// Linux clients close idle connections after 5 minutes by themselves.
    fn default() -> Self {
        Self {
            max_connections: 1024,
            memory_bytes: 64 << 20,
            idle_timeout: Duration::from_secs(360),
            progress_timeout: Duration::from_secs(30),
        }
    }
}

impl NfsLimits {
    /// Options for the listeners of a server with these limits.
    pub fn tcp_options(&self) -> TcpOptions {
        let user_timeout = u32::try_from(self.progress_timeout.as_millis()).unwrap_or(u32::MAX);
        TcpOptions::default()
            .no_delay(true)
            .send_buffer_bytes(SEND_BUFFER_BYTES)
            .receive_buffer_bytes(RECEIVE_BUFFER_BYTES)
            .user_timeout_ms(user_timeout)
    }

    /// Part of one of several cores that serve together.
    pub fn share_of(self, cores: usize) -> Self {
        let cores = cores.max(1);
        Self {
            max_connections: self.max_connections.div_ceil(cores),
            memory_bytes: self.memory_bytes / cores,
            ..self
        }
    }
}
