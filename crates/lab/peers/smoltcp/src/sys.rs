//! Packet socket on an interface: frames are received and sent in batches, as Tidegate's own device
//! does, and no call sleeps.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

/// Maximum number of frames in one system call.
pub const BATCH_FRAMES: usize = 64;
/// Bytes of a buffer: a frame of 1,500 bytes of payload, and some.
pub const BUFFER_BYTES: usize = 2048;
/// Bytes that the socket holds.
const SOCKET_BYTES: libc::c_int = 4 << 20;
/// Option that the `libc` crate does not have yet: frames that leave do not come back.
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;

/// Frames of one system call.
struct Batch {
    buffers: Vec<[u8; BUFFER_BYTES]>,
    // The headers point to these, which never move.
    vectors: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

impl Batch {
    fn new() -> Self {
        let mut buffers = vec![[0; BUFFER_BYTES]; BATCH_FRAMES];
        let vector = |buffer: &mut [u8; BUFFER_BYTES]| libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: BUFFER_BYTES,
        };
        let mut vectors: Vec<_> = buffers.iter_mut().map(vector).collect();
        let header = |vector: &mut libc::iovec| {
            // SAFETY: all zero is a valid `mmsghdr`: no name, no vectors, no control data.
            let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
            header
        };
        let headers = vectors.iter_mut().map(header).collect();
        Self { buffers, vectors, headers }
    }
}

/// Packet socket with a batch for each direction.
pub struct PacketSocket {
    socket: OwnedFd,
    /// Hardware address of the interface.
    pub mac: [u8; 6],
    received: Batch,
    received_count: usize,
    next_received: usize,
    staged: Batch,
    staged_count: usize,
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn set_option(
    socket: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the pointer and the length are of a live integer, which the kernel only reads.
    check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            ptr::from_ref(&value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    })?;
    Ok(())
}

/// Hardware address of the interface `index`, as the kernel tells it for a bound packet socket.
fn bind(socket: &OwnedFd, index: u32) -> io::Result<[u8; 6]> {
    // SAFETY: all zero is a valid `sockaddr_ll`.
    let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
    address.sll_family = libc::AF_PACKET as libc::c_ushort;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = index as i32;
    let mut len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address is live and of the length given.
    check(unsafe { libc::bind(socket.as_raw_fd(), ptr::from_ref(&address).cast(), len) })?;
    // SAFETY: the kernel writes at most `len` bytes into the live value.
    check(unsafe {
        libc::getsockname(socket.as_raw_fd(), ptr::from_mut(&mut address).cast(), &mut len)
    })?;
    let [a, b, c, d, e, f, ..] = address.sll_addr;
    Ok([a, b, c, d, e, f])
}

impl PacketSocket {
    /// Opens a socket that receives every frame that arrives at `interface`.
    pub fn open(interface: &str) -> io::Result<Self> {
        let name = std::ffi::CString::new(interface)?;
        // SAFETY: the name ends with a zero byte.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        if index == 0 {
            return Err(io::Error::last_os_error());
        }
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: socket(2) takes no pointers.
        let socket = check(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
        // SAFETY: the descriptor is new and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, SOCKET_BYTES)?;
        set_option(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, SOCKET_BYTES)?;
        set_option(&socket, libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 1)?;
        set_option(&socket, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
        let mac = bind(&socket, index)?;
        Ok(Self {
            socket,
            mac,
            received: Batch::new(),
            received_count: 0,
            next_received: 0,
            staged: Batch::new(),
            staged_count: 0,
        })
    }

    /// Receives what has arrived, up to a batch. The frames of the last call must be taken before.
    pub fn receive(&mut self) -> io::Result<()> {
        (self.received_count, self.next_received) = (0, 0);
        // SAFETY: each header points to a vector of one live buffer of the length that it states.
        let count = unsafe {
            libc::recvmmsg(
                self.socket.as_raw_fd(),
                self.received.headers.as_mut_ptr(),
                BATCH_FRAMES as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                ptr::null_mut(),
            )
        };
        match check(count) {
            Ok(count) => self.received_count = count as usize,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// True until all frames of the last call are taken.
    pub fn has_received(&self) -> bool {
        self.next_received < self.received_count
    }

    /// Takes the next received frame, together with the socket's transmit side.
    pub fn take(&mut self) -> Option<(&[u8], Transmitter<'_>)> {
        if !self.has_received() {
            return None;
        }
        let at = self.next_received;
        self.next_received += 1;
        let len = (self.received.headers[at].msg_len as usize).min(BUFFER_BYTES);
        let transmitter = Transmitter {
            socket: &self.socket,
            staged: &mut self.staged,
            count: &mut self.staged_count,
        };
        Some((&self.received.buffers[at][..len], transmitter))
    }

    /// The socket's transmit side.
    pub fn transmitter(&mut self) -> Transmitter<'_> {
        let Self { socket, staged, staged_count, .. } = self;
        Transmitter { socket, staged, count: staged_count }
    }
}

/// Transmit side of a socket.
pub struct Transmitter<'s> {
    socket: &'s OwnedFd,
    staged: &'s mut Batch,
    count: &'s mut usize,
}

impl Transmitter<'_> {
    /// Adds a frame of `len` bytes, which `write` fills in, to the batch. A full batch is sent.
    pub fn stage<R>(&mut self, len: usize, write: impl FnOnce(&mut [u8]) -> R) -> R {
        let result = write(&mut self.staged.buffers[*self.count][..len]);
        self.staged.vectors[*self.count].iov_len = len;
        *self.count += 1;
        if *self.count == BATCH_FRAMES {
            self.flush();
        }
        result
    }

    /// Sends the batch. A frame that the kernel does not take is lost, as on a wire.
    pub fn flush(&mut self) {
        let mut sent = 0;
        while sent < *self.count {
            let headers = &mut self.staged.headers[sent..*self.count];
            // SAFETY: each header points to a vector of one live buffer, and is of a length within it.
            let result = unsafe {
                libc::sendmmsg(
                    self.socket.as_raw_fd(),
                    headers.as_mut_ptr(),
                    headers.len() as libc::c_uint,
                    libc::MSG_DONTWAIT as _,
                )
            };
            sent += usize::try_from(result).unwrap_or(1).max(1);
        }
        *self.count = 0;
    }
}
