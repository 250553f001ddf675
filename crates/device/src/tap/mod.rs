//! The `tap` device: a TAP or TUN interface, with the kernel as the only host at the other end.
//!
//! The kernel sees a network interface; packets that the kernel sends into the interface are
//! received here. Frames have a virtio header, so neither direction needs to compute checksums. An
//! interface that this device created is removed with it, unless it is handed over to the next
//! device. The kernel passes one frame per system call, so this device is for connecting to the
//! host and for tests, not for speed.

mod state_interface;
mod sys;

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tidegate_memory::{Arena, FrameSize, HEADROOM_BYTES};
use tidegate_wire::{DropReason, IpCidr, MacAddr, Medium};

use crate::buffer::LINK_HEADER_BYTES;
use crate::capabilities::{MissingCapabilities, RequiredCapabilities};
use crate::netlink::{self, Interface, NetlinkError};
use crate::{Burst, Capabilities, Device, DeviceCounters, HandoverState, buffer, vnet};

pub use self::state_interface::StateInterface;

/// Settings of a [`TapDevice`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TapConfig {
    /// Name of the interface, created if it does not exist; with `tap%d` the kernel chooses a
    /// number.
    pub name: String,
    /// TAP for [`Medium::Ethernet`], TUN for [`Medium::Ip`].
    pub medium: Medium,
    /// Hardware address of this end. `None` derives it from the kernel's end by flipping the last
    /// bit and making it locally administered. Unused on [`Medium::Ip`].
    pub mac: Option<MacAddr>,
    /// MTU to set on the interface; `None` leaves it unchanged (1500 on a new interface).
    pub mtu: Option<u32>,
    /// Addresses to add to the kernel's end.
    pub kernel_addresses: Vec<IpCidr>,
    /// Sets the kernel's end up.
    pub up: bool,
    /// Segmentation offload: the kernel hands over and accepts frames that are not segmented
    /// ([`Capabilities::segmentation`]). Needs frames of [`FrameSize::K64`].
    pub segmentation: bool,
}

impl TapConfig {
    /// Settings of a TAP interface that is up, without addresses.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            medium: Medium::Ethernet,
            mac: None,
            mtu: None,
            kernel_addresses: Vec::new(),
            up: true,
            segmentation: false,
        }
    }

    /// Sets the kind of interface: TAP for Ethernet, TUN for IP.
    pub fn medium(self, medium: Medium) -> Self {
        Self { medium, ..self }
    }

    /// Sets the hardware address of this end; `None` derives it from the kernel's end.
    pub fn mac(self, mac: impl Into<Option<MacAddr>>) -> Self {
        Self { mac: mac.into(), ..self }
    }

    /// Sets the MTU of the interface; `None` leaves it unchanged.
    pub fn mtu(self, mtu: impl Into<Option<u32>>) -> Self {
        Self { mtu: mtu.into(), ..self }
    }

    /// Sets the addresses to add to the kernel's end.
    pub fn kernel_addresses(self, kernel_addresses: Vec<IpCidr>) -> Self {
        Self { kernel_addresses, ..self }
    }

    /// Sets whether the kernel's end is set up.
    pub fn up(self, up: bool) -> Self {
        Self { up, ..self }
    }

    /// Sets segmentation offload.
    pub fn segmentation(self, segmentation: bool) -> Self {
        Self { segmentation, ..self }
    }
}

/// Error of opening a [`TapDevice`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TapError {
    /// The name is not a valid interface name.
    #[error("{0:?} is not a valid interface name: use 1 to 15 bytes without slash or space")]
    Name(String),
    /// The kernel has no TUN driver, or the container no device node.
    #[error("cannot open /dev/net/tun: {0}; load the driver with `modprobe tun`")]
    Driver(io::Error),
    /// This user may not open the device node.
    #[error(
        "this user may not open /dev/net/tun; most systems allow it to all, since creating a \
         device needs CAP_NET_ADMIN as well: `chmod 0666 /dev/net/tun`"
    )]
    DeviceNode,
    /// TAP devices are not allowed.
    #[error(
        "not permitted to open the TAP device {name}: {why}, or try it inside `unshare -rn`, or have \
         root create one for you: `ip tuntap add dev {name} mode tap vnet_hdr user $USER`"
    )]
    Permission {
        /// Name of the device.
        name: String,
        /// Missing capabilities, if any.
        why: MissingCapabilities,
    },
    /// Another process has the device.
    #[error("the device {0} is in use by another process")]
    Busy(String),
    /// An interface of this name exists, but of another kind.
    #[error(
        "the interface {0} exists and is not a {1} device that can be used here (single queue, \
         created with `vnet_hdr`): choose another name, or remove it with `ip link del {0}`"
    )]
    Kind(String, &'static str),
    /// A frame of the device may not fit into a buffer.
    #[error("the MTU of {name} is {mtu}, but a buffer holds at most {max_mtu}: use larger buffers")]
    Mtu {
        /// Name of the device.
        name: String,
        /// MTU of the device in bytes.
        mtu: usize,
        /// Largest MTU that fits into a buffer, in bytes.
        max_mtu: usize,
    },
    /// Frames that are not segmented do not fit into a buffer.
    #[error("segmentation needs frames of 64 KiB: use an arena of `FrameSize::K64`")]
    SmallFrames,
    /// The kernel refused a setup step.
    #[error("cannot {step} on {name}: {source}")]
    Setup {
        /// The step that failed.
        step: &'static str,
        /// Name of the device.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// A netlink request failed.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
}

/// TAP or TUN device.
#[derive(Debug)]
pub struct TapDevice {
    capabilities: Capabilities,
    counters: DeviceCounters,
    name: String,
    index: u32,
    /// Offload flags that the kernel has not been told yet.
    pending_offload: Option<libc::c_uint>,
    fd: OwnedFd,
}

impl TapDevice {
    /// Creates the interface, or attaches to an existing one.
    ///
    /// # Errors
    /// See [`TapError`]; a failed call removes an interface that it created.
    pub fn open(config: &TapConfig, arena: &mut Arena) -> Result<Self, TapError> {
        check_frames(config, arena)?;
        let (fd, name) = attach(config)?;
        sys::set_offload(fd.as_fd(), offload_flags(config)).map_err(|source| TapError::Setup {
            step: "turn on checksum and segmentation offload",
            name: name.clone(),
            source,
        })?;
        let index = Interface::by_name(&name)?.index;
        if let Some(mtu) = config.mtu {
            netlink::set_mtu(index, mtu)?;
        }
        if config.up {
            netlink::set_up(index)?;
        }
        for &address in &config.kernel_addresses {
            netlink::add_address(index, address)?;
        }
        Self::with_fd(config, fd, name, arena)
    }

    /// Opens the device on an interface that another device handed over
    /// ([`HandoverState::Tap`]), possibly from another process.
    ///
    /// Frames that have arrived meanwhile are waiting. The interface stays unchanged, except
    /// that [`Device::take_over`] sets the offload flags. With another interface than configured,
    /// this is [`TapDevice::open`].
    ///
    /// # Errors
    /// As [`TapDevice::open`].
    pub fn open_from_handover(
        fd: OwnedFd,
        config: &TapConfig,
        arena: &mut Arena,
    ) -> Result<Self, TapError> {
        let (name, flags) = sys::attached(fd.as_fd()).map_err(|source| {
            let name = config.name.clone();
            TapError::Setup { step: "read the state of the inherited device", name, source }
        })?;
        // The kernel has completed a name with a number in place of `%d`.
        if name != config.name && !config.name.contains('%') {
            return Self::open(config, arena);
        }
        check_frames(config, arena)?;
        let kinds = libc::IFF_TAP | libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if flags & (kinds | libc::IFF_MULTI_QUEUE) != device_flags(config.medium) {
            return Err(TapError::Kind(name, kind_of(config.medium)));
        }
        let device = Self::with_fd(config, fd, name, arena)?;
        Ok(Self { pending_offload: Some(offload_flags(config)), ..device })
    }

    fn with_fd(
        config: &TapConfig,
        fd: OwnedFd,
        name: String,
        arena: &Arena,
    ) -> Result<Self, TapError> {
        let interface = Interface::by_name(&name)?;
        // One byte stays free, so that a truncated frame is detected.
        let max_mtu = arena.frame_bytes() - usize::from(HEADROOM_BYTES) - LINK_HEADER_BYTES - 1;
        if interface.mtu > max_mtu {
            return Err(TapError::Mtu { name, mtu: interface.mtu, max_mtu });
        }
        Ok(Self {
            capabilities: Capabilities {
                kind: "tap",
                detail: format!("{} device {name}", kind_of(config.medium)),
                medium: config.medium,
                mac: device_mac(config, &interface).0,
                mtu: interface.mtu,
                receive_checksum: true,
                transmit_checksum: true,
                segmentation: config.segmentation,
                queues: 1,
            },
            counters: DeviceCounters::default(),
            name,
            index: interface.index,
            pending_offload: None,
            fd,
        })
    }

    /// Name of the interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Index of the interface.
    pub fn index(&self) -> u32 {
        self.index
    }
}

fn kind_of(medium: Medium) -> &'static str {
    match medium {
        Medium::Ethernet => "TAP",
        Medium::Ip => "TUN",
    }
}

/// Checks that buffers are large enough for frames that are not segmented.
fn check_frames(config: &TapConfig, arena: &Arena) -> Result<(), TapError> {
    match config.segmentation && arena.frame_bytes() < FrameSize::K64.bytes() {
        true => Err(TapError::SmallFrames),
        false => Ok(()),
    }
}

/// Offload flags (`TUN_F_*`): work on frames that the kernel may leave to this end.
fn offload_flags(config: &TapConfig) -> libc::c_uint {
    let segmentation = libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    libc::TUN_F_CSUM | if config.segmentation { segmentation } else { 0 }
}

/// Interface flags of a device that this module can use.
fn device_flags(medium: Medium) -> libc::c_int {
    let kind = match medium {
        Medium::Ethernet => libc::IFF_TAP,
        Medium::Ip => libc::IFF_TUN,
    };
    kind | libc::IFF_NO_PI | libc::IFF_VNET_HDR
}

/// Opens the driver for an interface of this name.
fn open_driver(name: &str) -> Result<OwnedFd, TapError> {
    let usable = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
    if name.is_empty() || name.len() > sys::NAME_BYTES || !name.bytes().all(usable) {
        return Err(TapError::Name(name.to_owned()));
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(|error| match error {
        Errno::ACCESS | Errno::PERM => TapError::DeviceNode,
        _ => TapError::Driver(error.into()),
    })
}

fn permission_error(name: &str) -> TapError {
    TapError::Permission { name: name.to_owned(), why: RequiredCapabilities::TAP.explain() }
}

fn attach(config: &TapConfig) -> Result<(OwnedFd, String), TapError> {
    let name = &config.name;
    let fd = open_driver(name)?;
    let name = sys::attach(fd.as_fd(), name, device_flags(config.medium)).map_err(|source| {
        let name = name.clone();
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => permission_error(&name),
            Some(libc::EBUSY) => TapError::Busy(name),
            Some(libc::EINVAL) => TapError::Kind(name, kind_of(config.medium)),
            _ => TapError::Setup { step: "create the device", name, source },
        }
    })?;
    Ok((fd, name))
}

/// Hardware address of this end. It must differ from the kernel's: two hosts are on this link.
fn device_mac(config: &TapConfig, interface: &Interface) -> MacAddr {
    if config.medium == Medium::Ip {
        return MacAddr::UNSPECIFIED;
    }
    config.mac.unwrap_or_else(|| {
        let mut octets = interface.mac.0;
        // Locally administered, and not a group address.
        octets[0] = octets[0] & 0xfe | 0x02;
        octets[5] ^= 1;
        MacAddr(octets)
    })
}

impl Device for TapDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        let mut taken = 0;
        for _ in 0..quota {
            let Some(mut frame) = buffer::alloc_receive_buffer(arena) else { break };
            let mut header: vnet::RawHeader = [0; vnet::HEADER_BYTES];
            let capacity = frame.len();
            let read = rustix::io::readv(
                &self.fd,
                &mut [IoSliceMut::new(&mut header), IoSliceMut::new(arena.bytes_mut(&mut frame))],
            );
            match read.map_err(io::Error::from) {
                Ok(bytes) => {
                    let len = bytes.saturating_sub(vnet::HEADER_BYTES);
                    let rx_offload = vnet::decode(&header, len);
                    let is_accepted =
                        self.capabilities.segmentation && rx_offload.segment_bytes > 0;
                    if len >= capacity || rx_offload.merged && !is_accepted {
                        arena.free(frame);
                        self.counters.drops.count(DropReason::FrameTooLong);
                        continue;
                    }
                    frame.truncate(len);
                    frame.set_checksum(rx_offload.checksum);
                    frame.set_segment_bytes(rx_offload.segment_bytes);
                    self.counters.received += 1;
                    self.counters.received_bytes += len as u64;
                    burst.push_back(frame);
                    taken += 1;
                }
                Err(error) => {
                    arena.free(frame);
                    match error.kind() {
                        io::ErrorKind::WouldBlock => break,
                        io::ErrorKind::Interrupted => {}
                        _ => return Err(error),
                    }
                }
            }
        }
        Ok(taken)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let mut taken = 0;
        while let Some(frame) = burst.pop_front() {
            let data = arena.bytes(&frame);
            let header = vnet::encode(self.capabilities.medium, &frame, data);
            let written =
                rustix::io::writev(&self.fd, &[IoSlice::new(&header), IoSlice::new(data)]);
            match written.map_err(io::Error::from) {
                Ok(_) => {
                    self.counters.transmitted += 1;
                    self.counters.transmitted_bytes += frame.len() as u64;
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {
                        burst.push_front(frame);
                        continue;
                    }
                    Some(libc::EAGAIN | libc::ENOBUFS) => {
                        burst.push_front(frame);
                        break;
                    }
                    // The interface was deleted meanwhile.
                    Some(libc::EBADFD) => {
                        burst.push_front(frame);
                        return Err(error);
                    }
                    // Not a frame, or the interface is down.
                    _ => self.counters.drops.count(DropReason::TransmitFailed),
                },
            }
            arena.free(frame);
            taken += 1;
        }
        Ok(taken)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }

    fn counters(&mut self) -> DeviceCounters {
        self.counters.clone()
    }

    fn close_for_handover(self: Box<Self>, _: &mut Arena, _: bool) -> Option<HandoverState> {
        Some(HandoverState::Tap(self.fd))
    }

    fn take_over(&mut self) -> io::Result<()> {
        let offload = self.pending_offload.take();
        offload.map_or(Ok(()), |offload| sys::set_offload(self.fd.as_fd(), offload))
    }
}
