//! Types and traits that the backends and the sockets share.
//!
//! A backend implements [`SocketOps`](socket_ops::SocketOps); a socket calls it. Nothing here
//! depends on a backend or on a socket.

pub(crate) mod added_readiness;
pub(crate) mod batch_scope;
pub(crate) mod datagram;
pub(crate) mod deadline;
pub(crate) mod errors;
pub(crate) mod exchange;
pub(crate) mod followers;
pub(crate) mod poll_sets;
pub(crate) mod readers;
pub(crate) mod readiness;
pub(crate) mod service_times;
pub(crate) mod sleeper;
pub(crate) mod socket_id;
pub(crate) mod socket_ops;
pub(crate) mod tasks;
pub(crate) mod waiters;
