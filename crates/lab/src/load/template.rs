//! Frames made ahead: Ethernet, IP and UDP headers that only need patching.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The longest payload that a template takes: what fits in 1500 bytes of IPv6.
pub const MAX_PAYLOAD_BYTES: usize = 1500 - 40 - 8;

const ETHERNET_BYTES: usize = 14;
const UDP_BYTES: usize = 8;
const PROTOCOL_UDP: u8 = 17;

/// Who sends to whom. Flow `n` is one source address and port.
#[derive(Clone, Debug)]
pub struct Addressing {
    /// Our hardware address.
    pub source_mac: [u8; 6],
    /// The target's, or its router's.
    pub target_mac: [u8; 6],
    /// The first source address; the others follow it.
    pub source: IpAddr,
    /// How many source addresses, at least one.
    pub sources: u32,
    /// The first source port; the others follow it.
    pub first_port: u16,
    /// How many source ports, at least one.
    pub ports: u16,
    /// Where to.
    pub target: SocketAddr,
}

impl Addressing {
    /// How many flows there are.
    pub fn flows(&self) -> u32 {
        self.sources * u32::from(self.ports)
    }

    /// The flow that a packet to `address` and `port` belongs to.
    #[inline]
    pub fn flow_of(&self, address: IpAddr, port: u16) -> Option<u32> {
        let source = self.source_index(address)?;
        let port = port.checked_sub(self.first_port).filter(|port| *port < self.ports)?;
        Some(u32::from(port) * self.sources + source)
    }

    /// The number of a source address of ours.
    #[inline]
    pub fn source_index(&self, address: IpAddr) -> Option<u32> {
        let index = match (self.source, address) {
            (IpAddr::V4(first), IpAddr::V4(it)) => u32::from(it).checked_sub(u32::from(first))?,
            (IpAddr::V6(first), IpAddr::V6(it)) => {
                u32::try_from(u128::from(it).checked_sub(u128::from(first))?).ok()?
            }
            _ => return None,
        };
        (index < self.sources).then_some(index)
    }

    /// The source address with number `index`, which is below `sources`.
    pub fn source_at(&self, index: u32) -> IpAddr {
        match self.source {
            IpAddr::V4(first) => Ipv4Addr::from(u32::from(first).wrapping_add(index)).into(),
            IpAddr::V6(first) => {
                Ipv6Addr::from(u128::from(first).wrapping_add(index.into())).into()
            }
        }
    }
}

/// Headers of one flow, complete but for lengths and checksums.
#[derive(Clone)]
struct Headers {
    bytes: [u8; 62],
    /// Of the IPv4 header without its length; 0 on IPv6.
    ip_sum: u32,
    /// Of the pseudo-header and the ports, without the lengths.
    udp_sum: u32,
}

/// The headers of every flow.
pub struct Template {
    flows: Vec<Headers>,
    v6: bool,
}

impl Template {
    /// Makes the headers of every flow of `addressing`.
    pub fn new(addressing: &Addressing) -> Self {
        let flow = |flow: u32| {
            let source = addressing.source_at(flow % addressing.sources);
            let port = addressing.first_port.wrapping_add((flow / addressing.sources) as u16);
            Headers::new(addressing, source, port)
        };
        Self { flows: (0..addressing.flows()).map(flow).collect(), v6: addressing.target.is_ipv6() }
    }

    /// How many bytes of headers stand in front of the payload.
    #[inline]
    pub fn header_bytes(&self) -> usize {
        ETHERNET_BYTES + if self.v6 { 40 } else { 20 } + UDP_BYTES
    }

    /// Writes the headers of `flow` in front of a payload that lies in `frame`
    /// behind them already. `payload_sum` is [`sum`] of the payload.
    #[inline]
    pub fn write(&self, flow: u32, frame: &mut [u8], payload_sum: u32) {
        let headers = &self.flows[flow as usize];
        let header_bytes = self.header_bytes();
        let udp_bytes = (frame.len() - header_bytes + UDP_BYTES) as u16;
        frame[..header_bytes].copy_from_slice(&headers.bytes[..header_bytes]);
        let udp = header_bytes - UDP_BYTES;
        if self.v6 {
            frame[18..20].copy_from_slice(&udp_bytes.to_be_bytes());
        } else {
            let total = udp_bytes + 20;
            frame[16..18].copy_from_slice(&total.to_be_bytes());
            let checksum = !fold(headers.ip_sum + u32::from(total));
            frame[24..26].copy_from_slice(&checksum.to_be_bytes());
        }
        frame[udp + 4..udp + 6].copy_from_slice(&udp_bytes.to_be_bytes());
        // The length counts twice: in the UDP header and in the pseudo-header.
        let checksum = !fold(headers.udp_sum + 2 * u32::from(udp_bytes) + payload_sum);
        // RFC 768: zero means no checksum, so a sum of zero is sent as ones.
        let checksum = if checksum == 0 { 0xffff } else { checksum };
        frame[udp + 6..udp + 8].copy_from_slice(&checksum.to_be_bytes());
    }
}

impl Headers {
    fn new(addressing: &Addressing, source: IpAddr, port: u16) -> Self {
        let mut bytes = [0; 62];
        bytes[..6].copy_from_slice(&addressing.target_mac);
        bytes[6..12].copy_from_slice(&addressing.source_mac);
        let mut udp_sum = u32::from(PROTOCOL_UDP);
        let (udp, ip_sum) = match (source, addressing.target.ip()) {
            (IpAddr::V4(source), IpAddr::V4(target)) => {
                bytes[12..14].copy_from_slice(&[0x08, 0x00]);
                // Version and length, no fragments, hop limit 64.
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
        bytes[udp..udp + 2].copy_from_slice(&port.to_be_bytes());
        bytes[udp + 2..udp + 4].copy_from_slice(&addressing.target.port().to_be_bytes());
        udp_sum += sum(&bytes[udp..udp + 4]);
        Self { bytes, ip_sum, udp_sum }
    }
}

/// The sum of big-endian 16-bit words, not folded; an odd last byte counts as
/// the upper half of a word. `bytes` may be up to 128 KiB long.
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
            sources: 3,
            first_port: 10_000,
            ports: 5,
            target: target.parse().unwrap(),
        }
    }

    fn both() -> [Addressing; 2] {
        [addressing("10.1.0.254", "10.2.0.1:53"), addressing("fd00::ffff", "[fd00:1::2]:53")]
    }

    /// The naive way: the whole pseudo-header and datagram in one buffer.
    fn udp_checksum_is_right(frame: &[u8], v6: bool) -> bool {
        let (addresses, udp) = if v6 { (22..54, 54) } else { (26..34, 34) };
        let mut all = frame[addresses].to_vec();
        all.extend(((frame.len() - udp) as u32).to_be_bytes());
        all.extend(17u32.to_be_bytes());
        all.extend(&frame[udp..]);
        fold(sum(&all)) == 0xffff
    }

    #[test]
    fn every_flow_has_right_lengths_and_checksums() {
        for addressing in both() {
            let template = Template::new(&addressing);
            let v6 = addressing.target.is_ipv6();
            for payload_bytes in [0, 1, 2, 33, 64, MAX_PAYLOAD_BYTES] {
                let payload: Vec<u8> = (0..payload_bytes).map(|i| (i * 7) as u8).collect();
                for flow in 0..addressing.flows() {
                    let mut frame = vec![0xee; template.header_bytes()];
                    frame.extend(&payload);
                    template.write(flow, &mut frame, sum(&payload));
                    assert!(udp_checksum_is_right(&frame, v6), "flow {flow}, {payload_bytes}");
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
    fn a_flow_is_found_again_by_its_address_and_port() {
        for addressing in both() {
            let template = Template::new(&addressing);
            for flow in 0..addressing.flows() {
                let source = addressing.source_at(flow % addressing.sources);
                let headers = &template.flows[flow as usize].bytes;
                let udp = template.header_bytes() - UDP_BYTES;
                let port = u16::from_be_bytes([headers[udp], headers[udp + 1]]);
                assert_eq!(addressing.flow_of(source, port), Some(flow));
            }
            let outside = addressing.source_at(3);
            assert_eq!(addressing.flow_of(outside, 10_000), None);
            assert_eq!(addressing.flow_of(addressing.source, 9_999), None);
            assert_eq!(addressing.flow_of(addressing.source, 10_005), None);
        }
        let [v4, v6] = both();
        assert_eq!(v4.flow_of(v6.source, 10_000), None);
    }

    #[test]
    fn a_checksum_of_zero_is_sent_as_ones() {
        let [v4, _] = both();
        let template = Template::new(&v4);
        // Choose the payload so that the sum comes out as 0xffff.
        let mut frame = vec![0; template.header_bytes() + 2];
        template.write(0, &mut frame, 0);
        let checksum = [frame[40], frame[41]];
        frame[42..].copy_from_slice(&checksum);
        template.write(0, &mut frame, sum(&checksum));
        assert_eq!(&frame[40..42], [0xff, 0xff]);
        assert!(udp_checksum_is_right(&frame, false));
    }
}
