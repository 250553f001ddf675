//! The kernel's forms of arguments, errors and events: what the libraries that C programs call
//! (`tidegate-preload`, `tidegate-capi`) have in common.
//!
//! * [`arguments`]: addresses, buffers, control messages and time-outs of C calls.
//! * [`control`]: control messages of datagrams.
//! * [`errno`]: errors as `errno`.
//! * [`epoll_events`]: readiness as event bits of epoll.
//! * [`epoll_members`]: sockets of an epoll set.
//! * [`families`]: address families that a socket reaches.
//! * [`fd_table`]: objects of descriptors.
//! * [`polling`]: the kernel's descriptors in waiting calls.
//! * [`signals`]: signals that interrupt waiting calls.
//! * [`tcp_info`]: state of a connection as `TCP_INFO`.
//! * [`mod@unreachable`]: ICMP errors that have no error kind.

pub mod arguments;
pub mod control;
pub mod epoll_events;
pub mod epoll_members;
pub mod errno;
pub mod families;
pub mod fd_table;
pub mod polling;
pub mod signals;
pub mod tcp_info;
pub mod unreachable;
