//! Network devices: sources and sinks of raw frames.
//!
//! A [`Device`] moves raw frames in bursts between an [`Arena`] and a network interface, another
//! device or a file. A device knows no protocol. Each kind of device is in the module of its name.
//!
//! # Features
//! None is on by default.
//!
//! * `xdp`: devices on AF_XDP (module `xdp`).
//! * `packet`: devices on AF_PACKET (module `packet`).
//! * `dpdk`: devices of DPDK; needs libdpdk-dev. Module [`dpdk`] exists without it, to say so.
//! * `rdma`: devices over RDMA NICs; needs libibverbs-dev. Module [`rdma`] exists without it, too.
//!
//! # Examples
//! Two devices, joined by an in-memory link:
//! ```
//! use tidegate_device::mem::{MemConfig, wire};
//! use tidegate_device::{Burst, Device};
//! use tidegate_memory::{Arena, ArenaConfig, FrameSize};
//!
//! let config = ArenaConfig { frames: 8, frame_size: FrameSize::K4, hugepages: false };
//! let mut arena = Arena::new(config)?;
//! let (mut a, mut b) = wire(&MemConfig::default())?;
//!
//! let mut burst: Burst = [arena.alloc_from(b"a frame").expect("a free frame")].into();
//! assert_eq!(a.transmit(&mut arena, &mut burst)?, 1);
//! assert_eq!(b.receive(&mut arena, &mut burst, 64)?, 1);
//! assert_eq!(arena.bytes(&burst[0]), b"a frame");
//! burst.drain(..).for_each(|frame| arena.free(frame));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod admission;
pub mod affinity;
#[cfg(feature = "xdp")]
mod bpf;
mod buffer;
pub mod capabilities;
pub mod capture;
#[cfg(feature = "xdp")]
mod coalescing;
pub mod dpdk;
pub mod fault;
#[cfg(any(feature = "packet", feature = "xdp"))]
pub mod interface_settings;
pub mod mem;
pub mod netlink;
#[cfg(feature = "packet")]
pub mod packet;
pub mod pcap;
pub mod process;
pub mod rdma;
#[cfg(any(feature = "packet", feature = "xdp"))]
mod rx_missed;
#[cfg_attr(not(feature = "xdp"), allow(dead_code))]
mod segments;
pub mod sharded;
pub mod steering;
mod sys;
pub mod tap;
pub mod topology;
pub mod trace;
#[cfg_attr(not(feature = "xdp"), allow(dead_code))]
mod transport;
pub mod tx_copies;
mod vnet;
#[cfg(feature = "xdp")]
pub mod xdp;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use tidegate_memory::{Arena, Fifo, Frame};
use tidegate_wire::DropCounters;
pub use tidegate_wire::Medium;

/// FIFO queue of frames.
pub type Burst = Fifo<Frame>;

/// Properties and offloads of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Kind of device: `mem`, `packet`, `xdp`, `tap`, `dpdk`, `rdma`, `pcap`.
    pub kind: &'static str,
    /// Current mode of operation, for people: `native, copy, busy polling`.
    pub detail: String,
    /// Header that frames begin with.
    pub medium: Medium,
    /// Hardware address; all zero on [`Medium::Ip`].
    pub mac: [u8; 6],
    /// Largest IP packet in bytes, link header not counted.
    pub mtu: usize,
    /// Received frames may carry `Checksum::Verified` or `Checksum::Partial`.
    pub receive_checksum: bool,
    /// `Checksum::Partial` may be set on frames to send; the device completes the checksum.
    pub transmit_checksum: bool,
    /// Frames larger than the MTU may be sent and received: the device segments (TSO) and
    /// coalesces (GRO).
    pub segmentation: bool,
    /// Number of hardware queues that the device serves.
    pub queues: u32,
}

/// Traffic of a device since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Frames handed to the stack.
    pub received: u64,
    /// Bytes of the received frames.
    pub received_bytes: u64,
    /// Received frames that were passed on to other cores.
    pub passed_on: u64,
    /// Frames that were transmitted.
    pub transmitted: u64,
    /// Bytes of the transmitted frames.
    pub transmitted_bytes: u64,
    /// Frames dropped in the device, on receive before they are counted as received, or on
    /// transmit after the stack handed them over.
    pub drops: DropCounters,
    /// The driver's own counters that are not zero, by the driver's names, since the driver
    /// began to count. Only for `dpdk`.
    pub driver: Vec<(Arc<str>, u64)>,
}

impl DeviceCounters {
    /// Adds the traffic of a part of this device.
    pub fn add(&mut self, part: &Self) {
        self.received += part.received;
        self.received_bytes += part.received_bytes;
        self.passed_on += part.passed_on;
        self.transmitted += part.transmitted;
        self.transmitted_bytes += part.transmitted_bytes;
        self.drops.merge(&part.drops);
        self.driver.extend_from_slice(&part.driver);
    }
}

/// State of a device closed for handover, for the next device on the same interface.
pub enum HandoverState {
    /// XDP program and maps loaded for AF_XDP.
    #[cfg(feature = "xdp")]
    Xdp(Box<xdp::LoadedProgram>),
    /// Ports that AF_PACKET has diverted from the kernel, as long as this process holds them.
    #[cfg(all(feature = "packet", feature = "xdp"))]
    Packet(Box<packet::PortDiverter>),
    /// TAP or TUN device, which exists as long as any process holds this descriptor.
    Tap(OwnedFd),
}

/// Function that opens a device with the arena of its frames.
pub type OpenDevice = Box<dyn FnOnce(&mut Arena) -> io::Result<Box<dyn Device>> + Send>;

/// A source and sink of raw frames.
///
/// Every call gets the arena that the device was opened with.
pub trait Device: Send {
    /// Properties of the device. Constant while the device is open, except for `detail`.
    fn capabilities(&self) -> &Capabilities;

    /// Receives up to `quota` frames and appends those for this core to `burst`. Returns the
    /// number of frames received.
    ///
    /// Never blocks. Also returns sent frames to the arena and refills the receive ring, so the
    /// caller must call this even when no frames are expected.
    ///
    /// # Errors
    /// Only when the device is unusable: the interface is gone.
    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize>;

    /// Sets whether a [`Device::receive`] that finds no frame may poll the driver for some time, as
    /// it may at first. The caller that has other work, or shares its processor with a thread at
    /// work, allows no such poll: frames then wait for the next one, or for an interrupt.
    fn set_idle_polls(&mut self, _allowed: bool) {}

    /// Transmits frames from the front of `burst` and returns the number of frames taken. The
    /// rest stay in `burst` for the next call.
    ///
    /// Never blocks. May be called with an empty burst to flush frames queued in the device.
    ///
    /// # Errors
    /// Only when the device is unusable.
    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize>;

    /// Loops back up to `quota` frames from the front of `loopback`, which the stack sends to its
    /// own addresses: appends the frames for this core to `burst`. Returns the number of frames
    /// appended. A device of a single core appends every frame.
    ///
    /// # Errors
    /// Only when the device is unusable.
    fn loop_back(
        &mut self,
        _arena: &mut Arena,
        loopback: &mut Burst,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        let before = burst.len();
        burst.extend(loopback.drain(..quota.min(loopback.len())));
        Ok(burst.len() - before)
    }

    /// Pauses receiving for up to `wait_ns` nanoseconds: frames that arrive before the next
    /// [`Device::receive`] stay in the NIC and cost no processor time. Frames that the NIC has
    /// already delivered are kept.
    ///
    /// # Errors
    /// Only when the device is unusable.
    fn pause_receive(&mut self, _wait_ns: u64) -> io::Result<()> {
        Ok(())
    }

    /// Descriptor that becomes readable after [`Device::pause_receive`] when the device has work
    /// that the pause does not hold back: [`Device::forward`].
    fn pause_wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Transmits what other cores send by this device, without receiving.
    ///
    /// # Errors
    /// Only when the device is unusable.
    fn forward(&mut self, _arena: &mut Arena) -> io::Result<()> {
        Ok(())
    }

    /// True if frames that another core has passed on wait for [`Device::receive`]. False for
    /// frames that are still in a NIC.
    fn has_passed_frames(&mut self) -> bool {
        false
    }

    /// True while the device must try again though its descriptor stays silent: the kernel or the NIC
    /// has not taken frames of [`Device::transmit`], or the interface is down and may be removed. It
    /// tries again with each call of [`Device::transmit`] and [`Device::prepare_sleep`].
    fn needs_retry(&mut self) -> bool {
        false
    }

    /// Prepares to sleep: after this call the descriptor of [`Device::wake_fd`] becomes readable
    /// when a frame arrives. Returns false when frames are already waiting, so the caller must not
    /// sleep.
    ///
    /// # Errors
    /// Only when the device is unusable.
    fn prepare_sleep(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    /// Descriptor to sleep on; `None` for devices that can only be polled.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Adds a user of `rule`, whose packets are redirected from the kernel to this device (`take`),
    /// or removes one. With the last user the packets go to the kernel again.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] on devices that cannot redirect packets of the kernel;
    /// otherwise the kernel's error.
    fn set_steering(&self, rule: &steering::SteeringRule, take: bool) -> io::Result<()> {
        self.shared_rules()
            .map_or(Err(io::ErrorKind::Unsupported.into()), |rules| rules.set(rule, take))
    }

    /// Steering rules for threads that share the device; `None` on devices that cannot redirect
    /// packets of the kernel.
    fn shared_rules(&self) -> Option<Arc<dyn steering::SharedRules>> {
        None
    }

    /// Offers the receive queues of the interface that are meant for the cores 1, 2, …, each with an
    /// arena of its own. No queue is offered twice. They are closed before this device is.
    fn offer_queues(&mut self) -> Vec<OpenDevice> {
        Vec::new()
    }

    /// Early drop, before a frame costs processor time in the stack; `None` on devices without
    /// it.
    fn early_drop(&mut self) -> Option<&mut dyn admission::EarlyDrop> {
        None
    }

    /// Traffic so far. May make a system call, so not for every burst.
    fn counters(&mut self) -> DeviceCounters;

    /// This device as a [`ShardedDevice`], if it wraps another device.
    fn as_sharded(&mut self) -> Option<&mut dyn ShardedDevice> {
        None
    }

    /// Closes the device, so that another process can open the interface, and returns the frames
    /// that the kernel held to the arena. Returns the state for the next device on the interface.
    /// With `keep`, packets redirected to the device are dropped meanwhile instead of delivered to
    /// the kernel.
    fn close_for_handover(
        self: Box<Self>,
        arena: &mut Arena,
        _keep: bool,
    ) -> Option<HandoverState> {
        drop(self);
        arena.reclaim_all();
        None
    }

    /// Takes over from a device that another process has closed for handover, if this device
    /// inherited its state. All steering rules must be set before.
    ///
    /// # Errors
    /// The kernel's error; the device is then unusable.
    fn take_over(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A device that wraps another device and shards its traffic over several cores.
pub trait ShardedDevice {
    /// Replaces the wrapped device and returns the old one.
    ///
    /// # Errors
    /// When the device is unusable.
    fn replace_inner(&mut self, device: Box<dyn Device>) -> io::Result<Box<dyn Device>>;

    /// Number of cores that may have a receive queue of their own.
    fn queue_cores(&self) -> usize;

    /// As [`Device::receive`], but delivers only frames that `filter` leaves in its burst, to this
    /// core or another one.
    ///
    /// # Errors
    /// As [`Device::receive`].
    fn receive_filtered(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        filter: &mut dyn FnMut(&mut Arena, &mut Burst),
    ) -> io::Result<usize>;
}

impl<P: Device + ?Sized> Device for Box<P> {
    fn capabilities(&self) -> &Capabilities {
        (**self).capabilities()
    }
    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        (**self).receive(arena, burst, quota)
    }
    fn set_idle_polls(&mut self, allowed: bool) {
        (**self).set_idle_polls(allowed);
    }
    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        (**self).transmit(arena, burst)
    }
    fn loop_back(
        &mut self,
        arena: &mut Arena,
        loopback: &mut Burst,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        (**self).loop_back(arena, loopback, burst, quota)
    }
    fn pause_receive(&mut self, wait_ns: u64) -> io::Result<()> {
        (**self).pause_receive(wait_ns)
    }
    fn pause_wake_fd(&self) -> Option<BorrowedFd<'_>> {
        (**self).pause_wake_fd()
    }
    fn forward(&mut self, arena: &mut Arena) -> io::Result<()> {
        (**self).forward(arena)
    }
    fn has_passed_frames(&mut self) -> bool {
        (**self).has_passed_frames()
    }
    fn needs_retry(&mut self) -> bool {
        (**self).needs_retry()
    }
    fn prepare_sleep(&mut self) -> io::Result<bool> {
        (**self).prepare_sleep()
    }
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        (**self).wake_fd()
    }
    fn shared_rules(&self) -> Option<Arc<dyn steering::SharedRules>> {
        (**self).shared_rules()
    }
    fn offer_queues(&mut self) -> Vec<OpenDevice> {
        (**self).offer_queues()
    }
    fn early_drop(&mut self) -> Option<&mut dyn admission::EarlyDrop> {
        (**self).early_drop()
    }
    fn counters(&mut self) -> DeviceCounters {
        (**self).counters()
    }
    fn as_sharded(&mut self) -> Option<&mut dyn ShardedDevice> {
        (**self).as_sharded()
    }
    fn close_for_handover(self: Box<Self>, arena: &mut Arena, keep: bool) -> Option<HandoverState> {
        (*self).close_for_handover(arena, keep)
    }
    fn take_over(&mut self) -> io::Result<()> {
        (**self).take_over()
    }
}
