//! `tidegate lab guard`.

use clap::Args;
use tidegate_lab::guard;

use super::Output;
use crate::Failure;

/// Flags of `lab guard`.
#[derive(Args)]
pub(crate) struct GuardLab {
    #[command(flatten)]
    output: Output,
    /// Measure everything once and shortly, for a first look
    #[arg(long)]
    quick: bool,
    /// How long to measure
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// How often to measure everything; the median counts
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
    /// What the strangers send [default: as fast as it goes]
    #[arg(long, value_name = "RATE")]
    flood: Option<f64>,
}

impl GuardLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = guard::GuardConfig::default();
        if self.quick {
            config = config.quick();
        }
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        config.flood_pps = self.flood.or(config.flood_pps);
        self.output.write(&guard::run(&config)?)
    }
}
