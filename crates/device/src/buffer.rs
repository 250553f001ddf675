//! Receive buffers and the space that they must have.

use tidegate_memory::{Arena, Frame};

/// Bytes in front of an IP packet: an Ethernet header and a VLAN tag.
pub const LINK_HEADER_BYTES: usize = 14 + 4;

/// Allocates a frame whose data extends to the end of its buffer, to be filled on receive.
#[inline]
pub fn alloc_receive_buffer(arena: &mut Arena) -> Option<Frame> {
    let mut frame = arena.alloc()?;
    let len = space(arena, &frame);
    let fits = arena.set_len(&mut frame, len);
    debug_assert!(fits, "the length is the space after the headroom");
    Some(frame)
}

/// Bytes from the start of the frame's data to the end of its buffer.
pub fn space(arena: &Arena, frame: &Frame) -> usize {
    arena.space(frame)
}
