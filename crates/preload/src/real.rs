//! Original functions of the C library.

use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{
    c_char, c_int, c_long, c_uint, c_ulong, c_void, epoll_event, fd_set, iovec, mmsghdr, mode_t,
    msghdr, nfds_t, off_t, off64_t, pid_t, pollfd, posix_spawn_file_actions_t, posix_spawnattr_t,
    rlimit, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};

/// Looks a function up in the libraries that follow this one in the search order.
#[cold]
fn resolve(slot: &AtomicPtr<c_void>, name: &std::ffi::CStr) -> *mut c_void {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if found.is_null() {
        eprintln!(
            "tidegate: the C library has no function {name:?}: `tidegate run` needs a C library that has it"
        );
        std::process::abort();
    }
    slot.store(found, Ordering::Relaxed);
    found
}

macro_rules! real {
    ($($name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {$(
        #[inline]
        pub(crate) unsafe fn $name($($arg: $type),*) $(-> $result)? {
            static ADDRESS: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            type Function = unsafe extern "C" fn($($type),*) $(-> $result)?;
            let mut found = ADDRESS.load(Ordering::Relaxed);
            if found.is_null() {
                let name = concat!(stringify!($name), "\0").as_bytes();
                // The literal ends with the only NUL.
                let name = std::ffi::CStr::from_bytes_with_nul(name).unwrap_or_default();
                found = resolve(&ADDRESS, name);
            }
            // SAFETY: the C library declares the function with these types; the caller
            // guarantees that the arguments are valid.
            unsafe { std::mem::transmute::<*mut c_void, Function>(found)($($arg),*) }
        }
    )*};
}

real! {
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    listen(fd: c_int, backlog: c_int) -> c_int;
    accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    shutdown(fd: c_int, how: c_int) -> c_int;
    getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
    getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;
    read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t;
    readv(fd: c_int, bufs: *const iovec, count: c_int) -> ssize_t;
    write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t;
    writev(fd: c_int, bufs: *const iovec, count: c_int) -> ssize_t;
    pread(fd: c_int, buf: *mut c_void, len: size_t, offset: off_t) -> ssize_t;
    recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, address: *mut sockaddr, address_len: *mut socklen_t) -> ssize_t;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;
    sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, address: *const sockaddr, address_len: socklen_t) -> ssize_t;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    sendfile64(out: c_int, source: c_int, offset: *mut off64_t, count: size_t) -> ssize_t;
    splice(from: c_int, from_offset: *mut off64_t, to: c_int, to_offset: *mut off64_t, len: size_t, flags: c_uint) -> ssize_t;
    close(fd: c_int) -> c_int;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    closefrom(first: c_int);
    dup(fd: c_int) -> c_int;
    dup2(from: c_int, to: c_int) -> c_int;
    dup3(from: c_int, to: c_int, flags: c_int) -> c_int;
    fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int;
    sigaction(signal: c_int, wanted: *const libc::sigaction, previous: *mut libc::sigaction) -> c_int;
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    select(count: c_int, reads: *mut fd_set, writes: *mut fd_set, others: *mut fd_set, timeout: *mut timeval) -> c_int;
    pselect(count: c_int, reads: *mut fd_set, writes: *mut fd_set, others: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    epoll_create1(flags: c_int) -> c_int;
    epoll_ctl(fd: c_int, operation: c_int, target: c_int, event: *mut epoll_event) -> c_int;
    epoll_pwait(fd: c_int, events: *mut epoll_event, limit: c_int, timeout: c_int, mask: *const sigset_t) -> c_int;
    epoll_pwait2(fd: c_int, events: *mut epoll_event, limit: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long;
    prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int;
    fork() -> pid_t;
    execve(path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    execvpe(file: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    prlimit64(process: pid_t, resource: libc::__rlimit_resource_t, wanted: *const rlimit, before: *mut rlimit) -> c_int;
    fexecve(program: c_int, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    posix_spawn(process: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t, attributes: *const posix_spawnattr_t, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    posix_spawnp(process: *mut pid_t, file: *const c_char, actions: *const posix_spawn_file_actions_t, attributes: *const posix_spawnattr_t, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    posix_spawn_file_actions_init(actions: *mut posix_spawn_file_actions_t) -> c_int;
    posix_spawn_file_actions_destroy(actions: *mut posix_spawn_file_actions_t) -> c_int;
    posix_spawn_file_actions_adddup2(actions: *mut posix_spawn_file_actions_t, from: c_int, to: c_int) -> c_int;
    posix_spawn_file_actions_addclose(actions: *mut posix_spawn_file_actions_t, fd: c_int) -> c_int;
    posix_spawn_file_actions_addclosefrom_np(actions: *mut posix_spawn_file_actions_t, first: c_int) -> c_int;
    posix_spawn_file_actions_addopen(actions: *mut posix_spawn_file_actions_t, fd: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    _exit(status: c_int) -> !;
}
