//! Configuration of a socket's readers.

use std::io;

/// Choice of the reader that gets a datagram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distribution {
    /// By hash of the peer's address and port and the local address, so that one peer's
    /// datagrams stay in order. A datagram is dropped if that reader's queue is full.
    #[default]
    FlowHash,
    /// In turn, skipping readers whose queue is full.
    RoundRobin,
    /// The reader with the fewest queued datagrams.
    LeastLoaded,
}

/// Configuration of a socket's readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadersConfig {
    /// Choice of the reader that gets a datagram.
    pub distribution: Distribution,
    /// Most datagrams queued for each reader, and most of its replies waiting to be sent.
    pub queue_packets: usize,
    /// Most bytes queued for each reader.
    pub queue_bytes: usize,
    /// Longest reply of [`UdpReader::exchange`](crate::UdpReader::exchange), in bytes.
    pub max_reply_bytes: usize,
}

impl Default for ReadersConfig {
    fn default() -> Self {
        Self {
            distribution: Distribution::default(),
            queue_packets: 256,
            queue_bytes: 512 << 10,
            max_reply_bytes: 2048,
        }
    }
}

impl ReadersConfig {
    /// Upper limit of `queue_packets`.
    pub const MAX_QUEUE_PACKETS: usize = 1 << 20;

    /// Sets the choice of the reader that gets a datagram.
    pub fn distribution(self, distribution: Distribution) -> Self {
        Self { distribution, ..self }
    }

    /// Sets the most datagrams queued for each reader: 1 to
    /// [`ReadersConfig::MAX_QUEUE_PACKETS`].
    pub fn queue_packets(self, queue_packets: usize) -> Self {
        Self { queue_packets, ..self }
    }

    /// Sets the most bytes queued for each reader, at least 1.
    pub fn queue_bytes(self, queue_bytes: usize) -> Self {
        Self { queue_bytes, ..self }
    }

    /// Sets the longest reply of [`UdpReader::exchange`](crate::UdpReader::exchange) in bytes,
    /// at least 1.
    pub fn max_reply_bytes(self, max_reply_bytes: usize) -> Self {
        Self { max_reply_bytes, ..self }
    }

    /// Checks that all limits are in range.
    pub(crate) fn check(&self) -> io::Result<()> {
        let message = if self.queue_packets == 0 || self.queue_packets > Self::MAX_QUEUE_PACKETS {
            format!(
                "queue_packets is {}: give 1 to {}",
                self.queue_packets,
                Self::MAX_QUEUE_PACKETS
            )
        } else if self.queue_bytes == 0 || self.max_reply_bytes == 0 {
            "queue_bytes and max_reply_bytes must be at least 1".to_owned()
        } else {
            return Ok(());
        };
        Err(io::Error::new(io::ErrorKind::InvalidInput, message))
    }
}
