//! What an AF_XDP port is made of.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use tidegate_wire::Medium;

use super::steering::Steering;
use super::umem::Umem;
use super::{XdpError, sys};
use crate::netlink::Interface;

/// Where in the kernel frames are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// In the driver when it can, else in front of the kernel's stack.
    #[default]
    Auto,
    /// In the driver, before the kernel has made a packet buffer.
    Native,
    /// In front of the kernel's stack: slower, and on every interface.
    Generic,
}

/// How frames get from the driver to the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Copy {
    /// Zero-copy when the driver can, else copied.
    #[default]
    Auto,
    /// Copied by the kernel, on every driver.
    Copy,
    /// Written by the card; refused when the driver cannot.
    Zero,
}

/// Preferred busy polling (Linux 5.11): the device's interrupts stay off and
/// its receive path runs inside the port's own calls, on the port's core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusyPoll {
    /// The most packets that one call takes from the device.
    pub budget: u16,
    /// How often the device looks again on its own, without an interrupt,
    /// before it turns interrupts on (`napi_defer_hard_irqs`).
    pub defer_irqs: u32,
    /// How long the device waits for the next poll before it looks on its own,
    /// in nanoseconds (`gro_flush_timeout`). Longer than the time between two
    /// polls under load, or the device works behind the port's back; a port
    /// that has just gone idle may wake up this much later.
    pub flush_timeout_ns: u64,
}

impl Default for BusyPoll {
    fn default() -> Self {
        Self { budget: 64, defer_irqs: 2, flush_timeout_ns: 200_000 }
    }
}

/// Entries of the rings of each socket; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSizes {
    /// Buffers that wait for packets.
    pub fill: u32,
    /// Packets that wait for the port.
    pub receive: u32,
    /// Packets that wait to be sent.
    pub transmit: u32,
    /// Sent buffers on their way back.
    pub completion: u32,
}

impl Default for RingSizes {
    fn default() -> Self {
        Self { fill: 2048, receive: 2048, transmit: 2048, completion: 2048 }
    }
}

/// What an AF_XDP port is made of.
#[derive(Clone, Debug, Default)]
pub struct XdpConfig {
    /// The name of the interface.
    pub interface: String,
    /// The receive queues to serve; `None` is all that are in use.
    pub queues: Option<Vec<u32>>,
    /// Where in the kernel frames are taken.
    pub mode: Mode,
    /// How frames get to the arena.
    pub copy: Copy,
    /// Preferred busy polling; `None` leaves the receive path to interrupts.
    pub busy_poll: Option<BusyPoll>,
    /// The sizes of the rings.
    pub rings: RingSizes,
    /// What to take.
    pub steering: Steering,
}

impl XdpConfig {
    /// A configuration for this interface, with defaults for the rest; it takes
    /// nothing.
    pub fn new(interface: impl Into<String>) -> Self {
        Self { interface: interface.into(), ..Self::default() }
    }
}

impl RingSizes {
    pub(super) fn check(&self) -> Result<(), XdpError> {
        let sizes = [self.fill, self.receive, self.transmit, self.completion];
        match sizes
            .into_iter()
            .find(|size| !(size.is_power_of_two() && (64..=32768).contains(size)))
        {
            Some(size) => Err(XdpError::RingSize(size)),
            None => Ok(()),
        }
    }
}

/// What is known about the interface before anything is opened.
#[derive(Clone)]
pub(super) struct Target {
    pub name: String,
    pub index: u32,
    pub mac: [u8; 6],
    pub mtu: u32,
    pub queues: Vec<u32>,
    pub is_veth: bool,
}

impl Target {
    /// Finds the interface and checks that the port can serve it.
    pub(super) fn find(config: &XdpConfig, umem: &Umem) -> Result<Self, XdpError> {
        let interface = Interface::by_name(&config.interface)?;
        let name = interface.name;
        if interface.medium != Some(Medium::Ethernet) || interface.loopback {
            return Err(XdpError::NotEthernet(name));
        }
        if !interface.up {
            return Err(XdpError::Down(name));
        }
        let mtu = interface.mtu as u32;
        let largest = umem.largest_mtu();
        if mtu > largest {
            return Err(XdpError::MtuTooLarge { interface: name, mtu, largest });
        }
        let active = active_receive_queues(&name)
            .map_err(|source| XdpError::Interface { interface: name.clone(), source })?;
        let queues = config.queues.clone().unwrap_or_else(|| (0..active).collect());
        if let Some(&queue) = queues.iter().find(|&&queue| queue >= active) {
            return Err(XdpError::NoQueue { interface: name, queue, active });
        }
        let distinct: HashSet<u32> = queues.iter().copied().collect();
        if distinct.len() != queues.len() || queues.is_empty() {
            return Err(XdpError::Queues { interface: name });
        }
        let is_veth = interface.kind.as_deref() == Some("veth");
        Ok(Self { name, index: interface.index, mac: interface.mac.0, mtu, queues, is_veth })
    }
}

fn active_receive_queues(interface: &str) -> io::Result<u32> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sys::active_receive_queues(socket.as_fd(), interface)
}
