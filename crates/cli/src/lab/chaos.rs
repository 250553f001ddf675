//! `tidegate lab chaos`.

use std::path::PathBuf;

use clap::Args;
use tidegate_lab::chaos::{ChaosConfig, State, VictimConfig, run, victim};

use super::Output;
use crate::Failure;

/// Flags of `lab chaos`.
#[derive(Args)]
pub(crate) struct ChaosLab {
    #[command(flatten)]
    output: Output,
    /// Applications that are killed
    #[arg(long, value_name = "COUNT", default_value_t = ChaosConfig::default().kills)]
    kills: u64,
    /// The same seed kills the same applications, after the same times
    #[arg(long, value_name = "NUMBER", default_value_t = ChaosConfig::default().seed)]
    seed: u64,
    /// How long each measurement beside a bad application lasts
    #[arg(long, value_name = "SECONDS", default_value_t = ChaosConfig::default().seconds)]
    seconds: f64,
    /// How often to measure that; the median counts
    #[arg(long, value_name = "COUNT", default_value_t = ChaosConfig::default().repeats)]
    repeats: usize,
    /// An application of the experiment, which starts it itself
    #[arg(long, hide = true, requires_all = ["socket", "port"], value_parser = state)]
    as_victim: Option<State>,
    #[arg(long, hide = true)]
    socket: Option<PathBuf>,
    #[arg(long, hide = true)]
    port: Option<u16>,
}

fn state(name: &str) -> Result<State, String> {
    let found = State::ALL.into_iter().find(|state| state.name() == name);
    found.ok_or_else(|| format!("there is no state {name}"))
}

impl ChaosLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let Self { output, kills, seed, seconds, repeats, .. } = self;
        if let (Some(state), Some(socket), Some(port)) = (self.as_victim, self.socket, self.port) {
            return Ok(victim(&VictimConfig { state, socket, port, seed })?);
        }
        if repeats == 0 || kills == 0 {
            return Err("--repeats and --kills: give 1 or more of each".into());
        }
        output.write(&run(&ChaosConfig { kills, seed, seconds, repeats })?)
    }
}
