//! Limiter: applies the limits in force to each packet.
//!
//! A share is a bound only while others want the rest. A source within its share may use the whole
//! burst tolerance of its class. Above its share it is admitted only while the bucket of the class
//! is half free, that is, while others leave room. The same holds for classes and the total. The BPF
//! program does the same arithmetic.

use tidegate_wire::DropReason;

use super::bucket::Bucket;
use super::class::{Limits, MAX_CLASSES, PerClass, RateLimit};
use super::hash::{SourceId, SourceKey};
use super::source_share::SourceShare;

/// Reason for which a packet was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalReason {
    /// The rate of the packet's class is zero.
    ClassClosed,
    /// The packet's class has reached its rate.
    ClassRate,
    /// The packet's source has reached its share of the class.
    SourceShare,
}

impl RefusalReason {
    /// Returns the reason in the drop table.
    pub const fn drop_reason(self) -> DropReason {
        match self {
            RefusalReason::ClassClosed => DropReason::AdmissionClassClosed,
            RefusalReason::ClassRate => DropReason::AdmissionRate,
            RefusalReason::SourceShare => DropReason::AdmissionSourceShare,
        }
    }
}

/// Decision about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitDecision {
    /// Admitted. `over_share` is true if the source had used its share.
    Admit {
        /// The source had used its share, but its class or the total had room.
        over_share: bool,
    },
    /// Refused.
    Refuse(RefusalReason),
}

/// Buckets of the total, the classes and the sources.
#[derive(Clone, Debug)]
pub struct Limiter {
    total: Bucket,
    classes: PerClass<Bucket>,
    sources: SourceShare,
}

impl Limiter {
    /// Creates a limiter with empty buckets.
    pub fn new(key: SourceKey) -> Self {
        Self {
            total: Bucket::default(),
            classes: [Bucket::default(); MAX_CLASSES],
            sources: SourceShare::new(key),
        }
    }

    /// Decides about a packet of `source` in `class`, and counts the packet if it is admitted. A
    /// refused packet costs neither its class nor its source any of their rates.
    #[inline]
    pub fn decide(
        &mut self,
        now_ns: u64,
        limits: &Limits,
        class: usize,
        source: SourceId,
    ) -> LimitDecision {
        let limit = &limits.classes[class];
        let (class_rate, shares_total) = match limit.class {
            RateLimit::Unlimited => return LimitDecision::Admit { over_share: false },
            RateLimit::Limited(rate) => (Some(rate), false),
            RateLimit::Shared(rate) => (Some(rate), true),
            RateLimit::Closed => (None, true),
        };
        let source_rate = match limit.source {
            RateLimit::Limited(rate) => Some(rate),
            _ => None,
        };
        let total_rate = limits.total.filter(|_| shares_total);
        let in_share =
            source_rate.is_none_or(|rate| self.sources.has_room(now_ns, source, class, rate));
        let class_has_room = class_rate.is_some_and(|rate| match in_share {
            true => self.classes[class].has_room(now_ns, rate),
            false => self.classes[class].is_half_free(now_ns, rate),
        });
        if !class_has_room && !total_rate.is_some_and(|rate| self.total.is_half_free(now_ns, rate))
        {
            return LimitDecision::Refuse(match class_rate {
                _ if !in_share => RefusalReason::SourceShare,
                None => RefusalReason::ClassClosed,
                Some(_) => RefusalReason::ClassRate,
            });
        }
        if let Some(rate) = total_rate {
            self.total.charge(now_ns, rate);
        }
        if let Some(rate) = class_rate {
            self.classes[class].charge(now_ns, rate);
        }
        if let Some(rate) = source_rate.filter(|_| in_share) {
            self.sources.charge(now_ns, source, class, rate);
        }
        LimitDecision::Admit { over_share: !in_share }
    }
}
