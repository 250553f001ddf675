//! The lock of Tidegate's own stack: the place of the kernel's socket lock.
//!
//! A socket that several threads read takes the lock of its stack for each
//! call, as the kernel's does. Readers with a queue each take it to come and to
//! go, and the thread that runs the stack takes it once for a burst.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidegate::port::mem::{MemConfig, MemPort, wire};
use tidegate::{IpCidr, LockStatistics, Net, NetConfig, ReadersConfig, UdpReader, UdpSocket};

use crate::LabError;
use crate::load::flood;
use crate::load::template::Addressing;
use crate::queues::model::pause;
use crate::stop::StopAtEnd;

const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
const PORT: u16 = 7777;
const FLOWS: u16 = 64;
/// What the paper's writer sends.
const PAYLOAD: &[u8] = &[0x7e; 10];
/// Frames that the sender puts on the wire at once.
const BURST: usize = 32;
/// A reader that finds nothing looks so often whether the run was cut off.
const LOOK: Duration = Duration::from_millis(100);

/// Who reads what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// All threads the same socket.
    OneSocket,
    /// Each thread a queue of its own.
    QueueEach,
}

impl Way {
    /// The name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::OneSocket => "tidegate-one-socket",
            Self::QueueEach => "tidegate-queue-each",
        }
    }
}

/// One run: a sender without end, a stack with a thread of its own, readers.
#[derive(Clone, Copy, Debug)]
pub(super) struct StackRun {
    pub(super) way: Way,
    pub(super) ipv6: bool,
    pub(super) readers: usize,
    pub(super) packets_per_reader: u64,
    /// How long a reader waits between two reads.
    pub(super) pause: Duration,
    /// After this the run is ended.
    pub(super) cut_off: Duration,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct StackOutcome {
    pub(super) elapsed: Duration,
    /// Datagrams that were read.
    pub(super) read: u64,
    pub(super) lock: LockStatistics,
}

impl StackRun {
    fn addresses(self) -> [IpAddr; 2] {
        [1, 2].map(|host| match self.ipv6 {
            true => [0xfd00, 0, 0, 0, 0, 0, 0, host].into(),
            false => [10, 0, 0, host as u8].into(),
        })
    }

    /// Runs it.
    ///
    /// # Errors
    /// When the stack cannot be made, or fails.
    pub(super) fn measure(self) -> Result<StackOutcome, LabError> {
        let [source, own] = self.addresses();
        let target = SocketAddr::new(own, PORT);
        let config = MemConfig { macs: MACS, ..MemConfig::default() };
        let (sender, port) = wire(&config).map_err(LabError::io("cannot make a wire"))?;
        let refused = "the stack refuses";
        let prefix = if self.ipv6 { 64 } else { 24 };
        let cidr = IpCidr::new(own, prefix).map_err(LabError::io_other(refused))?;
        let config = NetConfig::new(port).address(cidr).hugepages(false).own_thread(true);
        let net = Net::open(config.lock_statistics(true)).map_err(LabError::io_other(refused))?;
        let socket = UdpSocket::bind(&net, target).map_err(LabError::io(refused))?;
        let addressing = Addressing {
            source_mac: MACS[0],
            target_mac: MACS[1],
            source,
            sources: 1,
            first_port: 20_000,
            ports: FLOWS,
            target,
        };
        let frames = flood::frames(&addressing, std::iter::repeat_n(PAYLOAD, FLOWS.into()));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let end = StopAtEnd(&stop);
            let sending = scope.spawn(|| send(sender, &frames, &stop));
            let (read, elapsed) = self.read_all(&socket).map_err(LabError::io("cannot read"))?;
            drop(end);
            // A thread of ours that panicked has said so.
            let _ = sending.join();
            let lock = net.lock_statistics().unwrap_or_default();
            Ok(StackOutcome { elapsed, read, lock })
        })
    }

    fn read_all(self, socket: &UdpSocket) -> std::io::Result<(u64, Duration)> {
        socket.set_read_timeout(Some(LOOK))?;
        // All are there before the first datagram is read.
        let ends = match self.way {
            Way::OneSocket => (0..self.readers).map(|_| Ok(None)).collect::<std::io::Result<_>>(),
            Way::QueueEach => {
                let group = socket.readers(ReadersConfig::default())?;
                (0..self.readers).map(|_| group.add().map(Some)).collect()
            }
        };
        let ends: Vec<Option<UdpReader>> = ends?;
        let start = Instant::now();
        let read = std::thread::scope(|scope| {
            let reading: Vec<_> = ends
                .into_iter()
                .map(|mut end| {
                    scope.spawn(move || {
                        let mut unit = [0; 16];
                        let Some(end) = &mut end else {
                            return self.read(start, || socket.recv_from(&mut unit).map(drop));
                        };
                        end.set_read_timeout(Some(LOOK));
                        self.read(start, || end.recv_from(&mut unit).map(drop))
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

    /// Reads until it has what one reader is to have, or is cut off.
    fn read(
        self,
        start: Instant,
        mut read_one: impl FnMut() -> std::io::Result<()>,
    ) -> std::io::Result<u64> {
        let mut read = 0;
        while read < self.packets_per_reader {
            match read_one() {
                Ok(()) => read += 1,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if read % 64 == 0 && start.elapsed() > self.cut_off {
                break;
            }
            pause(self.pause);
        }
        Ok(read)
    }
}

/// Fills the wire without end, as the paper's writer does its socket.
fn send(mut wire: MemPort, frames: &[Vec<u8>], stop: &AtomicBool) {
    let mut next = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut staged = 0;
        while staged < BURST && wire.stage(staged, &frames[(next + staged) % frames.len()]) {
            staged += 1;
        }
        wire.flush(staged);
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
    fn every_reader_gets_its_datagrams_on_both_families() {
        for ipv6 in [false, true] {
            for (way, readers) in [(Way::OneSocket, 1), (Way::OneSocket, 3), (Way::QueueEach, 3)] {
                let run = StackRun {
                    way,
                    ipv6,
                    readers,
                    packets_per_reader: 500,
                    pause: Duration::ZERO,
                    cut_off: Duration::from_secs(60),
                };
                let outcome = run.measure().unwrap();
                assert_eq!(outcome.read, 500 * readers as u64, "{run:?}");
                // The thread that runs the stack takes it as well.
                let calls = if way == Way::OneSocket { outcome.read } else { 0 };
                assert!(outcome.lock.acquisitions > calls, "{run:?}: {outcome:?}");
                assert!(outcome.lock.held_ns > 0.0);
            }
        }
    }
}
