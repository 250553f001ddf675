//! Admission control: selects the packets to serve under overload.
//!
//! Rules ([`Config`]) sort packets into classes. While all packets can be served, none is
//! refused and only a sample is examined, to learn the usual sources ([`KnownSources`]).
//!
//! When queues fill or packets are dropped late, each class gets a rate. Guaranteed rates come
//! first; the demand of each class follows in the order of ranks, so the last rank gets the
//! remainder. The total follows the rate that is actually served. It falls at once when queues
//! fill and rises slowly when queues are short, so that higher ranks do not wait behind lower
//! ranks. At first only the last rank is limited; the rank before it is limited only if packets
//! are still lost. Within a class no source gets more than its fair share.
//!
//! Mogul and Ramakrishnan (1996) drop the packets that arrive last, and so do Jonack and Murta
//! (2006). Both leave open the choice of packets to drop; this module makes that choice.
//!
//! The source address is all that a datagram says about its sender, and may be spoofed. An
//! attacker who knows a known source can take that source's share, and no more.

mod bucket;
mod busy_rate;
mod class;
mod config;
mod contention;
mod controller;
mod hash;
mod known_sources;
mod limited_ranks;
mod limiter;
mod matching;
mod packet_meta;
mod payload;
mod policy;
mod pressure;
mod source_share;

pub use bucket::Bucket;
pub use class::{ClassLimit, ClassName, Classes, Limits, MAX_CLASSES, PacketRate, RateLimit};
pub use config::{Class, Config, ConfigError, MAX_RULES};
pub use hash::{SourceId, SourceKey};
pub use known_sources::{KnownSources, MAX_KNOWN_BITS};
pub use limiter::{LimitDecision, Limiter, RefusalReason};
pub use matching::{CompiledRule, Match, NumberRange, ProtocolMatch};
pub use packet_meta::{PacketKind, PacketMeta};
pub use payload::{CompiledPayload, PAYLOAD_WINDOW, PayloadBytes};
pub use policy::{Admission, AdmissionVerdict, ClassCounters};
pub use pressure::{BacklogMeter, Pressure};
pub use source_share::SOURCE_BUCKETS_PER_ROW;
pub(crate) use source_share::SourceShare;

#[cfg(test)]
mod tests;
