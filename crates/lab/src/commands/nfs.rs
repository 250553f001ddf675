//! `tidegate lab nfs`.

use clap::Args;
use tidegate_lab::experiments::mogul::nfs::{self, NfsLabConfig};

use super::{Measure, PlotOutput};
use crate::Failure;

/// Flags of `lab nfs`.
#[derive(Args)]
pub(crate) struct NfsLab {
    #[command(flatten)]
    output: PlotOutput,
    #[command(flatten)]
    measure: Measure,
    /// Calls that the clients make, per second [default: 8000]
    #[arg(long, value_name = "RATE")]
    calls: Option<f64>,
    /// Rates of the flood besides none and the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
    /// Measure only the servers whose names contain this text, as `admission`
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl NfsLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config =
            self.measure.config(NfsLabConfig::default(), NfsLabConfig::quick, |config| {
                (&mut config.seconds, &mut config.repeats)
            });
        config.calls_per_second = self.calls.unwrap_or(config.calls_per_second);
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        config.only = self.only;
        let result = nfs::run(&config)?;
        self.output.write(&result)
    }
}
