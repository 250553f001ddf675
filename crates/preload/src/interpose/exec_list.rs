//! `execl`, `execlp` and `execle`, which take the arguments of the next program one by one.
//!
//! Rust cannot define a function with a variable number of arguments, so that a few instructions
//! store the arguments that are in registers.

use std::arch::naked_asm;

use libc::{c_char, c_int};

use super::process::{current_environment, execve, execvp};

/// Number of arguments, after the path, that the calling convention passes in registers.
const REGISTER_ARGUMENTS: usize = 5;

/// Arguments of the application's call, up to the null pointer that ends them.
struct ArgumentList {
    strings: Vec<*const c_char>,
    /// Word after the null pointer: the environment of `execle`.
    next: *const c_char,
}

impl ArgumentList {
    /// # Safety
    /// `registers` and `stack` are those of a call whose arguments end with a null pointer.
    unsafe fn read(registers: *const *const c_char, stack: *const *const c_char) -> Self {
        let word = |index: usize| {
            // SAFETY: guaranteed by the caller; words after the arguments are still stack.
            unsafe {
                match index.checked_sub(REGISTER_ARGUMENTS) {
                    None => registers.add(index).read(),
                    Some(index) => stack.add(index).read(),
                }
            }
        };
        let mut strings: Vec<_> = (0..).map(word).take_while(|string| !string.is_null()).collect();
        let next = word(strings.len() + 1);
        strings.push(std::ptr::null());
        Self { strings, next }
    }
}

/// Defines a function that stores its arguments and calls `$inner` with their addresses.
macro_rules! with_argument_list {
    ($name:ident, $inner:ident, $path:ident, $list:ident => $call:expr) => {
        #[unsafe(naked)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name(path: *const c_char, first: *const c_char) -> c_int {
            // The five pushes align the stack; above them is the return address.
            naked_asm!(
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "lea rdx, [rsp + 48]",
                "call {inner}",
                "add rsp, 40",
                "ret",
                inner = sym $inner,
            )
        }

        unsafe extern "C" fn $inner(
            $path: *const c_char,
            registers: *const *const c_char,
            stack: *const *const c_char,
        ) -> c_int {
            // SAFETY: the application's own arguments.
            unsafe {
                let $list = ArgumentList::read(registers, stack);
                $call
            }
        }
    };
}

with_argument_list!(execl, execl_listed, path, list =>
    execve(path, list.strings.as_ptr(), current_environment()));
with_argument_list!(execlp, execlp_listed, file, list => execvp(file, list.strings.as_ptr()));
with_argument_list!(execle, execle_listed, path, list =>
    execve(path, list.strings.as_ptr(), list.next.cast()));
