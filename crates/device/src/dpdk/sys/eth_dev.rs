//! DPDK ethdev and the arena frames lent to it.

mod interrupts;
mod lending;
mod receive;
mod transmit;

use std::ffi::{CStr, CString};
use std::io;
use std::mem;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use tidegate_memory::{Arena, ArenaMemory};

pub use self::interrupts::RxInterrupts;
use self::lending::PoolLevels;
use self::receive::RxBurst;
use super::super::memif::MemifClient;
use super::raw::{self, BURST_FRAMES, Packet, STATISTIC_NAME_BYTES};
use super::result;

/// Interval between link checks while a memif server has yet to bring the link up.
const CONNECT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Failed step while opening a device, with its error. `step` is `None` if the device was not
/// found.
pub struct OpenFailure {
    pub step: Option<&'static str>,
    pub source: io::Error,
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
        let error = unsafe { raw::dpdk_open(name.as_ptr(), &memory_description, &mut raw) };
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
        match unsafe { raw::dpdk_run(&mut self.raw, queues, descriptors, segmentation.into()) } {
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
        unsafe { raw::dpdk_link_is_up(&self.raw) != 0 }
    }

    /// Frames lost by the device: dropped on receive ring overflow, dropped for lack of a buffer,
    /// received with errors, failed to transmit.
    pub fn losses(&self) -> [u64; 4] {
        let mut losses = [0; 4];
        // SAFETY: the device was opened, and four numbers are written.
        unsafe { raw::dpdk_losses(&self.raw, losses.as_mut_ptr()) };
        losses
    }

    /// Names of the extended statistics, as the driver gives them.
    pub fn statistic_names(&self) -> Vec<String> {
        // SAFETY: the device was opened, and with a capacity of 0 nothing is written.
        let count = unsafe { raw::dpdk_statistic_names(&self.raw, ptr::null_mut(), 0) };
        let mut names = vec![[0; STATISTIC_NAME_BYTES]; count as usize];
        // SAFETY: the device was opened, and `names` holds `count` names.
        let written = unsafe { raw::dpdk_statistic_names(&self.raw, names.as_mut_ptr(), count) };
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
        let complete =
            unsafe { raw::dpdk_statistics(&self.raw, values.as_mut_ptr(), count as u32) };
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

    /// Stops and restarts the device. After an error the device stays stopped.
    pub fn restart(&mut self) -> io::Result<()> {
        // SAFETY: the device is configured.
        result(unsafe { raw::dpdk_restart(&mut self.raw) })
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
        unsafe { raw::dpdk_close(&mut self.raw) }
    }
}

impl Drop for EthDev {
    fn drop(&mut self) {
        self.close_once();
        // SAFETY: the pool is used only by holders of its mbufs.
        let is_freed = unsafe { raw::dpdk_free_pool(&mut self.raw, self.lent as u32) != 0 };
        if !is_freed {
            // Frames returned later are never reused, but their memory may still be read.
            mem::forget(self.memory.clone());
        }
    }
}

fn open_failure(raw: &raw::EthDev, error: i32) -> OpenFailure {
    let step = (!raw.step.is_null()).then(|| {
        // SAFETY: a string literal of the shim.
        unsafe { CStr::from_ptr::<'static>(raw.step) }.to_str().unwrap_or("open it")
    });
    OpenFailure { step, source: io::Error::from_raw_os_error(error) }
}
