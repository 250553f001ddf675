//! Prebuilt Ethernet, IP and UDP headers: a send only patches lengths and checksums.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Maximum payload of a UDP datagram: fits in an IPv6 packet of 1500 bytes.
pub const MAX_PAYLOAD_BYTES: usize = 1500 - 40 - 8;

const ETHERNET_HEADER_BYTES: usize = 14;
const UDP_HEADER_BYTES: usize = 8;
const PROTOCOL_UDP: u8 = 17;

/// Addresses of a load. Each flow is one pair of source address and source port.
#[derive(Clone, Debug)]
pub struct Addressing {
    /// The generator's hardware address.
    pub source_mac: [u8; 6],
    /// Hardware address of the target, or of the router to the target.
    pub target_mac: [u8; 6],
    /// First source address; the others follow it.
    pub source: IpAddr,
    /// Number of source addresses, at least one.
    pub source_count: u32,
    /// First source port; the others follow it.
    pub first_port: u16,
    /// Number of source ports, at least one.
    pub port_count: u16,
    /// Address and port of the target.
    pub target: SocketAddr,
}

impl Addressing {
    /// Returns the number of flows.
    pub fn flow_count(&self) -> u32 {
        self.source_count * u32::from(self.port_count)
    }

    /// Returns the flow of a packet to `address` and `port`.
    #[inline]
    pub fn flow_index(&self, address: IpAddr, port: u16) -> Option<u32> {
        let source = self.source_index(address)?;
        let port = port.checked_sub(self.first_port).filter(|port| *port < self.port_count)?;
        Some(u32::from(port) * self.source_count + source)
    }

    /// Returns the index of a source address of the generator.
    #[inline]
    pub fn source_index(&self, address: IpAddr) -> Option<u32> {
        let index = match (self.source, address) {
            (IpAddr::V4(first), IpAddr::V4(candidate)) => {
                u32::from(candidate).checked_sub(u32::from(first))?
            }
            (IpAddr::V6(first), IpAddr::V6(candidate)) => {
                u32::try_from(u128::from(candidate).checked_sub(u128::from(first))?).ok()?
            }
            _ => return None,
        };
        (index < self.source_count).then_some(index)
    }

    /// Returns the source address at `index`, which is below the number of source addresses.
    pub fn source_at(&self, index: u32) -> IpAddr {
        match self.source {
            IpAddr::V4(first) => Ipv4Addr::from(u32::from(first).wrapping_add(index)).into(),
            IpAddr::V6(first) => {
                Ipv6Addr::from(u128::from(first).wrapping_add(index.into())).into()
            }
        }
    }
}

/// Headers of one flow, complete except for lengths and checksums.
#[derive(Clone)]
struct FlowHeaders {
    bytes: [u8; 62],
    /// Sum of the IPv4 header without its length; 0 for IPv6.
    ip_sum: u32,
    /// Sum of the pseudo-header and the ports, without the lengths.
    udp_sum: u32,
}

/// Prebuilt headers of all flows.
pub struct FrameTemplate {
    flow_headers: Vec<FlowHeaders>,
    is_v6: bool,
}

impl FrameTemplate {
    /// Builds the headers of every flow of `addressing`.
    pub fn new(addressing: &Addressing) -> Self {
        let headers_of_flow = |flow: u32| {
            let source = addressing.source_at(flow % addressing.source_count);
            let port = addressing.first_port.wrapping_add((flow / addressing.source_count) as u16);
            FlowHeaders::new(addressing, source, port)
        };
        Self {
            flow_headers: (0..addressing.flow_count()).map(headers_of_flow).collect(),
            is_v6: addressing.target.is_ipv6(),
        }
    }

    /// Returns the number of header bytes in front of the payload.
    #[inline]
    pub fn header_bytes(&self) -> usize {
        ETHERNET_HEADER_BYTES + if self.is_v6 { 40 } else { 20 } + UDP_HEADER_BYTES
    }

    /// Writes the headers of `flow` to the front of `frame`, which already holds the payload.
    /// `payload_sum` is [`sum`] of the payload.
    #[inline]
    pub fn write_headers(&self, flow: u32, frame: &mut [u8], payload_sum: u32) {
        let headers = &self.flow_headers[flow as usize];
        let header_bytes = self.header_bytes();
        let udp_bytes = (frame.len() - header_bytes + UDP_HEADER_BYTES) as u16;
        frame[..header_bytes].copy_from_slice(&headers.bytes[..header_bytes]);
        let udp_offset = header_bytes - UDP_HEADER_BYTES;
        if self.is_v6 {
            frame[18..20].copy_from_slice(&udp_bytes.to_be_bytes());
        } else {
            let total = udp_bytes + 20;
            frame[16..18].copy_from_slice(&total.to_be_bytes());
            let checksum = !fold(headers.ip_sum + u32::from(total));
            frame[24..26].copy_from_slice(&checksum.to_be_bytes());
        }
        frame[udp_offset + 4..udp_offset + 6].copy_from_slice(&udp_bytes.to_be_bytes());
        // The length counts twice: in the UDP header and in the pseudo-header.
        let checksum = !fold(headers.udp_sum + 2 * u32::from(udp_bytes) + payload_sum);
        // RFC 768: zero means no checksum, so a checksum of zero is sent as all ones.
        let checksum = if checksum == 0 { 0xffff } else { checksum };
        frame[udp_offset + 6..udp_offset + 8].copy_from_slice(&checksum.to_be_bytes());
    }
}

impl FlowHeaders {
    fn new(addressing: &Addressing, source: IpAddr, port: u16) -> Self {
        let mut bytes = [0; 62];
        bytes[..6].copy_from_slice(&addressing.target_mac);
        bytes[6..12].copy_from_slice(&addressing.source_mac);
        let mut udp_sum = u32::from(PROTOCOL_UDP);
        let (udp_offset, ip_sum) = match (source, addressing.target.ip()) {
            (IpAddr::V4(source), IpAddr::V4(target)) => {
                bytes[12..14].copy_from_slice(&[0x08, 0x00]);
                // Version and header length, don't fragment, TTL 64.
                bytes[14] = 0x45;
                bytes[20] = 0x40;
                bytes[22] = 64;
                bytes[23] = PROTOCOL_UDP;
                bytes[26..30].copy_from_slice(&source.octets());
                bytes[30..34].copy_from_slice(&target.octets());
                udp_sum += sum(&bytes[26..34]);
                (34, sum(&bytes[14..34]))
            }
            (source, target) => {
                let octets = |address: IpAddr| match address {
                    IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                    IpAddr::V6(v6) => v6.octets(),
                };
                bytes[12..14].copy_from_slice(&[0x86, 0xdd]);
                bytes[14] = 0x60;
                bytes[20] = PROTOCOL_UDP;
                bytes[21] = 64;
                bytes[22..38].copy_from_slice(&octets(source));
                bytes[38..54].copy_from_slice(&octets(target));
                udp_sum += sum(&bytes[22..54]);
                (54, 0)
            }
        };
        bytes[udp_offset..udp_offset + 2].copy_from_slice(&port.to_be_bytes());
        bytes[udp_offset + 2..udp_offset + 4]
            .copy_from_slice(&addressing.target.port().to_be_bytes());
        udp_sum += sum(&bytes[udp_offset..udp_offset + 4]);
        Self { bytes, ip_sum, udp_sum }
    }
}

/// Returns the unfolded sum of big-endian 16-bit words. An odd last byte counts as the upper half
/// of a word. `bytes` may have up to 128 KiB.
#[inline]
pub fn sum(bytes: &[u8]) -> u32 {
    let (words, last) = bytes.as_chunks::<2>();
    let total: u32 = words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    total + last.first().map_or(0, |byte| u32::from(*byte) << 8)
}

/// Folds a sum to 16 bits with end-around carry.
#[inline]
pub fn fold(sum: u32) -> u16 {
    let once = (sum & 0xffff) + (sum >> 16);
    ((once & 0xffff) + (once >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addressing(source: &str, target: &str) -> Addressing {
        Addressing {
            source_mac: [2, 0, 0, 0, 0, 1],
            target_mac: [2, 0, 0, 0, 0, 2],
            source: source.parse().unwrap(),
            source_count: 3,
            first_port: 10_000,
            port_count: 5,
            target: target.parse().unwrap(),
        }
    }

    fn example_addressings() -> [Addressing; 2] {
        [addressing("10.1.0.254", "10.2.0.1:53"), addressing("fd00::ffff", "[fd00:1::2]:53")]
    }

    /// Reference check: sums the whole pseudo-header and datagram in one buffer.
    fn is_udp_checksum_valid(frame: &[u8], v6: bool) -> bool {
        let (addresses, udp) = if v6 { (22..54, 54) } else { (26..34, 34) };
        let mut all = frame[addresses].to_vec();
        all.extend(((frame.len() - udp) as u32).to_be_bytes());
        all.extend(17u32.to_be_bytes());
        all.extend(&frame[udp..]);
        fold(sum(&all)) == 0xffff
    }

    #[test]
    fn every_flow_has_right_lengths_and_checksums() {
        for addressing in example_addressings() {
            let template = FrameTemplate::new(&addressing);
            let v6 = addressing.target.is_ipv6();
            for payload_bytes in [0, 1, 2, 33, 64, MAX_PAYLOAD_BYTES] {
                let payload: Vec<u8> = (0..payload_bytes).map(|i| (i * 7) as u8).collect();
                for flow in 0..addressing.flow_count() {
                    let mut frame = vec![0xee; template.header_bytes()];
                    frame.extend(&payload);
                    template.write_headers(flow, &mut frame, sum(&payload));
                    assert!(is_udp_checksum_valid(&frame, v6), "flow {flow}, {payload_bytes}");
                    let ip_bytes = frame.len() - 14;
                    if v6 {
                        let length = u16::from_be_bytes([frame[18], frame[19]]);
                        assert_eq!(usize::from(length), ip_bytes - 40);
                    } else {
                        let length = u16::from_be_bytes([frame[16], frame[17]]);
                        assert_eq!(usize::from(length), ip_bytes);
                        assert_eq!(fold(sum(&frame[14..34])), 0xffff);
                    }
                    assert_eq!(&frame[template.header_bytes()..], payload);
                }
            }
        }
    }

    #[test]
    fn finds_flow_by_address_and_port() {
        for addressing in example_addressings() {
            let template = FrameTemplate::new(&addressing);
            for flow in 0..addressing.flow_count() {
                let source = addressing.source_at(flow % addressing.source_count);
                let headers = &template.flow_headers[flow as usize].bytes;
                let udp = template.header_bytes() - UDP_HEADER_BYTES;
                let port = u16::from_be_bytes([headers[udp], headers[udp + 1]]);
                assert_eq!(addressing.flow_index(source, port), Some(flow));
            }
            let outside = addressing.source_at(3);
            assert_eq!(addressing.flow_index(outside, 10_000), None);
            assert_eq!(addressing.flow_index(addressing.source, 9_999), None);
            assert_eq!(addressing.flow_index(addressing.source, 10_005), None);
        }
        let [v4, v6] = example_addressings();
        assert_eq!(v4.flow_index(v6.source, 10_000), None);
    }

    #[test]
    fn a_checksum_of_zero_is_sent_as_ones() {
        let [v4, _] = example_addressings();
        let template = FrameTemplate::new(&v4);
        // The payload makes the sum 0xffff.
        let mut frame = vec![0; template.header_bytes() + 2];
        template.write_headers(0, &mut frame, 0);
        let checksum = [frame[40], frame[41]];
        frame[42..].copy_from_slice(&checksum);
        template.write_headers(0, &mut frame, sum(&checksum));
        assert_eq!(&frame[40..42], [0xff, 0xff]);
        assert!(is_udp_checksum_valid(&frame, false));
    }
}
