//! The kernel's forms of arguments, errors and events: what the libraries that C programs call
//! (`tidegate-preload`, `tidegate-capi`) have in common.
//!
//! * [`arguments`]: addresses, buffers, control messages and time-outs of C calls.
//! * [`errno`]: errors as `errno`.
//! * [`epoll_events`]: readiness as event bits of epoll.
//! * [`families`]: address families that a socket reaches.
//! * [`fd_table`]: objects of descriptors.
//! * [`tcp_info`]: state of a connection as `TCP_INFO`.

pub mod arguments;
pub mod epoll_events;
pub mod errno;
pub mod families;
pub mod fd_table;
pub mod tcp_info;
