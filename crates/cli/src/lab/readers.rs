//! `tidegate lab readers`.

use clap::Args;
use tidegate_lab::readers;

use super::{Drawing, Output};
use crate::Failure;

/// Flags of `lab readers`.
#[derive(Args)]
pub(crate) struct ReadersLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    drawing: Drawing,
    /// Measure everything once and shortly, for a first look
    #[arg(long)]
    quick: bool,
    /// Numbers of readers [default: 1,2,4,8]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    readers: Vec<usize>,
    /// Work for each request [default: 0,1000,5000]
    #[arg(long, value_name = "NANOSECONDS", value_delimiter = ',')]
    work_ns: Vec<u64>,
    /// Loads to offer besides the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
    /// How long to measure at each load
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// How often to measure everything; the median counts
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
}

impl ReadersLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = readers::ReadersConfig::default();
        if self.quick {
            config = config.quick();
        }
        if !self.readers.is_empty() {
            config.readers = self.readers;
        }
        if !self.work_ns.is_empty() {
            config.work_ns = self.work_ns;
        }
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        let result = readers::run(&config, &mut |at| eprintln!("{at}"))?;
        self.drawing.write(&result)?;
        self.output.write(&result)
    }
}
