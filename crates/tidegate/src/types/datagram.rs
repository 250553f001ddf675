//! Description of a received datagram.

use std::net::{IpAddr, SocketAddr};

/// Addresses and lengths of a received datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramMeta {
    /// Bytes written to the buffer.
    pub len: usize,
    /// True if the datagram was longer than the buffer; the rest is lost.
    pub truncated: bool,
    /// Length of the datagram in bytes, including bytes that did not fit.
    pub datagram_len: usize,
    /// Address of the sender.
    pub from: SocketAddr,
    /// Local address that the datagram was sent to.
    pub to: IpAddr,
    /// Remaining hop limit (IPv6) or time to live (IPv4); `None` at a reader.
    pub hop_limit: Option<u8>,
    /// Differentiated services code point and ECN bits, as one byte; `None` at a reader.
    pub traffic_class: Option<u8>,
    /// Time at which the stack passed the datagram on, in nanoseconds of the system's monotonic
    /// clock; `None` at a reader.
    pub received_ns: Option<u64>,
}
