//! The `packet` port: AF_PACKET, on any Ethernet interface, in a user namespace
//! too.
//!
//! The kernel goes on seeing every frame. That is harmless for an address that
//! it does not have: it drops what is not for it, unless forwarding is on
//! (`sysctl net.ipv4.ip_forward`), when it may forward or answer with
//! unreachables; turn it off on the interface. For an address that the kernel
//! does have, it would answer beside Tidegate ("port unreachable"), so opening
//! refuses one: sharing an address needs the `xdp` port.
//!
//! Receiving is done in one of two ways ([`Receive`]); sending is always by
//! `sendmmsg`, up to 64 frames a call. A transmit ring would save one copy but
//! holds its slots until the receiver has read them, so a slow peer on veth
//! would stop the port.

mod filter;
mod ring;
mod sys;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use tidegate_memory::{Arena, Checksum, Frame, FrameSize, HEADROOM_BYTES};
use tidegate_wire::{DropReason, Medium};

use crate::buffer::LINK_HEADER_BYTES;
use crate::netlink::{self, Interface, MergeLimit, NetlinkError};
use crate::{Burst, Capabilities, Port, PortCounters, buffer, vnet};
use ring::{Reader, Step};
use sys::{BURST, Batch, Socket};

/// How frames come out of the kernel.
///
/// Over veth a lone frame goes there and back in 8 µs with calls and in 1 ms
/// with rings. A frame of a full burst costs the reader 0.7 µs with calls and
/// 0.05 µs with a ring, and with a ring 0.2 µs more on the core that delivers
/// it, which makes the copy. So calls are the usual setting, and a ring is for
/// a port that is always busy. `examples/packet_ways.rs` measures both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receive {
    /// `recvmmsg`: a frame can be read as soon as it arrives, at the price of
    /// a system call per burst.
    Calls,
    /// A TPACKET_V3 ring: no call while frames come, but the kernel hands a
    /// block over only when it is full or a millisecond old (a timer tick on
    /// kernels before 6.18), so a lone frame waits that long. For those who
    /// are not root it also holds more than a socket's buffer may.
    Ring,
}

/// Which frames to take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Steering {
    /// Everything that arrives at the interface.
    Everything,
    /// IP packets to these addresses, and the ARP and neighbour discovery that
    /// belongs to them. A socket filter sorts out the rest in the kernel. None
    /// of them may be an address of the kernel's.
    Addresses(Vec<IpAddr>),
}

/// How to open a [`PacketPort`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketConfig {
    /// The name of the interface.
    pub interface: String,
    /// Which frames to take.
    pub steering: Steering,
    /// How to receive.
    pub receive: Receive,
    /// Memory for received frames that wait, in bytes: the ring, or the
    /// socket's buffer, which the kernel may keep smaller
    /// (`sysctl net.core.rmem_max`) for those who are not root.
    pub buffer_bytes: usize,
    /// Sends past the queueing discipline: faster, but `tc` and its queue do
    /// not see the frames.
    pub qdisc_bypass: bool,
    /// Takes frames for other hardware addresses than the interface's too.
    pub promiscuous: bool,
    /// Lets the kernel cut what is sent into segments and merge those that
    /// arrive ([`Capabilities::segmentation`]). Needs frames of
    /// [`FrameSize::K64`]; goes through the queueing discipline, where the
    /// cutting is done. With CAP_NET_ADMIN the interface merges no more than
    /// fits into a frame for as long as the port is open (`gro_max_size`).
    pub segmentation: bool,
    /// Joins this fanout group: the flows are spread by their hash over all
    /// ports of the group (`PACKET_FANOUT_HASH`).
    pub fanout: Option<u16>,
}

impl PacketConfig {
    /// Everything from this interface, with the usual settings.
    pub fn new(interface: impl Into<String>) -> Self {
        Self {
            interface: interface.into(),
            steering: Steering::Everything,
            receive: Receive::Calls,
            buffer_bytes: 4 << 20,
            qdisc_bypass: true,
            promiscuous: false,
            segmentation: false,
            fanout: None,
        }
    }
}

/// Why a [`PacketPort`] could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum PacketError {
    /// The interface does not exist, or the kernel did not tell.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Packet sockets are not allowed.
    #[error(
        "a packet socket needs CAP_NET_RAW: run as root, or give it to the program with \
         `setcap cap_net_raw+ep`, or try it inside `unshare -rn`, which has network devices of \
         its own"
    )]
    Permission,
    /// The interface is down.
    #[error("the interface {0} is down: `ip link set {0} up`")]
    Down(String),
    /// Not Ethernet.
    #[error(
        "the interface {0} does not carry Ethernet frames, so a packet port cannot use it: for \
         a TUN device open a tap port on it"
    )]
    NotEthernet(String),
    /// The kernel has the address too.
    #[error(
        "{address} is an address of the kernel on {interface}: on a packet port the kernel sees \
         every packet too and would answer \"port unreachable\"; use the xdp port to share an \
         address, or choose an address that the kernel does not have"
    )]
    SharedAddress {
        /// The address.
        address: IpAddr,
        /// The interface that has it.
        interface: String,
    },
    /// The buffer is too small or too large.
    #[error("a packet port's buffer is between 64 KiB and 1 GiB, not {0} bytes")]
    BufferSize(usize),
    /// What the kernel merges does not fit into a frame.
    #[error(
        "segmentation needs frames of 64 KiB and `recvmmsg`: open the port with an arena of \
         `FrameSize::K64` and `Receive::Calls`"
    )]
    SmallFrames,
    /// The kernel refused a step.
    #[error("cannot {step} on {interface}: {source}")]
    Setup {
        /// What was tried.
        step: &'static str,
        /// The interface.
        interface: String,
        /// What the kernel said.
        source: io::Error,
    },
}

/// The size of a block of the ring. A frame must fit in one; small blocks fill
/// early and so wait less.
const BLOCK_BYTES: usize = 32 << 10;

/// The shortest time-out of a block that the kernel knows.
const BLOCK_TIMEOUT_MS: u32 = 1;

/// The most frames that one receive looks at beyond its quota's worth: frames
/// too long are dropped without using the quota, and must not hold it up.
const SKIP_MAX: usize = 64;

/// Where frames hold many segments, so many are taken by one call, and no more
/// calls are made when there are so many bytes: what a burst brings is
/// acknowledged when all of it was read, and until then the sender waits.
const MERGED_FRAMES: usize = 4;
const MERGED_BYTES: u64 = 96 << 10;

enum Receiver {
    Calls,
    Ring(Reader),
}

/// Frames of one Ethernet interface by AF_PACKET.
pub struct PacketPort {
    capabilities: Capabilities,
    counters: PortCounters,
    // The ring is unmapped before its socket is closed.
    receiver: Receiver,
    batch: Batch,
    spare: Vec<Frame>,
    socket: Socket,
    /// For what is merged to fit into frames.
    _merge_limit: Option<MergeLimit>,
}

impl PacketPort {
    /// Opens the port. Frames arrive from then on.
    ///
    /// # Errors
    /// See [`PacketError`]; nothing is left behind.
    pub fn open(config: &PacketConfig, arena: &mut Arena) -> Result<Self, PacketError> {
        let large = arena.frame_bytes() >= FrameSize::K64.bytes();
        if config.segmentation && !(large && config.receive == Receive::Calls) {
            return Err(PacketError::SmallFrames);
        }
        let interface = Interface::by_name(&config.interface)?;
        check(config, &interface)?;
        let (socket, receiver) = connect(config, &interface)?;
        // The link header does not count for what is merged.
        let longest = u16::MAX - HEADROOM_BYTES - LINK_HEADER_BYTES as u16;
        // Who may not set it loses what does not fit, which is counted.
        let limit = || MergeLimit::set(interface.index, longest.into()).ok().flatten();
        let merge_limit = config.segmentation.then(limit).flatten();
        let detail = match config.receive {
            Receive::Calls if config.segmentation => {
                "recvmmsg and sendmmsg, segmentation by the kernel".to_owned()
            }
            Receive::Calls => "recvmmsg and sendmmsg".to_owned(),
            Receive::Ring => {
                format!("TPACKET_V3 ring of {} KiB, sendmmsg", config.buffer_bytes >> 10)
            }
        };
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
            counters: PortCounters::default(),
            receiver,
            batch: Batch::new(),
            spare: Vec::with_capacity(BURST),
            socket,
            _merge_limit: merge_limit,
        })
    }

    fn receive_by_calls(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        let segments = self.capabilities.segmentation;
        let mut taken = 0;
        let mut looked_at = 0;
        let per_call = if segments { MERGED_FRAMES } else { BURST };
        let before_bytes = self.counters.received_bytes;
        while taken < quota && looked_at < quota + SKIP_MAX {
            if segments && self.counters.received_bytes - before_bytes >= MERGED_BYTES {
                break;
            }
            let want = (quota - taken).min(per_call);
            self.spare.extend(std::iter::from_fn(|| buffer::blank(arena)).take(want));
            let offered = self.spare.len();
            let outcome = match offered {
                0 => Ok(0),
                _ => self.batch.receive(&self.socket, arena, &mut self.spare),
            };
            let filled = *outcome.as_ref().unwrap_or(&0);
            for (at, frame) in self.spare.drain(..).enumerate() {
                if at >= filled {
                    arena.free(frame);
                    continue;
                }
                let arrival = self.batch.arrival(at);
                let header = vnet::decode(&arrival.vnet, arrival.len);
                let takes = !header.merged || segments && header.segment_bytes > 0;
                let fits = takes && !arrival.truncated;
                match finish(arena, frame, arrival.len, fits, header, arrival.vlan) {
                    Some(frame) => {
                        count_received(&mut self.counters, &frame);
                        burst.push_back(frame);
                        taken += 1;
                    }
                    None => self.counters.drops.count(DropReason::FrameTooLong),
                }
            }
            looked_at += filled;
            match outcome {
                // The kernel had fewer than we asked for: no need to ask again.
                Ok(filled) if filled < offered.max(1) => break,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => break,
                Err(error) => {
                    self.on_error(error)?;
                    break;
                }
            }
        }
        Ok(taken)
    }

    /// Passes over errors that a port outlives: the interface went down. It
    /// may come up again, unlike one that is gone.
    fn on_error(&self, error: io::Error) -> io::Result<()> {
        if error.raw_os_error() == Some(libc::ENETDOWN) && self.socket.is_bound()? {
            return Ok(());
        }
        Err(error)
    }
}

fn check(config: &PacketConfig, interface: &Interface) -> Result<(), PacketError> {
    if interface.medium != Some(Medium::Ethernet) {
        return Err(PacketError::NotEthernet(interface.name.clone()));
    }
    if !interface.up {
        return Err(PacketError::Down(interface.name.clone()));
    }
    if !((64 << 10)..=(1 << 30)).contains(&config.buffer_bytes) {
        return Err(PacketError::BufferSize(config.buffer_bytes));
    }
    let Steering::Addresses(wanted) = &config.steering else { return Ok(()) };
    // The kernel answers for its addresses on whichever interface they are.
    for other in Interface::all()? {
        for owned in netlink::addresses(other.index)? {
            if wanted.contains(&owned.address()) {
                return Err(PacketError::SharedAddress {
                    address: owned.address(),
                    interface: other.name,
                });
            }
        }
    }
    Ok(())
}

/// Opens, sets up and binds the socket, in the order that the kernel wants.
fn connect(
    config: &PacketConfig,
    interface: &Interface,
) -> Result<(Socket, Receiver), PacketError> {
    let step = |step: &'static str| {
        let interface = interface.name.clone();
        move |source| PacketError::Setup { step, interface, source }
    };
    let socket = Socket::open().map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => PacketError::Permission,
        _ => step("open a packet socket")(source),
    })?;
    socket
        .set_packet(libc::PACKET_VNET_HDR, 1)
        .map_err(step("turn on virtio headers (PACKET_VNET_HDR)"))?;
    socket.set_packet(libc::PACKET_AUXDATA, 1).map_err(step("ask for VLAN tags"))?;
    socket
        .set_packet(PACKET_IGNORE_OUTGOING, 1)
        .map_err(step("ignore sent frames (PACKET_IGNORE_OUTGOING, Linux 4.20)"))?;
    // Past the queueing discipline nothing is cut.
    if config.qdisc_bypass && !config.segmentation {
        socket
            .set_packet(libc::PACKET_QDISC_BYPASS, 1)
            .map_err(step("bypass the queueing discipline"))?;
    }
    if let Steering::Addresses(addresses) = &config.steering {
        socket
            .attach_filter(&filter::for_addresses(addresses))
            .map_err(step("attach a socket filter"))?;
    }
    socket.set_buffers(config.buffer_bytes).map_err(step("set the socket's buffers"))?;
    let receiver = match config.receive {
        Receive::Calls => Receiver::Calls,
        Receive::Ring => {
            let blocks = config.buffer_bytes.div_ceil(BLOCK_BYTES).max(2);
            let ring = socket
                .map_ring(BLOCK_BYTES, blocks, BLOCK_TIMEOUT_MS)
                .map_err(step("make a TPACKET_V3 ring (ask for a smaller buffer)"))?;
            Receiver::Ring(Reader::new(ring))
        }
    };
    // Neighbour discovery comes to groups that the card may filter out.
    socket
        .join(interface.index, libc::PACKET_MR_ALLMULTI)
        .map_err(step("join the link's groups"))?;
    if config.promiscuous {
        socket
            .join(interface.index, libc::PACKET_MR_PROMISC)
            .map_err(step("turn on promiscuous mode"))?;
    }
    socket.bind(interface.index).map_err(step("bind a packet socket"))?;
    if let Some(group) = config.fanout {
        let value = i32::from(group) | (libc::PACKET_FANOUT_HASH as i32) << 16;
        socket.set_packet(libc::PACKET_FANOUT, value).map_err(step("join the fanout group"))?;
    }
    Ok((socket, receiver))
}

/// Not in the `libc` crate yet.
const PACKET_IGNORE_OUTGOING: i32 = 23;

/// Makes a filled buffer a frame to hand on. `None`, and the buffer goes back,
/// when the frame does not fit: it was cut off, or stands for several packets.
#[inline]
fn finish(
    arena: &mut Arena,
    mut frame: Frame,
    len: usize,
    fits: bool,
    header: vnet::Received,
    vlan: Option<(u16, u16)>,
) -> Option<Frame> {
    if !fits || !arena.set_len(&mut frame, len) {
        arena.free(frame);
        return None;
    }
    frame.set_checksum(header.checksum);
    if let Some((protocol, tag)) = vlan {
        put_tag_back(arena, &mut frame, protocol, tag);
    }
    frame.set_segment_bytes(header.segment_bytes);
    Some(frame)
}

/// Puts the VLAN tag back that the kernel took out of the frame.
fn put_tag_back(arena: &mut Arena, frame: &mut Frame, protocol: u16, tag: u16) {
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

#[inline]
fn count_received(counters: &mut PortCounters, frame: &Frame) {
    counters.received += 1;
    counters.received_bytes += frame.len() as u64;
}

fn receive_from_ring(
    reader: &mut Reader,
    counters: &mut PortCounters,
    arena: &mut Arena,
    burst: &mut Burst,
    quota: usize,
) -> usize {
    let mut taken = 0;
    for _ in 0..quota + SKIP_MAX {
        // Without a frame to copy to, what waits stays in the ring.
        if taken == quota || arena.available() == 0 {
            break;
        }
        reader.settle();
        match reader.next() {
            Step::Empty => break,
            Step::Broken { lost } => {
                counters.drops.add(DropReason::PortInvalidDescriptor, u64::from(lost));
            }
            Step::Frame(slot) => {
                let header = vnet::decode(&slot.vnet, slot.data.len());
                let copy = if slot.truncated || header.merged {
                    None
                } else {
                    arena.alloc_from(slot.data)
                };
                let Some(mut frame) = copy else {
                    counters.drops.count(DropReason::FrameTooLong);
                    continue;
                };
                frame.set_checksum(header.checksum);
                if let Some((protocol, tag)) = slot.vlan {
                    put_tag_back(arena, &mut frame, protocol, tag);
                }
                count_received(counters, &frame);
                burst.push_back(frame);
                taken += 1;
            }
        }
    }
    reader.settle();
    taken
}

impl Port for PacketPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        match &mut self.receiver {
            Receiver::Ring(reader) => {
                Ok(receive_from_ring(reader, &mut self.counters, arena, burst, quota))
            }
            Receiver::Calls => self.receive_by_calls(arena, burst, quota),
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
                    // The first frame is refused: too long for the interface,
                    // or the interface is down.
                    _ => {
                        taken += 1;
                        refuse(burst, arena, &mut self.counters);
                    }
                },
            }
        }
        Ok(taken)
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        // An error that is not read would wake us again and again.
        if let Some(error) = self.socket.take_error()? {
            self.on_error(error)?;
        }
        Ok(match &self.receiver {
            Receiver::Calls => true,
            Receiver::Ring(reader) => !reader.is_waiting(),
        })
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn counters(&mut self) -> PortCounters {
        // A failure leaves the count where it was: there is nothing to add.
        if let Ok(dropped) = self.socket.take_drops() {
            self.counters.drops.add(DropReason::PortRingFull, dropped);
        }
        self.counters.clone()
    }
}

fn refuse(burst: &mut Burst, arena: &mut Arena, counters: &mut PortCounters) {
    if let Some(frame) = burst.pop_front() {
        arena.free(frame);
        counters.drops.count(DropReason::TransmitFailed);
    }
}
