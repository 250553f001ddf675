//! Handle of a stack, and waiting for its sockets.

pub(crate) mod handle;
pub(crate) mod source;
mod wait;
