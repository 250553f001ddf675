//! Packet buffers and rings.
//!
//! [`arena`] holds the frames that packets live in; [`spsc`] is the ring
//! between one producer and one consumer.

pub mod arena;
pub mod spsc;

pub use arena::{Arena, ArenaConfig, ArenaError, Checksum, Frame, FrameSize, HEADROOM_BYTES};
