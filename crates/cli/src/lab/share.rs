//! `tidegate lab share`.

use clap::Args;
use tidegate_lab::router::share;

use super::{Drawing, Output};
use crate::Failure;

/// Flags of `lab share`.
#[derive(Args)]
pub(crate) struct ShareLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    drawing: Drawing,
    /// Measure everything once and shortly, for a first look
    #[arg(long)]
    quick: bool,
    /// Shares of packets, in percent [default: 25,50,75,100]
    #[arg(long, value_name = "PERCENT", value_delimiter = ',')]
    shares: Vec<u32>,
    /// Loads to offer besides none and the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
    /// How long to measure at each load
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// How often to measure everything; the median counts
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
}

impl ShareLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = share::ShareConfig::default();
        if self.quick {
            config = config.quick();
        }
        if !self.shares.is_empty() {
            config.shares_percent = self.shares;
        }
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        let result = share::run(&config)?;
        self.drawing.write(&result)?;
        self.output.write(&result)
    }
}
