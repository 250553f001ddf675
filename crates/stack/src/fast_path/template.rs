//! Precomputed headers of packets on a path.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tidegate_memory::{Arena, Checksum, Frame, PackedChecksum};
use tidegate_wire::{
    EtherType, EthernetHeader, Ipv4Header, Ipv6Header, MacAddr, Protocol, Sum, UdpHeader, checksum,
};

use super::plain::{HEADERS_V4_BYTES, HEADERS_V6_BYTES, LINK_BYTES, array_at, write_at};

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

/// Source and destination port in header byte order.
#[derive(Clone, Copy)]
pub(crate) struct PortPair(u32);

impl PortPair {
    /// Ports of a transport header that begins with `bytes`.
    #[inline(always)]
    pub(crate) fn from_header(bytes: [u8; 4]) -> Self {
        Self(u32::from_ne_bytes(bytes))
    }

    #[inline(always)]
    pub(crate) fn new(source: u16, destination: u16) -> Self {
        Self((u32::from(source) << 16 | u32::from(destination)).to_be())
    }

    #[inline(always)]
    pub(crate) fn source(self) -> u16 {
        (u32::from_be(self.0) >> 16) as u16
    }

    /// Source and destination exchanged, for replies.
    #[inline(always)]
    pub(crate) fn swapped(self) -> Self {
        Self(self.0.rotate_left(16))
    }
}

/// One's complement sum of two numbers (RFC 1071).
#[inline(always)]
fn ones_complement_add(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u16::from(carry)
}

/// Extends a frame with `len` bytes of payload over the headers that were written in front.
#[inline(always)]
pub(crate) fn prepend_headers<const HEADERS: usize>(
    arena: &Arena,
    frame: &mut Frame,
    len: usize,
    checksum: PackedChecksum,
) -> bool {
    frame.set_packed_checksum(checksum);
    arena.prepend(frame, HEADERS, len + HEADERS)
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

    /// Copies the first `N` bytes.
    #[inline(always)]
    pub(crate) fn copy_to<const N: usize>(&self, head: &mut [u8; N]) {
        head.copy_from_slice(&self.bytes[..N]);
    }

    /// True if packets made from the template have this source address.
    #[inline(always)]
    pub(crate) fn is_from(&self, source: IpAddr) -> bool {
        match source {
            IpAddr::V4(v4) => self.source_v4() == v4,
            IpAddr::V6(v6) => self.source_v6() == v6,
        }
    }

    #[inline(always)]
    pub(crate) fn source_v4(&self) -> Ipv4Addr {
        array_at::<4, 54>(&self.bytes, LINK_BYTES + 12).into()
    }

    #[inline(always)]
    pub(crate) fn source_v6(&self) -> Ipv6Addr {
        array_at::<16, 54>(&self.bytes, LINK_BYTES + 8).into()
    }

    /// Writes the headers of a datagram in front of its payload. Returns the checksum state of the
    /// frame: complete, or only the pseudo-header's sum when the device completes the checksum
    /// (`partial`).
    #[inline(always)]
    pub(crate) fn emit_v4(
        &self,
        head: &mut [u8; HEADERS_V4_BYTES],
        payload: &[u8],
        ports: PortPair,
        partial: bool,
    ) -> PackedChecksum {
        const PARTIAL: PackedChecksum =
            PackedChecksum::new(Checksum::Partial { start: 34, offset: 6 });
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        let total_bytes = udp_bytes + Ipv4Header::BYTES as u16;
        head[..34].copy_from_slice(&self.bytes[..34]);
        write_at(head, 16, total_bytes.to_be_bytes());
        write_at(
            head,
            24,
            (!ones_complement_add(self.header_sum, total_bytes.to_be())).to_ne_bytes(),
        );
        write_at(head, 34, ports.0.to_ne_bytes());
        write_at(head, 38, udp_bytes.to_be_bytes());
        write_at(head, 40, self.udp_checksum(ports, payload, partial));
        if partial { PARTIAL } else { PackedChecksum::new(Checksum::Unknown) }
    }

    /// IPv6 counterpart of [`HeaderTemplate::emit_v4`].
    #[inline(always)]
    pub(crate) fn emit_v6(
        &self,
        head: &mut [u8; HEADERS_V6_BYTES],
        payload: &[u8],
        ports: PortPair,
        partial: bool,
    ) -> PackedChecksum {
        const PARTIAL: PackedChecksum =
            PackedChecksum::new(Checksum::Partial { start: 54, offset: 6 });
        let udp_bytes = (payload.len() + UDP_BYTES) as u16;
        head[..54].copy_from_slice(&self.bytes);
        write_at(head, 18, udp_bytes.to_be_bytes());
        write_at(head, 54, ports.0.to_ne_bytes());
        write_at(head, 58, udp_bytes.to_be_bytes());
        write_at(head, 60, self.udp_checksum(ports, payload, partial));
        if partial { PARTIAL } else { PackedChecksum::new(Checksum::Unknown) }
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
