//! Preload library of `tidegate run`: sockets of an unmodified application on Tidegate.
//!
//! The dynamic linker loads this library before the C library. The library replaces the C
//! library's socket calls. A call passes through three layers, only downwards:
//!
//! * `interpose`: the C functions. This layer reads C arguments, and is the only one that
//!   sets `errno`.
//! * `socket`, `epoll`, `poll`: the meaning of a call on Tidegate.
//! * `fd_table`: the entries of descriptors; `lifecycle`: the stack, opened when the first
//!   socket moves to Tidegate; `runtime`: the opened stack and the settings; `signals`:
//!   deferral of signal handlers.
//!
//! Every socket starts as a kernel socket, and its descriptor remains a kernel descriptor:
//! number, flags and options are kept there. A socket moves to Tidegate when it listens,
//! connects or sends, if the rules say so.

mod allocator;
mod duplicates;
mod environment;
mod epoll;
mod fd_table;
#[doc(hidden)]
pub mod interpose;
mod lifecycle;
mod local_addresses;
mod log;
mod own_fds;
mod poll;
mod raw;
mod real;
mod rules;
mod runtime;
mod signals;
mod sleeper;
mod socket;

use tidegate_posix::errno;
