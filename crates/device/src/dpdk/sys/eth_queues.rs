//! Queues of an ethdev that one thread uses, and the arena frames lent to them.

mod interrupts;
mod lending;
mod receive;
mod transmit;

use std::io;
use std::mem;
use std::sync::Arc;

use tidegate_memory::{Arena, ArenaMemory};

pub use self::interrupts::RxInterrupts;
use self::lending::PoolLevels;
use self::receive::RxBurst;
use super::eth_dev::{EthDev, OpenFailure};
use super::raw::{self, BURST_FRAMES, Packet};

/// Maximum number of descriptors per ring. All rings of a thread use at most a quarter of the
/// arena's frames, half of that to receive.
const MAX_RING_DESCRIPTORS: u16 = 1024;

/// Queues of one thread: every n-th of the device, of n threads. When one thread closes its queues,
/// the device is closed for all.
pub struct EthQueues {
    /// State of the shim, whose device knows the address.
    raw: Box<raw::Queues>,
    info: raw::Info,
    rx_burst: RxBurst,
    /// Number of the queues, and distance from one to the next.
    count: u16,
    users: u16,
    /// Receive queue to poll next.
    next_queue: u16,
    tx_packets: Box<[Packet; BURST_FRAMES]>,
    /// Arena memory that the queues were opened with.
    memory: Arc<ArenaMemory>,
    levels: PoolLevels,
    /// Number of frames lent to the device and not reclaimed.
    lent: usize,
    /// Maximum length of a frame to transmit, in bytes.
    max_frame_bytes: usize,
    eth_dev: Arc<EthDev>,
}

// SAFETY: this value alone owns its queues, their pool and the received frames, and none of them
// is tied to a thread.
unsafe impl Send for EthQueues {}

impl EthQueues {
    /// Creates the pool of the next thread's queues, and lends it the frames for their rings. The
    /// device starts when the queues of all threads are open.
    pub fn open(eth_dev: &Arc<EthDev>, arena: &mut Arena) -> Result<Self, OpenFailure> {
        let memory = arena.memory();
        let (base, bytes) = memory.range();
        let memory_description = raw::Memory {
            base: base.as_ptr(),
            bytes,
            frames: arena.capacity() as u32,
            shift: arena.frame_bytes().trailing_zeros(),
            page_bytes: memory.page_bytes(),
        };
        let users = eth_dev.users();
        // The first thread has as many as any other.
        let queues = usize::from(eth_dev.queues().div_ceil(users));
        // Without arena frames the device uses DPDK's own buffers.
        let descriptors = match eth_dev.uses_arena_frames() {
            true => arena.capacity() / (8 * queues),
            false => MAX_RING_DESCRIPTORS.into(),
        };
        let descriptors = descriptors.clamp(1, MAX_RING_DESCRIPTORS.into());
        let mut opened = Self {
            // SAFETY: all zero is a valid `raw::Queues`: numbers and null pointers.
            raw: Box::new(unsafe { mem::zeroed() }),
            info: *eth_dev.info(),
            rx_burst: RxBurst::new(),
            count: 0,
            users,
            next_queue: 0,
            tx_packets: Box::new([Packet::NONE; BURST_FRAMES]),
            memory,
            levels: PoolLevels::for_arena(arena),
            lent: 0,
            max_frame_bytes: arena.frame_bytes().min(16 << 10),
            eth_dev: Arc::clone(eth_dev),
        };
        // SAFETY: this value holds the memory and the boxed queues, and closes the device before it
        // ends.
        let joined =
            unsafe { eth_dev.join(&memory_description, descriptors as u16, &mut opened.raw) };
        let started = joined.and_then(|()| {
            let first = opened.raw.first;
            opened.next_queue = first;
            opened.count = (opened.info.queues - first).div_ceil(users);
            opened.lend(arena, queues * descriptors + opened.levels.target);
            eth_dev.start_if_complete()
        });
        match started {
            Ok(()) => Ok(opened),
            Err(error) => {
                opened.close(arena);
                Err(error)
            }
        }
    }

    /// The device of the queues.
    pub fn eth_dev(&self) -> &EthDev {
        &self.eth_dev
    }

    /// Number of the queues in each direction.
    pub fn count(&self) -> u32 {
        self.count.into()
    }

    /// Rejects any arena other than the arena that the queues were opened with: frames of
    /// another arena are not in the memory given to the device.
    #[inline]
    pub fn check(&self, arena: &Arena) -> io::Result<()> {
        if arena.region().0 == self.memory.range().0 {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "wrong arena: a DPDK device accepts only the arena that it was opened with",
        ))
    }

    /// Closes the device and reclaims all frames of these queues. Frames held by another device of
    /// this process stay lent.
    pub fn close(mut self, arena: &mut Arena) {
        if self.check(arena).is_err() {
            return;
        }
        self.close_device();
        self.raw.level = self.lent as u32;
        if !self.raw.device.is_null() {
            self.reclaim(arena, 0);
        }
    }

    /// Closes the device, unless that was done before.
    fn close_device(&mut self) {
        self.rx_burst.release(BURST_FRAMES);
        self.eth_dev.close();
    }
}

impl Drop for EthQueues {
    fn drop(&mut self) {
        self.close_device();
        if self.raw.device.is_null() {
            return;
        }
        // SAFETY: the device is closed, and the pool is used only by holders of its mbufs.
        let is_freed = unsafe { raw::dpdk_leave(&mut *self.raw, self.lent as u32) != 0 };
        if !is_freed {
            // Frames returned later are never reused, but their memory may still be read.
            mem::forget(self.memory.clone());
        }
    }
}
