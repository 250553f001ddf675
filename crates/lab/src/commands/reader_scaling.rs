//! `tidegate lab reader-scaling`.

use clap::Args;
use tidegate_lab::experiments::rivera::reader_scaling;

use super::{Measure, PlotOutput};
use crate::Failure;

/// Flags of `lab reader-scaling`.
#[derive(Args)]
pub(crate) struct ReaderScalingLab {
    #[command(flatten)]
    output: PlotOutput,
    #[command(flatten)]
    measure: Measure,
    /// Numbers of readers to measure [default: 1,2,4,8]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    readers: Vec<usize>,
    /// Thread placement: one-core, core-each [default: both]
    #[arg(long, alias = "places", value_name = "PLACEMENT", value_delimiter = ',')]
    placements: Vec<reader_scaling::CorePlacement>,
    /// Work per request, in nanoseconds [default: 0,1000,5000]
    #[arg(long, value_name = "NANOSECONDS", value_delimiter = ',')]
    work_ns: Vec<u64>,
    /// Offered loads with placement one-core besides the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
}

impl ReaderScalingLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = self.measure.config(
            reader_scaling::ReaderScalingConfig::default(),
            reader_scaling::ReaderScalingConfig::quick,
            |config| (&mut config.seconds, &mut config.repeats),
        );
        if !self.readers.is_empty() {
            config.readers = self.readers;
        }
        if !self.placements.is_empty() {
            config.placements = self.placements;
        }
        if !self.work_ns.is_empty() {
            config.work_ns = self.work_ns;
        }
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        let result = reader_scaling::run(&config)?;
        self.output.write(&result)
    }
}
