//! Receive path of Tidegate: device, stack and socket, each timed for a whole burst.

use std::net::{IpAddr, SocketAddr};

use tidegate::device::mem::{MemConfig, MemDevice, wire};
use tidegate::device::{Burst, Device};
use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{Config, Datagram, Stack, UdpId, UdpOptions};
use tidegate_wire::{IpCidr, MacAddr};

use super::{BURST_PACKETS, ReceiveTraceConfig, Stage};
use crate::LabError;
use crate::testbed::cpu;
use crate::testbed::sys;
use crate::testbed::tracefs::TscRate;
use tidegate_load::template::{Addressing, FrameTemplate, sum};

const SENDER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const RECEIVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const UDP_PORT: u16 = 7777;
/// Warm-up bursts, which only fill caches.
const WARM_UP_BURSTS: usize = 100;

/// In-memory device with a stack and a socket.
struct ReceiveHost {
    device: MemDevice,
    arena: Arena,
    stack: Stack,
    socket: UdpId,
    burst: Burst,
    datagrams: Vec<Datagram>,
    buffer: Vec<u8>,
}

/// Start of each stage of a burst and end of the last stage, in cycles.
type BurstTimestamps = [u64; 6];

/// Receives packets on the last core and returns the time of each stage.
pub(super) fn trace_packets(
    config: &ReceiveTraceConfig,
    ipv6: bool,
    cycles: TscRate,
) -> Result<Vec<Stage>, LabError> {
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            cpu::pin_this_thread(cpu::available_cores() - 1)?;
            receive(config, ipv6, cycles)
        });
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn receive(
    config: &ReceiveTraceConfig,
    ipv6: bool,
    cycles: TscRate,
) -> Result<Vec<Stage>, LabError> {
    let local: IpAddr =
        if ipv6 { [0xfd00, 0, 0, 0, 0, 0, 0, 2].into() } else { [10, 0, 0, 2].into() };
    let sender: IpAddr =
        if ipv6 { [0xfd00, 0, 0, 0, 0, 0, 0, 1].into() } else { [10, 0, 0, 1].into() };
    let link = MemConfig::default().macs([SENDER_MAC, RECEIVER_MAC]).capacity(256);
    let (mut sender_device, device) =
        wire(&link).map_err(LabError::io("cannot create an in-memory link"))?;
    let mut host = ReceiveHost::new(device, local, config.payload_bytes)?;
    let addressing = Addressing {
        source_mac: SENDER_MAC,
        target_mac: RECEIVER_MAC,
        source: sender,
        source_count: 1,
        first_port: 40_000,
        port_count: 1,
        target: SocketAddr::new(local, UDP_PORT),
    };
    let template = FrameTemplate::new(&addressing);
    let payload = vec![7; config.payload_bytes];
    let mut frame = vec![0; template.header_bytes()];
    frame.extend(&payload);
    template.write_headers(0, &mut frame, sum(&payload));

    let mut stages = [
        Stage::new("port", "frames from the link into buffers of the arena"),
        Stage::new("stack", "Ethernet, IP, UDP, socket lookup, enqueue"),
        Stage::new("dequeue", "out of the socket's queue"),
        Stage::new("copy", "to the application, as recv_from does; in-place reads have no copy"),
        Stage::new("free", "buffers back to the arena"),
    ];
    let rounds = config.packets.div_ceil(BURST_PACKETS);
    for round in 0..WARM_UP_BURSTS + rounds {
        sender_device.transmit_copies(BURST_PACKETS, &frame);
        let timestamps = host.receive_burst(round as u64 * 1_000_000)?;
        if round < WARM_UP_BURSTS {
            continue;
        }
        for (stage, ends) in stages.iter_mut().zip(timestamps.windows(2)) {
            stage.times_ns.push(cycles.to_ns(ends[1].wrapping_sub(ends[0])) / BURST_PACKETS as f64);
        }
    }
    Ok(stages.to_vec())
}

impl ReceiveHost {
    fn new(device: MemDevice, local: IpAddr, payload_bytes: usize) -> Result<Self, LabError> {
        let arena = ArenaConfig { frames: 1024, frame_size: FrameSize::K2, hugepages: false };
        let arena = Arena::new(arena).map_err(LabError::io_other("cannot allocate frames"))?;
        let mut config = Config::ethernet(MacAddr(RECEIVER_MAC), [7; 16]);
        config.addresses.extend(IpCidr::new(local, if local.is_ipv6() { 64 } else { 24 }));
        let refused = "cannot set up the stack";
        let mut stack = Stack::new(config, 0).map_err(LabError::io_other(refused))?;
        let socket = stack
            .udp_bind(SocketAddr::new(local, UDP_PORT), UdpOptions::default())
            .map_err(LabError::io_other(refused))?;
        let datagrams = Vec::with_capacity(BURST_PACKETS);
        let buffer = vec![0; payload_bytes];
        Ok(Self { device, arena, stack, socket, burst: Burst::new(), datagrams, buffer })
    }

    /// Receives a burst that is already queued.
    fn receive_burst(&mut self, now_ns: u64) -> Result<BurstTimestamps, LabError> {
        let Self { device, arena, stack, socket, burst, datagrams, buffer } = self;
        let start = sys::cycles();
        device
            .receive(arena, burst, BURST_PACKETS)
            .map_err(LabError::io("the in-memory link failed"))?;
        let received = sys::cycles();
        stack.handle_burst(now_ns, burst, arena);
        let handled = sys::cycles();
        while let Some(datagram) = stack.udp_recv(arena, *socket) {
            datagrams.push(datagram);
        }
        let dequeued = sys::cycles();
        let count = datagrams.len();
        for datagram in &*datagrams {
            let bytes = datagram.bytes(arena);
            if let Some(target) = buffer.get_mut(..bytes.len()) {
                target.copy_from_slice(bytes);
            }
            std::hint::black_box(&mut *buffer);
        }
        let copied = sys::cycles();
        for datagram in datagrams.drain(..) {
            datagram.release(arena);
        }
        let freed = sys::cycles();
        while stack.poll_event().is_some() {}
        if count != BURST_PACKETS {
            let problem = format!("{count} of {BURST_PACKETS} packets passed the stack");
            return Err(LabError::Config(problem));
        }
        Ok([start, received, handled, dequeued, copied, freed])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_packet_passes_every_stage() {
        for ipv6 in [false, true] {
            let config = ReceiveTraceConfig { packets: 320, payload_bytes: 10 };
            let stages = receive(&config, ipv6, TscRate::from_cycles_per_ns(1.0)).unwrap();
            assert!(stages.iter().all(|stage| stage.times_ns.len() == 10));
        }
    }
}
