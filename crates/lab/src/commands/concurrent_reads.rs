//! `tidegate lab concurrent-reads`.

use clap::Args;
use tidegate_lab::experiments::rivera::concurrent_reads;

use super::PlotOutput;
use crate::Failure;

/// Flags of `lab concurrent-reads`.
#[derive(Args)]
pub(crate) struct ConcurrentReadsLab {
    #[command(flatten)]
    output: PlotOutput,
    /// Number of units of 10 bytes that each thread reads
    #[arg(long, value_name = "COUNT", default_value_t = 500_000)]
    units: u64,
    /// Number of null system calls per thread
    #[arg(long, value_name = "COUNT", default_value_t = 15_000_000)]
    calls: u64,
    /// Numbers of threads to measure
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "1,2,4,8")]
    threads: Vec<usize>,
    /// Number of runs per case; the median is reported
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    runs: usize,
}

impl ConcurrentReadsLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let Self { units, calls, threads, runs, .. } = self;
        let result = concurrent_reads::run(&concurrent_reads::ConcurrentReadsConfig {
            units,
            calls,
            threads,
            runs,
        })?;
        self.output.write(&result)
    }
}
