//! Processes: how they split and how they end.

use libc::{c_int, pid_t};

use crate::{real, start};

/// A child of `vfork` uses its parent's memory, and would close the parent's
/// sockets there: it gets memory of its own.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn vfork() -> pid_t {
    // SAFETY: the program's own call.
    unsafe { real::fork() }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    start::finish();
    // SAFETY: the program's own call.
    unsafe { real::_exit(status) }
}

#[allow(non_snake_case, reason = "it is C's name")]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn _Exit(status: c_int) -> ! {
    // SAFETY: the program's own call.
    unsafe { _exit(status) }
}

/// Runs when the program has ended by itself, after all that it has to do then.
extern "C" fn at_end() {
    start::finish();
}

#[cfg(not(test))]
// SAFETY: the linker puts the function among those that run at the end.
#[unsafe(link_section = ".fini_array")]
#[used]
static AT_END: extern "C" fn() = at_end;

#[cfg(test)]
const _: extern "C" fn() = at_end;
