//! Configuration and start of an open-loop UDP or DNS load.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_device::dpdk;
use tidegate_device::packet::{self, PacketConfig, PacketDevice};
use tidegate_device::xdp::{self, XdpConfig, XdpDevice};
use tidegate_device::{Device, DeviceCounters};
use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_wire::MacAddr;

use crate::core;
use crate::device_link::DeviceLink;
use crate::error::LoadError;
use crate::kernel_link::KernelLink;
use crate::link::Link;
use crate::open_loop::{LoadProgress, LoadResult, Schedule, run_open_loop};
use crate::query_file::QuerySet;
use crate::template::Addressing;
use crate::workload::{DnsWorkload, EchoWorkload, ResponseHook, Workload};

/// Means of transmission of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// AF_XDP: the fastest.
    Xdp,
    /// AF_PACKET: on any interface, also in a user namespace.
    Packet,
    /// DPDK device, in a build with DPDK.
    Dpdk,
    /// Kernel sockets: about 300,000 requests/s per core.
    Kernel,
}

/// Configuration of a load: target, source, rate and duration.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadConfig {
    /// Address and port of the server.
    pub target: SocketAddr,
    /// Means of transmission.
    pub link: LinkKind,
    /// Network interface, or DPDK device as [`dpdk::DpdkConfig`] parses it; not for kernel sockets.
    #[serde(default)]
    pub interface: Option<String>,
    /// First source address. On a device the kernel must not have this address: the generator
    /// answers ARP and NDP for it. Kernel sockets bind to it if given.
    #[serde(default)]
    pub source: Option<IpAddr>,
    /// Number of source addresses, counting up from the first; not for kernel sockets.
    #[serde(default = "one")]
    pub sources: u32,
    /// Number of source ports; with kernel sockets, the number of sockets.
    #[serde(default = "ports")]
    pub ports: u16,
    /// First source port; not for kernel sockets.
    #[serde(default = "first_port")]
    pub first_port: u16,
    /// The target's hardware address; resolved by ARP or NDP when absent.
    #[serde(default)]
    pub mac: Option<String>,
    /// Requests per second; the maximum rate when absent.
    #[serde(default)]
    pub rate_pps: Option<f64>,
    /// Duration of the measurement, in seconds.
    #[serde(default = "seconds")]
    pub seconds: f64,
    /// Warm-up before measuring, in seconds.
    #[serde(default)]
    pub warm_up_seconds: f64,
    /// Maximum wait for outstanding responses at the end, in seconds. The wait ends early when all
    /// responses have arrived.
    #[serde(default = "drain_seconds")]
    pub drain_seconds: f64,
    /// Maximum number of requests.
    #[serde(default)]
    pub requests: Option<u64>,
    /// Core to run on.
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

/// Maximum number of flows: more would only fill tables.
const MAX_FLOWS: u32 = 1 << 16;
/// Maximum duration of a load in seconds: one day, so that every load ends.
const MAX_SECONDS: f64 = 86_400.0;

impl LoadConfig {
    /// Returns a load with defaults: maximum rate, ten seconds.
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

    /// Converts rate and times into the schedule of an open loop.
    ///
    /// # Errors
    /// [`LoadError::Config`] when a time or the rate is invalid.
    pub fn schedule(&self) -> Result<Schedule, LoadError> {
        let nanoseconds = |name: &str, seconds: f64| {
            if (0.0..=MAX_SECONDS).contains(&seconds) {
                return Ok((seconds * 1e9) as u64);
            }
            Err(LoadError::Config(format!(
                "{name} must be 0 to {MAX_SECONDS} seconds, not {seconds}"
            )))
        };
        if let Some(rate) = self.rate_pps.filter(|rate| !(*rate > 0.0 && rate.is_finite())) {
            return Err(LoadError::Config(format!(
                "{rate} requests/s is not a valid rate; omit the rate to send at the maximum"
            )));
        }
        Ok(Schedule {
            rate_pps: self.rate_pps,
            warm_up_ns: nanoseconds("the warm-up", self.warm_up_seconds)?,
            measure_ns: nanoseconds("the duration", self.seconds)?,
            drain_ns: nanoseconds("the drain time", self.drain_seconds)?,
            max_requests: self.requests,
        })
    }

    /// Converts the addresses for a device link; the source hardware address is still zero.
    fn addressing(&self) -> Result<Addressing, LoadError> {
        let source = self.source.ok_or_else(|| {
            LoadError::Config(
                "a load over a device needs --source, an unused address on the link".into(),
            )
        })?;
        let flows = u64::from(self.sources) * u64::from(self.ports);
        if !(1..=u64::from(MAX_FLOWS)).contains(&flows) {
            return Err(LoadError::Config(format!(
                "{} sources with {} ports each make {flows} flows; 1 to {MAX_FLOWS} are possible",
                self.sources, self.ports
            )));
        }
        if self.first_port == 0 || self.first_port.checked_add(self.ports - 1).is_none() {
            return Err(LoadError::Config(format!(
                "source ports {} and {} after it are not between 1 and 65535",
                self.first_port,
                self.ports - 1
            )));
        }
        let mac = self.mac.as_deref().map(|text| {
            let parsed = text.parse().map(|MacAddr(octets)| octets);
            parsed.map_err(|error| LoadError::Config(format!("MAC address {text:?}: {error}")))
        });
        Ok(Addressing {
            source_mac: [0; 6],
            target_mac: mac.transpose()?.unwrap_or([0; 6]),
            source,
            source_count: self.sources,
            first_port: self.first_port,
            port_count: self.ports,
            target: self.target,
        })
    }

    fn interface(&self) -> Result<&str, LoadError> {
        self.interface.as_deref().ok_or_else(|| {
            LoadError::Config("a load over a device needs --iface, the interface to send on".into())
        })
    }
}

/// Result of a load and the link that carried it.
#[derive(Clone, Debug, Serialize)]
pub struct LoadReport {
    /// Description of the link.
    pub line: String,
    /// Frames that the generator's own device dropped, by reason.
    pub port_drops: Vec<(String, u64)>,
    /// Result of the load.
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

/// Callback with the rates of the last second.
pub type ProgressCallback<'a> = &'a mut dyn FnMut(&LoadProgress);

/// Sends DNS queries and matches the responses. `hook` is called with the index of each query
/// and its response.
///
/// # Errors
/// When the configuration is invalid, the device cannot be opened or fails, or the target's
/// hardware address cannot be resolved.
pub fn load_dns(
    config: &LoadConfig,
    queries: &QuerySet,
    hook: Option<ResponseHook<'_>>,
    progress: ProgressCallback<'_>,
) -> Result<LoadReport, LoadError> {
    run_load(config, progress, |flows| {
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
    progress: ProgressCallback<'_>,
) -> Result<LoadReport, LoadError> {
    if !(6..=crate::template::MAX_PAYLOAD_BYTES).contains(&bytes) {
        return Err(LoadError::Config(format!("a payload is 6 to 1452 bytes, not {bytes}")));
    }
    run_load(config, progress, |flows| EchoWorkload::new(bytes, flows))
}

fn run_load<W: Workload>(
    config: &LoadConfig,
    progress: ProgressCallback<'_>,
    make_workload: impl FnOnce(u32) -> W,
) -> Result<LoadReport, LoadError> {
    let schedule = config.schedule()?;
    if let Some(core) = config.core {
        core::pin_thread(None, core)?;
    }
    match config.link {
        LinkKind::Kernel => {
            let mut link = KernelLink::open(config.target, config.source, config.ports.into())?;
            let mut workload = make_workload(link.flow_count());
            let result = run_open_loop(&mut link, &mut workload, &schedule, progress)?;
            let description = format!("{} kernel sockets (sendmmsg, recvmmsg)", link.flow_count());
            Ok(LoadReport { line: description, port_drops: Vec::new(), result })
        }
        _ => {
            let (device, arena) = open_device(config)?;
            load_over_device(device, arena, config, &schedule, progress, make_workload)
        }
    }
}

/// Opens a link over the configured device.
pub(crate) fn open_device_link(
    config: &LoadConfig,
) -> Result<DeviceLink<Box<dyn Device>>, LoadError> {
    let (device, arena) = open_device(config)?;
    DeviceLink::open(device, arena, config.addressing()?)
}

fn open_device(config: &LoadConfig) -> Result<(Box<dyn Device>, Arena), LoadError> {
    match config.link {
        LinkKind::Kernel => Err(LoadError::Config(
            "this load needs a device, not kernel sockets: give --io xdp, packet or dpdk:DEVICE"
                .into(),
        )),
        LinkKind::Xdp => open_xdp(config),
        LinkKind::Packet => open_packet(config),
        LinkKind::Dpdk => open_dpdk(config),
    }
}

/// Runs a load over an open device.
///
/// # Errors
/// As [`load_dns`].
pub fn load_over_device<P: Device, W: Workload>(
    device: P,
    arena: Arena,
    config: &LoadConfig,
    schedule: &Schedule,
    progress: ProgressCallback<'_>,
    make_workload: impl FnOnce(u32) -> W,
) -> Result<LoadReport, LoadError> {
    let mut link = DeviceLink::open(device, arena, config.addressing()?)?;
    let mut workload = make_workload(link.flow_count());
    let result = run_open_loop(&mut link, &mut workload, schedule, progress)?;
    let port_drops = nonzero_drops(&link.counters());
    Ok(LoadReport { line: link.describe(), port_drops, result })
}

/// Returns the drop counters that are not zero, by name.
pub(crate) fn nonzero_drops(counters: &DeviceCounters) -> Vec<(String, u64)> {
    counters.drops.nonzero().map(|(reason, count)| (reason.name().to_owned(), count)).collect()
}

fn make_arena(frame_size: FrameSize) -> Result<Arena, LoadError> {
    Arena::new(ArenaConfig { frames: 8192, frame_size, ..ArenaConfig::default() })
        .map_err(|error| LoadError::Config(error.to_string()))
}

fn open_xdp(config: &LoadConfig) -> Result<(Box<dyn Device>, Arena), LoadError> {
    let mut arena = make_arena(FrameSize::K2)?;
    let addressing = config.addressing()?;
    // One rule replaces thousands of address rules: the interface belongs to the generator alone.
    let steering = if addressing.source_count > 64 {
        xdp::Steering::everything()
    } else {
        let rule = |index| xdp::SteeringRule::Address(addressing.source_at(index));
        xdp::Steering::new((0..addressing.source_count).map(rule).collect::<Vec<_>>())
    };
    let xdp =
        XdpConfig::new(config.interface()?).busy_poll(xdp::BusyPoll::default()).steering(steering);
    let device = XdpDevice::open(xdp, &mut arena)
        .map_err(|error| LoadError::Config(format!("{error}\nor use AF_PACKET: --io packet")))?;
    Ok((Box::new(device), arena))
}

fn open_dpdk(config: &LoadConfig) -> Result<(Box<dyn Device>, Arena), LoadError> {
    let mut arena = make_arena(dpdk::RECOMMENDED_FRAME_SIZE)?;
    let Ok(dpdk_config) = config.interface()?.parse();
    let device = dpdk::open(&dpdk_config, &mut arena)
        .map_err(|error| LoadError::Config(error.to_string()))?;
    Ok((device, arena))
}

fn open_packet(config: &LoadConfig) -> Result<(Box<dyn Device>, Arena), LoadError> {
    let mut arena = make_arena(FrameSize::K2)?;
    let addressing = config.addressing()?;
    let addresses = (0..addressing.source_count.min(64)).map(|index| addressing.source_at(index));
    let steering = if addressing.source_count > 64 {
        packet::Steering::Everything
    } else {
        packet::Steering::Addresses(addresses.collect())
    };
    let packet = PacketConfig::new(config.interface()?).steering(steering);
    let device = PacketDevice::open(&packet, &mut arena)
        .map_err(|error| LoadError::Config(error.to_string()))?;
    Ok((Box::new(device), arena))
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
    fn rejects_invalid_configurations_with_the_reason() {
        let refused = |change: fn(&mut LoadConfig), part: &str| {
            let mut config = config();
            change(&mut config);
            let error = match config.schedule() {
                Ok(_) => config.addressing().unwrap_err(),
                Err(error) => error,
            };
            assert!(error.to_string().contains(part), "{error}");
        };
        refused(|c| c.rate_pps = Some(0.0), "0 requests/s is not a valid rate");
        refused(|c| c.rate_pps = Some(f64::NAN), "not a valid rate");
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
    fn fails_without_the_interface() {
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
    fn parses_configuration_with_defaults() {
        let text = r#"{"target": "[fd00::1]:53", "link": "kernel"}"#;
        let config: LoadConfig = serde_json::from_str(text).unwrap();
        assert_eq!((config.ports, config.sources, config.link), (64, 1, LinkKind::Kernel));
        assert!(serde_json::from_str::<LoadConfig>(r#"{"link": "kernel"}"#).is_err());
        assert!(serde_json::from_str::<LoadConfig>(&text.replace("link", "lnik")).is_err());
    }
}
