//! Receive queues between several producers and several readers.
//!
//! A queue combines three parts:
//! * a [`Structure`] that holds the packets: [`SingleList`] and [`MultiList`], the two schemes
//!   of Rivera's thesis, with a [`lock`] of any kind; [`MpmcRing`], one lock-free ring;
//!   [`WorkStealing`], such a ring for each reader; [`RingMatrix`], a ring for each pair of a
//!   producer and a reader;
//! * an [`Account`] of the queued packets and bytes, with limits: [`Unlimited`],
//!   [`LockedAccount`] or [`PooledAccount`];
//! * a [`Semaphore`] on which readers of an empty queue sleep: [`Eventfd`] or [`Futex`].
//!
//! ```
//! use tidegate_queues::{
//!     Futex, MpmcRing, Packet, PooledAccount, QueueLimits, QueueShape,
//! };
//!
//! struct Note(&'static str);
//! impl Packet for Note {
//!     fn bytes(&self) -> usize {
//!         self.0.len()
//!     }
//! }
//!
//! let shape = QueueShape { producers: 1, readers: 2, capacity: 64 };
//! let limits = QueueLimits::new(64, 1000)?;
//! let mut ends = tidegate_queues::open::<MpmcRing<Note>, PooledAccount, Futex>(&shape, limits)?;
//! assert!(ends.producers[0].try_push(Note("high water at noon")).is_ok());
//! ends.producers.clear();
//! assert_eq!(ends.readers[1].pop_wait().unwrap().0, "high water at noon");
//! assert!(ends.readers[0].pop_wait().is_none());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod account;
mod list;
pub mod lock;
mod locked;
mod mpmc;
mod parker;
mod queue;
mod ring_matrix;
mod stealing;
mod structure;
mod sync;
#[cfg(all(test, not(loom)))]
mod tests;

pub use account::{
    Account, LockedAccount, PooledAccount, QueueLimits, QueueLimitsError, QueueUsage, Unlimited,
};
pub use locked::{ListCursor, MultiList, SingleList};
pub use mpmc::MpmcRing;
pub use parker::{Eventfd, Futex, Semaphore};
pub use queue::{
    BURST_PACKETS, Producer, PushError, QueueEnds, QueueStatistics, Reader, open, wait_for_space,
};
pub use ring_matrix::{MatrixProducer, MatrixReader, RingMatrix};
pub use stealing::{StealingProducer, WorkStealing};
pub use structure::{Packet, QueueShape, Structure, StructureParts};
