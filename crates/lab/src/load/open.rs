//! From a configuration to a load that runs.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_port::dpdk;
use tidegate_port::packet::{self, PacketConfig, PacketPort};
use tidegate_port::xdp::{self, XdpConfig, XdpPort};
use tidegate_port::{Port, PortCounters};

use super::drive::{LoadResult, Progress, Schedule, drive};
use super::kernel::KernelLine;
use super::line::Line;
use super::query_file::QuerySet;
use super::raw::RawLine;
use super::template::Addressing;
use super::workload::{AnswerHook, DnsWorkload, EchoWorkload, Workload};
use crate::cpu;
use crate::error::LabError;
use crate::netns::parse_mac;

/// What a load is sent through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// AF_XDP: the fastest.
    Xdp,
    /// AF_PACKET: on any interface, in a user namespace too.
    Packet,
    /// A device of DPDK's, in a program built with it.
    Dpdk,
    /// Kernel sockets: a core sends about 300,000 requests/s.
    Kernel,
}

/// A load: where to, from where, how fast, how long.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadConfig {
    /// The address and port of the server.
    pub target: SocketAddr,
    /// What to send through.
    pub link: LinkKind,
    /// The interface, or the device as [`dpdk::DpdkConfig`] reads it; not for kernel
    /// sockets.
    #[serde(default)]
    pub interface: Option<String>,
    /// The first source address. On a port it must be one that the kernel does
    /// not have: the generator answers ARP and NDP for it. On kernel sockets it
    /// is bound to when given.
    #[serde(default)]
    pub source: Option<IpAddr>,
    /// How many source addresses, counting up from the first; not for kernel
    /// sockets.
    #[serde(default = "one")]
    pub sources: u32,
    /// How many source ports (sockets, on kernel sockets).
    #[serde(default = "ports")]
    pub ports: u16,
    /// The first source port; not for kernel sockets.
    #[serde(default = "first_port")]
    pub first_port: u16,
    /// The target's hardware address; asked for when absent.
    #[serde(default)]
    pub mac: Option<String>,
    /// Requests per second; as fast as it goes when absent.
    #[serde(default)]
    pub rate_pps: Option<f64>,
    /// How long to measure, in seconds.
    #[serde(default = "seconds")]
    pub seconds: f64,
    /// How long to send before measuring, in seconds.
    #[serde(default)]
    pub warm_up_seconds: f64,
    /// How long to wait at the end for answers that are still missing, in
    /// seconds; over at once when there are none.
    #[serde(default = "drain_seconds")]
    pub drain_seconds: f64,
    /// How many requests to send at most.
    #[serde(default)]
    pub requests: Option<u64>,
    /// The core to run on.
    #[serde(default)]
    pub core: Option<usize>,
}

fn one() -> u32 {
    1
}
fn ports() -> u16 {
    64
}
fn first_port() -> u16 {
    20_000
}
fn seconds() -> f64 {
    10.0
}

fn drain_seconds() -> f64 {
    0.3
}

/// More source addresses would only fill tables.
const MAX_FLOWS: u32 = 1 << 16;
/// A load always ends: a day at most.
const MAX_SECONDS: f64 = 86_400.0;

impl LoadConfig {
    /// A load with defaults: as fast as it goes, for ten seconds.
    pub fn new(link: LinkKind, target: SocketAddr) -> Self {
        Self {
            target,
            link,
            interface: None,
            source: None,
            sources: one(),
            ports: ports(),
            first_port: first_port(),
            mac: None,
            rate_pps: None,
            seconds: seconds(),
            warm_up_seconds: 0.0,
            drain_seconds: drain_seconds(),
            requests: None,
            core: None,
        }
    }

    /// The times as [`drive`] wants them.
    ///
    /// # Errors
    /// [`LabError::Config`] when a time or the rate makes no sense.
    pub fn schedule(&self) -> Result<Schedule, LabError> {
        let nanoseconds = |name: &str, seconds: f64| {
            if (0.0..=MAX_SECONDS).contains(&seconds) {
                return Ok((seconds * 1e9) as u64);
            }
            Err(LabError::Config(format!("{name} is 0 to {MAX_SECONDS} seconds, not {seconds}")))
        };
        if let Some(rate) = self.rate_pps.filter(|rate| !(*rate > 0.0 && rate.is_finite())) {
            return Err(LabError::Config(format!(
                "{rate} requests/s is no rate; leave it out to send as fast as it goes"
            )));
        }
        Ok(Schedule {
            rate_pps: self.rate_pps,
            warm_up_ns: nanoseconds("the warm-up", self.warm_up_seconds)?,
            measure_ns: nanoseconds("the duration", self.seconds)?,
            drain_ns: nanoseconds("the wait at the end", self.drain_seconds)?,
            requests: self.requests,
        })
    }

    /// The addresses as a raw line wants them.
    fn addressing(&self) -> Result<Addressing, LabError> {
        let source = self.source.ok_or_else(|| {
            LabError::Config(
                "a load over a port needs --source, an address on the link that nobody has".into(),
            )
        })?;
        let flows = u64::from(self.sources) * u64::from(self.ports);
        if !(1..=u64::from(MAX_FLOWS)).contains(&flows) {
            return Err(LabError::Config(format!(
                "{} sources with {} ports each make {flows} flows; 1 to {MAX_FLOWS} are possible",
                self.sources, self.ports
            )));
        }
        if self.first_port == 0 || self.first_port.checked_add(self.ports - 1).is_none() {
            return Err(LabError::Config(format!(
                "source ports {} and {} after it are not between 1 and 65535",
                self.first_port,
                self.ports - 1
            )));
        }
        let mac = self.mac.as_deref().map(|text| {
            parse_mac(text).ok_or_else(|| {
                LabError::Config(format!("{text:?} is not an address like 02:00:00:00:00:01"))
            })
        });
        Ok(Addressing {
            source_mac: [0; 6],
            target_mac: mac.transpose()?.unwrap_or([0; 6]),
            source,
            sources: self.sources,
            first_port: self.first_port,
            ports: self.ports,
            target: self.target,
        })
    }

    fn interface(&self) -> Result<&str, LabError> {
        self.interface.as_deref().ok_or_else(|| {
            LabError::Config("a load over a port needs --iface, the interface to send on".into())
        })
    }
}

/// The result of a load and what it was sent through.
#[derive(Clone, Debug, Serialize)]
pub struct LoadReport {
    /// What it was sent through.
    pub line: String,
    /// Frames that the generator's own port dropped, by reason.
    pub port_drops: Vec<(String, u64)>,
    /// The result.
    #[serde(flatten)]
    pub result: LoadResult,
}

impl std::fmt::Display for LoadReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "over {}", self.line)?;
        write!(f, "{}", self.result)?;
        for (reason, count) in &self.port_drops {
            writeln!(f, "generator dropped {count}: {reason}")?;
        }
        Ok(())
    }
}

/// Called once a second.
pub type OnProgress<'a> = &'a mut dyn FnMut(&Progress);

/// Sends DNS queries and matches the answers. `hook` is called with each
/// query's number and its answer.
///
/// # Errors
/// When the configuration makes no sense, the port cannot be opened, nobody
/// answers for the target's hardware address, or the port fails.
pub fn load_dns(
    config: &LoadConfig,
    queries: &QuerySet,
    hook: Option<AnswerHook<'_>>,
    progress: OnProgress<'_>,
) -> Result<LoadReport, LabError> {
    load(config, progress, |flows| {
        let workload = DnsWorkload::new(queries, flows);
        match hook {
            Some(hook) => workload.with_hook(hook),
            None => workload,
        }
    })
}

/// Sends UDP packets of `bytes` bytes (6 to 1452) and matches their echoes.
///
/// # Errors
/// As [`load_dns`].
pub fn load_udp(
    config: &LoadConfig,
    bytes: usize,
    progress: OnProgress<'_>,
) -> Result<LoadReport, LabError> {
    if !(6..=super::template::MAX_PAYLOAD_BYTES).contains(&bytes) {
        return Err(LabError::Config(format!("a payload is 6 to 1452 bytes, not {bytes}")));
    }
    load(config, progress, |flows| EchoWorkload::new(bytes, flows))
}

fn load<W: Workload>(
    config: &LoadConfig,
    progress: OnProgress<'_>,
    workload: impl FnOnce(u32) -> W,
) -> Result<LoadReport, LabError> {
    let schedule = config.schedule()?;
    if let Some(core) = config.core {
        cpu::pin_this_thread(core)?;
    }
    match config.link {
        LinkKind::Kernel => {
            let mut line = KernelLine::open(config.target, config.source, config.ports.into())?;
            let mut workload = workload(line.flows());
            let result = drive(&mut line, &mut workload, &schedule, progress)?;
            let line = format!("{} kernel sockets (sendmmsg, recvmmsg)", line.flows());
            Ok(LoadReport { line, port_drops: Vec::new(), result })
        }
        _ => {
            let (port, arena) = open_port(config)?;
            over_port(port, arena, config, &schedule, progress, workload)
        }
    }
}

/// A line over the port that the configuration names.
pub(super) fn open_line(config: &LoadConfig) -> Result<RawLine<Box<dyn Port>>, LabError> {
    let (port, arena) = open_port(config)?;
    RawLine::open(port, arena, config.addressing()?)
}

fn open_port(config: &LoadConfig) -> Result<(Box<dyn Port>, Arena), LabError> {
    match config.link {
        LinkKind::Kernel => Err(LabError::Config(
            "kernel sockets are no port: give --port xdp, packet or dpdk:DEVICE".into(),
        )),
        LinkKind::Xdp => open_xdp(config),
        LinkKind::Packet => open_packet(config),
        LinkKind::Dpdk => open_dpdk(config),
    }
}

/// Runs a load over a port that is open already.
///
/// # Errors
/// As [`load_dns`].
pub fn over_port<P: Port, W: Workload>(
    port: P,
    arena: Arena,
    config: &LoadConfig,
    schedule: &Schedule,
    progress: OnProgress<'_>,
    workload: impl FnOnce(u32) -> W,
) -> Result<LoadReport, LabError> {
    let mut line = RawLine::open(port, arena, config.addressing()?)?;
    let mut workload = workload(line.flows());
    let result = drive(&mut line, &mut workload, schedule, progress)?;
    let port_drops = named_drops(&line.counters());
    Ok(LoadReport { line: line.detail(), port_drops, result })
}

/// The drop counters that are not zero, by name.
pub(crate) fn named_drops(counters: &PortCounters) -> Vec<(String, u64)> {
    counters.drops.nonzero().map(|(reason, count)| (reason.name().to_owned(), count)).collect()
}

fn arena(frame_size: FrameSize) -> Result<Arena, LabError> {
    Arena::new(ArenaConfig { frames: 8192, frame_size, ..ArenaConfig::default() })
        .map_err(|error| LabError::Config(error.to_string()))
}

fn open_xdp(config: &LoadConfig) -> Result<(Box<dyn Port>, Arena), LabError> {
    let mut arena = arena(FrameSize::K2)?;
    let addressing = config.addressing()?;
    // One rule takes what thousands of addresses would, and a generator's
    // interface is its own.
    let steering = if addressing.sources > 64 {
        xdp::Steering::everything()
    } else {
        let rule = |index| xdp::Rule::Address(addressing.source_at(index));
        xdp::Steering { rules: (0..addressing.sources).map(rule).collect(), vlan: None }
    };
    let xdp = XdpConfig {
        busy_poll: Some(xdp::BusyPoll::default()),
        steering,
        ..XdpConfig::new(config.interface()?)
    };
    let port = XdpPort::open(xdp, &mut arena).map_err(|error| {
        LabError::Config(format!("{error}\nor send through something else: --link packet"))
    })?;
    Ok((Box::new(port), arena))
}

fn open_dpdk(config: &LoadConfig) -> Result<(Box<dyn Port>, Arena), LabError> {
    let mut arena = arena(dpdk::FRAME_SIZE)?;
    let Ok(device) = config.interface()?.parse();
    let port =
        dpdk::open(&device, &mut arena).map_err(|error| LabError::Config(error.to_string()))?;
    Ok((port, arena))
}

fn open_packet(config: &LoadConfig) -> Result<(Box<dyn Port>, Arena), LabError> {
    let mut arena = arena(FrameSize::K2)?;
    let addressing = config.addressing()?;
    let addresses = (0..addressing.sources.min(64)).map(|index| addressing.source_at(index));
    let steering = if addressing.sources > 64 {
        packet::Steering::Everything
    } else {
        packet::Steering::Addresses(addresses.collect())
    };
    let packet = PacketConfig { steering, ..PacketConfig::new(config.interface()?) };
    let port = PacketPort::open(&packet, &mut arena)
        .map_err(|error| LabError::Config(error.to_string()))?;
    Ok((Box::new(port), arena))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> LoadConfig {
        let mut config = LoadConfig::new(LinkKind::Packet, "10.0.0.1:53".parse().unwrap());
        config.source = Some("10.0.0.2".parse().unwrap());
        config
    }

    #[test]
    fn a_configuration_that_makes_no_sense_is_refused_with_the_reason() {
        let refused = |change: fn(&mut LoadConfig), part: &str| {
            let mut config = config();
            change(&mut config);
            let error = match config.schedule() {
                Ok(_) => config.addressing().unwrap_err(),
                Err(error) => error,
            };
            assert!(error.to_string().contains(part), "{error}");
        };
        refused(|c| c.rate_pps = Some(0.0), "0 requests/s is no rate");
        refused(|c| c.rate_pps = Some(f64::NAN), "no rate");
        refused(|c| c.seconds = -1.0, "duration");
        refused(|c| c.seconds = f64::INFINITY, "duration");
        refused(|c| c.source = None, "--source");
        refused(|c| c.ports = 0, "0 flows");
        refused(|c| c.sources = u32::MAX, "flows");
        refused(|c| c.first_port = 65_530, "65535");
        refused(|c| c.first_port = 0, "source ports");
        refused(|c| c.mac = Some("nonsense".into()), "nonsense");
        assert!(config().schedule().is_ok() && config().addressing().is_ok());
    }

    #[test]
    fn an_interface_that_is_not_there_is_an_error() {
        for link in [LinkKind::Xdp, LinkKind::Packet] {
            let mut config = LoadConfig { link, ..config() };
            assert!(
                load_udp(&config, 64, &mut |_| {}).unwrap_err().to_string().contains("--iface")
            );
            config.interface = Some("tg-none".into());
            assert!(load_udp(&config, 64, &mut |_| {}).is_err());
        }
    }

    #[test]
    fn a_configuration_is_read_with_its_defaults() {
        let text = r#"{"target": "[fd00::1]:53", "link": "kernel"}"#;
        let config: LoadConfig = serde_json::from_str(text).unwrap();
        assert_eq!((config.ports, config.sources, config.link), (64, 1, LinkKind::Kernel));
        assert!(serde_json::from_str::<LoadConfig>(r#"{"link": "kernel"}"#).is_err());
        assert!(serde_json::from_str::<LoadConfig>(&text.replace("link", "lnik")).is_err());
    }
}
