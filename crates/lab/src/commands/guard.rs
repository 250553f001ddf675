//! `tidegate lab guard`.

use clap::Args;
use tidegate_lab::experiments::jonack::guard;

use super::{Measure, Output};
use crate::Failure;

/// Flags of `lab guard`.
#[derive(Args)]
pub(crate) struct GuardLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    measure: Measure,
    /// Flood rate of unknown sources, in packets per second [default: 1488095, 1 Gb/s line rate]
    #[arg(long, value_name = "RATE")]
    flood: Option<f64>,
}

impl GuardLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = self.measure.config(
            guard::GuardConfig::default(),
            guard::GuardConfig::quick,
            |config| (&mut config.seconds, &mut config.repeats),
        );
        config.flood_pps = self.flood.unwrap_or(config.flood_pps);
        self.output.write(&guard::run(&config)?)
    }
}
