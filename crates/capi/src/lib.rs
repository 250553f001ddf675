//! The C library: sockets of the Rust library as C functions, in three families of names.
//!
//! * `tg_*` (`tidegate.h`): as the kernel's socket calls.
//! * `mtcp_*` (`mtcp_api.h`, `mtcp_epoll.h`): as mTCP's.
//! * `ff_*` (`ff_api.h`, `ff_epoll.h`): as F-Stack's.
//!
//! A call passes through these layers, only downwards:
//!
//! * the families: `tg`, `mtcp`, `fstack`. Panics and errors end there, in `boundary`.
//! * `calls`: the meaning of a call, with C arguments.
//! * `poll`, `stack`: waiting, and the stack of the process.
//! * `descriptors`: objects of descriptors.
//! * `kqueue`, `epoll`, `ring`, `socket`: the objects.

mod boundary;
mod calls;
mod config;
mod descriptors;
mod epoll;
mod fstack;
mod kqueue;
mod mtcp;
mod poll;
mod ring;
mod sleeper;
mod socket;
mod stack;
#[doc(hidden)]
pub mod tg;

#[doc(hidden)]
pub use stack::use_net;
