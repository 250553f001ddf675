//! `tidegate lab cpu-share`.

use clap::Args;
use tidegate_lab::experiments::mogul::router::cpu_share;

use super::{Measure, PlotOutput};
use crate::Failure;

/// Flags of `lab cpu-share`.
#[derive(Args)]
pub(crate) struct CpuShareLab {
    #[command(flatten)]
    output: PlotOutput,
    #[command(flatten)]
    measure: Measure,
    /// CPU shares of packet processing, in percent [default: 25,50,75,100]
    #[arg(long, value_name = "PERCENT", value_delimiter = ',')]
    shares: Vec<u32>,
    /// Offered loads besides zero and the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
}

impl CpuShareLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = self.measure.config(
            cpu_share::CpuShareConfig::default(),
            cpu_share::CpuShareConfig::quick,
            |config| (&mut config.seconds, &mut config.repeats),
        );
        if !self.shares.is_empty() {
            config.shares_percent = self.shares;
        }
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        let result = cpu_share::run(&config)?;
        self.output.write(&result)
    }
}
