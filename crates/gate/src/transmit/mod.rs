//! Transmit classes: the order in which frames leave while the link is slower than their senders.
//!
//! Rules ([`Config`]) sort packets into classes. The best rank goes first, classes of one rank
//! share by weight, and the flows of a class share equally; a flow that has just begun goes before
//! the others (RFC 8290). Ceilings hold for a class and for the whole link, in bits per second.
//!
//! The [`Scheduler`] queues values that stand for frames: the stack owns frames and scheduler.

mod chains;
mod config;
mod flows;
mod pacer;
mod rules;
mod scheduler;

#[cfg(test)]
mod tests;

pub use config::{Class, Config, ConfigError};
pub use flows::Queued;
pub use rules::{Match, PacketMeta, Program, RuleSet};
pub use scheduler::{ClassCounters, FlowId, Released, Scheduler, add_counters};
