//! System calls that no safe crate wraps.

use std::io;
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Number of the calling thread's network namespace, unique until the next boot
/// (`SO_NETNS_COOKIE`, Linux 5.14).
pub(crate) fn namespace_cookie() -> io::Result<u64> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    let mut cookie = 0_u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to a live integer.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    if rc == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

/// Makes programs that this process starts inherit the standard streams only. Errors are ignored:
/// kernels before 5.11 cannot.
pub(super) fn pass_on_standard_streams_only() {
    let first = libc::STDERR_FILENO + 1;
    // SAFETY: the call sets a flag of descriptors and closes none.
    unsafe {
        libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
    }
}

/// Blocks every signal that can be blocked, for the calling thread.
pub(crate) fn block_signals() {
    // SAFETY: `sigfillset` initialises the set, which lives during both calls; a null pointer means
    // that the former mask is not wanted.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
    }
}

/// Gives the calling thread the scheduling policy of ordinary programs. Errors are ignored.
pub(super) fn use_ordinary_scheduling() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel only reads the parameters, which outlive the call.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const parameters) };
}
