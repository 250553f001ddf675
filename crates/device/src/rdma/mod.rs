//! The `rdma` device: frames as datagrams of an RDMA NIC (verbs, RoCE version 2).
//!
//! Each frame is one message of an unreliable datagram queue pair (UD), in the frames of the arena: the
//! NIC reads and writes them without a copy and without the kernel. Devices on one link form a network
//! of their own, apart from the Ethernet beneath: both ends must use this device. Frames to a hardware
//! address go straight to the queue pair from which that address was last heard; all others to a
//! multicast group that every device joins, as a switch floods them.
//!
//! The module always exists. Without the feature `rdma` opening the device fails, with
//! [`RdmaError::NotBuilt`].

#[cfg(feature = "rdma")]
mod device;
#[cfg(feature = "rdma")]
mod peers;
#[cfg(feature = "rdma")]
mod sys;

use std::fmt;
use std::io;
#[cfg(feature = "rdma")]
use std::net::Ipv6Addr;
use std::num::NonZeroU8;
use std::str::FromStr;

use tidegate_memory::Arena;

use crate::Device;

/// Multicast group of the network: of the link, and not assigned (RFC 4291, section 2.7). Its end reads
/// `tidegate`.
#[cfg(feature = "rdma")]
const GROUP: Ipv6Addr = Ipv6Addr::new(0xff12, 0, 0, 0, 0x7469, 0x6465, 0x6761, 0x7465);

/// Settings of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaConfig {
    /// Name of the RDMA device, as `rdma link` shows it: `rxe0`, `mlx5_0`.
    pub device: String,
    /// Port of the device, from 1 on.
    pub port: NonZeroU8,
}

impl RdmaConfig {
    /// Port 1 of this device.
    pub fn new(device: impl Into<String>) -> Self {
        Self { device: device.into(), port: NonZeroU8::MIN }
    }

    /// Sets the port.
    pub fn port(self, port: NonZeroU8) -> Self {
        Self { port, ..self }
    }
}

impl FromStr for RdmaConfig {
    type Err = RdmaError;

    /// Parses `DEVICE` or `DEVICE/PORT`: `rxe0`, `mlx5_0/2`.
    fn from_str(text: &str) -> Result<Self, RdmaError> {
        let invalid = || RdmaError::Name(text.to_owned());
        let (device, port) = text.split_once('/').unwrap_or((text, "1"));
        if device.is_empty() || device.contains('\0') {
            return Err(invalid());
        }
        Ok(Self::new(device).port(port.parse().map_err(|_| invalid())?))
    }
}

impl fmt::Display for RdmaConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.device, self.port)
    }
}

/// Error when opening an RDMA device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// The feature `rdma` is off.
    #[error(
        "this binary was built without RDMA: apt-get install libibverbs-dev, then cargo build \
         --release -p tidegate-cli --features rdma"
    )]
    NotBuilt,
    /// The text names no device.
    #[error(
        "{0:?} names no RDMA device: expected DEVICE or DEVICE/PORT, as rxe0 or mlx5_0/1; `rdma link` \
         lists them"
    )]
    Name(String),
    /// A step of the setup failed.
    #[error(
        "RDMA device {device}, port {port}: cannot {step}: {source}; `rdma link` lists the devices, and \
         `rdma link add rxe0 type rxe netdev eth0` makes one of a network interface"
    )]
    Setup {
        /// The step, as a verb phrase.
        step: String,
        /// The device.
        device: String,
        /// Its port.
        port: u8,
        /// The kernel's error.
        source: io::Error,
    },
    /// Messages are shorter than the smallest packet that IPv6 allows.
    #[error(
        "messages of the RDMA device {device} hold {message_bytes} bytes, too few for IPv6: raise the \
         MTU of its network interface to 2200 or more, with `ip link set DEV mtu 4200`, before the device \
         is made"
    )]
    SmallMessages {
        /// The device.
        device: String,
        /// Longest message in bytes.
        message_bytes: usize,
    },
}

/// Opens a device over the frames of an arena.
///
/// # Errors
/// See [`RdmaError`]; the device is closed again.
pub fn open(config: &RdmaConfig, arena: &Arena) -> Result<Box<dyn Device>, RdmaError> {
    #[cfg(feature = "rdma")]
    return Ok(Box::new(device::RdmaDevice::open(config, arena)?));
    #[cfg(not(feature = "rdma"))]
    {
        let _ = (config, arena);
        Err(RdmaError::NotBuilt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_device_and_port() {
        let read = |text: &str| text.parse::<RdmaConfig>();
        assert_eq!(read("rxe0").unwrap(), RdmaConfig::new("rxe0"));
        assert_eq!(read("mlx5_0/2").unwrap().to_string(), "mlx5_0/2");
        for wrong in ["", "/1", "rxe0/0", "rxe0/256", "rxe0/", "a\0b"] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.contains("rdma link"), "{error}");
        }
    }

    #[test]
    fn error_names_the_next_step() {
        let config = tidegate_memory::ArenaConfig { frames: 64, ..Default::default() };
        let arena = Arena::new(config).unwrap();
        let error = open(&RdmaConfig::new("tidegate-none"), &arena).err().unwrap().to_string();
        let advice = if cfg!(feature = "rdma") { "rdma link add" } else { "--features rdma" };
        assert!(error.contains(advice), "{error}");
    }
}
