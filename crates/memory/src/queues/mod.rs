//! Receive queues between several producers and several readers.
//!
//! A queue is put together from three parts:
//! * a [`Structure`] that holds the packets: [`Single`] and [`Multi`], the two
//!   schemes of Rivera's thesis, with a [`lock`] of any kind; [`Mpmc`], one ring
//!   without locks; [`Stealing`], such a ring for each reader; [`Grid`], a ring
//!   for each pair of a producer and a reader;
//! * an [`Account`] of what it holds, with limits: [`Unlimited`], [`OneLock`] or
//!   [`Reserved`];
//! * a [`Semaphore`] on which readers of an empty queue sleep: [`Eventfd`] or
//!   [`Futex`].
//!
//! ```
//! use tidegate_memory::queues::{self, Futex, Limits, Mpmc, Packet, Reserved, Shape};
//!
//! struct Note(&'static str);
//! impl Packet for Note {
//!     fn bytes(&self) -> usize {
//!         self.0.len()
//!     }
//! }
//!
//! let shape = Shape { producers: 1, readers: 2, capacity: 64 };
//! let limits = Limits::new(64, 1000)?;
//! let mut ends = queues::open::<Mpmc<Note>, Reserved, Futex>(&shape, limits)?;
//! assert!(ends.producers[0].try_push(Note("high water at noon")).is_ok());
//! ends.producers.clear();
//! assert_eq!(ends.readers[1].pop_wait().unwrap().0, "high water at noon");
//! assert!(ends.readers[0].pop_wait().is_none());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod account;
mod bed;
mod grid;
mod list;
pub mod lock;
mod locked;
mod mpmc;
mod queue;
mod stealing;
mod structure;
#[cfg(all(test, not(loom)))]
mod tests;

pub use account::{Account, Held, Limits, LimitsError, OneLock, Reserved, Unlimited};
pub use bed::{Eventfd, Futex, Semaphore};
pub use grid::{Grid, Inputs, Outputs};
pub use locked::{Multi, Place, Single};
pub use mpmc::Mpmc;
pub use queue::{BURST, Ends, Producer, PushError, QueueStatistics, Reader, open, wait_for_room};
pub use stealing::{Stealing, Target};
pub use structure::{Opened, Packet, Shape, Structure};
