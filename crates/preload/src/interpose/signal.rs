//! Handlers of signals.

use libc::{c_int, sighandler_t};

use super::errno;
use crate::{real, signals};

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sigaction(
    signal: c_int,
    wanted: *const libc::sigaction,
    told: *mut libc::sigaction,
) -> c_int {
    let before = signals::Handler::of(signal);
    // SAFETY: the program's own arguments.
    unsafe {
        let given = wanted.as_ref().map(|wanted| signals::replace(signal, wanted));
        let given = given.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let result = real::sigaction(signal, given, told);
        if let Some(told) = told.as_mut().filter(|_| result == 0) {
            *told = signals::original(signal, told, before);
        }
        result
    }
}

/// A handler as `signal` has it: calls that it interrupts go on, or not.
fn simple(signal: c_int, handler: sighandler_t, flags: c_int) -> sighandler_t {
    // SAFETY: plain numbers and an array of bits; both actions are valid.
    unsafe {
        let mut wanted: libc::sigaction = std::mem::zeroed();
        let mut before: libc::sigaction = std::mem::zeroed();
        (wanted.sa_sigaction, wanted.sa_flags) = (handler, flags);
        libc::sigemptyset(&mut wanted.sa_mask);
        match sigaction(signal, &wanted, &mut before) {
            0 => before.sa_sigaction,
            _ => libc::SIG_ERR,
        }
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    if handler == libc::SIG_ERR {
        errno::set_number(libc::EINVAL);
        return libc::SIG_ERR;
    }
    simple(signal, handler, libc::SA_RESTART)
}
