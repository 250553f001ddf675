//! The device: frames as datagrams of a queue pair.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use rustix::net::sockopt::set_ipv6_add_membership;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use tidegate_memory::{Arena, Fifo, HEADROOM_BYTES};
use tidegate_wire::{DropReason, EthernetHeader, MacAddr, Medium};

use super::peers::Peers;
use super::sys::{
    BURST, Endpoint, EndpointInfo, Gid, Message, Path, PathFinder, Received, Settings,
};
use super::{GROUP, RdmaConfig, RdmaError};
use crate::buffer::LINK_HEADER_BYTES;
use crate::{Burst, Capabilities, Device, DeviceCounters};

/// Most buffers that wait for messages.
const RECEIVE_DEPTH: usize = 512;
/// Messages that the device has taken and not yet sent.
const SEND_DEPTH: usize = 256;
/// Ports whose paths are being looked for.
const MAX_SEARCHES: usize = 64;
/// Smallest MTU, that of IPv6 (RFC 8200, section 5).
const MIN_MTU: usize = 1280;

/// Device over an RDMA NIC.
pub struct RdmaDevice {
    endpoint: Endpoint,
    capabilities: Capabilities,
    counters: DeviceCounters,
    peers: Peers<Path>,
    searches: SyncSender<Gid>,
    found: Receiver<(Gid, Option<Path>)>,
    /// Messages found while preparing to sleep.
    early: Fifo<Received>,
    /// Buffers that wait for messages, and the most that may.
    posted: usize,
    receive_depth: usize,
    unsent: usize,
    /// Membership of the kernel in the group: without it the kernel drops the group's packets.
    _membership: OwnedFd,
}

impl RdmaDevice {
    /// Opens a device.
    ///
    /// # Errors
    /// See [`RdmaError`].
    pub(super) fn open(config: &RdmaConfig, arena: &Arena) -> Result<Self, RdmaError> {
        let buffer_bytes = arena.frame_bytes() - usize::from(HEADROOM_BYTES) - 1;
        let settings = Settings {
            device: &config.device,
            port: config.port.get(),
            group: GROUP.octets(),
            buffer_bytes: buffer_bytes as u32,
            receive_depth: RECEIVE_DEPTH as u32,
            send_depth: SEND_DEPTH as u32,
        };
        let fail = |step: String, source| {
            let (device, port) = (config.device.clone(), config.port.get());
            RdmaError::Setup { step, device, port, source }
        };
        let opened = Endpoint::open(&settings, arena);
        let (endpoint, finder) = opened.map_err(|(step, error)| fail(step, error))?;
        let info = *endpoint.info();
        let mtu = mtu(&info, buffer_bytes);
        if mtu < MIN_MTU {
            let (device, message_bytes) = (config.device.clone(), info.message_bytes as usize);
            return Err(RdmaError::SmallMessages { device, message_bytes });
        }
        let membership =
            join(info.interface).map_err(|error| fail("join the multicast group".into(), error))?;
        let (searches, to_find) = sync_channel(MAX_SEARCHES);
        let (to_device, found) = sync_channel(MAX_SEARCHES);
        let finding = thread::Builder::new().name("rdma paths".into());
        finding
            .spawn(move || find_paths(finder, &to_find, &to_device))
            .map_err(|error| fail("start a thread".into(), error))?;
        Ok(Self {
            capabilities: Capabilities {
                kind: "rdma",
                detail: format!(
                    "{} port {}, unreliable datagrams of queue pair {}",
                    config.device, config.port, info.queue_pair
                ),
                medium: Medium::Ethernet,
                mac: own_mac(&info).0,
                mtu,
                receive_checksum: false,
                transmit_checksum: false,
                segmentation: false,
                queues: 1,
            },
            counters: DeviceCounters::default(),
            peers: Peers::new(),
            searches,
            found,
            early: Fifo::new(),
            posted: 0,
            // The rest is for frames to send, and for those that sockets hold.
            receive_depth: RECEIVE_DEPTH.min(arena.capacity() / 2),
            unsent: 0,
            endpoint,
            _membership: membership,
        })
    }

    /// Hands over buffers for as many messages as there is space for.
    fn refill(&mut self, arena: &mut Arena) {
        while self.posted < self.receive_depth {
            let (mut offsets, mut count) = ([0; BURST], 0);
            for slot in offsets.iter_mut().take(self.receive_depth - self.posted) {
                let Some(frame) = arena.alloc() else { break };
                *slot = arena.lend(frame);
                count += 1;
            }
            let taken = self.endpoint.post_buffers(&offsets[..count]);
            self.posted += taken;
            for &offset in &offsets[taken..count] {
                free_lent(arena, offset);
            }
            if taken < BURST {
                return;
            }
        }
    }

    /// Returns sent frames to the arena.
    fn reap(&mut self, arena: &mut Arena) -> io::Result<()> {
        while self.unsent > 0 {
            let reaped = self.endpoint.reap()?;
            let mut count = 0;
            for (offset, is_sent) in reaped.iter() {
                count += 1;
                free_lent(arena, offset);
                if !is_sent {
                    self.counters.drops.count(DropReason::TransmitFailed);
                }
            }
            self.unsent -= count;
            if count < BURST {
                break;
            }
        }
        Ok(())
    }

    /// Learns where the sender of a frame is.
    fn learn(&mut self, frame: &[u8], from: &Received) {
        let Ok((header, _)) = EthernetHeader::parse(frame) else { return };
        let is_search_due = self.peers.learn(header.source, from.gid, from.queue_pair);
        if is_search_due && self.searches.try_send(from.gid).is_err() {
            // The thread is busy: the next frame tries again.
            self.peers.set_path(from.gid, None);
        }
    }

    /// Makes a frame of a message, and drops one that is too long or this device's own.
    fn take(
        &mut self,
        arena: &mut Arena,
        received: &Received,
        burst: &mut Burst,
    ) -> io::Result<()> {
        self.posted -= 1;
        if received.status != 0 {
            free_lent(arena, received.offset);
            let text = format!("the RDMA device has failed with status {}", received.status);
            return Err(io::Error::other(text));
        }
        let info = self.endpoint.info();
        // The group brings this device's own messages, too.
        let is_own = (received.gid, received.queue_pair) == (info.gid, info.queue_pair);
        let is_long = received.bytes as usize > self.capabilities.mtu + LINK_HEADER_BYTES;
        let len = if is_own || is_long { 0 } else { received.bytes };
        let Some(frame) = arena.reclaim(received.offset, len) else { return Ok(()) };
        if is_own || is_long {
            arena.free(frame);
            if is_long {
                self.counters.drops.count(DropReason::FrameTooLong);
            }
            return Ok(());
        }
        self.learn(arena.bytes(&frame), received);
        self.counters.received += 1;
        self.counters.received_bytes += u64::from(len);
        burst.push_back(frame);
        Ok(())
    }
}

/// Frees a frame that was lent to the device.
fn free_lent(arena: &mut Arena, offset: u64) {
    if let Some(frame) = arena.reclaim(offset, 0) {
        arena.free(frame);
    }
}

/// Largest IP packet that fits both in a message and in a buffer.
fn mtu(info: &EndpointInfo, buffer_bytes: usize) -> usize {
    (info.message_bytes as usize).min(buffer_bytes).saturating_sub(LINK_HEADER_BYTES)
}

/// Locally administered address: the end of the port's address, and the queue pair.
fn own_mac(info: &EndpointInfo) -> MacAddr {
    let [.., gid_high, gid_low] = info.gid;
    let [_, high, middle, low] = info.queue_pair.to_be_bytes();
    MacAddr([0x02, gid_high, gid_low, high, middle, low])
}

/// Has the kernel accept the group's packets on an interface.
fn join(interface: u32) -> io::Result<OwnedFd> {
    // Not by the C library, whose sockets are the stack's in an unmodified program.
    let socket = socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    set_ipv6_add_membership(&socket, &GROUP, interface)?;
    Ok(socket)
}

/// Finds the paths that are searched for until the device is closed. Finding one may wait.
fn find_paths(
    mut finder: PathFinder,
    searches: &Receiver<Gid>,
    found: &SyncSender<(Gid, Option<Path>)>,
) {
    for gid in searches {
        if found.send((gid, finder.find(&gid))).is_err() {
            return;
        }
    }
}

impl Device for RdmaDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.reap(arena)?;
        while let Ok((gid, path)) = self.found.try_recv() {
            self.peers.set_path(gid, path);
        }
        let before = burst.len();
        while burst.len() - before < quota {
            let left = (quota - (burst.len() - before)).min(BURST);
            let mut received = [Received::default(); BURST];
            let count = match self.early.pop_front() {
                Some(early) => {
                    received[0] = early;
                    1
                }
                None => self.endpoint.receive(&mut received[..left])?,
            };
            for message in &received[..count] {
                self.take(arena, message, burst)?;
            }
            if count == 0 {
                break;
            }
        }
        self.refill(arena);
        Ok(burst.len() - before)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.reap(arena)?;
        let mut taken = 0;
        loop {
            let (mut messages, mut count) = ([Message::new(0, 0, None); BURST], 0);
            while count < BURST.min(SEND_DEPTH - self.unsent) {
                let Some(frame) = burst.pop_front() else { break };
                taken += 1;
                let data = arena.bytes(&frame);
                let Some(destination) = data.first_chunk::<6>() else {
                    self.counters.drops.count(DropReason::TransmitFailed);
                    arena.free(frame);
                    continue;
                };
                let (to, len) = (self.peers.find(MacAddr(*destination)), data.len());
                messages[count] = Message::new(arena.lend(frame), len, to);
                count += 1;
            }
            let accepted = self.endpoint.send(&messages[..count]);
            let (sent, refused) = messages[..count].split_at(accepted);
            self.unsent += accepted;
            self.counters.transmitted += accepted as u64;
            self.counters.transmitted_bytes += sent.iter().map(Message::bytes).sum::<u64>();
            for message in refused {
                // Only a message that is not right is refused: there is space for all.
                self.counters.drops.count(DropReason::TransmitFailed);
                free_lent(arena, message.offset());
            }
            if count < BURST {
                return Ok(taken);
            }
        }
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.endpoint.arm()?;
        // What came before the device was armed gives no event.
        let mut received = [Received::default(); BURST];
        let count = self.endpoint.receive(&mut received)?;
        self.early.extend(received.into_iter().take(count));
        Ok(self.early.is_empty())
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.endpoint.event_fd())
    }

    fn counters(&mut self) -> DeviceCounters {
        self.counters.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_addresses_of_two_queue_pairs_differ() {
        let info =
            |queue_pair| EndpointInfo { gid: [7; 16], queue_pair, ..EndpointInfo::default() };
        assert_eq!(own_mac(&info(0x01_0203)), MacAddr([2, 7, 7, 1, 2, 3]));
        assert!(own_mac(&info(0xff_ffff)).is_valid_unicast());
        assert_ne!(own_mac(&info(17)), own_mac(&info(18)));
    }

    #[test]
    fn mtu_fits_message_and_buffer() {
        let info = |message_bytes| EndpointInfo { message_bytes, ..EndpointInfo::default() };
        assert_eq!(mtu(&info(4096), 1791), 1791 - LINK_HEADER_BYTES);
        assert_eq!(mtu(&info(1024), 1791), 1024 - LINK_HEADER_BYTES);
        assert_eq!(mtu(&info(0), 1791), 0);
    }
}
