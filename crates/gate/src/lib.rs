//! Receive scheduling, admission control and transmit classes.
//!
//! The gate decides when to poll for packets, how many to take, and which to refuse. It does no
//! I/O and has no clock. The engine and the simulator pass it the time, ask it for the next
//! action, and report the result.
//!
//! The mechanisms are those of Mogul and Ramakrishnan, "Eliminating receive livelock in an
//! interrupt-driven kernel" (1996), and the interrupt moderation and NAPI that Jonack and Murta
//! compared (2006). [`admission`] chooses packets, [`requests`] chooses requests above the stack.

#![forbid(unsafe_code)]

pub mod admission;
mod config;
mod cpu_share;
mod feedback;
mod gate;
mod moderation;
pub mod requests;
mod schedule;
#[cfg(feature = "serde")]
mod serialize;
pub mod transmit;

pub use config::{Config, ConfigError, Mode, Quota, Settings};
pub use cpu_share::CpuShare;
pub use feedback::QueueId;
pub use gate::{Gate, GateAction, GateCounters, InterruptAction};
pub use schedule::{Ring, RingCounts, Turn};
