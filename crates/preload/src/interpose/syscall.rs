//! System calls by number. Some programs make calls on their sockets so, because no
//! C library had them or to be no point of cancellation: libuv closes descriptors
//! and sends datagrams so. What they do not know about a descriptor that was closed
//! would be believed of the file that gets its number next.

use libc::{c_int, c_long, c_uint};

use super::{fd, io, socket};
use crate::{real, table};

// All arguments but the number are optional in C, and stand where they would stand
// if they were not: what nobody passed is nothing that the call looks at.
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
    // SAFETY: the program's own arguments, which these functions take in this order.
    unsafe {
        match number {
            libc::SYS_close if table::is_ours(first) => fd::close(first).into(),
            libc::SYS_close_range => fd::close_range(a as c_uint, b as c_uint, c as c_int).into(),
            libc::SYS_accept4 if table::is_ours(first) => {
                socket::accept4(first, b as _, c as _, d as c_int).into()
            }
            libc::SYS_sendmmsg => io::sendmmsg(first, b as _, c as c_uint, d as c_int).into(),
            libc::SYS_recvmmsg if table::is_ours(first) => {
                io::recvmmsg(first, b as _, c as c_uint, d as c_int, e as _).into()
            }
            _ => real::syscall(number, a, b, c, d, e, f),
        }
    }
}
