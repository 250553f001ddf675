//! Simulator of a host under load, in virtual time.
//!
//! A [`Machine`] consists of processors with priority levels, a NIC with rings and an interrupt
//! for each processor, a link, applications, and a load generated from a seed. Receive work is
//! scheduled by the real [`tidegate_gate::Gate`]. A UDP service runs on the real
//! [`tidegate_stack::Stack`], which receives real frames. The machine adds the cost of each step
//! in nanoseconds.
//!
//! Nothing here reads a clock or a random source: the same [`Setup`] gives the same figures to
//! the last digit on any machine.
//!
//! The structure of the host is that of Mogul and Ramakrishnan, "Eliminating receive livelock in
//! an interrupt-driven kernel" (1996), section 4. Device interrupts have the highest priority,
//! then software interrupts, kernel threads and applications.

#![forbid(unsafe_code)]

mod admission;
mod application;
mod error;
mod limits;
mod load;
mod machine;
mod nic;
mod processor;
mod report;
mod router;
mod service;
mod setup;
mod sim_core;
mod tasks;
mod timers;
mod udp;

pub use application::ReaderState;
pub use error::SetupError;
pub use load::{ArrivalPattern, IpFamily, Link, OfferedLoad, ToeplitzHash};
pub use machine::Machine;
pub use processor::{PriorityLevel, Processor, ProcessorStep, TaskId};
pub use report::{BackgroundReport, DropPoint, SimReport};
pub use setup::{BackgroundTask, Costs, FilterProcess, HostRole, Placement, Setup, Tick};
