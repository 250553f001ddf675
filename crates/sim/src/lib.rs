//! A host under load, in virtual time.
//!
//! A [`Machine`] has processors with priorities, a card with rings and
//! interrupts for each of them, a link, programs, and a load from a seed. The
//! scheduling of receive work is done by the real [`tidegate_gate::Gate`], and
//! a UDP service runs on the real [`tidegate_stack::Stack`], which is given
//! real frames; what the machine adds is what each step costs, in nanoseconds.
//!
//! Nothing here reads a clock or asks for randomness: the same [`Setup`] gives
//! the same figures to the last digit, on any machine.
//!
//! The shape of the host is that of Mogul and Ramakrishnan, "Eliminating
//! receive livelock in an interrupt-driven kernel" (1996), section 4: device
//! interrupts come before software interrupts, these before kernel threads,
//! and programs come last.

#![forbid(unsafe_code)]

mod admission;
mod application;
mod card;
mod core;
mod error;
mod limits;
mod load;
mod machine;
mod polling;
mod processor;
mod report;
mod router;
mod setup;
mod udp;

pub use application::ReaderState;
pub use error::SetupError;
pub use load::{Family, FlowHash, Link, Load, Shape};
pub use machine::Machine;
pub use processor::{Level, Processor, Step, TaskId};
pub use report::{BesideReport, Place, Report};
pub use setup::{Beside, Costs, Placement, Role, Screen, Setup, Tick};
