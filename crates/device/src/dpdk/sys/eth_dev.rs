//! DPDK ethdev and the arena frames lent to it.

use std::ffi::{CStr, CString};
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::slice;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::epoll;
use tidegate_memory::{Arena, ArenaMemory, Checksum, Frame};
use tidegate_wire::{DropCounters, DropReason};

use super::super::memif::MemifClient;
use super::super::tx_offload;
use super::raw::{self, BURST_FRAMES, Packet, STATISTIC_NAME_BYTES};
use super::result;
use crate::Burst;

/// Minimum frame length that devices transmit: an Ethernet header, in bytes.
const MIN_FRAME_BYTES: usize = 14;

/// Interval between link checks while a memif server has yet to bring the link up.
const CONNECT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Failed step while opening a device, with its error. `step` is `None` if the device was not
/// found.
pub struct OpenFailure {
    pub step: Option<&'static str>,
    pub source: io::Error,
}

/// Received frames not yet delivered: entries `next..end` of the burst.
struct RxBurst {
    raw: Box<raw::Burst>,
    next: usize,
    end: usize,
}

impl RxBurst {
    fn new() -> Self {
        let raw = raw::Burst {
            mbufs: [ptr::null_mut(); BURST_FRAMES],
            packets: [Packet::NONE; BURST_FRAMES],
        };
        Self { raw: Box::new(raw), next: 0, end: 0 }
    }

    /// Frees the mbufs of the next `count` frames to their pools.
    fn release(&mut self, count: usize) {
        let count = count.min(self.end - self.next);
        // SAFETY: this burst owns those mbufs, and no entry before `next` is used again.
        unsafe { raw::tg_release(&mut *self.raw, self.next as u32, count as u32) };
        self.next += count;
    }
}

/// Limits on the number of free frames in a device's pool, besides the frames in its rings.
struct PoolLevels {
    /// Below this level frames are lent to the device, up to `target`.
    low: usize,
    /// Level that lending and reclaiming aim at.
    target: usize,
    high: usize,
}

impl PoolLevels {
    fn for_arena(arena: &Arena) -> Self {
        let low = (arena.capacity() / 8).clamp(1, BURST_FRAMES);
        Self { low, target: 2 * low, high: 4 * low }
    }
}

/// Serializes probing and removal: a new device is recognized by comparing the device list
/// before and after.
static PROBE_LOCK: Mutex<()> = Mutex::new(());

/// DPDK ethdev. Stopped and closed on drop.
pub struct EthDev {
    raw: raw::EthDev,
    rx_burst: RxBurst,
    next_queue: u16,
    tx_packets: Box<[Packet; BURST_FRAMES]>,
    /// Arena memory that the device was opened with.
    memory: Arc<ArenaMemory>,
    levels: PoolLevels,
    /// Number of frames lent to the device and not reclaimed.
    lent: usize,
    /// Maximum length of a frame to transmit, in bytes.
    max_frame_bytes: usize,
    is_open: bool,
    /// Reconnection state of a memif client; `None` for other devices.
    pub memif_client: Option<MemifClient>,
}

// SAFETY: this value alone owns the device, its pool and the received frames, and none of them
// is tied to a thread.
unsafe impl Send for EthDev {}

impl EthDev {
    /// Probes a device and creates its pool.
    pub fn open(name: &str, arena: &Arena) -> Result<Self, OpenFailure> {
        let no_name = |error: std::ffi::NulError| OpenFailure { step: None, source: error.into() };
        let name = CString::new(name).map_err(no_name)?;
        let memory = arena.memory();
        let (base, bytes) = memory.range();
        let memory_description = raw::Memory {
            base: base.as_ptr(),
            bytes,
            frames: arena.capacity() as u32,
            shift: arena.frame_bytes().trailing_zeros(),
            page_bytes: memory.page_bytes(),
        };
        // SAFETY: all zero is a valid `raw::Device`: numbers and null pointers.
        let mut raw: raw::EthDev = unsafe { mem::zeroed() };
        let _lock = PROBE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: DPDK was started. The name is null-terminated and copied. `Self` keeps the
        // memory as long as the device. `raw` is writable.
        let error = unsafe { raw::tg_open(name.as_ptr(), &memory_description, &mut raw) };
        if error != 0 {
            return Err(open_failure(&raw, error));
        }
        Ok(Self {
            raw,
            rx_burst: RxBurst::new(),
            next_queue: 0,
            tx_packets: Box::new([Packet::NONE; BURST_FRAMES]),
            memory,
            levels: PoolLevels::for_arena(arena),
            lent: 0,
            max_frame_bytes: arena.frame_bytes().min(16 << 10),
            is_open: true,
            memif_client: None,
        })
    }

    /// Starts the device with `queues` queues in each direction and lends it the frames for its
    /// rings. Each ring has up to `descriptors` entries. With `segmentation`, enables TSO if the
    /// device supports it.
    pub fn start(
        &mut self,
        arena: &mut Arena,
        queues: u16,
        descriptors: u16,
        segmentation: bool,
    ) -> Result<(), OpenFailure> {
        let in_rings = usize::from(queues) * usize::from(descriptors);
        self.lend(arena, in_rings + self.levels.target);
        // SAFETY: the device was opened and is stopped.
        match unsafe { raw::tg_run(&mut self.raw, queues, descriptors, segmentation.into()) } {
            0 => Ok(()),
            error => Err(open_failure(&self.raw, error)),
        }
    }

    /// Name of the driver.
    pub fn driver(&self) -> String {
        let name = self.raw.driver.map(|byte| byte as u8);
        CStr::from_bytes_until_nul(&name)
            .map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned())
    }

    pub fn mac(&self) -> [u8; 6] {
        self.raw.mac
    }

    pub fn mtu(&self) -> usize {
        self.raw.mtu.into()
    }

    /// Maximum number of queues in each direction.
    pub fn max_queues(&self) -> u16 {
        self.raw.queues_max
    }

    /// True if the device distributes received flows over its queues.
    pub fn has_rss(&self) -> bool {
        self.raw.has_rss != 0
    }

    /// True if the device's buffers are frames of the arena; otherwise frames are copied.
    pub fn uses_arena_frames(&self) -> bool {
        self.raw.takes_frames != 0
    }

    pub fn receive_checksum(&self) -> bool {
        self.raw.receive_checksum != 0
    }

    pub fn transmit_checksum(&self) -> bool {
        self.raw.transmit_checksum != 0
    }

    /// True if TSO is enabled.
    pub fn has_tso(&self) -> bool {
        self.raw.cuts != 0
    }

    pub fn link_is_up(&self) -> bool {
        // SAFETY: the device was opened.
        unsafe { raw::tg_link_is_up(&self.raw) != 0 }
    }

    /// Frames lost by the device: dropped on receive ring overflow, dropped for lack of a buffer,
    /// received with errors, failed to transmit.
    pub fn losses(&self) -> [u64; 4] {
        let mut losses = [0; 4];
        // SAFETY: the device was opened, and four numbers are written.
        unsafe { raw::tg_losses(&self.raw, losses.as_mut_ptr()) };
        losses
    }

    /// Names of the extended statistics, as the driver gives them.
    pub fn statistic_names(&self) -> Vec<String> {
        // SAFETY: the device was opened, and with a capacity of 0 nothing is written.
        let count = unsafe { raw::tg_statistic_names(&self.raw, ptr::null_mut(), 0) };
        let mut names = vec![[0; STATISTIC_NAME_BYTES]; count as usize];
        // SAFETY: the device was opened, and `names` holds `count` names.
        let written = unsafe { raw::tg_statistic_names(&self.raw, names.as_mut_ptr(), count) };
        if written != count {
            return Vec::new();
        }
        let text = |name: &[u8; STATISTIC_NAME_BYTES]| {
            let name = CStr::from_bytes_until_nul(name).unwrap_or_default();
            name.to_string_lossy().into_owned()
        };
        names.iter().map(text).collect()
    }

    /// Values of the extended statistics, in the order of the `count` names; `None` if the device
    /// does not report them.
    pub fn statistics(&self, count: usize) -> Option<Vec<u64>> {
        // Devices without names must not be queried.
        if count == 0 {
            return None;
        }
        let mut values = vec![0; count];
        // SAFETY: the device was opened, and `values` holds `count` values.
        let complete = unsafe { raw::tg_statistics(&self.raw, values.as_mut_ptr(), count as u32) };
        (complete != 0).then_some(values)
    }

    /// Rejects any arena other than the arena that the device was opened with: frames of
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

    /// Lends frames until the device's pool has `target` free frames or the arena is empty.
    fn lend(&mut self, arena: &mut Arena, target: usize) {
        if !self.uses_arena_frames() {
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
                unsafe { raw::tg_give(&mut self.raw.pool, frames.as_ptr(), count as u32) };
        }
    }

    /// Reclaims unused frames until the device's pool has `target` free frames.
    fn reclaim(&mut self, arena: &mut Arena, target: usize) {
        if !self.uses_arena_frames() {
            return;
        }
        let base = arena.region().0.as_ptr() as u64;
        let mut frames = [ptr::null_mut(); BURST_FRAMES];
        while self.raw.level as usize > target {
            let wanted = (self.raw.level as usize - target).min(BURST_FRAMES) as u32;
            let level = &mut self.raw.level;
            // SAFETY: `frames` has space for `wanted` pointers.
            let count =
                unsafe { raw::tg_take(&mut self.raw.pool, frames.as_mut_ptr(), wanted, level) };
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
    fn balance(&mut self, arena: &mut Arena) {
        let level = self.raw.level as usize;
        if level < self.levels.low {
            self.lend(arena, self.levels.target);
        } else if level > self.levels.high {
            self.reclaim(arena, self.levels.target);
        }
    }

    /// Number of received frames waiting in the burst. Polls each queue if the burst is empty.
    #[inline]
    pub fn poll_rx(&mut self) -> usize {
        let RxBurst { raw, next, end } = &mut self.rx_burst;
        if *next == *end {
            (*next, *end) = (0, 0);
            for _ in 0..self.raw.queues {
                let queue = self.next_queue;
                self.next_queue = if queue + 1 < self.raw.queues { queue + 1 } else { 0 };
                // SAFETY: the device has this queue; the burst holds no frame and has space for
                // the maximum that is ever written.
                *end = unsafe { raw::tg_receive(&mut self.raw, queue, &mut **raw) } as usize;
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
                // SAFETY: the device was opened. The first `ready` packets are frames of its
                // arena owned by the burst, so their mbufs are neither in the pool nor in use by
                // the driver.
                _ => unsafe {
                    raw::tg_transmit(
                        &mut self.raw,
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
        if self.uses_arena_frames() {
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
        let max_frames = usize::from(self.raw.burst).min(BURST_FRAMES);
        let mut count = 0;
        let (front, back) = burst.as_mut_slices();
        for frames in [front, back] {
            for (frame, packet) in frames.iter_mut().zip(&mut self.tx_packets[count..max_frames]) {
                packet.checksum = raw::CHECKSUM_UNKNOWN;
                let needs_no_offload = frame.is_unchecked() && sendable.contains(&frame.len());
                if !needs_no_offload
                    && !prepare_offload(&self.raw, self.max_frame_bytes, arena, frame, packet)
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

    /// Receive interrupts as a file descriptor, readable after an interrupt; `None` if the device
    /// has none.
    pub fn interrupts(&self) -> Option<RxInterrupts> {
        if self.raw.has_interrupts == 0 {
            return None;
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).ok()?;
        // SAFETY: the device was opened, and the descriptor is an epoll instance.
        let error = unsafe { raw::tg_watch(&self.raw, epoll.as_raw_fd()) };
        (error == 0).then_some(RxInterrupts(epoll))
    }

    /// Stops and restarts the device. After an error the device stays stopped.
    pub fn restart(&mut self) -> io::Result<()> {
        // SAFETY: the device is configured.
        result(unsafe { raw::tg_restart(&mut self.raw) })
    }

    /// Enables or disables interrupts.
    pub fn set_interrupts(&self, on: bool) -> io::Result<()> {
        // SAFETY: the device was opened.
        result(unsafe { raw::tg_set_interrupts(&self.raw, on.into()) })
    }

    /// Closes the device and reclaims all its frames. Frames held by another device of this
    /// process stay lent.
    pub fn close(mut self, arena: &mut Arena) {
        if self.check(arena).is_err() {
            return;
        }
        self.close_once();
        self.raw.level = self.lent as u32;
        self.reclaim(arena, 0);
    }

    /// Stops and closes the device, unless that was done before.
    fn close_once(&mut self) {
        if !mem::take(&mut self.is_open) {
            return;
        }
        self.rx_burst.release(BURST_FRAMES);
        let memif_client = self.memif_client.take();
        // A memif server might exit if the client disconnected before the link is up.
        while memif_client.as_ref().is_some_and(MemifClient::is_connecting) && !self.link_is_up() {
            thread::sleep(CONNECT_POLL_INTERVAL);
        }
        let _lock = PROBE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the device was opened, and is not used afterwards.
        unsafe { raw::tg_close(&mut self.raw) }
    }
}

impl Drop for EthDev {
    fn drop(&mut self) {
        self.close_once();
        // SAFETY: the pool is used only by holders of its mbufs.
        let is_freed = unsafe { raw::tg_free_pool(&mut self.raw, self.lent as u32) != 0 };
        if !is_freed {
            // Frames returned later are never reused, but their memory may still be read.
            mem::forget(self.memory.clone());
        }
    }
}

/// Fills in the offloads of a frame: checksum and TSO. Computes the checksum in software if the
/// device cannot. Returns false if the frame cannot be transmitted.
#[inline(always)]
fn prepare_offload(
    eth_dev: &raw::EthDev,
    max_frame_bytes: usize,
    arena: &mut Arena,
    frame: &mut Frame,
    packet: &mut Packet,
) -> bool {
    let tso = match eth_dev.cuts {
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
    let layout = match eth_dev.transmit_checksum {
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

fn open_failure(raw: &raw::EthDev, error: i32) -> OpenFailure {
    let step = (!raw.step.is_null()).then(|| {
        // SAFETY: a string literal of the shim.
        unsafe { CStr::from_ptr::<'static>(raw.step) }.to_str().unwrap_or("open it")
    });
    OpenFailure { step, source: io::Error::from_raw_os_error(error) }
}

/// Receive interrupts of a device: an epoll instance filled by DPDK.
#[derive(Debug)]
pub struct RxInterrupts(OwnedFd);

impl RxInterrupts {
    /// Drains pending interrupts; the descriptor is no longer readable.
    pub fn drain(&self) {
        // SAFETY: the descriptor is an epoll instance, to which only DPDK adds.
        unsafe { raw::tg_take_interrupts(self.0.as_raw_fd()) }
    }
}

impl AsFd for RxInterrupts {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
