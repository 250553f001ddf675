//! Bindings to the C shim in `rdma/`. All `unsafe` code of the `rdma` module is here.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use tidegate_memory::{Arena, ArenaMemory};

/// Most messages of one call, as in the shim.
pub const BURST: usize = 64;

/// Address of a port.
pub type Gid = [u8; 16];

/// `struct rdma_settings`.
#[repr(C)]
struct RawSettings {
    device: *const c_char,
    group: Gid,
    memory: *mut u8,
    memory_bytes: usize,
    buffer_bytes: u32,
    receive_depth: u32,
    send_depth: u32,
    port: u8,
}

/// `struct rdma_info`: properties of an endpoint.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct EndpointInfo {
    /// Address of the port.
    pub gid: Gid,
    /// Number of the queue pair, of 24 bits.
    pub queue_pair: u32,
    /// Longest message in bytes.
    pub message_bytes: u32,
    /// Index of the network interface beneath.
    pub interface: u32,
    pub(super) event_fd: c_int,
}

/// `struct rdma_received`: a message that has arrived.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Received {
    /// Offset of its buffer in the memory.
    pub offset: u64,
    /// Length, which may exceed that of the buffer.
    pub bytes: u32,
    /// Queue pair of the sender.
    pub queue_pair: u32,
    /// Port of the sender.
    pub gid: Gid,
    /// 0, or the reason why nothing was received.
    pub status: u32,
}

/// Way to a port, as long as the endpoint exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path(NonNull<c_void>);

// SAFETY: an address handle of libibverbs, which any thread may use.
unsafe impl Send for Path {}

/// `struct rdma_message`: a message to send.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Message {
    offset: u64,
    path: *mut c_void,
    bytes: u32,
    queue_pair: u32,
}

impl Message {
    /// Offset of the message in the memory.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of the message.
    pub fn bytes(&self) -> u64 {
        self.bytes.into()
    }

    /// A message of `bytes` at `offset` to a queue pair, or to the group.
    pub fn new(offset: u64, bytes: usize, to: Option<(Path, u32)>) -> Self {
        let path = to.map_or(ptr::null_mut(), |(path, _)| path.0.as_ptr());
        let queue_pair = to.map_or(0, |(_, queue_pair)| queue_pair);
        Self { offset, path, bytes: bytes as u32, queue_pair }
    }
}

/// Messages that were sent, or could not be.
#[derive(Debug)]
pub struct Reaped {
    offsets: [u64; BURST],
    failed: u64,
    count: usize,
}

impl Reaped {
    /// Offsets of the messages, each with true if it was sent.
    pub fn iter(&self) -> impl Iterator<Item = (u64, bool)> + '_ {
        let offsets = self.offsets.iter().take(self.count).enumerate();
        offsets.map(|(at, &offset)| (offset, self.failed >> at & 1 == 0))
    }
}

#[repr(C)]
struct RawEndpoint {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn rdma_open(
        settings: *const RawSettings,
        info: *mut EndpointInfo,
        step: *mut *const c_char,
    ) -> *mut RawEndpoint;
    fn rdma_post_buffers(endpoint: *mut RawEndpoint, offsets: *const u64, count: c_int) -> c_int;
    fn rdma_receive(endpoint: *mut RawEndpoint, received: *mut Received, max: c_int) -> c_int;
    fn rdma_send(endpoint: *mut RawEndpoint, messages: *const Message, count: c_int) -> c_int;
    fn rdma_reap(
        endpoint: *mut RawEndpoint,
        offsets: *mut u64,
        failed: *mut u64,
        max: c_int,
    ) -> c_int;
    fn rdma_arm(endpoint: *mut RawEndpoint) -> c_int;
    fn rdma_reach(endpoint: *mut RawEndpoint, gid: *const u8) -> *mut c_void;
    fn rdma_stop(endpoint: *mut RawEndpoint);
    fn rdma_close(endpoint: *mut RawEndpoint);
}

/// The endpoint itself, which the device's thread and the thread that finds paths share.
struct Shared {
    raw: NonNull<RawEndpoint>,
    /// Registered with the device.
    _memory: Arc<ArenaMemory>,
}

// SAFETY: libibverbs may be called by several threads at once, and only `PathFinder` touches the
// list of paths.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the last user of the endpoint closes it.
        unsafe { rdma_close(self.raw.as_ptr()) }
    }
}

/// Queue pair over the memory of an arena. Dropping it ends all traffic at once.
pub struct Endpoint {
    shared: Arc<Shared>,
    info: EndpointInfo,
}

/// Finds paths, on a thread that may wait. There is one of each endpoint.
pub struct PathFinder(Arc<Shared>);

/// Settings of [`Endpoint::open`].
pub struct Settings<'a> {
    pub device: &'a str,
    pub port: u8,
    pub group: Gid,
    /// Bytes of a receive buffer, from its offset on.
    pub buffer_bytes: u32,
    pub receive_depth: u32,
    pub send_depth: u32,
}

impl Endpoint {
    /// Opens a device over the memory of an arena.
    ///
    /// # Errors
    /// The step that failed, and the kernel's error.
    pub fn open(
        settings: &Settings<'_>,
        arena: &Arena,
    ) -> Result<(Self, PathFinder), (String, io::Error)> {
        let fail = |step: &str, error| (step.to_owned(), error);
        let device = CString::new(settings.device);
        let device = device.map_err(|error| fail("read the name", error.into()))?;
        let (base, memory_bytes) = arena.region();
        let raw_settings = RawSettings {
            device: device.as_ptr(),
            group: settings.group,
            memory: base.as_ptr(),
            memory_bytes,
            buffer_bytes: settings.buffer_bytes,
            receive_depth: settings.receive_depth,
            send_depth: settings.send_depth,
            port: settings.port,
        };
        let (mut info, mut step) = (EndpointInfo::default(), ptr::null());
        // SAFETY: all three are live; the memory is that of the arena, which `Shared` keeps mapped
        // until the endpoint is closed.
        let raw = unsafe { rdma_open(&raw_settings, &mut info, &mut step) };
        let Some(raw) = NonNull::new(raw) else {
            let error = io::Error::last_os_error();
            // SAFETY: a failure has set the step to a constant string.
            let step = unsafe { CStr::from_ptr(step) };
            return Err(fail(&step.to_string_lossy(), error));
        };
        let shared = Arc::new(Shared { raw, _memory: arena.memory() });
        Ok((Self { shared: Arc::clone(&shared), info }, PathFinder(shared)))
    }

    pub fn info(&self) -> &EndpointInfo {
        &self.info
    }

    /// Readable after [`Endpoint::arm`] when a message arrives.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's descriptor is open as long as the endpoint.
        unsafe { BorrowedFd::borrow_raw(self.info.event_fd) }
    }

    fn raw(&mut self) -> *mut RawEndpoint {
        self.shared.raw.as_ptr()
    }

    /// Hands over lent buffers, at most [`BURST`]. Returns how many were taken.
    pub fn post_buffers(&mut self, offsets: &[u64]) -> usize {
        let count = offsets.len().min(BURST) as c_int;
        // SAFETY: reads `count` offsets of lent frames, to which only the device writes now: their
        // headroom is longer than the header, and they are as long as the settings say.
        let taken = unsafe { rdma_post_buffers(self.raw(), offsets.as_ptr(), count) };
        usize::try_from(taken).unwrap_or(0)
    }

    /// Takes messages that have arrived, as many as there is space for, at most [`BURST`].
    ///
    /// # Errors
    /// The device is gone.
    pub fn receive(&mut self, received: &mut [Received]) -> io::Result<usize> {
        let max = received.len().min(BURST) as c_int;
        // SAFETY: writes at most `max` messages.
        count(unsafe { rdma_receive(self.raw(), received.as_mut_ptr(), max) })
    }

    /// Sends messages of lent frames, at most [`BURST`]. Returns how many were taken.
    pub fn send(&mut self, messages: &[Message]) -> usize {
        let count = messages.len().min(BURST) as c_int;
        // SAFETY: reads `count` messages, whose paths belong to this endpoint.
        let taken = unsafe { rdma_send(self.raw(), messages.as_ptr(), count) };
        usize::try_from(taken).unwrap_or(0)
    }

    /// Takes messages that the device has sent.
    ///
    /// # Errors
    /// The device is gone.
    pub fn reap(&mut self) -> io::Result<Reaped> {
        let mut reaped = Reaped { offsets: [0; BURST], failed: 0, count: 0 };
        let (offsets, failed) = (reaped.offsets.as_mut_ptr(), &mut reaped.failed);
        // SAFETY: writes at most `BURST` offsets, and the bits of the failed.
        reaped.count = count(unsafe { rdma_reap(self.raw(), offsets, failed, BURST as c_int) })?;
        Ok(reaped)
    }

    /// Has the next message make the descriptor readable.
    ///
    /// # Errors
    /// The device is gone.
    pub fn arm(&mut self) -> io::Result<()> {
        // SAFETY: the endpoint is open.
        match unsafe { rdma_arm(self.raw()) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // SAFETY: the endpoint is open, and its traffic is only this thread's.
        unsafe { rdma_stop(self.raw()) }
    }
}

impl PathFinder {
    /// Path to a port; `None` if there is none, or if there are too many. May wait for seconds.
    pub fn find(&mut self, gid: &Gid) -> Option<Path> {
        // SAFETY: reads the 16 bytes of `gid`; only this thread finds paths.
        NonNull::new(unsafe { rdma_reach(self.0.raw.as_ptr(), gid.as_ptr()) }).map(Path)
    }
}

fn count(result: c_int) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::other("the RDMA device is gone"))
}
