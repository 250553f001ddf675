//! `tidegate lab observe`.

use clap::Args;
use tidegate_lab::experiments::compare::observe::{ObserveConfig, run};

use super::Output;
use crate::Failure;

/// Flags of `lab observe`.
#[derive(Args)]
pub(crate) struct ObserveLab {
    #[command(flatten)]
    output: Output,
    /// One measurement of a second each, for a first look
    #[arg(long)]
    quick: bool,
    /// Duration of a measurement, in seconds [default: 3; 1 with --quick]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Number of measurements of each case; the median is reported [default: 5; 1 with --quick]
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
}

impl ObserveLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = ObserveConfig::default();
        if self.quick {
            config = config.quick();
        }
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        self.output.write(&run(&config)?)
    }
}
