//! How a stack lives on the network, as text: what the flags of `tidegate
//! serve` and `tidegate run` say, in a form that can be handed to another
//! program.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tidegate_gate::{self as gate, Settings};
use tidegate_memory::FrameSize;
use tidegate_port::capture::{Capture, CaptureConfig};
use tidegate_port::dpdk::DpdkConfig;
use tidegate_port::fault::{Fault, FaultConfig, Faults};
use tidegate_port::packet::PacketConfig;
use tidegate_port::tap::TapConfig;
use tidegate_port::trace::Trace;
use tidegate_port::xdp::{BusyPoll, Mode, XdpConfig};
use tidegate_stack::Route;
use tidegate_wire::IpCidr;

use crate::{NetConfig, PortConfig};

/// Buffers of 64 KiB where none are asked for.
const LARGE_FRAMES: u32 = 1024;

/// Where packets come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum HostPort {
    /// AF_XDP.
    #[default]
    Xdp,
    /// AF_PACKET.
    Packet,
    /// A TAP device.
    Tap,
    /// A device of DPDK's.
    Dpdk(DpdkConfig),
}

impl FromStr for HostPort {
    type Err = HostError;

    /// `xdp`, `packet`, `tap`, or `dpdk:` with a device and what
    /// [`DpdkConfig`] reads behind it.
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
                "{text:?} is no kind of port: expected xdp, packet, tap, dpdk:DEVICE or, where there \
                 is a choice, kernel"
            ))),
        }
    }
}

impl TryFrom<String> for HostPort {
    type Error = HostError;

    fn try_from(text: String) -> Result<Self, HostError> {
        text.parse()
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Xdp => f.write_str("xdp"),
            Self::Packet => f.write_str("packet"),
            Self::Tap => f.write_str("tap"),
            Self::Dpdk(config) => write!(f, "dpdk:{config}"),
        }
    }
}

impl From<HostPort> for String {
    fn from(port: HostPort) -> Self {
        port.to_string()
    }
}

/// How to attach an XDP program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostXdpMode {
    /// Native, else generic.
    Auto,
    /// In the driver.
    Native,
    /// In the kernel's generic receive path.
    Generic,
}

/// Section `[host]` of a configuration file; each field is the flag of that
/// name.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the flags say what they mean")]
pub struct HostConfig {
    pub port: Option<HostPort>,
    pub iface: Option<String>,
    pub address: Vec<String>,
    pub shared: bool,
    pub gateway: Vec<IpAddr>,
    pub route: Vec<String>,
    pub mac: Option<String>,
    pub vlan: Option<u16>,
    pub xdp_mode: Option<HostXdpMode>,
    pub queue: Vec<u32>,
    pub queues: Option<NonZeroU16>,
    pub busy_poll: Option<u16>,
    pub segmentation: bool,
    pub frames: Option<u32>,
    pub no_hugepages: bool,
    pub capture: Option<PathBuf>,
    pub trace: bool,
    pub fault: Option<String>,
}

/// What is wrong with a [`HostConfig`], and what to write instead.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct HostError(String);

impl From<String> for HostError {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl HostConfig {
    /// The stack that this describes.
    ///
    /// # Errors
    /// Says which field is wrong.
    pub fn net_config(&self, gate: &Settings) -> Result<NetConfig, HostError> {
        if self.address.is_empty() && !self.shared {
            return Err(HostError(
                "no address: give --address ADDRESS/BITS for one of Tidegate's own, or --shared \
                 to serve on the kernel's"
                    .into(),
            ));
        }
        let port = self.port_config(gate.config())?;
        let frame_size = port.frame_size();
        let mut config = NetConfig::new(port).hugepages(!self.no_hugepages).gate(gate.clone());
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
            config = config.frames(self.frames.unwrap_or(LARGE_FRAMES), FrameSize::K64);
        } else if let Some(frames) = self.frames {
            config = config.frames(frames, frame_size);
        }
        self.wrap(config)
    }

    fn port_config(&self, gate: &gate::Config) -> Result<PortConfig, HostError> {
        let segmentation = self.segmentation;
        let port = self.port.clone().unwrap_or_default();
        if segmentation && matches!(port, HostPort::Xdp) {
            return Err(HostError(
                "--segmentation is for --port packet, --port tap and --port dpdk: AF_XDP passes \
                 frames as they are on the wire"
                    .into(),
            ));
        }
        if self.queues.is_some() && !matches!(port, HostPort::Dpdk(_)) {
            return Err(HostError(
                "--queues is for --port dpdk:DEVICE: --queue chooses those of --port xdp".into(),
            ));
        }
        let iface = || {
            let missing = || "no interface: give --iface NAME; `ip link` lists them".to_owned();
            self.iface.clone().ok_or_else(missing)
        };
        Ok(match port {
            HostPort::Xdp => self.xdp_config(iface()?, gate).into(),
            HostPort::Packet => PacketConfig { segmentation, ..PacketConfig::new(iface()?) }.into(),
            HostPort::Tap => TapConfig { segmentation, ..TapConfig::new(iface()?) }.into(),
            HostPort::Dpdk(config) => match &self.iface {
                None => {
                    let queues = self.queues.unwrap_or(config.queues);
                    DpdkConfig { queues, segmentation, ..config }.into()
                }
                Some(iface) => {
                    return Err(HostError(format!(
                        "--iface {iface}: with DPDK the device stands in --port dpdk:DEVICE, as \
                         --port dpdk:net_af_packet0,iface={iface}"
                    )));
                }
            },
        })
    }

    fn xdp_config(&self, iface: String, gate: &gate::Config) -> XdpConfig {
        let mut xdp = XdpConfig::new(iface);
        xdp.mode = match self.xdp_mode {
            Some(HostXdpMode::Auto) => Mode::Auto,
            Some(HostXdpMode::Native) => Mode::Native,
            Some(HostXdpMode::Generic) => Mode::Generic,
            None => Mode::default(),
        };
        xdp.queues = (!self.queue.is_empty()).then(|| self.queue.clone());
        let polls = matches!(gate.mode, gate::Mode::Polled | gate::Mode::Dedicated);
        if gate.mode == gate::Mode::Moderated {
            // The rings of the kernel are powers of two.
            let descriptors = gate.descriptors.next_power_of_two();
            xdp.rings.receive = descriptors;
            xdp.rings.fill = descriptors;
        }
        xdp.busy_poll = match self.busy_poll {
            Some(0) => None,
            // The other modes are about the card's interrupts.
            _ if !polls => None,
            Some(budget) => Some(BusyPoll { budget, ..BusyPoll::default() }),
            None => Some(BusyPoll::default()),
        };
        xdp
    }

    /// Puts faults next to the wire, then the capture, then the trace, so that
    /// the last two show what the stack sees.
    fn wrap(&self, mut config: NetConfig) -> Result<NetConfig, HostError> {
        if let Some(text) = &self.fault {
            let faults = parse_faults(text)?;
            config = config.wrap(Box::new(move |port| {
                let port = Fault::new(port, faults)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
                Ok(Box::new(port))
            }));
        }
        if let Some(path) = &self.capture {
            let file = create(path)?;
            config = config.wrap(Box::new(move |port| {
                let file = BufWriter::new(file);
                let port =
                    Capture::new(port, file, CaptureConfig::default()).map_err(io::Error::other)?;
                Ok(Box::new(port))
            }));
        }
        if self.trace {
            config = config.wrap(Box::new(|port| Ok(Box::new(Trace::new(port, io::stderr())))));
        }
        Ok(config)
    }
}

fn create(path: &Path) -> Result<File, HostError> {
    Ok(File::create(path).map_err(|error| format!("{}: {error}", path.display()))?)
}

/// `loss=0.01,corruption=0.001,seed=7`: the same faults in both directions.
fn parse_faults(text: &str) -> Result<FaultConfig, HostError> {
    let error = |part: &str| {
        format!(
            "--fault {part:?}: expected NAME=PROBABILITY with loss, duplication, reordering or \
             corruption, or seed=NUMBER, separated by commas"
        )
    };
    let (mut faults, mut seed) = (Faults::default(), 0);
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

/// `10.0.0.0/8=192.0.2.1`.
///
/// # Errors
/// Says what was expected.
pub fn parse_route(text: &str) -> Result<Route, HostError> {
    let error = || format!("--route {text}: expected PREFIX=GATEWAY, as 10.0.0.0/8=192.0.2.1");
    let (prefix, gateway) = text.split_once('=').ok_or_else(error)?;
    let prefix = prefix.parse().map_err(|_| error())?;
    let gateway = Some(gateway.parse().map_err(|_| error())?);
    Ok(Route { prefix, gateway })
}
