//! Reply to a received packet, held back while that packet is borrowed.

use tidegate_wire::MacAddr;

use crate::ip::packet::Packet;

/// Reply prepared while a received packet is still borrowed, and sent after that packet is
/// processed.
#[derive(Default)]
pub(crate) struct PendingReply {
    /// Payload of the IP packet.
    pub(crate) payload: Vec<u8>,
    /// Header fields; `None` when there is nothing to send.
    pub(crate) packet: Option<Packet>,
    /// Destination hardware address, if known without a lookup.
    pub(crate) mac: Option<MacAddr>,
}
