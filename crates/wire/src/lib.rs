//! Packet headers to bytes and back, checksums, and the table of drop reasons.
#![no_std]
#![forbid(unsafe_code)]

pub mod drops;

pub use drops::{DropCounters, DropReason, Severity};
