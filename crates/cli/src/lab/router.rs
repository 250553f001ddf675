//! `tidegate lab router`.

use clap::Args;
use tidegate_lab::router;

use super::{Drawing, Output};
use crate::Failure;

/// Flags of `lab router`.
#[derive(Args)]
pub(crate) struct RouterLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    drawing: Drawing,
    /// Measure everything once and shortly, for a first look
    #[arg(long)]
    quick: bool,
    /// Loads to offer besides the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
    /// Measure only the lines whose names contain this, as `feedback`
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// How long to measure at each load
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// How often to measure everything; the median counts
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
}

impl RouterLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = router::RouterLabConfig::default();
        if self.quick {
            config = config.quick();
        }
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        config.only = self.only;
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        let result = router::run(&config)?;
        self.drawing.write(&result)?;
        self.output.write(&result)
    }
}
