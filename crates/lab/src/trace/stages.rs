//! Tidegate's way of a packet: port, stack, socket, each between two time
//! stamps for a whole burst.

use std::net::{IpAddr, SocketAddr};

use tidegate::port::mem::{MemConfig, MemPort, wire};
use tidegate::port::{Burst, Port};
use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{Config, Datagram, Stack, UdpId, UdpOptions};
use tidegate_wire::{IpCidr, MacAddr};

use super::{BURST, Stage, TraceConfig};
use crate::LabError;
use crate::cpu;
use crate::load::template::{Addressing, Template, sum};
use crate::sys;
use crate::tracefs::Cycles;

const SENDER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OUR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const PORT: u16 = 7777;
/// The first bursts only fill caches.
const WARM_UP: usize = 100;

/// A port in memory with a stack and a socket behind it.
struct Host {
    port: MemPort,
    arena: Arena,
    stack: Stack,
    socket: UdpId,
    burst: Burst,
    waiting: Vec<Datagram>,
    buffer: Vec<u8>,
}

/// When each stage of a burst began, and when the last was over, in cycles.
type BurstStamps = [u64; 6];

/// Receives so many packets and says where their time went.
pub(super) fn follow(
    config: &TraceConfig,
    ipv6: bool,
    cycles: Cycles,
) -> Result<Vec<Stage>, LabError> {
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            cpu::pin_this_thread(cpu::cores() - 1)?;
            receive(config, ipv6, cycles)
        });
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn receive(config: &TraceConfig, ipv6: bool, cycles: Cycles) -> Result<Vec<Stage>, LabError> {
    let own: IpAddr =
        if ipv6 { [0xfd00, 0, 0, 0, 0, 0, 0, 2].into() } else { [10, 0, 0, 2].into() };
    let sender: IpAddr =
        if ipv6 { [0xfd00, 0, 0, 0, 0, 0, 0, 1].into() } else { [10, 0, 0, 1].into() };
    let (mut wire_end, port) =
        wire(&MemConfig { macs: [SENDER_MAC, OUR_MAC], capacity: 256, ..MemConfig::default() })
            .map_err(LabError::io("cannot make a wire"))?;
    let mut host = Host::new(port, own, config.payload_bytes)?;
    let addressing = Addressing {
        source_mac: SENDER_MAC,
        target_mac: OUR_MAC,
        source: sender,
        sources: 1,
        first_port: 40_000,
        ports: 1,
        target: SocketAddr::new(own, PORT),
    };
    let template = Template::new(&addressing);
    let payload = vec![7; config.payload_bytes];
    let mut frame = vec![0; template.header_bytes()];
    frame.extend(&payload);
    template.write(0, &mut frame, sum(&payload));

    let mut stages = [
        Stage::new("port", "frames out of the wire into buffers of the arena"),
        Stage::new("stack", "Ethernet, IP, UDP, socket lookup, enqueue"),
        Stage::new("dequeue", "out of the socket's queue"),
        Stage::new("copy", "to the program, as recv_from does; in place there is none"),
        Stage::new("free", "buffers back to the arena"),
    ];
    let rounds = config.packets.div_ceil(BURST);
    for round in 0..WARM_UP + rounds {
        wire_end.transmit_copies(BURST, &frame);
        let stamps = host.receive_burst(round as u64 * 1_000_000)?;
        if round < WARM_UP {
            continue;
        }
        for (stage, ends) in stages.iter_mut().zip(stamps.windows(2)) {
            stage.times_ns.push(cycles.ns(ends[1].wrapping_sub(ends[0])) / BURST as f64);
        }
    }
    Ok(stages.to_vec())
}

impl Host {
    fn new(port: MemPort, own: IpAddr, payload_bytes: usize) -> Result<Self, LabError> {
        let arena = ArenaConfig { frames: 1024, frame_size: FrameSize::K2, hugepages: false };
        let arena = Arena::new(arena).map_err(LabError::io_other("no memory for frames"))?;
        let mut config = Config::ethernet(MacAddr(OUR_MAC), [7; 16]);
        config.addresses.extend(IpCidr::new(own, if own.is_ipv6() { 64 } else { 24 }));
        let refused = "the stack refuses";
        let mut stack = Stack::new(config, 0).map_err(LabError::io_other(refused))?;
        let socket = stack
            .udp_bind(SocketAddr::new(own, PORT), UdpOptions::default())
            .map_err(LabError::io_other(refused))?;
        let waiting = Vec::with_capacity(BURST);
        let buffer = vec![0; payload_bytes];
        Ok(Self { port, arena, stack, socket, burst: Burst::new(), waiting, buffer })
    }

    /// Receives a burst that lies ready.
    fn receive_burst(&mut self, now_ns: u64) -> Result<BurstStamps, LabError> {
        let Self { port, arena, stack, socket, burst, waiting, buffer } = self;
        let start = sys::cycles();
        port.receive(arena, burst, BURST).map_err(LabError::io("the wire failed"))?;
        let received = sys::cycles();
        stack.ingest_burst(now_ns, burst, arena);
        let ingested = sys::cycles();
        while let Some(datagram) = stack.udp_receive(arena, *socket) {
            waiting.push(datagram);
        }
        let dequeued = sys::cycles();
        let count = waiting.len();
        for datagram in &*waiting {
            let bytes = datagram.bytes(arena);
            if let Some(room) = buffer.get_mut(..bytes.len()) {
                room.copy_from_slice(bytes);
            }
            std::hint::black_box(&mut *buffer);
        }
        let copied = sys::cycles();
        for datagram in waiting.drain(..) {
            datagram.release(arena);
        }
        let freed = sys::cycles();
        while stack.poll_event().is_some() {}
        if count != BURST {
            let problem = format!("{count} of {BURST} packets came through the stack");
            return Err(LabError::Config(problem));
        }
        Ok([start, received, ingested, dequeued, copied, freed])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_packet_goes_through_every_stage() {
        for ipv6 in [false, true] {
            let config = TraceConfig { packets: 320, payload_bytes: 10 };
            let stages = receive(&config, ipv6, Cycles::of(1.0)).unwrap();
            assert!(stages.iter().all(|stage| stage.times_ns.len() == 10));
        }
    }
}
