//! Host configuration of a stack: device, addresses, routes.

use std::fs::File;
use std::io::{self, BufWriter};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU16;
use std::path::PathBuf;

#[cfg(feature = "serde")]
use serde::{Deserialize, Serialize};
use tidegate_device::capture::{Capture, CaptureConfig};
use tidegate_device::fault::{FaultConfig, FaultInjector};
use tidegate_device::tap::TapConfig;
use tidegate_device::trace::Trace;
#[cfg(feature = "xdp")]
use tidegate_device::xdp::AttachMode;
use tidegate_engine::{DeviceConfig, NetConfig};
use tidegate_gate::{self as gate, Settings};
use tidegate_memory::FrameSize;
use tidegate_stack::{AddressProbe, Route};
use tidegate_wire::{IpCidr, MacAddr};

use super::device::HostDevice;
use super::error::HostConfigError;
#[cfg(feature = "serde")]
use super::serialize;

/// Minimum number of packet buffers: fewer cannot fill the rings of a device.
const MIN_FRAMES: u32 = 64;

/// Default number of 64 KiB frames.
const DEFAULT_LARGE_FRAMES: u32 = 1024;

/// Host of a stack: its device, its addresses and its routes. Independent of command lines and
/// of configuration files; with feature `serde` a configuration can be passed to another
/// process.
///
/// # Examples
/// ```
/// use tidegate::gate::Settings;
/// use tidegate::host::{HostConfig, HostDevice};
///
/// let mut host = HostConfig::default();
/// host.io = HostDevice::Packet;
/// host.iface = Some("eth0".to_owned());
/// host.addresses = vec!["192.0.2.7/24".parse().unwrap()];
/// let config = host.net_config(&Settings::default())?;
/// # let _ = config;
/// # Ok::<(), tidegate::host::HostConfigError>(())
/// ```
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
#[cfg_attr(feature = "serde", serde(default, rename_all = "kebab-case"))]
#[non_exhaustive]
pub struct HostConfig {
    /// I/O method; automatic by default. AF_XDP and AF_PACKET need the features `xdp` and `packet`.
    #[cfg_attr(feature = "serde", serde(with = "serialize::text"))]
    pub io: HostDevice,
    /// Network interface; required except for DPDK and RDMA.
    pub iface: Option<String>,
    /// Addresses of the stack's own, with their prefix lengths.
    #[cfg_attr(feature = "serde", serde(with = "serialize::texts"))]
    pub addresses: Vec<IpCidr>,
    /// Share the addresses of the host instead of having own ones.
    pub shared: bool,
    /// Default gateways, one per family.
    pub gateways: Vec<IpAddr>,
    /// Static routes.
    #[cfg_attr(feature = "serde", serde(with = "serialize::routes"))]
    pub routes: Vec<Route>,
    /// Check of own addresses for uniqueness; by quick probes by default.
    #[cfg_attr(feature = "serde", serde(with = "serialize::text"))]
    pub probe: AddressProbe,
    /// MAC address used with own addresses; the interface's by default.
    #[cfg_attr(feature = "serde", serde(with = "serialize::texts"))]
    pub mac: Option<MacAddr>,
    /// VLAN identifier (802.1Q).
    pub vlan: Option<u16>,
    /// XDP attach mode; native if the driver supports it by default.
    #[cfg(feature = "xdp")]
    #[cfg_attr(feature = "serde", serde(with = "serialize::text"))]
    pub xdp_mode: AttachMode,
    /// Receive queues of an AF_XDP device; empty for all.
    pub queues: Vec<u32>,
    /// Number of queue pairs of a DPDK device; the device's own by default, else 1.
    pub queue_count: Option<NonZeroU16>,
    /// Packets per busy poll; 0 leaves the device to interrupts.
    pub busy_poll: Option<u16>,
    /// Let the kernel or the device segment TCP (TSO) and coalesce it (GRO).
    pub segmentation: bool,
    /// Number of packet buffers.
    pub frames: Option<u32>,
    /// Use ordinary pages instead of hugepages.
    pub no_hugepages: bool,
    /// File to which all frames are written (pcap).
    pub capture: Option<PathBuf>,
    /// Print a line per frame to standard error.
    pub trace: bool,
    /// Injected faults.
    #[cfg_attr(feature = "serde", serde(with = "serialize::faults"))]
    pub faults: Option<FaultConfig>,
}

impl HostConfig {
    /// Stack configuration that this host configuration describes. Creates the capture file, if
    /// there is one.
    ///
    /// # Errors
    /// When a field is missing or invalid; the message names the field.
    pub fn net_config(&self, gate: &Settings) -> Result<NetConfig, HostConfigError> {
        self.check()?;
        let device_config = self.device_config(gate.config())?;
        let frame_size = device_config.frame_size();
        let mut config =
            NetConfig::new(device_config).hugepages(!self.no_hugepages).gate(gate.clone());
        config = config.address_probe(self.probe);
        if self.shared {
            config = config.shared();
        }
        for &address in &self.addresses {
            config = config.address(address);
        }
        let gateways = self.gateways.iter().filter_map(|&gateway| default_route(gateway));
        for route in gateways.chain(self.routes.iter().copied()) {
            config = config.route(route);
        }
        if let Some(mac) = self.mac {
            config = config.mac(mac);
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

    /// Checks addresses, gateways and frames without opening anything.
    ///
    /// # Errors
    /// When a field is missing or invalid; the message names the field.
    pub fn check(&self) -> Result<(), HostConfigError> {
        if self.addresses.is_empty() && !self.shared {
            return Err(HostConfigError::NoAddress);
        }
        for (index, own) in self.addresses.iter().enumerate() {
            let address = own.address();
            let problem = match address {
                _ if self.addresses[..index].iter().any(|other| other.address() == address) => {
                    "it is given twice: remove one"
                }
                IpAddr::V4(_) if is_network(*own) => {
                    "it is the address of the network itself: give the address of a host"
                }
                IpAddr::V4(v4) if own.broadcast() == Some(v4) => {
                    "it is the broadcast address of the network: give the address of a host"
                }
                _ => continue,
            };
            return Err(HostConfigError::Address { address: *own, problem });
        }
        for (index, &gateway) in self.gateways.iter().enumerate() {
            let is_family = |other: &IpAddr| other.is_ipv4() == gateway.is_ipv4();
            if self.gateways[..index].iter().any(is_family) {
                let problem = "it is the second default gateway of its family: give one";
                return Err(HostConfigError::Gateway { gateway, problem });
            }
        }
        let route_gateways = self.routes.iter().filter_map(|route| route.gateway);
        self.gateways
            .iter()
            .copied()
            .chain(route_gateways)
            .try_for_each(|g| self.check_gateway(g))?;
        match self.frames {
            Some(frames) if frames < MIN_FRAMES => Err(HostConfigError::TooFewFrames(frames)),
            _ => Ok(()),
        }
    }

    /// Checks that a gateway is a neighbour.
    fn check_gateway(&self, gateway: IpAddr) -> Result<(), HostConfigError> {
        let fail = |problem| Err(HostConfigError::Gateway { gateway, problem });
        if self.addresses.iter().any(|own| own.address() == gateway) {
            return fail("it is an own address: give the address of the router");
        }
        let is_link_local = matches!(gateway, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let on_link = self.addresses.iter().find(|own| own.contains(gateway));
        match on_link {
            // The kernel's routes hold for its own addresses.
            None if is_link_local || self.shared => Ok(()),
            None => fail(
                "it is in none of the networks of the own addresses: correct the prefix length of the address, or the gateway",
            ),
            Some(own) => match gateway {
                IpAddr::V4(v4) if own.broadcast() == Some(v4) || is_network_address(*own, v4) => {
                    fail(
                        "it is the network's own or broadcast address: give the address of the router",
                    )
                }
                _ => Ok(()),
            },
        }
    }

    fn device_config(&self, gate: &gate::Config) -> Result<DeviceConfig, HostConfigError> {
        let segmentation = self.segmentation;
        if segmentation
            && matches!(self.io, HostDevice::Auto | HostDevice::Xdp | HostDevice::Rdma(_))
        {
            return Err(HostConfigError::SegmentationOnXdp);
        }
        if self.queue_count.is_some() && !matches!(self.io, HostDevice::Dpdk(_)) {
            return Err(HostConfigError::QueueCountWithoutDpdk);
        }
        Ok(match &self.io {
            HostDevice::Auto => self.auto_device(gate)?,
            HostDevice::Xdp => self.xdp_device(gate)?,
            HostDevice::Packet => self.packet_device()?,
            HostDevice::Tap => {
                TapConfig::new(self.required_iface()?).segmentation(segmentation).into()
            }
            HostDevice::Dpdk(config) => match &self.iface {
                None => {
                    let queues = self.queue_count.unwrap_or(config.queues);
                    config.clone().queues(queues).segmentation(segmentation).into()
                }
                Some(iface) => return Err(HostConfigError::InterfaceWithDpdk(iface.clone())),
            },
            HostDevice::Rdma(config) => match &self.iface {
                None => config.clone().into(),
                Some(iface) => return Err(HostConfigError::InterfaceWithRdma(iface.clone())),
            },
        })
    }

    /// Interface of a device that needs one.
    pub(super) fn required_iface(&self) -> Result<String, HostConfigError> {
        self.iface.clone().ok_or(HostConfigError::NoInterface)
    }

    /// Wraps the device in fault injection, then capture, then trace, so that capture and
    /// trace show the packets that the stack sees.
    fn wrap(&self, mut config: NetConfig) -> Result<NetConfig, HostConfigError> {
        if let Some(faults) = self.faults {
            config = config.wrap(Box::new(move |device| {
                let device = FaultInjector::new(device, faults)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
                Ok(Box::new(device))
            }));
        }
        if let Some(path) = &self.capture {
            let file = File::create(path)
                .map_err(|source| HostConfigError::Capture { path: path.clone(), source })?;
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

/// True for an IPv4 address that is the address of its network. Networks of one or two addresses
/// have none (RFC 3021).
fn is_network(own: IpCidr) -> bool {
    matches!(own.address(), IpAddr::V4(address) if is_network_address(own, address))
}

fn is_network_address(own: IpCidr, address: Ipv4Addr) -> bool {
    own.prefix_bits() < 31 && own.network().address() == IpAddr::V4(address)
}

/// Route of all destinations of one family. There always is one: a prefix length of 0 is valid.
fn default_route(gateway: IpAddr) -> Option<Route> {
    let any = match gateway {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let prefix = IpCidr::new(any, 0).ok()?;
    Some(Route { prefix, gateway: Some(gateway) })
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use tidegate_device::fault::FaultRates;

    use super::*;

    /// `tidegate run` passes the configuration to the application as JSON.
    #[test]
    fn serialized_configuration_is_read_back() {
        let config = HostConfig {
            io: HostDevice::Packet,
            iface: Some("eth0".to_owned()),
            addresses: vec!["192.0.2.7/24".parse().unwrap(), "2001:db8::7/64".parse().unwrap()],
            gateways: vec!["192.0.2.1".parse().unwrap()],
            routes: vec![Route {
                prefix: "10.0.0.0/8".parse().unwrap(),
                gateway: Some("192.0.2.2".parse().unwrap()),
            }],
            mac: Some("02:00:00:00:00:07".parse().unwrap()),
            xdp_mode: AttachMode::Generic,
            queues: vec![1, 3],
            faults: Some(
                FaultConfig::default()
                    .seed(7)
                    .receive(FaultRates::default().loss(0.5))
                    .transmit(FaultRates::default().corruption(0.25)),
            ),
            ..HostConfig::default()
        };
        for config in [config, HostConfig::default()] {
            let text = serde_json::to_string(&config).unwrap();
            let read: HostConfig = serde_json::from_str(&text).unwrap();
            assert_eq!(format!("{read:?}"), format!("{config:?}"));
        }
    }
}
