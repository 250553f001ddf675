//! Fill level of receive queues.

use super::UdpId;
use crate::Stack;

/// Fill level of a full receive queue, as reported by [`Stack::udp_queue_fill`].
pub const QUEUE_FILL_SCALE: u32 = 1024;

impl Stack {
    /// Fill level of a socket's receive queue in parts of [`QUEUE_FILL_SCALE`]: by packets or by
    /// bytes, whichever is nearer to its limit. `None` if the socket does not exist.
    pub fn udp_queue_fill(&self, id: UdpId) -> Option<u32> {
        let socket = self.udp.get(id)?;
        let fill = |held: usize, limit: usize| {
            let fill = held as u128 * u128::from(QUEUE_FILL_SCALE) / (limit.max(1) as u128);
            fill.min(u128::from(QUEUE_FILL_SCALE)) as u32
        };
        let (packets, bytes) = socket.queued();
        let (packet_limit, byte_limit) = socket.queue_limits();
        Some(fill(packets, packet_limit).max(fill(bytes, byte_limit)))
    }
}
