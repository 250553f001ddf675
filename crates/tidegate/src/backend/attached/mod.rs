//! Stack in a daemon, through shared memory.

mod attachments;
mod core;
mod exchange;
pub(crate) mod fork;
mod kernel_sockets;
mod ops;
mod shards;
pub(crate) mod socket_number;
pub(crate) mod stack;
