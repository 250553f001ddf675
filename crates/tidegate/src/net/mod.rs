//! Handle of a stack, and waiting for its sockets.

pub(crate) mod handle;
pub(crate) mod socket_entry;
pub(crate) mod source;
mod wait;
