//! Rivera (2013): UDP sockets in multithreaded programs.

pub mod concurrent_reads;
pub mod kernel_locks;
pub mod lock_contention;
pub mod reader_scaling;
pub mod receive_queues;
pub mod receive_trace;
mod stack_readers;
