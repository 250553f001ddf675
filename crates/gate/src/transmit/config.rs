//! Settings of the transmit classes: the configuration file format and its validation.

use super::rules::{MAX_DSCP, Match, RuleSet};
use super::scheduler::{Scheduler, Terms};
use crate::admission::{ClassName, MAX_CLASSES, MAX_RULES};

/// Name of the class of packets that match no other class.
const DEFAULT_CLASS_NAME: &str = "others";

/// Lowest ceiling: a frame of the largest size takes half a second.
const MIN_CEILING_BPS: u64 = 1_000_000;

/// Highest weight of a class.
const MAX_WEIGHT: u32 = 1000;

/// Transmit class, as written in a configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields, rename_all = "kebab-case"))]
#[non_exhaustive]
#[must_use]
pub struct Class {
    /// Class name, 1 to 31 bytes.
    pub name: String,
    /// Rules of the class. A packet belongs to the class if at least one rule matches; without
    /// rules every packet matches.
    #[cfg_attr(feature = "serde", serde(rename = "match", default))]
    pub rules: Vec<Match>,
    /// Precedence: rank 0 before rank 1.
    #[cfg_attr(feature = "serde", serde(default))]
    pub rank: u8,
    /// Share among the classes of one rank, 1 to 1000.
    #[cfg_attr(feature = "serde", serde(default = "default_weight"))]
    pub weight: u32,
    /// Maximum bits per second; `None` is unlimited.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub ceiling_bps: Option<u64>,
    /// Differentiated services code point that packets of the class get; `None` keeps theirs.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub set_dscp: Option<u8>,
}

#[cfg(feature = "serde")]
fn default_weight() -> u32 {
    1
}

impl Class {
    /// Class of every packet: rank 0, weight 1, no ceiling.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            rules: Vec::new(),
            rank: 0,
            weight: 1,
            ceiling_bps: None,
            set_dscp: None,
        }
    }

    /// Sets the rules; a packet of the class matches at least one.
    pub fn rules(self, rules: Vec<Match>) -> Self {
        Self { rules, ..self }
    }

    /// Sets the precedence: rank 0 before rank 1.
    pub fn rank(self, rank: u8) -> Self {
        Self { rank, ..self }
    }

    /// Sets the share among the classes of one rank.
    pub fn weight(self, weight: u32) -> Self {
        Self { weight, ..self }
    }

    /// Sets the maximum bits per second; `None` is unlimited.
    pub fn ceiling_bps(self, ceiling_bps: impl Into<Option<u64>>) -> Self {
        Self { ceiling_bps: ceiling_bps.into(), ..self }
    }

    /// Sets the code point that packets get; `None` keeps theirs.
    pub fn set_dscp(self, set_dscp: impl Into<Option<u8>>) -> Self {
        Self { set_dscp: set_dscp.into(), ..self }
    }
}

/// Settings of the transmit classes: section `[transmit]` of a configuration file.
///
/// # Examples
/// ```
/// use tidegate_gate::transmit::{Class, Config, Match};
///
/// let answers = Match::default().local_port("53".parse::<tidegate_gate::admission::NumberRange>()?);
/// let classes = vec![Class::new("answers").rules(vec![answers])];
/// let config = Config::default().classes(classes).ceiling_bps(950_000_000);
/// config.check()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields, rename_all = "kebab-case"))]
#[non_exhaustive]
#[must_use]
pub struct Config {
    /// Classes in matching order. Packets that match none of them are in the additional class
    /// `others`, whose rank is last.
    #[cfg_attr(feature = "serde", serde(rename = "class"))]
    pub classes: Vec<Class>,
    /// Maximum bits per second of all classes together, a little below the rate of the slowest link
    /// ahead; `None` sends as fast as the device accepts frames.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub ceiling_bps: Option<u64>,
    /// Time that a datagram waits at most before it is dropped.
    pub max_delay_ms: u64,
}

impl Default for Config {
    /// One class, without ceilings.
    fn default() -> Self {
        Self { classes: Vec::new(), ceiling_bps: None, max_delay_ms: 20 }
    }
}

/// Error in the settings of the transmit classes. Names are the configuration file's keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The class name is empty, too long or contains control characters.
    #[error("transmit class {number} has the invalid name {name:?}: use 1 to 31 bytes")]
    InvalidName {
        /// Position of the class in the file, counted from 1.
        number: usize,
        /// Rejected name.
        name: String,
    },
    /// Two classes have the same name, or a class has that of the default class.
    #[error("the name `{0}` of a transmit class is in use: rename one of the classes")]
    DuplicateName(String),
    /// A class behind a class without rules, which matches every packet.
    #[error("transmit class `{0}` matches every packet: put it last, or give it rules")]
    UnreachableClass(String),
    /// More than [`MAX_CLASSES`] classes, the default class included.
    #[error("too many transmit classes: {0}; at most {MAX_CLASSES}, including the default class")]
    TooManyClasses(usize),
    /// More than [`MAX_RULES`] rules.
    #[error("too many rules of transmit classes: {0}; at most {MAX_RULES} in all classes together")]
    TooManyRules(usize),
    /// A value of a class is out of range.
    #[error("transmit class `{class}`: {fault}")]
    InvalidClass {
        /// Name of the class.
        class: String,
        /// Description of the mistake.
        fault: String,
    },
    /// The ceiling of the link is too low.
    #[error("section [transmit]: ceiling-bps {0} is too low: give at least {MIN_CEILING_BPS}")]
    CeilingTooLow(u64),
    /// The maximum delay is zero.
    #[error("section [transmit]: max-delay-ms is 0: give at least 1")]
    NoDelay,
}

impl Config {
    /// Sets the classes in matching order.
    pub fn classes(self, classes: Vec<Class>) -> Self {
        Self { classes, ..self }
    }

    /// Sets the maximum bits per second of all classes together; `None` is unlimited.
    pub fn ceiling_bps(self, ceiling_bps: impl Into<Option<u64>>) -> Self {
        Self { ceiling_bps: ceiling_bps.into(), ..self }
    }

    /// Sets the time that a datagram waits at most, in milliseconds.
    pub fn max_delay_ms(self, max_delay_ms: u64) -> Self {
        Self { max_delay_ms, ..self }
    }

    /// Gives each of `parts` network cores an equal part of all ceilings: cores share no state.
    pub fn divided(mut self, parts: usize) -> Self {
        let parts = parts.max(1) as u64;
        let ceilings = self.classes.iter_mut().map(|class| &mut class.ceiling_bps);
        for ceiling_bps in ceilings.chain([&mut self.ceiling_bps]).flatten() {
            *ceiling_bps = (*ceiling_bps / parts).max(MIN_CEILING_BPS);
        }
        self
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// [`ConfigError`] says what is wrong and what to do.
    pub fn check(&self) -> Result<(), ConfigError> {
        if let Some(ceiling_bps) = self.ceiling_bps.filter(|&bps| bps < MIN_CEILING_BPS) {
            return Err(ConfigError::CeilingTooLow(ceiling_bps));
        }
        if self.max_delay_ms == 0 {
            return Err(ConfigError::NoDelay);
        }
        for (at, class) in self.classes.iter().enumerate() {
            if ClassName::new(&class.name).is_none() {
                let name = class.name.clone();
                return Err(ConfigError::InvalidName { number: at + 1, name });
            }
            let is_taken = self.classes[..at].iter().any(|other| other.name == class.name);
            if is_taken || class.name == DEFAULT_CLASS_NAME && !class.rules.is_empty() {
                return Err(ConfigError::DuplicateName(class.name.clone()));
            }
            if class.rules.is_empty() && at + 1 < self.classes.len() {
                return Err(ConfigError::UnreachableClass(class.name.clone()));
            }
            if let Some(fault) = class.fault() {
                return Err(ConfigError::InvalidClass { class: class.name.clone(), fault });
            }
        }
        let classes = self.names().count();
        let rules = self.classes.iter().map(|class| class.rules.len()).sum();
        match (classes, rules) {
            (classes, _) if classes > MAX_CLASSES => Err(ConfigError::TooManyClasses(classes)),
            (_, rules) if rules > MAX_RULES => Err(ConfigError::TooManyRules(rules)),
            _ => Ok(()),
        }
    }

    /// Class without rules, which matches the rest of the packets; `None` if it is left out.
    fn last_class(&self) -> Option<&Class> {
        self.classes.last().filter(|class| class.rules.is_empty())
    }

    /// Names of the classes, the default class included.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let others = self.last_class().is_none().then_some(DEFAULT_CLASS_NAME);
        self.classes.iter().map(|class| class.name.as_str()).chain(others)
    }

    /// The rules of all classes.
    pub fn rule_set(&self) -> RuleSet {
        let rules = |(at, class): (usize, &Class)| {
            class.rules.iter().map(|rule| (at as u8, rule.clone())).collect::<Vec<_>>()
        };
        let all = self.classes.iter().enumerate().flat_map(rules).collect();
        RuleSet::new(all, (self.names().count() - 1) as u8)
    }

    /// Empty queues for at most `max_frames` frames, for settings that [`Config::check`] accepts.
    pub fn scheduler<T>(&self, max_frames: usize) -> Scheduler<T> {
        let last_rank = self.classes.iter().map(|class| class.rank).max();
        let others =
            Class::new(DEFAULT_CLASS_NAME).rank(last_rank.map_or(0, |rank| rank.saturating_add(1)));
        let others = self.last_class().is_none().then_some(&others);
        let terms = self.classes.iter().chain(others).map(Class::terms);
        Scheduler::new(self.ceiling_bps, terms, max_frames)
    }
}

impl Class {
    fn terms(&self) -> Terms {
        Terms { rank: self.rank, weight: self.weight.max(1), ceiling_bps: self.ceiling_bps }
    }

    fn fault(&self) -> Option<String> {
        if !(1..=MAX_WEIGHT).contains(&self.weight) {
            return Some(format!("weight is a number from 1 to {MAX_WEIGHT}"));
        }
        if let Some(bps) = self.ceiling_bps.filter(|&bps| bps < MIN_CEILING_BPS) {
            return Some(format!("ceiling-bps {bps} is too low: give at least {MIN_CEILING_BPS}"));
        }
        if self.set_dscp.is_some_and(|dscp| dscp > MAX_DSCP) {
            return Some(format!("set-dscp is a number from 0 to {MAX_DSCP}"));
        }
        self.rules.iter().find_map(Match::fault)
    }
}
