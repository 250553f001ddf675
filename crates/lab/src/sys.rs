//! The system calls that no safe crate wraps: many datagrams at once, a mount
//! namespace for one thread, a socket for ARP alone, an `io_uring`.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use io_uring::{IoUring, opcode, squeue, types};

/// Room for a number of datagrams on a connected socket, used again and again.
pub(crate) struct Datagrams {
    bytes: Vec<u8>,
    stride: usize,
    lengths: Vec<usize>,
    vectors: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

impl Datagrams {
    /// Room for `count` datagrams of up to `stride` bytes.
    pub(crate) fn new(count: usize, stride: usize) -> Self {
        Self {
            bytes: vec![0; count * stride],
            stride,
            lengths: vec![0; count],
            vectors: Vec::with_capacity(count),
            headers: Vec::with_capacity(count),
        }
    }

    /// How many datagrams there is room for.
    pub(crate) fn capacity(&self) -> usize {
        self.lengths.len()
    }

    /// All the room of datagram `index`.
    pub(crate) fn room(&mut self, index: usize) -> &mut [u8] {
        &mut self.bytes[index * self.stride..][..self.stride]
    }

    /// Sets how many bytes of datagram `index` are to be sent.
    pub(crate) fn set_len(&mut self, index: usize, len: usize) {
        self.lengths[index] = len.min(self.stride);
    }

    /// The bytes of datagram `index`.
    pub(crate) fn get(&self, index: usize) -> &[u8] {
        &self.bytes[index * self.stride..][..self.lengths[index]]
    }

    /// Sends the datagrams of `range` without blocking; returns how many went.
    pub(crate) fn send(&mut self, fd: BorrowedFd<'_>, range: Range<usize>) -> io::Result<usize> {
        self.point(range);
        let count = self.headers.len() as libc::c_uint;
        // SAFETY: `point` made every header point to one of our vectors and
        // every vector into `bytes`, within bounds. None of them moves or is
        // used otherwise during the call, which only reads the bytes.
        let sent = unsafe {
            libc::sendmmsg(fd.as_raw_fd(), self.headers.as_mut_ptr(), count, libc::MSG_DONTWAIT)
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Receives up to as many datagrams as there is room for, without
    /// blocking; returns how many came.
    pub(crate) fn receive(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.lengths.fill(self.stride);
        self.point(0..self.capacity());
        let count = self.headers.len() as libc::c_uint;
        // SAFETY: as in `send`; the kernel writes through each vector no more
        // than its length, and nobody else looks at the bytes meanwhile.
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
            *length = (header.msg_len as usize).min(self.stride);
        }
        Ok(received)
    }

    /// Makes one header and one vector for each datagram of `range`.
    fn point(&mut self, range: Range<usize>) {
        self.vectors.clear();
        self.headers.clear();
        let slots = self.bytes.chunks_exact_mut(self.stride).zip(&self.lengths);
        for (slot, length) in slots.skip(range.start).take(range.len()) {
            self.vectors.push(libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: *length });
        }
        for vector in &mut self.vectors {
            // SAFETY: all zero is a valid header: no name, no vectors, no
            // control data.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
            self.headers.push(header);
        }
    }
}

/// Gives the calling thread mounts of its own, with a `/sys` that shows the
/// network namespace the thread is in.
pub(crate) fn own_sysfs() -> io::Result<()> {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    use rustix::thread::{UnshareFlags, unshare_unsafe};

    // SAFETY: mounts and the working directory become the thread's own; file
    // descriptors stay shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS)? };
    // Nothing that we mount may be seen outside.
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)?;
    // Over the old one, which in a user namespace may not be taken off.
    mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None)?;
    Ok(())
}

/// Lets a thread run before every ordinary one of its core, and before those of
/// a lower priority (`SCHED_FIFO`, 1 to 99).
pub(crate) fn run_at_real_time_priority(pid: i32, priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel only reads the parameters, which outlive the call.
    match unsafe { libc::sched_setscheduler(pid, libc::SCHED_FIFO, &parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A socket that gets the ARP packets of an interface, whole frames, and
/// sends frames there.
pub(crate) fn arp_socket(interface_index: u32) -> io::Result<OwnedFd> {
    let protocol = (libc::ETH_P_ARP as u16).to_be();
    // SAFETY: the call reads no memory of ours.
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
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all zero is a valid address of this type.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol;
    address.sll_ifindex = interface_index as i32;
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address outlives the call, and its true size is given.
    match unsafe { libc::bind(fd, (&raw const address).cast(), len) } {
        0 => Ok(socket),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The processor's time stamp counter.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn cycles() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and it touches no
    // memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// A process that writes to a descriptor without end. It is ended on drop, and
/// with the thread that started it.
#[derive(Debug)]
pub(crate) struct Writer {
    pid: libc::pid_t,
}

impl Writer {
    /// Starts a process that writes `bytes` again and again, each time whole.
    pub(crate) fn start(to: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<Self> {
        let fd = to.as_raw_fd();
        // SAFETY: the child calls nothing but `prctl`, `write` and `_exit`,
        // which are safe after a fork of a process with threads; it reads
        // `bytes`, of which it has a copy.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            // SAFETY: this is the child, which does nothing else.
            0 => unsafe { write_without_end(fd, bytes) },
            pid => Ok(Self { pid }),
        }
    }
}

/// # Safety
/// In a child process just made, of which nobody expects anything else.
unsafe fn write_without_end(fd: libc::c_int, bytes: &[u8]) -> ! {
    // SAFETY: none of the calls keeps what it is given; `write` reads within
    // `bytes`.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        while libc::write(fd, bytes.as_ptr().cast(), bytes.len()) >= 0
            // A socket tells so that its peer was not there yet.
            || *libc::__errno_location() == libc::ECONNREFUSED
            || *libc::__errno_location() == libc::EINTR
            || *libc::__errno_location() == libc::ENOBUFS
        {}
        libc::_exit(0)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // SAFETY: the child is ours and not waited for yet, so its number is
        // nobody else's; the status may be ignored.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// Calls on a stream by an `io_uring`, several of them at once.
pub(crate) struct Uring {
    ring: IoUring,
    stream: OwnedFd,
}

impl Uring {
    /// Calls on this stream, so many at once at most.
    pub(crate) fn new(stream: OwnedFd, entries: u32) -> io::Result<Self> {
        Ok(Self { ring: IoUring::new(entries)?, stream })
    }

    /// Sends pieces, each by a call of its own, one behind the other, and then
    /// receives until `into` is full, if that is wanted: all of it handed to the
    /// kernel at once.
    ///
    /// # Errors
    /// When the stream has ended, or there are more pieces than calls.
    pub(crate) fn exchange(
        &mut self,
        pieces: &[u8],
        len: usize,
        into: &mut [u8],
    ) -> io::Result<()> {
        let fd = types::Fd(self.stream.as_raw_fd());
        let flags = libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
        let wants = !into.is_empty();
        let mut entries: Vec<_> = pieces
            .chunks(len)
            .map(|piece| {
                let send = opcode::Send::new(fd, piece.as_ptr(), piece.len() as u32);
                send.flags(flags).build().flags(squeue::Flags::IO_LINK)
            })
            .collect();
        if wants {
            let receive = opcode::Recv::new(fd, into.as_mut_ptr(), into.len() as u32);
            entries.push(receive.flags(flags).build());
        } else if let Some(last) = entries.pop() {
            entries.push(last.clear_flags());
        }
        // SAFETY: what the entries point to is borrowed until this returns, which it
        // does when all of them have come back.
        unsafe { self.ring.submission().push_multiple(&entries) }.map_err(io::Error::other)?;
        let mut result = Ok(());
        let mut under_way = entries.len();
        while under_way > 0 {
            match self.ring.submit_and_wait(under_way) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    // The kernel has the buffers, and will not say when it is done.
                    panic!("io_uring fails: {error}");
                }
                _ => {}
            }
            for done in self.ring.completion() {
                under_way -= 1;
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
    fn datagrams_go_out_and_come_in_whole() {
        for address in ["127.0.0.1", "::1"] {
            let address: IpAddr = address.parse().unwrap();
            let a = UdpSocket::bind((address, 0)).unwrap();
            let b = UdpSocket::bind((address, 0)).unwrap();
            a.connect(b.local_addr().unwrap()).unwrap();
            b.connect(a.local_addr().unwrap()).unwrap();
            let mut out = Datagrams::new(4, 16);
            for index in 0..4 {
                out.room(index).fill(index as u8);
                out.set_len(index, index * 5);
            }
            assert_eq!(out.send(a.as_fd(), 1..4).unwrap(), 3);
            let mut back = Datagrams::new(8, 12);
            assert_eq!(back.receive(b.as_fd()).unwrap(), 3);
            assert_eq!(back.get(0), [1; 5]);
            assert_eq!(back.get(1), [2; 10]);
            assert_eq!(back.get(2), [3; 12], "cut to the room there is");
            let error = back.receive(b.as_fd()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        }
    }
}
