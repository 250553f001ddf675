//! Ethernet II frames, with at most one VLAN tag (IEEE 802.1Q).

use crate::field::{mac_at, put, put_u16, u16_at};
use crate::{DropReason, EtherType, MacAddr};

/// VLAN tag control information (IEEE 802.1Q): priority and VLAN identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VlanTag(pub u16);

impl VlanTag {
    /// Number of bytes that a tag adds to a frame.
    pub const BYTES: usize = 4;

    /// Creates a tag for VLAN `id` (0 to 4095; higher bits are cut off) with priority 0.
    pub const fn new(id: u16) -> Self {
        VlanTag(id & 0x0fff)
    }

    /// Returns the VLAN identifier; 0 means that the tag carries only a priority.
    #[inline]
    pub const fn id(self) -> u16 {
        self.0 & 0x0fff
    }

    /// Returns the priority code point, 0 to 7.
    pub const fn priority(self) -> u8 {
        (self.0 >> 13) as u8
    }
}

/// An Ethernet header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EthernetHeader {
    /// Destination hardware address.
    pub destination: MacAddr,
    /// Source hardware address.
    pub source: MacAddr,
    /// VLAN tag; `None` for an untagged frame.
    pub vlan: Option<VlanTag>,
    /// Type of the payload; never [`EtherType::VLAN`] in a parsed header.
    pub ethertype: EtherType,
}

impl EthernetHeader {
    /// Length in bytes of a header without a tag.
    pub const BYTES: usize = 14;

    /// Returns the length of this header in bytes: 14 or 18.
    #[inline]
    pub const fn header_bytes(&self) -> usize {
        match self.vlan {
            Some(_) => Self::BYTES + VlanTag::BYTES,
            None => Self::BYTES,
        }
    }

    /// Parses a header and returns it with the payload, including the padding of a short frame.
    ///
    /// # Errors
    /// [`DropReason::EthernetTruncated`] or [`DropReason::VlanTruncated`] when the frame ends
    /// inside the header, [`DropReason::VlanNotForUs`] when it has more than one VLAN tag.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let (head, rest) = bytes.split_first_chunk::<14>().ok_or(DropReason::EthernetTruncated)?;
        let header = Self {
            destination: mac_at(head, 0),
            source: mac_at(head, 6),
            vlan: None,
            ethertype: EtherType(u16_at(head, 12)),
        };
        if header.ethertype == EtherType::VLAN {
            header.parse_tag(rest)
        } else {
            Ok((header, rest))
        }
    }

    /// Parses the tag that follows a VLAN EtherType.
    fn parse_tag(self, bytes: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let (tag, rest) = bytes.split_first_chunk::<4>().ok_or(DropReason::VlanTruncated)?;
        let ethertype = EtherType(u16_at(tag, 2));
        if ethertype == EtherType::VLAN {
            return Err(DropReason::VlanNotForUs);
        }
        Ok((Self { vlan: Some(VlanTag(u16_at(tag, 0))), ethertype, ..self }, rest))
    }

    /// Writes the header to the front of `buf` and returns the rest of `buf`; `None`, with nothing
    /// written, when the header does not fit.
    #[inline]
    #[must_use = "None means that nothing was written"]
    pub fn emit<'b>(&self, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        if let Some(tag) = self.vlan {
            return self.emit_tagged(tag, buf);
        }
        let (head, rest) = buf.split_first_chunk_mut::<14>()?;
        put(head, 0, &self.destination.0);
        put(head, 6, &self.source.0);
        put_u16(head, 12, self.ethertype.0);
        Some(rest)
    }

    fn emit_tagged<'b>(&self, tag: VlanTag, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let (head, rest) = buf.split_first_chunk_mut::<18>()?;
        put(head, 0, &self.destination.0);
        put(head, 6, &self.source.0);
        put_u16(head, 12, EtherType::VLAN.0);
        put_u16(head, 14, tag.0);
        put_u16(head, 16, self.ethertype.0);
        Some(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAGGED: [u8; 20] =
        [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x81, 0x00, 0xa0, 0x07, 0x08, 0x00, 0xaa, 0xbb];

    #[test]
    fn round_trips_vlan_tag() {
        let (header, rest) = EthernetHeader::parse(&TAGGED).unwrap();
        let tag = header.vlan.unwrap();
        assert_eq!((tag.id(), tag.priority(), header.header_bytes()), (7, 5, 18));
        assert_eq!((header.ethertype, rest), (EtherType::IPV4, &[0xaa, 0xbb][..]));
        let mut copy = [0; 20];
        header.emit(&mut copy).unwrap().copy_from_slice(rest);
        assert_eq!(copy, TAGGED);
    }

    #[test]
    fn rejects_truncation_with_specific_reason() {
        for cut in 0..14 {
            assert_eq!(EthernetHeader::parse(&TAGGED[..cut]), Err(DropReason::EthernetTruncated));
        }
        for cut in 14..18 {
            assert_eq!(EthernetHeader::parse(&TAGGED[..cut]), Err(DropReason::VlanTruncated));
        }
        assert!(EthernetHeader::parse(&TAGGED[..18]).is_ok());
    }

    #[test]
    fn rejects_second_vlan_tag() {
        let mut frame = TAGGED;
        frame[16..18].copy_from_slice(&EtherType::VLAN.0.to_be_bytes());
        assert_eq!(EthernetHeader::parse(&frame), Err(DropReason::VlanNotForUs));
    }

    #[test]
    fn emit_leaves_short_buffer_unchanged() {
        let (header, _) = EthernetHeader::parse(&TAGGED).unwrap();
        let mut short = [0; 17];
        assert!(header.emit(&mut short).is_none());
        assert!(EthernetHeader { vlan: None, ..header }.emit(&mut short[..13]).is_none());
        assert_eq!(short, [0; 17]);
    }
}
