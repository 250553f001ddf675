//! Limits of a simulated machine.

/// Maximum number of cores.
pub(crate) const MAX_CORES: u32 = 1024;
/// Maximum number of readers of a service.
pub(crate) const MAX_READERS: u32 = 64;
/// Maximum number of entries of a ring or queue.
pub(crate) const MAX_QUEUE_ENTRIES: u32 = 1 << 16;
/// Maximum duration of a single step.
pub(crate) const MAX_COST_NS: u64 = 1_000_000_000;
