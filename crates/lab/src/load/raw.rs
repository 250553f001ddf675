//! A line over a port: frames made by the generator itself.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use tidegate_memory::{Arena, Frame};
use tidegate_port::{Burst, Port, PortCounters};

use super::line::Line;
use super::neighbour::{self, Event};
use super::template::{Addressing, MAX_PAYLOAD_BYTES, Template};
use super::workload::Payload;
use crate::error::LabError;

/// Frames that may wait for the port; more would only wait longer.
const BACKLOG: usize = 128;

/// What came of one look at the port for answers to turn around.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Turned {
    /// Answers that are requests again.
    pub(super) answers: u64,
    /// Answers that were not what was sent.
    pub(super) wrong: u64,
}

/// A line over a port and its arena.
pub struct RawLine<P> {
    port: P,
    arena: Arena,
    addressing: Addressing,
    template: Template,
    next_flow: u32,
    out: Burst,
    arrived: Burst,
}

impl<P: Port> RawLine<P> {
    /// Takes a port and its arena. With `target_mac` zero in `addressing`, the
    /// address is found by ARP or NDP. The source hardware address is the
    /// port's.
    ///
    /// # Errors
    /// [`LabError::Unresolved`] when nobody answers, [`LabError::Config`] when
    /// the port does not speak Ethernet, or source and target are of different
    /// families.
    pub fn open(port: P, arena: Arena, addressing: Addressing) -> Result<Self, LabError> {
        let capabilities = port.capabilities();
        if capabilities.medium != tidegate_port::Medium::Ethernet {
            return Err(LabError::Config(format!(
                "the load generator makes Ethernet frames and the port `{}` takes none",
                capabilities.kind
            )));
        }
        if addressing.source.is_ipv4() != addressing.target.is_ipv4() {
            return Err(LabError::Config(format!(
                "source {} and target {} are of different families",
                addressing.source, addressing.target
            )));
        }
        let addressing = Addressing { source_mac: capabilities.mac, ..addressing };
        let mut line = Self {
            port,
            arena,
            template: Template::new(&addressing),
            addressing,
            next_flow: 0,
            out: Burst::with_capacity(2 * BACKLOG),
            arrived: Burst::with_capacity(512),
        };
        if line.addressing.target_mac == [0; 6] {
            line.addressing.target_mac = line.resolve()?;
            line.template = Template::new(&line.addressing);
        }
        Ok(line)
    }

    /// Asks for the target's hardware address until it comes.
    fn resolve(&mut self) -> Result<[u8; 6], LabError> {
        const ASK_EVERY: Duration = Duration::from_millis(100);
        const GIVE_UP: Duration = Duration::from_secs(3);
        let (source, target) = (self.addressing.source, self.addressing.target.ip());
        let failed = || LabError::io("the port failed while looking for the target");
        let start = Instant::now();
        let mut asked = 0;
        while start.elapsed() < GIVE_UP {
            if start.elapsed() >= ASK_EVERY * asked {
                asked += 1;
                self.send_now(&neighbour::request(self.addressing.source_mac, source, target));
            }
            self.port.transmit(&mut self.arena, &mut self.out).map_err(failed())?;
            let found = self.receive(256, |_, _| {}).map_err(failed())?;
            if let Some(mac) = found {
                return Ok(mac);
            }
            std::thread::yield_now();
        }
        Err(LabError::Unresolved {
            protocol: if target.is_ipv4() { "ARP" } else { "NDP" },
            target,
            waited_ms: GIVE_UP.as_millis() as u64,
        })
    }

    /// How many frames the port has had no room for yet.
    pub(super) fn waiting(&self) -> usize {
        self.out.len()
    }

    /// What passed through the port.
    pub fn counters(&mut self) -> PortCounters {
        self.port.counters()
    }

    /// What the port can do.
    pub fn detail(&self) -> String {
        let capabilities = self.port.capabilities();
        format!("{} ({})", capabilities.kind, capabilities.detail)
    }

    fn send_now(&mut self, bytes: &[u8]) {
        if let Some(frame) = self.arena.alloc_from(bytes) {
            self.out.push_back(frame);
        }
    }

    /// Receives once; returns the target's hardware address if it was said.
    fn receive(
        &mut self,
        quota: usize,
        mut answer: impl FnMut(u32, &[u8]),
    ) -> io::Result<Option<[u8; 6]>> {
        let mut found = None;
        self.port.receive(&mut self.arena, &mut self.arrived, quota)?;
        while let Some(frame) = self.arrived.pop_front() {
            let bytes = self.arena.bytes(&frame);
            if let Some((flow, payload)) = read_answer(bytes, &self.addressing) {
                answer(flow, payload);
                self.arena.free(frame);
                continue;
            }
            found = self.read_neighbour(frame).or(found);
        }
        Ok(found)
    }

    /// Takes a frame that is no answer: it may say the target's hardware
    /// address, or ask for ours.
    fn read_neighbour(&mut self, frame: Frame) -> Option<[u8; 6]> {
        let bytes = self.arena.bytes(&frame);
        let event = neighbour::read(bytes, &self.addressing, self.addressing.target.ip());
        self.arena.free(frame);
        match event? {
            Event::Found(mac) => Some(mac),
            Event::Reply(reply) => {
                self.send_now(&reply);
                None
            }
        }
    }
}

impl<P: Port> RawLine<P> {
    /// Takes up to `quota` packets, and makes each answer the next request of
    /// its flow where it lies. `payload` is what every request holds, and
    /// `payload_sum` its [`sum`](super::template::sum). An answer that is
    /// anything else is dropped.
    #[inline]
    pub(super) fn turn_around(
        &mut self,
        quota: usize,
        payload: &[u8],
        payload_sum: u32,
    ) -> io::Result<Turned> {
        let mut turned = Turned::default();
        let header_bytes = self.template.header_bytes();
        let frame_bytes = header_bytes + payload.len();
        self.port.receive(&mut self.arena, &mut self.arrived, quota)?;
        while let Some(mut frame) = self.arrived.pop_front() {
            let bytes = self.arena.bytes_mut(&mut frame);
            let Some((flow, _)) = read_answer(bytes, &self.addressing) else {
                self.read_neighbour(frame);
                continue;
            };
            if bytes.get(header_bytes..frame_bytes) != Some(payload) {
                turned.wrong += 1;
                self.arena.free(frame);
                continue;
            }
            turned.answers += 1;
            self.template.write(flow, &mut bytes[..frame_bytes], payload_sum);
            frame.truncate(frame_bytes);
            self.out.push_back(frame);
        }
        Ok(turned)
    }
}

impl<P: Port> Line for RawLine<P> {
    fn flows(&self) -> u32 {
        self.addressing.flows()
    }

    #[inline]
    fn room(&self) -> usize {
        BACKLOG.saturating_sub(self.out.len()).min(self.arena.available())
    }

    #[inline]
    fn push(&mut self, write: impl FnOnce(u32, &mut [u8]) -> Payload) {
        let Some(mut frame) = self.arena.alloc() else { return };
        let flow = self.next_flow;
        self.next_flow = if flow + 1 == self.addressing.flows() { 0 } else { flow + 1 };
        let header_bytes = self.template.header_bytes();
        self.arena.set_len(&mut frame, header_bytes + MAX_PAYLOAD_BYTES);
        let bytes = self.arena.bytes_mut(&mut frame);
        let payload = write(flow, &mut bytes[header_bytes..]);
        let len = header_bytes + payload.len;
        self.template.write(flow, &mut bytes[..len], payload.sum);
        frame.truncate(len);
        self.out.push_back(frame);
    }

    #[inline]
    fn flush(&mut self) -> io::Result<()> {
        self.port.transmit(&mut self.arena, &mut self.out).map(drop)
    }

    #[inline]
    fn poll(&mut self, quota: usize, answer: impl FnMut(u32, &[u8])) -> io::Result<()> {
        self.receive(quota, answer).map(drop)
    }
}

impl<P> Drop for RawLine<P> {
    fn drop(&mut self) {
        let frames: Vec<Frame> = self.out.drain(..).chain(self.arrived.drain(..)).collect();
        frames.into_iter().for_each(|frame| self.arena.free(frame));
    }
}

/// The flow and payload of a UDP packet from the target to one of our flows.
#[inline]
fn read_answer<'f>(frame: &'f [u8], addressing: &Addressing) -> Option<(u32, &'f [u8])> {
    let (ethernet, packet) = frame.split_first_chunk::<14>()?;
    let (destination, udp) = match [ethernet[12], ethernet[13]] {
        [0x08, 0x00] => read_v4(packet)?,
        [0x86, 0xdd] => read_v6(packet)?,
        _ => return None,
    };
    let (header, rest) = udp.split_first_chunk::<8>()?;
    if u16::from_be_bytes([header[0], header[1]]) != addressing.target.port() {
        return None;
    }
    let flow = addressing.flow_of(destination, u16::from_be_bytes([header[2], header[3]]))?;
    let payload_bytes = usize::from(u16::from_be_bytes([header[4], header[5]])).checked_sub(8)?;
    Some((flow, rest.get(..payload_bytes)?))
}

/// The destination and the payload of an unfragmented IPv4 packet with UDP.
#[inline]
fn read_v4(packet: &[u8]) -> Option<(IpAddr, &[u8])> {
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

/// The destination and the payload of an IPv6 packet with UDP and no extension
/// headers.
#[inline]
fn read_v6(packet: &[u8]) -> Option<(IpAddr, &[u8])> {
    let (header, rest) = packet.split_first_chunk::<40>()?;
    if header[0] >> 4 != 6 || header[6] != 17 {
        return None;
    }
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let destination: [u8; 16] = header[24..40].try_into().ok()?;
    Some((Ipv6Addr::from(destination).into(), rest.get(..length)?))
}

#[cfg(test)]
pub(super) mod tests {
    use tidegate_memory::{ArenaConfig, FrameSize};
    use tidegate_port::mem::{MemConfig, wire};

    use super::super::template::sum;
    use super::*;

    pub(crate) fn addressing(v6: bool) -> Addressing {
        let (source, target) =
            if v6 { ("fd00::10", "[fd00::1]:53") } else { ("10.0.0.16", "10.0.0.1:53") };
        Addressing {
            source_mac: [0; 6],
            target_mac: [2, 0, 0, 0, 0, 2],
            source: source.parse().unwrap(),
            sources: 2,
            first_port: 20_000,
            ports: 2,
            target: target.parse().unwrap(),
        }
    }

    pub(crate) fn arena() -> Arena {
        Arena::new(ArenaConfig { frames: 64, frame_size: FrameSize::K2, hugepages: false }).unwrap()
    }

    /// Turns a request into its answer: addresses and ports swapped.
    pub(crate) fn turn_around(frame: &[u8], v6: bool) -> Vec<u8> {
        let mut back = frame.to_vec();
        let (addresses, width, udp) = if v6 { (22, 16, 54) } else { (26, 4, 34) };
        for i in 0..width {
            back.swap(addresses + i, addresses + width + i);
        }
        back.swap(udp, udp + 2);
        back.swap(udp + 1, udp + 3);
        back
    }

    #[test]
    fn requests_go_out_on_every_flow_and_answers_find_theirs() {
        for v6 in [false, true] {
            let (ours, mut theirs) = wire(&MemConfig::default()).unwrap();
            let mut line = RawLine::open(ours, arena(), addressing(v6)).unwrap();
            for number in 0..4u8 {
                line.push(|flow, room| {
                    room[..2].copy_from_slice(&[flow as u8, number]);
                    Payload { len: 2, sum: sum(&room[..2]) }
                });
            }
            line.flush().unwrap();
            let mut seen = Vec::new();
            theirs.receive_bytes(16, |frame| seen.push(turn_around(frame, v6)));
            assert_eq!(seen.len(), 4);
            for (staged, frame) in seen.iter().enumerate() {
                assert!(theirs.stage(staged, frame));
            }
            theirs.flush(seen.len());
            let mut answers = Vec::new();
            line.poll(16, |flow, payload| answers.push((flow, payload.to_vec()))).unwrap();
            let expected: Vec<_> = (0..4).map(|n| (n, vec![n as u8, n as u8])).collect();
            assert_eq!(answers, expected);
        }
    }

    #[test]
    fn an_answer_becomes_the_next_request_of_its_flow() {
        for v6 in [false, true] {
            let (ours, mut theirs) = wire(&MemConfig::default()).unwrap();
            let mut line = RawLine::open(ours, arena(), addressing(v6)).unwrap();
            let payload = [7, 8, 9];
            for _ in 0..4 {
                line.push(|_, room| {
                    room[..3].copy_from_slice(&payload);
                    Payload { len: 3, sum: sum(&payload) }
                });
            }
            line.flush().unwrap();
            let mut sent = Vec::new();
            theirs.receive_bytes(16, |frame| sent.push(frame.to_vec()));
            let mut back: Vec<_> = sent.iter().map(|frame| turn_around(frame, v6)).collect();
            *back[1].last_mut().unwrap() ^= 1;
            for (staged, frame) in back.iter().enumerate() {
                assert!(theirs.stage(staged, frame));
            }
            theirs.flush(back.len());
            let turned = line.turn_around(16, &payload, sum(&payload)).unwrap();
            assert_eq!(turned, Turned { answers: 3, wrong: 1 });
            line.flush().unwrap();
            let mut again = Vec::new();
            theirs.receive_bytes(16, |frame| again.push(frame.to_vec()));
            sent.remove(1);
            assert_eq!(again, sent);
        }
    }

    #[test]
    fn frames_that_lie_are_no_answers() {
        for v6 in [false, true] {
            let addressing = addressing(v6);
            let template = Template::new(&addressing);
            let mut frame = vec![0; template.header_bytes() + 3];
            template.write(1, &mut frame, 0);
            let good = turn_around(&frame, v6);
            assert!(read_answer(&good, &addressing).is_some());
            for length in 0..good.len() {
                assert!(read_answer(&good[..length], &addressing).is_none(), "{length}");
            }
            for position in 0..good.len() {
                for value in [0, 1, 0x7f, 0xff] {
                    let mut bad = good.clone();
                    bad[position] = value;
                    let _ = read_answer(&bad, &addressing);
                }
            }
        }
    }

    #[test]
    fn the_target_is_found_and_our_own_address_answered_for() {
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
                    reply = neighbour::read(frame, &peer, "10.0.0.16".parse().unwrap());
                });
                if let Some(Event::Reply(reply)) = reply {
                    assert!(theirs.stage(0, &reply));
                    let ask = neighbour::request(
                        peer.source_mac,
                        peer.source,
                        "10.0.0.17".parse().unwrap(),
                    );
                    assert!(theirs.stage(1, &ask));
                    theirs.flush(2);
                    return theirs;
                }
                std::thread::yield_now();
            }
        });
        let unknown = Addressing { target_mac: [0; 6], ..addressing(false) };
        let mut line = RawLine::open(ours, arena(), unknown).unwrap();
        assert_eq!(line.addressing.target_mac, [2, 0, 0, 0, 0, 2]);
        let mut theirs = responder.join().unwrap();
        line.poll(16, |_, _| {}).unwrap();
        line.flush().unwrap();
        let peer = addressing(false);
        let mut found = None;
        theirs.receive_bytes(16, |frame| {
            found = neighbour::read(frame, &peer, "10.0.0.17".parse().unwrap()).or(found.take());
        });
        assert_eq!(found, Some(Event::Found([2, 0, 0, 0, 0, 1])));
    }
}
