//! One queue of a port: a socket, and which frames it was lent.

use std::io;
use std::time::{Duration, Instant};

use tidegate_memory::Arena;
use tidegate_wire::DropCounters;
use tidegate_wire::DropReason::{
    FrameTooLong, NoBuffer, PortInvalidDescriptor, PortRingFull, TransmitFailed,
};

use super::socket::{Kick, Socket};
use super::sys::Descriptor;
use crate::{Burst, PortCounters};

/// The kernel refuses to send less than an Ethernet header.
const SHORTEST_FRAME_BYTES: usize = 14;

/// How long the device may take no frame before new ones are dropped instead of
/// being kept waiting.
const STALL_LIMIT: Duration = Duration::from_secs(1);

/// Whether calls of the port run the device's receive path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Polling {
    /// Not asked for, or the kernel does not know which path: some drivers,
    /// veth among them, do not say. A call would be wasted.
    Off,
    /// Asked for; whether it works is known when the first packet arrives.
    Untested,
    /// They do.
    On,
}

pub(super) struct Queue {
    socket: Socket,
    polling: Polling,
    /// Frames that the kernel has to receive into, and how many it should have.
    lent: u32,
    lent_target: u32,
    /// Since when the device has taken no frame although some wait.
    stalled_since: Option<Instant>,
    received: u64,
    received_bytes: u64,
    pushed: u64,
    pushed_bytes: u64,
    refused: u64,
    drops: DropCounters,
}

impl Queue {
    /// Takes a socket into service; it will hold `lent_target` frames to
    /// receive into.
    pub(super) fn new(
        socket: Socket,
        lent_target: u32,
        busy_poll: bool,
        arena: &mut Arena,
    ) -> Self {
        let mut queue = Self {
            lent_target: lent_target.min(socket.fill.size()),
            socket,
            polling: if busy_poll { Polling::Untested } else { Polling::Off },
            lent: 0,
            stalled_since: None,
            received: 0,
            received_bytes: 0,
            pushed: 0,
            pushed_bytes: 0,
            refused: 0,
            drops: DropCounters::new(),
        };
        queue.refill(arena);
        queue
    }

    pub(super) fn polling(&self) -> Polling {
        self.polling
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// How many frames have arrived and were not taken yet.
    pub(super) fn waiting(&mut self) -> usize {
        self.socket.receive.available(u32::MAX) as usize
    }

    /// Takes up to `quota` frames. Runs the device's receive path if it `polls`,
    /// and only when nothing waits, so one call serves a whole burst.
    pub(super) fn receive(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        polls: bool,
    ) -> io::Result<usize> {
        self.complete(arena);
        self.refill(arena);
        let quota = u32::try_from(quota).unwrap_or(u32::MAX);
        let mut waiting = self.socket.receive.available(quota);
        let call_helps = (polls && self.polling != Polling::Off) || self.socket.fill.needs_wakeup();
        if waiting == 0 && quota > 0 && call_helps {
            self.socket.poll_device()?;
            waiting = self.socket.receive.available(quota);
        }
        if waiting == 0 {
            return Ok(0);
        }
        if self.polling == Polling::Untested {
            let runs = self.socket.runs_device();
            self.polling = if runs { Polling::On } else { Polling::Off };
        }
        let before = burst.len();
        for _ in 0..waiting {
            let descriptor = self.socket.receive.pop();
            self.accept(descriptor, arena, burst);
        }
        self.socket.receive.release();
        self.lent = self.lent.saturating_sub(waiting);
        let taken = burst.len() - before;
        self.received += taken as u64;
        self.refill(arena);
        Ok(taken)
    }

    #[inline]
    fn accept(&mut self, descriptor: Descriptor, arena: &mut Arena, burst: &mut Burst) {
        let Some(frame) = arena.reclaim(descriptor.address, descriptor.len) else {
            self.drops.count(PortInvalidDescriptor);
            return;
        };
        // Packets in several pieces were not asked for.
        if descriptor.options != 0 {
            self.drops.count(FrameTooLong);
            arena.free(frame);
            return;
        }
        self.received_bytes += u64::from(descriptor.len);
        burst.push_back(frame);
    }

    /// Brings the fill ring back to its target, as far as there are frames.
    fn refill(&mut self, arena: &mut Arena) {
        let missing = self.lent_target - self.lent.min(self.lent_target);
        if missing == 0 {
            return;
        }
        let room = self.socket.fill.free(missing).min(missing);
        let mut given = 0;
        while given < room {
            let Some(frame) = arena.alloc() else { break };
            self.socket.fill.push(arena.lend(frame));
            given += 1;
        }
        if given > 0 {
            self.socket.fill.publish();
            self.lent += given;
        }
    }

    /// Takes sent frames back.
    fn complete(&mut self, arena: &mut Arena) {
        let done = self.socket.completion.available(u32::MAX);
        if done == 0 {
            return;
        }
        for _ in 0..done {
            let address = self.socket.completion.pop();
            match arena.reclaim(address, 0) {
                Some(frame) => arena.free(frame),
                None => self.drops.count(PortInvalidDescriptor),
            }
        }
        self.socket.completion.release();
    }

    /// Hands frames from the front of `burst` to the device and returns how
    /// many it took.
    pub(super) fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.complete(arena);
        let mut taken = self.push(arena, burst);
        if self.socket.transmit.pending() > 0 {
            self.kick()?;
        } else {
            self.stalled_since = None;
        }
        if self.stalled_since.is_some_and(|since| since.elapsed() > STALL_LIMIT) {
            taken += burst.len();
            self.drops.add(TransmitFailed, burst.len() as u64);
            burst.drain(..).for_each(|frame| arena.free(frame));
        }
        Ok(taken)
    }

    fn push(&mut self, arena: &mut Arena, burst: &mut Burst) -> usize {
        if burst.is_empty() {
            return 0;
        }
        let wanted = u32::try_from(burst.len()).unwrap_or(u32::MAX);
        let room = self.socket.transmit.free(wanted).min(wanted) as usize;
        for frame in burst.drain(..room) {
            if frame.len() < SHORTEST_FRAME_BYTES {
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
        room
    }

    /// Makes the kernel send until the ring is empty or nothing moves.
    fn kick(&mut self) -> io::Result<()> {
        loop {
            if !self.socket.transmit.needs_wakeup() {
                return Ok(());
            }
            let before = self.socket.transmit.pending();
            let kick = self.socket.kick_transmit()?;
            let after = self.socket.transmit.pending();
            if kick == Kick::Refused {
                self.refused += 1;
            }
            if after < before {
                self.stalled_since = None;
            }
            if after == 0 {
                return Ok(());
            }
            if after >= before || kick == Kick::Stuck {
                self.stalled_since.get_or_insert_with(Instant::now);
                return Ok(());
            }
        }
    }

    /// Sends what waits and looks once more; returns whether nothing arrived.
    pub(super) fn prepare_sleep(&mut self) -> io::Result<bool> {
        if self.socket.transmit.pending() > 0 {
            self.kick()?;
        }
        if self.socket.receive.available(1) > 0 {
            return Ok(false);
        }
        self.socket.poll_device()?;
        Ok(self.socket.receive.available(1) == 0)
    }

    /// Adds this queue's counters, the kernel's included.
    pub(super) fn add_counters(&self, counters: &mut PortCounters) {
        counters.received += self.received;
        counters.received_bytes += self.received_bytes;
        counters.transmitted += self.pushed - self.refused.min(self.pushed);
        counters.transmitted_bytes += self.pushed_bytes;
        counters.drops.merge(&self.drops);
        counters.drops.add(TransmitFailed, self.refused);
        let Ok(kernel) = self.socket.statistics() else { return };
        // In copy mode the kernel counts a packet without a buffer under both.
        let no_buffer = kernel.rx_fill_ring_empty_descs.unwrap_or(0).min(kernel.rx_dropped);
        counters.drops.add(NoBuffer, no_buffer);
        counters.drops.add(FrameTooLong, kernel.rx_dropped - no_buffer);
        counters.drops.add(PortRingFull, kernel.rx_ring_full.unwrap_or(0));
        counters
            .drops
            .add(PortInvalidDescriptor, kernel.rx_invalid_descs + kernel.tx_invalid_descs);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_memory::{ArenaConfig, FrameSize};

    use super::*;

    const FRAMES: u32 = 32;

    /// A queue whose kernel is the test.
    fn queue() -> (Arena, Queue) {
        let config = ArenaConfig { frames: FRAMES, frame_size: FrameSize::K2, hugepages: false };
        let mut arena = Arena::new(config).unwrap();
        let queue = Queue::new(Socket::private(16), 16, true, &mut arena);
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
    fn made_up_descriptors_are_refused_and_counted() {
        let (mut arena, mut queue) = queue();
        let good = queue.socket.fill.consume().unwrap();
        let descriptor = |address, len| Descriptor { address, len, options: 0 };
        let lies = [
            descriptor(u64::MAX, 60),
            descriptor(u64::from(FRAMES) << 11, 60),
            descriptor(good, 2048),
            descriptor(good, u32::MAX),
            // A frame that was never lent: the last of the arena.
            descriptor(u64::from(FRAMES - 1) << 11, 60),
        ];
        for lie in lies {
            queue.socket.receive.produce(lie);
        }
        queue.socket.receive.produce(descriptor(good, 60));
        queue.socket.receive.produce(descriptor(good, 60));
        assert_eq!(receive(&mut queue, &mut arena), 1, "one of them was true, once");
        assert_eq!(queue.drops.get(PortInvalidDescriptor), 6);
        queue.socket.completion.produce(u64::MAX);
        queue.socket.completion.produce(u64::from(FRAMES - 1) << 11);
        assert_eq!(receive(&mut queue, &mut arena), 0);
        assert_eq!(queue.drops.get(PortInvalidDescriptor), 8);
    }

    #[test]
    fn packets_in_pieces_are_dropped() {
        let (mut arena, mut queue) = queue();
        let address = queue.socket.fill.consume().unwrap();
        queue.socket.receive.produce(Descriptor { address, len: 60, options: 1 });
        assert_eq!(receive(&mut queue, &mut arena), 0);
        assert_eq!(queue.drops.get(FrameTooLong), 1);
    }

    #[test]
    fn the_fill_ring_is_full_again_after_every_receive() {
        let (mut arena, mut queue) = queue();
        for _ in 0..100 {
            for _ in 0..10 {
                let address = queue.socket.fill.consume().expect("a buffer");
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
