//! The server's second interface: a steady flow out, and ping.
//!
//! As in Jonack and Murta's tests, the flood comes in by one interface, and
//! what it does to the machine shows at another. Everything of it runs on the
//! kernel's stack, on the core that is flooded.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::cpu;
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::netns::{Namespace, run_to_end};

const HERE: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
const THERE: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
const FLOW_PORT: u16 = 5001;
/// The datagrams of the paper's flow, and its rate.
const FLOW_BYTES: usize = 1470;
const FLOW_BITS_PER_S: f64 = 10e6;
const PING_EVERY_S: f64 = 0.01;

/// A wire from the server's namespace to a machine of its own.
pub(crate) struct Side {
    there: Namespace,
    load_core: usize,
    arrived: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<(), LabError>>>,
}

/// How ping fared.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Ping {
    /// The median time, in milliseconds; infinite when none came back.
    pub(crate) median_ms: f64,
    /// The share of pings that were not answered, 0 to 1.
    pub(crate) loss: f64,
}

impl Side {
    /// Joins `server` to a namespace of its own and begins to send the flow.
    /// The server's end is the work of `server_core`, the other of `load_core`.
    pub(crate) fn new(
        server: &Namespace,
        server_core: usize,
        load_core: usize,
    ) -> Result<Self, LabError> {
        let there = Namespace::new("side")?;
        let (here_device, there_device) = ("side0", "side1");
        server.ip(&[
            "link",
            "add",
            here_device,
            "type",
            "veth",
            "peer",
            "name",
            there_device,
            "netns",
            there.name(),
        ])?;
        let ends =
            [(server, here_device, HERE, server_core), (&there, there_device, THERE, load_core)];
        for (namespace, device, address, core) in ends {
            namespace.ip(&["addr", "add", &format!("{address}/24"), "dev", device])?;
            namespace.ip(&["link", "set", device, "up"])?;
            let mask = format!("{:x}", 1u64 << (core % 64));
            namespace.write_device_file(device, "queues/rx-0/rps_cpus", &mask)?;
        }
        let (arrived, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, stopped) = (Arc::clone(&arrived), Arc::clone(&stop));
        let receiver = there.spawn(move || {
            cpu::pin_this_thread(load_core)?;
            receive(&count, &stopped)
        })?;
        let stopped = Arc::clone(&stop);
        let sender = server.spawn(move || {
            cpu::pin_this_thread(server_core)?;
            send(&stopped)
        })?;
        Ok(Self { there, load_core, arrived, stop, threads: vec![receiver, sender] })
    }

    /// The flow's rate over `time`, in Mb/s of payload, as it arrives.
    pub(crate) fn watch(&self) -> Watch<'_> {
        Watch { side: self, began: Instant::now(), before: self.arrived.load(Ordering::Relaxed) }
    }

    /// Pings the server's end for `time`.
    pub(crate) fn ping(&self, time: Duration) -> Result<Ping, LabError> {
        let count = (time.as_secs_f64() / PING_EVERY_S).ceil().max(1.0) as u32;
        let mut command = self.there.command_on_core(self.load_core, "ping");
        // Wait a little for the last one only; lost ones are no failure.
        let (count_text, every) = (count.to_string(), PING_EVERY_S.to_string());
        let here = HERE.to_string();
        command.args(["-n", "-c", &count_text, "-i", &every, "-W", "0.5", &here]);
        let text = match run_to_end(&mut command, "iputils-ping") {
            Ok(text) => text,
            // It ends with 1 when no answer came at all.
            Err(LabError::Command { stderr, .. }) if stderr.is_empty() => String::new(),
            Err(error) => return Err(error),
        };
        Ok(read_ping(&text, count))
    }
}

/// A measurement of the flow that has begun.
pub(crate) struct Watch<'a> {
    side: &'a Side,
    began: Instant,
    before: u64,
}

impl Watch<'_> {
    /// The flow's rate since the beginning, in Mb/s of payload, as it arrived.
    pub(crate) fn mbps(self) -> f64 {
        let datagrams = self.side.arrived.load(Ordering::Relaxed) - self.before;
        (datagrams as usize * FLOW_BYTES * 8) as f64 / 1e6 / self.began.elapsed().as_secs_f64()
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A flow that failed shows as one that does not arrive.
            let _ = thread.join();
        }
    }
}

/// Sends the flow by the clock; who was late catches up, as iperf does.
fn send(stop: &AtomicBool) -> Result<(), LabError> {
    let socket = UdpSocket::bind((HERE, 0)).map_err(LabError::io("cannot open the flow"))?;
    socket.set_nonblocking(true).map_err(LabError::io("cannot open the flow"))?;
    let interval_s = (FLOW_BYTES * 8) as f64 / FLOW_BITS_PER_S;
    let began = Instant::now();
    let (payload, mut sent) = ([0x5a; FLOW_BYTES], 0u32);
    while !stop.load(Ordering::Relaxed) {
        let due = began + Duration::from_secs_f64(interval_s * f64::from(sent));
        let wait = due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            thread::sleep(wait);
        }
        // A full queue loses datagrams, and that is what is measured.
        let _ = socket.send_to(&payload, SocketAddr::from((THERE, FLOW_PORT)));
        sent += 1;
    }
    Ok(())
}

fn receive(arrived: &AtomicU64, stop: &AtomicBool) -> Result<(), LabError> {
    let failed = || LabError::io("cannot receive the flow");
    let socket = UdpSocket::bind((THERE, FLOW_PORT)).map_err(failed())?;
    socket.set_read_timeout(Some(Duration::from_millis(50))).map_err(failed())?;
    let mut buffer = [0; 2048];
    while !stop.load(Ordering::Relaxed) {
        match socket.recv(&mut buffer) {
            Ok(_) => {
                arrived.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(failed()(error)),
        }
    }
    Ok(())
}

/// Reads `... time=0.042 ms` of every answer among `count` pings.
fn read_ping(text: &str, count: u32) -> Ping {
    let time = |line: &str| -> Option<f64> {
        line.split("time=").nth(1)?.split_whitespace().next()?.parse().ok()
    };
    let times: Vec<f64> = text.lines().filter_map(time).collect();
    let loss = 1.0 - (times.len() as f64 / f64::from(count.max(1))).min(1.0);
    let median_ms = if times.is_empty() { f64::INFINITY } else { median(&times) };
    Ping { median_ms, loss }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_losses_are_read_from_what_ping_says() {
        let text = "PING 10.78.0.2 (10.78.0.2) 56(84) bytes of data.\n\
                    64 bytes from 10.78.0.2: icmp_seq=1 ttl=64 time=0.040 ms\n\
                    64 bytes from 10.78.0.2: icmp_seq=3 ttl=64 time=2.00 ms\n\
                    64 bytes from 10.78.0.2: icmp_seq=4 ttl=64 time=0.060 ms\n\n\
                    4 packets transmitted, 3 received, 25% packet loss, time 30ms\n\
                    rtt min/avg/max/mdev = 0.040/0.700/2.000/0.1 ms\n";
        assert_eq!(read_ping(text, 4), Ping { median_ms: 0.06, loss: 0.25 });
        assert_eq!(read_ping("", 4), Ping { median_ms: f64::INFINITY, loss: 1.0 });
    }
}
