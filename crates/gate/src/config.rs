//! Settings of the gate: the configuration file format and its validation.

/// Receive mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
pub enum Mode {
    /// Scheme of 4.2BSD: receive work at the highest priority into a bounded input queue,
    /// protocol work below it, the application last (Mogul and Ramakrishnan, section 4).
    Interrupt,
    /// Like [`Mode::Interrupt`], with a limited interrupt rate and a short descriptor ring
    /// (Jonack and Murta).
    Moderated,
    /// Scheme of Linux (NAPI): an interrupt starts polling. Each device has a weight, and each
    /// round a budget and a time limit. Work left after a round continues at the priority of a
    /// process.
    Napi,
    /// An interrupt starts polling. Receive, transmit and application rings take turns, each
    /// with a quota (Mogul and Ramakrishnan, section 6.4).
    #[default]
    Polled,
    /// Endless busy-polling on a core of its own.
    Dedicated,
}

impl Mode {
    /// All modes, in the order of the papers.
    pub const ALL: [Self; 5] =
        [Self::Interrupt, Self::Moderated, Self::Napi, Self::Polled, Self::Dedicated];

    /// Returns the name used in configuration files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "interrupt",
            Self::Moderated => "moderated",
            Self::Napi => "napi",
            Self::Polled => "polled",
            Self::Dedicated => "dedicated",
        }
    }

    /// True if packets wait in an input queue between receive work and protocol work.
    pub fn has_input_queue(self) -> bool {
        matches!(self, Self::Interrupt | Self::Moderated)
    }
}

/// Maximum number of packets in one turn of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quota {
    /// At most this many packets.
    Packets(u32),
    /// All waiting packets.
    Unlimited,
}

impl Quota {
    /// Returns the quota as a number; [`u32::MAX`] if unlimited.
    #[inline]
    pub fn packets(self) -> u32 {
        match self {
            Self::Packets(packets) => packets,
            Self::Unlimited => u32::MAX,
        }
    }
}

impl std::str::FromStr for Quota {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if text == "unlimited" {
            return Ok(Self::Unlimited);
        }
        text.parse().map(Self::Packets).map_err(|_| ConfigError::InvalidQuota(text.to_owned()))
    }
}

/// Settings of the gate: section `[gate]` of a configuration file. [`Settings::new`]
/// validates them.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields, rename_all = "kebab-case"))]
#[non_exhaustive]
#[must_use]
pub struct Config {
    /// Receive mode.
    pub mode: Mode,
    /// Maximum packets in one turn of a receive ring.
    pub receive_quota: Quota,
    /// Maximum packets in one turn of a transmit ring.
    pub transmit_quota: Quota,
    /// Maximum requests in one turn of an application ring.
    pub application_quota: Quota,
    /// Pauses receiving while a queue to an application is full.
    pub feedback: bool,
    /// Queue fill level at which receiving is paused, in percent.
    pub high_mark_percent: u32,
    /// Queue fill level at or below which receiving resumes, in percent.
    pub low_mark_percent: u32,
    /// Time after which receiving resumes although the queue's reader has read nothing.
    pub feedback_timeout_us: u64,
    /// Maximum share of CPU time for packets, in percent.
    pub cpu_share_percent: u32,
    /// Period over which the CPU share is accounted.
    pub cpu_period_us: u64,
    /// Modes `interrupt` and `moderated`: capacity in packets of the queue between receive work
    /// and protocol work.
    pub input_queue: u32,
    /// Mode `moderated`: maximum interrupts per second.
    pub interrupts_per_second: u32,
    /// Mode `moderated`: packets that the device buffers between interrupts.
    pub descriptors: u32,
    /// Mode `napi`: maximum packets of one device in its turn.
    pub weight: u32,
    /// Mode `napi`: maximum packets in one round.
    pub budget: u32,
    /// Mode `napi`: maximum duration of a round.
    pub round_us: u64,
}

impl Default for Config {
    /// Mode `polled` with the parameters of the papers. Quota and weight 64, budget 300 and 8,000
    /// interrupts per second are from Jonack and Murta. Marks of 75 and 25 %, the timeout of 1 ms
    /// and the period of 10 ms are from Mogul and Ramakrishnan. Rounds of 2 ms and the input queue
    /// of 50 packets are from Linux and 4.2BSD.
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

impl Config {
    /// Sets the receive mode.
    pub fn mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Sets the maximum packets in one turn of a receive ring.
    pub fn receive_quota(self, receive_quota: Quota) -> Self {
        Self { receive_quota, ..self }
    }

    /// Sets the maximum packets in one turn of a transmit ring.
    pub fn transmit_quota(self, transmit_quota: Quota) -> Self {
        Self { transmit_quota, ..self }
    }

    /// Sets the maximum requests in one turn of an application ring.
    pub fn application_quota(self, application_quota: Quota) -> Self {
        Self { application_quota, ..self }
    }

    /// Sets whether receiving is paused while a queue to an application is full.
    pub fn feedback(self, feedback: bool) -> Self {
        Self { feedback, ..self }
    }

    /// Sets the queue fill level at which receiving is paused, in percent.
    pub fn high_mark_percent(self, high_mark_percent: u32) -> Self {
        Self { high_mark_percent, ..self }
    }

    /// Sets the queue fill level at or below which receiving resumes, in percent.
    pub fn low_mark_percent(self, low_mark_percent: u32) -> Self {
        Self { low_mark_percent, ..self }
    }

    /// Sets the time after which receiving resumes without a read, in microseconds.
    pub fn feedback_timeout_us(self, feedback_timeout_us: u64) -> Self {
        Self { feedback_timeout_us, ..self }
    }

    /// Sets the maximum share of CPU time for packets, in percent.
    pub fn cpu_share_percent(self, cpu_share_percent: u32) -> Self {
        Self { cpu_share_percent, ..self }
    }

    /// Sets the period over which the CPU share is accounted, in microseconds.
    pub fn cpu_period_us(self, cpu_period_us: u64) -> Self {
        Self { cpu_period_us, ..self }
    }

    /// Sets the capacity in packets of the queue between receive work and protocol work.
    pub fn input_queue(self, input_queue: u32) -> Self {
        Self { input_queue, ..self }
    }

    /// Sets the maximum interrupts per second.
    pub fn interrupts_per_second(self, interrupts_per_second: u32) -> Self {
        Self { interrupts_per_second, ..self }
    }

    /// Sets the packets that the device buffers between interrupts.
    pub fn descriptors(self, descriptors: u32) -> Self {
        Self { descriptors, ..self }
    }

    /// Sets the maximum packets of one device in its turn.
    pub fn weight(self, weight: u32) -> Self {
        Self { weight, ..self }
    }

    /// Sets the maximum packets in one round.
    pub fn budget(self, budget: u32) -> Self {
        Self { budget, ..self }
    }

    /// Sets the maximum duration of a round, in microseconds.
    pub fn round_us(self, round_us: u64) -> Self {
        Self { round_us, ..self }
    }
}

/// Error in the gate's settings. Names are the configuration file's keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A setting that must be above zero is zero.
    #[error("{name} is 0, so packets would never be processed: give at least 1")]
    Zero {
        /// Name of the setting.
        name: &'static str,
    },
    /// A percentage is out of range.
    #[error("{name} is {percent}: give a percentage from {min} to 100")]
    Percent {
        /// Name of the setting.
        name: &'static str,
        /// Rejected value.
        percent: u32,
        /// Minimum valid value.
        min: u32,
    },
    /// The low mark is not below the high mark.
    #[error(
        "low-mark-percent is {low} and high-mark-percent is {high}: the low mark must be below \
         the high mark, else receiving is paused and never resumes"
    )]
    InvalidMarks {
        /// Low mark, in percent.
        low: u32,
        /// High mark, in percent.
        high: u32,
    },
    /// A CPU share below 100 % requires mode `polled`.
    #[error(
        "cpu-share-percent is {percent}, but mode {} receives at interrupt priority and \
         cannot be limited to a share: choose mode polled", .mode.name()
    )]
    ShareNeedsPolling {
        /// CPU share, in percent.
        percent: u32,
        /// Configured mode.
        mode: Mode,
    },
    /// The budget of a round is below the weight of one device.
    #[error(
        "budget is {budget} and weight is {weight}: the budget of a round must be at least the weight of one device"
    )]
    Budget {
        /// Budget, in packets.
        budget: u32,
        /// Weight, in packets.
        weight: u32,
    },
    /// The text is not a quota.
    #[error("invalid quota `{0}`: give a number of packets, or `unlimited`")]
    InvalidQuota(String),
}

/// Validated settings.
///
/// # Examples
///
/// ```
/// use tidegate_gate::{Config, Mode, Settings};
///
/// let settings = Settings::new(Config::default().mode(Mode::Napi))?;
/// assert_eq!(settings.config().budget, 300);
/// assert!(Settings::new(Config::default().budget(1)).is_err());
/// # Ok::<(), tidegate_gate::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings(Config);

impl Settings {
    /// Validates a configuration.
    ///
    /// # Errors
    /// Returns [`ConfigError`], which names the setting and the reason.
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
        if let Some(&(name, percent, min)) =
            percentages.iter().find(|(_, percent, min)| !(*min..=100).contains(percent))
        {
            return Err(ConfigError::Percent { name, percent, min });
        }
        let (low, high) = (config.low_mark_percent, config.high_mark_percent);
        if low >= high {
            return Err(ConfigError::InvalidMarks { low, high });
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

    /// Returns the configuration.
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
    fn default_is_valid_in_every_mode() {
        for mode in Mode::ALL {
            let config = Config { mode, ..Config::default() };
            assert_eq!(Settings::new(config.clone()).unwrap().config(), &config);
        }
    }

    #[test]
    fn rejects_invalid_settings_with_the_reason() {
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
    fn round_trips_as_toml() {
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
