//! State that outlives a stack: snapshots for another process, sockets for another stack of this
//! process.

mod migration;
mod stack;

pub use migration::{
    ExtractedSockets, MigrationError, MigrationMap, MigrationRejected, SocketSelection,
};
pub use stack::{RestoreError, STATE_VERSION, StackSnapshot};
