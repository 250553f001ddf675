//! The `packet` device: AF_PACKET on any Ethernet interface, also in a user namespace.
//!
//! The kernel still sees every frame, except packets to diverted ports (`Steering::Ports`, with
//! feature `xdp`): by these a device shares the kernel's addresses. Otherwise the kernel does no
//! harm for an address that it does not have: it drops packets for other hosts, unless forwarding
//! is on (`sysctl net.ipv4.ip_forward`). With forwarding the kernel may forward such packets or
//! answer with unreachables; turn forwarding off on the interface. For an address that the kernel
//! has, it would answer as well ("port unreachable"). Opening therefore refuses such an address.
//!
//! Frames that stand for several packets are split: a sender on this machine leaves segmentation to
//! its device, and the kernel coalesces what it receives. With [`PacketConfig::segmentation`] the
//! stack takes TCP segments as they are.
//!
//! Receiving works in one of two modes ([`ReceiveMode`]). Sending always uses `sendmmsg`, up to
//! 64 frames a call. A transmit ring would save one copy, but holds its slots until the receiver
//! has read them, so a slow peer on veth would block the device.

mod config;
#[cfg(feature = "xdp")]
mod divert;
mod filter;
mod gro_limit;
mod open;
mod passive;
#[cfg(feature = "xdp")]
mod reception;
mod ring;
mod sys;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use tidegate_memory::{Arena, Checksum, Frame, FrameSize, HEADROOM_BYTES};
use tidegate_wire::{DropReason, Medium};

use crate::buffer::LINK_HEADER_BYTES;
use crate::netlink::Interface;
use crate::segments::{Segments, Splitter};
#[cfg(feature = "xdp")]
use crate::steering::SharedRules;
use crate::{Burst, Capabilities, Device, DeviceCounters, HandoverState, OpenDevice, buffer, vnet};
pub use config::{PacketConfig, PacketError, ReceiveMode, Steering};
#[cfg(feature = "xdp")]
pub use divert::PortDiverter;
use gro_limit::GroLimit;
use open::{open_socket, validate};
pub use passive::{PassiveConfig, PassiveCounters, PassiveFrame, PassiveRing};
#[cfg(feature = "xdp")]
pub(crate) use reception::PacketReception;
use ring::{NextFrame, RingReader};
use sys::{BURST_FRAMES, Batch, Socket};

/// Maximum number of frames that one receive reads beyond its quota: frames that are too long
/// are dropped without using the quota, and must not stall it.
const MAX_SKIPPED_FRAMES: usize = 64;

/// With frames that stand for several packets, the frames that one call receives; with segmentation
/// also the bytes after which no further call is made. A burst is acknowledged only when all of it
/// was read, and the sender waits until then.
const MERGED_FRAMES_PER_CALL: usize = 4;
const MERGED_BYTES_PER_RECEIVE: u64 = 96 << 10;

/// VLAN tag that the kernel removed from a frame: protocol and tag control information.
type VlanTag = (u16, u16);

enum Receiver {
    Syscalls,
    Ring(RingReader),
}

/// AF_PACKET device on an Ethernet interface.
pub struct PacketDevice {
    capabilities: Capabilities,
    counters: DeviceCounters,
    // The ring is unmapped before its socket is closed.
    receiver: Receiver,
    batch: Batch,
    spare: Vec<Frame>,
    /// Frames of the last call that are not handled yet, and the place of the first in the batch.
    unread: Burst,
    next_unread: usize,
    /// True if one of the last frames stood for several packets.
    merged: bool,
    splitter: Splitter,
    /// VLAN tag of the frame that is split.
    split_vlan: Option<VlanTag>,
    socket: Socket,
    /// Diverts ports from the kernel.
    #[cfg(feature = "xdp")]
    diverter: Option<PortDiverter>,
    /// Limits GRO, so that coalesced frames fit into buffers.
    gro_limit: Option<GroLimit>,
    /// Devices for the other network cores, until they are offered.
    offered: Vec<PacketConfig>,
    interface_index: u32,
    interface: String,
    /// The kernel has reported that the interface went down, and it is not up again.
    is_down: bool,
    /// Frames read by `recvmmsg`, each before it is split.
    #[cfg(feature = "xdp")]
    arrived: u64,
}

impl PacketDevice {
    /// Opens the device. Frames arrive from then on.
    ///
    /// # Errors
    /// See [`PacketError`]; a failed call leaves nothing behind.
    pub fn open(config: &PacketConfig, arena: &mut Arena) -> Result<Self, PacketError> {
        #[cfg(feature = "xdp")]
        let diverter = match &config.steering {
            Steering::Ports { vlan } => Some(PortDiverter::attach(&config.interface, *vlan)?),
            _ => None,
        };
        let device = Self::open_stopped_with(
            config,
            #[cfg(feature = "xdp")]
            diverter,
            arena,
        )?;
        device.start(config)
    }

    /// Opens a device for own addresses that receives nothing before
    /// [`PacketReception::start`].
    ///
    /// # Errors
    /// As [`PacketDevice::open`].
    #[cfg(feature = "xdp")]
    pub(crate) fn open_stopped(
        config: &PacketConfig,
        arena: &mut Arena,
    ) -> Result<Self, PacketError> {
        Self::open_stopped_with(config, None, arena)
    }

    /// Frames that the kernel has delivered, each before it is split, and their bytes.
    #[cfg(feature = "xdp")]
    pub(crate) fn arrived(&self) -> (u64, u64) {
        (self.arrived, self.counters.received_bytes)
    }

    /// Start and end of receiving, for another thread.
    ///
    /// # Errors
    /// The process has no descriptor left.
    #[cfg(feature = "xdp")]
    pub(crate) fn reception(&self) -> io::Result<PacketReception> {
        let interface_index = self.interface_index;
        Ok(PacketReception { socket: self.socket.try_clone()?, interface_index })
    }

    /// Opens the device like [`PacketDevice::open`], with ports that a device closed for handover
    /// has diverted.
    ///
    /// # Errors
    /// As [`PacketDevice::open`].
    #[cfg(feature = "xdp")]
    pub fn open_diverted(
        config: &PacketConfig,
        diverter: PortDiverter,
        arena: &mut Arena,
    ) -> Result<Self, PacketError> {
        Self::open_stopped_with(config, Some(diverter), arena)?.start(config)
    }

    /// Starts to receive.
    fn start(mut self, config: &PacketConfig) -> Result<Self, PacketError> {
        let step = |step: &'static str| {
            let interface = config.interface.clone();
            move |source| PacketError::Setup { step, interface, source }
        };
        let index = self.interface_index;
        // Neighbour discovery uses multicast groups that the NIC may filter out.
        self.socket
            .add_membership(index, libc::PACKET_MR_ALLMULTI)
            .map_err(step("receive all multicast groups (PACKET_MR_ALLMULTI)"))?;
        if config.promiscuous {
            self.socket
                .add_membership(index, libc::PACKET_MR_PROMISC)
                .map_err(step("turn on promiscuous mode"))?;
        }
        self.socket.bind(index).map_err(step("bind a packet socket"))?;
        if let Some(group) = config.fanout {
            self.socket.join_fanout(Some(group)).map_err(step("join the fanout group"))?;
        }
        self.offered = share_flows(config, &self.socket);
        Ok(self)
    }

    fn open_stopped_with(
        config: &PacketConfig,
        #[cfg(feature = "xdp")] mut diverter: Option<PortDiverter>,
        arena: &mut Arena,
    ) -> Result<Self, PacketError> {
        let large = arena.frame_bytes() >= FrameSize::K64.bytes();
        if config.segmentation && !(large && config.receive == ReceiveMode::Syscalls) {
            return Err(PacketError::SmallFrames);
        }
        let interface = Interface::by_name(&config.interface)?;
        validate(config, &interface)?;
        let (socket, receiver) = open_socket(
            config,
            &interface,
            #[cfg(feature = "xdp")]
            diverter.as_mut(),
        )?;
        // GRO limits count IP packets, without the link header.
        let longest = u16::MAX - HEADROOM_BYTES - LINK_HEADER_BYTES as u16;
        // Without permission to set the limit, frames that do not fit are dropped and counted.
        let limit = || GroLimit::set(&interface, longest.into()).ok().flatten();
        let gro_limit = config.segmentation.then(limit).flatten();
        let mut detail = match config.receive {
            ReceiveMode::Syscalls if config.segmentation => {
                "recvmmsg and sendmmsg, segmentation by the kernel".to_owned()
            }
            ReceiveMode::Syscalls => "recvmmsg and sendmmsg".to_owned(),
            ReceiveMode::Ring => {
                format!("TPACKET_V3 ring of {} KiB, sendmmsg", config.buffer_bytes >> 10)
            }
        };
        if let Some(reason) = &config.reason {
            detail = format!("{detail}; {reason}");
        }
        Ok(Self {
            capabilities: Capabilities {
                kind: "packet",
                detail,
                medium: Medium::Ethernet,
                mac: interface.mac.0,
                mtu: interface.mtu,
                receive_checksum: true,
                transmit_checksum: true,
                segmentation: config.segmentation,
                queues: 1,
            },
            counters: DeviceCounters::default(),
            receiver,
            batch: Batch::new(),
            spare: Vec::with_capacity(BURST_FRAMES),
            unread: Burst::with_capacity(BURST_FRAMES),
            next_unread: 0,
            merged: false,
            splitter: Splitter::new(),
            split_vlan: None,
            socket,
            #[cfg(feature = "xdp")]
            diverter,
            gro_limit,
            offered: Vec::new(),
            interface_index: interface.index,
            interface: interface.name,
            is_down: false,
            #[cfg(feature = "xdp")]
            arrived: 0,
        })
    }

    fn receive_by_syscalls(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        let before_bytes = self.counters.received_bytes;
        let (before, mut examined, mut is_drained) = (burst.len(), 0, false);
        while burst.len() - before < quota && examined < quota + MAX_SKIPPED_FRAMES {
            if self.splitter.is_active() {
                // Without a free frame, the rest waits.
                let Some(frame) = self.next_packet(arena) else { break };
                self.deliver(frame, burst);
            } else if let Some(frame) = self.unread.pop_front() {
                examined += 1;
                if let Some(frame) = self.accept_message(arena, frame) {
                    self.deliver(frame, burst);
                }
            } else if is_drained
                || self.capabilities.segmentation
                    && self.counters.received_bytes - before_bytes >= MERGED_BYTES_PER_RECEIVE
            {
                break;
            } else {
                is_drained = self.read_messages(arena, quota - (burst.len() - before))?;
            }
        }
        Ok(burst.len() - before)
    }

    fn deliver(&mut self, frame: Frame, burst: &mut Burst) {
        self.counters.received += 1;
        self.counters.received_bytes += frame.len() as u64;
        burst.push_back(frame);
    }

    /// Makes the next packet of the frame that is split.
    fn next_packet(&mut self, arena: &mut Arena) -> Option<Frame> {
        let mut frame = self.splitter.next(arena)?;
        if let Some((protocol, tag)) = self.split_vlan {
            restore_vlan_tag(arena, &mut frame, protocol, tag);
        }
        Some(frame)
    }

    /// Reads up to `wanted` frames. Returns true if the kernel had fewer: no further call is
    /// needed.
    fn read_messages(&mut self, arena: &mut Arena, wanted: usize) -> io::Result<bool> {
        let per_call = match self.capabilities.segmentation || self.merged {
            true => MERGED_FRAMES_PER_CALL,
            false => BURST_FRAMES,
        };
        let wanted = wanted.min(per_call);
        self.spare.extend(std::iter::from_fn(|| buffer::alloc_receive_buffer(arena)).take(wanted));
        let offered = self.spare.len();
        let outcome = match offered {
            0 => Ok(0),
            _ => self.batch.receive(&self.socket, arena, &mut self.spare),
        };
        let filled = *outcome.as_ref().unwrap_or(&0);
        (self.next_unread, self.merged) = (0, false);
        self.unread.extend(self.spare.drain(..filled));
        self.spare.drain(..).for_each(|frame| arena.free(frame));
        match outcome {
            Ok(filled) => Ok(filled < offered.max(1)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error) => self.on_error(error).map(|()| true),
        }
    }

    /// Turns the next unread message into a frame, or begins to split it.
    #[inline]
    fn accept_message(&mut self, arena: &mut Arena, frame: Frame) -> Option<Frame> {
        let at = self.next_unread;
        self.next_unread += 1;
        #[cfg(feature = "xdp")]
        {
            self.arrived += 1;
        }
        let received = self.batch.received_frame(at);
        let header = vnet::decode(&received.vnet, received.len);
        let is_single = !header.merged;
        let accepts = is_single || self.capabilities.segmentation && header.segment_bytes > 0;
        if accepts {
            let fits = !received.truncated;
            let frame = finish_frame(arena, frame, received.len, fits, header, received.vlan);
            if frame.is_none() {
                self.counters.drops.count(DropReason::FrameTooLong);
            }
            return frame;
        }
        self.merged = true;
        if !received.truncated {
            let data = arena.bytes(&frame);
            let rest = self.batch.overflow(at, received.len.saturating_sub(data.len()));
            self.splitter.push_part(&data[..received.len.min(data.len())]);
            self.splitter.push_part(rest);
        }
        arena.free(frame);
        begin_split(&mut self.splitter, header, arena.max_data_bytes(), &mut self.counters);
        self.split_vlan = received.vlan;
        None
    }

    /// Ignores errors that are not fatal: the interface went down.
    fn on_error(&mut self, error: io::Error) -> io::Result<()> {
        if error.raw_os_error() != Some(libc::ENETDOWN) {
            return Err(error);
        }
        self.is_down = true;
        self.check_link()
    }

    /// Asks for an interface that is down, as the kernel reports neither that it is up again nor
    /// that it is gone. After a rename it counts as down.
    fn check_link(&mut self) -> io::Result<()> {
        if self.is_down {
            if !self.socket.is_bound()? {
                return Err(io::Error::from_raw_os_error(libc::ENETDOWN));
            }
            self.is_down = !self.socket.is_up(&self.interface).unwrap_or(false);
        }
        Ok(())
    }
}

/// Shares the flows with other network cores, and returns the devices of these: none if that is not
/// possible.
fn share_flows(config: &PacketConfig, socket: &Socket) -> Vec<PacketConfig> {
    // Ports are diverted to one socket.
    let can_share = matches!(config.steering, Steering::Everything | Steering::Addresses(_))
        && config.fanout.is_none();
    if config.cores < 2 || !can_share {
        return Vec::new();
    }
    // An older kernel does not choose a group: one core reads all.
    let Ok(group) = socket.join_fanout(None) else { return Vec::new() };
    vec![config.clone().cores(1).fanout(group); config.cores - 1]
}

/// Turns a filled buffer into a received frame. Frees the buffer and returns `None` when the
/// frame does not fit: truncated, or several packets that were coalesced.
#[inline]
fn finish_frame(
    arena: &mut Arena,
    mut frame: Frame,
    len: usize,
    fits: bool,
    header: vnet::RxOffload,
    vlan: Option<(u16, u16)>,
) -> Option<Frame> {
    if !fits || !arena.set_len(&mut frame, len) {
        arena.free(frame);
        return None;
    }
    frame.set_checksum(header.checksum);
    if let Some((protocol, tag)) = vlan {
        restore_vlan_tag(arena, &mut frame, protocol, tag);
    }
    frame.set_segment_bytes(header.segment_bytes);
    Some(frame)
}

/// Bytes of a VLAN tag.
const VLAN_TAG_BYTES: usize = 4;

/// Restores the VLAN tag that the kernel removed from the frame.
fn restore_vlan_tag(arena: &mut Arena, frame: &mut Frame, protocol: u16, tag: u16) {
    if frame.len() < 12 || frame.headroom() < 4 {
        return;
    }
    frame.retreat(4);
    let data = arena.bytes_mut(frame);
    data.copy_within(4..16, 0);
    data[12..14].copy_from_slice(&protocol.to_be_bytes());
    data[14..16].copy_from_slice(&tag.to_be_bytes());
    if let Checksum::Partial { start, offset } = frame.checksum() {
        frame.set_checksum(Checksum::Partial { start: start + 4, offset });
    }
}

/// Begins to split the frame in `splitter`; counts a frame that cannot be split.
fn begin_split(
    splitter: &mut Splitter,
    header: vnet::RxOffload,
    max_frame_bytes: usize,
    counters: &mut DeviceCounters,
) {
    // A VLAN tag is added later.
    let max_frame_bytes = max_frame_bytes.saturating_sub(VLAN_TAG_BYTES);
    if !splitter.begin(max_frame_bytes, |frame| {
        Segments::new(Medium::Ethernet, frame, usize::from(header.split_bytes))
    }) {
        counters.drops.count(DropReason::FrameTooLong);
    }
}

impl PacketDevice {
    fn receive_from_ring(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> usize {
        let before = burst.len();
        for _ in 0..quota + MAX_SKIPPED_FRAMES {
            // Without a free buffer, waiting frames stay in the ring.
            if burst.len() - before == quota || arena.available() == 0 {
                break;
            }
            let frame = match self.splitter.is_active() {
                true => self.next_packet(arena),
                false => match self.next_ring_frame(arena) {
                    Some(frame) => frame,
                    None => break,
                },
            };
            if let Some(frame) = frame {
                self.deliver(frame, burst);
            }
        }
        if let Receiver::Ring(reader) = &mut self.receiver {
            reader.release_finished_block();
        }
        burst.len() - before
    }

    /// Copies the next frame of the ring, or begins to split it. `None` if the ring is empty;
    /// `Some(None)` for a frame that is split or dropped.
    fn next_ring_frame(&mut self, arena: &mut Arena) -> Option<Option<Frame>> {
        let Self { receiver: Receiver::Ring(reader), splitter, counters, .. } = self else {
            return None;
        };
        reader.release_finished_block();
        let ring_frame = match reader.next() {
            NextFrame::Empty => return None,
            NextFrame::Malformed { lost } => {
                counters.drops.add(DropReason::DeviceInvalidDescriptor, u64::from(lost));
                return Some(None);
            }
            NextFrame::Frame(frame) => frame,
        };
        let header = vnet::decode(&ring_frame.vnet, ring_frame.data.len());
        let (vlan, truncated) = (ring_frame.vlan, ring_frame.is_truncated());
        if header.merged && !truncated {
            splitter.push_part(ring_frame.data);
            begin_split(splitter, header, arena.max_data_bytes(), counters);
            self.split_vlan = vlan;
            return Some(None);
        }
        let copy = if truncated { None } else { arena.alloc_from(ring_frame.data) };
        let Some(mut frame) = copy else {
            counters.drops.count(DropReason::FrameTooLong);
            return Some(None);
        };
        frame.set_checksum(header.checksum);
        if let Some((protocol, tag)) = vlan {
            restore_vlan_tag(arena, &mut frame, protocol, tag);
        }
        Some(Some(frame))
    }
}

impl Device for PacketDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        if let Some(limit) = &mut self.gro_limit {
            limit.apply_again();
        }
        self.check_link()?;
        match self.receiver {
            Receiver::Ring(_) => Ok(self.receive_from_ring(arena, burst, quota)),
            Receiver::Syscalls => self.receive_by_syscalls(arena, burst, quota),
        }
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let mut taken = 0;
        while !burst.is_empty() {
            match self.batch.send(&self.socket, arena, burst.iter_mut()) {
                Ok(0) => break,
                Ok(sent) => {
                    taken += sent;
                    for frame in burst.drain(..sent) {
                        self.counters.transmitted += 1;
                        self.counters.transmitted_bytes += frame.len() as u64;
                        arena.free(frame);
                    }
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The socket's buffer or the device's queue is full.
                    Some(libc::EAGAIN | libc::ENOBUFS) => break,
                    Some(libc::ENXIO | libc::ENODEV) => return Err(error),
                    // The kernel refuses the first frame: too long for the interface, or the
                    // interface is down.
                    _ => {
                        taken += 1;
                        drop_first(burst, arena, &mut self.counters);
                    }
                },
            }
        }
        Ok(taken)
    }

    fn needs_retry(&mut self) -> bool {
        self.is_down
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        // An unread error would wake the sleeper again and again.
        if let Some(error) = self.socket.take_error()? {
            self.on_error(error)?;
        }
        self.check_link()?;
        let has_unread = self.splitter.is_active() || !self.unread.is_empty();
        Ok(!has_unread
            && match &self.receiver {
                Receiver::Syscalls => true,
                Receiver::Ring(reader) => !reader.has_frame(),
            })
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn counters(&mut self) -> DeviceCounters {
        // On failure the counter stays as it is.
        if let Ok(dropped) = self.socket.take_drops() {
            self.counters.drops.add(DropReason::DeviceRingFull, dropped);
        }
        self.counters.clone()
    }

    #[cfg(feature = "xdp")]
    fn shared_rules(&self) -> Option<std::sync::Arc<dyn SharedRules>> {
        Some(self.diverter.as_ref()?.shared_rules())
    }

    fn offer_queues(&mut self) -> Vec<OpenDevice> {
        let open = |config: PacketConfig| -> OpenDevice {
            Box::new(move |arena| {
                let device = PacketDevice::open(&config, arena).map_err(io::Error::other)?;
                Ok(Box::new(device))
            })
        };
        self.offered.drain(..).map(open).collect()
    }

    fn close_for_handover(
        mut self: Box<Self>,
        arena: &mut Arena,
        _keep: bool,
    ) -> Option<HandoverState> {
        self.unread.drain(..).for_each(|frame| arena.free(frame));
        #[cfg(feature = "xdp")]
        if _keep && let Some(diverter) = self.diverter.take() {
            return Some(HandoverState::Packet(Box::new(diverter)));
        }
        None
    }
}

fn drop_first(burst: &mut Burst, arena: &mut Arena, counters: &mut DeviceCounters) {
    if let Some(frame) = burst.pop_front() {
        arena.free(frame);
        counters.drops.count(DropReason::TransmitFailed);
    }
}
