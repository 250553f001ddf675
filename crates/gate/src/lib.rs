//! Receive scheduling and admission.
//!
//! The gate says when to look for packets, how many to take, and which to
//! refuse. It does no I/O and has no clock: the engine and the simulator both
//! tell it the time, ask it what to do next, and tell it how that went.
//!
//! The mechanisms are those of Mogul and Ramakrishnan, "Eliminating receive
//! livelock in an interrupt-driven kernel" (1996), and of the interrupt
//! moderation and NAPI that Jonack and Murta compared (2006).

#![forbid(unsafe_code)]

pub mod admission;
mod config;
mod feedback;
mod gate;
mod moderation;
mod schedule;
mod share;

pub use config::{Config, ConfigError, Mode, Quota, Settings};
pub use feedback::QueueId;
pub use gate::{Gate, GateCounters, Interrupt, Next};
pub use schedule::{Ring, Rings, Turn};
pub use share::CpuShare;
