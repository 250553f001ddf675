//! Copying packets.

/// Two of these make the longest packet that is copied without a call.
const HALF_BYTES: usize = 64;

/// Copies `from` to `to`, which is as long. Packets of 64 to 128 bytes, of
/// which floods are made, are copied on the spot: for so few bytes, calling
/// `memcpy` and keeping everything at hand over the call costs as much as the
/// copy.
///
/// # Panics
/// When the lengths differ.
#[inline(always)]
pub fn copy_packet(to: &mut [u8], from: &[u8]) {
    assert!(to.len() == from.len(), "a packet is copied to a place of its length");
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
    fn every_length_is_copied_whole_and_nothing_else() {
        let from: Vec<u8> = (0..=255).collect();
        for len in 0..200 {
            let mut to = [0xee; 202];
            copy_packet(&mut to[1..=len], &from[..len]);
            assert_eq!((to[0], to[len + 1]), (0xee, 0xee));
            assert_eq!(to[1..=len], from[..len]);
        }
    }
}
