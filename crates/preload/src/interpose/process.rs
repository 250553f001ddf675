//! Processes: fork, exec and exit.

use std::ffi::CStr;

use libc::{c_char, c_int, c_ulong, pid_t};
use tidegate_memory::own_fd;

use crate::errno;
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
pub(super) fn current_environment() -> *const *const c_char {
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

/// Descriptor of a socket that the next program inherits.
#[derive(Clone, Copy)]
pub(super) struct InheritedFd {
    /// Number in this process.
    pub(super) here: c_int,
    /// Number in the next program.
    pub(super) there: c_int,
    pub(super) stays_open: bool,
}

/// Descriptors of sockets that could be passed to the next program.
pub(super) fn inheritable_fds() -> Vec<InheritedFd> {
    if !runtime::opened_net().is_some_and(tidegate::Net::is_attached) {
        return Vec::new();
    }
    let with_flags = |fd| {
        // SAFETY: reads flags.
        let flags = unsafe { real::fcntl64(fd, libc::F_GETFD, 0) };
        let stays_open = flags != -1 && flags & libc::FD_CLOEXEC == 0;
        InheritedFd { here: fd, there: fd, stays_open }
    };
    fd_table::range(0, u32::MAX).map(with_flags).collect()
}

/// Starts another program, with the descriptors of its inherited sockets in the environment.
/// `has_started` says whether the result of `start` is that of success.
///
/// # Safety
/// `environment` is null or an array of C strings that ends with a null pointer.
pub(super) unsafe fn start_with_sockets(
    environment: *const *const c_char,
    mut sockets: Vec<InheritedFd>,
    start: impl FnOnce(*const *const c_char) -> c_int,
    has_started: impl FnOnce(c_int) -> bool,
) -> c_int {
    if environment.is_null() {
        return start(environment);
    }
    sockets.retain(|fd| fd.stays_open && transfer::send_socket(fd.here));
    if sockets.is_empty() {
        return start(environment);
    }
    // SAFETY: guaranteed by the caller.
    let given = unsafe { strings(environment) };
    let numbers: Vec<c_int> = sockets.iter().map(|fd| fd.there).collect();
    let extended = environment::for_exec(given.into_iter(), &numbers);
    let mut strings: Vec<*const c_char> = extended.iter().map(|string| string.as_ptr()).collect();
    strings.push(std::ptr::null());
    let result = start(strings.as_ptr());
    if !has_started(result) {
        let error = std::io::Error::last_os_error();
        sockets.iter().for_each(|fd| transfer::withdraw_socket(fd.here));
        errno::set_from(&error);
    }
    result
}

/// Executes another program in this process, which returns only on failure.
///
/// # Safety
/// As [`start_with_sockets`].
unsafe fn exec_with_sockets(
    environment: *const *const c_char,
    exec: impl FnOnce(*const *const c_char) -> c_int,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { start_with_sockets(environment, inheritable_fds(), exec, |_| false) }
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

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fexecve(
    program: c_int,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    // SAFETY: the application's own call.
    unsafe { exec_with_sockets(environment, |all| real::fexecve(program, arguments, all)) }
}

/// Runs before the application, which may have inherited sockets from the previous program of
/// this process.
extern "C" fn on_load() {
    environment::lifeline().into_iter().for_each(own_fd::list_fixed);
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
pub unsafe extern "C" fn prctl(
    option: c_int,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
) -> c_int {
    if option == libc::PR_SET_SECCOMP {
        lifecycle::before_system_call_filter();
    }
    // SAFETY: the application's own call.
    unsafe { real::prctl(option, a, b, c, d) }
}

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
