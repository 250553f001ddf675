//! A device, and which frames of the arena it has.

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

use super::super::layers;
use super::super::memif::Client;
use super::raw::{self, BURST, Packet, STATISTIC_BYTES};
use super::result;
use crate::Burst;

/// Devices take no less than an Ethernet header.
const SHORTEST_FRAME_BYTES: usize = 14;

/// How often to look whether the server of a memif has brought the link up.
const GREETING_LOOK: Duration = Duration::from_millis(1);

/// What failed while a device was opened, and at which step; `None` is the
/// search for it.
pub struct Failed {
    pub step: Option<&'static str>,
    pub source: io::Error,
}

/// Frames that have arrived and wait here: those from `next` to `end`.
struct Arrived {
    raw: Box<raw::Burst>,
    next: usize,
    end: usize,
}

impl Arrived {
    fn new() -> Self {
        let raw = raw::Burst { mbufs: [ptr::null_mut(); BURST], packets: [Packet::NONE; BURST] };
        Self { raw: Box::new(raw), next: 0, end: 0 }
    }

    /// Gives the next `count` frames back to who made them.
    fn release(&mut self, count: usize) {
        let count = count.min(self.end - self.next);
        // SAFETY: those frames are ours, and are forgotten here.
        unsafe { raw::tg_release(&mut *self.raw, self.next as u32, count as u32) };
        self.next += count;
    }
}

/// How many frames a device has to receive into, beside those in its rings.
struct Marks {
    /// With less it is given some, ...
    low: usize,
    /// ... and with more some are taken, so that there are so many.
    target: usize,
    high: usize,
}

impl Marks {
    fn of(arena: &Arena) -> Self {
        let low = (arena.capacity() / 8).clamp(1, BURST);
        Self { low, target: 2 * low, high: 4 * low }
    }
}

/// Held while devices come and go: a new one is known by not having been there
/// before.
static CHANGING: Mutex<()> = Mutex::new(());

/// A device. It is stopped and let go on drop.
pub struct Device {
    raw: raw::Device,
    arrived: Arrived,
    next_queue: u16,
    to_send: Box<[Packet; BURST]>,
    /// The memory of the arena that it was opened with.
    memory: Arc<ArenaMemory>,
    marks: Marks,
    /// How many frames were lent to the device and not taken back.
    lent: usize,
    /// How long a frame to send may be, in bytes.
    longest: usize,
    is_open: bool,
    /// Set if connecting is up to us.
    pub client: Option<Client>,
}

// SAFETY: the device, its pool and the frames that have arrived belong to this
// value alone, and nothing in them is tied to a thread.
unsafe impl Send for Device {}

impl Device {
    /// Finds a device and makes its pool.
    pub fn find(name: &str, arena: &Arena) -> Result<Self, Failed> {
        let no_name = |error: std::ffi::NulError| Failed { step: None, source: error.into() };
        let name = CString::new(name).map_err(no_name)?;
        let memory = arena.memory();
        let (base, bytes) = memory.range();
        let about = raw::Memory {
            base: base.as_ptr(),
            bytes,
            frames: arena.capacity() as u32,
            shift: arena.frame_bytes().trailing_zeros(),
            page_bytes: memory.page_bytes(),
        };
        // SAFETY: all zero is a valid `raw::Device`: numbers and null pointers.
        let mut raw: raw::Device = unsafe { mem::zeroed() };
        let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: DPDK was started; the name ends in zero and is copied, the
        // memory is kept below as long as the device, and a device is written.
        let error = unsafe { raw::tg_open(name.as_ptr(), &about, &mut raw) };
        if error != 0 {
            return Err(failed(&raw, error));
        }
        Ok(Self {
            raw,
            arrived: Arrived::new(),
            next_queue: 0,
            to_send: Box::new([Packet::NONE; BURST]),
            memory,
            marks: Marks::of(arena),
            lent: 0,
            longest: arena.frame_bytes().min(16 << 10),
            is_open: true,
            client: None,
        })
    }

    /// Starts the device with so many queues in each direction, and lends it the
    /// frames for that. Its rings have up to `descriptors` places each. With
    /// `segmentation` it is to cut what TCP sends, if it can.
    pub fn run(
        &mut self,
        arena: &mut Arena,
        queues: u16,
        descriptors: u16,
        segmentation: bool,
    ) -> Result<(), Failed> {
        let in_rings = usize::from(queues) * usize::from(descriptors);
        self.lend(arena, in_rings + self.marks.target);
        // SAFETY: the device was opened and does not run.
        match unsafe { raw::tg_run(&mut self.raw, queues, descriptors, segmentation.into()) } {
            0 => Ok(()),
            error => Err(failed(&self.raw, error)),
        }
    }

    /// The name of its driver.
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

    /// The most queues that it can have in each direction.
    pub fn queues_max(&self) -> u16 {
        self.raw.queues_max
    }

    /// Whether it spreads what arrives over its queues by flow.
    pub fn has_rss(&self) -> bool {
        self.raw.has_rss != 0
    }

    /// Whether its buffers are frames of the arena; else frames are copied.
    pub fn takes_frames(&self) -> bool {
        self.raw.takes_frames != 0
    }

    pub fn receive_checksum(&self) -> bool {
        self.raw.receive_checksum != 0
    }

    pub fn transmit_checksum(&self) -> bool {
        self.raw.transmit_checksum != 0
    }

    /// Whether it cuts what TCP sends into segments.
    pub fn cuts(&self) -> bool {
        self.raw.cuts != 0
    }

    pub fn link_is_up(&self) -> bool {
        // SAFETY: the device was opened.
        unsafe { raw::tg_link_is_up(&self.raw) != 0 }
    }

    /// Frames that the device lost: without room in its ring, without a
    /// buffer, erroneous, and those that it could not send.
    pub fn losses(&self) -> [u64; 4] {
        let mut losses = [0; 4];
        // SAFETY: the device was opened, and four numbers are written.
        unsafe { raw::tg_losses(&self.raw, losses.as_mut_ptr()) };
        losses
    }

    /// Names of everything that the device counts, as its driver has them.
    pub fn statistic_names(&self) -> Vec<String> {
        // SAFETY: the device was opened, and there is no room to write to.
        let count = unsafe { raw::tg_statistic_names(&self.raw, ptr::null_mut(), 0) };
        let mut names = vec![[0; STATISTIC_BYTES]; count as usize];
        // SAFETY: the device was opened, and there is room for so many.
        let written = unsafe { raw::tg_statistic_names(&self.raw, names.as_mut_ptr(), count) };
        if written != count {
            return Vec::new();
        }
        let text = |name: &[u8; STATISTIC_BYTES]| {
            let name = CStr::from_bytes_until_nul(name).unwrap_or_default();
            name.to_string_lossy().into_owned()
        };
        names.iter().map(text).collect()
    }

    /// What it has counted, in the order of its `count` names; `None` if it does not
    /// tell.
    pub fn statistics(&self, count: usize) -> Option<Vec<u64>> {
        // What has no names must not be asked at all.
        if count == 0 {
            return None;
        }
        let mut values = vec![0; count];
        // SAFETY: the device was opened, and there is room for so many values.
        let told = unsafe { raw::tg_statistics(&self.raw, values.as_mut_ptr(), count as u32) };
        (told != 0).then_some(values)
    }

    /// Refuses any arena but the one that the device was opened with: what is
    /// behind its frames is not what the device has.
    #[inline]
    pub fn check(&self, arena: &Arena) -> io::Result<()> {
        if arena.region().0 == self.memory.range().0 {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a dpdk port takes the arena that it was opened with, and this is another one",
        ))
    }

    /// Lends frames until the device has `target` beside those in its rings, or
    /// none is left.
    fn lend(&mut self, arena: &mut Arena, target: usize) {
        if !self.takes_frames() {
            return;
        }
        let base = arena.region().0.as_ptr();
        let mut frames = [ptr::null_mut(); BURST];
        while (self.raw.level as usize) < target {
            let mut count = 0;
            let wanted = (target - self.raw.level as usize).min(BURST);
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
            // SAFETY: the frames were just lent, so that their mbufs are not in
            // the pool nor with the driver.
            self.raw.level =
                unsafe { raw::tg_give(&mut self.raw.pool, frames.as_ptr(), count as u32) };
        }
    }

    /// Takes frames back that the device does not use, until it has `target`.
    fn take_back(&mut self, arena: &mut Arena, target: usize) {
        if !self.takes_frames() {
            return;
        }
        let base = arena.region().0.as_ptr() as u64;
        let mut frames = [ptr::null_mut(); BURST];
        while self.raw.level as usize > target {
            let wanted = (self.raw.level as usize - target).min(BURST) as u32;
            let left = &mut self.raw.level;
            // SAFETY: there is room for as many as are wanted.
            let count =
                unsafe { raw::tg_take(&mut self.raw.pool, frames.as_mut_ptr(), wanted, left) };
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

    /// Sees to it that neither the device nor the arena runs out of frames while
    /// the other has many.
    #[inline]
    fn balance(&mut self, arena: &mut Arena) {
        let level = self.raw.level as usize;
        if level < self.marks.low {
            self.lend(arena, self.marks.target);
        } else if level > self.marks.high {
            self.take_back(arena, self.marks.target);
        }
    }

    /// How many frames have arrived and wait here, after a look at each queue
    /// if none did.
    #[inline]
    pub fn arrived(&mut self) -> usize {
        let Arrived { raw, next, end } = &mut self.arrived;
        if *next == *end {
            (*next, *end) = (0, 0);
            for _ in 0..self.raw.queues {
                let queue = self.next_queue;
                self.next_queue = if queue + 1 < self.raw.queues { queue + 1 } else { 0 };
                // SAFETY: the device has this queue; the burst holds no frame,
                // and has room for as many as are ever written.
                *end = unsafe { raw::tg_receive(&mut self.raw, queue, &mut **raw) } as usize;
                if *end > 0 {
                    break;
                }
            }
        }
        *end - *next
    }

    /// Appends up to `quota` frames that have arrived to `burst` and returns how
    /// many, and how many bytes those are.
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
            let count = self.arrived().min(quota - seen);
            if count == 0 {
                break;
            }
            let first = self.arrived.next;
            let (frames, frame_bytes) = self.accept(arena, burst, count, drops);
            (taken, bytes) = (taken + frames, bytes + frame_bytes);
            if self.arrived.next == first {
                match self.copy_in(arena) {
                    Ok(frame) => {
                        bytes += frame.len() as u64;
                        burst.push_back(frame);
                        taken += 1;
                    }
                    // It waits for a frame to be copied to.
                    Err(DropReason::NoBuffer) => break,
                    Err(reason) => drops.count(reason),
                }
            }
            seen += self.arrived.next - first;
        }
        (taken, bytes)
    }

    /// Takes some of the next `count`, up to the first that does not lie in a frame
    /// of the arena. Returns how many frames with how many bytes were added to the
    /// burst.
    #[inline(always)]
    fn accept(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        count: usize,
        drops: &mut DropCounters,
    ) -> (usize, u64) {
        let base = arena.region().0.as_ptr() as usize;
        let mut places = burst.spare(usize::MAX, count);
        let count = count.min(places.left());
        let packets = &self.arrived.raw.packets[self.arrived.next..][..count];
        let mut lent = arena.lending();
        let (mut bytes, mut seen) = (0, 0);
        for packet in packets {
            if packet.is_frame == 0 {
                break;
            }
            seen += 1;
            let address = (packet.data as usize).wrapping_sub(base);
            let Some(mut frame) = lent.reclaim(address as u64, packet.len) else {
                drops.count(DropReason::PortInvalidDescriptor);
                continue;
            };
            if packet.checksum == raw::CHECKSUM_VERIFIED {
                frame.set_checksum(Checksum::Verified);
            }
            bytes += u64::from(packet.len);
            // There is a place: no more are gone through.
            let _ = places.push(frame);
        }
        let frames = places.used();
        self.arrived.next += seen;
        self.lent -= frames;
        (frames, bytes)
    }

    /// Copies the next one that has arrived, in a buffer that is not the
    /// arena's, and gives that back.
    fn copy_in(&mut self, arena: &mut Arena) -> Result<Frame, DropReason> {
        if arena.available() == 0 {
            self.take_back(arena, 0);
        }
        if arena.available() == 0 {
            return Err(DropReason::NoBuffer);
        }
        let packet = self.arrived.raw.packets[self.arrived.next];
        let frame = if packet.data.is_null() {
            None
        } else {
            // SAFETY: the frame is in one piece of this length, and ours until
            // it is released below.
            let bytes = unsafe { slice::from_raw_parts(packet.data, packet.len as usize) };
            arena.alloc_from(bytes)
        };
        self.arrived.release(1);
        let mut frame = frame.ok_or(DropReason::FrameTooLong)?;
        if packet.checksum == raw::CHECKSUM_VERIFIED {
            frame.set_checksum(Checksum::Verified);
        }
        Ok(frame)
    }

    /// Sends frames from the front of `burst`, as many as the device takes, and
    /// returns how many, and how many bytes those are.
    #[inline]
    pub fn transmit(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        drops: &mut DropCounters,
    ) -> (usize, u64) {
        let (mut taken, mut bytes) = (0, 0);
        while !burst.is_empty() {
            let ready = self.describe(arena, burst);
            let mut refuses_next = 0;
            let sent = match ready {
                0 => 0,
                // SAFETY: the device was opened, and the first `ready` packets
                // are frames of its arena that the burst holds, so that their
                // mbufs are not in the pool nor with the driver.
                _ => unsafe {
                    raw::tg_transmit(
                        &mut self.raw,
                        self.to_send.as_ptr(),
                        ready as u32,
                        &mut refuses_next,
                    ) as usize
                },
            };
            taken += sent;
            bytes += self.forget_sent(arena, burst, sent);
            if refuses_next != 0 || ready == 0 {
                if let Some(frame) = burst.pop_front() {
                    arena.free(frame);
                    drops.count(DropReason::TransmitFailed);
                }
            } else if sent < ready {
                break;
            }
        }
        if self.raw.level as usize > self.marks.high {
            self.take_back(arena, self.marks.target);
        }
        (taken, bytes)
    }

    /// The first `sent` frames of the burst are the device's, or were copied.
    /// Returns how many bytes those are.
    #[inline(always)]
    fn forget_sent(&mut self, arena: &mut Arena, burst: &mut Burst, sent: usize) -> u64 {
        let sent = sent.min(burst.len());
        let mut bytes = 0;
        if self.takes_frames() {
            let (mut left, mut lent) = (sent, arena.lending());
            // Up to the end of the queue's memory, and again from its beginning on.
            while left > 0 {
                for frame in burst.run_of(left) {
                    bytes += frame.len() as u64;
                    lent.lend(frame);
                    left -= 1;
                }
            }
            self.lent += sent;
        } else {
            let mut back = arena.give_back();
            for frame in burst.drain(..sent) {
                bytes += frame.len() as u64;
                back.free(frame);
            }
        }
        bytes
    }

    /// Writes down what is to be sent, from the front of `burst` up to the first
    /// frame that cannot be. Returns how many frames.
    #[inline(always)]
    fn describe(&mut self, arena: &mut Arena, burst: &mut Burst) -> usize {
        let sendable = SHORTEST_FRAME_BYTES..=self.longest;
        let most = usize::from(self.raw.burst).min(BURST);
        let mut count = 0;
        let (front, back) = burst.as_mut_slices();
        for frames in [front, back] {
            for (frame, packet) in frames.iter_mut().zip(&mut self.to_send[count..most]) {
                packet.checksum = raw::CHECKSUM_UNKNOWN;
                let is_plain = frame.is_unchecked() && sendable.contains(&frame.len());
                if !is_plain && !describe_work(&self.raw, self.longest, arena, frame, packet) {
                    return count;
                }
                packet.data = arena.bytes(frame).as_ptr().cast_mut();
                packet.len = frame.len() as u32;
                count += 1;
            }
        }
        count
    }

    /// A descriptor that is readable when the device interrupts; `None` when
    /// it cannot.
    pub fn interrupts(&self) -> Option<Interrupts> {
        if self.raw.has_interrupts == 0 {
            return None;
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).ok()?;
        // SAFETY: the device was opened, and the descriptor is an epoll's.
        let error = unsafe { raw::tg_watch(&self.raw, epoll.as_raw_fd()) };
        (error == 0).then_some(Interrupts(epoll))
    }

    /// Stops the device and starts it again. What fails leaves it stopped.
    pub fn restart(&mut self) -> io::Result<()> {
        // SAFETY: the device is configured.
        result(unsafe { raw::tg_restart(&mut self.raw) })
    }

    /// Turns interrupts on or off.
    pub fn set_interrupts(&self, on: bool) -> io::Result<()> {
        // SAFETY: the device was opened.
        result(unsafe { raw::tg_set_interrupts(&self.raw, on.into()) })
    }

    /// Lets the device go and takes all frames back. Those that another device
    /// of this process still has stay lent.
    pub fn close(mut self, arena: &mut Arena) {
        if self.check(arena).is_err() {
            return;
        }
        self.let_go();
        self.raw.level = self.lent as u32;
        self.take_back(arena, 0);
    }

    /// Stops the device and gives it back, once.
    fn let_go(&mut self) {
        if !mem::take(&mut self.is_open) {
            return;
        }
        self.arrived.release(BURST);
        let client = self.client.take();
        // The server might end if we went now.
        while client.as_ref().is_some_and(Client::is_greeting) && !self.link_is_up() {
            thread::sleep(GREETING_LOOK);
        }
        let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the device was opened, and is not used any more.
        unsafe { raw::tg_close(&mut self.raw) }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.let_go();
        // SAFETY: nobody uses the pool but those who have mbufs of it.
        let is_free = unsafe { raw::tg_free_pool(&mut self.raw, self.lent as u32) != 0 };
        if !is_free {
            // What comes back is never used, but it may be looked at.
            mem::forget(self.memory.clone());
        }
    }
}

/// Writes down what the device has to sum or to cut of a frame, and sums itself what the
/// device does not. Returns whether the frame can be sent.
#[inline(always)]
fn describe_work(
    device: &raw::Device,
    longest: usize,
    arena: &mut Arena,
    frame: &mut Frame,
    packet: &mut Packet,
) -> bool {
    let cut = match device.cuts {
        0 => None,
        _ => layers::to_cut(arena.bytes(frame), frame),
    };
    if !(SHORTEST_FRAME_BYTES..=longest).contains(&frame.len()) && cut.is_none() {
        return false;
    }
    let checksum = frame.checksum();
    if !matches!(checksum, Checksum::Partial { .. }) {
        return true;
    }
    let layers = match device.transmit_checksum {
        0 => None,
        _ => layers::to_sum(arena.bytes(frame), checksum),
    };
    let Some(layers) = layers else {
        layers::complete(arena.bytes_mut(frame), checksum);
        frame.set_checksum(Checksum::Unknown);
        return true;
    };
    packet.checksum = if layers.is_tcp { raw::CHECKSUM_TCP } else { raw::CHECKSUM_UDP };
    packet.is_v6 = layers.is_v6.into();
    packet.link_bytes = layers.link_bytes;
    packet.network_bytes = layers.network_bytes;
    if let Some(cut) = cut {
        packet.checksum = raw::CHECKSUM_TCP_CUT;
        packet.transport_bytes = cut.transport_bytes;
        packet.segment_bytes = cut.segment_bytes;
    }
    true
}

fn failed(raw: &raw::Device, error: i32) -> Failed {
    let step = (!raw.step.is_null()).then(|| {
        // SAFETY: a literal of the shim's.
        unsafe { CStr::from_ptr::<'static>(raw.step) }.to_str().unwrap_or("open it")
    });
    Failed { step, source: io::Error::from_raw_os_error(error) }
}

/// Interrupts of a device.
#[derive(Debug)]
pub struct Interrupts(OwnedFd);

impl Interrupts {
    /// Takes note of those that have come: the descriptor is not readable.
    pub fn take(&self) {
        // SAFETY: the descriptor is an epoll's that only DPDK adds to.
        unsafe { raw::tg_take_interrupts(self.0.as_raw_fd()) }
    }
}

impl AsFd for Interrupts {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
