//! Where packets come from and go to.
//!
//! A [`Port`] moves raw frames in bursts between an [`Arena`] and a wire. It
//! knows no protocol. Ports are found in the module of their name.

pub mod admission;
mod buffer;
pub mod capture;
pub mod dpdk;
pub mod fault;
pub mod mem;
pub mod netlink;
pub mod packet;
mod passed;
pub mod pcap;
pub mod spread;
pub mod steering;
pub mod tap;
pub mod trace;
mod vnet;
pub mod xdp;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use tidegate_memory::{Arena, Fifo, Frame};
use tidegate_wire::DropCounters;
pub use tidegate_wire::Medium;

/// Frames on their way, first in, first out.
pub type Burst = Fifo<Frame>;

/// What a port can do and what it asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The name of the kind of port: `mem`, `packet`, `xdp`, `tap`, `dpdk`, `pcap`.
    pub kind: &'static str,
    /// How the port works right now, for people: `native, copy, busy polling`.
    pub detail: String,
    /// What frames begin with.
    pub medium: Medium,
    /// The hardware address; all zero on [`Medium::Ip`].
    pub mac: [u8; 6],
    /// The largest IP packet in bytes, link header not counted.
    pub mtu: usize,
    /// Received frames may carry `Checksum::Verified` or `Checksum::Partial`.
    pub receive_checksum: bool,
    /// `Checksum::Partial` may be set on frames to send; the port completes it.
    pub transmit_checksum: bool,
    /// Frames larger than the MTU may be sent and received (segmentation and
    /// receive merging by the port).
    pub segmentation: bool,
    /// How many hardware queues the port serves.
    pub queues: u32,
}

/// What passed through a port since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames handed to the stack.
    pub received: u64,
    /// Bytes of those frames.
    pub received_bytes: u64,
    /// Frames the wire took.
    pub transmitted: u64,
    /// Bytes of those frames.
    pub transmitted_bytes: u64,
    /// Frames dropped at the port, before they were counted as received, or
    /// after the stack gave them away.
    pub drops: DropCounters,
    /// What the device itself counts, by the names of its driver, since that began
    /// to count: those that are not zero. Only `dpdk` has such.
    pub device: Vec<(Arc<str>, u64)>,
}

/// What a port that was closed for now has left, for the next one on its interface.
pub enum Left {
    /// What was loaded for AF_XDP.
    Xdp(Box<xdp::Loaded>),
    /// A TAP or TUN device, which is there as long as any process has this.
    Tap(OwnedFd),
}

/// A source and sink of raw frames.
///
/// Every call takes the same arena that the port was opened with.
pub trait Port: Send {
    /// What the port can do. Constant while it is open, but for `detail`.
    fn capabilities(&self) -> &Capabilities;

    /// Takes up to `quota` frames that have arrived, appends those that are for
    /// this core to `burst`, and returns how many it took. Never blocks. Also returns sent frames to the
    /// arena and hands the wire new buffers, so it must be called even when
    /// nothing is expected.
    ///
    /// # Errors
    /// Only when the port is of no further use: the interface is gone.
    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize>;

    /// Hands frames from the front of `burst` to the wire and returns how many
    /// it took. The rest stay for the next call. Never blocks; may be called
    /// with an empty burst to push out what waits inside the port.
    ///
    /// # Errors
    /// Only when the port is of no further use.
    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize>;

    /// Takes up to `quota` frames from the front of `looped`, which the stack
    /// sends to its own addresses, and appends those that are for this core to
    /// `burst`. Returns how many those are. Ports of one core have nothing to
    /// decide here.
    ///
    /// # Errors
    /// Only when the port is of no further use.
    fn loop_back(
        &mut self,
        _arena: &mut Arena,
        looped: &mut Burst,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        let before = burst.len();
        burst.extend(looped.drain(..quota.min(looped.len())));
        Ok(burst.len() - before)
    }

    /// Receiving pauses for up to `wait_ns` nanoseconds: what arrives until
    /// the next [`Port::receive`] stays with the card and costs nothing. The
    /// last frames that the card has handed over by now are kept.
    ///
    /// # Errors
    /// Only when the port is of no further use.
    fn hold(&mut self, _wait_ns: u64) -> io::Result<()> {
        Ok(())
    }

    /// Makes ready to sleep: after this call the descriptor of
    /// [`Port::wake_fd`] becomes readable when a frame arrives. Returns false
    /// when frames are waiting already, so that sleeping would be wrong.
    ///
    /// # Errors
    /// Only when the port is of no further use.
    fn prepare_sleep(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    /// The descriptor to sleep on; `None` for ports that can only be polled.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Takes what a rule names (`take`), or leaves it to the kernel again.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] on ports that cannot take frames away
    /// from the kernel; what the kernel says otherwise.
    fn set_steering(&mut self, _rule: &steering::Rule, _take: bool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// How to drop frames before they cost anything; `None` on ports that
    /// cannot.
    fn admission(&mut self) -> Option<&mut dyn admission::Early> {
        None
    }

    /// What passed through so far. May ask the kernel, so not for every burst.
    fn counters(&mut self) -> PortCounters;

    /// The port as one that stands before another, if it does.
    fn front(&mut self) -> Option<&mut dyn Front> {
        None
    }

    /// Closes the port, so that another process can have the interface, and gives
    /// the frames that the kernel held back to the arena. Gives what is left for the
    /// next port on the interface. With `keep` the kernel does not get meanwhile what
    /// the port took, which is lost.
    fn close_for_now(self: Box<Self>, arena: &mut Arena, _keep: bool) -> Option<Left> {
        drop(self);
        arena.reclaim_all();
        None
    }

    /// Takes the place of the port that another process has closed for now, if this
    /// one has inherited it. What was to be taken must have been said before.
    ///
    /// # Errors
    /// What the kernel says; then the port is of no use.
    fn go_live(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A port that stands before another one.
pub trait Front {
    /// Puts another port in the place of the one behind, which it gives back.
    ///
    /// # Errors
    /// When the port is of no further use.
    fn replace(&mut self, port: Box<dyn Port>) -> io::Result<Box<dyn Port>>;

    /// As [`Port::receive`], but of what has arrived only that goes on, to this core
    /// or another, which `sieve` leaves in the burst.
    ///
    /// # Errors
    /// As [`Port::receive`].
    fn receive_sieved(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        sieve: &mut dyn FnMut(&mut Arena, &mut Burst),
    ) -> io::Result<usize>;
}

impl<P: Port + ?Sized> Port for Box<P> {
    fn capabilities(&self) -> &Capabilities {
        (**self).capabilities()
    }
    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        (**self).receive(arena, burst, quota)
    }
    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        (**self).transmit(arena, burst)
    }
    fn loop_back(
        &mut self,
        arena: &mut Arena,
        looped: &mut Burst,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        (**self).loop_back(arena, looped, burst, quota)
    }
    fn hold(&mut self, wait_ns: u64) -> io::Result<()> {
        (**self).hold(wait_ns)
    }
    fn prepare_sleep(&mut self) -> io::Result<bool> {
        (**self).prepare_sleep()
    }
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        (**self).wake_fd()
    }
    fn set_steering(&mut self, rule: &steering::Rule, take: bool) -> io::Result<()> {
        (**self).set_steering(rule, take)
    }
    fn admission(&mut self) -> Option<&mut dyn admission::Early> {
        (**self).admission()
    }
    fn counters(&mut self) -> PortCounters {
        (**self).counters()
    }
    fn front(&mut self) -> Option<&mut dyn Front> {
        (**self).front()
    }
    fn close_for_now(self: Box<Self>, arena: &mut Arena, keep: bool) -> Option<Left> {
        (*self).close_for_now(arena, keep)
    }
    fn go_live(&mut self) -> io::Result<()> {
        (**self).go_live()
    }
}
