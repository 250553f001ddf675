//! The `tap` port: a TAP or TUN device, with the kernel as the only host at
//! the other end.
//!
//! The device is a network interface of the kernel's; what the kernel sends
//! into it, the port receives. Frames have a virtio header, so checksums need
//! not be summed in either direction. A device that the port made goes away
//! with it, unless it is left to the next port. The kernel passes one frame per
//! system call here, so this port is for connecting to the host and for tests,
//! not for speed.

mod sys;

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tidegate_memory::{Arena, FrameSize, HEADROOM_BYTES};
use tidegate_wire::{DropReason, IpCidr, MacAddr, Medium};

use crate::buffer::LINK_HEADER_BYTES;
use crate::netlink::{self, Interface, NetlinkError};
use crate::{Burst, Capabilities, Left, Port, PortCounters, buffer, vnet};

/// How to open a [`TapPort`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapConfig {
    /// The name of the device, made if it does not exist; `tap%d` lets the
    /// kernel choose a number.
    pub name: String,
    /// TAP for [`Medium::Ethernet`], TUN for [`Medium::Ip`].
    pub medium: Medium,
    /// The hardware address of the port's end. `None` for the kernel end's
    /// with another last bit. Without meaning on [`Medium::Ip`].
    pub mac: Option<MacAddr>,
    /// The MTU to give to the device; `None` leaves it as it is (1500 on a new
    /// one).
    pub mtu: Option<u32>,
    /// Addresses to give to the kernel's end.
    pub kernel_addresses: Vec<IpCidr>,
    /// Whether to set the kernel's end up.
    pub up: bool,
    /// Lets the kernel hand over and take segments that are not cut
    /// ([`Capabilities::segmentation`]). Needs frames of
    /// [`FrameSize::K64`].
    pub segmentation: bool,
}

impl TapConfig {
    /// A TAP device that is up, without addresses.
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
}

/// Why a [`TapPort`] could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The name cannot be an interface's.
    #[error("{0:?} cannot be the name of an interface: it has 1 to 15 bytes, no slash or space")]
    Name(String),
    /// The kernel has no TUN driver, or this container no device node.
    #[error("cannot open /dev/net/tun: {0}; load the driver with `modprobe tun`")]
    Driver(io::Error),
    /// The device node is closed to this user.
    #[error(
        "/dev/net/tun is closed to this user; most systems open it to all, since making a \
         device needs CAP_NET_ADMIN as well: `chmod 0666 /dev/net/tun`"
    )]
    DeviceNode,
    /// TAP devices are not allowed.
    #[error(
        "a TAP device needs CAP_NET_ADMIN: run as root, or inside `unshare -rn` to try it out, \
         or have root make one for you: `ip tuntap add dev {0} mode tap vnet_hdr user $USER`"
    )]
    Permission(String),
    /// Another program has the device.
    #[error("the device {0} is in use by another program")]
    Busy(String),
    /// There is an interface of this name, but of another kind.
    #[error(
        "the interface {0} exists and is not a {1} device that this port can use (single queue, \
         made with `vnet_hdr`): choose another name, or remove it with `ip link del {0}`"
    )]
    Kind(String, &'static str),
    /// A frame of the device may not fit into a buffer.
    #[error("the MTU of {name} is {mtu}, but a buffer has room for {room}: use larger buffers")]
    Mtu {
        /// The device.
        name: String,
        /// Its MTU in bytes.
        mtu: usize,
        /// The largest MTU that would do.
        room: usize,
    },
    /// What is not cut does not fit into a frame.
    #[error("segmentation needs frames of 64 KiB: open the port with an arena of `FrameSize::K64`")]
    SmallFrames,
    /// The kernel refused a step.
    #[error("cannot {step} on {name}: {source}")]
    Setup {
        /// What was tried.
        step: &'static str,
        /// The device.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The device could not be looked at or set up.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
}

/// Frames of a TAP or TUN device.
#[derive(Debug)]
pub struct TapPort {
    capabilities: Capabilities,
    counters: PortCounters,
    name: String,
    index: u32,
    /// Which work on frames the kernel may leave to us, if it was not told yet.
    offload: Option<libc::c_uint>,
    device: OwnedFd,
}

impl TapPort {
    /// Makes or attaches to the device.
    ///
    /// # Errors
    /// See [`TapError`]; a device that was made is gone again.
    pub fn open(config: &TapConfig, arena: &mut Arena) -> Result<Self, TapError> {
        check_frames(config, arena)?;
        let (device, name) = attach(config)?;
        sys::set_offload(device.as_fd(), offload(config)).map_err(|source| TapError::Setup {
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
        Self::of(config, device, name, arena)
    }

    /// Opens the port on a device that another one has left ([`Left::Tap`]), maybe
    /// in another process. What has arrived meanwhile waits there. The device stays
    /// as it is, but that [`Port::go_live`] tells the kernel which work on frames it
    /// may leave to us. If it is not the device of the configuration, this is
    /// [`TapPort::open`].
    ///
    /// # Errors
    /// As [`TapPort::open`].
    pub fn open_on(
        device: OwnedFd,
        config: &TapConfig,
        arena: &mut Arena,
    ) -> Result<Self, TapError> {
        let (name, flags) = sys::attached(device.as_fd()).map_err(|source| {
            let name = config.name.clone();
            TapError::Setup { step: "look at what was left", name, source }
        })?;
        // The kernel has completed a name with a place for a number.
        if name != config.name && !config.name.contains('%') {
            return Self::open(config, arena);
        }
        check_frames(config, arena)?;
        let kinds = libc::IFF_TAP | libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if flags & (kinds | libc::IFF_MULTI_QUEUE) != flags_of(config.medium) {
            return Err(TapError::Kind(name, kind_of(config.medium)));
        }
        let port = Self::of(config, device, name, arena)?;
        Ok(Self { offload: Some(offload(config)), ..port })
    }

    fn of(
        config: &TapConfig,
        device: OwnedFd,
        name: String,
        arena: &Arena,
    ) -> Result<Self, TapError> {
        let interface = Interface::by_name(&name)?;
        // One byte stays free, so that a frame that was cut off is known.
        let room = arena.frame_bytes() - usize::from(HEADROOM_BYTES) - LINK_HEADER_BYTES - 1;
        if interface.mtu > room {
            return Err(TapError::Mtu { name, mtu: interface.mtu, room });
        }
        Ok(Self {
            capabilities: Capabilities {
                kind: "tap",
                detail: format!("{} device {name}", kind_of(config.medium)),
                medium: config.medium,
                mac: port_mac(config, &interface).0,
                mtu: interface.mtu,
                receive_checksum: true,
                transmit_checksum: true,
                segmentation: config.segmentation,
                queues: 1,
            },
            counters: PortCounters::default(),
            name,
            index: interface.index,
            offload: None,
            device,
        })
    }

    /// The name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kernel's number for the device.
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

/// What is not cut needs large frames.
fn check_frames(config: &TapConfig, arena: &Arena) -> Result<(), TapError> {
    match config.segmentation && arena.frame_bytes() < FrameSize::K64.bytes() {
        true => Err(TapError::SmallFrames),
        false => Ok(()),
    }
}

/// Which work on frames the kernel may leave to us.
fn offload(config: &TapConfig) -> libc::c_uint {
    let segmentation = libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    libc::TUN_F_CSUM | if config.segmentation { segmentation } else { 0 }
}

/// What a device of this port's is.
fn flags_of(medium: Medium) -> libc::c_int {
    let kind = match medium {
        Medium::Ethernet => libc::IFF_TAP,
        Medium::Ip => libc::IFF_TUN,
    };
    kind | libc::IFF_NO_PI | libc::IFF_VNET_HDR
}

fn attach(config: &TapConfig) -> Result<(OwnedFd, String), TapError> {
    let name = &config.name;
    let usable = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
    if name.is_empty() || name.len() > sys::NAME_BYTES || !name.bytes().all(usable) {
        return Err(TapError::Name(name.clone()));
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let device =
        rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(|error| match error {
            Errno::ACCESS | Errno::PERM => TapError::DeviceNode,
            _ => TapError::Driver(error.into()),
        })?;
    let name = sys::attach(device.as_fd(), name, flags_of(config.medium)).map_err(|source| {
        let name = name.clone();
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => TapError::Permission(name),
            Some(libc::EBUSY) => TapError::Busy(name),
            Some(libc::EINVAL) => TapError::Kind(name, kind_of(config.medium)),
            _ => TapError::Setup { step: "make the device", name, source },
        }
    })?;
    Ok((device, name))
}

/// The hardware address of our end. It must not be the kernel's: two hosts are
/// on this link.
fn port_mac(config: &TapConfig, interface: &Interface) -> MacAddr {
    if config.medium == Medium::Ip {
        return MacAddr::UNSPECIFIED;
    }
    config.mac.unwrap_or_else(|| {
        let mut octets = interface.mac.0;
        // Locally administered, and no group's.
        octets[0] = octets[0] & 0xfe | 0x02;
        octets[5] ^= 1;
        MacAddr(octets)
    })
}

impl Port for TapPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        let mut taken = 0;
        for _ in 0..quota {
            let Some(mut frame) = buffer::blank(arena) else { break };
            let mut header: vnet::Raw = [0; vnet::BYTES];
            let room = frame.len();
            let read = rustix::io::readv(
                &self.device,
                &mut [IoSliceMut::new(&mut header), IoSliceMut::new(arena.bytes_mut(&mut frame))],
            );
            match read.map_err(io::Error::from) {
                Ok(bytes) => {
                    let len = bytes.saturating_sub(vnet::BYTES);
                    let known = vnet::decode(&header, len);
                    let takes = self.capabilities.segmentation && known.segment_bytes > 0;
                    if len >= room || known.merged && !takes {
                        arena.free(frame);
                        self.counters.drops.count(DropReason::FrameTooLong);
                        continue;
                    }
                    frame.truncate(len);
                    frame.set_checksum(known.checksum);
                    frame.set_segment_bytes(known.segment_bytes);
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
                rustix::io::writev(&self.device, &[IoSlice::new(&header), IoSlice::new(data)]);
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
                    // The device was deleted under us.
                    Some(libc::EBADFD) => {
                        burst.push_front(frame);
                        return Err(error);
                    }
                    // Not a frame, or the device is down.
                    _ => self.counters.drops.count(DropReason::TransmitFailed),
                },
            }
            arena.free(frame);
            taken += 1;
        }
        Ok(taken)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.device.as_fd())
    }

    fn counters(&mut self) -> PortCounters {
        self.counters.clone()
    }

    fn close_for_now(self: Box<Self>, _: &mut Arena, _: bool) -> Option<Left> {
        Some(Left::Tap(self.device))
    }

    fn go_live(&mut self) -> io::Result<()> {
        let offload = self.offload.take();
        offload.map_or(Ok(()), |offload| sys::set_offload(self.device.as_fd(), offload))
    }
}
