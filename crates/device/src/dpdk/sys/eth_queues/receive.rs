//! Received frames, polled in bursts.

use std::ptr;
use std::slice;

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{DropCounters, DropReason};

use super::super::raw::{self, BURST_FRAMES, Packet};
use super::EthQueues;
use crate::Burst;

/// Received frames not yet delivered: entries `next..end` of the burst.
pub(super) struct RxBurst {
    pub(super) raw: Box<raw::Burst>,
    pub(super) next: usize,
    pub(super) end: usize,
}

impl RxBurst {
    pub(super) fn new() -> Self {
        let raw = raw::Burst {
            mbufs: [ptr::null_mut(); BURST_FRAMES],
            packets: [Packet::NONE; BURST_FRAMES],
        };
        Self { raw: Box::new(raw), next: 0, end: 0 }
    }

    /// Frees the mbufs of the next `count` frames to their pools.
    pub(super) fn release(&mut self, count: usize) {
        let count = count.min(self.end - self.next);
        // SAFETY: this burst owns those mbufs, and no entry before `next` is used again.
        unsafe { raw::dpdk_release(&mut *self.raw, self.next as u32, count as u32) };
        self.next += count;
    }
}

impl EthQueues {
    /// Number of received frames waiting in the burst. Polls each queue if the burst is empty.
    #[inline]
    pub fn poll_rx(&mut self) -> usize {
        let RxBurst { raw, next, end } = &mut self.rx_burst;
        if *next == *end {
            (*next, *end) = (0, 0);
            for _ in 0..self.count {
                let queue = self.next_queue;
                let next_queue = queue.saturating_add(self.users);
                self.next_queue =
                    if next_queue < self.info.queues { next_queue } else { self.raw.first };
                // SAFETY: the queues were opened, and this is one of them. The burst holds no frame
                // and has space for the maximum that is ever written.
                *end = unsafe { raw::dpdk_receive(&mut *self.raw, queue, &mut **raw) } as usize;
                if *end > 0 {
                    break;
                }
            }
        }
        *end - *next
    }

    /// Appends up to `quota` received frames to `burst`. Returns their number and their bytes.
    #[inline]
    pub fn receive(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        drops: &mut DropCounters,
    ) -> (usize, u64) {
        let (mut taken, mut bytes, mut seen) = (0, 0, 0);
        while seen < quota {
            self.balance(arena);
            let count = self.poll_rx().min(quota - seen);
            if count == 0 {
                break;
            }
            let first = self.rx_burst.next;
            let (frames, frame_bytes) = self.accept_arena_frames(arena, burst, count, drops);
            (taken, bytes) = (taken + frames, bytes + frame_bytes);
            if self.rx_burst.next == first {
                match self.copy_to_arena(arena) {
                    Ok(frame) => {
                        bytes += frame.len() as u64;
                        burst.push_back(frame);
                        taken += 1;
                    }
                    // The packet stays in the RX burst until a frame is free to copy it to.
                    Err(DropReason::NoBuffer) => break,
                    Err(reason) => drops.count(reason),
                }
            }
            seen += self.rx_burst.next - first;
        }
        (taken, bytes)
    }

    /// Moves some of the next `count` packets to `burst`, up to the first packet outside the
    /// arena. Returns the number of frames added and their bytes.
    #[inline(always)]
    fn accept_arena_frames(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        count: usize,
        drops: &mut DropCounters,
    ) -> (usize, u64) {
        let base = arena.region().0.as_ptr() as usize;
        let mut slots = burst.push_batch(usize::MAX, count);
        let count = count.min(slots.remaining());
        let packets = &self.rx_burst.raw.packets[self.rx_burst.next..][..count];
        let mut lend_batch = arena.lend_batch();
        let (mut bytes, mut seen) = (0, 0);
        for packet in packets {
            if packet.is_frame == 0 {
                break;
            }
            seen += 1;
            let address = (packet.data as usize).wrapping_sub(base);
            let Some(mut frame) = lend_batch.reclaim(address as u64, packet.len) else {
                drops.count(DropReason::DeviceInvalidDescriptor);
                continue;
            };
            if packet.checksum == raw::CHECKSUM_VERIFIED {
                frame.set_checksum(Checksum::Verified);
            }
            bytes += u64::from(packet.len);
            // Cannot fail: `count` is limited to the slots left.
            let _ = slots.push(frame);
        }
        let frames = slots.pushed();
        self.rx_burst.next += seen;
        self.lent -= frames;
        (frames, bytes)
    }

    /// Copies the next received packet, whose buffer is outside the arena, and frees that buffer.
    fn copy_to_arena(&mut self, arena: &mut Arena) -> Result<Frame, DropReason> {
        if arena.available() == 0 {
            self.reclaim(arena, 0);
        }
        if arena.available() == 0 {
            return Err(DropReason::NoBuffer);
        }
        let packet = self.rx_burst.raw.packets[self.rx_burst.next];
        let frame = if packet.data.is_null() {
            None
        } else {
            // SAFETY: the packet is contiguous, has this length, and is owned here until it is
            // released below.
            let bytes = unsafe { slice::from_raw_parts(packet.data, packet.len as usize) };
            arena.alloc_from(bytes)
        };
        self.rx_burst.release(1);
        let mut frame = frame.ok_or(DropReason::FrameTooLong)?;
        if packet.checksum == raw::CHECKSUM_VERIFIED {
            frame.set_checksum(Checksum::Verified);
        }
        Ok(frame)
    }
}
