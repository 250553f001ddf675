//! `sendfile`.

use std::io::{self, IoSlice};

use libc::{c_int, off_t, off64_t, size_t, ssize_t};

use super::send::send_stream;
use crate::errno;
use crate::socket::Socket;
use crate::{fd_table, real};

/// Buffer size of `sendfile`, in bytes.
const SENDFILE_BUFFER_BYTES: usize = 64 * 1024;

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendfile64(
    out: c_int,
    source: c_int,
    offset: *mut off64_t,
    count: size_t,
) -> ssize_t {
    let Some(socket) = fd_table::socket(out) else {
        if fd_table::is_tidegate(source) {
            return errno::return_count(Err(io::ErrorKind::InvalidInput.into()));
        }
        // SAFETY: the application's own call.
        return unsafe { real::sendfile64(out, source, offset, count) };
    };
    // SAFETY: the application's own argument.
    let given = unsafe { offset.as_mut() };
    errno::return_count(send_file(out, &socket, source, given, count))
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendfile(
    out: c_int,
    source: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the application's own arguments; both offset types have 64 bits.
    unsafe { sendfile64(out, source, offset.cast(), count) }
}

fn send_file(
    fd: c_int,
    socket: &Socket,
    file: c_int,
    offset: Option<&mut off64_t>,
    count: usize,
) -> io::Result<usize> {
    // Without `offset` the position of the file advances by the bytes sent.
    let start = match &offset {
        Some(offset) => **offset,
        // SAFETY: reads the position of a file.
        None => unsafe { libc::lseek64(file, 0, libc::SEEK_CUR) },
    };
    if start < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut buf = vec![0u8; count.min(SENDFILE_BUFFER_BYTES)];
    let mut total = 0;
    while total < count {
        let wanted = buf.len().min(count - total);
        // SAFETY: the buffer has space for `wanted` bytes.
        let len =
            unsafe { real::pread(file, buf.as_mut_ptr().cast(), wanted, start + total as off64_t) };
        let Ok(len) = usize::try_from(len) else {
            match total {
                0 => return Err(io::Error::last_os_error()),
                _ => break,
            }
        };
        if len == 0 {
            break;
        }
        // More data follows, unless this is the end of the file.
        let more = len == wanted && total + len < count;
        match send_stream(fd, socket, &[IoSlice::new(&buf[..len])], true, more) {
            Ok(sent) => {
                total += sent;
                if sent < len {
                    break;
                }
            }
            Err(_) if total > 0 => break,
            Err(error) => return Err(error),
        }
    }
    let end = start + total as off64_t;
    match offset {
        Some(offset) => *offset = end,
        // SAFETY: sets the position of a file.
        None => drop(unsafe { libc::lseek64(file, end, libc::SEEK_SET) }),
    }
    Ok(total)
}
