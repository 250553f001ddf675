//! `tidegate lab chaos`.

use std::path::PathBuf;

use clap::Args;
use tidegate_lab::experiments::faults::chaos::{
    Behaviour, ChaosConfig, TargetConfig, run, run_target,
};

use super::Output;
use crate::Failure;

/// Flags of `lab chaos`.
#[derive(Args)]
pub(crate) struct ChaosLab {
    #[command(flatten)]
    output: Output,
    /// Number of applications to kill
    #[arg(long, value_name = "COUNT", default_value_t = ChaosConfig::default().kills)]
    kills: u64,
    /// Random seed; the same seed kills the same applications after the same times
    #[arg(long, value_name = "NUMBER", default_value_t = ChaosConfig::default().seed)]
    seed: u64,
    /// Duration of each measurement beside a misbehaving application, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = ChaosConfig::default().seconds)]
    seconds: f64,
    /// Number of repetitions of each such measurement; the median is reported
    #[arg(long, value_name = "COUNT", default_value_t = ChaosConfig::default().repeats)]
    repeats: usize,
    /// Target application of the experiment; the experiment starts it itself
    #[arg(long, hide = true, requires_all = ["socket", "port"], value_parser = parse_state)]
    as_victim: Option<Behaviour>,
    #[arg(long, hide = true)]
    socket: Option<PathBuf>,
    #[arg(long, hide = true)]
    port: Option<u16>,
}

fn parse_state(name: &str) -> Result<Behaviour, String> {
    let found = Behaviour::ALL.into_iter().find(|state| state.name() == name);
    found.ok_or_else(|| format!("there is no state {name}"))
}

impl ChaosLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let Self { output, kills, seed, seconds, repeats, .. } = self;
        if let (Some(behaviour), Some(socket), Some(port)) =
            (self.as_victim, self.socket, self.port)
        {
            return Ok(run_target(&TargetConfig { behaviour, socket, port, seed })?);
        }
        if repeats == 0 || kills == 0 {
            return Err("--repeats and --kills: give 1 or more of each".into());
        }
        output.write(&run(&ChaosConfig { kills, seed, seconds, repeats })?)
    }
}
