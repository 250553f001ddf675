//! DPDK ethdev, which several threads may share: each has queues of its own.

use std::ffi::{CStr, CString};
use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::super::memif::MemifClient;
use super::raw::{self, STATISTIC_NAME_BYTES};
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

/// DPDK ethdev. Closed with the first of its queues, or on drop.
pub struct EthDev {
    raw: NonNull<raw::EthDev>,
    info: raw::Info,
    /// Number of threads with queues.
    users: u16,
    state: Mutex<State>,
}

/// State of the device besides its bursts.
struct State {
    is_open: bool,
    /// All threads have joined, and the device was started.
    has_begun: bool,
    joined: u16,
    /// Reconnection state of a memif client; `None` for other devices.
    memif_client: Option<MemifClient>,
}

// SAFETY: the shim's device is tied to no thread.
unsafe impl Send for EthDev {}
// SAFETY: the shim's device is used under the lock of the state, except for bursts. These the shim
// itself keeps apart from a restart and from the end of the device.
unsafe impl Sync for EthDev {}

impl EthDev {
    /// Probes a device for arenas of frames with `frame_bytes` bytes.
    pub fn open(name: &str, frame_bytes: usize) -> Result<Self, OpenFailure> {
        let no_name = |error: std::ffi::NulError| OpenFailure { step: None, source: error.into() };
        let c_name = CString::new(name).map_err(no_name)?;
        let (mut device, mut step) = (ptr::null_mut(), ptr::null());
        let _lock = lock(&PROBE_LOCK);
        // SAFETY: DPDK was started. The name is null-terminated and copied. The results are
        // writable.
        let error = unsafe {
            raw::dpdk_open(c_name.as_ptr(), frame_bytes.trailing_zeros(), &mut device, &mut step)
        };
        let Some(raw) = NonNull::new(device).filter(|_| error == 0) else {
            return Err(open_failure(step, error));
        };
        let state = State { is_open: true, has_begun: false, joined: 0, memif_client: None };
        Ok(Self { raw, info: describe(raw), users: 1, state: Mutex::new(state) })
    }

    /// Chooses `queues` queues in each direction for `users` threads, at most as many. With
    /// `segmentation`, enables TSO if the device supports it.
    pub fn plan(&mut self, queues: u16, users: u16, segmentation: bool) -> Result<(), OpenFailure> {
        // SAFETY: the device was opened, and has no queues yet.
        let error =
            unsafe { raw::dpdk_plan(self.raw.as_ptr(), queues, users.into(), segmentation.into()) };
        self.users = users;
        self.info = describe(self.raw);
        self.check(error)
    }

    /// Properties of the planned device.
    pub(super) fn info(&self) -> &raw::Info {
        &self.info
    }

    /// Name of the driver.
    pub fn driver(&self) -> String {
        let name = self.info.driver.map(|byte| byte as u8);
        CStr::from_bytes_until_nul(&name)
            .map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned())
    }

    pub fn mac(&self) -> [u8; 6] {
        self.info.mac
    }

    pub fn mtu(&self) -> usize {
        self.info.mtu.into()
    }

    /// Maximum number of queues in each direction.
    pub fn max_queues(&self) -> u16 {
        self.info.queues_max
    }

    /// Number of queues in each direction.
    pub fn queues(&self) -> u16 {
        self.info.queues
    }

    /// Number of threads with queues.
    pub fn users(&self) -> u16 {
        self.users
    }

    /// True if the device distributes received flows over its queues.
    pub fn has_rss(&self) -> bool {
        self.info.has_rss != 0
    }

    /// True if the device's buffers are frames of the arenas; otherwise frames are copied.
    pub fn uses_arena_frames(&self) -> bool {
        self.info.takes_frames != 0
    }

    pub fn receive_checksum(&self) -> bool {
        self.info.receive_checksum != 0
    }

    pub fn transmit_checksum(&self) -> bool {
        self.info.transmit_checksum != 0
    }

    /// True if TSO is enabled.
    pub fn has_tso(&self) -> bool {
        self.info.cuts != 0
    }

    /// Adds the queues of the next thread.
    ///
    /// # Safety
    /// `memory` stays valid until the device is closed, and `queues` is at one address until then.
    pub(super) unsafe fn join(
        &self,
        memory: &raw::Memory,
        descriptors: u16,
        queues: &mut raw::Queues,
    ) -> Result<(), OpenFailure> {
        let _lock = lock(&PROBE_LOCK);
        let mut state = lock(&self.state);
        self.check_open(&state)?;
        state.joined += 1;
        // SAFETY: the device is open. The rest is guaranteed by the caller.
        self.check(unsafe { raw::dpdk_join(self.raw.as_ptr(), memory, descriptors, queues) })
    }

    /// Starts the device if all threads have joined.
    pub(super) fn start_if_complete(&self) -> Result<(), OpenFailure> {
        let mut state = lock(&self.state);
        self.check_open(&state)?;
        if state.joined < self.users {
            return Ok(());
        }
        state.has_begun = true;
        // SAFETY: the device is open, and its queues are set up.
        self.check(unsafe { raw::dpdk_run(self.raw.as_ptr()) })
    }

    /// The device is open and has been started, with its state.
    pub(super) fn running(&self) -> Option<Running<'_>> {
        let state = lock(&self.state);
        (state.is_open && state.has_begun).then_some(Running { raw: self.raw, state })
    }

    /// True if the device waits for threads that have yet to join.
    pub fn is_incomplete(&self) -> bool {
        let state = lock(&self.state);
        state.is_open && !state.has_begun
    }

    pub fn link_is_up(&self) -> bool {
        self.running().is_some_and(|running| running.link_is_up())
    }

    /// Sets the reconnection state of a memif client.
    pub fn set_memif_client(&self, client: Option<MemifClient>) {
        lock(&self.state).memif_client = client;
    }

    /// Reconnects a memif client whose server went away, when a retry is due.
    pub fn reconnect_if_due(&self) {
        let Some(mut running) = self.running() else { return };
        let Some(mut client) = running.state.memif_client.take() else { return };
        if client.is_retry_due(|| running.link_is_up()) {
            // SAFETY: the device is configured. Its threads exclude handlers, as those of every
            // memif do.
            let restarted = result(unsafe { raw::dpdk_restart(self.raw.as_ptr()) });
            // The server may still be absent.
            client.on_restart(restarted.is_ok());
        }
        running.state.memif_client = Some(client);
    }

    /// Frames lost by the device: dropped on receive ring overflow, dropped for lack of a buffer,
    /// received with errors, failed to transmit.
    pub fn losses(&self) -> [u64; 4] {
        let mut losses = [0; 4];
        if let Some(running) = self.running() {
            // SAFETY: the device is open, and four numbers are written.
            unsafe { raw::dpdk_losses(running.raw.as_ptr(), losses.as_mut_ptr()) };
        }
        losses
    }

    /// Names of the extended statistics, as the driver gives them.
    pub fn statistic_names(&self) -> Vec<String> {
        let Some(running) = self.running() else { return Vec::new() };
        let device = running.raw.as_ptr();
        // SAFETY: the device is open, and with a capacity of 0 nothing is written.
        let count = unsafe { raw::dpdk_statistic_names(device, ptr::null_mut(), 0) };
        let mut names = vec![[0; STATISTIC_NAME_BYTES]; count as usize];
        // SAFETY: the device is open, and `names` holds `count` names.
        let written = unsafe { raw::dpdk_statistic_names(device, names.as_mut_ptr(), count) };
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
        let running = self.running()?;
        let mut values = vec![0; count];
        // SAFETY: the device is open, and `values` holds `count` values.
        let complete = unsafe {
            raw::dpdk_statistics(running.raw.as_ptr(), values.as_mut_ptr(), count as u32)
        };
        (complete != 0).then_some(values)
    }

    /// Stops and closes the device for all threads, unless that was done before.
    pub fn close(&self) {
        let memif_client = self.running().and_then(|mut running| running.state.memif_client.take());
        // A memif server might exit if the client disconnected before the link is up.
        while memif_client.as_ref().is_some_and(MemifClient::is_connecting) && !self.link_is_up() {
            thread::sleep(CONNECT_POLL_INTERVAL);
        }
        let _lock = lock(&PROBE_LOCK);
        let mut state = lock(&self.state);
        if mem::take(&mut state.is_open) {
            // SAFETY: the device was opened, and is not used afterwards.
            unsafe { raw::dpdk_close(self.raw.as_ptr()) }
        }
    }

    fn check_open(&self, state: &State) -> Result<(), OpenFailure> {
        match state.is_open {
            true => Ok(()),
            false => Err(OpenFailure {
                step: Some("use it any more: another core has closed it"),
                source: io::ErrorKind::NotConnected.into(),
            }),
        }
    }

    fn check(&self, error: i32) -> Result<(), OpenFailure> {
        match error {
            0 => Ok(()),
            // SAFETY: the device exists.
            error => Err(open_failure(unsafe { raw::dpdk_step(self.raw.as_ptr()) }, error)),
        }
    }
}

impl Drop for EthDev {
    fn drop(&mut self) {
        self.close();
        // SAFETY: the device is closed. Its queues, which hold it, are gone.
        unsafe { raw::dpdk_free(self.raw.as_ptr()) }
    }
}

/// An open device that was started, locked.
pub(super) struct Running<'d> {
    raw: NonNull<raw::EthDev>,
    state: MutexGuard<'d, State>,
}

impl Running<'_> {
    pub(super) fn link_is_up(&self) -> bool {
        // SAFETY: the device is open.
        unsafe { raw::dpdk_link_is_up(self.raw.as_ptr()) != 0 }
    }

    pub(super) fn has_interrupts(&self) -> bool {
        // SAFETY: the device is open.
        unsafe { raw::dpdk_has_interrupts(self.raw.as_ptr()) != 0 }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn describe(device: NonNull<raw::EthDev>) -> raw::Info {
    // SAFETY: all zero is a valid `raw::Info`: numbers.
    let mut info: raw::Info = unsafe { mem::zeroed() };
    // SAFETY: the device was opened. `info` is writable.
    unsafe { raw::dpdk_describe(device.as_ptr(), &mut info) };
    info
}

fn open_failure(step: *const std::ffi::c_char, error: i32) -> OpenFailure {
    let step = (!step.is_null()).then(|| {
        // SAFETY: a string literal of the shim.
        unsafe { CStr::from_ptr::<'static>(step) }.to_str().unwrap_or("open it")
    });
    OpenFailure { step, source: io::Error::from_raw_os_error(error) }
}
