//! The header that `PACKET_VNET_HDR` and `IFF_VNET_HDR` put before each frame.
//!
//! It is `struct virtio_net_hdr` of virtio 1.2 section 5.1.6, ten bytes in the
//! byte order of this machine. Through it the kernel says what it knows of a
//! frame's checksum, and we say what we left for it to do.

use tidegate_memory::Checksum;

/// Bytes of the header.
pub const BYTES: usize = 10;

/// The header as it stands in memory.
pub type Raw = [u8; BYTES];

const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;

/// What the header of a received frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// What is known about the transport checksum.
    pub checksum: Checksum,
    /// The frame stands for several packets of the sender that were never cut
    /// (segmentation offload), so it may be longer than the MTU.
    pub merged: bool,
}

/// Reads the header of a received frame of `len` bytes.
///
/// A checksum place outside the frame is not believed: the frame then counts
/// as unchecked.
#[inline]
pub fn decode(raw: &Raw, len: usize) -> Received {
    let start = u16::from_ne_bytes([raw[6], raw[7]]);
    let offset = u16::from_ne_bytes([raw[8], raw[9]]);
    let checksum = if raw[0] & NEEDS_CSUM != 0 {
        if usize::from(start) + usize::from(offset) + 2 <= len {
            Checksum::Partial { start, offset }
        } else {
            Checksum::Unknown
        }
    } else if raw[0] & DATA_VALID != 0 {
        Checksum::Verified
    } else {
        Checksum::Unknown
    };
    Received { checksum, merged: raw[1] != 0 }
}

/// Makes the header of a frame to send.
#[inline]
pub fn encode(checksum: Checksum) -> Raw {
    let mut raw = [0; BYTES];
    if let Checksum::Partial { start, offset } = checksum {
        raw[0] = NEEDS_CSUM;
        raw[6..8].copy_from_slice(&start.to_ne_bytes());
        raw[8..10].copy_from_slice(&offset.to_ne_bytes());
    }
    raw
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        let partial = Checksum::Partial { start: 34, offset: 6 };
        assert_eq!(decode(&encode(partial), 60).checksum, partial);
        assert_eq!(decode(&encode(Checksum::Unknown), 60).checksum, Checksum::Unknown);
        assert_eq!(decode(&encode(Checksum::Verified), 60).checksum, Checksum::Unknown);
    }

    #[test]
    fn a_checked_frame_is_verified_and_a_merged_one_is_known() {
        let mut raw = [0; BYTES];
        raw[0] = DATA_VALID;
        assert_eq!(decode(&raw, 60), Received { checksum: Checksum::Verified, merged: false });
        raw[1] = 5;
        assert!(decode(&raw, 60).merged);
    }

    proptest! {
        #[test]
        fn a_partial_checksum_always_lies_inside_the_frame(raw: Raw, len in 0usize..2048) {
            if let Checksum::Partial { start, offset } = decode(&raw, len).checksum {
                prop_assert!(usize::from(start) + usize::from(offset) + 2 <= len);
            }
        }
    }
}
