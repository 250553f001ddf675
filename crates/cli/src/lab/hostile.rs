//! `tidegate lab hostile`.

use std::time::Duration;

use clap::Args;
use tidegate_lab::hostile::{HostileConfig, run};

use super::Output;
use crate::Failure;

/// Flags of `lab hostile`.
#[derive(Args)]
pub(crate) struct HostileLab {
    #[command(flatten)]
    output: Output,
    /// Number of trials of each attack
    #[arg(long, value_name = "COUNT", default_value_t = HostileConfig::default().trials)]
    trials: u64,
    /// Random seed; the same seed attacks at the same moments
    #[arg(long, value_name = "NUMBER", default_value_t = HostileConfig::default().seed)]
    seed: u64,
    /// Time until the effects of an attack must be over, in milliseconds
    #[arg(
        long,
        value_name = "MS",
        default_value_t = HostileConfig::default().limit.as_millis() as u64
    )]
    limit_ms: u64,
}

impl HostileLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let limit = Duration::from_millis(self.limit_ms);
        let config = HostileConfig { trials: self.trials, seed: self.seed, limit };
        self.output.write(&run(&config)?)
    }
}
