//! `tidegate lab share`.

use clap::Args;
use tidegate_lab::router::share;

use super::{DrawnOutput, Measure};
use crate::Failure;

/// Flags of `lab share`.
#[derive(Args)]
pub(crate) struct ShareLab {
    #[command(flatten)]
    output: DrawnOutput,
    #[command(flatten)]
    measure: Measure,
    /// Shares of packets, in percent [default: 25,50,75,100]
    #[arg(long, value_name = "PERCENT", value_delimiter = ',')]
    shares: Vec<u32>,
    /// Loads to offer besides none and the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
}

impl ShareLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = self.measure.config(
            share::ShareConfig::default(),
            share::ShareConfig::quick,
            |config| (&mut config.seconds, &mut config.repeats),
        );
        if !self.shares.is_empty() {
            config.shares_percent = self.shares;
        }
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        let result = share::run(&config)?;
        self.output.write(&result)
    }
}
