//! One network core: the poll loop over port, gate and stack.
//!
//! An [`Engine`] owns a port, the arena its frames live in and a stack, and
//! runs them to completion as the gate says: receive a burst, let the stack
//! take it, serve the timers, transmit. It takes no lock and starts no thread; whoever owns it
//! calls [`Engine::poll`]. When there is nothing to do, [`Idle`] says how to
//! wait, and [`Engine::prepare_sleep`] makes the descriptors of
//! [`Engine::wake_fds`] good to sleep on. [`open()`] makes one of a [`NetConfig`].

pub mod admission;
mod claim;
mod clock;
mod engine;
pub mod guard;
mod handover;
mod idle;
mod idle_watch;
mod interrupt;
mod neighbours;
mod open;
mod prepared;
mod pressure;
mod priority;
mod spread;
mod sys;

pub use claim::{Claim, Claims};
pub use clock::Clock;
pub use engine::{Engine, EngineConfig, EngineCounters, Sleep, Stepped, WakeFds};
pub use handover::Inherited;
pub use idle::{Idle, IdleConfig, Step, pause};
pub use idle_watch::IdleWatch;
pub use neighbours::KernelNeighbours;
pub use open::{NetConfig, OpenError, OpenPort, PortConfig, Wrap};
pub use prepared::{Prepared, open};
pub use priority::Priority;
pub use spread::{PreparedCores, SpreadStacks, open_spread};
