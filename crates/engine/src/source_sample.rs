//! Sampled sources: which peers ask for what is served here, as input of admission control.

use tidegate_device::{Burst, Medium};
use tidegate_gate::admission::{PacketKind, PacketMeta, SourceId};
use tidegate_memory::Arena;
use tidegate_wire::Protocol;

/// Sampling interval: the first frame of a burst and each 16th after it.
const SAMPLE_INTERVAL_FRAMES: usize = 16;

/// Source of a sampled frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampledSource {
    pub(crate) source: SourceId,
    /// The frame is a datagram to a served port. Only such a datagram makes its source known; a TCP
    /// peer is known once it completes a handshake. The sources of a flood below the overload must
    /// not become known ones.
    pub(crate) is_served: bool,
}

/// Sources of some frames of a burst. `serves_udp_port` returns true for the ports of UDP sockets.
pub(crate) fn sample_sources<'a>(
    medium: Medium,
    arena: &'a Arena,
    burst: &'a Burst,
    serves_udp_port: &'a dyn Fn(u16) -> bool,
) -> impl Iterator<Item = SampledSource> + 'a {
    burst.iter().step_by(SAMPLE_INTERVAL_FRAMES).map(move |frame| {
        let meta = PacketMeta::parse(medium, arena.bytes(frame));
        let is_udp = meta.kind == PacketKind::Ip(Protocol::UDP);
        let is_served = is_udp && meta.destination_port.is_some_and(serves_udp_port);
        SampledSource { source: meta.source_id(), is_served }
    })
}
