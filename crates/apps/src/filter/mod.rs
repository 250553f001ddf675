//! A packet filter: a separate process that passes or refuses each packet that a router would
//! forward.
//!
//! It is the `screend` of Mogul, "Simple and flexible datagram access controls for Unix-based
//! gateways" (1989), which Mogul and Ramakrishnan (1996) used to show livelock. The router keeps
//! the packet and sends its first bytes to the filter through a queue of 32; the filter returns a
//! verdict. A Unix socket of type `SOCK_SEQPACKET` connects the two. The filter is trusted with
//! its verdicts only: it neither sees nor names the memory that holds packets. Without a filter
//! that answers, no packet passes.

mod link;
mod message;
mod rules;
mod server;

pub use link::{FilterConfig, FilterCounters, FilterLink};
pub use message::QUEUE_PACKETS;
pub use rules::{
    FilterAction, FilterRule, FilterRules, FilterRulesError, PortRange, ProtocolMatch, Verdict,
};
pub use server::{FilterError, FilterReloader, FilterReport, FilterServer};
