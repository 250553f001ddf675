//! Bindings to the C shim in `dpdk/`. All `unsafe` code of the `dpdk` module is here.

mod eth_dev;
mod eth_queues;
mod raw;

use std::ffi::{CStr, CString, c_int};
use std::io;
use std::ptr;

pub use self::eth_dev::{EthDev, OpenFailure};
pub use self::eth_queues::{EthQueues, RxInterrupts};

/// Version string of DPDK: `DPDK 22.11.11`.
pub fn version() -> String {
    // SAFETY: returns a string that is never changed or freed.
    unsafe { CStr::from_ptr(raw::rte_version()) }.to_string_lossy().into_owned()
}

/// Captures DPDK's log instead of printing it.
pub fn capture_log() {
    // SAFETY: the function has no preconditions.
    unsafe { raw::dpdk_keep_log() }
}

/// Returns and clears the captured log, or the end of a long one.
pub fn take_log() -> String {
    let mut text = vec![0; 1024];
    // SAFETY: writes at most `text.len()` bytes to `text` and returns their number.
    let bytes = unsafe { raw::dpdk_take_log(text.as_mut_ptr(), text.len()) };
    text.truncate(bytes);
    String::from_utf8_lossy(&text).into_owned()
}

/// Starts DPDK. Only the first call of a process can succeed.
pub fn start(arguments: &[String]) -> io::Result<()> {
    let name = ["tidegate".to_owned()];
    let all = name.iter().chain(arguments).map(|word| CString::new(word.as_str()));
    let all: Vec<CString> = all.collect::<Result<_, _>>()?;
    // DPDK keeps the argument strings, so they are leaked; this happens once.
    let mut pointers: Vec<_> = all.into_iter().map(CString::into_raw).collect();
    pointers.push(ptr::null_mut());
    let pointers = pointers.leak();
    // SAFETY: an argument vector as of `main`, which is never freed.
    result(unsafe { raw::dpdk_start((pointers.len() - 1) as c_int, pointers.as_mut_ptr()) })
}

fn result(error: c_int) -> io::Result<()> {
    match error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}
