//! Admission of applications: the Unix socket on which applications attach, and the core that
//! serves each of them.

mod admission;
pub(super) mod bound_socket;
mod heap_trim;
mod hello;
pub(super) mod listener;
