//! Protocol between the daemon and an application: messages and shared memory.
//!
//! An application connects to the daemon's Unix socket and receives two sealed memory regions
//! ([`handshake`]). The first holds a ring of commands, a ring of notifications and a slot of
//! status words and stream indices for each socket. The second holds the bytes of the sockets'
//! streams; its pages are allocated when they are used ([`layout`]). Two event descriptors come along
//! ([`event_fds`]): by one the application wakes the daemon, by the other the daemon wakes the
//! application. The connection stays open: closing it means that one side has exited.
//!
//! Before a process forks, it connects once more with its [`takeover_token`]. The attachment of the
//! child inherits the sockets of its parent, in the same slots and with the same handles. Their
//! words and streams stay where they are. Only the flag that requests notifications of changes
//! is a word of each attachment's own memory.
//!
//! A socket is transferred to another process together with a kernel file descriptor. The
//! sender registers the socket before, and the receiver asks for it after, each on a connection
//! of its own ([`transfer_reply`]). Its words and streams stay where they are, too.
//!
//! An application may attach several times to have its sockets on several cores. Sockets of one
//! share group ([`share_group`]) have one port and divide its traffic.
//!
//! Everything read from the other side is copied first, then parsed.

pub mod command;
pub mod connect;
pub mod datagram;
mod encoding;
pub mod error_code;
pub mod event_fds;
pub mod fd_passing;
#[cfg(test)]
mod golden;
pub mod handshake;
pub mod layout;
pub mod notification;
pub mod processor;
pub mod share_group;
pub mod status;
pub mod takeover_token;
pub mod transfer_reply;
pub mod version;
