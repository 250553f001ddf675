//! Processes: fork, exec and exit.

use std::ffi::CStr;

use libc::{c_char, c_int, pid_t};

use super::errno;
use crate::socket::transfer;
use crate::{environment, fd_table, lifecycle, real, runtime};

/// Replaces `vfork` by `fork`: a child of `vfork` shares its parent's memory, and would close
/// the parent's sockets there.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn vfork() -> pid_t {
    // SAFETY: the application's own call.
    unsafe { real::fork() }
}

/// The C library's `environ`.
fn current_environment() -> *const *const c_char {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    // SAFETY: the C library's own variable, which the application keeps valid.
    unsafe { environ }
}

/// Strings of an environment.
///
/// # Safety
/// `environment` is an array of C strings that ends with a null pointer.
unsafe fn strings<'a>(environment: *const *const c_char) -> Vec<&'a CStr> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let string = |at| Some(environment.add(at).read()).filter(|string| !string.is_null());
        (0..).map_while(string).map(|string| CStr::from_ptr(string)).collect()
    }
}

/// Executes another program, with the descriptors of its inherited sockets in the environment.
/// `exec` returns only on failure.
///
/// # Safety
/// `environment` is null or an array of C strings that ends with a null pointer.
unsafe fn exec_with_sockets(
    environment: *const *const c_char,
    exec: impl FnOnce(*const *const c_char) -> c_int,
) -> c_int {
    let stays_open = |&fd: &c_int| {
        // SAFETY: reads flags.
        let flags = unsafe { real::fcntl64(fd, libc::F_GETFD, 0) };
        flags != -1 && flags & libc::FD_CLOEXEC == 0
    };
    let is_attached = runtime::opened_net().is_some_and(tidegate::Net::is_attached);
    let mut inherited_fds: Vec<c_int> = match is_attached {
        true => fd_table::range(0, u32::MAX).filter(stays_open).collect(),
        false => Vec::new(),
    };
    inherited_fds.retain(|&fd| transfer::send_socket(fd));
    if inherited_fds.is_empty() || environment.is_null() {
        return exec(environment);
    }
    // SAFETY: guaranteed by the caller.
    let given = unsafe { strings(environment) };
    let extended = environment::for_exec(given.into_iter(), &inherited_fds);
    let mut strings: Vec<*const c_char> = extended.iter().map(|string| string.as_ptr()).collect();
    strings.push(std::ptr::null());
    let result = exec(strings.as_ptr());
    let error = std::io::Error::last_os_error();
    inherited_fds.into_iter().for_each(transfer::withdraw_socket);
    errno::set_from(&error);
    result
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execve(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    // SAFETY: the application's own call.
    unsafe { exec_with_sockets(environment, |all| real::execve(path, arguments, all)) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execv(path: *const c_char, arguments: *const *const c_char) -> c_int {
    // SAFETY: the application's own call.
    unsafe { execve(path, arguments, current_environment()) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execvpe(
    file: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    // SAFETY: the application's own call.
    unsafe { exec_with_sockets(environment, |all| real::execvpe(file, arguments, all)) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execvp(file: *const c_char, arguments: *const *const c_char) -> c_int {
    // SAFETY: the application's own call.
    unsafe { execvpe(file, arguments, current_environment()) }
}

/// Runs before the application, which may have inherited sockets from the previous program of
/// this process.
extern "C" fn on_load() {
    environment::read_at_load().into_iter().for_each(transfer::receive_socket);
}

#[cfg(not(test))]
// SAFETY: the linker adds the function to those that run at load time.
#[unsafe(link_section = ".init_array")]
#[used]
static ON_LOAD: extern "C" fn() = on_load;

#[cfg(test)]
const _: extern "C" fn() = on_load;

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    lifecycle::finish();
    // SAFETY: the application's own call.
    unsafe { real::_exit(status) }
}

#[allow(non_snake_case, reason = "name of the C function")]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn _Exit(status: c_int) -> ! {
    // SAFETY: the application's own call.
    unsafe { _exit(status) }
}

/// Runs at a normal exit of the application, after its own exit handlers.
extern "C" fn on_exit() {
    lifecycle::finish();
}

#[cfg(not(test))]
// SAFETY: the linker adds the function to those that run at exit.
#[unsafe(link_section = ".fini_array")]
#[used]
static ON_EXIT: extern "C" fn() = on_exit;

#[cfg(test)]
const _: extern "C" fn() = on_exit;
