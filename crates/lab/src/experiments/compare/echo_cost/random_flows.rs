//! Traffic of many flows and packet sizes in random order.

use std::ops::Range;

use tidegate_load::template::{FrameTemplate, sum};

use super::missing_echoes;
use super::testbed::{ChecksumMode, EchoTestbed, Flows};
use crate::error::LabError;

/// Addresses of the driver.
const ADDRESS_COUNT: u32 = 64;
/// Ports of each address.
const PORT_COUNT: u16 = 16;
/// Number of flows.
pub(super) const FLOW_COUNT: u32 = ADDRESS_COUNT * PORT_COUNT as u32;
/// Smallest payload.
pub(super) const MIN_PAYLOAD_BYTES: usize = 64;
/// Largest payload.
pub(super) const MAX_PAYLOAD_BYTES: usize = 1400;
/// Packets before the order repeats.
const PACKET_COUNT: usize = 8192;
/// Seed of the order.
const SEED: u64 = 1;

/// Requests and the expected echo of each, built before the measurement.
struct Packets {
    bytes: Vec<u8>,
    /// Request and echo of each packet in `bytes`.
    ranges: Vec<(Range<usize>, Range<usize>)>,
}

impl Packets {
    fn new(testbed: &EchoTestbed) -> Self {
        let template = FrameTemplate::new(&testbed.addressing);
        let mut rng = fastrand::Rng::with_seed(SEED);
        let mut packets = Self { bytes: Vec::new(), ranges: Vec::new() };
        for _ in 0..PACKET_COUNT {
            let flow = rng.u32(..FLOW_COUNT);
            let payload_bytes = rng.usize(MIN_PAYLOAD_BYTES..=MAX_PAYLOAD_BYTES);
            let payload: Vec<u8> =
                std::iter::repeat_with(|| rng.u8(..)).take(payload_bytes).collect();
            let mut request = vec![0; template.header_bytes()];
            request.extend(&payload);
            template.write_headers(flow, &mut request, sum(&payload));
            let ranges =
                (packets.append(&request), packets.append(&testbed.expected_echo(flow, &payload)));
            packets.ranges.push(ranges);
        }
        packets
    }

    fn append(&mut self, frame: &[u8]) -> Range<usize> {
        let from = self.bytes.len();
        self.bytes.extend(frame);
        from..self.bytes.len()
    }

    fn request(&self, number: usize) -> &[u8] {
        &self.bytes[self.ranges[number % PACKET_COUNT].0.clone()]
    }

    fn echo(&self, number: usize) -> &[u8] {
        &self.bytes[self.ranges[number % PACKET_COUNT].1.clone()]
    }
}

/// Echoes `packets` packets, at most `burst_frames` of them on the link at a time, and returns the
/// number of correct echoes.
pub(super) fn echo(packets: u64, ipv6: bool, burst_frames: usize) -> Result<u64, LabError> {
    let flows = Flows::Many { addresses: ADDRESS_COUNT, ports: PORT_COUNT };
    let mut testbed = EchoTestbed::new(ipv6, flows, ChecksumMode::Software)?;
    testbed.resolve_driver()?;
    let pool = Packets::new(&testbed);
    let mut echoed = 0;
    while echoed < packets as usize {
        let burst = burst_frames.min(packets as usize - echoed);
        for ahead in 0..burst {
            testbed.driver.stage(ahead, pool.request(echoed + ahead));
        }
        testbed.driver.flush(burst);
        testbed.serve(burst)?;
        let echo_count = testbed.receive_each(|number| pool.echo(echoed + number));
        if echo_count != burst {
            return Err(missing_echoes(burst, echo_count));
        }
        echoed += echo_count;
    }
    Ok(echoed as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_use_nearly_all_flows_and_all_sizes() {
        let flows = Flows::Many { addresses: ADDRESS_COUNT, ports: PORT_COUNT };
        let testbed = EchoTestbed::new(false, flows, ChecksumMode::Software).unwrap();
        let pool = Packets::new(&testbed);
        let frames = || (0..PACKET_COUNT).map(|number| pool.request(number));
        // Source address and port of an IPv4 frame.
        let flows: std::collections::HashSet<_> =
            frames().map(|frame| [&frame[26..30], &frame[34..36]].concat()).collect();
        assert!(flows.len() > FLOW_COUNT as usize * 99 / 100, "{} flows", flows.len());
        let header_bytes = 14 + 20 + 8;
        assert_eq!(frames().map(<[u8]>::len).min(), Some(MIN_PAYLOAD_BYTES + header_bytes));
        assert_eq!(frames().map(<[u8]>::len).max(), Some(MAX_PAYLOAD_BYTES + header_bytes));
        let checksum = |frame: &[u8]| [frame[40], frame[41]];
        assert!((0..PACKET_COUNT).all(|number| checksum(pool.echo(number)) != [0, 0]));
    }
}
