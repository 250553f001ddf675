//! Configuration of a device.

use std::io;

pub use tidegate_device::OpenDevice;
use tidegate_device::dpdk::{self, DpdkConfig};
use tidegate_device::mem::MemDevice;
#[cfg(feature = "packet")]
use tidegate_device::packet::PacketConfig;
use tidegate_device::rdma::RdmaConfig;
use tidegate_device::tap::TapConfig;
#[cfg(feature = "xdp")]
use tidegate_device::xdp::XdpConfig;
use tidegate_memory::FrameSize;

/// Device of a stack.
#[non_exhaustive]
pub enum DeviceConfig {
    /// AF_XDP on an interface. The steering rules are filled in from the addresses or, on a shared
    /// address, from the bound sockets.
    #[cfg(feature = "xdp")]
    Xdp(XdpConfig),
    /// AF_XDP on an interface, or AF_PACKET while an XDP program of another process is on it.
    #[cfg(all(feature = "packet", feature = "xdp"))]
    Auto(XdpConfig),
    /// AF_PACKET on an interface. The address filter is filled in from the addresses.
    #[cfg(feature = "packet")]
    Packet(PacketConfig),
    /// A TAP or TUN device.
    Tap(TapConfig),
    /// A DPDK device; needs a build with feature `dpdk`.
    Dpdk(DpdkConfig),
    /// A device over an RDMA NIC; needs a build with feature `rdma`.
    Rdma(RdmaConfig),
    /// One end of an in-memory link.
    Mem(Box<MemDevice>),
    /// Any other device.
    Custom(OpenDevice),
}

impl DeviceConfig {
    /// Size of packet buffers for frames of one packet each.
    pub fn frame_size(&self) -> FrameSize {
        match self {
            Self::Dpdk(_) => dpdk::RECOMMENDED_FRAME_SIZE,
            Self::Rdma(_) => FrameSize::K4,
            _ => FrameSize::K2,
        }
    }

    /// Interface of which the device can share the kernel's addresses.
    pub(crate) fn shareable_interface(&self) -> Option<&str> {
        match self {
            #[cfg(feature = "xdp")]
            Self::Xdp(config) => Some(&config.interface),
            #[cfg(all(feature = "packet", feature = "xdp"))]
            Self::Auto(config) => Some(&config.interface),
            #[cfg(all(feature = "packet", feature = "xdp"))]
            Self::Packet(config) => Some(&config.interface),
            _ => None,
        }
    }

    /// Interface of the kernel on which the device opens.
    pub(crate) fn interface(&self) -> Option<&str> {
        match self {
            #[cfg(feature = "xdp")]
            Self::Xdp(config) => Some(&config.interface),
            #[cfg(all(feature = "packet", feature = "xdp"))]
            Self::Auto(config) => Some(&config.interface),
            #[cfg(feature = "packet")]
            Self::Packet(config) => Some(&config.interface),
            _ => None,
        }
    }

    /// Shares the receive queues of the interface out among network cores, as far as the kind of
    /// device can.
    pub(crate) fn share_queues(&mut self, cores: usize) {
        match self {
            #[cfg(feature = "xdp")]
            Self::Xdp(config) => config.cores = cores,
            #[cfg(all(feature = "packet", feature = "xdp"))]
            Self::Auto(config) => config.cores = cores,
            #[cfg(feature = "packet")]
            Self::Packet(config) => config.cores = cores,
            Self::Dpdk(config) => config.cores = cores,
            // Other devices have one queue, whatever the number of cores.
            _ => {}
        }
    }

    /// True if the kernel processes each frame before the device receives it.
    pub(crate) fn is_fed_by_kernel(&self) -> bool {
        match self {
            #[cfg(feature = "packet")]
            Self::Packet(_) => true,
            Self::Tap(_) => true,
            _ => false,
        }
    }

    /// True if a device of another process may be open on the same interface.
    pub(crate) fn allows_other_process(&self) -> bool {
        match self {
            #[cfg(feature = "packet")]
            Self::Packet(_) => true,
            _ => false,
        }
    }

    /// Clones the configuration, or takes it out if it can be used only once.
    pub(crate) fn clone_or_take(&mut self) -> Self {
        match self {
            #[cfg(feature = "xdp")]
            Self::Xdp(config) => Self::Xdp(config.clone()),
            #[cfg(all(feature = "packet", feature = "xdp"))]
            Self::Auto(config) => Self::Auto(config.clone()),
            #[cfg(feature = "packet")]
            Self::Packet(config) => Self::Packet(config.clone()),
            Self::Tap(config) => Self::Tap(config.clone()),
            Self::Dpdk(config) => Self::Dpdk(config.clone()),
            Self::Rdma(config) => Self::Rdma(config.clone()),
            Self::Mem(_) | Self::Custom(_) => {
                let used = || io::Error::other("this device can be opened only once");
                std::mem::replace(self, Self::Custom(Box::new(move |_| Err(used()))))
            }
        }
    }
}

impl From<MemDevice> for DeviceConfig {
    fn from(device: MemDevice) -> Self {
        Self::Mem(Box::new(device))
    }
}

#[cfg(feature = "xdp")]
impl From<XdpConfig> for DeviceConfig {
    fn from(config: XdpConfig) -> Self {
        Self::Xdp(config)
    }
}

#[cfg(feature = "packet")]
impl From<PacketConfig> for DeviceConfig {
    fn from(config: PacketConfig) -> Self {
        Self::Packet(config)
    }
}

impl From<TapConfig> for DeviceConfig {
    fn from(config: TapConfig) -> Self {
        Self::Tap(config)
    }
}

impl From<DpdkConfig> for DeviceConfig {
    fn from(config: DpdkConfig) -> Self {
        Self::Dpdk(config)
    }
}

impl From<RdmaConfig> for DeviceConfig {
    fn from(config: RdmaConfig) -> Self {
        Self::Rdma(config)
    }
}
