//! Receive buffer with which a kernel socket queues as many packets as a socket of Tidegate.
//!
//! The kernel limits a socket's queue by the memory of its packets, which depends on their source;
//! Tidegate limits it by their number. The same queue on both sides needs a measurement: packets of
//! the flood wait in a socket that nobody reads.

use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use tidegate_stack::Limits;

use crate::error::LabError;
use crate::testbed::flood::{FloodSource, FloodTestbed, KERNEL_ADDRESS, Receiver};
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::test_case::SERVICE_PORT;

/// Packets of the flood that wait in the queue of the first measurement.
const SAMPLE_PACKETS: u64 = 500;
/// Rate of the packets that fill a queue.
const FILL_PPS: f64 = 20_000.0;
/// Time in which the last packets of a stopped flood arrive.
const SETTLE_TIME: Duration = Duration::from_millis(50);
const FILL_TIMEOUT: Duration = Duration::from_secs(30);
/// Buffer that a server of the kernel asks for otherwise; more than the sample needs.
const SAMPLE_BUFFER_BYTES: usize = 8 << 20;
/// Corrections of the buffer after the first estimate.
const MAX_CORRECTIONS: usize = 3;
/// Difference between the queues that needs no correction, as a share.
const TOLERATED_DIFFERENCE: f64 = 0.01;

/// Receive buffer of the kernel's server, and the queue that it makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KernelQueue {
    /// Argument of `SO_RCVBUF`, in bytes. The kernel doubles it.
    pub(super) buffer_bytes: usize,
    /// Packets of the flood that a socket with this buffer held.
    pub(super) held_packets: usize,
}

/// Packets that the queue of a Tidegate socket holds.
pub(super) fn tidegate_queue_packets() -> usize {
    Limits::default().socket_queue_packets
}

/// Packets in a full or partly filled queue, and the memory that the kernel counts for them.
struct Filled {
    packets: usize,
    bytes: u64,
}

impl KernelQueue {
    /// Finds the buffer with which a kernel socket holds as many packets of the flood as a Tidegate
    /// socket.
    pub(super) fn as_long_as_tidegates(testbed: &FloodTestbed) -> Result<Self, LabError> {
        let wanted = tidegate_queue_packets();
        let sample = fill(testbed, SAMPLE_BUFFER_BYTES, SAMPLE_PACKETS)?;
        if sample.packets == 0 || sample.bytes == 0 {
            return Err(LabError::Config("no packet of the flood reached a kernel socket".into()));
        }
        let mut buffer_bytes = buffer_for(wanted, sample.bytes / sample.packets as u64);
        for _ in 0..=MAX_CORRECTIONS {
            let held_packets = fill(testbed, buffer_bytes, 3 * wanted as u64 / 2)?.packets;
            let queue = Self { buffer_bytes, held_packets };
            if queue.is_as_long_as(wanted) {
                return Ok(queue);
            }
            buffer_bytes = queue.corrected_buffer(wanted);
        }
        Err(LabError::Config(format!(
            "no SO_RCVBUF holds {wanted} packets of the flood; the last was {buffer_bytes} bytes"
        )))
    }

    fn is_as_long_as(self, wanted: usize) -> bool {
        self.held_packets.abs_diff(wanted) as f64 <= TOLERATED_DIFFERENCE * wanted as f64
    }

    /// Buffer for `wanted` packets, from the number that this one holds.
    fn corrected_buffer(self, wanted: usize) -> usize {
        self.buffer_bytes * wanted / self.held_packets.max(1)
    }
}

/// Argument of `SO_RCVBUF` for a queue of `packets`; the kernel doubles the argument (socket(7)).
fn buffer_for(packets: usize, bytes_per_packet: u64) -> usize {
    (packets * bytes_per_packet as usize).div_ceil(2)
}

/// Sends at least `packets` packets of the flood to a socket that nobody reads; returns the queue.
fn fill(testbed: &FloodTestbed, buffer_bytes: usize, packets: u64) -> Result<Filled, LabError> {
    testbed.prepare(Receiver::Kernel)?;
    let target = SocketAddr::new(KERNEL_ADDRESS.into(), SERVICE_PORT);
    let namespace = &testbed.pair.b.namespace;
    let failed = || LabError::io("cannot open a UDP socket");
    let socket = namespace.enter(|| UdpSocket::bind(target))?.map_err(failed())?;
    sockopt::set_socket_recv_buffer_size_force(socket.as_fd(), buffer_bytes)
        .map_err(|error| failed()(error.into()))?;
    socket.set_nonblocking(true).map_err(failed())?;
    let source = FloodSource::OneHost;
    // With headers and trailer, a frame of 64 bytes, as in the time line.
    let payloads = std::iter::repeat_n(&[0x7e; 18][..], source.flow_count());
    let mut flood = testbed.flood(source, target, payloads, ReceiveWork::Timer)?;
    let (before, began) = (flood.offered()?, Instant::now());
    flood.set_rate(Some(FILL_PPS))?;
    while flood.offered()? < before + packets {
        if began.elapsed() > FILL_TIMEOUT {
            return Err(LabError::Config(
                "timed out: the flood that fills a queue found no CPU time".into(),
            ));
        }
        thread::sleep(Duration::from_millis(1));
    }
    flood.set_rate(Some(0.0))?;
    thread::sleep(SETTLE_TIME);
    // /proc/net would show the namespace of the main thread.
    let path = "/proc/thread-self/net/udp";
    let text = namespace.enter(|| fs::read_to_string(path))?.map_err(LabError::file(path))?;
    let bytes = queued_bytes(&text, target.port())
        .ok_or_else(|| LabError::Config(format!("{path} has no socket of port {SERVICE_PORT}")))?;
    let mut buffer = [0; 64];
    let packets = std::iter::from_fn(|| socket.recv(&mut buffer).ok()).count();
    Ok(Filled { packets, bytes })
}

/// Memory of the packets in the receive queue of the socket with this local port, from
/// `/proc/net/udp`.
fn queued_bytes(table: &str, port: u16) -> Option<u64> {
    let suffix = format!(":{port:04X}");
    let of_line = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let is_local = words.next()?.ends_with(&suffix);
        // Remote address and state lie between.
        let (_, received) = words.nth(2)?.split_once(':')?;
        is_local.then(|| u64::from_str_radix(received, 16).ok())?
    };
    table.lines().find_map(of_line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_queue_of_the_socket_on_the_port() {
        let table = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt\n\
             10: 0200004D:0035 00000000:0000 07 00000000:00000300 00:00000000 00000000  0 0 1 2 x 0\n\
             11: 0200004D:0007 00000000:0000 07 00000000:00001200 00:00000000 00000000  0 0 1 2 x 9\n";
        assert_eq!(queued_bytes(table, 7), Some(0x1200));
        assert_eq!(queued_bytes(table, 53), Some(0x300));
        assert_eq!(queued_bytes(table, 0), None);
    }

    #[test]
    fn buffer_follows_from_the_memory_of_a_packet() {
        // The kernel doubles what it is asked for.
        assert_eq!(buffer_for(4096, 768), 4096 * 768 / 2);
        let short = KernelQueue { buffer_bytes: 1_000_000, held_packets: 2048 };
        assert!(!short.is_as_long_as(4096));
        assert_eq!(short.corrected_buffer(4096), 2_000_000);
        assert!(KernelQueue { held_packets: 4090, ..short }.is_as_long_as(4096));
        assert_eq!(tidegate_queue_packets(), 4096);
    }
}
