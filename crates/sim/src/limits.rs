//! The most that a simulated machine has of a thing.

/// The most cores of a machine.
pub(crate) const CORES_MAX: u32 = 1024;
/// The most programs of a service.
pub(crate) const READERS_MAX: u32 = 64;
/// The most entries of a ring or queue.
pub(crate) const QUEUE_MAX: u32 = 1 << 16;
/// The longest single step.
pub(crate) const COST_MAX_NS: u64 = 1_000_000_000;
