//! Sends runs of TCP segments as one frame each, by a packet socket beside the AF_XDP sockets: the
//! kernel or the NIC segments, which AF_XDP cannot ask for (TSO, GSO).

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, sendmsg,
};
use tidegate_memory::Arena;

use super::socket::raise_send_buffer;
use super::sys::{self, IntOption};
use crate::coalescing::CoalescedSegments;
use crate::{Burst, DeviceCounters};

/// Minimum and maximum number of segments in a run.
const MIN_SEGMENTS: usize = 3;
const MAX_SEGMENTS: usize = 64;
/// Minimum length of a segment's frame: runs of short ones are rare.
const MIN_FRAME_BYTES: usize = 512;
/// Bytes that may wait in the socket.
const SEND_BUFFER_BYTES: usize = 4 << 20;

pub(super) struct SegmentSender {
    socket: OwnedFd,
    /// The kernel has refused to send coalesced segments here.
    is_refused: bool,
    sent: u64,
    sent_bytes: u64,
}

/// Run of segments in a burst.
pub(super) struct Run {
    /// Place of the first.
    pub(super) at: usize,
    count: usize,
    segments: CoalescedSegments,
}

impl SegmentSender {
    /// Opens the socket, which receives nothing.
    ///
    /// # Errors
    /// Packet sockets are not permitted.
    pub(super) fn open(interface_index: u32) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
        sys::set_option(socket.as_fd(), IntOption::PacketVirtioHeader, 1)?;
        raise_send_buffer(&socket, SEND_BUFFER_BYTES)?;
        sys::bind_packet_socket(socket.as_fd(), interface_index)?;
        Ok(Self { socket, is_refused: false, sent: 0, sent_bytes: 0 })
    }

    /// Finds the first run of a burst.
    pub(super) fn find(&self, arena: &Arena, burst: &Burst) -> Option<Run> {
        if self.is_refused {
            return None;
        }
        let mut at = 0;
        while at + MIN_SEGMENTS <= burst.len() {
            let first = burst.get(at).filter(|frame| frame.len() >= MIN_FRAME_BYTES);
            let segments = first.and_then(|frame| CoalescedSegments::begin(arena.bytes(frame)));
            let Some(mut segments) = segments else {
                at += 1;
                continue;
            };
            let rest = burst.iter().skip(at + 1).take(MAX_SEGMENTS - 1);
            let count = 1 + rest.take_while(|frame| segments.push(arena.bytes(frame))).count();
            if count >= MIN_SEGMENTS {
                return Some(Run { at, count, segments });
            }
            at += count;
        }
        None
    }

    /// Sends a run that is at the front of the burst by now, and returns the number of segments taken
    /// from it. `None`: the socket is full, or the kernel sends no coalesced segments here, and then
    /// no further run is found.
    pub(super) fn send(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        mut run: Run,
    ) -> Option<usize> {
        let (vnet, headers) = (run.segments.vnet_header(), run.segments.headers());
        let mut parts = [IoSlice::new(&[]); MAX_SEGMENTS + 2];
        (parts[0], parts[1]) = (IoSlice::new(&vnet), IoSlice::new(headers));
        for (part, frame) in parts[2..].iter_mut().zip(burst.iter().take(run.count)) {
            *part = IoSlice::new(&arena.bytes(frame)[headers.len()..]);
        }
        let control = &mut SendAncillaryBuffer::default();
        match sendmsg(&self.socket, &parts[..run.count + 2], control, SendFlags::DONTWAIT) {
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => return None,
            Err(_) => {
                self.is_refused = true;
                return None;
            }
        }
        for frame in burst.drain(..run.count) {
            self.sent += 1;
            self.sent_bytes += frame.len() as u64;
            arena.free(frame);
        }
        Some(run.count)
    }

    /// Bytes of the frames sent so far.
    #[cfg(feature = "packet")]
    pub(super) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    pub(super) fn add_counters(&self, counters: &mut DeviceCounters) {
        counters.transmitted += self.sent;
        counters.transmitted_bytes += self.sent_bytes;
    }
}
