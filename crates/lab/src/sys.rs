//! System calls that no safe crate wraps: batches of datagrams, a mount namespace for one thread,
//! an ARP socket, an `io_uring`, the send queue of a TCP socket.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use io_uring::{IoUring, opcode, squeue, types};

/// Reusable buffers for a batch of datagrams on a connected socket.
pub(crate) struct DatagramBatch {
    bytes: Vec<u8>,
    slot_bytes: usize,
    lengths: Vec<usize>,
    vectors: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

impl DatagramBatch {
    /// Allocates buffers for `count` datagrams of up to `slot_bytes` bytes.
    pub(crate) fn new(count: usize, slot_bytes: usize) -> Self {
        Self {
            bytes: vec![0; count * slot_bytes],
            slot_bytes,
            lengths: vec![0; count],
            vectors: Vec::with_capacity(count),
            headers: Vec::with_capacity(count),
        }
    }

    /// Number of datagrams in the batch.
    pub(crate) fn capacity(&self) -> usize {
        self.lengths.len()
    }

    /// Whole buffer of datagram `index`.
    pub(crate) fn slot_mut(&mut self, index: usize) -> &mut [u8] {
        &mut self.bytes[index * self.slot_bytes..][..self.slot_bytes]
    }

    /// Sets the number of bytes of datagram `index` to send.
    pub(crate) fn set_len(&mut self, index: usize, len: usize) {
        self.lengths[index] = len.min(self.slot_bytes);
    }

    /// Bytes of datagram `index`.
    pub(crate) fn get(&self, index: usize) -> &[u8] {
        &self.bytes[index * self.slot_bytes..][..self.lengths[index]]
    }

    /// Sends the datagrams of `range` without blocking; returns the number sent.
    pub(crate) fn send(&mut self, fd: BorrowedFd<'_>, range: Range<usize>) -> io::Result<usize> {
        self.prepare_headers(range);
        let count = self.headers.len() as libc::c_uint;
        // SAFETY: `prepare_headers` made every header point to one of our vectors and every vector
        // into `bytes`, within bounds. None of them moves or is used otherwise during the call,
        // which only reads the bytes.
        let sent = unsafe {
            libc::sendmmsg(fd.as_raw_fd(), self.headers.as_mut_ptr(), count, libc::MSG_DONTWAIT)
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Receives as many datagrams as fit into the batch, without blocking; returns the number
    /// received.
    pub(crate) fn receive(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.lengths.fill(self.slot_bytes);
        self.prepare_headers(0..self.capacity());
        let count = self.headers.len() as libc::c_uint;
        // SAFETY: as in `send`; the kernel writes through each vector at most its length, and
        // nothing else accesses the bytes during the call.
        let received = unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                self.headers.as_mut_ptr(),
                count,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        for (length, header) in self.lengths.iter_mut().zip(&self.headers).take(received) {
            *length = (header.msg_len as usize).min(self.slot_bytes);
        }
        Ok(received)
    }

    /// Builds one header and one vector for each datagram of `range`.
    fn prepare_headers(&mut self, range: Range<usize>) {
        self.vectors.clear();
        self.headers.clear();
        let slots = self.bytes.chunks_exact_mut(self.slot_bytes).zip(&self.lengths);
        for (slot, length) in slots.skip(range.start).take(range.len()) {
            self.vectors.push(libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: *length });
        }
        for vector in &mut self.vectors {
            // SAFETY: an all-zero header is valid: no name, no vectors, no control data.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
            self.headers.push(header);
        }
    }
}

/// Gives the calling thread its own mounts, with a `/sys` that shows the network namespace of the
/// thread.
pub(crate) fn unshare_sysfs() -> io::Result<()> {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    use rustix::thread::{UnshareFlags, unshare_unsafe};

    // SAFETY: only mounts and the working directory become private to the thread; file descriptors
    // stay shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS)? };
    // Mounts of this thread must not propagate to other namespaces.
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)?;
    // Mounted over the old one, which must not be unmounted in a user namespace.
    mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None)?;
    Ok(())
}

/// Bytes that a TCP socket has taken for sending and that its peer has not acknowledged.
pub(crate) fn unacknowledged_bytes(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ, which has the number of TIOCOUTQ, writes one int, which outlives the call.
    match unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } {
        0 => Ok(usize::try_from(bytes).unwrap_or(0)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes a TCP socket send keepalive probes every second, by calls that a preload library sees.
pub(crate) fn keep_alive_often(fd: BorrowedFd<'_>) -> io::Result<()> {
    let options = [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    ];
    for (level, option) in options {
        let value: libc::c_int = 1;
        let len = size_of_val(&value) as libc::socklen_t;
        // SAFETY: the kernel reads one int, which outlives the call.
        let set = unsafe {
            libc::setsockopt(fd.as_raw_fd(), level, option, (&raw const value).cast(), len)
        };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Lets the calling thread run only while its core has nothing else to do (`SCHED_IDLE`).
pub(crate) fn run_when_idle() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel only reads the parameters, which outlive the call.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives a thread priority over every ordinary thread of its core and over threads of a lower
/// real-time priority (`SCHED_FIFO`, 1 to 99).
pub(crate) fn run_at_real_time_priority(pid: i32, priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel only reads the parameters, which outlive the call.
    match unsafe { libc::sched_setscheduler(pid, libc::SCHED_FIFO, &parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Opens a socket that receives the ARP packets of an interface as whole frames and sends frames
/// there.
pub(crate) fn arp_socket(interface_index: u32) -> io::Result<OwnedFd> {
    let protocol = (libc::ETH_P_ARP as u16).to_be();
    // SAFETY: the call does not access our memory.
    let fd = unsafe {
        libc::socket(
            libc::AF_PACKET,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            protocol.into(),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: an all-zero address of this type is valid.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol;
    address.sll_ifindex = interface_index as i32;
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address outlives the call, and the given size is its true size.
    match unsafe { libc::bind(fd, (&raw const address).cast(), len) } {
        0 => Ok(socket),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reads the processor's time stamp counter.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn cycles() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and it accesses no memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Process that writes to a descriptor continuously. It is killed on drop, and when the thread
/// that started it exits.
#[derive(Debug)]
pub(crate) struct WriterProcess {
    pid: libc::pid_t,
}

impl WriterProcess {
    /// Starts a process that writes `bytes` repeatedly, each time in one call.
    pub(crate) fn start(target: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<Self> {
        let fd = target.as_raw_fd();
        // SAFETY: the child calls only `prctl`, `write` and `_exit`, which are safe after a fork of
        // a multithreaded process; it reads `bytes` in its own copy of the memory.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            // SAFETY: this is the child process, which does nothing else.
            0 => unsafe { write_without_end(fd, bytes) },
            pid => Ok(Self { pid }),
        }
    }
}

/// Writes `bytes` to `fd` until an error occurs, then exits.
///
/// # Safety
/// Must run in a newly forked child process that does nothing else.
unsafe fn write_without_end(fd: libc::c_int, bytes: &[u8]) -> ! {
    // SAFETY: none of the calls keeps its arguments; `write` reads within `bytes`.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        while libc::write(fd, bytes.as_ptr().cast(), bytes.len()) >= 0
            // ECONNREFUSED: the peer of the socket did not exist yet.
            || *libc::__errno_location() == libc::ECONNREFUSED
            || *libc::__errno_location() == libc::EINTR
            || *libc::__errno_location() == libc::ENOBUFS
        {}
        libc::_exit(0)
    }
}

impl Drop for WriterProcess {
    fn drop(&mut self) {
        // SAFETY: the child is ours and not yet waited for, so its process identifier cannot be
        // reused; the status may be ignored.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// Stream with batched sends and receives through an `io_uring`.
pub(crate) struct UringStream {
    ring: IoUring,
    stream: OwnedFd,
}

impl UringStream {
    /// Wraps `stream`, with at most `entries` calls at once.
    pub(crate) fn new(stream: OwnedFd, entries: u32) -> io::Result<Self> {
        Ok(Self { ring: IoUring::new(entries)?, stream })
    }

    /// Sends `pieces` in linked calls of `len` bytes each, then receives until `received` is full.
    ///
    /// An empty `received` skips the receive. All calls are submitted to the kernel at once.
    ///
    /// # Errors
    /// When the stream has ended, or there are more pieces than `entries`.
    pub(crate) fn exchange(
        &mut self,
        pieces: &[u8],
        len: usize,
        received: &mut [u8],
    ) -> io::Result<()> {
        let fd = types::Fd(self.stream.as_raw_fd());
        let flags = libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
        let receives = !received.is_empty();
        let mut entries: Vec<_> = pieces
            .chunks(len)
            .map(|piece| {
                let send = opcode::Send::new(fd, piece.as_ptr(), piece.len() as u32);
                send.flags(flags).build().flags(squeue::Flags::IO_LINK)
            })
            .collect();
        if receives {
            let receive = opcode::Recv::new(fd, received.as_mut_ptr(), received.len() as u32);
            entries.push(receive.flags(flags).build());
        } else if let Some(last) = entries.pop() {
            entries.push(last.clear_flags());
        }
        // SAFETY: the buffers of the entries are borrowed until this function returns, which is
        // after all entries have completed.
        unsafe { self.ring.submission().push_multiple(&entries) }.map_err(io::Error::other)?;
        let mut result = Ok(());
        let mut in_flight = entries.len();
        while in_flight > 0 {
            match self.ring.submit_and_wait(in_flight) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    // The kernel holds the buffers and will not report their completion.
                    panic!("io_uring failed: {error}");
                }
                _ => {}
            }
            for done in self.ring.completion() {
                in_flight -= 1;
                result = match done.result() {
                    0 => result.and(Err(io::ErrorKind::UnexpectedEof.into())),
                    error @ ..0 => result.and(Err(io::Error::from_raw_os_error(-error))),
                    _ => result,
                };
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, UdpSocket};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn datagrams_are_sent_and_received_whole() {
        for address in ["127.0.0.1", "::1"] {
            let address: IpAddr = address.parse().unwrap();
            let a = UdpSocket::bind((address, 0)).unwrap();
            let b = UdpSocket::bind((address, 0)).unwrap();
            a.connect(b.local_addr().unwrap()).unwrap();
            b.connect(a.local_addr().unwrap()).unwrap();
            let mut tx = DatagramBatch::new(4, 16);
            for index in 0..4 {
                tx.slot_mut(index).fill(index as u8);
                tx.set_len(index, index * 5);
            }
            assert_eq!(tx.send(a.as_fd(), 1..4).unwrap(), 3);
            let mut rx = DatagramBatch::new(8, 12);
            assert_eq!(rx.receive(b.as_fd()).unwrap(), 3);
            assert_eq!(rx.get(0), [1; 5]);
            assert_eq!(rx.get(1), [2; 10]);
            assert_eq!(rx.get(2), [3; 12], "truncated to the buffer");
            let error = rx.receive(b.as_fd()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        }
    }
}
