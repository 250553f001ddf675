//! Link over a device: the generator builds the frames itself.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use tidegate_device::{Burst, Device, DeviceCounters};
use tidegate_memory::{Arena, Frame};

use crate::error::LoadError;
use crate::link::Link;
use crate::neighbour::{self, NeighbourEvent};
use crate::template::{Addressing, FrameTemplate, MAX_PAYLOAD_BYTES};
use crate::workload::WrittenPayload;

/// Maximum number of frames queued for the device; more would only add delay.
const MAX_QUEUED_FRAMES: usize = 128;

/// Counts of one poll that reflects responses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reflected {
    /// Responses that became requests again.
    pub(crate) responses: u64,
    /// Responses whose payload differs from the request.
    pub(crate) wrong_responses: u64,
}

/// Link over a device and its arena.
pub struct DeviceLink<P> {
    device: P,
    arena: Arena,
    addressing: Addressing,
    template: FrameTemplate,
    next_flow: u32,
    tx_queue: Burst,
    rx_burst: Burst,
}

impl<P: Device> DeviceLink<P> {
    /// Creates a link over a device and its arena.
    ///
    /// If `target_mac` in `addressing` is zero, the link resolves it by ARP or NDP. The source
    /// hardware address is the device's.
    ///
    /// # Errors
    /// [`LoadError::Unresolved`] when the target does not answer. [`LoadError::Config`] when
    /// the device does not carry Ethernet, or source and target are of different families.
    pub fn open(device: P, arena: Arena, addressing: Addressing) -> Result<Self, LoadError> {
        let capabilities = device.capabilities();
        if capabilities.medium != tidegate_device::Medium::Ethernet {
            return Err(LoadError::Config(format!(
                "the load generator sends Ethernet frames, which device `{}` does not carry",
                capabilities.kind
            )));
        }
        if addressing.source.is_ipv4() != addressing.target.is_ipv4() {
            return Err(LoadError::Config(format!(
                "source {} and target {} are of different address families",
                addressing.source, addressing.target
            )));
        }
        let addressing = Addressing { source_mac: capabilities.mac, ..addressing };
        let mut link = Self {
            device,
            arena,
            template: FrameTemplate::new(&addressing),
            addressing,
            next_flow: 0,
            tx_queue: Burst::with_capacity(2 * MAX_QUEUED_FRAMES),
            rx_burst: Burst::with_capacity(512),
        };
        if link.addressing.target_mac == [0; 6] {
            link.addressing.target_mac = link.resolve()?;
            link.template = FrameTemplate::new(&link.addressing);
        }
        Ok(link)
    }

    /// Requests the target's hardware address until a reply arrives, for up to 3 seconds.
    fn resolve(&mut self) -> Result<[u8; 6], LoadError> {
        const REQUEST_INTERVAL: Duration = Duration::from_millis(100);
        const RESOLVE_TIMEOUT: Duration = Duration::from_secs(3);
        let (source, target) = (self.addressing.source, self.addressing.target.ip());
        let failed = || LoadError::io("the device failed while resolving the target");
        let start = Instant::now();
        let mut requests_sent = 0;
        while start.elapsed() < RESOLVE_TIMEOUT {
            if start.elapsed() >= REQUEST_INTERVAL * requests_sent {
                requests_sent += 1;
                self.queue_frame(&neighbour::request(self.addressing.source_mac, source, target));
            }
            self.device.transmit(&mut self.arena, &mut self.tx_queue).map_err(failed())?;
            let resolved_mac = self.receive(256, |_, _| {}).map_err(failed())?;
            if let Some(mac) = resolved_mac {
                return Ok(mac);
            }
            std::thread::yield_now();
        }
        Err(LoadError::Unresolved {
            protocol: if target.is_ipv4() { "ARP" } else { "NDP" },
            target,
            waited_ms: RESOLVE_TIMEOUT.as_millis() as u64,
        })
    }

    /// Drops the frames that the device has not accepted.
    pub(crate) fn drop_queued_frames(&mut self) {
        while let Some(frame) = self.tx_queue.pop_front() {
            self.arena.free(frame);
        }
    }

    /// Returns the counters of the device.
    pub fn counters(&mut self) -> DeviceCounters {
        self.device.counters()
    }

    /// Returns kind and capabilities of the device, for reports.
    pub fn describe(&self) -> String {
        let capabilities = self.device.capabilities();
        format!("{} ({})", capabilities.kind, capabilities.detail)
    }

    fn queue_frame(&mut self, bytes: &[u8]) {
        if let Some(frame) = self.arena.alloc_from(bytes) {
            self.tx_queue.push_back(frame);
        }
    }

    /// Receives once; returns the target's hardware address if a reply contained it.
    fn receive(
        &mut self,
        quota: usize,
        mut on_response: impl FnMut(u32, &[u8]),
    ) -> io::Result<Option<[u8; 6]>> {
        let mut resolved_mac = None;
        self.device.receive(&mut self.arena, &mut self.rx_burst, quota)?;
        while let Some(frame) = self.rx_burst.pop_front() {
            let bytes = self.arena.bytes(&frame);
            if let Some((flow, payload)) = parse_response(bytes, &self.addressing) {
                on_response(flow, payload);
                self.arena.free(frame);
                continue;
            }
            resolved_mac = self.handle_neighbour_frame(frame).or(resolved_mac);
        }
        Ok(resolved_mac)
    }

    /// Handles a frame that is not a response: learns the target's hardware address, or answers a
    /// request for the generator's.
    fn handle_neighbour_frame(&mut self, frame: Frame) -> Option<[u8; 6]> {
        let bytes = self.arena.bytes(&frame);
        let event = neighbour::parse(bytes, &self.addressing, self.addressing.target.ip());
        self.arena.free(frame);
        match event? {
            NeighbourEvent::Resolved(mac) => Some(mac),
            NeighbourEvent::Reply(reply) => {
                self.queue_frame(&reply);
                None
            }
        }
    }
}

impl<P: Device> DeviceLink<P> {
    /// Receives up to `quota` packets and turns each response into the next request of its flow, in
    /// place.
    ///
    /// `payload` is the payload of every request and `payload_sum` its
    /// [`sum`](crate::template::sum). A response with a different payload is dropped.
    #[inline]
    pub(crate) fn reflect_responses(
        &mut self,
        quota: usize,
        payload: &[u8],
        payload_sum: u32,
    ) -> io::Result<Reflected> {
        let mut reflected = Reflected::default();
        let header_bytes = self.template.header_bytes();
        let frame_bytes = header_bytes + payload.len();
        self.device.receive(&mut self.arena, &mut self.rx_burst, quota)?;
        while let Some(mut frame) = self.rx_burst.pop_front() {
            let bytes = self.arena.bytes_mut(&mut frame);
            let Some((flow, _)) = parse_response(bytes, &self.addressing) else {
                self.handle_neighbour_frame(frame);
                continue;
            };
            if bytes.get(header_bytes..frame_bytes) != Some(payload) {
                reflected.wrong_responses += 1;
                self.arena.free(frame);
                continue;
            }
            reflected.responses += 1;
            self.template.write_headers(flow, &mut bytes[..frame_bytes], payload_sum);
            frame.truncate(frame_bytes);
            self.tx_queue.push_back(frame);
        }
        Ok(reflected)
    }
}

impl<P: Device> Link for DeviceLink<P> {
    fn flow_count(&self) -> u32 {
        self.addressing.flow_count()
    }

    #[inline]
    fn space(&self) -> usize {
        MAX_QUEUED_FRAMES.saturating_sub(self.tx_queue.len()).min(self.arena.available())
    }

    #[inline]
    fn push(&mut self, write: impl FnOnce(u32, &mut [u8]) -> WrittenPayload) {
        let Some(mut frame) = self.arena.alloc() else { return };
        let flow = self.next_flow;
        self.next_flow = if flow + 1 == self.addressing.flow_count() { 0 } else { flow + 1 };
        let header_bytes = self.template.header_bytes();
        self.arena.set_len(&mut frame, header_bytes + MAX_PAYLOAD_BYTES);
        let bytes = self.arena.bytes_mut(&mut frame);
        let payload = write(flow, &mut bytes[header_bytes..]);
        let len = header_bytes + payload.len;
        self.template.write_headers(flow, &mut bytes[..len], payload.sum);
        frame.truncate(len);
        self.tx_queue.push_back(frame);
    }

    #[inline]
    fn flush(&mut self) -> io::Result<()> {
        self.device.transmit(&mut self.arena, &mut self.tx_queue).map(drop)
    }

    #[inline]
    fn poll(&mut self, quota: usize, on_response: impl FnMut(u32, &[u8])) -> io::Result<()> {
        self.receive(quota, on_response).map(drop)
    }
}

impl<P> Drop for DeviceLink<P> {
    fn drop(&mut self) {
        let frames: Vec<Frame> = self.tx_queue.drain(..).chain(self.rx_burst.drain(..)).collect();
        frames.into_iter().for_each(|frame| self.arena.free(frame));
    }
}

/// Returns flow and payload of a UDP packet from the target to one of the generator's flows.
#[inline]
fn parse_response<'f>(frame: &'f [u8], addressing: &Addressing) -> Option<(u32, &'f [u8])> {
    let (ethernet, packet) = frame.split_first_chunk::<14>()?;
    let (destination, udp) = match [ethernet[12], ethernet[13]] {
        [0x08, 0x00] => parse_udp_v4(packet)?,
        [0x86, 0xdd] => parse_udp_v6(packet)?,
        _ => return None,
    };
    let (header, rest) = udp.split_first_chunk::<8>()?;
    if u16::from_be_bytes([header[0], header[1]]) != addressing.target.port() {
        return None;
    }
    let flow = addressing.flow_index(destination, u16::from_be_bytes([header[2], header[3]]))?;
    let payload_bytes = usize::from(u16::from_be_bytes([header[4], header[5]])).checked_sub(8)?;
    Some((flow, rest.get(..payload_bytes)?))
}

/// Returns destination and UDP datagram of an unfragmented IPv4 packet.
#[inline]
fn parse_udp_v4(packet: &[u8]) -> Option<(IpAddr, &[u8])> {
    let header = packet.first_chunk::<20>()?;
    let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff;
    if header[0] >> 4 != 4 || header[9] != 17 || fragment != 0 {
        return None;
    }
    let header_bytes = usize::from(header[0] & 0x0f) * 4;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let destination = Ipv4Addr::new(header[16], header[17], header[18], header[19]);
    Some((destination.into(), packet.get(header_bytes..total)?))
}

/// Returns destination and UDP datagram of an IPv6 packet without extension headers.
#[inline]
fn parse_udp_v6(packet: &[u8]) -> Option<(IpAddr, &[u8])> {
    let (header, rest) = packet.split_first_chunk::<40>()?;
    if header[0] >> 4 != 6 || header[6] != 17 {
        return None;
    }
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let destination: [u8; 16] = header[24..40].try_into().ok()?;
    Some((Ipv6Addr::from(destination).into(), rest.get(..length)?))
}

#[cfg(test)]
pub(crate) mod tests {
    use tidegate_device::mem::{MemConfig, wire};
    use tidegate_memory::{ArenaConfig, FrameSize};

    use super::*;
    use crate::template::sum;

    pub(crate) fn addressing(v6: bool) -> Addressing {
        let (source, target) =
            if v6 { ("fd00::10", "[fd00::1]:53") } else { ("10.0.0.16", "10.0.0.1:53") };
        Addressing {
            source_mac: [0; 6],
            target_mac: [2, 0, 0, 0, 0, 2],
            source: source.parse().unwrap(),
            source_count: 2,
            first_port: 20_000,
            port_count: 2,
            target: target.parse().unwrap(),
        }
    }

    pub(crate) fn arena() -> Arena {
        Arena::new(ArenaConfig { frames: 64, frame_size: FrameSize::K2, hugepages: false }).unwrap()
    }

    /// Builds the echo of a request: addresses and ports swapped.
    pub(crate) fn make_echo(frame: &[u8], v6: bool) -> Vec<u8> {
        let mut echo = frame.to_vec();
        let (addresses, width, udp) = if v6 { (22, 16, 54) } else { (26, 4, 34) };
        for i in 0..width {
            echo.swap(addresses + i, addresses + width + i);
        }
        echo.swap(udp, udp + 2);
        echo.swap(udp + 1, udp + 3);
        echo
    }

    #[test]
    fn matches_responses_to_their_flows() {
        for v6 in [false, true] {
            let (ours, mut theirs) = wire(&MemConfig::default()).unwrap();
            let mut link = DeviceLink::open(ours, arena(), addressing(v6)).unwrap();
            for number in 0..4u8 {
                link.push(|flow, buffer| {
                    buffer[..2].copy_from_slice(&[flow as u8, number]);
                    WrittenPayload { len: 2, sum: sum(&buffer[..2]) }
                });
            }
            link.flush().unwrap();
            let mut seen = Vec::new();
            theirs.receive_bytes(16, |frame| seen.push(make_echo(frame, v6)));
            assert_eq!(seen.len(), 4);
            for (staged, frame) in seen.iter().enumerate() {
                assert!(theirs.stage(staged, frame));
            }
            theirs.flush(seen.len());
            let mut answers = Vec::new();
            link.poll(16, |flow, payload| answers.push((flow, payload.to_vec()))).unwrap();
            let expected: Vec<_> = (0..4).map(|n| (n, vec![n as u8, n as u8])).collect();
            assert_eq!(answers, expected);
        }
    }

    #[test]
    fn reflects_each_response_as_next_request_of_its_flow() {
        for v6 in [false, true] {
            let (ours, mut theirs) = wire(&MemConfig::default()).unwrap();
            let mut link = DeviceLink::open(ours, arena(), addressing(v6)).unwrap();
            let payload = [7, 8, 9];
            for _ in 0..4 {
                link.push(|_, buffer| {
                    buffer[..3].copy_from_slice(&payload);
                    WrittenPayload { len: 3, sum: sum(&payload) }
                });
            }
            link.flush().unwrap();
            let mut sent = Vec::new();
            theirs.receive_bytes(16, |frame| sent.push(frame.to_vec()));
            let mut echoes: Vec<_> = sent.iter().map(|frame| make_echo(frame, v6)).collect();
            *echoes[1].last_mut().unwrap() ^= 1;
            for (staged, frame) in echoes.iter().enumerate() {
                assert!(theirs.stage(staged, frame));
            }
            theirs.flush(echoes.len());
            let reflected = link.reflect_responses(16, &payload, sum(&payload)).unwrap();
            assert_eq!(reflected, Reflected { responses: 3, wrong_responses: 1 });
            link.flush().unwrap();
            let mut reflected_frames = Vec::new();
            theirs.receive_bytes(16, |frame| reflected_frames.push(frame.to_vec()));
            sent.remove(1);
            assert_eq!(reflected_frames, sent);
        }
    }

    #[test]
    fn rejects_truncated_and_corrupt_frames() {
        for v6 in [false, true] {
            let addressing = addressing(v6);
            let template = FrameTemplate::new(&addressing);
            let mut frame = vec![0; template.header_bytes() + 3];
            template.write_headers(1, &mut frame, 0);
            let good = make_echo(&frame, v6);
            assert!(parse_response(&good, &addressing).is_some());
            for length in 0..good.len() {
                assert!(parse_response(&good[..length], &addressing).is_none(), "{length}");
            }
            for position in 0..good.len() {
                for value in [0, 1, 0x7f, 0xff] {
                    let mut bad = good.clone();
                    bad[position] = value;
                    let _ = parse_response(&bad, &addressing);
                }
            }
        }
    }

    #[test]
    fn resolves_target_and_answers_for_own_addresses() {
        let (ours, mut theirs) = wire(&MemConfig::default()).unwrap();
        let peer = Addressing {
            source: "10.0.0.1".parse().unwrap(),
            source_mac: [2, 0, 0, 0, 0, 2],
            ..addressing(false)
        };
        let responder = std::thread::spawn(move || {
            loop {
                let mut reply = None;
                theirs.receive_bytes(1, |frame| {
                    reply = neighbour::parse(frame, &peer, "10.0.0.16".parse().unwrap());
                });
                if let Some(NeighbourEvent::Reply(reply)) = reply {
                    assert!(theirs.stage(0, &reply));
                    let request_frame = neighbour::request(
                        peer.source_mac,
                        peer.source,
                        "10.0.0.17".parse().unwrap(),
                    );
                    assert!(theirs.stage(1, &request_frame));
                    theirs.flush(2);
                    return theirs;
                }
                std::thread::yield_now();
            }
        });
        let unknown = Addressing { target_mac: [0; 6], ..addressing(false) };
        let mut link = DeviceLink::open(ours, arena(), unknown).unwrap();
        assert_eq!(link.addressing.target_mac, [2, 0, 0, 0, 0, 2]);
        let mut theirs = responder.join().unwrap();
        link.poll(16, |_, _| {}).unwrap();
        link.flush().unwrap();
        let peer = addressing(false);
        let mut found = None;
        theirs.receive_bytes(16, |frame| {
            found = neighbour::parse(frame, &peer, "10.0.0.17".parse().unwrap()).or(found.take());
        });
        assert_eq!(found, Some(NeighbourEvent::Resolved([2, 0, 0, 0, 0, 1])));
    }
}
