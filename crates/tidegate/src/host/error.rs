//! Errors of a host configuration.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use tidegate_device::rdma::RdmaError;
use tidegate_wire::IpCidr;

/// Error in a [`HostConfig`](super::HostConfig): the field at fault, and its remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostConfigError {
    /// The text names no I/O method.
    #[error(
        "{0:?} is not an I/O method: expected auto, xdp, packet, tap, dpdk:DEVICE, rdma:DEVICE or, where \
         supported, kernel"
    )]
    UnknownDevice(String),
    /// The I/O method is not part of this build.
    #[error(
        "I/O method {0} is not part of this build: enable the feature `{0}` of the crate `tidegate`"
    )]
    FeatureDisabled(&'static str),
    /// The stack has neither addresses of its own nor those of the host.
    #[error(
        "no address: set addresses with their prefix lengths for a separate host, or share the \
         addresses of this host"
    )]
    NoAddress,
    /// An own address cannot be used.
    #[error("own address {address}: {problem}")]
    Address {
        /// The address.
        address: IpCidr,
        /// Reason, and what to do.
        problem: &'static str,
    },
    /// A gateway cannot be used.
    #[error("gateway {gateway}: {problem}")]
    Gateway {
        /// The gateway.
        gateway: IpAddr,
        /// Reason, and what to do.
        problem: &'static str,
    },
    /// There are too few packet buffers to serve.
    #[error("{0} frames are too few to fill the rings of a device: use at least 64")]
    TooFewFrames(u32),
    /// The device needs an interface, and none is named.
    #[error("no network interface: name the interface; `ip link` lists them")]
    NoInterface,
    /// AF_XDP and RDMA NICs cannot segment.
    #[error(
        "segmentation needs AF_PACKET, TAP or DPDK: AF_XDP and RDMA pass frames as they are on the wire"
    )]
    SegmentationOnXdp,
    /// A number of queues is set for a device other than DPDK's.
    #[error("a number of queues is for DPDK; for AF_XDP list the receive queues")]
    QueueCountWithoutDpdk,
    /// An interface, the value, is named beside a DPDK device.
    #[error(
        "interface {0}: with DPDK the device names its interface, as \
         dpdk:net_af_packet0,iface={0}"
    )]
    InterfaceWithDpdk(String),
    /// An interface, the value, is named beside an RDMA device.
    #[error("interface {0}: with RDMA the device stands for its interface, as rdma:rxe0")]
    InterfaceWithRdma(String),
    /// The RDMA device is not named as it should be.
    #[error(transparent)]
    Rdma(#[from] RdmaError),
    /// The capture file cannot be created.
    #[error("{}: {source}", path.display())]
    Capture {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}
