//! Classes as they are used: checked, and in arrays.

use super::facts::{Facts, Kind};
use super::matching::{Match, Rule};

/// The most classes, the one for the rest included.
pub const CLASSES_MAX: usize = 16;

/// The name of the class that takes what no other takes.
pub(super) const OTHERS: &str = "others";

/// The name of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassName(String);

impl ClassName {
    pub(super) fn new(name: &str) -> Option<Self> {
        let fits = (1..=31).contains(&name.len()) && !name.chars().any(char::is_control);
        fits.then(|| Self(name.to_owned()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What the owner said about a class, as numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) name: ClassName,
    pub(super) rank: u8,
    pub(super) guaranteed_pps: u64,
    pub(super) ceiling_pps: u64,
    pub(super) exempt: bool,
}

/// Classes in the order in which they are tried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Classes {
    terms: Vec<Terms>,
    rules: Vec<Rule>,
    asks_known: bool,
}

impl Classes {
    pub(super) fn push(&mut self, terms: Terms, rules: &[Match]) {
        let class = self.terms.len();
        self.terms.push(terms);
        self.rules.extend(rules.iter().map(|rule| rule.compile(class)));
        self.asks_known = self.rules.iter().any(Rule::asks_known);
    }

    pub(super) fn push_others(&mut self) {
        let last = self.terms.iter().map(|terms| terms.rank).max().unwrap_or(0);
        let name = ClassName(OTHERS.to_owned());
        let rank = last.saturating_add(1);
        let terms = Terms { name, rank, guaranteed_pps: 0, ceiling_pps: u64::MAX, exempt: false };
        self.push(terms, &[Match::default()]);
    }

    /// How many classes there are.
    #[expect(clippy::len_without_is_empty, reason = "there is always a class for the rest")]
    pub fn len(&self) -> usize {
        self.terms.len()
    }

    /// The names, in the order in which classes are tried.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.terms.iter().map(|terms| terms.name.as_str())
    }

    pub(super) fn terms(&self) -> &[Terms] {
        &self.terms
    }

    /// The rules in the order in which they are tried. The last one matches
    /// everything.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The class of what cannot be read: that of the rule which matches
    /// everything.
    pub fn rest(&self) -> usize {
        self.rules.last().map_or(0, |rule| rule.class.into())
    }

    /// The class of a packet. `known` tells whether its source is, and is only
    /// asked if a rule wants to know.
    #[inline]
    pub(super) fn classify(&self, facts: &Facts, known: impl FnOnce() -> bool) -> usize {
        if facts.kind == Kind::Malformed {
            return self.rest();
        }
        let known = self.asks_known && known();
        let rule = self.rules.iter().find(|rule| rule.matches(facts, known));
        rule.map_or_else(|| self.rest(), |rule| rule.class.into())
    }
}

/// How much is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// Everything.
    Open,
    /// So much.
    Limited(Pace),
    /// Nothing.
    Closed,
}

/// What holds for a class right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassLimit {
    /// How much of the class is let in.
    pub class: Rate,
    /// How much of each source in it; never [`Rate::Closed`], and of no effect
    /// unless the class is limited.
    pub source: Rate,
}

impl ClassLimit {
    /// Everything is let in.
    pub const OPEN: Self = Self { class: Rate::Open, source: Rate::Open };
}

/// A rate as a [`Bucket`](super::Bucket) takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// The time that one packet takes.
    pub interval_ns: u64,
    /// How far packets may come before their time.
    pub burst_ns: u64,
}

/// Who gets less than it asks for may come so far before its time...
const BURST_NS: u64 = 2_000_000;
/// ... and who gets all that it asks for, so far: packets come in clumps when
/// the receiving side is busy.
const PATIENT_BURST_NS: u64 = 50_000_000;
/// And so many packets at once, where that is longer.
const BURST_PACKETS: u64 = 4;

impl Pace {
    /// The pace of a rate above zero.
    pub fn of(rate_pps: u64) -> Self {
        Self::with_burst(rate_pps, BURST_NS)
    }

    /// The pace of a rate that is more than what is asked for.
    pub(super) fn patient(rate_pps: u64) -> Self {
        Self::with_burst(rate_pps, PATIENT_BURST_NS)
    }

    fn with_burst(rate_pps: u64, burst_ns: u64) -> Self {
        let interval_ns = 1_000_000_000_u64.div_ceil(rate_pps.max(1));
        Self { interval_ns, burst_ns: burst_ns.max(interval_ns * BURST_PACKETS) }
    }

    /// The rate in packets per second.
    pub fn rate_pps(self) -> u64 {
        1_000_000_000 / self.interval_ns.max(1)
    }
}

/// One value for each class.
pub(super) type PerClass<T> = [T; CLASSES_MAX];
