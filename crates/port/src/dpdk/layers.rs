//! Where the headers of a frame are, for a device that sums checksums.

use tidegate_memory::Checksum;
use tidegate_wire::checksum::Sum;

/// Where a sum begins, and of what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layers {
    /// Bytes of the Ethernet header and its tag.
    pub link_bytes: u8,
    /// Bytes of the IP header and its extensions.
    pub network_bytes: u8,
    /// IPv6.
    pub is_v6: bool,
    /// TCP; else UDP.
    pub is_tcp: bool,
}

/// Where the checksum stands in a TCP and in a UDP header.
const TCP_OFFSET: u16 = 16;
const UDP_OFFSET: u16 = 6;

/// What the device has to sum in this frame; `None` when there is nothing, or
/// when it is nothing that a device knows.
pub fn to_sum(bytes: &[u8], checksum: Checksum) -> Option<Layers> {
    let Checksum::Partial { start, offset } = checksum else { return None };
    let is_tcp = match offset {
        TCP_OFFSET => true,
        UDP_OFFSET => false,
        _ => return None,
    };
    let (link_bytes, kind) = match bytes.get(12..18)? {
        [0x81, 0x00, _, _, high, low] => (18, [*high, *low]),
        [high, low, ..] => (14, [*high, *low]),
        _ => return None,
    };
    let is_v6 = match kind {
        [0x08, 0x00] => false,
        [0x86, 0xdd] => true,
        _ => return None,
    };
    let network_bytes = u8::try_from(start.checked_sub(link_bytes)?).ok()?;
    Some(Layers { link_bytes: link_bytes as u8, network_bytes, is_v6, is_tcp })
}

/// Sums what is partial, for a device that does not.
pub fn complete(bytes: &mut [u8], checksum: Checksum) {
    let Checksum::Partial { start, offset } = checksum else { return };
    let Some(covered) = bytes.get_mut(usize::from(start)..) else { return };
    let sum = Sum::of(covered);
    let value = if offset == UDP_OFFSET { sum.udp_checksum() } else { sum.checksum() };
    let at = usize::from(offset);
    if let Some(field) = covered.get_mut(at..at + 2) {
        field.copy_from_slice(&value.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partial_sum_is_completed_inside_the_frame_only() {
        let mut bytes = [0xaa, 0xaa, 1, 2, 0, 5, 3, 4];
        complete(&mut bytes, Checksum::Partial { start: 2, offset: 2 });
        assert!(Sum::of(&bytes[2..]).with(&[0, 5]).is_valid(), "the 5 was in the field");
        for (start, offset) in [(7, 0), (9, 0), (2, 5), (u16::MAX, u16::MAX)] {
            let before = bytes;
            complete(&mut bytes, Checksum::Partial { start, offset });
            assert_eq!(bytes, before);
        }
    }

    #[test]
    fn headers_are_found_by_family_and_tag() {
        for (kind, tag, start) in [
            (&[0x08, 0x00][..], false, 34),
            (&[0x86, 0xdd], false, 54),
            (&[0x08, 0x00], true, 38),
            (&[0x86, 0xdd], true, 58),
        ] {
            let mut frame = vec![0; 12];
            frame.extend(if tag { &[0x81, 0x00, 0, 5][..] } else { &[] });
            frame.extend(kind);
            frame.resize(80, 0);
            let is_v6 = kind[0] == 0x86;
            let layers = |offset| to_sum(&frame, Checksum::Partial { start, offset });
            let expected = Layers {
                link_bytes: if tag { 18 } else { 14 },
                network_bytes: if is_v6 { 40 } else { 20 },
                is_v6,
                is_tcp: true,
            };
            assert_eq!(layers(16), Some(expected));
            assert_eq!(layers(6), Some(Layers { is_tcp: false, ..expected }));
            assert_eq!(layers(2), None, "no device sums ICMP");
        }
    }

    #[test]
    fn what_is_complete_is_left_alone() {
        assert_eq!(to_sum(&[0; 80], Checksum::Unknown), None);
        assert_eq!(to_sum(&[0; 80], Checksum::Partial { start: 34, offset: 6 }), None);
        assert_eq!(to_sum(&[0; 3], Checksum::Partial { start: 34, offset: 6 }), None);
    }
}
