//! Copying packets.

/// Half the length of the longest packet that is copied inline, without a call.
const HALF_BYTES: usize = 64;

/// Copies `from` to `to`, which has the same length.
///
/// Packets of 64 to 128 bytes, the size used in floods, are copied inline. For so few bytes,
/// calling `memcpy` and saving registers across the call costs as much as the copy.
///
/// # Panics
/// When the lengths differ.
#[inline(always)]
pub fn copy_packet(to: &mut [u8], from: &[u8]) {
    assert!(to.len() == from.len(), "source and destination of a packet copy differ in length");
    let last = from.len().wrapping_sub(HALF_BYTES);
    if last <= HALF_BYTES
        && let (Some(a), Some(b)) = (from.first_chunk(), from.last_chunk::<HALF_BYTES>())
        && let Some(start) = to.first_chunk_mut::<HALF_BYTES>()
    {
        *start = *a;
        if let Some(end) = to.last_chunk_mut() {
            *end = *b;
        }
    } else {
        to.copy_from_slice(from);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn copies_every_length_exactly() {
        let from: Vec<u8> = (0..=255).collect();
        for len in 0..200 {
            let mut to = [0xee; 202];
            copy_packet(&mut to[1..=len], &from[..len]);
            assert_eq!((to[0], to[len + 1]), (0xee, 0xee));
            assert_eq!(to[1..=len], from[..len]);
        }
    }
}
