//! Admission settings: the configuration file format and its validation.

use super::class::{ClassName, ClassPolicy, Classes, DEFAULT_CLASS_NAME, MAX_CLASSES};
use super::matching::{Match, ProtocolMatch};

/// Maximum number of rules, summed over all classes.
pub const MAX_RULES: usize = 32;

/// Traffic class, as written in a configuration file.
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
    /// Precedence: rank 0 before rank 1. Classes of equal rank share fairly.
    #[cfg_attr(feature = "serde", serde(default))]
    pub rank: u8,
    /// Packets per second that are admitted regardless of rank. The part that the class does
    /// not use is lent to other classes.
    #[cfg_attr(feature = "serde", serde(default))]
    pub guaranteed_pps: u64,
    /// Maximum packets per second while limits are in force; `None` is unlimited.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub ceiling_pps: Option<u64>,
    /// Exempts the class from admission control: always admitted, outside the shared rate.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "std::ops::Not::not"))]
    pub exempt: bool,
}

impl Class {
    /// Class of every packet: rank 0, no rules, no guaranteed rate, no ceiling.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            rules: Vec::new(),
            rank: 0,
            guaranteed_pps: 0,
            ceiling_pps: None,
            exempt: false,
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

    /// Sets the packets per second that are admitted regardless of rank.
    pub fn guaranteed_pps(self, guaranteed_pps: u64) -> Self {
        Self { guaranteed_pps, ..self }
    }

    /// Sets the maximum packets per second under limits; `None` is unlimited.
    pub fn ceiling_pps(self, ceiling_pps: impl Into<Option<u64>>) -> Self {
        Self { ceiling_pps: ceiling_pps.into(), ..self }
    }

    /// Sets whether the class is exempt from admission control.
    pub fn exempt(self, exempt: bool) -> Self {
        Self { exempt, ..self }
    }
}

/// Admission settings: section `[admission]` of a configuration file.
/// [`super::Admission::new`] validates them.
///
/// # Examples
/// ```
/// use tidegate_gate::admission::{Class, Config, Match};
///
/// let office = Match::default().source("192.0.2.0/24".parse::<tidegate_wire::IpCidr>()?);
/// let mut config = Config::default().known_sources(1024);
/// config.classes.insert(0, Class::new("office").rules(vec![office]).guaranteed_pps(500));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields, rename_all = "kebab-case"))]
#[non_exhaustive]
#[must_use]
pub struct Config {
    /// Classes in matching order. Packets that match none of them are in the additional
    /// class `others`, whose rank is last.
    #[cfg_attr(feature = "serde", serde(rename = "class"))]
    pub classes: Vec<Class>,
    /// Number of sources that are remembered; at most 32,768.
    pub known_sources: u32,
    /// Length of a learning period. A source seen in two consecutive periods becomes known.
    pub learning_period_ms: u64,
    /// Lifetime of a known source. A source is forgotten when unseen for two lifetimes.
    pub known_lifetime_s: u64,
    /// Queue fill level at which packets are refused, in percent. A late drop has the same
    /// effect.
    pub high_mark_percent: u32,
    /// Queue fill level up to which the admitted rate is raised, in percent.
    pub low_mark_percent: u32,
    /// Time without refused packets after which all limits are lifted.
    pub calm_after_ms: u64,
}

impl Config {
    /// Recommended interval between two calls of [`super::Admission::on_period`].
    pub const PERIOD_NS: u64 = 5_000_000;

    /// Sets the classes in matching order.
    pub fn classes(self, classes: Vec<Class>) -> Self {
        Self { classes, ..self }
    }

    /// Sets the number of sources that are remembered; at most 32,768.
    pub fn known_sources(self, known_sources: u32) -> Self {
        Self { known_sources, ..self }
    }

    /// Sets the length of a learning period, in milliseconds.
    pub fn learning_period_ms(self, learning_period_ms: u64) -> Self {
        Self { learning_period_ms, ..self }
    }

    /// Sets the lifetime of a known source, in seconds.
    pub fn known_lifetime_s(self, known_lifetime_s: u64) -> Self {
        Self { known_lifetime_s, ..self }
    }

    /// Sets the queue fill level at which packets are refused, in percent.
    pub fn high_mark_percent(self, high_mark_percent: u32) -> Self {
        Self { high_mark_percent, ..self }
    }

    /// Sets the queue fill level up to which the rate is raised, in percent.
    pub fn low_mark_percent(self, low_mark_percent: u32) -> Self {
        Self { low_mark_percent, ..self }
    }

    /// Sets the time without refused packets after which limits are lifted, in milliseconds.
    pub fn calm_after_ms(self, calm_after_ms: u64) -> Self {
        Self { calm_after_ms, ..self }
    }
}

impl Default for Config {
    /// Neighbour and control traffic first, then known sources, then unknown sources. A small
    /// rate of unknown sources is always admitted, because some of them become known sources.
    fn default() -> Self {
        let protocol = |protocol| vec![Match { protocol: Some(protocol), ..Match::default() }];
        let class = |name: &str, rules, rank, guaranteed_pps, ceiling_pps| Class {
            name: name.into(),
            rules,
            rank,
            guaranteed_pps,
            ceiling_pps,
            exempt: false,
        };
        let known = vec![Match { known: Some(true), ..Match::default() }];
        Self {
            classes: vec![
                class("neighbour", protocol(ProtocolMatch::NEIGHBOUR), 0, 1000, Some(10_000)),
                class("icmp", protocol(ProtocolMatch::ICMP), 0, 100, Some(1000)),
                class("known", known, 1, 0, None),
                class("unknown", vec![], 2, 100, None),
            ],
            known_sources: 16_384,
            learning_period_ms: 1000,
            known_lifetime_s: 3600,
            high_mark_percent: 75,
            low_mark_percent: 25,
            calm_after_ms: 1000,
        }
    }
}

/// Error in the admission settings. Names are the configuration file's keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The class name is empty, too long or contains control characters.
    #[error("class {number} has the invalid name {name:?}: use 1 to 31 bytes")]
    InvalidName {
        /// Position of the class in the file, counted from 1.
        number: usize,
        /// Rejected name.
        name: String,
    },
    /// Two classes have the same name.
    #[error("two classes have the name `{0}`: rename one of them")]
    DuplicateName(String),
    /// The name is reserved for the default class.
    #[error(
        "`{DEFAULT_CLASS_NAME}` is reserved for packets that match no other class: rename the class, or \
         leave out its rules"
    )]
    ReservedName,
    /// More than [`MAX_CLASSES`] classes, the default class included.
    #[error("too many classes: {0}; at most {MAX_CLASSES}, including the default class")]
    TooManyClasses(usize),
    /// More than [`MAX_RULES`] rules.
    #[error("too many rules: {0}; at most {MAX_RULES} in all classes together")]
    TooManyRules(usize),
    /// The guaranteed rate is above the ceiling.
    #[error(
        "class `{class}`: guaranteed-pps {guaranteed_pps} is above ceiling-pps {ceiling_pps}: \
         raise the ceiling"
    )]
    GuaranteedAboveCeiling {
        /// Class name.
        class: String,
        /// Guaranteed rate, in packets per second.
        guaranteed_pps: u64,
        /// Ceiling, in packets per second.
        ceiling_pps: u64,
    },
    /// The ceiling is zero.
    #[error("class `{0}`: ceiling-pps 0 would admit no packet: give at least 1")]
    ZeroCeiling(String),
    /// An exempt class has a rank or rates.
    #[error(
        "class `{0}` is exempt, so rank, guaranteed-pps and ceiling-pps have no effect: leave \
         them out"
    )]
    ExemptWithRates(String),
    /// An earlier class matches every packet of a rule of this class.
    #[error(
        "class `{class}` can never match: `{covered_by}` before it matches all its packets; put \
             `{class}` first, or make `{covered_by}` narrower"
    )]
    UnreachableClass {
        /// Class that can never match.
        class: String,
        /// Earlier class that matches the same packets.
        covered_by: String,
    },
    /// A rule is invalid.
    #[error("class `{class}`: {fault}")]
    InvalidRule {
        /// Class of the rule.
        class: String,
        /// Description of the mistake.
        fault: String,
    },
    /// The setting with this key is zero.
    #[error("{0} is 0: give at least 1")]
    Zero(&'static str),
    /// The low mark is not below the high mark, or the high mark is above 100.
    #[error(
        "low-mark-percent {low} and high-mark-percent {high}: the low mark must be under the \
         high one, and the high one at most 100"
    )]
    InvalidMarks {
        /// Low mark, in percent.
        low: u32,
        /// High mark, in percent.
        high: u32,
    },
}

impl Config {
    /// Validates the settings and compiles the classes.
    pub(super) fn compile(&self) -> Result<Classes, ConfigError> {
        self.check_numbers()?;
        let mut classes = Classes::default();
        let mut seen: Vec<(&str, &Match)> = Vec::new();
        for (index, class) in self.classes.iter().enumerate() {
            let name = ClassName::new(&class.name).ok_or_else(|| ConfigError::InvalidName {
                number: index + 1,
                name: class.name.clone(),
            })?;
            if self.classes[..index].iter().any(|other| other.name == class.name) {
                return Err(ConfigError::DuplicateName(class.name.clone()));
            }
            class.check_rates()?;
            for rule in class.all_rules() {
                if let Some(fault) = rule.fault() {
                    return Err(ConfigError::InvalidRule { class: class.name.clone(), fault });
                }
                if let Some((other, _)) = seen.iter().find(|(_, earlier)| earlier.covers(rule)) {
                    let covered_by = (*other).to_owned();
                    return Err(ConfigError::UnreachableClass {
                        class: class.name.clone(),
                        covered_by,
                    });
                }
                seen.push((&class.name, rule));
            }
            classes.push(class.policy(name), class.all_rules());
        }
        if !seen.iter().any(|(_, rule)| **rule == Match::default()) {
            if self.classes.iter().any(|class| class.name == DEFAULT_CLASS_NAME) {
                return Err(ConfigError::ReservedName);
            }
            classes.push_default_class();
        }
        match (classes.len(), classes.rules().len()) {
            (classes, _) if classes > MAX_CLASSES => Err(ConfigError::TooManyClasses(classes)),
            (_, rules) if rules > MAX_RULES => Err(ConfigError::TooManyRules(rules)),
            _ => Ok(classes),
        }
    }

    fn check_numbers(&self) -> Result<(), ConfigError> {
        let (low, high) = (self.low_mark_percent, self.high_mark_percent);
        if low >= high || high > 100 {
            return Err(ConfigError::InvalidMarks { low, high });
        }
        for (name, value) in [
            ("known-sources", u64::from(self.known_sources)),
            ("learning-period-ms", self.learning_period_ms),
            ("known-lifetime-s", self.known_lifetime_s),
            ("calm-after-ms", self.calm_after_ms),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero(name));
            }
        }
        Ok(())
    }
}

/// Rule of a class without rules.
static MATCH_ALL: [Match; 1] = [Match {
    protocol: None,
    port: None,
    source: None,
    known: None,
    size: None,
    payload: None,
    payload_at: 0,
}];

impl Class {
    fn policy(&self, name: ClassName) -> ClassPolicy {
        ClassPolicy {
            name,
            rank: self.rank,
            guaranteed_pps: self.guaranteed_pps,
            ceiling_pps: self.ceiling_pps.unwrap_or(u64::MAX),
            exempt: self.exempt,
        }
    }

    /// Returns the rules of the class, or the rule that matches every packet if there are none.
    fn all_rules(&self) -> &[Match] {
        if self.rules.is_empty() { &MATCH_ALL } else { &self.rules }
    }

    fn check_rates(&self) -> Result<(), ConfigError> {
        if self.exempt && (self.rank, self.guaranteed_pps, self.ceiling_pps) != (0, 0, None) {
            return Err(ConfigError::ExemptWithRates(self.name.clone()));
        }
        match self.ceiling_pps {
            Some(0) => Err(ConfigError::ZeroCeiling(self.name.clone())),
            Some(ceiling_pps) if self.guaranteed_pps > ceiling_pps => {
                Err(ConfigError::GuaranteedAboveCeiling {
                    class: self.name.clone(),
                    guaranteed_pps: self.guaranteed_pps,
                    ceiling_pps,
                })
            }
            _ => Ok(()),
        }
    }
}
