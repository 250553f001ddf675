//! The server's second interface: a steady outgoing flow, and ping.
//!
//! As in Jonack and Murta's tests, the flood arrives on one interface, and its effect on the
//! machine is measured at another. The flow and the ping replies use the kernel's stack, on the
//! flooded core.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::LabError;
use crate::stats::median;
use crate::testbed::cpu;
use crate::testbed::netns::{Namespace, run_to_end};

const SERVER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
const PEER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
const FLOW_PORT: u16 = 5001;
/// Datagram size in bytes and rate of the paper's flow.
const FLOW_BYTES: usize = 1470;
const FLOW_BITS_PER_S: f64 = 10e6;
const PING_INTERVAL_S: f64 = 0.01;

/// A veth pair from the server's namespace to a separate peer namespace.
pub(crate) struct SecondInterface {
    peer: Namespace,
    load_core: usize,
    received_datagrams: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<(), LabError>>>,
}

/// Result of a ping run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PingResult {
    /// Median round-trip time in milliseconds; infinite without replies.
    pub(crate) median_ms: f64,
    /// Share of pings without a reply, 0 to 1.
    pub(crate) loss: f64,
}

impl SecondInterface {
    /// Connects `server` to a new peer namespace and starts the flow. The server's end runs on
    /// `server_core`, the peer's end on `load_core`.
    pub(crate) fn new(
        server: &Namespace,
        server_core: usize,
        load_core: usize,
    ) -> Result<Self, LabError> {
        let peer = Namespace::new("side")?;
        let (server_device, peer_device) = ("side0", "side1");
        server.ip(&[
            "link",
            "add",
            server_device,
            "type",
            "veth",
            "peer",
            "name",
            peer_device,
            "netns",
            peer.name(),
        ])?;
        let ends = [
            (server, server_device, SERVER_ADDRESS, server_core),
            (&peer, peer_device, PEER_ADDRESS, load_core),
        ];
        for (namespace, device, address, core) in ends {
            namespace.ip(&["addr", "add", &format!("{address}/24"), "dev", device])?;
            namespace.ip(&["link", "set", device, "up"])?;
            let mask = format!("{:x}", 1u64 << (core % 64));
            namespace.write_device_file(device, "queues/rx-0/rps_cpus", &mask)?;
        }
        let (received_datagrams, stop) =
            (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, stopped) = (Arc::clone(&received_datagrams), Arc::clone(&stop));
        let receiver = peer.spawn(move || {
            cpu::pin_this_thread(load_core)?;
            receive(&count, &stopped)
        })?;
        let stopped = Arc::clone(&stop);
        let sender = server.spawn(move || {
            cpu::pin_this_thread(server_core)?;
            send(&stopped)
        })?;
        Ok(Self { peer, load_core, received_datagrams, stop, threads: vec![receiver, sender] })
    }

    /// Starts a measurement of the flow at its receiver.
    pub(crate) fn measure_flow(&self) -> FlowMeter<'_> {
        FlowMeter {
            interface: self,
            began: Instant::now(),
            datagrams_before: self.received_datagrams.load(Ordering::Relaxed),
        }
    }

    /// Pings the server's end for `time`.
    pub(crate) fn ping(&self, time: Duration) -> Result<PingResult, LabError> {
        let count = (time.as_secs_f64() / PING_INTERVAL_S).ceil().max(1.0) as u32;
        let mut command = self.peer.command_on_core(self.load_core, "ping");
        // A short timeout for the last reply only; lost pings are no failure.
        let (count_text, interval) = (count.to_string(), PING_INTERVAL_S.to_string());
        let server_address = SERVER_ADDRESS.to_string();
        command.args(["-n", "-c", &count_text, "-i", &interval, "-W", "0.5", &server_address]);
        let text = match run_to_end(&mut command, "iputils-ping") {
            Ok(text) => text,
            // `ping` exits with status 1 when no reply came at all.
            Err(LabError::Command { stderr, .. }) if stderr.is_empty() => String::new(),
            Err(error) => return Err(error),
        };
        Ok(parse_ping(&text, count))
    }
}

/// A running measurement of the flow.
pub(crate) struct FlowMeter<'a> {
    interface: &'a SecondInterface,
    began: Instant,
    datagrams_before: u64,
}

impl FlowMeter<'_> {
    /// Rate of the flow since the start of the measurement, in Mb/s of payload, at its receiver.
    pub(crate) fn mbps(self) -> f64 {
        let datagrams =
            self.interface.received_datagrams.load(Ordering::Relaxed) - self.datagrams_before;
        (datagrams as usize * FLOW_BYTES * 8) as f64 / 1e6 / self.began.elapsed().as_secs_f64()
    }
}

impl Drop for SecondInterface {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A failure of the flow shows as missing datagrams.
            let _ = thread.join();
        }
    }
}

/// Sends the flow on a fixed schedule; a late sender catches up, as iperf does.
fn send(stop: &AtomicBool) -> Result<(), LabError> {
    let socket =
        UdpSocket::bind((SERVER_ADDRESS, 0)).map_err(LabError::io("cannot open the flow"))?;
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
        // A full queue loses datagrams, which the experiment measures.
        let _ = socket.send_to(&payload, SocketAddr::from((PEER_ADDRESS, FLOW_PORT)));
        sent += 1;
    }
    Ok(())
}

fn receive(received_datagrams: &AtomicU64, stop: &AtomicBool) -> Result<(), LabError> {
    let failed = || LabError::io("cannot receive the flow");
    let socket = UdpSocket::bind((PEER_ADDRESS, FLOW_PORT)).map_err(failed())?;
    socket.set_read_timeout(Some(Duration::from_millis(50))).map_err(failed())?;
    let mut buffer = [0; 2048];
    while !stop.load(Ordering::Relaxed) {
        match socket.recv(&mut buffer) {
            Ok(_) => {
                received_datagrams.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(failed()(error)),
        }
    }
    Ok(())
}

/// Parses `... time=0.042 ms` of every reply; `count` is the number of pings sent.
fn parse_ping(text: &str, count: u32) -> PingResult {
    let time = |line: &str| -> Option<f64> {
        line.split("time=").nth(1)?.split_whitespace().next()?.parse().ok()
    };
    let times: Vec<f64> = text.lines().filter_map(time).collect();
    let loss = 1.0 - (times.len() as f64 / f64::from(count.max(1))).min(1.0);
    let median_ms = if times.is_empty() { f64::INFINITY } else { median(&times) };
    PingResult { median_ms, loss }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_ping_times_and_losses() {
        let text = "PING 10.78.0.2 (10.78.0.2) 56(84) bytes of data.\n\
                    64 bytes from 10.78.0.2: icmp_seq=1 ttl=64 time=0.040 ms\n\
                    64 bytes from 10.78.0.2: icmp_seq=3 ttl=64 time=2.00 ms\n\
                    64 bytes from 10.78.0.2: icmp_seq=4 ttl=64 time=0.060 ms\n\n\
                    4 packets transmitted, 3 received, 25% packet loss, time 30ms\n\
                    rtt min/avg/max/mdev = 0.040/0.700/2.000/0.1 ms\n";
        assert_eq!(parse_ping(text, 4), PingResult { median_ms: 0.06, loss: 0.25 });
        assert_eq!(parse_ping("", 4), PingResult { median_ms: f64::INFINITY, loss: 1.0 });
    }
}
