//! What is taken when not everything can be.
//!
//! Packets are sorted into classes by rules ([`Config`]). While everything can
//! be taken, nothing is refused and packets are hardly looked at: a few of them
//! are sampled, so that it is known who usually talks to us ([`Known`]). When
//! queues fill or packets are lost late, each class gets a rate: the guaranteed
//! rates first, then what classes ask for in the order of their ranks, so the
//! last rank gets what is left. The total follows what is really served: it
//! falls at once when queues fill and rises slowly when they are short, so that
//! higher ranks do not wait behind lower ones. Only the last rank is held to its
//! rate at first, the one before it only when packets are lost all the same.
//! Inside a class no source may take more than its fair share.
//!
//! Mogul and Ramakrishnan (1996) drop whatever comes last, and so do Jonack and
//! Murta (2006); both leave open which packets to drop. This is our answer.
//!
//! A source address is all that a datagram says about its sender, and it may be
//! forged. A forger who knows whom we know can take that peer's share, and no
//! more than that.

mod bucket;
mod class;
mod config;
mod controller;
mod facts;
mod hash;
mod known;
mod matching;
mod policy;
mod reach;
mod source_share;

pub use bucket::Bucket;
pub use class::{CLASSES_MAX, ClassLimit, ClassName, Classes, Pace, Rate};
pub use config::{Class, Config, ConfigError, RULES_MAX};
pub use controller::Pressure;
pub use facts::{Facts, Kind};
pub use hash::{Source, SourceKey};
pub use known::{KNOWN_BITS_MAX, Known};
pub use matching::{Match, ProtocolMatch, Range, Rule};
pub use policy::{Admission, ClassCounters, Refusal, Verdict};
pub use source_share::{SOURCE_CELLS, SourceShare};

#[cfg(test)]
mod tests;
