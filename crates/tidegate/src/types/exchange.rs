//! Exchanges: batches of UDP datagrams that a callback answers.

use tidegate_memory::Arena;
use tidegate_stack::{Stack, UdpId};

#[cfg(feature = "attach")]
use super::datagram::DatagramMeta;
use super::service_times::ServiceTimes;

/// Most datagrams answered before the replies are transmitted.
pub(crate) const MAX_EXCHANGE_DATAGRAMS: usize = 64;

/// Largest payload of a datagram, in bytes: that of IPv6.
#[cfg(feature = "attach")]
const MAX_PAYLOAD_BYTES: usize = 65_527;

/// Callback of an exchange, in the two forms that the backends need.
pub(crate) trait Exchange {
    /// Answers the queued datagrams of a socket in the frames of a stack. Returns the number of
    /// datagrams taken, at most [`MAX_EXCHANGE_DATAGRAMS`].
    fn answer_in_frames(
        &mut self,
        stack: &mut Stack,
        arena: &mut Arena,
        now_ns: u64,
        id: UdpId,
    ) -> usize;

    /// Service times to measure, if any.
    #[inline]
    fn times(&mut self) -> Option<&mut ServiceTimes> {
        None
    }

    /// Answers the datagram that was copied into `buffers`. Returns the reply, if there is one.
    #[cfg(feature = "attach")]
    fn answer_copy<'b>(
        &mut self,
        buffers: &'b mut ExchangeBuffers,
        request: &DatagramMeta,
    ) -> Option<&'b [u8]>;
}

/// Buffers of an exchange that copies datagrams.
#[cfg(feature = "attach")]
pub(crate) struct ExchangeBuffers {
    /// Payload of the request.
    pub(crate) request: Box<[u8]>,
    /// Payload of a reply that is not written over its request.
    pub(crate) reply: Box<[u8]>,
}

#[cfg(feature = "attach")]
impl ExchangeBuffers {
    /// Allocates buffers for the largest datagram.
    pub(crate) fn new() -> Self {
        let buffer = || vec![0; MAX_PAYLOAD_BYTES].into();
        Self { request: buffer(), reply: buffer() }
    }
}
