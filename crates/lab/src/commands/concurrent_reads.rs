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
    /// Shorter and fewer measurements, for a first look
    #[arg(long)]
    quick: bool,
    /// Number of units of 10 bytes that each thread reads [default: 500000]
    #[arg(long, value_name = "COUNT")]
    units: Option<u64>,
    /// Number of null system calls per thread [default: 15000000]
    #[arg(long, value_name = "COUNT")]
    calls: Option<u64>,
    /// Numbers of threads to measure
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "1,2,4,8")]
    threads: Vec<usize>,
    /// Number of runs per case; the median is reported [default: 3]
    #[arg(long, value_name = "COUNT")]
    runs: Option<usize>,
}

impl ConcurrentReadsLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = concurrent_reads::ConcurrentReadsConfig::default();
        if self.quick {
            config = config.quick();
        }
        config.units = self.units.unwrap_or(config.units);
        config.calls = self.calls.unwrap_or(config.calls);
        config.threads = self.threads;
        config.runs = self.runs.unwrap_or(config.runs);
        let result = concurrent_reads::run(&config)?;
        self.output.write(&result)
    }
}
