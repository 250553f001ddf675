//! Header layouts of the two address families. The fast paths are written once, for any [`Family`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_wire::{EtherType, Ipv4Header, Ipv6Header, Protocol, Sum, UdpHeader};

use super::plain::{
    IPV4_VERSION_AND_IHL, LINK_BYTES, array_at, ipv4_header_sum, is_plain_source_v4,
    is_plain_source_v6, write_at,
};
use crate::ip::address::Addresses;
use crate::tcp::FourTuple;

/// Address family of plain packets.
///
/// `head` is always the beginning of a frame, from the Ethernet header to the transport header or
/// further.
pub(crate) trait Family {
    /// Offset of the transport header in a frame, in bytes.
    const TRANSPORT_OFFSET: usize;
    /// Length of the headers in front of a UDP payload, in bytes: Ethernet, IP and UDP.
    const UDP_HEADERS_BYTES: usize = Self::TRANSPORT_OFFSET + UdpHeader::BYTES;
    /// Offset of the length in the IP header, in bytes.
    const LENGTH_OFFSET: usize;
    /// Bytes that this length counts in front of the transport header.
    const COUNTED_HEADER_BYTES: usize;
    /// Offset of the checksum in the IP header, in bytes.
    const CHECKSUM_OFFSET: Option<usize>;
    /// True if a sender may leave out the UDP checksum (RFC 768; RFC 8200 section 8.1).
    const UDP_CHECKSUM_IS_OPTIONAL: bool;
    /// Pair of addresses that no packet has.
    const NO_ADDRESSES: Self::AddressPair;

    type Address: Copy + PartialEq + Into<IpAddr>;
    /// Source address and destination address in header byte order.
    type AddressPair: Copy + PartialEq;
    /// Headers in front of a UDP payload.
    type UdpHead: AsRef<[u8]> + AsMut<[u8]>;

    fn addresses(head: &[u8]) -> Self::AddressPair;

    /// Source address and destination address.
    fn split(pair: Self::AddressPair) -> (Self::Address, Self::Address);

    /// Sum of both addresses.
    fn address_sum(pair: Self::AddressPair) -> Sum;

    /// True if the source is a possible sender that is not this host, and the destination is an
    /// address of this host. False for a few valid pairs, which the slow path checks.
    fn is_for_us(addresses: &Addresses, pair: Self::AddressPair) -> bool;

    fn four_tuple(pair: Self::AddressPair, ports: [u8; 4]) -> FourTuple;

    fn hop_limit(head: &[u8]) -> u8;

    fn traffic_class(head: &[u8]) -> u8;

    /// Offset of the packet's end in the frame, in bytes.
    #[inline(always)]
    fn packet_end(head: &[u8]) -> usize {
        let length = u16::from_be_bytes(array_at(head, Self::LENGTH_OFFSET));
        Self::TRANSPORT_OFFSET - Self::COUNTED_HEADER_BYTES + usize::from(length)
    }

    /// True if the headers show a whole datagram that fills the frame of `frame_bytes`, behind a
    /// valid IP header without options or extensions.
    fn is_plain_udp(head: &[u8], frame_bytes: usize) -> bool;

    /// True if a frame with EtherType and protocol of TCP has a valid IP header without options or
    /// extensions and is not a fragment.
    fn is_plain_tcp(head: &[u8]) -> bool;

    /// Source address of the headers in a template.
    fn source(head: &[u8]) -> Self::Address;

    /// Writes the IP header fields that differ between a template and a segment.
    fn put_tcp_fields(head: &mut [u8], segment_bytes: usize, traffic_class: u8);
}

/// Source and destination port in header byte order.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct PortPair(pub(super) u32);

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

    /// Source and destination port in header byte order.
    #[inline(always)]
    pub(crate) fn split(self) -> ([u8; 2], [u8; 2]) {
        let [a, b, c, d] = self.0.to_ne_bytes();
        ([a, b], [c, d])
    }

    /// Source and destination exchanged, for replies.
    #[inline(always)]
    pub(crate) fn swapped(self) -> Self {
        Self(self.0.rotate_left(16))
    }
}

/// Addresses and ports of a received datagram.
pub(crate) struct RawTuple<F: Family> {
    pub(crate) addresses: F::AddressPair,
    pub(crate) ports: PortPair,
}

impl<F: Family> Clone for RawTuple<F> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Family> Copy for RawTuple<F> {}

impl<F: Family> PartialEq for RawTuple<F> {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        self.addresses == other.addresses && self.ports == other.ports
    }
}

impl<F: Family> RawTuple<F> {
    /// Reads the headers of a datagram.
    #[inline(always)]
    pub(crate) fn from_head(head: &[u8]) -> Self {
        let ports = PortPair::from_header(array_at(head, F::TRANSPORT_OFFSET));
        Self { addresses: F::addresses(head), ports }
    }

    /// Sender and local address in the form that the application sees. `mapped` selects IPv4-mapped
    /// IPv6 addresses (RFC 4291 section 2.5.5.2).
    #[inline(always)]
    pub(crate) fn app_addresses(&self, mapped: bool) -> (SocketAddr, IpAddr) {
        let ip = |address: F::Address| match address.into() {
            IpAddr::V4(v4) if mapped => v4.to_ipv6_mapped().into(),
            ip => ip,
        };
        let (remote, local) = F::split(self.addresses);
        (SocketAddr::new(ip(remote), self.ports.source()), ip(local))
    }
}

/// IPv4.
pub(crate) enum V4 {}

impl Family for V4 {
    const TRANSPORT_OFFSET: usize = LINK_BYTES + Ipv4Header::BYTES;
    const LENGTH_OFFSET: usize = 16;
    const COUNTED_HEADER_BYTES: usize = Ipv4Header::BYTES;
    const CHECKSUM_OFFSET: Option<usize> = Some(24);
    const UDP_CHECKSUM_IS_OPTIONAL: bool = true;
    const NO_ADDRESSES: u64 = u64::MAX;

    type Address = Ipv4Addr;
    type AddressPair = u64;
    type UdpHead = [u8; Self::UDP_HEADERS_BYTES];

    #[inline(always)]
    fn addresses(head: &[u8]) -> u64 {
        u64::from_ne_bytes(array_at(head, 26))
    }

    #[inline(always)]
    fn split(pair: u64) -> (Ipv4Addr, Ipv4Addr) {
        let [a, b, c, d, e, f, g, h] = pair.to_ne_bytes();
        ([a, b, c, d].into(), [e, f, g, h].into())
    }

    #[inline(always)]
    fn address_sum(pair: u64) -> Sum {
        Sum::of_words([pair])
    }

    #[inline(always)]
    fn is_for_us(addresses: &Addresses, pair: u64) -> bool {
        let (from, to) = Self::split(pair);
        is_plain_source_v4(from.octets()) && addresses.is_for_us_v4(from.octets(), to.octets())
    }

    #[inline(always)]
    fn four_tuple(pair: u64, ports: [u8; 4]) -> FourTuple {
        let (from, to) = Self::split(pair);
        FourTuple::v4(to.octets(), from.octets(), ports)
    }

    #[inline(always)]
    fn hop_limit(head: &[u8]) -> u8 {
        head[22]
    }

    #[inline(always)]
    fn traffic_class(head: &[u8]) -> u8 {
        head[15]
    }

    #[inline(always)]
    fn is_plain_udp(head: &[u8], frame_bytes: usize) -> bool {
        let total_bytes = (frame_bytes as u16).wrapping_sub(LINK_BYTES as u16);
        let udp_bytes = (frame_bytes as u16).wrapping_sub(Self::TRANSPORT_OFFSET as u16);
        // The four bytes from the fragment field on, except the time to live.
        let [a, b, _, protocol] = array_at(head, 20);
        array_at(head, 12) == EtherType::IPV4.0.to_be_bytes()
            && head[14] == IPV4_VERSION_AND_IHL
            && [a & 0x3f, b, 0, protocol] == [0, 0, 0, Protocol::UDP.0]
            && array_at(head, 16) == total_bytes.to_be_bytes()
            && array_at(head, 38) == udp_bytes.to_be_bytes()
            && ipv4_header_sum(head).is_valid_nonzero()
    }

    #[inline(always)]
    fn is_plain_tcp(head: &[u8]) -> bool {
        head[14] == IPV4_VERSION_AND_IHL
            && u16::from_be_bytes(array_at(head, 20)) & 0x3fff == 0
            && ipv4_header_sum(head).is_valid_nonzero()
    }

    #[inline(always)]
    fn source(head: &[u8]) -> Ipv4Addr {
        array_at::<4>(head, 26).into()
    }

    #[inline(always)]
    fn put_tcp_fields(head: &mut [u8], segment_bytes: usize, traffic_class: u8) {
        let total_bytes = (segment_bytes + Ipv4Header::BYTES) as u16;
        head[15] = traffic_class;
        write_at(head, 16, total_bytes.to_be_bytes());
        head[23] = Protocol::TCP.0;
        let checksum = ipv4_header_sum(head).checksum();
        write_at(head, 24, checksum.to_be_bytes());
    }
}

/// IPv6.
pub(crate) enum V6 {}

impl Family for V6 {
    const TRANSPORT_OFFSET: usize = LINK_BYTES + Ipv6Header::BYTES;
    const LENGTH_OFFSET: usize = 18;
    const COUNTED_HEADER_BYTES: usize = 0;
    const CHECKSUM_OFFSET: Option<usize> = None;
    const UDP_CHECKSUM_IS_OPTIONAL: bool = false;
    const NO_ADDRESSES: (u128, u128) = (u128::MAX, u128::MAX);

    type Address = Ipv6Addr;
    type AddressPair = (u128, u128);
    type UdpHead = [u8; Self::UDP_HEADERS_BYTES];

    #[inline(always)]
    fn addresses(head: &[u8]) -> (u128, u128) {
        let address = |at| u128::from_ne_bytes(array_at(head, at));
        (address(22), address(38))
    }

    #[inline(always)]
    fn split(pair: (u128, u128)) -> (Ipv6Addr, Ipv6Addr) {
        (pair.0.to_ne_bytes().into(), pair.1.to_ne_bytes().into())
    }

    #[inline(always)]
    fn address_sum(pair: (u128, u128)) -> Sum {
        Sum::of(&pair.0.to_ne_bytes()).with(&pair.1.to_ne_bytes())
    }

    #[inline(always)]
    fn is_for_us(addresses: &Addresses, pair: (u128, u128)) -> bool {
        let (from, to) = Self::split(pair);
        is_plain_source_v6(from.octets())
            && addresses.is_local_v6(to)
            && addresses.is_other_v6(from)
    }

    #[inline(always)]
    fn four_tuple(pair: (u128, u128), ports: [u8; 4]) -> FourTuple {
        let (from, to) = Self::split(pair);
        FourTuple::v6(to.octets(), from.octets(), ports)
    }

    #[inline(always)]
    fn hop_limit(head: &[u8]) -> u8 {
        head[21]
    }

    #[inline(always)]
    fn traffic_class(head: &[u8]) -> u8 {
        head[14] << 4 | head[15] >> 4
    }

    #[inline(always)]
    fn is_plain_udp(head: &[u8], frame_bytes: usize) -> bool {
        let udp_bytes = (frame_bytes as u16).wrapping_sub(Self::TRANSPORT_OFFSET as u16);
        array_at(head, 12) == EtherType::IPV6.0.to_be_bytes()
            && head[14] >> 4 == 6
            && head[20] == Protocol::UDP.0
            && array_at(head, 18) == udp_bytes.to_be_bytes()
            && array_at(head, 58) == udp_bytes.to_be_bytes()
    }

    #[inline(always)]
    fn is_plain_tcp(head: &[u8]) -> bool {
        head[14] >> 4 == 6
    }

    #[inline(always)]
    fn source(head: &[u8]) -> Ipv6Addr {
        array_at::<16>(head, 22).into()
    }

    #[inline(always)]
    fn put_tcp_fields(head: &mut [u8], segment_bytes: usize, traffic_class: u8) {
        write_at(head, 14, [0x60 | traffic_class >> 4, traffic_class << 4]);
        write_at(head, 18, (segment_bytes as u16).to_be_bytes());
        head[20] = Protocol::TCP.0;
    }
}
