//! Messages that a program fills in buffers of the library before it sends them.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use libc::{c_int, c_void};

use crate::socket::os_error;

/// Message of a program, `struct ff_zc_mbuf`. Its fields are the program's: they are only believed
/// as far as the library has such a buffer.
#[repr(C)]
pub struct FfZcMbuf {
    bsd_mbuf: *mut c_void,
    bsd_mbuf_off: *mut c_void,
    off: c_int,
    len: c_int,
}

/// Buffers that are not sent yet, by their addresses.
static UNSENT: Mutex<BTreeMap<usize, Box<[u8]>>> = Mutex::new(BTreeMap::new());
/// Number of these buffers: sending looks for none while there is none.
static UNSENT_COUNT: AtomicUsize = AtomicUsize::new(0);

fn with_unsent<R>(change: impl FnOnce(&mut BTreeMap<usize, Box<[u8]>>) -> R) -> R {
    let mut unsent = UNSENT.lock().unwrap_or_else(PoisonError::into_inner);
    let result = change(&mut unsent);
    UNSENT_COUNT.store(unsent.len(), Ordering::Release);
    result
}

/// Returns an empty message with a buffer of `len` bytes.
///
/// # Errors
/// `EINVAL` if there are none.
pub(super) fn allocate(len: c_int) -> io::Result<FfZcMbuf> {
    let bytes = usize::try_from(len).ok().filter(|&bytes| bytes > 0);
    let mut buffer = vec![0; bytes.ok_or_else(|| os_error(libc::EINVAL))?].into_boxed_slice();
    let start: *mut c_void = buffer.as_mut_ptr().cast();
    with_unsent(|unsent| unsent.insert(start.addr(), buffer));
    Ok(FfZcMbuf { bsd_mbuf: start, bsd_mbuf_off: start, off: 0, len })
}

impl FfZcMbuf {
    /// Appends bytes to the message and returns their number.
    ///
    /// # Errors
    /// `EINVAL` if they do not fit, or the message was sent already.
    pub(super) fn append(&mut self, data: &[u8]) -> io::Result<usize> {
        with_unsent(|unsent| {
            let buffer = unsent.get_mut(&self.bsd_mbuf.addr())?;
            let space = buffer.get_mut(usize::try_from(self.off).ok()?..)?;
            space.get_mut(..data.len())?.copy_from_slice(data);
            self.off += c_int::try_from(data.len()).ok()?;
            Some(data.len())
        })
        .ok_or_else(|| os_error(libc::EINVAL))
    }
}

/// Takes the message at this address, if one that is not sent yet is there.
#[inline]
pub(super) fn take(start: *const c_void) -> Option<Box<[u8]>> {
    if UNSENT_COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    with_unsent(|unsent| unsent.remove(&start.addr()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_taken_once_with_what_was_appended() {
        let mut message = allocate(8).unwrap();
        assert_eq!(message.append(b"high ").unwrap(), 5);
        assert!(message.append(b"water").is_err(), "10 bytes in 8");
        assert_eq!(message.append(b"sea").unwrap(), 3);
        message.off = -1;
        assert!(message.append(b"s").is_err(), "a number that the program wrote");
        assert_eq!(take(std::ptr::null()), None);
        assert_eq!(take(message.bsd_mbuf).as_deref(), Some(&b"high sea"[..]));
        assert_eq!(take(message.bsd_mbuf), None);
        message.off = 0;
        assert!(message.append(b"h").is_err(), "sent");
    }

    #[test]
    fn message_needs_a_length() {
        assert!(allocate(0).is_err() && allocate(-1).is_err());
    }
}
