//! Frames for the kernel to fill, and what they must have room for.

use tidegate_memory::{Arena, Frame};

/// What stands in front of an IP packet: an Ethernet header and a VLAN tag.
pub const LINK_HEADER_BYTES: usize = 14 + 4;

/// A frame whose whole tail is data.
#[inline]
pub fn blank(arena: &mut Arena) -> Option<Frame> {
    let mut frame = arena.alloc()?;
    let len = room(arena, &frame);
    let fits = arena.set_len(&mut frame, len);
    debug_assert!(fits, "the length is what the headroom leaves");
    Some(frame)
}

/// Bytes from the start of the frame's data to the end of its buffer.
pub fn room(arena: &Arena, frame: &Frame) -> usize {
    arena.room(frame)
}
