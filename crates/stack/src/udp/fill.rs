//! How full receive queues are.

use super::UdpId;
use crate::Stack;

/// The unit of [`Stack::udp_fill`]: what a full queue holds.
pub const FULL: u32 = 1024;

impl UdpId {
    /// The name as a number, for tables outside of the stack.
    pub fn to_bits(self) -> u64 {
        u64::from(self.index) << 32 | u64::from(self.generation)
    }

    /// The name that a number is, for who gives names of this kind to something
    /// else.
    pub fn from_bits(bits: u64) -> Self {
        Self { index: (bits >> 32) as u32, generation: bits as u32 }
    }
}

impl Stack {
    /// How full the receive queue of a socket is, in parts of [`FULL`]: by
    /// packets or by bytes, whichever is nearer to its limit. `None` when there
    /// is no such socket.
    pub fn udp_fill(&self, id: UdpId) -> Option<u32> {
        let socket = self.udp.get(id)?;
        let part = |held: usize, limit: usize| {
            let part = held as u128 * u128::from(FULL) / (limit.max(1) as u128);
            part.min(u128::from(FULL)) as u32
        };
        let (packets, bytes) = socket.held();
        let (packet_limit, byte_limit) = socket.limits();
        Some(part(packets, packet_limit).max(part(bytes, byte_limit)))
    }
}
