//! A file server for NFS version 3 (RFC 1813), read-only, over TCP.
//!
//! [`NfsService`] answers one remote procedure call and is independent of sockets. [`serve_nfs`]
//! runs it on Tidegate, [`serve_nfs_kernel`] on kernel sockets. [`NfsLimits`] bound the memory and
//! the time of connections.
//!
//! The replies are encoded with `nfs3_types`. Arguments are decoded here, because each length in
//! them is a number from an untrusted client.

mod arguments;
mod attributes;
mod connection;
mod connections;
mod export;
mod handle;
mod limits;
mod listener;
mod listing;
mod mount;
mod names;
mod procedures;
mod records;
mod rpc;
mod search;
mod serve;
mod service;
mod status;

pub use export::Export;
pub use limits::NfsLimits;
pub use serve::{serve_nfs, serve_nfs_kernel};
pub use service::NfsService;
