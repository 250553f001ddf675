//! State that outlives a stack: snapshots for another process, sockets for another stack of this
//! process.

mod bytes;
mod error;
mod migration;
mod stack;

pub(crate) use bytes::SnapshotBytes;
pub use error::{MigrationError, RestoreError, STATE_VERSION};
pub use migration::{ExtractedSockets, MigrationMap, MigrationRejected, SocketSelection};
pub use stack::StackSnapshot;
