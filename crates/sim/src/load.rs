//! Offered load: packets at a rate, in an arrival pattern, from many flows.

use std::net::{IpAddr, SocketAddr};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::error::SetupError;

const SECOND_NS: u128 = 1_000_000_000;
/// Times have a resolution of 2^-16 ns, so that a rate stays exact over any time.
const FRACTION_BITS: u32 = 16;

/// Network link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Link rate in bits per second.
    pub bits_per_second: u64,
}

/// Bits of the smallest Ethernet frame on the wire: 64 bytes, preamble and inter-frame gap.
const MIN_FRAME_WIRE_BITS: u64 = (64 + 20) * 8;

impl Link {
    /// Transmission time of a 64-byte frame.
    pub fn frame_ns(self) -> u64 {
        (MIN_FRAME_WIRE_BITS * 1_000_000_000).div_ceil(self.bits_per_second.max(1))
    }

    /// Maximum number of 64-byte frames per second.
    pub fn frames_pps(self) -> u64 {
        self.bits_per_second / MIN_FRAME_WIRE_BITS
    }
}

/// IP version of the load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IpFamily {
    /// IPv4.
    #[default]
    V4,
    /// IPv6.
    V6,
}

/// Pattern of packet arrivals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArrivalPattern {
    /// Equal intervals.
    #[default]
    Constant,
    /// Poisson process: independent arrivals.
    Poisson,
    /// Bursts of this many packets at link rate, at equal intervals.
    Bursts(u32),
}

/// Offered load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferedLoad {
    /// Packets of 64 bytes per second; 0 is no load.
    pub pps: u64,
    /// Arrival pattern.
    pub shape: ArrivalPattern,
    /// Number of flows. The flow of each packet is random; all packets of a flow go to the same
    /// core.
    pub flows: u32,
}

impl Default for OfferedLoad {
    fn default() -> Self {
        Self { pps: 100_000, shape: ArrivalPattern::Constant, flows: 4096 }
    }
}

const MAX_FLOWS: u32 = 1 << 16;
const MAX_BURST_PACKETS: u32 = 1 << 16;

impl OfferedLoad {
    pub(crate) fn check(&self, link: Link) -> Result<(), SetupError> {
        if !(1..=MAX_FLOWS).contains(&self.flows) {
            return Err(SetupError::FlowCount(self.flows));
        }
        if let ArrivalPattern::Bursts(packets) = self.shape
            && !(1..=MAX_BURST_PACKETS).contains(&packets)
        {
            return Err(SetupError::BurstSize(packets));
        }
        let link_pps = link.frames_pps();
        if self.pps > link_pps {
            return Err(SetupError::Link { pps: self.pps, link_pps });
        }
        Ok(())
    }
}

/// Arriving packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    /// Arrival time at the NIC.
    pub(crate) arrived_ns: u64,
    /// Flow number.
    pub(crate) flow: u32,
}

/// Flows that arrive at another core than that of their socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CrossingFlows {
    /// Number of 32-bit hashes that belong to such flows, from 0 on.
    hashes: u64,
}

impl CrossingFlows {
    /// The share of a machine of `cores` cores.
    pub(crate) fn new(share: f64, cores: u32) -> Self {
        let share = if cores > 1 { share } else { 0.0 };
        Self { hashes: (share * (1_u64 << 32) as f64) as u64 }
    }

    /// Fibonacci hashing: any range of flows has nearly the same share of them.
    pub(crate) fn contains(self, flow: u32) -> bool {
        u64::from(flow.wrapping_mul(0x9e37_79b1)) < self.hashes
    }
}

/// Generator of packets in arrival order.
pub(crate) struct PacketGenerator {
    rng: ChaCha8Rng,
    load: OfferedLoad,
    frame_ns: u64,
    /// Scheduled time of the next packet in units of 2^-16 ns, before queueing for the link.
    due: u128,
    /// Packets left in the current burst.
    burst_remaining: u32,
    /// Time at which the link becomes idle.
    link_free_ns: u64,
    next: Option<Packet>,
    /// Number of the first flow.
    first_flow: u32,
}

impl PacketGenerator {
    /// Creates a generator of the flows from `first_flow` on.
    pub(crate) fn new(load: OfferedLoad, link: Link, seed: u64, first_flow: u32) -> Self {
        let mut generator = Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            load,
            frame_ns: link.frame_ns(),
            due: 0,
            burst_remaining: 0,
            link_free_ns: 0,
            next: None,
            first_flow,
        };
        generator.next = generator.draw();
        generator
    }

    /// Replaces the load from `now_ns` on.
    pub(crate) fn set_load(&mut self, now_ns: u64, load: OfferedLoad) {
        self.load = load;
        self.due = u128::from(now_ns) << FRACTION_BITS;
        self.burst_remaining = 0;
        self.next = self.draw();
    }

    /// Returns the next packet that arrives before `end_ns`.
    pub(crate) fn next_before(&mut self, end_ns: u64) -> Option<Packet> {
        let packet = self.next.filter(|packet| packet.arrived_ns < end_ns)?;
        self.next = self.draw();
        Some(packet)
    }

    fn draw(&mut self) -> Option<Packet> {
        if self.load.pps == 0 {
            return None;
        }
        let gap = (SECOND_NS << FRACTION_BITS) / u128::from(self.load.pps);
        match self.load.shape {
            ArrivalPattern::Constant => self.due += gap,
            ArrivalPattern::Poisson => {
                let factor = exponential(self.rng.next_u64());
                self.due += ((gap as f64) * factor) as u128;
            }
            ArrivalPattern::Bursts(packets) => {
                if self.burst_remaining == 0 {
                    self.due += gap * u128::from(packets);
                    self.burst_remaining = packets;
                }
                self.burst_remaining -= 1;
            }
        }
        let arrived_ns = ((self.due >> FRACTION_BITS) as u64).max(self.link_free_ns);
        self.link_free_ns = arrived_ns + self.frame_ns;
        let flow = ((u64::from(self.rng.next_u32()) * u64::from(self.load.flows)) >> 32) as u32;
        Some(Packet { arrived_ns, flow: self.first_flow + flow })
    }

    /// Arrival time of the next packet, if there is one.
    pub(crate) fn next_arrival_ns(&self) -> Option<u64> {
        self.next.map(|packet| packet.arrived_ns)
    }
}

/// Draws from the exponential distribution of mean 1, given 64 random bits.
///
/// The logarithm uses only additions, multiplications and divisions. Unlike a system's `ln`,
/// these give the same bits on every machine.
fn exponential(bits: u64) -> f64 {
    // u = m * 2^e with m in [1, 2), of 53 random bits; -ln(u) = -(ln(m) + e ln(2)).
    let whole = (bits >> 11) | 1;
    let shift = whole.ilog2();
    let m = whole as f64 / (1_u64 << shift) as f64;
    let e = f64::from(shift) - 53.0;
    // ln(m) = 2 atanh((m - 1) / (m + 1)), and the fraction is under 1/3.
    let x = (m - 1.0) / (m + 1.0);
    let square = x * x;
    let (mut term, mut sum) = (x, 0.0);
    let mut odd = 1.0;
    while odd < 40.0 {
        sum += term / odd;
        term *= square;
        odd += 2.0;
    }
    (-(2.0 * sum + e * std::f64::consts::LN_2)).max(0.0)
}

/// Receive-side scaling (RSS) hash: Toeplitz with Microsoft's published key, which NICs use to
/// spread flows over queues.
#[derive(Clone, Copy, Debug, Default)]
pub struct ToeplitzHash;

const RSS_KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

impl ToeplitzHash {
    /// Hashes a source and a destination, each an address and a port.
    pub fn hash(self, source: (IpAddr, u16), destination: (IpAddr, u16)) -> u32 {
        let mut input = Vec::with_capacity(36);
        for ip in [source.0, destination.0] {
            match ip {
                IpAddr::V4(v4) => input.extend(v4.octets()),
                IpAddr::V6(v6) => input.extend(v6.octets()),
            }
        }
        input.extend(source.1.to_be_bytes());
        input.extend(destination.1.to_be_bytes());
        let mut hash = 0;
        for bit in (0..input.len() * 8).filter(|bit| input[bit / 8] & (0x80 >> (bit % 8)) != 0) {
            let mut word = [0; 5];
            word.copy_from_slice(&RSS_KEY[bit / 8..bit / 8 + 5]);
            let [a, b, c, d, e] = word;
            let wide = u64::from(u32::from_be_bytes([a, b, c, d])) << 8 | u64::from(e);
            hash ^= (wide >> (8 - bit % 8)) as u32;
        }
        hash
    }
}

/// Returns the source and destination of a flow, in the networks that RFC 2544 (IPv4) and RFC
/// 5180 (IPv6) reserve for benchmarks. Each reader has its own destination port.
pub(crate) fn flow_endpoints(
    family: IpFamily,
    flow: u32,
    readers: u32,
) -> ((IpAddr, u16), (IpAddr, u16)) {
    let (low, port) = (flow as u8, FIRST_SOURCE_PORT + (flow >> 8) as u16);
    let destination_port = FIRST_READER_PORT + reader_of_flow(flow, readers) as u16;
    match family {
        IpFamily::V4 => {
            (([198, 18, 0, low].into(), port), ([198, 19, 0, 1].into(), destination_port))
        }
        IpFamily::V6 => (
            ([0x2001, 2, 0, 0, 0, 0, 0, u16::from(low)].into(), port),
            ([0x2001, 2, 0, 1, 0, 0, 0, 1].into(), destination_port),
        ),
    }
}

/// Returns the flow with this source: the inverse of [`flow_endpoints`].
pub(crate) fn flow_of_source(source: SocketAddr) -> u32 {
    let low = match source.ip() {
        IpAddr::V4(v4) => v4.octets()[3],
        IpAddr::V6(v6) => v6.octets()[15],
    };
    u32::from(source.port().saturating_sub(FIRST_SOURCE_PORT)) << 8 | u32::from(low)
}

/// Returns the reader of a flow.
pub(crate) fn reader_of_flow(flow: u32, readers: u32) -> usize {
    (flow % readers.max(1)) as usize
}

/// First source port.
const FIRST_SOURCE_PORT: u16 = 1024;

/// UDP port of the first reader.
pub(crate) const FIRST_READER_PORT: u16 = 4000;

#[cfg(test)]
mod tests {
    use super::*;

    const GIGABIT: Link = Link { bits_per_second: 1_000_000_000 };

    fn arrivals(load: OfferedLoad, end_ns: u64) -> Vec<u64> {
        let mut generator = PacketGenerator::new(load, GIGABIT, 7, 0);
        std::iter::from_fn(|| generator.next_before(end_ns)).map(|p| p.arrived_ns).collect()
    }

    #[test]
    fn every_pattern_keeps_its_rate_and_the_link_gap() {
        for shape in [ArrivalPattern::Constant, ArrivalPattern::Poisson, ArrivalPattern::Bursts(32)]
        {
            let load = OfferedLoad { pps: 300_000, shape, flows: 16 };
            let times = arrivals(load, 1_000_000_000);
            assert!(times.len().abs_diff(300_000) < 3_000, "{shape:?}: {}", times.len());
            let least = times.windows(2).map(|pair| pair[1] - pair[0]).min();
            assert!(least.unwrap() >= GIGABIT.frame_ns(), "{shape:?}: {least:?}");
        }
        assert!(
            arrivals(OfferedLoad { pps: 0, ..OfferedLoad::default() }, 1_000_000_000).is_empty()
        );
    }

    #[test]
    fn share_of_crossing_flows_is_as_given() {
        for (share, cores, expected) in [(0.0, 2, 0), (0.25, 2, 1024), (1.0, 64, 4096), (1.0, 1, 0)]
        {
            let crossing = CrossingFlows::new(share, cores);
            let flows = (0..4096).filter(|&flow| crossing.contains(flow)).count();
            assert!(flows.abs_diff(expected) < 8, "{share} on {cores} cores: {flows}");
        }
    }

    #[test]
    fn exponential_agrees_with_the_system_logarithm() {
        for bits in [1 << 11, 1 << 40, u64::MAX / 3, u64::MAX / 2, u64::MAX] {
            let u = ((bits >> 11) | 1) as f64 / (1_u64 << 53) as f64;
            let (mine, theirs) = (exponential(bits), -u.ln());
            assert!((mine - theirs).abs() < 1e-12 * theirs.max(1.0), "{mine} {theirs}");
        }
    }

    /// Examples of Microsoft's "Verifying the RSS hash calculation".
    #[test]
    fn hash_agrees_with_the_published_rss_examples() {
        let hash = |source: &str, destination: &str| {
            let end = |text: &str| {
                let address: SocketAddr = text.parse().unwrap();
                (address.ip(), address.port())
            };
            ToeplitzHash.hash(end(source), end(destination))
        };
        assert_eq!(hash("66.9.149.187:2794", "161.142.100.80:1766"), 0x51cc_c178);
        assert_eq!(hash("199.92.111.2:14230", "65.69.140.83:4739"), 0xc626_b0ea);
        assert_eq!(hash("[3ffe:2501:200:1fff::7]:2794", "[3ffe:2501:200:3::1]:1766"), 0x4020_7d3d);
    }
}
