//! I/O methods by name.

use std::fmt;
use std::str::FromStr;

use tidegate_device::dpdk::DpdkConfig;
use tidegate_device::rdma::RdmaConfig;

use super::error::HostConfigError;

/// I/O method: the way packets are sent and received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HostDevice {
    /// AF_XDP, or AF_PACKET while an XDP program of another process is on the interface. In a build
    /// with one of the features `xdp` and `packet`, the device of that feature.
    #[default]
    Auto,
    /// AF_XDP; needs a build with feature `xdp`.
    Xdp,
    /// AF_PACKET; needs a build with feature `packet`.
    Packet,
    /// A TAP device.
    Tap,
    /// A DPDK device; needs a build with feature `dpdk`.
    Dpdk(DpdkConfig),
    /// A device over an RDMA NIC; needs a build with feature `rdma`.
    Rdma(RdmaConfig),
}

impl FromStr for HostDevice {
    type Err = HostConfigError;

    /// Parses `auto`, `xdp`, `packet`, `tap`, `dpdk:` followed by a device and its arguments (see
    /// [`DpdkConfig`]), or `rdma:` followed by a device (see [`RdmaConfig`]).
    fn from_str(text: &str) -> Result<Self, HostConfigError> {
        match text.split_once(':').unwrap_or((text, "")) {
            ("auto", "") => Ok(Self::Auto),
            ("xdp", "") => Ok(Self::Xdp),
            ("packet", "") => Ok(Self::Packet),
            ("tap", "") => Ok(Self::Tap),
            ("dpdk", device) if text.contains(':') => {
                let Ok(config) = device.parse();
                Ok(Self::Dpdk(config))
            }
            ("rdma", device) => Ok(Self::Rdma(device.parse()?)),
            _ => Err(HostConfigError::UnknownDevice(text.to_owned())),
        }
    }
}

impl fmt::Display for HostDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Xdp => f.write_str("xdp"),
            Self::Packet => f.write_str("packet"),
            Self::Tap => f.write_str("tap"),
            Self::Dpdk(config) => write!(f, "dpdk:{config}"),
            Self::Rdma(config) => write!(f, "rdma:{config}"),
        }
    }
}
