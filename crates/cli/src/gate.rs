//! Receive scheduling: flags and section `[gate]` (receive mode, quotas, feedback, CPU share).

use clap::builder::TypedValueParser;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tidegate::gate::{Config, Mode, Quota, Settings};

use crate::Failure;
use crate::choices::choices;
use crate::config::Section;

/// Receive modes by name.
fn modes() -> impl TypedValueParser<Value = Mode> {
    let help = |mode| match mode {
        Mode::Interrupt => {
            "Receive work at interrupt priority into a bounded queue; collapses under a flood"
        }
        Mode::Moderated => {
            "As interrupt, with a limited interrupt rate and few receive descriptors"
        }
        Mode::Napi => {
            "Polling rounds with a budget, the remainder at application priority, as in Linux"
        }
        Mode::Polled => "Polling in turns with a quota each; holds under a flood",
        Mode::Dedicated => "Endless busy-polling, on a core of its own",
    };
    choices(Mode::ALL.map(|mode| (mode.name(), mode, help(mode))))
}

/// Set of receive-scheduling settings for a purpose. Each value can be given otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Profile {
    /// Short turns on a processor that has nothing else to do: mode dedicated, quotas of 16
    Latency,
    /// Long turns: mode polled, quotas of 256
    Throughput,
    /// Beside other work on the same processor: mode polled, quotas of 32, CPU share 50
    SharedCore,
}

impl Profile {
    /// Settings that the profile sets, by name.
    fn settings(self) -> Map<String, Value> {
        let (mode, quota, cpu_share) = match self {
            Self::Latency => (Mode::Dedicated, 16, 100),
            Self::Throughput => (Mode::Polled, 256, 100),
            Self::SharedCore => (Mode::Polled, 32, 50),
        };
        let settings = [
            ("mode", json!(mode.name())),
            ("receive-quota", json!(quota)),
            ("transmit-quota", json!(quota)),
            ("application-quota", json!(quota)),
            ("cpu-share-percent", json!(cpu_share)),
        ];
        settings.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
    }
}

/// Section `[gate]`.
#[derive(Args, Clone, Serialize, Deserialize, Default)]
#[command(next_help_heading = "Receive scheduling")]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct GateOptions {
    /// Settings for a purpose; the other options of receive scheduling take precedence
    #[arg(long, value_enum, value_name = "PROFILE")]
    profile: Option<Profile>,
    /// Receive mode [default: polled]
    #[arg(long, value_parser = modes(), value_name = "MODE")]
    mode: Option<Mode>,
    /// Maximum number of packets per receive turn, or `unlimited` [default: 64]
    #[arg(long, value_name = "PACKETS")]
    receive_quota: Option<Quota>,
    /// Maximum number of packets per transmit turn, or `unlimited` [default: 64]
    #[arg(long, value_name = "PACKETS")]
    transmit_quota: Option<Quota>,
    /// Maximum number of requests per turn of an application, or `unlimited` [default: 64]
    #[arg(long, value_name = "REQUESTS")]
    application_quota: Option<Quota>,
    /// Back-pressure: pause receiving when a socket queue fills up [default: true]
    #[arg(long, value_name = "BOOL")]
    feedback: Option<bool>,
    /// Queue fill at which feedback pauses receiving, in percent [default: 75]
    #[arg(long, value_name = "PERCENT")]
    high_mark_percent: Option<u32>,
    /// Queue fill at or below which receiving resumes, in percent [default: 25]
    #[arg(long, value_name = "PERCENT")]
    low_mark_percent: Option<u32>,
    /// Resume receiving when the reader has taken nothing for this long, in microseconds
    /// [default: 1000]
    #[arg(long, value_name = "MICROSECONDS")]
    feedback_timeout_us: Option<u64>,
    /// Maximum share of CPU time for packet processing, in percent [default: 100]
    #[arg(long, value_name = "PERCENT")]
    cpu_share_percent: Option<u32>,
    /// Period over which the CPU share is enforced, in microseconds [default: 10000]
    #[arg(long, value_name = "MICROSECONDS")]
    cpu_period_us: Option<u64>,
    /// Modes interrupt and moderated: capacity of the queue between receive and protocol work,
    /// in packets [default: 50]
    #[arg(long, value_name = "PACKETS")]
    input_queue: Option<u32>,
    /// Mode moderated: maximum number of interrupts per second [default: 8000]
    #[arg(long, value_name = "COUNT")]
    interrupts_per_second: Option<u32>,
    /// Mode moderated: receive descriptors, the packets that the device holds between interrupts
    /// [default: 128]
    #[arg(long, value_name = "PACKETS")]
    descriptors: Option<u32>,
    /// Mode napi: maximum number of packets per turn (weight) [default: 64]
    #[arg(long, value_name = "PACKETS")]
    weight: Option<u32>,
    /// Mode napi: maximum number of packets per round [default: 300]
    #[arg(long, value_name = "PACKETS")]
    budget: Option<u32>,
    /// Mode napi: maximum duration of a round, in microseconds [default: 2000]
    #[arg(long, value_name = "MICROSECONDS")]
    round_us: Option<u64>,
    /// Run the stack on its own thread in modes polled and dedicated
    #[arg(long)]
    #[serde(default)]
    network_thread: bool,
}

impl Section for GateOptions {
    const NAME: &'static str = "gate";
}

impl GateOptions {
    /// Returns the checked gate settings of the flags and the file.
    ///
    /// # Errors
    /// When the settings contradict each other or are out of range; the message says why.
    pub(crate) fn settings(&self) -> Result<Settings, Failure> {
        let mut options = serde_json::to_value(self)?;
        if let Some(given) = options.as_object_mut() {
            given.remove("network-thread");
            given.remove("profile");
            given.retain(|_, value| !value.is_null());
            let profile = self.profile.map(Profile::settings).unwrap_or_default();
            for (name, value) in profile {
                given.entry(name).or_insert(value);
            }
        }
        let config: Config = serde_json::from_value(options)?;
        Ok(Settings::new(config)?)
    }

    /// Returns true if the stack runs on its own thread.
    pub(crate) fn network_thread(&self) -> bool {
        self.network_thread
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_take_precedence_over_their_profile() {
        let options = |text: &str| toml::from_str::<GateOptions>(text).unwrap().settings().unwrap();
        let shared = options("profile = \"shared-core\"");
        assert_eq!(shared.config().cpu_share_percent, 50);
        assert_eq!(shared.config().receive_quota.packets(), 32);
        let own = options("profile = \"latency\"\nmode = \"polled\"\nreceive-quota = 8");
        assert_eq!(own.config().mode, Mode::Polled);
        assert_eq!(own.config().receive_quota.packets(), 8);
        assert_eq!(own.config().transmit_quota.packets(), 16);
        let throughput = options("profile = \"throughput\"");
        assert_eq!(throughput.config().application_quota.packets(), 256);
    }
}
