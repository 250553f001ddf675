//! The settings of admission: as people write them, and checked.

use serde::{Deserialize, Serialize};

use super::class::{CLASSES_MAX, ClassName, Classes, OTHERS, Terms};
use super::matching::{Match, ProtocolMatch};

/// The most rules of all classes together.
pub const RULES_MAX: usize = 32;

/// A class as it stands in a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Class {
    /// Its name, up to 31 bytes.
    pub name: String,
    /// Which packets are in it; one rule that matches is enough. Every packet,
    /// when there is no rule.
    #[serde(rename = "match", default)]
    pub rules: Vec<Match>,
    /// Who goes first: 0 before 1. Classes of one rank share fairly.
    #[serde(default)]
    pub rank: u8,
    /// So many packets per second are admitted whatever the rank. What the
    /// class does not ask for is lent to the others.
    #[serde(default)]
    pub guaranteed_pps: u64,
    /// No more packets per second than this are admitted while not everything
    /// can be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceiling_pps: Option<u64>,
    /// Is left alone: always let in, and no part of what is shared out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exempt: bool,
}

/// The settings of admission as they stand in a configuration file, section
/// `[admission]`. [`super::Admission::new`] checks them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// The classes, in the order in which they are tried. What none of them
    /// takes is in a class of its own, `others`, behind all ranks.
    #[serde(rename = "class")]
    pub classes: Vec<Class>,
    /// How many sources are remembered; at most 32,768.
    pub known_sources: u32,
    /// A source is known when it was seen in two of these periods in a row.
    pub learning_period_ms: u64,
    /// A source is forgotten when it was not seen for twice as long.
    pub known_lifetime_s: u64,
    /// Packets are refused once a queue is so full, in percent, or a packet was
    /// lost late.
    pub high_mark_percent: u32,
    /// More is admitted while queues are no fuller than this, in percent.
    pub low_mark_percent: u32,
    /// Everything is admitted again when nothing was refused for so long.
    pub calm_after_ms: u64,
}

impl Config {
    /// How often [`super::Admission::on_period`] should be called.
    pub const PERIOD_NS: u64 = 5_000_000;
}

impl Default for Config {
    /// Neighbour and control traffic first, then those who were seen before,
    /// strangers last. A trickle of strangers is always let in: some of them
    /// are the known ones of tomorrow.
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
                class("strangers", vec![], 2, 100, None),
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

/// Why settings are refused. Names are those of the configuration file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A class without a name, or with one that is too long.
    #[error("class {number} has the name {name:?}: give it one of 1 to 31 bytes")]
    Name {
        /// Which class, counted from 1.
        number: usize,
        /// What it is called.
        name: String,
    },
    /// Two classes of one name.
    #[error("two classes are called `{0}`: give one of them another name")]
    Doubled(String),
    /// The name of the class for the rest.
    #[error(
        "`{OTHERS}` is the class of what no other class takes: give the class another name, or \
         leave out its rules"
    )]
    Reserved,
    /// Too many classes.
    #[error("{0} classes are too many: at most {CLASSES_MAX}, with the one for the rest")]
    TooManyClasses(usize),
    /// Too many rules.
    #[error("{0} rules are too many: at most {RULES_MAX} in all classes together")]
    TooManyRules(usize),
    /// The guaranteed rate is above the ceiling.
    #[error(
        "class `{class}`: guaranteed-pps {guaranteed_pps} is above ceiling-pps {ceiling_pps}: \
         raise the ceiling"
    )]
    GuaranteedAboveCeiling {
        /// The class.
        class: String,
        /// What it is to get at least.
        guaranteed_pps: u64,
        /// What it is to get at most.
        ceiling_pps: u64,
    },
    /// A ceiling of nothing.
    #[error("class `{0}`: ceiling-pps 0 would never let anything in: give at least 1")]
    ZeroCeiling(String),
    /// A class that is left alone and yet has rates.
    #[error(
        "class `{0}` is exempt, so rank, guaranteed-pps and ceiling-pps have no meaning: leave \
         them out"
    )]
    ExemptWithRates(String),
    /// A class that says the same as another, or can never match.
    #[error(
        "class `{class}` can never match: `{covered_by}` before it takes all of it; put \
             `{class}` first, or make `{covered_by}` narrower"
    )]
    Overlap {
        /// The class.
        class: String,
        /// The class that takes its packets.
        covered_by: String,
    },
    /// A rule that makes no sense.
    #[error("class `{class}`: {fault}")]
    Rule {
        /// The class.
        class: String,
        /// What is wrong with it.
        fault: String,
    },
    /// A setting is zero.
    #[error("{0} is 0: give at least 1")]
    Zero(&'static str),
    /// The marks are the wrong way round.
    #[error(
        "low-mark-percent {low} and high-mark-percent {high}: the low mark must be under the \
         high one, and the high one at most 100"
    )]
    Marks {
        /// The low mark.
        low: u32,
        /// The high mark.
        high: u32,
    },
}

impl Config {
    /// Checks everything and makes classes of it.
    pub(super) fn check(&self) -> Result<Classes, ConfigError> {
        self.check_numbers()?;
        let mut classes = Classes::default();
        let mut seen: Vec<(&str, &Match)> = Vec::new();
        for (at, class) in self.classes.iter().enumerate() {
            let name = ClassName::new(&class.name)
                .ok_or_else(|| ConfigError::Name { number: at + 1, name: class.name.clone() })?;
            if self.classes[..at].iter().any(|other| other.name == class.name) {
                return Err(ConfigError::Doubled(class.name.clone()));
            }
            class.check_rates()?;
            for rule in class.all_rules() {
                if let Some(fault) = rule.fault() {
                    return Err(ConfigError::Rule { class: class.name.clone(), fault });
                }
                if let Some((other, _)) = seen.iter().find(|(_, earlier)| earlier.covers(rule)) {
                    let covered_by = (*other).to_owned();
                    return Err(ConfigError::Overlap { class: class.name.clone(), covered_by });
                }
                seen.push((&class.name, rule));
            }
            classes.push(class.terms(name), class.all_rules());
        }
        if !seen.iter().any(|(_, rule)| **rule == Match::default()) {
            if self.classes.iter().any(|class| class.name == OTHERS) {
                return Err(ConfigError::Reserved);
            }
            classes.push_others();
        }
        match (classes.len(), classes.rules().len()) {
            (classes, _) if classes > CLASSES_MAX => Err(ConfigError::TooManyClasses(classes)),
            (_, rules) if rules > RULES_MAX => Err(ConfigError::TooManyRules(rules)),
            _ => Ok(classes),
        }
    }

    fn check_numbers(&self) -> Result<(), ConfigError> {
        let (low, high) = (self.low_mark_percent, self.high_mark_percent);
        if low >= high || high > 100 {
            return Err(ConfigError::Marks { low, high });
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

/// What a class without rules matches.
static EVERYTHING: [Match; 1] =
    [Match { protocol: None, port: None, source: None, known: None, size: None }];

impl Class {
    fn terms(&self, name: ClassName) -> Terms {
        Terms {
            name,
            rank: self.rank,
            guaranteed_pps: self.guaranteed_pps,
            ceiling_pps: self.ceiling_pps.unwrap_or(u64::MAX),
            exempt: self.exempt,
        }
    }

    /// The rules; the one that matches everything, when there are none.
    fn all_rules(&self) -> &[Match] {
        if self.rules.is_empty() { &EVERYTHING } else { &self.rules }
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
