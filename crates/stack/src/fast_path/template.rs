//! Precomputed headers of packets on a path.

use std::net::IpAddr;

use tidegate_memory::{Arena, Checksum, Frame, PackedChecksum};
use tidegate_wire::{
    EtherType, EthernetHeader, Ipv4Header, Ipv6Header, MacAddr, Protocol, Sum, UdpHeader, checksum,
};

use super::family::{Family, PortPair, V4, V6};
use super::plain::{LINK_BYTES, write_at};

const UDP_BYTES: usize = UdpHeader::BYTES;

/// Precomputed headers of the datagrams on a path: complete except for lengths, ports and
/// checksums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeaderTemplate {
    bytes: [u8; LINK_BYTES + Ipv6Header::BYTES],
    /// Folded sum of the IPv4 header in header byte order.
    header_sum: u16,
    /// Folded sum of the pseudo-header in header byte order.
    pseudo_sum: u16,
}

/// One's complement sum of two numbers (RFC 1071).
#[inline(always)]
fn ones_complement_add(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u16::from(carry)
}

/// Extends a frame with `len` bytes of payload over the headers that were written in front.
#[inline(always)]
pub(crate) fn prepend_headers<F: Family>(
    arena: &Arena,
    frame: &mut Frame,
    len: usize,
    checksum: PackedChecksum,
) -> bool {
    frame.set_packed_checksum(checksum);
    arena.prepend(frame, F::UDP_HEADERS_BYTES, len + F::UDP_HEADERS_BYTES)
}

impl HeaderTemplate {
    /// Template of a path without precomputed headers.
    pub(crate) const NONE: HeaderTemplate =
        HeaderTemplate { bytes: [0; LINK_BYTES + Ipv6Header::BYTES], header_sum: 0, pseudo_sum: 0 };

    /// Builds the headers of datagrams from the first to the second of `ips`, and from the first to
    /// the second of `macs`. `None` when the IP addresses are of different families.
    pub(crate) fn new(
        macs: (MacAddr, MacAddr),
        ips: (IpAddr, IpAddr),
        hop_limit: u8,
    ) -> Option<Self> {
        let mut bytes = [0; LINK_BYTES + Ipv6Header::BYTES];
        let (ethertype, pseudo) = match ips {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut header = Ipv4Header::new(source, destination, Protocol::UDP, 0)?;
                header.ttl = hop_limit;
                header.emit(&mut bytes[LINK_BYTES..])?;
                // Clears total length and checksum.
                bytes[LINK_BYTES + 2..LINK_BYTES + 4].fill(0);
                bytes[LINK_BYTES + 10..LINK_BYTES + 12].fill(0);
                let pseudo = checksum::pseudo_header_v4(source, destination, Protocol::UDP, 0);
                (EtherType::IPV4, pseudo)
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let mut header = Ipv6Header::new(source, destination, Protocol::UDP, 0)?;
                header.hop_limit = hop_limit;
                header.emit(&mut bytes[LINK_BYTES..])?;
                let pseudo = checksum::pseudo_header_v6(source, destination, Protocol::UDP, 0);
                (EtherType::IPV6, pseudo)
            }
            _ => return None,
        };
        let (source, destination) = macs;
        EthernetHeader { destination, source, vlan: None, ethertype }.emit(&mut bytes)?;
        let header = Sum::of(&bytes[LINK_BYTES..LINK_BYTES + Ipv4Header::BYTES]);
        let (header_sum, pseudo_sum) = (header.fold().to_be(), pseudo.fold().to_be());
        Some(Self { bytes, header_sum, pseudo_sum })
    }

    /// True if packets made from the template have this source address.
    #[inline(always)]
    pub(crate) fn is_from(&self, source: IpAddr) -> bool {
        match source {
            IpAddr::V4(v4) => self.source::<V4>() == v4,
            IpAddr::V6(v6) => self.source::<V6>() == v6,
        }
    }

    /// Source address of packets made from a template of this family.
    #[inline(always)]
    pub(crate) fn source<F: Family>(&self) -> F::Address {
        F::source(&self.bytes)
    }

    /// Writes the headers of a datagram in front of its payload. Returns the checksum state of the
    /// frame: complete, or only the pseudo-header's sum when the device completes the checksum
    /// (`partial`).
    #[inline(always)]
    pub(crate) fn emit_udp<F: Family>(
        &self,
        head: &mut F::UdpHead,
        payload: &[u8],
        ports: PortPair,
        partial: bool,
    ) -> PackedChecksum {
        let at = F::TRANSPORT_OFFSET;
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        let head = head.as_mut();
        head[..at].copy_from_slice(&self.bytes[..at]);
        let length = udp_bytes + F::COUNTED_HEADER_BYTES as u16;
        write_at(head, F::LENGTH_OFFSET, length.to_be_bytes());
        if let Some(at) = F::CHECKSUM_OFFSET {
            let sum = ones_complement_add(self.header_sum, length.to_be());
            write_at(head, at, (!sum).to_ne_bytes());
        }
        write_at(head, at, ports.0.to_ne_bytes());
        write_at(head, at + 4, udp_bytes.to_be_bytes());
        write_at(head, at + 6, self.udp_checksum(ports, payload, partial));
        match partial {
            true => {
                const {
                    PackedChecksum::new(Checksum::Partial {
                        start: F::TRANSPORT_OFFSET as u16,
                        offset: 6,
                    })
                }
            }
            false => PackedChecksum::new(Checksum::Unknown),
        }
    }

    /// Writes the headers in front of a segment of `segment_bytes`. Returns the sum of the
    /// pseudo-header.
    #[inline(always)]
    pub(crate) fn emit_tcp<F: Family>(
        &self,
        head: &mut [u8],
        segment_bytes: usize,
        traffic_class: u8,
    ) -> Sum {
        let Some(head) = head.get_mut(..F::TRANSPORT_OFFSET) else { return Sum::ZERO };
        head.copy_from_slice(&self.bytes[..F::TRANSPORT_OFFSET]);
        F::put_tcp_fields(head, segment_bytes, traffic_class);
        F::address_sum(F::addresses(head))
            .with_u16(Protocol::TCP.0.into())
            .with_u16(segment_bytes as u16)
    }

    /// Value of the UDP checksum field.
    #[inline(always)]
    fn udp_checksum(&self, ports: PortPair, payload: &[u8], partial: bool) -> [u8; 2] {
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        let pseudo = ones_complement_add(self.pseudo_sum, udp_bytes.to_be());
        if partial {
            return pseudo.to_ne_bytes();
        }
        Sum::of_words([u64::from(pseudo), u64::from(ports.0)])
            .with_u16(udp_bytes)
            .with(payload)
            .udp_checksum()
            .to_be_bytes()
    }
}
