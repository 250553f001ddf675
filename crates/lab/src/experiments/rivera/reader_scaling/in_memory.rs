//! Service with several readers on an in-memory link, which costs the host almost nothing besides
//! the service.

use std::io;
use std::net::SocketAddr;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use tidegate::device::mem::{MemConfig, MemDevice, wire};
use tidegate::{IpCidr, Net, NetConfig, ReadersConfig, UdpSocket};
use tidegate_apps::readers::serve_readers;
use tidegate_apps::work::Work;
use tidegate_apps::{ServeCounters, ServeState};

use super::sender::{OfferedLoads, Sender, frames};
use crate::LabError;
use crate::testbed::cpu;
use crate::testbed::flood::{PREFIX_BITS, TIDEGATE_ADDRESS};
use crate::testbed::stop::StopOnDrop;
use crate::testbed::test_case::SERVICE_PORT;

/// Capacity of the in-memory link in frames: the arrivals of several sender ticks.
const LINK_CAPACITY_FRAMES: usize = 4096;

/// Cores, number of readers and work of the service.
pub(super) struct InMemoryService<'a> {
    /// Core that sends and runs the stack.
    pub(super) network_core: usize,
    /// Cores of the readers, assigned in turn.
    pub(super) reader_cores: &'a [usize],
    /// Number of readers.
    pub(super) readers: usize,
    /// Work for each datagram, in nanoseconds.
    pub(super) work_ns: u64,
}

impl InMemoryService<'_> {
    /// Measures the highest request rate at any of the loads, in requests per second.
    pub(super) fn best_rps(&self, loads: &OfferedLoads) -> Result<f64, LabError> {
        // New threads start on the core of the thread that starts them.
        thread::scope(|scope| {
            let host = scope.spawn(|| {
                cpu::pin_this_thread(self.network_core)?;
                self.run(loads)
            });
            host.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn run(&self, loads: &OfferedLoads) -> Result<f64, LabError> {
        let failed = || LabError::io("the in-memory service failed");
        let config = MemConfig::default().capacity(LINK_CAPACITY_FRAMES);
        let (sender_device, stack_device) = wire(&config).map_err(failed())?;
        let target = SocketAddr::new(TIDEGATE_ADDRESS.into(), SERVICE_PORT);
        let (_net, socket) = open_stack(stack_device, target).map_err(failed())?;
        let began = Instant::now();
        let iterations = Work::iterations_for(self.work_ns, || began.elapsed().as_nanos() as u64);
        let responders = vec![Work::new(iterations, true); self.readers];
        let (counters, stop) = (ServeCounters::new(), AtomicBool::new(false));
        thread::scope(|scope| {
            let stop_on_drop = StopOnDrop(&stop);
            let serving = scope.spawn(|| {
                let sockets = slice::from_ref(&socket);
                let pin = |reader| self.pin(reader);
                let state = ServeState { stop: &stop, counters: &counters, durations: None };
                serve_readers(sockets, responders, ReadersConfig::default(), pin, state)
            });
            let frames = frames(target, config.macs[1]);
            let sender = Sender::over_device(sender_device, frames, self.network_core)?;
            let served = || Ok(counters.requests.load(Ordering::Relaxed));
            let best = loads.best_rps(&sender, served);
            drop(stop_on_drop);
            let result = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result.map_err(failed())?;
            sender.finish()?;
            best
        })
    }

    fn pin(&self, reader: usize) {
        let core = self.reader_cores.iter().cycle().nth(reader);
        if let Some(Err(error)) = core.map(|&core| cpu::pin_this_thread(core)) {
            eprintln!("reader {reader}: {error}");
        }
    }
}

/// Opens a stack with its own thread on the in-memory link, and a socket.
fn open_stack(device: MemDevice, address: SocketAddr) -> io::Result<(Net, UdpSocket)> {
    let cidr = IpCidr::new(address.ip(), PREFIX_BITS).map_err(io::Error::other)?;
    let config = NetConfig::new(device).address(cidr).hugepages(false).own_thread(true);
    let net = Net::open(config).map_err(io::Error::other)?;
    let socket = UdpSocket::bind(&net, address)?;
    Ok((net, socket))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn readers_serve_sent_requests() {
        let reader_cores = [cpu::available_cores() - 1, 0];
        let service = InMemoryService {
            network_core: 0,
            reader_cores: &reader_cores,
            readers: 3,
            work_ns: 1,
        };
        let time = Duration::from_millis(100);
        let loads = OfferedLoads { rates_pps: vec![20_000.0], warm_up: time, time };
        assert!(service.best_rps(&loads).unwrap() > 0.0);
    }
}
