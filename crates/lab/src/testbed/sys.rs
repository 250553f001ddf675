//! System calls that no safe crate wraps: an unknown call, a mount namespace for one thread, an ARP socket, an `io_uring`, the send queue of a TCP socket.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use io_uring::{IoUring, opcode, squeue, types};

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

/// Makes a system call with a number that no kernel knows. Returns the error of the call.
pub(crate) fn call_unknown() -> io::Error {
    const UNKNOWN_NUMBER: libc::c_long = 100_000;
    // SAFETY: the kernel refuses the number before it looks at any argument.
    unsafe { libc::syscall(UNKNOWN_NUMBER) };
    io::Error::last_os_error()
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
