//! Configuration of an AF_XDP device.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::str::FromStr;
use std::{fmt, io};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use tidegate_wire::Medium;

use super::steering::Steering;
use super::umem::Umem;
use super::{XdpError, sys};
use crate::interface_settings::InterfaceId;
use crate::netlink::{Interface, NetdevSocket};

/// Hook in the kernel at which the XDP program runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttachMode {
    /// Native if the driver supports XDP, otherwise generic.
    #[default]
    Auto,
    /// In the driver, before the kernel allocates an skb.
    Native,
    /// In front of the kernel's stack: slower, but works on every interface.
    Generic,
}

impl AttachMode {
    /// Name in configuration files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Native => "native",
            Self::Generic => "generic",
        }
    }
}

impl fmt::Display for AttachMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text names no attach mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an XDP attach mode: expected auto, native or generic")]
pub struct UnknownAttachMode(String);

impl FromStr for AttachMode {
    type Err = UnknownAttachMode;

    fn from_str(text: &str) -> Result<Self, UnknownAttachMode> {
        let mut all = [Self::Auto, Self::Native, Self::Generic].into_iter();
        all.find(|mode| mode.name() == text).ok_or_else(|| UnknownAttachMode(text.to_owned()))
    }
}

/// Transfer of frames between the driver and the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyMode {
    /// Zero-copy if the driver supports it, otherwise copied.
    #[default]
    Auto,
    /// Copied by the kernel; works with every driver.
    Copy,
    /// Written by the NIC into the arena; opening fails if the driver does not support it.
    ZeroCopy,
}

/// Preferred busy polling (Linux 5.11): the NIC's interrupts stay off, and the driver's
/// receive path runs inside the system calls of the device, on the core that polls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BusyPoll {
    /// Maximum packets per poll.
    pub budget: u16,
    /// Polls by the kernel's timer, without an interrupt, before interrupts are enabled again
    /// (`napi_defer_hard_irqs`).
    pub defer_irqs: u32,
    /// Time that the kernel waits for the next poll before its timer polls, in nanoseconds
    /// (`gro_flush_timeout`). Must exceed the time between two polls under load; otherwise
    /// softirqs poll at the same time. Also the maximum extra wakeup latency of a device that
    /// has just gone idle.
    pub flush_timeout_ns: u64,
}

impl Default for BusyPoll {
    fn default() -> Self {
        Self { budget: 64, defer_irqs: 2, flush_timeout_ns: 200_000 }
    }
}

impl BusyPoll {
    /// Sets the maximum packets per poll.
    pub fn budget(self, budget: u16) -> Self {
        Self { budget, ..self }
    }

    /// Sets the polls by the kernel's timer before interrupts are enabled again.
    pub fn defer_irqs(self, defer_irqs: u32) -> Self {
        Self { defer_irqs, ..self }
    }

    /// Sets the time that the kernel waits for the next poll, in nanoseconds.
    pub fn flush_timeout_ns(self, flush_timeout_ns: u64) -> Self {
        Self { flush_timeout_ns, ..self }
    }
}

/// Ring sizes of each AF_XDP socket, in entries; powers of two from 64 to 32768.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RingSizes {
    /// Fill ring: buffers that the kernel receives packets into.
    pub fill: u32,
    /// RX ring: received packets.
    pub receive: u32,
    /// TX ring: packets to send.
    pub transmit: u32,
    /// Completion ring: buffers of sent packets.
    pub completion: u32,
}

impl Default for RingSizes {
    fn default() -> Self {
        Self { fill: 2048, receive: 2048, transmit: 2048, completion: 2048 }
    }
}

/// Configuration of an AF_XDP device.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct XdpConfig {
    /// Interface name.
    pub interface: String,
    /// Receive queues to serve; `None`: all active queues.
    pub queues: Option<Vec<u32>>,
    /// Number of network cores that share the queues out, at least 1: the device serves those of
    /// core 0, and offers the others ([`Device::offer_queues`](crate::Device::offer_queues)).
    /// Fewer cores have a queue if there are fewer queues, or a kernel before Linux 6.13 cannot poll
    /// a single one.
    pub cores: usize,
    /// Native or generic XDP.
    pub mode: AttachMode,
    /// Zero-copy or copy mode.
    pub copy: CopyMode,
    /// Preferred busy polling; `None`: receive by interrupts.
    pub busy_poll: Option<BusyPoll>,
    /// Ring sizes.
    pub rings: RingSizes,
    /// Frames that are redirected to this device.
    pub steering: Steering,
}

impl XdpConfig {
    /// Default configuration for an interface; no frames are redirected until a rule is set.
    pub fn new(interface: impl Into<String>) -> Self {
        Self { interface: interface.into(), ..Self::default() }
    }

    /// Sets the receive queues to serve; `None` serves all active queues.
    pub fn queues(self, queues: impl Into<Option<Vec<u32>>>) -> Self {
        Self { queues: queues.into(), ..self }
    }

    /// Sets the number of network cores that share the queues out.
    pub fn cores(self, cores: usize) -> Self {
        Self { cores, ..self }
    }

    /// Sets native or generic XDP.
    pub fn mode(self, mode: AttachMode) -> Self {
        Self { mode, ..self }
    }

    /// Sets zero-copy or copy mode.
    pub fn copy(self, copy: CopyMode) -> Self {
        Self { copy, ..self }
    }

    /// Sets preferred busy polling; `None` receives by interrupts.
    pub fn busy_poll(self, busy_poll: impl Into<Option<BusyPoll>>) -> Self {
        Self { busy_poll: busy_poll.into(), ..self }
    }

    /// Sets the ring sizes.
    pub fn rings(self, rings: RingSizes) -> Self {
        Self { rings, ..self }
    }

    /// Sets the frames that are redirected to this device.
    pub fn steering(self, steering: Steering) -> Self {
        Self { steering, ..self }
    }
}

impl RingSizes {
    /// Sets the size of the fill ring.
    pub fn fill(self, fill: u32) -> Self {
        Self { fill, ..self }
    }

    /// Sets the size of the RX ring.
    pub fn receive(self, receive: u32) -> Self {
        Self { receive, ..self }
    }

    /// Sets the size of the TX ring.
    pub fn transmit(self, transmit: u32) -> Self {
        Self { transmit, ..self }
    }

    /// Sets the size of the completion ring.
    pub fn completion(self, completion: u32) -> Self {
        Self { completion, ..self }
    }

    pub(super) fn validate(&self) -> Result<(), XdpError> {
        let sizes = [self.fill, self.receive, self.transmit, self.completion];
        match sizes
            .into_iter()
            .find(|size| !(size.is_power_of_two() && (64..=32768).contains(size)))
        {
            Some(size) => Err(XdpError::InvalidRingSize(size)),
            None => Ok(()),
        }
    }
}

/// Properties of the interface, read before any socket is opened.
#[derive(Clone)]
pub(super) struct TargetInterface {
    pub name: String,
    pub index: u32,
    pub mac: [u8; 6],
    pub mtu: u32,
    pub queues: Vec<u32>,
    /// Number of receive queues of the interface.
    pub active_queues: u32,
    /// NAPI instances of the queues; `None`: all of the interface.
    pub napis: Option<Vec<u32>>,
    pub is_veth: bool,
    /// Frames may come from this machine, as [`Interface::has_local_peers`] says.
    pub has_local_peers: bool,
}

impl TargetInterface {
    /// Identity of the interface.
    pub fn id(&self) -> InterfaceId {
        InterfaceId { index: self.index, mac: self.mac }
    }
}

impl TargetInterface {
    /// Looks up the interface and checks that an AF_XDP device can use it.
    pub(super) fn find(config: &XdpConfig, umem: &Umem) -> Result<Self, XdpError> {
        let interface = Interface::by_name(&config.interface)?;
        let has_local_peers = interface.has_local_peers();
        let name = interface.name;
        if interface.medium != Some(Medium::Ethernet) || interface.loopback {
            return Err(XdpError::NotEthernet(name));
        }
        if !interface.up {
            return Err(XdpError::InterfaceDown(name));
        }
        let mtu = interface.mtu as u32;
        let max_mtu = umem.max_mtu();
        if mtu > max_mtu {
            return Err(XdpError::MtuTooLarge { interface: name, mtu, max_mtu });
        }
        let active = active_receive_queues(&name)
            .map_err(|source| XdpError::Interface { interface: name.clone(), source })?;
        let queues = config.queues.clone().unwrap_or_else(|| (0..active).collect());
        if let Some(&queue) = queues.iter().find(|&&queue| queue >= active) {
            return Err(XdpError::NoQueue { interface: name, queue, active });
        }
        let distinct: HashSet<u32> = queues.iter().copied().collect();
        if distinct.len() != queues.len() || queues.is_empty() {
            return Err(XdpError::InvalidQueues { interface: name });
        }
        let is_veth = interface.kind.as_deref() == Some("veth");
        Ok(Self {
            name,
            index: interface.index,
            mac: interface.mac.0,
            mtu,
            queues,
            active_queues: active,
            napis: None,
            is_veth,
            has_local_peers,
        })
    }

    /// Shares the queues out among network cores: returns the part of each, of one core for all if
    /// that is not possible.
    ///
    /// With `polls` the driver is polled, which needs the NAPI instances of each core's queues.
    /// Drivers without XDP have none: the program is to be attached before.
    pub(super) fn share_out(self, cores: usize, polls: bool) -> Vec<Self> {
        let cores = cores.clamp(1, self.queues.len());
        if cores == 1 {
            return vec![self];
        }
        let part = |core: usize| {
            let queues: Vec<u32> = self.queues.iter().copied().skip(core).step_by(cores).collect();
            let napis = match polls {
                true => Some(queue_napis(self.index, &queues, self.active_queues)?),
                false => None,
            };
            Ok(Self { queues, napis, ..self.clone() })
        };
        let parts: io::Result<Vec<Self>> = (0..cores).map(part).collect();
        parts.unwrap_or_else(|_| vec![self])
    }
}

/// NAPI instances of receive queues.
///
/// Drivers that do not tell have one for each queue, in the order of the queues.
fn queue_napis(interface_index: u32, queues: &[u32], active: u32) -> io::Result<Vec<u32>> {
    let netdev = NetdevSocket::open()?;
    let known = netdev.receive_queue_napis(interface_index)?;
    let told: Option<Vec<u32>> = queues.iter().map(|queue| known.get(queue).copied()).collect();
    if let Some(told) = told {
        return Ok(told);
    }
    let mut all: Vec<u32> =
        netdev.napis(interface_index)?.into_iter().map(|napi| napi.id).collect();
    all.sort_unstable();
    if all.len() != active as usize {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(queues.iter().filter_map(|&queue| all.get(queue as usize).copied()).collect())
}

fn active_receive_queues(interface: &str) -> io::Result<u32> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sys::active_receive_queues(socket.as_fd(), interface)
}
