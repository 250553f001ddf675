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
    /// Shorter and fewer measurements, for a first look
    #[arg(long)]
    quick: bool,
    /// Number of applications to kill [default: 1000]
    #[arg(long, value_name = "COUNT")]
    kills: Option<u64>,
    /// Random seed; the same seed kills the same applications after the same times
    #[arg(long, value_name = "NUMBER", default_value_t = ChaosConfig::default().seed)]
    seed: u64,
    /// Duration of each measurement beside a misbehaving application, in seconds [default: 1]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Number of repetitions of each such measurement; the median is reported [default: 5]
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
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
        let mut config = ChaosConfig { seed: self.seed, ..ChaosConfig::default() };
        if let (Some(behaviour), Some(socket), Some(port)) =
            (self.as_victim, self.socket, self.port)
        {
            return Ok(run_target(&TargetConfig { behaviour, socket, port, seed: self.seed })?);
        }
        if self.quick {
            config = config.quick();
        }
        config.kills = self.kills.unwrap_or(config.kills);
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        if config.repeats == 0 || config.kills == 0 {
            return Err("--repeats and --kills: give 1 or more of each".into());
        }
        self.output.write(&run(&config)?)
    }
}
