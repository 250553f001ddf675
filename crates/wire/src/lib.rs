//! Packet headers to bytes and back, checksums, and the table of drop reasons.
#![no_std]
#![forbid(unsafe_code)]

pub mod drops;

pub use drops::{DropCounters, DropReason, Severity};

/// What the frames of an interface begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// An Ethernet header.
    Ethernet,
    /// An IPv4 or IPv6 header: a TUN device, or a wire between two stacks.
    Ip,
}
