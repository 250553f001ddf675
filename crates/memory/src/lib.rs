//! Packet buffers and rings.
//!
//! [`arena`] holds the frames that packets live in; [`spsc`] is the ring between
//! one producer and one consumer; [`queues`] are for several of both; [`shared`] has memory
//! and rings between processes; [`fifo`] is the queue of one owner;
//! [`doorbell`] wakes a side that sleeps; [`trim_heap`] gives free memory back.

pub mod arena;
mod copy;
pub mod doorbell;
pub mod fifo;
mod heap;
mod mapping;
pub mod queues;
pub mod shared;
pub mod spsc;
mod sync;

pub use arena::{
    Arena, ArenaConfig, ArenaError, ArenaMemory, Checksum, Frame, FrameSize, HEADROOM_BYTES,
    MAX_SEGMENT_BYTES, PackedChecksum,
};
pub use copy::copy_packet;
pub use doorbell::Doorbell;
pub use fifo::Fifo;
pub use heap::trim_heap;
