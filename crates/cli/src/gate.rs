//! When to look for packets, and how many to take: the flags and the section
//! `[gate]`.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tidegate::gate::{Config, Quota, Settings};

use crate::Failure;
use crate::config::Section;

/// How packets are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// Receive work at interrupt priority into a bounded queue: collapses under a flood
    Interrupt,
    /// As interrupt, with a limited rate of interrupts and few descriptors
    Moderated,
    /// Rounds of polling with a budget, then at the priority of a program
    Napi,
    /// Polling in turns with quotas: holds under a flood
    Polled,
    /// Polling without end, on a core of its own
    Dedicated,
}

/// Section `[gate]`.
#[derive(Args, Clone, Serialize, Deserialize, Default)]
#[command(next_help_heading = "Receive scheduling")]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct GateOptions {
    /// How packets are looked for [default: polled]
    #[arg(long, value_enum, value_name = "MODE")]
    mode: Option<Mode>,
    /// The most packets of one turn of receiving, or `unlimited` [default: 64]
    #[arg(long, value_name = "PACKETS")]
    receive_quota: Option<Quota>,
    /// The most packets of one turn of transmitting, or `unlimited` [default: 64]
    #[arg(long, value_name = "PACKETS")]
    transmit_quota: Option<Quota>,
    /// The most requests of one turn of a program, or `unlimited` [default: 64]
    #[arg(long, value_name = "REQUESTS")]
    application_quota: Option<Quota>,
    /// Whether a socket queue that fills stops receiving [default: true]
    #[arg(long, value_name = "BOOL")]
    feedback: Option<bool>,
    /// Receiving stops when a queue is so full [default: 75]
    #[arg(long, value_name = "PERCENT")]
    high_mark_percent: Option<u32>,
    /// Receiving goes on when the queue is no fuller than this [default: 25]
    #[arg(long, value_name = "PERCENT")]
    low_mark_percent: Option<u32>,
    /// Receiving goes on when the reader took nothing for so long [default: 1000]
    #[arg(long, value_name = "MICROSECONDS")]
    feedback_timeout_us: Option<u64>,
    /// The share of the processor that packets may take [default: 100]
    #[arg(long, value_name = "PERCENT")]
    cpu_share_percent: Option<u32>,
    /// The period that the share is kept in [default: 10000]
    #[arg(long, value_name = "MICROSECONDS")]
    cpu_period_us: Option<u64>,
    /// Modes interrupt and moderated: packets between receive and protocol work [default: 50]
    #[arg(long, value_name = "PACKETS")]
    input_queue: Option<u32>,
    /// Mode moderated: the most interrupts per second [default: 8000]
    #[arg(long, value_name = "COUNT")]
    interrupts_per_second: Option<u32>,
    /// Mode moderated: packets that the card holds between interrupts [default: 128]
    #[arg(long, value_name = "PACKETS")]
    descriptors: Option<u32>,
    /// Mode napi: the most packets of one turn [default: 64]
    #[arg(long, value_name = "PACKETS")]
    weight: Option<u32>,
    /// Mode napi: the most packets of one round [default: 300]
    #[arg(long, value_name = "PACKETS")]
    budget: Option<u32>,
    /// Mode napi: the longest round [default: 2000]
    #[arg(long, value_name = "MICROSECONDS")]
    round_us: Option<u64>,
    /// Let a thread of its own run the stack in modes polled and dedicated
    #[arg(long)]
    #[serde(default)]
    network_thread: bool,
}

impl Section for GateOptions {
    const NAME: &'static str = "gate";
}

impl GateOptions {
    /// The settings that the flags and the file describe.
    ///
    /// # Errors
    /// When they make no sense; the message says why.
    pub(crate) fn settings(&self) -> Result<Settings, Failure> {
        let mut given = serde_json::to_value(self)?;
        if let Some(given) = given.as_object_mut() {
            given.remove("network-thread");
            given.retain(|_, value| !value.is_null());
        }
        let config: Config = serde_json::from_value(given)?;
        Ok(Settings::new(config)?)
    }

    /// Whether a thread of its own shall run the stack.
    pub(crate) fn network_thread(&self) -> bool {
        self.network_thread
    }
}
