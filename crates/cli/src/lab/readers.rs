//! `tidegate lab readers`.

use clap::Args;
use tidegate_lab::readers;

use super::{DrawnOutput, Measure};
use crate::Failure;

/// Flags of `lab readers`.
#[derive(Args)]
pub(crate) struct ReadersLab {
    #[command(flatten)]
    output: DrawnOutput,
    #[command(flatten)]
    measure: Measure,
    /// Numbers of readers [default: 1,2,4,8]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    readers: Vec<usize>,
    /// Where threads run: one-core, core-each [default: both]
    #[arg(long, value_name = "PLACE", value_delimiter = ',')]
    places: Vec<readers::Place>,
    /// Work for each request [default: 0,1000,5000]
    #[arg(long, value_name = "NANOSECONDS", value_delimiter = ',')]
    work_ns: Vec<u64>,
    /// Loads of the flood in place one-core besides the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
}

impl ReadersLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = self.measure.config(
            readers::ReadersConfig::default(),
            readers::ReadersConfig::quick,
            |config| (&mut config.seconds, &mut config.repeats),
        );
        if !self.readers.is_empty() {
            config.readers = self.readers;
        }
        if !self.places.is_empty() {
            config.places = self.places;
        }
        if !self.work_ns.is_empty() {
            config.work_ns = self.work_ns;
        }
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        let result = readers::run(&config, &mut |at| eprintln!("{at}"))?;
        self.output.write(&result)
    }
}
