//! A service with several readers on a wire in memory, which costs the host
//! next to nothing beside the service.

use std::io;
use std::net::SocketAddr;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use tidegate::port::mem::{MemConfig, MemPort, wire};
use tidegate::{IpCidr, Net, NetConfig, ReadersConfig, UdpSocket};
use tidegate_apps::ServeCounters;
use tidegate_apps::readers::serve_readers;
use tidegate_apps::work::Work;

use super::sender::{Loads, Sender, frames};
use crate::livelock::bench::{OWN_ADDRESS, PREFIX};
use crate::livelock::subject::SERVICE_PORT;
use crate::stop::StopAtEnd;
use crate::{LabError, cpu};

/// Frames that the wire holds: what comes in some ticks of the sender.
const WIRE_FRAMES: usize = 4096;

/// Who runs where, and what there is to do.
pub(super) struct Service<'a> {
    /// The core that sends and runs the stack.
    pub(super) network_core: usize,
    /// The readers' cores, in turn.
    pub(super) reader_cores: &'a [usize],
    /// How many readers.
    pub(super) readers: usize,
    /// Work for each datagram, in nanoseconds.
    pub(super) work_ns: u64,
}

impl Service<'_> {
    /// The most requests per second at any of the loads.
    pub(super) fn best_rps(&self, loads: &Loads) -> Result<f64, LabError> {
        // Threads start on the core of the thread that starts them.
        thread::scope(|scope| {
            let host = scope.spawn(|| {
                cpu::pin_this_thread(self.network_core)?;
                self.run(loads)
            });
            host.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn run(&self, loads: &Loads) -> Result<f64, LabError> {
        let failed = || LabError::io("the service in memory failed");
        let config = MemConfig { capacity: WIRE_FRAMES, ..MemConfig::default() };
        let (ours, theirs) = wire(&config).map_err(failed())?;
        let target = SocketAddr::new(OWN_ADDRESS.into(), SERVICE_PORT);
        let (_net, socket) = open(theirs, target).map_err(failed())?;
        let began = Instant::now();
        let turns = Work::turns_for(self.work_ns, || began.elapsed().as_nanos() as u64);
        let responders = vec![Work::new(turns, true); self.readers];
        let (counters, stop) = (ServeCounters::new(), AtomicBool::new(false));
        thread::scope(|scope| {
            let end = StopAtEnd(&stop);
            let serving = scope.spawn(|| {
                let sockets = slice::from_ref(&socket);
                let pin = |reader| self.pin(reader);
                serve_readers(sockets, responders, ReadersConfig::default(), pin, &stop, &counters)
            });
            let frames = frames(target, config.macs[1]);
            let sender = Sender::through_port(ours, frames, self.network_core)?;
            let served = || Ok(counters.requests.load(Ordering::Relaxed));
            let best = loads.best_rps(&sender, served);
            drop(end);
            let served = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            served.map_err(failed())?;
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

/// A stack on the wire, with a thread of its own, and a socket.
fn open(port: MemPort, address: SocketAddr) -> io::Result<(Net, UdpSocket)> {
    let own = IpCidr::new(address.ip(), PREFIX).map_err(io::Error::other)?;
    let config = NetConfig::new(port).address(own).hugepages(false).own_thread(true);
    let net = Net::open(config).map_err(io::Error::other)?;
    let socket = UdpSocket::bind(&net, address)?;
    Ok((net, socket))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn readers_work_on_what_is_sent() {
        let reader_cores = [cpu::cores() - 1, 0];
        let service =
            Service { network_core: 0, reader_cores: &reader_cores, readers: 3, work_ns: 1 };
        let time = Duration::from_millis(100);
        let loads = Loads { rates_pps: vec![20_000.0], warm_up: time, time };
        assert!(service.best_rps(&loads).unwrap() > 0.0);
    }
}
