//! Transmission, with checksum and segmentation by the device.

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{DropCounters, DropReason};

use super::super::raw::{self, BURST_FRAMES, Packet};
use super::EthQueues;
use crate::Burst;
use crate::dpdk::tx_offload;

/// Minimum frame length that devices transmit: an Ethernet header, in bytes.
const MIN_FRAME_BYTES: usize = 14;

impl EthQueues {
    /// Transmits frames from the front of `burst`, as many as the device accepts. Returns their
    /// number and their bytes.
    #[inline]
    pub fn transmit(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        drops: &mut DropCounters,
    ) -> (usize, u64) {
        let (mut taken, mut bytes) = (0, 0);
        while !burst.is_empty() {
            let ready = self.prepare_tx(arena, burst);
            let mut rejects_next = 0;
            let sent = match ready {
                0 => 0,
                // SAFETY: the queues were opened. The first `ready` packets are frames of its
                // arena owned by the burst, so their mbufs are neither in the pool nor in use by
                // the driver.
                _ => unsafe {
                    raw::dpdk_transmit(
                        &mut *self.raw,
                        self.tx_packets.as_ptr(),
                        ready as u32,
                        &mut rejects_next,
                    ) as usize
                },
            };
            taken += sent;
            bytes += self.finish_sent(arena, burst, sent);
            if rejects_next != 0 || ready == 0 {
                if let Some(frame) = burst.pop_front() {
                    arena.free(frame);
                    drops.count(DropReason::TransmitFailed);
                }
            } else if sent < ready {
                break;
            }
        }
        if self.raw.level as usize > self.levels.high {
            self.reclaim(arena, self.levels.target);
        }
        (taken, bytes)
    }

    /// Removes the first `sent` frames from the burst: they are lent to the device, or freed if
    /// the device copied them. Returns their bytes.
    #[inline(always)]
    fn finish_sent(&mut self, arena: &mut Arena, burst: &mut Burst, sent: usize) -> u64 {
        let sent = sent.min(burst.len());
        let mut bytes = 0;
        if self.info.takes_frames != 0 {
            let (mut remaining, mut lend_batch) = (sent, arena.lend_batch());
            // Up to the end of the ring buffer, then again from its start.
            while remaining > 0 {
                for frame in burst.pop_batch_up_to(remaining) {
                    bytes += frame.len() as u64;
                    lend_batch.lend(frame);
                    remaining -= 1;
                }
            }
            self.lent += sent;
        } else {
            let mut free_batch = arena.free_batch();
            for frame in burst.drain(..sent) {
                bytes += frame.len() as u64;
                free_batch.free(frame);
            }
        }
        bytes
    }

    /// Fills the TX packet descriptions from the front of `burst`, up to the first frame that
    /// cannot be transmitted. Returns their number.
    #[inline(always)]
    fn prepare_tx(&mut self, arena: &mut Arena, burst: &mut Burst) -> usize {
        let sendable = MIN_FRAME_BYTES..=self.max_frame_bytes;
        let max_frames = usize::from(self.info.burst).min(BURST_FRAMES);
        let mut count = 0;
        let (front, back) = burst.as_mut_slices();
        for frames in [front, back] {
            for (frame, packet) in frames.iter_mut().zip(&mut self.tx_packets[count..max_frames]) {
                packet.checksum = raw::CHECKSUM_UNKNOWN;
                let needs_no_offload = frame.is_unchecked() && sendable.contains(&frame.len());
                if !needs_no_offload
                    && !prepare_offload(&self.info, self.max_frame_bytes, arena, frame, packet)
                {
                    return count;
                }
                packet.data = arena.bytes(frame).as_ptr().cast_mut();
                packet.len = frame.len() as u32;
                count += 1;
            }
        }
        count
    }
}

/// Fills in the offloads of a frame: checksum and TSO. Computes the checksum in software if the
/// device cannot. Returns false if the frame cannot be transmitted.
#[inline(always)]
fn prepare_offload(
    info: &raw::Info,
    max_frame_bytes: usize,
    arena: &mut Arena,
    frame: &mut Frame,
    packet: &mut Packet,
) -> bool {
    let tso = match info.cuts {
        0 => None,
        _ => tx_offload::tso_request(arena.bytes(frame), frame),
    };
    if !(MIN_FRAME_BYTES..=max_frame_bytes).contains(&frame.len()) && tso.is_none() {
        return false;
    }
    let checksum = frame.checksum();
    if !matches!(checksum, Checksum::Partial { .. }) {
        return true;
    }
    let layout = match info.transmit_checksum {
        0 => None,
        _ => tx_offload::checksum_offload(arena.bytes(frame), checksum),
    };
    let Some(layout) = layout else {
        tx_offload::complete_checksum(arena.bytes_mut(frame), checksum);
        frame.set_checksum(Checksum::Unknown);
        return true;
    };
    packet.checksum = if layout.is_tcp { raw::CHECKSUM_TCP } else { raw::CHECKSUM_UDP };
    packet.is_v6 = layout.is_v6.into();
    packet.link_bytes = layout.link_bytes;
    packet.network_bytes = layout.network_bytes;
    if let Some(tso) = tso {
        packet.checksum = raw::CHECKSUM_TCP_TSO;
        packet.transport_bytes = tso.transport_bytes;
        packet.segment_bytes = tso.segment_bytes;
    }
    true
}
