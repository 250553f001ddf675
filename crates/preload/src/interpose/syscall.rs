//! System calls by number.
//!
//! Some applications make socket calls by number, because no C library had a function for them
//! or to avoid a cancellation point: libuv closes descriptors and sends datagrams this way.
//! Without this function, a table entry would outlive its closed descriptor, and would be
//! used for the next file with the same number.

use libc::{c_int, c_long, c_uint};

use super::{fd, receive, send, socket};
use crate::errno;
use crate::{fd_table, lifecycle, real};

/// True for the flags of a `clone` whose child has a copy of the memory, as of `fork`.
fn is_fork(flags: c_long) -> bool {
    flags & c_long::from(libc::CLONE_VM) == 0
}

// All arguments but the number are optional in C, and are passed in the same registers in any
// case: an argument that was not passed is one that the system call does not use.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    let first = a as c_int;
    // SAFETY: the application's own arguments, which these functions take in this order.
    unsafe {
        match number {
            libc::SYS_close if fd_table::is_tidegate(first) || fd::is_hidden(first) => {
                fd::close(first).into()
            }
            #[cfg(target_arch = "x86_64")]
            libc::SYS_dup2 => fd::dup2(first, b as c_int).into(),
            libc::SYS_dup3 => fd::dup3(first, b as c_int, c as c_int).into(),
            libc::SYS_close_range => fd::close_range(a as c_uint, b as c_uint, c as c_int).into(),
            libc::SYS_accept4 if fd_table::is_tidegate(first) => {
                socket::accept4(first, b as _, c as _, d as c_int).into()
            }
            libc::SYS_sendmmsg => send::sendmmsg(first, b as _, c as c_uint, d as c_int).into(),
            libc::SYS_recvmmsg if fd_table::is_tidegate(first) => {
                receive::recvmmsg(first, b as _, c as c_uint, d as c_int, e as _).into()
            }
            libc::SYS_seccomp => {
                lifecycle::before_system_call_filter();
                real::syscall(number, a, b, c, d, e, f)
            }
            libc::SYS_clone if is_fork(a) => {
                let forked = lifecycle::fork_by_system_call(|| {
                    match real::syscall(number, a, b, c, d, e, f) {
                        -1 => Err(std::io::Error::last_os_error()),
                        process => Ok(process),
                    }
                });
                errno::return_count(forked.map(|process| process as usize)) as c_long
            }
            _ => real::syscall(number, a, b, c, d, e, f),
        }
    }
}
