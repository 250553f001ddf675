//! Validated classes, in the form that classification uses.

use super::matching::{CompiledRule, Match};
use super::packet_meta::{PacketKind, PacketMeta};

/// Maximum number of classes, the default class included.
pub const MAX_CLASSES: usize = 16;

/// Name of the default class, for packets that match no configured class.
pub(super) const DEFAULT_CLASS_NAME: &str = "others";

/// Class name: 1 to 31 bytes without control characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassName(String);

impl ClassName {
    pub(crate) fn new(name: &str) -> Option<Self> {
        let fits = (1..=31).contains(&name.len()) && !name.chars().any(char::is_control);
        fits.then(|| Self(name.to_owned()))
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Configured rank and rates of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClassPolicy {
    pub(super) name: ClassName,
    pub(super) rank: u8,
    pub(super) guaranteed_pps: u64,
    pub(super) ceiling_pps: u64,
    pub(super) exempt: bool,
}

/// Classes in matching order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Classes {
    policies: Vec<ClassPolicy>,
    rules: Vec<CompiledRule>,
    uses_known_sources: bool,
}

impl Classes {
    pub(super) fn push(&mut self, policy: ClassPolicy, rules: &[Match]) {
        let class = self.policies.len();
        self.policies.push(policy);
        self.rules.extend(rules.iter().map(|rule| rule.compile(class)));
        self.uses_known_sources = self.rules.iter().any(CompiledRule::uses_known_sources);
    }

    pub(super) fn push_default_class(&mut self) {
        let last_rank = self.policies.iter().map(|policy| policy.rank).max().unwrap_or(0);
        let name = ClassName(DEFAULT_CLASS_NAME.to_owned());
        let rank = last_rank.saturating_add(1);
        let policy =
            ClassPolicy { name, rank, guaranteed_pps: 0, ceiling_pps: u64::MAX, exempt: false };
        self.push(policy, &[Match::default()]);
    }

    /// Number of classes.
    #[expect(clippy::len_without_is_empty, reason = "there is always a default class")]
    pub fn len(&self) -> usize {
        self.policies.len()
    }

    /// Returns the class names, in matching order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.policies.iter().map(|policy| policy.name.as_str())
    }

    pub(super) fn policies(&self) -> &[ClassPolicy] {
        &self.policies
    }

    /// Returns the rules in matching order. The last rule matches every packet.
    pub fn rules(&self) -> &[CompiledRule] {
        &self.rules
    }

    /// Class of malformed packets: the class of the rule that matches every packet.
    pub fn default_class(&self) -> usize {
        self.rules.last().map_or(0, |rule| rule.class.into())
    }

    /// Returns the class of a packet. `known` returns true if the packet's source is known;
    /// the closure is called only if a rule depends on that.
    #[inline]
    pub(super) fn classify(&self, meta: &PacketMeta<'_>, known: impl FnOnce() -> bool) -> usize {
        if meta.kind == PacketKind::Malformed {
            return self.default_class();
        }
        let known = self.uses_known_sources && known();
        let rule = self.rules.iter().find(|rule| rule.matches(meta, known));
        rule.map_or_else(|| self.default_class(), |rule| rule.class.into())
    }
}

/// Rate limit of a class or a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateLimit {
    /// No limit.
    Unlimited,
    /// At most this rate.
    Limited(PacketRate),
    /// This rate, and more while the total has room: while nobody else wants the rest.
    Shared(PacketRate),
    /// No rate of its own: admitted only while the total has room.
    Closed,
}

/// Limits in force for a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassLimit {
    /// Limit of the class as a whole.
    pub class: RateLimit,
    /// Share of each source in the class: [`RateLimit::Limited`], or none. A source above its
    /// share is admitted while the class has room. Without effect unless the class is limited.
    pub source: RateLimit,
}

impl ClassLimit {
    /// No limits.
    pub const UNLIMITED: Self = Self { class: RateLimit::Unlimited, source: RateLimit::Unlimited };
}

/// Limits in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Rate of all classes together whose limit is [`RateLimit::Shared`] or [`RateLimit::Closed`].
    /// Without it no class exceeds its own rate.
    pub total: Option<PacketRate>,
    /// Limits of the classes.
    pub classes: PerClass<ClassLimit>,
}

impl Limits {
    /// No limits.
    pub const UNLIMITED: Self = Self { total: None, classes: [ClassLimit::UNLIMITED; MAX_CLASSES] };
}

/// Packet rate as the two parameters of a [`Bucket`](super::Bucket).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketRate {
    /// Time between two packets at the rate.
    pub interval_ns: u64,
    /// Burst tolerance: maximum time by which a packet may be early.
    pub burst_ns: u64,
}

/// Burst tolerance of a source, of the total, and of a class that gets less than its demand. Sources
/// above their shares may use half of that of their class.
const SHORT_BURST_NS: u64 = 2_000_000;
/// Burst tolerance of a class that gets its full demand. Packets arrive in bursts when the
/// receiver is busy.
const LONG_BURST_NS: u64 = 50_000_000;
/// Minimum burst tolerance, in packets.
const MIN_BURST_PACKETS: u64 = 4;

impl PacketRate {
    /// Returns the parameters of a rate above zero, with the short burst tolerance.
    pub fn from_pps(rate_pps: u64) -> Self {
        Self::with_burst(rate_pps, SHORT_BURST_NS)
    }

    /// Returns the parameters of a rate above the demand, with the long burst tolerance.
    pub(super) fn with_long_burst(rate_pps: u64) -> Self {
        Self::with_burst(rate_pps, LONG_BURST_NS)
    }

    fn with_burst(rate_pps: u64, burst_ns: u64) -> Self {
        let interval_ns = 1_000_000_000_u64.div_ceil(rate_pps.max(1));
        Self { interval_ns, burst_ns: burst_ns.max(interval_ns * MIN_BURST_PACKETS) }
    }

    /// Returns the rate in packets per second.
    pub fn rate_pps(self) -> u64 {
        1_000_000_000 / self.interval_ns.max(1)
    }
}

/// Array with one value per class.
pub(super) type PerClass<T> = [T; MAX_CLASSES];
