//! Packet buffers and rings.
//!
//! [`arena`] holds the frames that packets live in. [`spsc`] is a ring between one producer and
//! one consumer. [`shared`] has memory and rings between
//! processes. [`fifo`] is a queue with a single owner, [`doorbell`] wakes a sleeping thread,
//! [`own_fd`] hides descriptors from a program, and [`trim_heap`] returns free memory to the kernel.

pub mod arena;
mod copy;
pub mod doorbell;
pub mod fifo;
mod heap;
pub mod lock_meter;
mod mapping;
mod numa;
pub mod own_fd;
pub mod probes;
pub mod shared;
pub mod spsc;
mod sync;
mod ticks;

pub use arena::{
    Arena, ArenaConfig, ArenaError, ArenaMemory, Checksum, Frame, FrameSize, HEADROOM_BYTES,
    MAX_SEGMENT_BYTES, PackedChecksum,
};
pub use copy::copy_packet;
pub use doorbell::Doorbell;
pub use fifo::Fifo;
pub use heap::trim_heap;
pub use numa::{NodePreference, current_node};
pub use own_fd::OwnFd;
