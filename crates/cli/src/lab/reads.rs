//! `tidegate lab reads`.

use clap::Args;
use tidegate_lab::reads;

use super::DrawnOutput;
use crate::Failure;

/// Flags of `lab reads`.
#[derive(Args)]
pub(crate) struct ReadsLab {
    #[command(flatten)]
    output: DrawnOutput,
    /// Units of 10 bytes that each thread reads
    #[arg(long, value_name = "COUNT", default_value_t = 500_000)]
    units: u64,
    /// Null calls that each thread makes
    #[arg(long, value_name = "COUNT", default_value_t = 15_000_000)]
    calls: u64,
    /// Numbers of threads
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "1,2,4,8")]
    threads: Vec<usize>,
    /// How often to measure each case; the median counts
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    runs: usize,
}

impl ReadsLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let Self { units, calls, threads, runs, .. } = self;
        let result = reads::run(&reads::ReadsConfig { units, calls, threads, runs })?;
        self.output.write(&result)
    }
}
