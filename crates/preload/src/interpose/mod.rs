//! The C functions that stand in for the C library's: raw arguments come in,
//! `errno` goes out, and nothing else happens here.
//!
//! A panic ends the process with a message: it cannot cross into C.

pub mod epoll;
mod errno;
pub mod fd;
pub mod io;
pub mod process;
pub mod signal;
pub mod socket;
pub mod syscall;
pub mod wait;
