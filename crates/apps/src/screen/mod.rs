//! A packet screen: a process of its own that accepts or refuses each packet
//! that a router would forward.
//!
//! It is the `screend` of Mogul, "Simple and flexible datagram access controls
//! for Unix-based gateways" (1989), which Mogul and Ramakrishnan (1996) used
//! to show livelock. The router keeps the packet, and sends the screen the
//! beginning of it through a queue of 32; the screen sends back what to do.
//! The two are joined by a Unix socket of sequenced packets. The screen is not
//! trusted with more than its verdicts: it never sees or names the memory that
//! packets are in. Without a screen that answers, nothing passes.

mod link;
mod message;
mod rules;
mod serve;

pub use link::{QUEUE_PACKETS, ScreenConfig, ScreenCounters, ScreenLink};
pub use rules::{Action, Ports, ProtocolMatch, Rule, Rules, RulesError, Verdict};
pub use serve::{ScreenError, ScreenReport, Screener};
