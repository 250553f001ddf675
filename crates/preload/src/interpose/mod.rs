//! C functions that replace the C library's: conversion of C arguments and `errno`, nothing
//! else.
//!
//! A panic aborts the process with a message: a panic cannot unwind into C.

pub mod epoll;
#[cfg(target_arch = "x86_64")]
pub mod exec_list;
pub mod fd;
pub mod limit;
pub mod process;
pub mod receive;
pub mod send;
pub mod sendfile;
pub mod signal;
pub mod socket;
pub mod spawn;
pub mod splice;
pub mod syscall;
pub mod wait;
