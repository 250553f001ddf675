//! Passive reception: a ring of copies of the frames that pass an interface.
//!
//! The kernel keeps all of its traffic, and nothing is sent. Frames are read where the kernel put
//! them, without another copy. Of each frame the kernel copies only the first bytes. When the ring
//! is full, the kernel counts a frame instead of copying it, so that a reader without processor
//! time makes frames cheap.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use super::config::{PacketConfig, PacketError};
use super::filter;
use super::open::{
    BLOCK_BYTES, BLOCK_TIMEOUT_MS, PACKET_IGNORE_OUTGOING, open_raw_socket, validate,
};
use super::ring::{NextFrame, RingReader};
use super::sys::Socket;
use crate::interface_settings::InterfaceId;
use crate::netlink::Interface;
use crate::rx_missed::RxMissedCounters;
use crate::vnet;

/// Settings of a [`PassiveRing`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassiveConfig {
    /// Name of the interface.
    pub interface: String,
    /// Memory of the ring in bytes.
    pub ring_bytes: usize,
    /// Maximum bytes of each frame that are copied.
    pub snap_bytes: u32,
}

impl PassiveConfig {
    /// This interface, with a ring of 32 MiB and the first 192 bytes of each frame: the headers of
    /// nearly every packet.
    pub fn new(interface: impl Into<String>) -> Self {
        Self { interface: interface.into(), ring_bytes: 32 << 20, snap_bytes: 192 }
    }

    /// Sets the memory of the ring in bytes.
    pub fn ring_bytes(self, ring_bytes: usize) -> Self {
        Self { ring_bytes, ..self }
    }

    /// Sets the maximum bytes of each frame that are copied.
    pub fn snap_bytes(self, snap_bytes: u32) -> Self {
        Self { snap_bytes, ..self }
    }
}

/// A frame that has passed the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassiveFrame<'a> {
    /// First bytes of the frame, without the VLAN tag in `vlan`.
    pub data: &'a [u8],
    /// Bytes of the whole frame, without the VLAN tag in `vlan`.
    pub frame_bytes: usize,
    /// Outermost VLAN tag, if the kernel removed the tag: protocol and tag control information.
    pub vlan: Option<(u16, u16)>,
    /// Payload bytes of each packet, if the frame stands for several packets; otherwise 0.
    pub segment_bytes: u16,
}

/// Counters of a [`PassiveRing`] since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassiveCounters {
    /// Frames that have passed the interface, with those that were lost on a full ring.
    pub passed: u64,
    /// Frames that the kernel counted instead of copying, because the ring was full.
    pub ring_full: u64,
    /// Frames in blocks that the kernel damaged.
    pub damaged: u64,
    /// Frames that a full receive ring of the interface lost before the kernel had them. 0 if the
    /// interface has no such counter. That of a veth also counts frames that were read: those of
    /// VLANs that the kernel has no interface for.
    pub rx_missed: u64,
}

impl PassiveCounters {
    /// Frames that were not read.
    pub fn lost(&self) -> u64 {
        self.ring_full + self.damaged + self.rx_missed
    }
}

/// Ring of the frames that pass an interface in both directions, in promiscuous mode. On the
/// loopback interface each frame is read once, as received.
pub struct PassiveRing {
    // The ring is unmapped before its socket is closed.
    reader: RingReader,
    socket: Socket,
    interface: Interface,
    rx_missed: RxMissedCounters,
    rx_missed_before: u64,
    counters: PassiveCounters,
    /// Frames taken from the ring, the damaged ones included.
    taken: u64,
}

impl PassiveRing {
    /// Opens the ring. Frames arrive from then on.
    ///
    /// # Errors
    /// See [`PacketError`].
    pub fn open(config: &PassiveConfig) -> Result<Self, PacketError> {
        let interface = Interface::by_name(&config.interface)?;
        let device = PacketConfig::new(&config.interface).buffer_bytes(config.ring_bytes);
        validate(&device, &interface)?;
        let step = |step| {
            let interface = interface.name.clone();
            move |source| PacketError::Setup { step, interface, source }
        };
        let socket = open_raw_socket(&interface)?;
        if interface.loopback {
            socket
                .set_packet(PACKET_IGNORE_OUTGOING, 1)
                .map_err(step("ignore sent frames (PACKET_IGNORE_OUTGOING, Linux 4.20)"))?;
        }
        let filter = filter::first_bytes(config.snap_bytes);
        socket.attach_filter(&filter).map_err(step("attach a socket filter"))?;
        let blocks = config.ring_bytes.div_ceil(BLOCK_BYTES).max(2);
        let ring = socket
            .map_ring(BLOCK_BYTES, blocks, BLOCK_TIMEOUT_MS)
            .map_err(step("create a TPACKET_V3 ring (use a smaller ring)"))?;
        socket
            .add_membership(interface.index, libc::PACKET_MR_PROMISC)
            .map_err(step("turn on promiscuous mode"))?;
        let id = InterfaceId { index: interface.index, mac: interface.mac.0 };
        let is_veth = interface.kind.as_deref() == Some("veth");
        let rx_missed = RxMissedCounters::open(&interface.name, id, is_veth);
        let rx_missed_before = rx_missed.read().unwrap_or(0);
        socket.bind(interface.index).map_err(step("bind a packet socket"))?;
        Ok(Self {
            reader: RingReader::new(ring),
            socket,
            interface,
            rx_missed,
            rx_missed_before,
            counters: PassiveCounters::default(),
            taken: 0,
        })
    }

    /// Passes up to `quota` waiting frames to `observe`, and returns the number of frames taken
    /// from the ring.
    #[inline]
    pub fn receive(&mut self, quota: u32, mut observe: impl FnMut(&PassiveFrame<'_>)) -> u32 {
        let mut taken = 0;
        while taken < quota {
            self.reader.release_finished_block();
            match self.reader.next() {
                NextFrame::Empty => break,
                NextFrame::Malformed { lost } => {
                    self.counters.damaged += u64::from(lost);
                    taken += lost;
                }
                NextFrame::Frame(frame) => {
                    taken += 1;
                    observe(&PassiveFrame {
                        data: frame.data,
                        frame_bytes: frame.len,
                        vlan: frame.vlan,
                        segment_bytes: vnet::segment_bytes(&frame.vnet),
                    });
                }
            }
        }
        self.reader.release_finished_block();
        self.taken += u64::from(taken);
        taken
    }

    /// Counters so far. Makes system calls. A counter that cannot be read stays as it is.
    pub fn counters(&mut self) -> PassiveCounters {
        if let Ok((passed, dropped)) = self.socket.take_statistics() {
            self.counters.passed += passed;
            self.counters.ring_full += dropped;
        }
        if let Ok(missed) = self.rx_missed.read() {
            self.counters.rx_missed = missed.saturating_sub(self.rx_missed_before);
        }
        self.counters
    }

    /// Ends the reception of further frames. Frames that have arrived stay readable.
    ///
    /// # Errors
    /// The interface is gone.
    pub fn stop(&self) -> io::Result<()> {
        self.socket.unbind(self.interface.index)
    }

    /// True if every frame that has arrived was read. A frame becomes readable only when its block
    /// is full, or a millisecond old.
    pub fn is_drained(&mut self) -> bool {
        let counters = self.counters();
        counters.passed == counters.ring_full + self.taken
    }

    /// Prepares to sleep. Returns false if a frame is waiting.
    ///
    /// # Errors
    /// The interface is gone.
    pub fn prepare_sleep(&mut self) -> io::Result<bool> {
        // An unread error would wake the sleeper again and again. An interface that is removed
        // leaves an error when it goes down, which is before the socket loses it.
        self.socket.take_error()?;
        if !self.socket.is_bound()? {
            let message = format!("the interface {} is gone", self.interface.name);
            return Err(io::Error::new(io::ErrorKind::NotFound, message));
        }
        Ok(!self.reader.has_frame())
    }
}

/// Descriptor that is readable when frames are waiting.
impl AsFd for PassiveRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
