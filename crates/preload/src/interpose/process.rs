//! Processes: how they split, become other programs and end.

use std::ffi::CStr;

use libc::{c_char, c_int, pid_t};

use super::errno;
use crate::socket::passing;
use crate::{environment, real, start, table};

/// A child of `vfork` uses its parent's memory, and would close the parent's
/// sockets there: it gets memory of its own.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn vfork() -> pid_t {
    // SAFETY: the program's own call.
    unsafe { real::fork() }
}

/// C's own environment.
fn own() -> *const *const c_char {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    // SAFETY: the C library's own variable, which the program answers for.
    unsafe { environ }
}

/// The strings of an environment.
///
/// # Safety
/// It is an array of strings that ends with a null.
unsafe fn strings<'a>(environment: *const *const c_char) -> Vec<&'a CStr> {
    // SAFETY: the caller's promise.
    unsafe {
        let string = |at| Some(environment.add(at).read()).filter(|string| !string.is_null());
        (0..).map_while(string).map(|string| CStr::from_ptr(string)).collect()
    }
}

/// Becomes another program, which is told of the descriptors that it has with sockets
/// of ours. `become_other` returns only when that fails.
///
/// # Safety
/// `environment` is an array of strings that ends with a null.
unsafe fn hand_down(
    environment: *const *const c_char,
    become_other: impl FnOnce(*const *const c_char) -> c_int,
) -> c_int {
    let stays_open = |&fd: &c_int| {
        // SAFETY: asks for flags.
        let flags = unsafe { real::fcntl64(fd, libc::F_GETFD, 0) };
        flags != -1 && flags & libc::FD_CLOEXEC == 0
    };
    let is_attached = start::open_net().is_some_and(tidegate::Net::is_attached);
    let mut handed: Vec<c_int> = match is_attached {
        true => table::between(0, u32::MAX).filter(stays_open).collect(),
        false => Vec::new(),
    };
    handed.retain(|&fd| passing::offer(fd));
    if handed.is_empty() || environment.is_null() {
        return become_other(environment);
    }
    // SAFETY: the caller's promise.
    let given = unsafe { strings(environment) };
    let told = environment::of_next(given.into_iter(), &handed);
    let mut strings: Vec<*const c_char> = told.iter().map(|string| string.as_ptr()).collect();
    strings.push(std::ptr::null());
    let result = become_other(strings.as_ptr());
    let error = std::io::Error::last_os_error();
    handed.into_iter().for_each(passing::withdraw);
    errno::set(&error);
    result
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execve(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    // SAFETY: the program's own call.
    unsafe { hand_down(environment, |all| real::execve(path, arguments, all)) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execv(path: *const c_char, arguments: *const *const c_char) -> c_int {
    // SAFETY: the program's own call.
    unsafe { execve(path, arguments, own()) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execvpe(
    file: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    // SAFETY: the program's own call.
    unsafe { hand_down(environment, |all| real::execvpe(file, arguments, all)) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execvp(file: *const c_char, arguments: *const *const c_char) -> c_int {
    // SAFETY: the program's own call.
    unsafe { execvpe(file, arguments, own()) }
}

/// Runs before the program does, which may have got sockets of ours from the one that
/// was here before.
extern "C" fn at_begin() {
    environment::read_at_begin().into_iter().for_each(passing::take);
}

#[cfg(not(test))]
// SAFETY: the linker puts the function among those that run at the beginning.
#[unsafe(link_section = ".init_array")]
#[used]
static AT_BEGIN: extern "C" fn() = at_begin;

#[cfg(test)]
const _: extern "C" fn() = at_begin;

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
