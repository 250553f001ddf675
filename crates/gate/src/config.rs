//! The settings of the gate: as people write them, and checked.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How packets are looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The shape of 4.2BSD: receive work at the highest priority into a
    /// bounded input queue, protocol work below it, the application last
    /// (Mogul and Ramakrishnan, section 4).
    Interrupt,
    /// As [`Mode::Interrupt`], with a limited rate of interrupts and a short
    /// ring of descriptors (Jonack and Murta).
    Moderated,
    /// The shape of Linux: an interrupt starts polling, with a weight for each
    /// device, and a budget and a time for each round; what is left after a
    /// round goes on at the priority of a program.
    Napi,
    /// An interrupt starts polling; receive, transmit and application rings
    /// take turns with a quota each (Mogul and Ramakrishnan, section 6.4).
    #[default]
    Polled,
    /// Polling without end. A core of its own.
    Dedicated,
}

impl Mode {
    /// Every mode, in the order of the papers.
    pub const ALL: [Self; 5] =
        [Self::Interrupt, Self::Moderated, Self::Napi, Self::Polled, Self::Dedicated];

    /// The name in configuration files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "interrupt",
            Self::Moderated => "moderated",
            Self::Napi => "napi",
            Self::Polled => "polled",
            Self::Dedicated => "dedicated",
        }
    }

    /// Whether packets wait in an input queue between receive work and
    /// protocol work.
    pub fn has_input_queue(self) -> bool {
        matches!(self, Self::Interrupt | Self::Moderated)
    }
}

/// The most packets that one turn of a ring may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quota {
    /// So many.
    Packets(u32),
    /// As many as there are.
    Unlimited,
}

impl Quota {
    /// The quota as a number; [`u32::MAX`] when there is none.
    #[inline]
    pub fn packets(self) -> u32 {
        match self {
            Self::Packets(packets) => packets,
            Self::Unlimited => u32::MAX,
        }
    }
}

impl Serialize for Quota {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Packets(packets) => serializer.serialize_u32(*packets),
            Self::Unlimited => serializer.serialize_str("unlimited"),
        }
    }
}

impl<'de> Deserialize<'de> for Quota {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        enum Word {
            Unlimited,
        }
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a number of packets, or \"unlimited\"")]
        enum Either {
            Packets(u32),
            Word(Word),
        }
        Ok(match Either::deserialize(deserializer)? {
            Either::Packets(packets) => Self::Packets(packets),
            Either::Word(Word::Unlimited) => Self::Unlimited,
        })
    }
}

impl std::str::FromStr for Quota {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if text == "unlimited" {
            return Ok(Self::Unlimited);
        }
        text.parse().map(Self::Packets).map_err(|_| ConfigError::NotAQuota(text.to_owned()))
    }
}

/// The settings of the gate as they stand in a configuration file, section
/// `[gate]`. [`Settings::new`] checks them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// How packets are looked for.
    pub mode: Mode,
    /// The most packets of one turn of a receive ring.
    pub receive_quota: Quota,
    /// The most packets of one turn of a transmit ring.
    pub transmit_quota: Quota,
    /// The most requests of one turn of an application's ring.
    pub application_quota: Quota,
    /// Whether a queue that fills stops receiving.
    pub feedback: bool,
    /// Receiving stops when a queue is so full, in percent.
    pub high_mark_percent: u32,
    /// Receiving goes on when the queue is no fuller than this, in percent.
    pub low_mark_percent: u32,
    /// Receiving goes on when the queue's reader took nothing for so long.
    pub feedback_timeout_us: u64,
    /// The share of the processor that packets may take, in percent.
    pub cpu_share_percent: u32,
    /// The period that the share is kept in.
    pub cpu_period_us: u64,
    /// Modes `interrupt` and `moderated`: the packets that the queue between
    /// receive work and protocol work holds.
    pub input_queue: u32,
    /// Mode `moderated`: the most interrupts per second.
    pub interrupts_per_second: u32,
    /// Mode `moderated`: the packets that the card holds between interrupts.
    pub descriptors: u32,
    /// Mode `napi`: the most packets of one device before the next has its turn.
    pub weight: u32,
    /// Mode `napi`: the most packets of one round.
    pub budget: u32,
    /// Mode `napi`: the longest round.
    pub round_us: u64,
}

impl Default for Config {
    /// Polled, with the numbers of the papers: quota and weight 64, budget 300
    /// and 8,000 interrupts per second (Jonack and Murta), marks 75 and 25 %,
    /// time-out 1 ms, period 10 ms (Mogul and Ramakrishnan), rounds of 2 ms
    /// and a queue of 50 (Linux and 4.2BSD).
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            receive_quota: Quota::Packets(64),
            transmit_quota: Quota::Packets(64),
            application_quota: Quota::Packets(64),
            feedback: true,
            high_mark_percent: 75,
            low_mark_percent: 25,
            feedback_timeout_us: 1000,
            cpu_share_percent: 100,
            cpu_period_us: 10_000,
            input_queue: 50,
            interrupts_per_second: 8000,
            descriptors: 128,
            weight: 64,
            budget: 300,
            round_us: 2000,
        }
    }
}

/// Why settings are refused. Names are those of the configuration file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A number that must be above zero is zero.
    #[error("{name} is 0, so nothing would ever be taken: give at least 1")]
    Zero {
        /// The name of the setting.
        name: &'static str,
    },
    /// A percentage is out of its range.
    #[error("{name} is {percent}: give a percentage from {least} to 100")]
    Percent {
        /// The name of the setting.
        name: &'static str,
        /// What was given.
        percent: u32,
        /// The least that makes sense.
        least: u32,
    },
    /// The low mark is not below the high mark.
    #[error(
        "low-mark-percent is {low} and high-mark-percent is {high}: the low mark must be below \
         the high mark, else receiving stops and never goes on"
    )]
    Marks {
        /// The low mark.
        low: u32,
        /// The high mark.
        high: u32,
    },
    /// The mode has no polling loop to stop.
    #[error(
        "cpu-share-percent is {percent}, but mode {} takes packets at interrupt priority and \
         cannot be held to a share: choose mode polled", .mode.name()
    )]
    ShareNeedsPolling {
        /// The share.
        percent: u32,
        /// The mode.
        mode: Mode,
    },
    /// A round is not longer than one device's turn.
    #[error(
        "budget is {budget} and weight is {weight}: the budget of a round must be at least the weight of one device"
    )]
    Budget {
        /// The budget.
        budget: u32,
        /// The weight.
        weight: u32,
    },
    /// The text is no quota.
    #[error("`{0}` is no quota: give a number of packets, or `unlimited`")]
    NotAQuota(String),
}

/// Settings that make sense.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings(Config);

impl Settings {
    /// Checks a configuration.
    ///
    /// # Errors
    /// [`ConfigError`] says which setting is wrong and why.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let above_zero = [
            ("receive-quota", u64::from(config.receive_quota.packets())),
            ("transmit-quota", u64::from(config.transmit_quota.packets())),
            ("application-quota", u64::from(config.application_quota.packets())),
            ("feedback-timeout-us", config.feedback_timeout_us),
            ("cpu-period-us", config.cpu_period_us),
            ("input-queue", u64::from(config.input_queue)),
            ("interrupts-per-second", u64::from(config.interrupts_per_second)),
            ("descriptors", u64::from(config.descriptors)),
            ("weight", u64::from(config.weight)),
            ("budget", u64::from(config.budget)),
            ("round-us", config.round_us),
        ];
        if let Some(&(name, _)) = above_zero.iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::Zero { name });
        }
        let percentages = [
            ("high-mark-percent", config.high_mark_percent, 1),
            ("low-mark-percent", config.low_mark_percent, 0),
            ("cpu-share-percent", config.cpu_share_percent, 1),
        ];
        if let Some(&(name, percent, least)) =
            percentages.iter().find(|(_, percent, least)| !(*least..=100).contains(percent))
        {
            return Err(ConfigError::Percent { name, percent, least });
        }
        let (low, high) = (config.low_mark_percent, config.high_mark_percent);
        if low >= high {
            return Err(ConfigError::Marks { low, high });
        }
        let (percent, mode) = (config.cpu_share_percent, config.mode);
        if percent < 100 && mode != Mode::Polled {
            return Err(ConfigError::ShareNeedsPolling { percent, mode });
        }
        let (budget, weight) = (config.budget, config.weight);
        if budget < weight {
            return Err(ConfigError::Budget { budget, weight });
        }
        Ok(Self(config))
    }

    /// The settings, to read.
    pub fn config(&self) -> &Config {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut Config)) -> ConfigError {
        let mut config = Config::default();
        change(&mut config);
        Settings::new(config).expect_err("must be refused")
    }

    #[test]
    fn the_default_makes_sense_in_every_mode() {
        for mode in Mode::ALL {
            let config = Config { mode, ..Config::default() };
            assert_eq!(Settings::new(config.clone()).unwrap().config(), &config);
        }
    }

    #[test]
    fn nonsense_is_refused_with_its_reason() {
        let refusals = [
            (refused(|c| c.receive_quota = Quota::Packets(0)), "receive-quota is 0"),
            (refused(|c| c.cpu_share_percent = 0), "cpu-share-percent is 0"),
            (refused(|c| c.cpu_share_percent = 101), "from 1 to 100"),
            (refused(|c| c.low_mark_percent = 80), "must be below"),
            (refused(|c| c.low_mark_percent = 75), "must be below"),
            (refused(|c| c.budget = 10), "at least the weight"),
            (refused(|c| c.feedback_timeout_us = 0), "feedback-timeout-us is 0"),
            (
                refused(|c| {
                    c.mode = Mode::Interrupt;
                    c.cpu_share_percent = 50;
                }),
                "choose mode polled",
            ),
        ];
        for (error, words) in refusals {
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn it_reads_what_it_writes() {
        let config = Config { transmit_quota: Quota::Unlimited, ..Config::default() };
        let text = toml::to_string(&config).unwrap();
        assert!(text.contains("transmit-quota = \"unlimited\""), "{text}");
        assert_eq!(toml::from_str::<Config>(&text).unwrap(), config);
        assert!(toml::from_str::<Config>("receive-quota = \"many\"").is_err());
        assert!(toml::from_str::<Config>("quota = 5").is_err(), "unknown names are errors");
        assert_eq!("unlimited".parse(), Ok(Quota::Unlimited));
        assert_eq!("7".parse(), Ok(Quota::Packets(7)));
        assert!("-1".parse::<Quota>().is_err());
    }
}
