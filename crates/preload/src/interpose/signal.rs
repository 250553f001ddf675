//! Signal handlers.

use libc::{c_int, sighandler_t};

use crate::errno;
use crate::{real, signals};

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sigaction(
    signal: c_int,
    wanted: *const libc::sigaction,
    previous: *mut libc::sigaction,
) -> c_int {
    let previous_handler = signals::Handler::of(signal);
    // SAFETY: the application's own arguments.
    unsafe {
        let wrapped = wanted.as_ref().map(|wanted| signals::wrap_action(signal, wanted));
        let wrapped = wrapped.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let result = real::sigaction(signal, wrapped, previous);
        if let Some(previous) = previous.as_mut().filter(|_| result == 0) {
            *previous = signals::unwrap_action(signal, previous, previous_handler);
        }
        result
    }
}

/// Installs a handler as `signal` does; `flags` say whether interrupted calls are restarted.
fn install_handler(signal: c_int, handler: sighandler_t, flags: c_int) -> sighandler_t {
    // SAFETY: plain integers and an array of bits; both actions are valid.
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
        errno::set(libc::EINVAL);
        return libc::SIG_ERR;
    }
    install_handler(signal, handler, libc::SA_RESTART)
}
