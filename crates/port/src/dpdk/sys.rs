//! The functions of `dpdk/shim.c`. The one place of this module with `unsafe`.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::slice;
use std::sync::{Mutex, PoisonError};

use rustix::event::epoll;
use tidegate_memory::Checksum;

use super::layers;

/// The most frames of one call; as in the shim.
const BURST: usize = 64;
const DRIVER_BYTES: usize = 32;

const CHECKSUM_UNKNOWN: u8 = 0;
const CHECKSUM_VERIFIED: u8 = 1;
const CHECKSUM_UDP: u8 = 2;
const CHECKSUM_TCP: u8 = 3;

/// `struct tg_packet`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawPacket {
    data: *mut u8,
    len: u32,
    checksum: u8,
    is_v6: u8,
    link_bytes: u8,
    network_bytes: u8,
}

/// `struct tg_burst`.
#[repr(C)]
struct RawBurst {
    mbufs: [*mut c_void; BURST],
    packets: [RawPacket; BURST],
}

/// `struct tg_device`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawDevice {
    port: u16,
    mtu: u16,
    mac: [u8; 6],
    receive_checksum: u8,
    transmit_checksum: u8,
    has_interrupts: u8,
    runs: u8,
    driver: [c_char; DRIVER_BYTES],
    pool: *mut c_void,
    device: *mut c_void,
    step: *const c_char,
}

unsafe extern "C" {
    fn rte_version() -> *const c_char;
    fn tg_keep_log();
    fn tg_take_log(to: *mut u8, room: usize) -> usize;
    fn tg_start(argc: c_int, argv: *mut *mut c_char) -> c_int;
    fn tg_open(
        name: *const c_char,
        buffers: c_uint,
        data_bytes: u16,
        device: *mut RawDevice,
    ) -> c_int;
    fn tg_close(device: *mut RawDevice);
    fn tg_restart(device: *mut RawDevice) -> c_int;
    fn tg_link_is_up(device: *const RawDevice) -> c_int;
    fn tg_losses(device: *const RawDevice, losses: *mut u64);
    fn tg_receive(device: *const RawDevice, burst: *mut RawBurst) -> c_uint;
    fn tg_release(burst: *mut RawBurst, from: c_uint, count: c_uint);
    fn tg_allocate(device: *const RawDevice, burst: *mut RawBurst, count: c_uint) -> c_int;
    fn tg_prepare(device: *const RawDevice, burst: *mut RawBurst, count: c_uint) -> c_uint;
    fn tg_transmit(
        device: *const RawDevice,
        burst: *mut RawBurst,
        from: c_uint,
        count: c_uint,
    ) -> c_uint;
    fn tg_watch(device: *const RawDevice, epoll: c_int) -> c_int;
    fn tg_set_interrupts(device: *const RawDevice, on: c_int) -> c_int;
    fn tg_take_interrupts(epoll: c_int);
}

/// What DPDK calls itself: `DPDK 22.11.11`.
pub fn version() -> String {
    // SAFETY: returns a string that is never changed or freed.
    unsafe { CStr::from_ptr(rte_version()) }.to_string_lossy().into_owned()
}

/// Keeps what DPDK says instead of printing it.
pub fn keep_log() {
    // SAFETY: has no conditions.
    unsafe { tg_keep_log() }
}

/// What DPDK has said since the last call, or the end of it.
pub fn take_log() -> String {
    let mut text = vec![0; 1024];
    // SAFETY: writes at most so many bytes there, and returns how many.
    let bytes = unsafe { tg_take_log(text.as_mut_ptr(), text.len()) };
    text.truncate(bytes);
    String::from_utf8_lossy(&text).into_owned()
}

/// Starts DPDK. Only the first call of a process can succeed.
pub fn start(arguments: &[String]) -> io::Result<()> {
    let name = ["tidegate".to_owned()];
    let all = name.iter().chain(arguments).map(|word| CString::new(word.as_str()));
    let all: Vec<CString> = all.collect::<Result<_, _>>()?;
    // DPDK keeps them, and this happens once.
    let mut pointers: Vec<_> = all.into_iter().map(CString::into_raw).collect();
    pointers.push(ptr::null_mut());
    let pointers = pointers.leak();
    // SAFETY: an argument vector as of `main`, which is never freed.
    result(unsafe { tg_start((pointers.len() - 1) as c_int, pointers.as_mut_ptr()) })
}

fn result(error: c_int) -> io::Result<()> {
    match error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// What failed while a device was opened, and at which step; `None` is the
/// search for it.
pub struct Failed {
    pub step: Option<&'static str>,
    pub source: io::Error,
}

/// Frames of DPDK's that are ours for a moment: those from `next` to `end`.
struct Held {
    raw: Box<RawBurst>,
    next: usize,
    end: usize,
}

impl Held {
    fn new() -> Self {
        let none = RawPacket {
            data: ptr::null_mut(),
            len: 0,
            checksum: CHECKSUM_UNKNOWN,
            is_v6: 0,
            link_bytes: 0,
            network_bytes: 0,
        };
        let raw = RawBurst { mbufs: [ptr::null_mut(); BURST], packets: [none; BURST] };
        Self { raw: Box::new(raw), next: 0, end: 0 }
    }

    /// Gives the next `count` frames back, or as many as there are.
    fn release(&mut self, count: usize) {
        let count = count.min(self.end - self.next);
        // SAFETY: those frames are ours, and are forgotten here.
        unsafe { tg_release(&mut *self.raw, self.next as c_uint, count as c_uint) };
        self.next += count;
    }
}

/// Held while devices come and go: a new one is known by not having been there
/// before.
static CHANGING: Mutex<()> = Mutex::new(());

/// A device that runs. It is stopped and let go on drop.
pub struct Device {
    raw: RawDevice,
    received: Held,
    to_send: Held,
    /// How long a frame to send may be.
    data_bytes: usize,
}

// SAFETY: the device, its pool and the frames that are held belong to this
// value alone, and nothing in them is tied to a thread.
unsafe impl Send for Device {}

impl Device {
    /// Finds a device and starts it. Each of `buffers` holds a frame of
    /// `data_bytes`.
    pub fn open(name: &str, buffers: u32, data_bytes: u16) -> Result<Self, Failed> {
        let no_name = |error: std::ffi::NulError| Failed { step: None, source: error.into() };
        let name = CString::new(name).map_err(no_name)?;
        // SAFETY: all zero is a valid `RawDevice`: numbers and null pointers.
        let mut raw: RawDevice = unsafe { mem::zeroed() };
        let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: DPDK was started; the name ends in zero and is copied, and a
        // device is written.
        let error = unsafe { tg_open(name.as_ptr(), buffers, data_bytes, &mut raw) };
        if error != 0 {
            let step = (!raw.step.is_null()).then(|| {
                // SAFETY: a literal of the shim's.
                unsafe { CStr::from_ptr::<'static>(raw.step) }.to_str().unwrap_or("open it")
            });
            return Err(Failed { step, source: io::Error::from_raw_os_error(error) });
        }
        Ok(Self { raw, received: Held::new(), to_send: Held::new(), data_bytes: data_bytes.into() })
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

    pub fn receive_checksum(&self) -> bool {
        self.raw.receive_checksum != 0
    }

    pub fn transmit_checksum(&self) -> bool {
        self.raw.transmit_checksum != 0
    }

    pub fn link_is_up(&self) -> bool {
        // SAFETY: the device runs.
        unsafe { tg_link_is_up(&self.raw) != 0 }
    }

    /// Frames that the device lost: without room in its ring, without a
    /// buffer, damaged, and those that it could not send.
    pub fn losses(&self) -> [u64; 4] {
        let mut losses = [0; 4];
        // SAFETY: the device runs, and four numbers are written.
        unsafe { tg_losses(&self.raw, losses.as_mut_ptr()) };
        losses
    }

    /// Takes what has arrived, up to `quota` frames, and has `read` see each;
    /// `None` stands for one in pieces that do not fit together. Returns how
    /// many there were.
    #[inline]
    pub fn receive(
        &mut self,
        quota: usize,
        mut read: impl FnMut(Option<(&[u8], Checksum)>),
    ) -> usize {
        let count = self.arrived().min(quota);
        let next = self.received.next;
        for packet in &self.received.raw.packets[next..next + count] {
            if packet.data.is_null() {
                read(None);
                continue;
            }
            // SAFETY: the frame is in one piece of this length, and ours until
            // it is released below.
            let bytes = unsafe { slice::from_raw_parts(packet.data, packet.len as usize) };
            let checksum = match packet.checksum {
                CHECKSUM_VERIFIED => Checksum::Verified,
                _ => Checksum::Unknown,
            };
            read(Some((bytes, checksum)));
        }
        self.received.release(count);
        count
    }

    /// How many frames have arrived and wait here, after a look if none did.
    #[inline]
    pub fn arrived(&mut self) -> usize {
        let received = &mut self.received;
        if received.next == received.end {
            received.next = 0;
            // SAFETY: the device runs; the burst holds no frame, and has room
            // for as many as are ever written.
            received.end = unsafe { tg_receive(&self.raw, &mut *received.raw) } as usize;
        }
        received.end - received.next
    }

    /// Whether frames wait that the device did not take so far.
    #[inline]
    pub fn has_unsent(&self) -> bool {
        self.to_send.next < self.to_send.end
    }

    /// Gets buffers for up to `wanted` frames; returns for how many. Only when
    /// nothing is unsent.
    #[inline]
    pub fn allocate(&mut self, wanted: usize) -> usize {
        debug_assert!(!self.has_unsent());
        let count = wanted.min(BURST);
        let raw = &mut *self.to_send.raw;
        // SAFETY: the device runs; the burst holds no frame, and has room for
        // as many.
        let there = unsafe { tg_allocate(&self.raw, raw, count as c_uint) != 0 };
        (self.to_send.next, self.to_send.end) = (0, if there { count } else { 0 });
        self.to_send.end
    }

    /// Writes the frame number `index` of those that buffers were got for.
    /// Returns whether it fits.
    #[inline]
    pub fn fill(&mut self, index: usize, bytes: &[u8], checksum: Checksum) -> bool {
        if bytes.len() > self.data_bytes || index >= self.to_send.end {
            return false;
        }
        let packet = &mut self.to_send.raw.packets[index];
        // SAFETY: the buffer is ours, and has room for `data_bytes`.
        let room = unsafe { slice::from_raw_parts_mut(packet.data, bytes.len()) };
        tidegate_memory::copy_packet(room, bytes);
        packet.len = bytes.len() as u32;
        packet.checksum = CHECKSUM_UNKNOWN;
        let by_device = self.raw.transmit_checksum != 0;
        match layers::to_sum(bytes, checksum).filter(|_| by_device) {
            Some(layers) => {
                packet.checksum = if layers.is_tcp { CHECKSUM_TCP } else { CHECKSUM_UDP };
                packet.is_v6 = layers.is_v6.into();
                packet.link_bytes = layers.link_bytes;
                packet.network_bytes = layers.network_bytes;
            }
            None => layers::complete(room, checksum),
        }
        true
    }

    /// The first `count` frames are to be sent, the other buffers are not
    /// needed. Returns how many of them the device will never send: they are
    /// gone.
    #[inline]
    pub fn prepare(&mut self, count: usize) -> usize {
        let count = count.min(self.to_send.end);
        // SAFETY: the device runs, and the first `count` frames are written.
        let ready = unsafe { tg_prepare(&self.raw, &mut *self.to_send.raw, count as c_uint) };
        let ready = (ready as usize).min(count);
        self.to_send.next = ready;
        self.to_send.release(BURST);
        (self.to_send.next, self.to_send.end) = (0, ready);
        count - ready
    }

    /// Sends what is unsent, as much as the device takes, and returns the
    /// number of frames and of bytes.
    #[inline]
    pub fn send(&mut self) -> (usize, u64) {
        let Held { raw, next, end } = &mut self.to_send;
        // SAFETY: the device runs, and these frames are ours and prepared;
        // those that it takes are its own then.
        let sent = unsafe {
            tg_transmit(&self.raw, &mut **raw, *next as c_uint, (*end - *next) as c_uint)
        };
        let sent = (sent as usize).min(*end - *next);
        let bytes = raw.packets[*next..*next + sent].iter().map(|packet| u64::from(packet.len));
        let bytes = bytes.sum();
        *next += sent;
        (sent, bytes)
    }

    /// Forgets what is unsent, and returns how many frames that were.
    pub fn forget_unsent(&mut self) -> usize {
        let count = self.to_send.end - self.to_send.next;
        self.to_send.release(count);
        count
    }

    /// A descriptor that is readable when the device interrupts; `None` when
    /// it cannot.
    pub fn interrupts(&self) -> Option<Interrupts> {
        if self.raw.has_interrupts == 0 {
            return None;
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).ok()?;
        // SAFETY: the device runs, and the descriptor is an epoll's.
        let error = unsafe { tg_watch(&self.raw, epoll.as_raw_fd()) };
        (error == 0).then_some(Interrupts(epoll))
    }

    /// Stops the device and starts it again. What fails leaves it stopped.
    pub fn restart(&mut self) -> io::Result<()> {
        // SAFETY: the device is configured.
        result(unsafe { tg_restart(&mut self.raw) })
    }

    /// Turns interrupts on or off.
    pub fn set_interrupts(&self, on: bool) -> io::Result<()> {
        // SAFETY: the device runs.
        result(unsafe { tg_set_interrupts(&self.raw, on.into()) })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.received.release(BURST);
        self.to_send.release(BURST);
        let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the device runs, nothing of it is used any more, and it is
        // never touched again.
        unsafe { tg_close(&mut self.raw) }
    }
}

/// Interrupts of a device.
#[derive(Debug)]
pub struct Interrupts(OwnedFd);

impl Interrupts {
    /// Takes note of those that have come: the descriptor is not readable.
    pub fn take(&self) {
        // SAFETY: the descriptor is an epoll's that only DPDK adds to.
        unsafe { tg_take_interrupts(self.0.as_raw_fd()) }
    }
}

impl AsFd for Interrupts {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
