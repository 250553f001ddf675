//! The Address Resolution Protocol for Ethernet and IPv4 (RFC 826).

use core::net::Ipv4Addr;

use crate::field::{ipv4_at, mac_at, put, put_u16, u16_at};
use crate::{DropReason, EtherType, MacAddr};

/// ARP operation (RFC 826).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArpOperation {
    /// Request for the hardware address of the target address.
    Request,
    /// Announcement that the sender's hardware address owns the sender address.
    Reply,
}

/// An ARP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArpPacket {
    /// Request or reply.
    pub operation: ArpOperation,
    /// Hardware address of the sender.
    pub sender_mac: MacAddr,
    /// IPv4 address of the sender; unspecified in a probe (RFC 5227).
    pub sender_ip: Ipv4Addr,
    /// Hardware address of the target; zero in a request.
    pub target_mac: MacAddr,
    /// In a request, the IPv4 address to be resolved; in a reply, the requester's IPv4 address.
    pub target_ip: Ipv4Addr,
}

impl ArpPacket {
    /// Packet length in bytes.
    pub const BYTES: usize = 28;

    const HARDWARE_ETHERNET: u16 = 1;

    /// Parses a packet and returns it with the bytes after it, which are the frame's padding.
    ///
    /// # Errors
    /// [`DropReason::ArpMalformed`] when the packet is truncated, is not for Ethernet and IPv4, or
    /// has an operation other than request and reply.
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let (packet, rest) = bytes.split_first_chunk::<28>().ok_or(DropReason::ArpMalformed)?;
        let for_ipv4_on_ethernet = u16_at(packet, 0) == Self::HARDWARE_ETHERNET
            && u16_at(packet, 2) == EtherType::IPV4.0
            && packet[4] == 6
            && packet[5] == 4;
        let operation = match u16_at(packet, 6) {
            1 if for_ipv4_on_ethernet => ArpOperation::Request,
            2 if for_ipv4_on_ethernet => ArpOperation::Reply,
            _ => return Err(DropReason::ArpMalformed),
        };
        let parsed = Self {
            operation,
            sender_mac: mac_at(packet, 8),
            sender_ip: ipv4_at(packet, 14),
            target_mac: mac_at(packet, 18),
            target_ip: ipv4_at(packet, 24),
        };
        Ok((parsed, rest))
    }

    /// Writes the packet to the front of `buf` and returns the rest of `buf`; `None`, with nothing
    /// written, when the packet does not fit.
    #[must_use = "None means that nothing was written"]
    pub fn emit<'b>(&self, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let (packet, rest) = buf.split_first_chunk_mut::<28>()?;
        put_u16(packet, 0, Self::HARDWARE_ETHERNET);
        put_u16(packet, 2, EtherType::IPV4.0);
        (packet[4], packet[5]) = (6, 4);
        put_u16(
            packet,
            6,
            match self.operation {
                ArpOperation::Request => 1,
                ArpOperation::Reply => 2,
            },
        );
        put(packet, 8, &self.sender_mac.0);
        put(packet, 14, &self.sender_ip.octets());
        put(packet, 18, &self.target_mac.0);
        put(packet, 24, &self.target_ip.octets());
        Some(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: ArpPacket = ArpPacket {
        operation: ArpOperation::Request,
        sender_mac: MacAddr([2, 0, 0, 0, 0, 1]),
        sender_ip: Ipv4Addr::new(192, 0, 2, 1),
        target_mac: MacAddr::UNSPECIFIED,
        target_ip: Ipv4Addr::new(192, 0, 2, 2),
    };

    #[test]
    fn rejects_invalid_fields_and_truncation() {
        let mut good = [0; 28];
        assert!(REQUEST.emit(&mut good).unwrap().is_empty());
        assert_eq!(ArpPacket::parse(&good), Ok((REQUEST, &[][..])));
        // Hardware type, protocol type, both lengths, the operation.
        for at in 0..8 {
            let mut bad = good;
            bad[at] ^= 0x40;
            assert_eq!(ArpPacket::parse(&bad), Err(DropReason::ArpMalformed), "byte {at}");
        }
        for cut in 0..28 {
            assert_eq!(ArpPacket::parse(&good[..cut]), Err(DropReason::ArpMalformed));
            let mut short = [0; 28];
            assert!(REQUEST.emit(&mut short[..cut]).is_none());
            assert_eq!(short, [0; 28]);
        }
    }
}
