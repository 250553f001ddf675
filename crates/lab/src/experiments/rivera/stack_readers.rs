//! Threads that read a UDP socket of Tidegate's own stack, and the lock of this stack, the
//! counterpart of the kernel's socket lock.
//!
//! A socket that several threads read acquires the stack's lock for each call, like the
//! kernel's. Readers with a queue each acquire it only to join and to leave. The thread that
//! runs the stack acquires it once per burst.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidegate::device::mem::{MemConfig, MemDevice, wire};
use tidegate::{IpCidr, LockStatistics, Net, NetConfig, ReadersConfig, UdpReader, UdpSocket};
use tidegate_load::template::Addressing;

use crate::LabError;
use crate::experiments::rivera::receive_queues::model::spin_for;
use crate::testbed::load::flood;
use crate::testbed::stop::StopOnDrop;

const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
const UDP_PORT: u16 = 7777;
const FLOW_COUNT: u16 = 64;
/// The payload of the paper's writer.
const PAYLOAD: &[u8] = &[0x7e; 10];
/// Frames that the sender puts on the link at once.
const BURST_FRAMES: usize = 32;
/// Read timeout, after which a reader checks the time limit of the run.
const CUT_OFF_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Distribution of the datagrams to the reading threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadMethod {
    /// All threads read the same socket.
    OneSocket,
    /// Each thread reads a queue of its own.
    QueuePerReader,
    /// Each thread asks a queue of its own to which nobody sends.
    EmptyQueue,
}

impl ReadMethod {
    /// Name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::OneSocket => "tidegate-one-socket",
            Self::QueuePerReader => "tidegate-queue-each",
            Self::EmptyQueue => "tidegate-empty-queue",
        }
    }
}

/// One run: an endless sender, a stack on a thread of its own, and readers.
#[derive(Clone, Copy, Debug)]
pub(super) struct StackRun {
    pub(super) read_method: ReadMethod,
    pub(super) ipv6: bool,
    pub(super) readers: usize,
    pub(super) packets_per_reader: u64,
    /// Pause of a reader between two reads.
    pub(super) pause: Duration,
    /// Time limit of the run.
    pub(super) cut_off: Duration,
}

/// Result of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct StackOutcome {
    pub(super) elapsed: Duration,
    /// Number of datagrams read, or of calls that found none.
    pub(super) datagrams_read: u64,
    pub(super) lock: LockStatistics,
}

impl StackRun {
    fn addresses(self) -> [IpAddr; 2] {
        [1, 2].map(|host| match self.ipv6 {
            true => [0xfd00, 0, 0, 0, 0, 0, 0, host].into(),
            false => [10, 0, 0, host as u8].into(),
        })
    }

    /// Runs the measurement.
    ///
    /// # Errors
    /// If the stack cannot be opened, or fails.
    pub(super) fn measure(self) -> Result<StackOutcome, LabError> {
        let [source, address] = self.addresses();
        let target = SocketAddr::new(address, UDP_PORT);
        let config = MemConfig::default().macs(MACS);
        let (sender, device) =
            wire(&config).map_err(LabError::io("cannot create an in-memory link"))?;
        let message = "cannot set up the stack";
        let prefix = if self.ipv6 { 64 } else { 24 };
        let cidr = IpCidr::new(address, prefix).map_err(LabError::io_other(message))?;
        let config = NetConfig::new(device).address(cidr).hugepages(false).own_thread(true);
        let net = Net::open(config.lock_statistics(true)).map_err(LabError::io_other(message))?;
        let socket = UdpSocket::bind(&net, target).map_err(LabError::io(message))?;
        let addressing = Addressing {
            source_mac: MACS[0],
            target_mac: MACS[1],
            source,
            source_count: 1,
            first_port: 20_000,
            port_count: FLOW_COUNT,
            target,
        };
        let frames = flood::frames(&addressing, std::iter::repeat_n(PAYLOAD, FLOW_COUNT.into()));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let end = StopOnDrop(&stop);
            let sending = match self.read_method {
                ReadMethod::EmptyQueue => None,
                _ => Some(scope.spawn(|| send(sender, &frames, &stop))),
            };
            let (datagrams_read, elapsed) =
                self.read_all(&socket).map_err(LabError::io("cannot read datagrams"))?;
            drop(end);
            // A panic of the sending thread has already been reported.
            let _ = sending.map(std::thread::ScopedJoinHandle::join);
            let lock = net.lock_statistics().unwrap_or_default();
            Ok(StackOutcome { elapsed, datagrams_read, lock })
        })
    }

    fn read_all(self, socket: &UdpSocket) -> std::io::Result<(u64, Duration)> {
        socket.set_read_timeout(Some(CUT_OFF_CHECK_INTERVAL))?;
        // All readers exist before the first datagram is read.
        let readers = match self.read_method {
            ReadMethod::OneSocket => {
                (0..self.readers).map(|_| Ok(None)).collect::<std::io::Result<_>>()
            }
            ReadMethod::QueuePerReader | ReadMethod::EmptyQueue => {
                let group = socket.readers(ReadersConfig::default())?;
                (0..self.readers).map(|_| group.add().map(Some)).collect()
            }
        };
        let readers: Vec<Option<UdpReader>> = readers?;
        let start = Instant::now();
        let read = std::thread::scope(|scope| {
            let reading: Vec<_> = readers
                .into_iter()
                .map(|mut reader| {
                    scope.spawn(move || {
                        let mut buffer = [0; 16];
                        let Some(reader) = &mut reader else {
                            return self.read(start, || socket.recv_from(&mut buffer).map(drop));
                        };
                        if self.read_method == ReadMethod::EmptyQueue {
                            reader.set_nonblocking(true);
                            return self.read(start, || match reader.recv_from(&mut buffer) {
                                Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
                                other => other.map(drop),
                            });
                        }
                        reader.set_read_timeout(Some(CUT_OFF_CHECK_INTERVAL));
                        self.read(start, || reader.recv_from(&mut buffer).map(drop))
                    })
                })
                .collect();
            let join = |reader: std::thread::ScopedJoinHandle<'_, _>| {
                reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            reading.into_iter().map(join).sum::<std::io::Result<u64>>()
        })?;
        Ok((read, start.elapsed()))
    }

    /// Reads until this reader has its share of packets, or until the time limit.
    fn read(
        self,
        start: Instant,
        mut read_one: impl FnMut() -> std::io::Result<()>,
    ) -> std::io::Result<u64> {
        let mut read = 0;
        while read < self.packets_per_reader {
            match read_one() {
                Ok(()) => read += 1,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if read % 64 == 0 && start.elapsed() > self.cut_off {
                break;
            }
            spin_for(self.pause);
        }
        Ok(read)
    }
}

/// Fills the link endlessly, as the paper's writer fills its socket.
fn send(mut device: MemDevice, frames: &[Vec<u8>], stop: &AtomicBool) {
    let mut next = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut staged = 0;
        while staged < BURST_FRAMES && device.stage(staged, &frames[(next + staged) % frames.len()])
        {
            staged += 1;
        }
        device.flush(staged);
        next += staged;
        if staged == 0 {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_get_all_datagrams_over_ipv4_and_ipv6() {
        for ipv6 in [false, true] {
            for (read_method, readers) in [
                (ReadMethod::OneSocket, 1),
                (ReadMethod::OneSocket, 3),
                (ReadMethod::QueuePerReader, 3),
                (ReadMethod::EmptyQueue, 3),
            ] {
                let run = StackRun {
                    read_method,
                    ipv6,
                    readers,
                    packets_per_reader: 500,
                    pause: Duration::ZERO,
                    cut_off: Duration::from_secs(60),
                };
                let outcome = run.measure().unwrap();
                assert_eq!(outcome.datagrams_read, 500 * readers as u64, "{run:?}");
                // The thread that runs the stack also acquires the lock.
                let calls =
                    if read_method == ReadMethod::OneSocket { outcome.datagrams_read } else { 0 };
                assert!(outcome.lock.acquisitions > calls, "{run:?}: {outcome:?}");
                assert!(outcome.lock.held_ns > 0.0);
            }
        }
    }
}
