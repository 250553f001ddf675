//! Soak test: UDP at the maximum rate, with injected faults, for any duration.
//!
//! Invariants: memory does not grow, nothing panics, and every received packet is delivered,
//! handled, or dropped with a reason.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use tidegate::device::fault::{FaultConfig, FaultInjector, FaultRates};
use tidegate::device::mem::{MemConfig, wire};
use tidegate::device::xdp::{BusyPoll, XdpConfig};
use tidegate::{Net, NetConfig, UdpSocket};
use tidegate_apps::ServeCounters;
use tidegate_apps::echo::Echo;
use tidegate_apps::embedded::serve_embedded;
use tidegate_load::{
    EchoWorkload, LinkKind, LoadConfig, LoadReport, format_number, load_over_device, load_udp,
};
use tidegate_memory::{Arena, ArenaConfig};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::testbed::cpu;
use crate::testbed::netns::{VethConfig, VethPair};

/// Link of the soak test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SoakLink {
    /// In-memory link.
    Mem,
    /// AF_XDP on both ends of a veth pair; needs root.
    Xdp,
}

/// Configuration of a soak test.
///
/// Probabilities are from 0 to 1 and apply to each direction.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SoakConfig {
    /// Duration in seconds.
    pub seconds: f64,
    /// Link to test.
    pub link: SoakLink,
    /// Use IPv6 instead of IPv4.
    pub ipv6: bool,
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Probability that a packet is duplicated.
    pub duplication: f64,
    /// Probability that a packet is reordered.
    pub reordering: f64,
    /// Probability that a bit of a packet is flipped.
    pub corruption: f64,
    /// Seed of the faults; the same seed gives the same faults.
    pub seed: u64,
    /// Payload size in bytes.
    pub payload_bytes: usize,
}

impl Default for SoakConfig {
    fn default() -> Self {
        Self {
            seconds: 10.0,
            link: SoakLink::Mem,
            ipv6: false,
            loss: 0.01,
            duplication: 0.01,
            reordering: 0.01,
            corruption: 0.01,
            seed: 1,
            payload_bytes: 64,
        }
    }
}

impl SoakConfig {
    /// Reduces numbers and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 2.0, ..self }
    }
}

/// Result of a soak test.
#[derive(Clone, Debug, Serialize)]
pub struct SoakReport {
    /// Report of the generated load.
    pub load: LoadReport,
    /// Resident memory after a tenth of the duration, in bytes.
    pub resident_before_bytes: u64,
    /// Resident memory at the end, in bytes.
    pub resident_after_bytes: u64,
    /// Frames that the server's device passed to its stack.
    pub received: u64,
    /// Datagrams that the echo server received.
    pub delivered: u64,
    /// Packets that the stack handled itself.
    pub handled: u64,
    /// Drops in the server's stack and device, by reason.
    pub drops: Vec<(String, u64)>,
    /// Packets that were received and are not accounted for; must be 0.
    pub unaccounted: i64,
    /// Free buffers of the server at the start, less those at the end; must be 0.
    pub frames_missing: i64,
}

impl SoakReport {
    /// Growth of the resident memory, in bytes.
    pub fn growth_bytes(&self) -> u64 {
        self.resident_after_bytes.saturating_sub(self.resident_before_bytes)
    }
}

impl From<&SoakReport> for Experiment {
    fn from(report: &SoakReport) -> Self {
        let mut result = Experiment::new("soak");
        let load = &report.load.result;
        result.figure("sent", load.sent as f64);
        result.figure("answered", load.answered as f64);
        result.figure("received", report.received as f64);
        result.figure("delivered", report.delivered as f64);
        result.figure("handled", report.handled as f64);
        result.figure("unaccounted", report.unaccounted as f64);
        result.figure("frames_missing", report.frames_missing as f64);
        result.figure("growth_bytes", report.growth_bytes() as f64);
        for (reason, packets) in &report.drops {
            result.rows.push(json!({"reason": reason, "packets": packets}));
        }
        result
    }
}

impl fmt::Display for SoakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.load)?;
        writeln!(
            f,
            "memory    {} KiB, {} KiB more than at the start",
            format_number((self.resident_after_bytes / 1024) as f64),
            format_number((self.growth_bytes() / 1024) as f64)
        )?;
        writeln!(
            f,
            "server    received {}, delivered {}, handled {}, unaccounted {}, buffers missing {}",
            format_number(self.received as f64),
            format_number(self.delivered as f64),
            format_number(self.handled as f64),
            self.unaccounted,
            self.frames_missing
        )?;
        for (reason, count) in &self.drops {
            writeln!(f, "dropped   {:>12}  {reason}", format_number(*count as f64))?;
        }
        Ok(())
    }
}

const ECHO_PORT: u16 = 7777;

/// Runs a soak test; calls `progress` once per second.
///
/// # Errors
/// When a device cannot be opened or fails, or the configuration is invalid.
pub fn run(
    config: &SoakConfig,
    progress: &mut (dyn FnMut(&tidegate_load::LoadProgress) + Send),
) -> Result<SoakReport, LabError> {
    let (server, client) =
        if config.ipv6 { ("fd00::2/64", "fd00::1") } else { ("10.0.0.2/24", "10.0.0.1") };
    let address: tidegate::IpCidr = parse(server)?;
    let mut load = LoadConfig {
        source: Some(parse(client)?),
        seconds: config.seconds,
        ..LoadConfig::new(LinkKind::Xdp, (address.address(), ECHO_PORT).into())
    };
    match config.link {
        SoakLink::Mem => {
            let (load_device, server_device) = wire(&MemConfig::default())
                .map_err(LabError::io("cannot create an in-memory link"))?;
            let net = open_net(config, NetConfig::new(server_device).address(address))?;
            let arena =
                Arena::new(ArenaConfig::default()).map_err(|e| LabError::Config(e.to_string()))?;
            let schedule = load.schedule()?;
            soak(config, &net, || {
                let workload = |flows| EchoWorkload::new(config.payload_bytes, flows);
                Ok(load_over_device(load_device, arena, &load, &schedule, progress, workload)?)
            })
        }
        SoakLink::Xdp => {
            let pair = VethPair::as_on_a_wire(&VethConfig::default())?;
            let xdp = XdpConfig::new(&pair.b.device).busy_poll(BusyPoll::default());
            let net = NetConfig::new(xdp).address(address);
            let net = pair.b.namespace.enter(|| open_net(config, net))??;
            load.interface = Some(pair.a.device.clone());
            soak(config, &net, || {
                let run = || load_udp(&load, config.payload_bytes, progress);
                Ok(pair.a.namespace.enter(run)??)
            })
        }
    }
}

fn parse<T: std::str::FromStr>(text: &str) -> Result<T, LabError> {
    text.parse().map_err(|_| LabError::Config(format!("{text:?} is not an address")))
}

fn open_net(config: &SoakConfig, net: NetConfig) -> Result<Net, LabError> {
    let faults = FaultRates::default()
        .loss(config.loss)
        .duplication(config.duplication)
        .reordering(config.reordering)
        .corruption(config.corruption);
    let faults = FaultConfig::default().seed(config.seed).receive(faults).transmit(faults);
    let net = net.wrap(Box::new(move |device| {
        let device = FaultInjector::new(device, faults).map_err(std::io::Error::other)?;
        Ok(Box::new(device))
    }));
    Net::open(net).map_err(|error| LabError::Config(error.to_string()))
}

/// Runs an echo server on a new thread while `load` runs on the calling thread.
fn soak(
    config: &SoakConfig,
    net: &Net,
    load: impl FnOnce() -> Result<LoadReport, LabError>,
) -> Result<SoakReport, LabError> {
    let unspecified: std::net::IpAddr =
        if config.ipv6 { [0u16; 8].into() } else { [0u8; 4].into() };
    let socket = UdpSocket::bind(net, (unspecified, ECHO_PORT))
        .map_err(LabError::io("cannot bind the socket"))?;
    let frames_before = net.frames_available();
    let stop = AtomicBool::new(false);
    let counters = ServeCounters::new();
    let baseline_delay = Duration::from_secs_f64(config.seconds / 10.0);
    let (load_report, resident_before) = thread::scope(|scope| {
        let serving = scope.spawn(|| {
            serve_embedded(net, std::slice::from_ref(&socket), &mut Echo, &stop, &counters)
        });
        let watching = scope.spawn(|| read_baseline_memory(baseline_delay, &stop));
        let load_report = load();
        stop.store(true, Ordering::Relaxed);
        let result = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        result.map_err(LabError::io("the echo server failed"))?;
        Ok::<_, LabError>((load_report?, watching.join().unwrap_or(Ok(0))?))
    })?;
    let after = net.counters();
    let drops = after.drops();
    Ok(SoakReport {
        load: load_report,
        resident_before_bytes: resident_before,
        resident_after_bytes: cpu::resident_bytes(std::process::id())?,
        received: after.stack.received,
        delivered: after.stack.delivered,
        handled: after.stack.handled,
        drops: drops.nonzero().map(|(reason, n)| (reason.name().to_owned(), n)).collect(),
        unaccounted: after.stack.balance(),
        frames_missing: frames_before as i64 - net.frames_available() as i64,
    })
}

/// Returns the resident memory after the start phase, in bytes.
fn read_baseline_memory(baseline_delay: Duration, stop: &AtomicBool) -> Result<u64, LabError> {
    let start = Instant::now();
    while start.elapsed() < baseline_delay && !stop.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(10));
    }
    cpu::resident_bytes(std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_packet_is_accounted_for_under_faults() {
        for ipv6 in [false, true] {
            let config =
                SoakConfig { seconds: 0.5, ipv6, loss: 0.1, corruption: 0.2, ..Default::default() };
            let report = run(&config, &mut |_| {}).unwrap();
            assert_eq!(report.unaccounted, 0, "{report}");
            assert!(report.received > 0 && report.delivered > 0, "{report}");
            let has = |name: &str| report.drops.iter().any(|(reason, n)| reason == name && *n > 0);
            assert!(has("fault_injected"), "{report}");
        }
    }
}
