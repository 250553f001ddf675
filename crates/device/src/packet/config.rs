//! Configuration of a packet device, and the errors of opening it.

use std::io;
use std::net::IpAddr;

use crate::capabilities::MissingCapabilities;
use crate::netlink::NetlinkError;

/// Mechanism that takes received frames from the kernel.
///
/// Over veth, the round trip of a single frame is 8 µs with system calls and 1 ms with rings. A
/// frame of a full burst costs the reader 0.7 µs with system calls and 0.05 µs with a ring. The
/// ring costs 0.2 µs more on the core that delivers the frame, which makes the copy. System
/// calls are therefore the default, and a ring is for a device that is always busy.
/// `examples/packet_receive_modes.rs` measures both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveMode {
    /// `recvmmsg`: a frame can be read as soon as it arrives, at the cost of a system call per
    /// burst.
    Syscalls,
    /// A TPACKET_V3 ring: no system call while frames arrive. The kernel hands over a block only
    /// when it is full or a millisecond old (a timer tick on kernels before 6.18), so a single
    /// frame waits that long. Without root, a ring also holds more than a socket buffer may.
    Ring,
}

/// Selects the frames to receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Steering {
    /// Every frame that arrives at the interface.
    Everything,
    /// IP packets to these addresses, and their ARP and neighbour discovery messages. A socket
    /// filter discards all other frames in the kernel. No address may be one of the kernel's
    /// addresses.
    Addresses(Vec<IpAddr>),
    /// Packets to the ports of the rules that [`Device::set_steering`](crate::Device::set_steering)
    /// adds, in frames of this VLAN or untagged frames. The kernel's stack does not receive these
    /// packets, so the addresses may be the kernel's. Needs Linux 6.6.
    #[cfg(feature = "xdp")]
    Ports {
        /// VLAN ID; `None`: untagged frames.
        vlan: Option<u16>,
    },
}

/// Settings of a [`PacketDevice`](super::PacketDevice).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PacketConfig {
    /// Name of the interface.
    pub interface: String,
    /// Frames to receive.
    pub steering: Steering,
    /// Receive mode.
    pub receive: ReceiveMode,
    /// Memory for received frames in bytes: the ring, or the socket buffer, which the kernel may
    /// limit (`sysctl net.core.rmem_max`) without root.
    pub buffer_bytes: usize,
    /// Bypasses the queueing discipline: faster, but `tc` and its queue do not see the frames.
    pub qdisc_bypass: bool,
    /// Promiscuous mode: also receives frames for other hardware addresses.
    pub promiscuous: bool,
    /// Segmentation offload: the kernel segments transmitted frames and coalesces received ones
    /// ([`Capabilities::segmentation`](crate::Capabilities::segmentation)). Needs frames of
    /// [`FrameSize::K64`](tidegate_memory::FrameSize::K64). Frames go through
    /// the queueing discipline, where the kernel segments. With CAP_NET_ADMIN the interface
    /// coalesces no more than fits into a frame while the device is open (`gro_max_size`).
    pub segmentation: bool,
    /// Joins this fanout group: flows are distributed by hash over all devices of the group
    /// (`PACKET_FANOUT_HASH`).
    pub fanout: Option<u16>,
    /// Number of network cores that share the flows, at least 1: the device is that of core 0, and
    /// offers one for each of the others ([`Device::offer_queues`](crate::Device::offer_queues)), in
    /// a fanout group of their own. Only with addresses of the device's own.
    pub cores: usize,
    /// Reason for this device, as part of its description.
    pub reason: Option<String>,
}

impl PacketConfig {
    /// All frames of this interface, with the default settings.
    pub fn new(interface: impl Into<String>) -> Self {
        Self {
            interface: interface.into(),
            steering: Steering::Everything,
            receive: ReceiveMode::Syscalls,
            buffer_bytes: 4 << 20,
            qdisc_bypass: true,
            promiscuous: false,
            segmentation: false,
            fanout: None,
            cores: 1,
            reason: None,
        }
    }

    /// Sets the frames to receive.
    pub fn steering(self, steering: Steering) -> Self {
        Self { steering, ..self }
    }

    /// Sets the receive mode.
    pub fn receive(self, receive: ReceiveMode) -> Self {
        Self { receive, ..self }
    }

    /// Sets the memory for received frames in bytes.
    pub fn buffer_bytes(self, buffer_bytes: usize) -> Self {
        Self { buffer_bytes, ..self }
    }

    /// Sets whether frames bypass the queueing discipline.
    pub fn qdisc_bypass(self, qdisc_bypass: bool) -> Self {
        Self { qdisc_bypass, ..self }
    }

    /// Sets promiscuous mode.
    pub fn promiscuous(self, promiscuous: bool) -> Self {
        Self { promiscuous, ..self }
    }

    /// Sets segmentation offload.
    pub fn segmentation(self, segmentation: bool) -> Self {
        Self { segmentation, ..self }
    }

    /// Sets the fanout group to join.
    pub fn fanout(self, fanout: impl Into<Option<u16>>) -> Self {
        Self { fanout: fanout.into(), ..self }
    }

    /// Sets the number of network cores that share the flows.
    pub fn cores(self, cores: usize) -> Self {
        Self { cores, ..self }
    }

    /// Sets the reason for this device, which [`Capabilities::detail`](crate::Capabilities::detail)
    /// ends with.
    pub fn reason(self, reason: impl Into<Option<String>>) -> Self {
        Self { reason: reason.into(), ..self }
    }
}

/// Error of opening a [`PacketDevice`](super::PacketDevice).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PacketError {
    /// The interface does not exist, or a netlink request failed.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Packet sockets are not allowed.
    #[error(
        "not permitted to open a packet socket: {0}, or try it inside `unshare -rn`, which has \
         network devices of its own"
    )]
    Permission(MissingCapabilities),
    /// The interface is down.
    #[error("the interface {0} is down: `ip link set {0} up`")]
    Down(String),
    /// The interface does not carry Ethernet frames.
    #[error(
        "the interface {0} does not carry Ethernet frames, so a packet device cannot use it: for \
         a TUN device open a tap device on it"
    )]
    NotEthernet(String),
    /// The kernel has the address too.
    #[error(
        "{address} is a kernel address on {interface}: with a packet device the kernel also sees \
         every packet and would answer \"port unreachable\"; share the address (`--shared`), which \
         diverts ports only, or choose an address that the kernel does not have"
    )]
    SharedAddress {
        /// The address.
        address: IpAddr,
        /// The interface that has it.
        interface: String,
    },
    /// Ports cannot be diverted from the kernel.
    #[cfg(feature = "xdp")]
    #[error(
        "cannot divert ports of {interface} from the kernel: {source}; sharing an address on \
         AF_PACKET needs Linux 6.6 (tcx): use AF_XDP (`--io xdp`) or an own address (`--address`)"
    )]
    Divert {
        /// The interface.
        interface: String,
        /// Error of the BPF programs.
        source: Box<aya::EbpfError>,
    },
    /// The buffer is too small or too large.
    #[error("a buffer of {0} bytes is out of range: use 64 KiB to 1 GiB")]
    BufferSize(usize),
    /// A coalesced frame does not fit into a buffer.
    #[error(
        "segmentation needs frames of 64 KiB and `recvmmsg`: open the device with an arena of \
         `FrameSize::K64` and `ReceiveMode::Syscalls`"
    )]
    SmallFrames,
    /// The kernel refused a setup step.
    #[error("cannot {step} on {interface}: {source}")]
    Setup {
        /// The step that failed.
        step: &'static str,
        /// The interface.
        interface: String,
        /// The kernel's error.
        source: io::Error,
    },
}
