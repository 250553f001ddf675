//! One queue of a device: an AF_XDP socket and the frames lent to the kernel.

use std::io;
use std::time::{Duration, Instant};

use tidegate_memory::{Arena, Checksum};
use tidegate_wire::DropReason::{
    DeviceInvalidDescriptor, DeviceRingFull, FrameTooLong, NoBuffer, TransmitFailed,
};
use tidegate_wire::{DropCounters, Medium};

use super::socket::{Kick, XdpSocket};
#[cfg(feature = "packet")]
use super::streams::TrafficTotals;
use super::sys::Descriptor;
use crate::buffer::LINK_HEADER_BYTES;
use crate::segments::{Segments, Splitter};
use crate::transport::local_checksum;
use crate::{Burst, DeviceCounters};

/// Minimum length of a transmitted frame in bytes: the kernel refuses to send less than an
/// Ethernet header.
const MIN_FRAME_BYTES: usize = 14;

/// Time without a frame sent by the driver after which new frames are dropped instead of
/// queued.
const MAX_STALL: Duration = Duration::from_secs(1);

/// State of busy polling by the socket's system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Polling {
    /// Not configured, or the kernel does not know the NAPI instance: some drivers, veth among
    /// them, do not report it. A system call would be wasted.
    Off,
    /// Configured; the first packet shows if the NAPI instance is known.
    Untested,
    /// The socket's system calls run the driver's receive path.
    On,
}

/// Settings of the queues of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueSettings {
    /// Target number of frames lent to the kernel for receiving.
    pub lent_target: u32,
    pub busy_poll: bool,
    /// Frames may come from senders on this machine, with unfilled checksums.
    pub local_peers: bool,
    /// Largest IP packet of the interface in bytes.
    pub mtu: usize,
}

pub(super) struct Queue {
    socket: XdpSocket,
    polling: Polling,
    local_peers: bool,
    mtu: usize,
    /// Frame that takes several descriptors, and the packets that it stands for.
    splitter: Splitter,
    /// [`Descriptor::CONTINUES`] while descriptors of such a frame are missing; 0 otherwise.
    continues: u32,
    /// Frames lent to the kernel for receiving, and their target number.
    lent: u32,
    lent_target: u32,
    /// Time since which the driver has sent no frame although frames are pending.
    stalled_since: Option<Instant>,
    received: u64,
    received_bytes: u64,
    /// Received frames with an unfilled checksum.
    unfilled: u64,
    pushed: u64,
    pushed_bytes: u64,
    dropped_by_kernel: u64,
    drops: DropCounters,
}

impl Queue {
    /// Creates the queue of a socket and lends frames for receiving.
    pub(super) fn new(socket: XdpSocket, settings: QueueSettings, arena: &mut Arena) -> Self {
        let mut queue = Self {
            lent_target: settings.lent_target.min(socket.fill.size()),
            socket,
            polling: if settings.busy_poll { Polling::Untested } else { Polling::Off },
            local_peers: settings.local_peers,
            mtu: settings.mtu,
            splitter: Splitter::new(),
            continues: 0,
            lent: 0,
            stalled_since: None,
            received: 0,
            received_bytes: 0,
            unfilled: 0,
            pushed: 0,
            pushed_bytes: 0,
            dropped_by_kernel: 0,
            drops: DropCounters::new(),
        };
        queue.refill(arena);
        queue
    }

    pub(super) fn polling(&self) -> Polling {
        self.polling
    }

    pub(super) fn socket(&self) -> &XdpSocket {
        &self.socket
    }

    /// Number of frames in the RX ring.
    pub(super) fn pending(&mut self) -> usize {
        self.socket.receive.available(u32::MAX) as usize
    }

    /// Receives up to `quota` frames. With `polls`, runs the driver's receive path, but only if
    /// the RX ring is empty, so that one system call serves a whole burst.
    pub(super) fn receive(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        polls: bool,
    ) -> io::Result<usize> {
        self.reclaim_sent(arena);
        self.refill(arena);
        let quota = u32::try_from(quota).unwrap_or(u32::MAX);
        let end = burst.len() + quota as usize;
        if self.splitter.is_active() {
            let before = burst.len();
            self.split(arena, burst, end);
            let taken = burst.len() - before;
            self.received += taken as u64;
            return Ok(taken);
        }
        let mut available = self.socket.receive.available(quota);
        let must_call = (polls && self.polling != Polling::Off) || self.socket.fill.needs_wakeup();
        if available == 0 && quota > 0 && must_call {
            self.socket.poll_driver()?;
            available = self.socket.receive.available(quota);
        }
        if available == 0 {
            return Ok(0);
        }
        if self.polling == Polling::Untested {
            let can_poll = self.socket.can_poll_driver();
            self.polling = if can_poll { Polling::On } else { Polling::Off };
        }
        let before = burst.len();
        let mut popped = 0;
        while popped < available {
            let descriptor = self.socket.receive.pop();
            popped += 1;
            if !self.accept_descriptor(descriptor, arena, burst) {
                self.split(arena, burst, end);
                let left = if self.splitter.is_active() { 0 } else { end - burst.len() };
                available = popped + self.socket.receive.available(left as u32);
            }
        }
        self.socket.receive.release();
        self.lent = self.lent.saturating_sub(popped);
        let taken = burst.len() - before;
        self.received += taken as u64;
        self.refill(arena);
        Ok(taken)
    }

    /// Accepts a frame in one descriptor. Returns false if the descriptor is handled otherwise:
    /// rejected, or as part of a frame to split.
    #[inline]
    fn accept_descriptor(
        &mut self,
        descriptor: Descriptor,
        arena: &mut Arena,
        burst: &mut Burst,
    ) -> bool {
        let is_part = (descriptor.options | self.continues) & Descriptor::CONTINUES != 0
            || self.local_peers && descriptor.len as usize > self.mtu + LINK_HEADER_BYTES;
        if is_part {
            self.accept_part(descriptor, arena);
            return false;
        }
        let Some(mut frame) = arena.reclaim(descriptor.address, descriptor.len) else {
            self.drops.count(DeviceInvalidDescriptor);
            return false;
        };
        if self.local_peers {
            let checksum = local_checksum(arena.bytes(&frame));
            self.unfilled += u64::from(checksum != Checksum::Unknown);
            frame.set_checksum(checksum);
        }
        self.received_bytes += u64::from(descriptor.len);
        burst.push_back(frame);
        true
    }

    /// Takes a part of a frame that is larger than the MTU. Begins to split the frame when it is
    /// whole: only local senders, which left segmentation to their device, have sent such frames.
    #[cold]
    fn accept_part(&mut self, descriptor: Descriptor, arena: &mut Arena) {
        let Some(part) = arena.lent_bytes(descriptor.address, descriptor.len) else {
            self.drops.count(DeviceInvalidDescriptor);
            return;
        };
        self.splitter.push_part(part);
        if let Some(frame) = arena.reclaim(descriptor.address, 0) {
            arena.free(frame);
        }
        self.continues = descriptor.options & Descriptor::CONTINUES;
        if self.continues != 0 {
            return;
        }
        let mtu = self.mtu;
        let begins = self.splitter.begin(arena.max_data_bytes(), |frame| {
            Segments::for_mtu(Medium::Ethernet, frame, mtu)
                .filter(|segments| segments.is_unfilled(frame))
        });
        if !begins {
            self.drops.count(FrameTooLong);
        }
    }

    /// Makes packets of the frame that is split, until `burst` has `end` frames.
    fn split(&mut self, arena: &mut Arena, burst: &mut Burst, end: usize) {
        while burst.len() < end {
            let Some(frame) = self.splitter.next(arena) else { return };
            self.received_bytes += frame.len() as u64;
            burst.push_back(frame);
        }
    }

    /// Refills the fill ring to its target, as far as the arena has free frames.
    fn refill(&mut self, arena: &mut Arena) {
        let missing = self.lent_target - self.lent.min(self.lent_target);
        if missing == 0 {
            return;
        }
        let space = self.socket.fill.free_slots(missing).min(missing);
        let mut lent = 0;
        while lent < space {
            let Some(frame) = arena.alloc() else { break };
            self.socket.fill.push(arena.lend(frame));
            lent += 1;
        }
        if lent > 0 {
            self.socket.fill.publish();
            self.lent += lent;
        }
    }

    /// Frees the frames of the completion ring.
    fn reclaim_sent(&mut self, arena: &mut Arena) {
        let completed = self.socket.completion.available(u32::MAX);
        if completed == 0 {
            return;
        }
        for _ in 0..completed {
            let address = self.socket.completion.pop();
            match arena.reclaim(address, 0) {
                Some(frame) => arena.free(frame),
                None => self.drops.count(DeviceInvalidDescriptor),
            }
        }
        self.socket.completion.release();
    }

    /// Queues up to `count` frames from the front of `burst` for sending. Returns the number of
    /// frames removed from `burst`.
    pub(super) fn transmit(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        count: usize,
    ) -> io::Result<usize> {
        self.reclaim_sent(arena);
        let mut taken = self.push(arena, burst, count);
        if self.socket.transmit.pending() > 0 {
            self.kick()?;
        } else {
            self.stalled_since = None;
        }
        if self.stalled_since.is_some_and(|since| since.elapsed() > MAX_STALL) {
            taken += burst.len();
            self.drops.add(TransmitFailed, burst.len() as u64);
            burst.drain(..).for_each(|frame| arena.free(frame));
        }
        Ok(taken)
    }

    fn push(&mut self, arena: &mut Arena, burst: &mut Burst, count: usize) -> usize {
        let count = burst.len().min(count);
        if count == 0 {
            return 0;
        }
        let wanted = u32::try_from(count).unwrap_or(u32::MAX);
        let space = self.socket.transmit.free_slots(wanted).min(wanted) as usize;
        for frame in burst.drain(..space) {
            if frame.len() < MIN_FRAME_BYTES {
                self.drops.count(TransmitFailed);
                arena.free(frame);
                continue;
            }
            let len = frame.len() as u32;
            self.pushed += 1;
            self.pushed_bytes += u64::from(len);
            let address = arena.lend(frame);
            self.socket.transmit.push(Descriptor { address, len, options: 0 });
        }
        self.socket.transmit.publish();
        space
    }

    /// Makes the kernel send until the TX ring is empty or makes no progress.
    fn kick(&mut self) -> io::Result<()> {
        loop {
            if !self.socket.transmit.needs_wakeup() {
                return Ok(());
            }
            let before = self.socket.transmit.pending();
            let kick = self.socket.kick_transmit()?;
            let after = self.socket.transmit.pending();
            if kick == Kick::Dropped {
                self.dropped_by_kernel += 1;
            }
            if after < before {
                self.stalled_since = None;
            }
            if after == 0 {
                return Ok(());
            }
            if after >= before || kick == Kick::Unavailable {
                self.stalled_since.get_or_insert_with(Instant::now);
                return Ok(());
            }
        }
    }

    /// True if the TX ring has frames that the kernel has not taken.
    pub(super) fn has_unsent_frames(&mut self) -> bool {
        self.socket.transmit.pending() > 0
    }

    /// Sends pending frames and polls once more; returns true if no frame arrived.
    pub(super) fn prepare_sleep(&mut self) -> io::Result<bool> {
        if self.socket.transmit.pending() > 0 {
            self.kick()?;
        }
        if self.splitter.is_active() || self.socket.receive.available(1) > 0 {
            return Ok(false);
        }
        self.socket.poll_driver()?;
        Ok(self.socket.receive.available(1) == 0)
    }

    /// Adds the traffic so far.
    #[cfg(feature = "packet")]
    pub(super) fn add_traffic(&self, total: &mut TrafficTotals) {
        total.arrived_frames += self.received;
        total.received_bytes += self.received_bytes;
        total.unfilled_frames += self.unfilled;
        total.sent_bytes += self.pushed_bytes;
    }

    /// Adds this queue's counters, including the kernel's.
    pub(super) fn add_counters(&self, counters: &mut DeviceCounters) {
        counters.received += self.received;
        counters.received_bytes += self.received_bytes;
        counters.transmitted += self.pushed - self.dropped_by_kernel.min(self.pushed);
        counters.transmitted_bytes += self.pushed_bytes;
        counters.drops.merge(&self.drops);
        counters.drops.add(TransmitFailed, self.dropped_by_kernel);
        let Ok(kernel) = self.socket.statistics() else { return };
        // In copy mode the kernel counts a packet without a buffer in both counters.
        let no_buffer = kernel.rx_fill_ring_empty_descs.unwrap_or(0).min(kernel.rx_dropped);
        counters.drops.add(NoBuffer, no_buffer);
        counters.drops.add(FrameTooLong, kernel.rx_dropped - no_buffer);
        counters.drops.add(DeviceRingFull, kernel.rx_ring_full.unwrap_or(0));
        counters
            .drops
            .add(DeviceInvalidDescriptor, kernel.rx_invalid_descs + kernel.tx_invalid_descs);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_memory::{ArenaConfig, FrameSize};

    use super::*;
    use crate::transport::tests::Shape;

    const FRAMES: u32 = 32;

    /// Queue with a simulated kernel side.
    fn queue() -> (Arena, Queue) {
        let config = ArenaConfig { frames: FRAMES, frame_size: FrameSize::K2, hugepages: false };
        let mut arena = Arena::new(config).unwrap();
        let settings =
            QueueSettings { lent_target: 16, busy_poll: true, local_peers: true, mtu: 1500 };
        let queue = Queue::new(XdpSocket::private(16), settings, &mut arena);
        (arena, queue)
    }

    fn receive(queue: &mut Queue, arena: &mut Arena) -> usize {
        let mut burst = Burst::new();
        let received = queue.receive(arena, &mut burst, 64, true).unwrap();
        assert_eq!(received, burst.len());
        burst.drain(..).for_each(|frame| arena.free(frame));
        received
    }

    #[test]
    fn rejects_and_counts_invalid_descriptors() {
        let (mut arena, mut queue) = queue();
        let good = queue.socket.fill.consume().unwrap();
        let descriptor = |address, len| Descriptor { address, len, options: 0 };
        let invalid = [
            descriptor(u64::MAX, 60),
            descriptor(u64::from(FRAMES) << 11, 60),
            descriptor(good, 2048),
            descriptor(good, u32::MAX),
            // A frame that was never lent: the last frame of the arena.
            descriptor(u64::from(FRAMES - 1) << 11, 60),
        ];
        for descriptor in invalid {
            queue.socket.receive.produce(descriptor);
        }
        queue.socket.receive.produce(descriptor(good, 60));
        queue.socket.receive.produce(descriptor(good, 60));
        assert_eq!(receive(&mut queue, &mut arena), 1, "the valid descriptor is accepted once");
        assert_eq!(queue.drops.get(DeviceInvalidDescriptor), 6);
        queue.socket.completion.produce(u64::MAX);
        queue.socket.completion.produce(u64::from(FRAMES - 1) << 11);
        assert_eq!(receive(&mut queue, &mut arena), 0);
        assert_eq!(queue.drops.get(DeviceInvalidDescriptor), 8);
    }

    #[test]
    fn drops_datagrams_in_several_descriptors() {
        let (mut arena, mut queue) = queue();
        for options in [1, 1, 0] {
            assert_eq!(queue.drops.get(FrameTooLong), 0);
            let address = queue.socket.fill.consume().unwrap();
            queue.socket.receive.produce(Descriptor { address, len: 1792, options });
            assert_eq!(receive(&mut queue, &mut arena), 0);
        }
        assert_eq!(queue.drops.get(FrameTooLong), 1);
        assert_eq!(arena.available(), FRAMES as usize - 16, "the parts are free");
    }

    #[test]
    fn splits_tcp_in_several_descriptors() {
        let (mut arena, mut queue) = queue();
        let shape =
            Shape { is_v6: true, is_tcp: true, tagged: false, extra_bytes: 0, payload_bytes: 4000 };
        let frame = shape.frame();
        let parts: Vec<_> = frame.chunks(1700).collect();
        for (number, part) in parts.iter().enumerate() {
            let address = arena.alloc_from(part).unwrap();
            let address = arena.lend(address);
            let options = u32::from(number + 1 < parts.len());
            queue.socket.receive.produce(Descriptor { address, len: part.len() as u32, options });
        }
        let (mut burst, mut payload) = (Burst::new(), Vec::new());
        for quota in [1, 1, 1, 0] {
            assert_eq!(queue.receive(&mut arena, &mut burst, 1, true).unwrap(), quota);
            for frame in burst.drain(..) {
                assert!(
                    frame.len() <= 1514 && matches!(frame.checksum(), Checksum::Partial { .. })
                );
                payload.extend_from_slice(&arena.bytes(&frame)[shape.headers_bytes()..]);
                arena.free(frame);
            }
        }
        assert!(payload == frame[shape.headers_bytes()..]);
        assert_eq!(queue.received, 3);
        drop(queue);
        arena.reclaim_all();
        assert_eq!(arena.available(), FRAMES as usize);
    }

    #[test]
    fn receive_refills_the_fill_ring() {
        let (mut arena, mut queue) = queue();
        for _ in 0..100 {
            for _ in 0..10 {
                let address = queue.socket.fill.consume().expect("fill ring is empty");
                queue.socket.receive.produce(Descriptor { address, len: 60, options: 0 });
            }
            assert_eq!(receive(&mut queue, &mut arena), 10);
            assert_eq!(queue.socket.fill.pending(), 16);
        }
        assert_eq!(arena.available(), FRAMES as usize - 16);
    }

    proptest! {
        #[test]
        fn any_descriptors_leave_the_arena_whole(
            entries in proptest::collection::vec((any::<u64>(), any::<u32>(), any::<u32>()), 0..16),
            small in any::<bool>(),
        ) {
            let (mut arena, mut queue) = queue();
            for (address, len, options) in entries {
                let (address, len) = if small {
                    (address % (u64::from(FRAMES) << 11), len % 2048)
                } else {
                    (address, len)
                };
                queue.socket.receive.produce(Descriptor { address, len, options });
                queue.socket.completion.produce(address);
            }
            receive(&mut queue, &mut arena);
            drop(queue);
            arena.reclaim_all();
            prop_assert_eq!(arena.available(), FRAMES as usize);
        }
    }
}
