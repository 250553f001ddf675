//! Host configuration of a stack (device, addresses, routes), as text: the flags of `tidegate
//! daemon` and `tidegate run`, in a form that can be passed to another process.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tidegate_device::capture::{Capture, CaptureConfig};
use tidegate_device::dpdk::DpdkConfig;
use tidegate_device::fault::{FaultConfig, FaultInjector, FaultRates};
use tidegate_device::packet::PacketConfig;
use tidegate_device::tap::TapConfig;
use tidegate_device::trace::Trace;
use tidegate_device::xdp::{AttachMode, BusyPoll, XdpConfig};
use tidegate_gate::{self as gate, Settings};
use tidegate_memory::FrameSize;
use tidegate_stack::Route;
use tidegate_wire::IpCidr;

use tidegate_engine::{DeviceConfig, NetConfig};

/// Default number of 64 KiB frames.
const DEFAULT_LARGE_FRAMES: u32 = 1024;

/// I/O method: the way packets are sent and received.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum HostDevice {
    /// AF_XDP.
    #[default]
    Xdp,
    /// AF_PACKET.
    Packet,
    /// A TAP device.
    Tap,
    /// A DPDK device.
    Dpdk(DpdkConfig),
}

impl FromStr for HostDevice {
    type Err = HostError;

    /// Parses `xdp`, `packet`, `tap`, or `dpdk:` followed by a device and its arguments (see
    /// [`DpdkConfig`]).
    fn from_str(text: &str) -> Result<Self, HostError> {
        match (text, text.strip_prefix("dpdk:")) {
            ("xdp", _) => Ok(Self::Xdp),
            ("packet", _) => Ok(Self::Packet),
            ("tap", _) => Ok(Self::Tap),
            (_, Some(device)) => {
                let Ok(config) = device.parse();
                Ok(Self::Dpdk(config))
            }
            _ => Err(HostError(format!(
                "{text:?} is not an I/O method: expected xdp, packet, tap, dpdk:DEVICE or, where \
                 supported, kernel"
            ))),
        }
    }
}

impl TryFrom<String> for HostDevice {
    type Error = HostError;

    fn try_from(text: String) -> Result<Self, HostError> {
        text.parse()
    }
}

impl fmt::Display for HostDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Xdp => f.write_str("xdp"),
            Self::Packet => f.write_str("packet"),
            Self::Tap => f.write_str("tap"),
            Self::Dpdk(config) => write!(f, "dpdk:{config}"),
        }
    }
}

impl From<HostDevice> for String {
    fn from(device: HostDevice) -> Self {
        device.to_string()
    }
}

/// Mode in which the XDP program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostXdpMode {
    /// Native mode, or generic mode where the driver has none.
    Auto,
    /// In the driver.
    Native,
    /// In the kernel's generic receive path.
    Generic,
}

/// Section `[host]` of a configuration file. Each field is the flag of the same name.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct HostConfig {
    /// Packet I/O; AF_XDP by default.
    #[serde(alias = "port")]
    pub io: Option<HostDevice>,
    /// Network interface; required except for DPDK.
    pub iface: Option<String>,
    /// Own IP addresses, as `ADDRESS/BITS`.
    pub address: Vec<String>,
    /// Share the addresses of the host instead of having own ones.
    pub shared: bool,
    /// Default gateways, one per family.
    pub gateway: Vec<IpAddr>,
    /// Static routes, as `PREFIX=GATEWAY`.
    pub route: Vec<String>,
    /// MAC address used with own addresses; the interface's by default.
    pub mac: Option<String>,
    /// VLAN identifier (802.1Q).
    pub vlan: Option<u16>,
    /// XDP attach mode; native if the driver supports it by default.
    pub xdp_mode: Option<HostXdpMode>,
    /// Receive queues of an AF_XDP device; all by default.
    pub queue: Vec<u32>,
    /// Number of queue pairs of a DPDK device; 1 by default.
    pub queues: Option<NonZeroU16>,
    /// Packets per busy poll; 0 leaves the device to interrupts.
    pub busy_poll: Option<u16>,
    /// Let the kernel or the device segment TCP (TSO) and coalesce it (GRO).
    pub segmentation: bool,
    /// Number of packet buffers.
    pub frames: Option<u32>,
    /// Use ordinary pages.
    pub no_hugepages: bool,
    /// File to which all frames are written (pcap).
    pub capture: Option<PathBuf>,
    /// Print a line per frame to standard error.
    pub trace: bool,
    /// Injected faults, as `loss=P,duplication=P,reordering=P,corruption=P,seed=N`.
    pub fault: Option<String>,
}

/// Error in a [`HostConfig`]: the invalid value, and the expected one.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct HostError(String);

impl From<String> for HostError {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl HostConfig {
    /// Stack configuration that this host configuration describes.
    ///
    /// # Errors
    /// When a field is missing or invalid; the message names the field.
    pub fn net_config(&self, gate: &Settings) -> Result<NetConfig, HostError> {
        if self.address.is_empty() && !self.shared {
            return Err(HostError(
                "no address: give --address ADDRESS/BITS for a separate address, or --shared \
                 to share the kernel's addresses"
                    .into(),
            ));
        }
        let device_config = self.device_config(gate.config())?;
        let frame_size = device_config.frame_size();
        let mut config =
            NetConfig::new(device_config).hugepages(!self.no_hugepages).gate(gate.clone());
        if self.shared {
            config = config.shared();
        }
        for address in &self.address {
            let parsed = address.parse().map_err(|error| format!("{address:?}: {error}"))?;
            config = config.address(parsed);
        }
        for &gateway in &self.gateway {
            let any = match gateway {
                IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
                IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let prefix = IpCidr::new(any, 0).map_err(|error| error.to_string())?;
            config = config.route(Route { prefix, gateway: Some(gateway) });
        }
        for route in &self.route {
            config = config.route(parse_route(route)?);
        }
        if let Some(mac) = &self.mac {
            config = config.mac(mac.parse().map_err(|error| format!("{mac:?}: {error}"))?);
        }
        if let Some(vlan) = self.vlan {
            config = config.vlan(vlan);
        }
        if self.segmentation {
            config = config.frames(self.frames.unwrap_or(DEFAULT_LARGE_FRAMES), FrameSize::K64);
        } else if let Some(frames) = self.frames {
            config = config.frames(frames, frame_size);
        }
        self.wrap(config)
    }

    fn device_config(&self, gate: &gate::Config) -> Result<DeviceConfig, HostError> {
        let segmentation = self.segmentation;
        let device = self.io.clone().unwrap_or_default();
        if segmentation && matches!(device, HostDevice::Xdp) {
            return Err(HostError(
                "--segmentation needs --io packet, --io tap or --io dpdk: AF_XDP passes \
                 frames as they are on the wire"
                    .into(),
            ));
        }
        if self.queues.is_some() && !matches!(device, HostDevice::Dpdk(_)) {
            return Err(HostError(
                "--queues needs --io dpdk:DEVICE; with --io xdp use --queue".into(),
            ));
        }
        let iface = || {
            let missing = || "no interface: give --iface NAME; `ip link` lists them".to_owned();
            self.iface.clone().ok_or_else(missing)
        };
        Ok(match device {
            HostDevice::Xdp => self.xdp_config(iface()?, gate).into(),
            HostDevice::Packet => {
                PacketConfig { segmentation, ..PacketConfig::new(iface()?) }.into()
            }
            HostDevice::Tap => TapConfig { segmentation, ..TapConfig::new(iface()?) }.into(),
            HostDevice::Dpdk(config) => match &self.iface {
                None => {
                    let queues = self.queues.unwrap_or(config.queues);
                    DpdkConfig { queues, segmentation, ..config }.into()
                }
                Some(iface) => {
                    return Err(HostError(format!(
                        "--iface {iface}: with DPDK name the device in --io dpdk:DEVICE, as \
                         --io dpdk:net_af_packet0,iface={iface}"
                    )));
                }
            },
        })
    }

    fn xdp_config(&self, iface: String, gate: &gate::Config) -> XdpConfig {
        let mut xdp = XdpConfig::new(iface);
        xdp.mode = match self.xdp_mode {
            Some(HostXdpMode::Auto) => AttachMode::Auto,
            Some(HostXdpMode::Native) => AttachMode::Native,
            Some(HostXdpMode::Generic) => AttachMode::Generic,
            None => AttachMode::default(),
        };
        xdp.queues = (!self.queue.is_empty()).then(|| self.queue.clone());
        let is_polling = matches!(gate.mode, gate::Mode::Polled | gate::Mode::Dedicated);
        if gate.mode == gate::Mode::Moderated {
            // The kernel's ring sizes are powers of two.
            let descriptors = gate.descriptors.next_power_of_two();
            xdp.rings.receive = descriptors;
            xdp.rings.fill = descriptors;
        }
        xdp.busy_poll = match self.busy_poll {
            Some(0) => None,
            // The other modes depend on the device's interrupts.
            _ if !is_polling => None,
            Some(budget) => Some(BusyPoll { budget, ..BusyPoll::default() }),
            None => Some(BusyPoll::default()),
        };
        xdp
    }

    /// Wraps the device in fault injection, then capture, then trace, so that capture and
    /// trace show the packets that the stack sees.
    fn wrap(&self, mut config: NetConfig) -> Result<NetConfig, HostError> {
        if let Some(text) = &self.fault {
            let faults = parse_faults(text)?;
            config = config.wrap(Box::new(move |device| {
                let device = FaultInjector::new(device, faults)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
                Ok(Box::new(device))
            }));
        }
        if let Some(path) = &self.capture {
            let file = create(path)?;
            config = config.wrap(Box::new(move |device| {
                let file = BufWriter::new(file);
                let device = Capture::new(device, file, CaptureConfig::default())
                    .map_err(io::Error::other)?;
                Ok(Box::new(device))
            }));
        }
        if self.trace {
            config = config.wrap(Box::new(|device| Ok(Box::new(Trace::new(device, io::stderr())))));
        }
        Ok(config)
    }
}

fn create(path: &Path) -> Result<File, HostError> {
    Ok(File::create(path).map_err(|error| format!("{}: {error}", path.display()))?)
}

/// Parses `loss=0.01,corruption=0.001,seed=7`; the faults apply to both directions.
fn parse_faults(text: &str) -> Result<FaultConfig, HostError> {
    let error = |part: &str| {
        format!(
            "--fault {part:?}: expected NAME=PROBABILITY with loss, duplication, reordering or \
             corruption, or seed=NUMBER, separated by commas"
        )
    };
    let (mut faults, mut seed) = (FaultRates::default(), 0);
    for part in text.split(',') {
        let (name, value) = part.split_once('=').ok_or_else(|| error(part))?;
        if name == "seed" {
            seed = value.parse().map_err(|_| error(part))?;
            continue;
        }
        let probability = match name {
            "loss" => &mut faults.loss,
            "duplication" => &mut faults.duplication,
            "reordering" => &mut faults.reordering,
            "corruption" => &mut faults.corruption,
            _ => return Err(error(part).into()),
        };
        *probability = value.parse().map_err(|_| error(part))?;
    }
    Ok(FaultConfig { seed, receive: faults, transmit: faults })
}

/// Parses a route, as `10.0.0.0/8=192.0.2.1`.
///
/// # Errors
/// When `text` is not `PREFIX=GATEWAY`.
pub fn parse_route(text: &str) -> Result<Route, HostError> {
    let error = || format!("--route {text}: expected PREFIX=GATEWAY, as 10.0.0.0/8=192.0.2.1");
    let (prefix, gateway) = text.split_once('=').ok_or_else(error)?;
    let prefix = prefix.parse().map_err(|_| error())?;
    let gateway = Some(gateway.parse().map_err(|_| error())?);
    Ok(Route { prefix, gateway })
}
