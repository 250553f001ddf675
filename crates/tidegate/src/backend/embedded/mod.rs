//! Stack in this process: an engine behind a lock.

pub(crate) mod core;
mod exchange;
mod ops;
pub(crate) mod reader_groups;
pub(crate) mod reader_ring;
mod recent_wait;
pub(crate) mod stack;
pub(crate) mod threads;
