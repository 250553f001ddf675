//! Boundary to C: results as return values and `errno`, and panics as errors.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use libc::{c_int, ssize_t};
use tidegate_posix::errno;

/// Runs a call of the program. A panic becomes `EIO`: it must not cross the boundary to C. A call
/// that succeeds leaves `errno` as it was.
#[inline]
fn run<R>(call: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
    errno::preserve(|| {
        catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
            // Dropping it might panic again.
            std::mem::forget(panic);
            Err(io::Error::from_raw_os_error(libc::EIO))
        })
    })
}

/// 0, or -1 and `errno`.
pub(crate) fn status(call: impl FnOnce() -> io::Result<()>) -> c_int {
    errno::return_status(run(call))
}

/// Number of bytes, or -1 and `errno`.
#[inline]
pub(crate) fn bytes(call: impl FnOnce() -> io::Result<usize>) -> ssize_t {
    errno::return_count(run(call))
}

/// Number of bytes of a function that returns an `int`, or -1 and `errno`.
pub(crate) fn count(call: impl FnOnce() -> io::Result<usize>) -> c_int {
    c_int::try_from(errno::return_count(run(call))).unwrap_or(c_int::MAX)
}

/// Number, or -1 and `errno`.
pub(crate) fn number(call: impl FnOnce() -> io::Result<c_int>) -> c_int {
    match run(call) {
        Ok(number) => number,
        Err(error) => {
            errno::set_from(&error);
            -1
        }
    }
}

/// Pointer, or null and `errno`.
pub(crate) fn pointer<T>(call: impl FnOnce() -> io::Result<*mut T>) -> *mut T {
    match run(call) {
        Ok(pointer) => pointer,
        Err(error) => {
            errno::set_from(&error);
            std::ptr::null_mut()
        }
    }
}

/// Nothing, whatever happens.
pub(crate) fn nothing(call: impl FnOnce() -> io::Result<()>) {
    let _ = run(call);
}

/// Defines functions of the C library. After the signature follow the form of the return value, a
/// function of this module, and the call.
macro_rules! export {
    ($($(#[$note:meta])* $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $returned:ty)? = $form:ident $body:block)*) => {
        $($(#[$note])*
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe, reason = "not every call is unsafe")]
        pub unsafe extern "C" fn $name($($argument: $kind),*) $(-> $returned)? {
            // SAFETY: the program keeps the rules of the header: pointers are null or valid.
            $crate::boundary::$form(|| unsafe { $body })
        })*
    };
}
pub(crate) use export;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_becomes_an_error() {
        std::panic::set_hook(Box::new(|_| {}));
        assert_eq!(bytes(|| panic!("in the stack")), -1);
        let _ = std::panic::take_hook();
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EIO));
    }

    #[test]
    fn success_leaves_errno() {
        errno::set(libc::EXDEV);
        assert_eq!(bytes(|| Ok(std::fs::metadata("/nowhere").map_or(3, |_| 4))), 3);
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EXDEV));
    }
}
