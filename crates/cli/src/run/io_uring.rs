//! Refusal of io_uring: its calls go past the C library, so the preload library would not see what
//! an application does with its sockets there. Applications with io_uring have another way for
//! kernels without it.

use std::io;

use seccompiler::sock_filter;
use tidegate_device::xdp::URING_MARK;

/// Number of `io_uring_setup`, the same on every architecture.
const IO_URING_SETUP: u32 = 425;
/// Bit that marks system calls of the x32 interface of x86-64.
const X32_BIT: u32 = 0x4000_0000;

/// Offset of the number of the call in `struct seccomp_data`.
const NUMBER_OFFSET: u32 = 0;
/// Offset of the upper half of the first argument there.
const FIRST_ARGUMENT_OFFSET: u32 = 16 + 4;

/// Makes `io_uring_setup` return `ENOSYS` in this process and in all programs that it executes.
/// The device of an embedded stack still has its own ([`URING_MARK`]). Every other call remains as
/// it is, also those of programs of another architecture. Returns true
/// if the process gains no privileges from now on, which the kernel requires of a process without
/// `CAP_SYS_ADMIN`.
///
/// # Errors
/// The kernel has no such filters.
pub(super) fn refuse() -> io::Result<bool> {
    match install(&program()) {
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {}
        result => return result.map(|()| false),
    }
    rustix::thread::set_no_new_privs(true)?;
    install(&program()).map(|()| true)
}

/// Filter of system calls.
fn program() -> [sock_filter; 7] {
    let instruction = |code, k| sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let load = |offset| instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    let is_equal = |k| instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k);
    let end = |action| instruction(libc::BPF_RET | libc::BPF_K, action);
    [
        load(NUMBER_OFFSET),
        instruction(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, !X32_BIT),
        sock_filter { jf: 3, ..is_equal(IO_URING_SETUP) },
        load(FIRST_ARGUMENT_OFFSET),
        sock_filter { jt: 1, ..is_equal(URING_MARK) },
        end(libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        end(libc::SECCOMP_RET_ALLOW),
    ]
}

/// Installs a filter in this thread. Unlike `seccompiler`, does not set `no_new_privs`.
fn install(program: &[sock_filter]) -> io::Result<()> {
    #[repr(C)]
    struct Program {
        len: libc::c_ushort,
        filter: *const sock_filter,
    }
    let program = Program { len: program.len() as libc::c_ushort, filter: program.as_ptr() };
    // SAFETY: the kernel copies the filter, which has `len` instructions.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Error of `io_uring_setup` with these entries. The kernel refuses the null pointer, if it does
    /// not refuse the call.
    fn setup_error(entries: u64) -> Option<i32> {
        // SAFETY: the kernel writes nothing through a null pointer.
        let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, 0) };
        assert_eq!(result, -1);
        io::Error::last_os_error().raw_os_error()
    }

    /// Runs on its own thread, because a filter cannot be removed.
    #[test]
    fn refuses_io_uring_but_that_of_the_device() {
        let confined = std::thread::spawn(|| {
            let before = setup_error(1);
            refuse().unwrap();
            assert_eq!(setup_error(1), Some(libc::ENOSYS));
            assert_eq!(setup_error(u64::from(URING_MARK) << 32 | 1), before);
            assert!(std::fs::read("/proc/self/status").is_ok());
        });
        confined.join().unwrap();
        assert_eq!(libc::SYS_io_uring_setup, libc::c_long::from(IO_URING_SETUP));
    }
}
