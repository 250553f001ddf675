//! Unmodified programs on the Tidegate stack: the library that `tidegate run`
//! has the dynamic linker load before the C library.
//!
//! It stands in for the C library's calls on sockets. A call goes through three
//! layers, and only downwards:
//!
//! * `interpose`: the C functions. They read raw arguments, and are the only
//!   place that knows `errno`.
//! * `socket`, `epoll`, `poll`: what the calls mean on Tidegate.
//! * `table`: which descriptor is what; `start`: the stack, opened when the
//!   first socket moves to it; `signals`: when handlers run.
//!
//! Every socket is the kernel's to begin with, and its descriptor stays the
//! kernel's for ever: numbers, flags and options are kept there. A socket moves
//! when it listens, connects or sends, if the rules say so.

mod environment;
mod epoll;
#[doc(hidden)]
pub mod interpose;
mod log;
mod memory;
mod own_address;
mod poll;
mod raw;
mod real;
mod rules;
mod signals;
mod sleeper;
mod socket;
mod start;
mod table;
