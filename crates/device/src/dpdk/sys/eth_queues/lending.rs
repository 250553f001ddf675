//! Arena frames lent to the device.

use std::ptr;

use tidegate_memory::Arena;

use super::super::raw::{self, BURST_FRAMES};
use super::EthQueues;

/// Limits on the number of free frames in a device's pool, besides the frames in its rings.
pub(super) struct PoolLevels {
    /// Below this level frames are lent to the device, up to `target`.
    pub(super) low: usize,
    /// Level that lending and reclaiming aim at.
    pub(super) target: usize,
    pub(super) high: usize,
}

impl PoolLevels {
    pub(super) fn for_arena(arena: &Arena) -> Self {
        let low = (arena.capacity() / 8).clamp(1, BURST_FRAMES);
        Self { low, target: 2 * low, high: 4 * low }
    }
}

impl EthQueues {
    /// Lends frames until the device's pool has `target` free frames or the arena is empty.
    pub(super) fn lend(&mut self, arena: &mut Arena, target: usize) {
        if !self.eth_dev.uses_arena_frames() {
            return;
        }
        let base = arena.region().0.as_ptr();
        let mut frames = [ptr::null_mut(); BURST_FRAMES];
        while (self.raw.level as usize) < target {
            let mut count = 0;
            let wanted = (target - self.raw.level as usize).min(BURST_FRAMES);
            while count < wanted
                && let Some(frame) = arena.alloc()
            {
                frames[count] = base.wrapping_add(arena.lend(frame) as usize);
                count += 1;
            }
            if count == 0 {
                return;
            }
            self.lent += count;
            // SAFETY: the frames were just lent, so their mbufs are neither in the pool nor in use
            // by the driver.
            self.raw.level =
                unsafe { raw::dpdk_give(&mut self.raw.pool, frames.as_ptr(), count as u32) };
        }
    }

    /// Reclaims unused frames until the device's pool has `target` free frames.
    pub(super) fn reclaim(&mut self, arena: &mut Arena, target: usize) {
        if !self.eth_dev.uses_arena_frames() {
            return;
        }
        let base = arena.region().0.as_ptr() as u64;
        let mut frames = [ptr::null_mut(); BURST_FRAMES];
        while self.raw.level as usize > target {
            let wanted = (self.raw.level as usize - target).min(BURST_FRAMES) as u32;
            let level = &mut self.raw.level;
            // SAFETY: `frames` has space for `wanted` pointers.
            let count =
                unsafe { raw::dpdk_take(&mut self.raw.pool, frames.as_mut_ptr(), wanted, level) };
            for &frame in &frames[..count as usize] {
                if let Some(frame) = arena.reclaim(frame as u64 - base, 0) {
                    arena.free(frame);
                    self.lent -= 1;
                }
            }
            if count == 0 {
                return;
            }
        }
    }

    /// Balances free frames between device and arena, so that neither runs out while the other
    /// has many.
    #[inline]
    pub(super) fn balance(&mut self, arena: &mut Arena) {
        let level = self.raw.level as usize;
        if level < self.levels.low {
            self.lend(arena, self.levels.target);
        } else if level > self.levels.high {
            self.reclaim(arena, self.levels.target);
        }
    }
}
