//! A soak: UDP at the maximum, with faults, for as long as one likes.
//!
//! What must hold: memory does not grow, nothing panics, and every packet that
//! was received was delivered, handled or dropped for a reason.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use tidegate::port::fault::{Fault, FaultConfig, Faults};
use tidegate::port::mem::{MemConfig, wire};
use tidegate::port::xdp::{BusyPoll, XdpConfig};
use tidegate::{Net, NetConfig, UdpSocket};
use tidegate_apps::ServeCounters;
use tidegate_apps::echo::Echo;
use tidegate_apps::embedded::serve_embedded;
use tidegate_memory::{Arena, ArenaConfig};

use crate::cpu;
use crate::error::LabError;
use crate::experiment::{Experiment, number};
use crate::load::{EchoWorkload, LinkKind, LoadConfig, LoadReport, load_udp, over_port};
use crate::netns::{VethConfig, VethPair};

/// What the soak runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SoakLink {
    /// A wire in memory.
    Mem,
    /// AF_XDP on both ends of a veth pair; needs root.
    Xdp,
}

/// How to run a soak. Probabilities are from 0 to 1 and hold for each
/// direction.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SoakConfig {
    /// How long.
    pub seconds: f64,
    /// Over what.
    pub link: SoakLink,
    /// Over IPv6 instead of IPv4.
    pub ipv6: bool,
    /// How often a packet is lost.
    pub loss: f64,
    /// How often it comes twice.
    pub duplication: f64,
    /// How often it is overtaken.
    pub reordering: f64,
    /// How often a bit of it is turned over.
    pub corruption: f64,
    /// The same seed makes the same faults.
    pub seed: u64,
    /// Bytes of payload.
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

/// The result of a soak.
#[derive(Clone, Debug, Serialize)]
pub struct SoakReport {
    /// The load that was sent.
    pub load: LoadReport,
    /// Resident memory when a tenth of the time had passed, in bytes.
    pub resident_before_bytes: u64,
    /// Resident memory at the end, in bytes.
    pub resident_after_bytes: u64,
    /// Frames that the server's port handed to its stack.
    pub received: u64,
    /// Datagrams that the echo server took.
    pub delivered: u64,
    /// Packets that were for the stack itself.
    pub handled: u64,
    /// Drops in the server's stack and port, by reason.
    pub drops: Vec<(String, u64)>,
    /// Packets received and not accounted for: 0.
    pub unaccounted: i64,
    /// Buffers of the server that were free before, less those free after: 0.
    pub frames_missing: i64,
}

impl SoakReport {
    /// How much memory grew, in bytes.
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
            number((self.resident_after_bytes / 1024) as f64),
            number((self.growth_bytes() / 1024) as f64)
        )?;
        writeln!(
            f,
            "server    received {}, delivered {}, handled {}, unaccounted {}, buffers missing {}",
            number(self.received as f64),
            number(self.delivered as f64),
            number(self.handled as f64),
            self.unaccounted,
            self.frames_missing
        )?;
        for (reason, count) in &self.drops {
            writeln!(f, "dropped   {:>12}  {reason}", number(*count as f64))?;
        }
        Ok(())
    }
}

const ECHO_PORT: u16 = 7777;

/// Runs a soak. `progress` is called once a second.
///
/// # Errors
/// When a port cannot be opened or fails, or the configuration makes no sense.
pub fn run(
    config: &SoakConfig,
    progress: &mut (dyn FnMut(&crate::load::Progress) + Send),
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
            let (ours, theirs) =
                wire(&MemConfig::default()).map_err(LabError::io("cannot make a wire"))?;
            let net = open(config, NetConfig::new(theirs).address(address))?;
            let arena =
                Arena::new(ArenaConfig::default()).map_err(|e| LabError::Config(e.to_string()))?;
            let schedule = load.schedule()?;
            soak(config, &net, || {
                let workload = |flows| EchoWorkload::new(config.payload_bytes, flows);
                over_port(ours, arena, &load, &schedule, progress, workload)
            })
        }
        SoakLink::Xdp => {
            let pair = VethPair::new(&VethConfig::default())?;
            let xdp = XdpConfig {
                busy_poll: Some(BusyPoll::default()),
                ..XdpConfig::new(&pair.b.device)
            };
            let net = NetConfig::new(xdp).address(address);
            let net = pair.b.namespace.enter(|| open(config, net))??;
            load.interface = Some(pair.a.device.clone());
            soak(config, &net, || {
                let run = || load_udp(&load, config.payload_bytes, progress);
                pair.a.namespace.enter(run)?
            })
        }
    }
}

fn parse<T: std::str::FromStr>(text: &str) -> Result<T, LabError> {
    text.parse().map_err(|_| LabError::Config(format!("{text:?} is not an address")))
}

fn open(config: &SoakConfig, net: NetConfig) -> Result<Net, LabError> {
    let faults = Faults {
        loss: config.loss,
        duplication: config.duplication,
        reordering: config.reordering,
        corruption: config.corruption,
    };
    let faults = FaultConfig { seed: config.seed, receive: faults, transmit: faults };
    let net = net.wrap(Box::new(move |port| {
        let port = Fault::new(port, faults).map_err(std::io::Error::other)?;
        Ok(Box::new(port))
    }));
    Net::open(net).map_err(|error| LabError::Config(error.to_string()))
}

/// Echoes on a thread while `load` runs on this one.
fn soak(
    config: &SoakConfig,
    net: &Net,
    load: impl FnOnce() -> Result<LoadReport, LabError>,
) -> Result<SoakReport, LabError> {
    let any: std::net::IpAddr = if config.ipv6 { [0u16; 8].into() } else { [0u8; 4].into() };
    let socket =
        UdpSocket::bind(net, (any, ECHO_PORT)).map_err(LabError::io("cannot bind the socket"))?;
    let frames_before = net.frames_available();
    let stop = AtomicBool::new(false);
    let counters = ServeCounters::new();
    let early = Duration::from_secs_f64(config.seconds / 10.0);
    let (loaded, resident_before) = thread::scope(|scope| {
        let serving = scope.spawn(|| {
            serve_embedded(net, std::slice::from_ref(&socket), &mut Echo, &stop, &counters)
        });
        let watching = scope.spawn(|| watch(early, &stop));
        let loaded = load();
        stop.store(true, Ordering::Relaxed);
        let served = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        served.map_err(LabError::io("the echo server failed"))?;
        Ok::<_, LabError>((loaded?, watching.join().unwrap_or(Ok(0))?))
    })?;
    let after = net.counters();
    let drops = after.drops();
    Ok(SoakReport {
        load: loaded,
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

/// Reads the resident memory when the start is over.
fn watch(early: Duration, stop: &AtomicBool) -> Result<u64, LabError> {
    let start = Instant::now();
    while start.elapsed() < early && !stop.load(Ordering::Relaxed) {
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
            assert!(report.growth_bytes() < 16 << 20, "{report}");
        }
    }
}
