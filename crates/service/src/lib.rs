//! Network daemon: a stack on network cores, and the applications that attach to it.
//!
//! [`daemon`] runs the engine and serves applications. [`attachment`] is the application's end.
//! `ipc` is the protocol between both: messages and the layout of the shared memory. An
//! application and the daemon share memory and do not trust each other: see
//! [`tidegate_memory::shared`].
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate self as tidegate_service;

pub mod attachment;
pub mod daemon;
mod ipc;

pub use ipc::command::Handle;
pub use ipc::fd_passing::{receive_with_fds, send_with_fds};
pub use ipc::handshake::Shard;
pub use ipc::layout::Geometry;
pub use ipc::share_group::ShareGroupId;
pub use ipc::status::SocketState;
pub use ipc::version::{Library, ProtocolVersion};
