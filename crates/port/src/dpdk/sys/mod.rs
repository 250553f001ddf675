//! The functions of the shim, the C in `dpdk/`. The one place of this
//! module with `unsafe`.

mod device;
mod raw;

use std::ffi::{CStr, CString, c_int};
use std::io;
use std::ptr;

pub use self::device::{Device, Failed, Interrupts};

/// What DPDK calls itself: `DPDK 22.11.11`.
pub fn version() -> String {
    // SAFETY: returns a string that is never changed or freed.
    unsafe { CStr::from_ptr(raw::rte_version()) }.to_string_lossy().into_owned()
}

/// Keeps what DPDK says instead of printing it.
pub fn keep_log() {
    // SAFETY: has no conditions.
    unsafe { raw::tg_keep_log() }
}

/// What DPDK has said since the last call, or the end of it.
pub fn take_log() -> String {
    let mut text = vec![0; 1024];
    // SAFETY: writes at most so many bytes there, and returns how many.
    let bytes = unsafe { raw::tg_take_log(text.as_mut_ptr(), text.len()) };
    text.truncate(bytes);
    String::from_utf8_lossy(&text).into_owned()
}

/// Starts DPDK. Only the first call of a process can succeed.
pub fn start(arguments: &[String]) -> io::Result<()> {
    let name = ["tidegate".to_owned()];
    let all = name.iter().chain(arguments).map(|word| CString::new(word.as_str()));
    let all: Vec<CString> = all.collect::<Result<_, _>>()?;
    // DPDK keeps them, and this happens once.
    let mut pointers: Vec<_> = all.into_iter().map(CString::into_raw).collect();
    pointers.push(ptr::null_mut());
    let pointers = pointers.leak();
    // SAFETY: an argument vector as of `main`, which is never freed.
    result(unsafe { raw::tg_start((pointers.len() - 1) as c_int, pointers.as_mut_ptr()) })
}

fn result(error: c_int) -> io::Result<()> {
    match error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}
