//! `tidegate lab lock-contention`.

use clap::Args;
use tidegate_lab::experiments::rivera::{kernel_locks, lock_contention};

use super::PlotOutput;
use crate::Failure;

/// Flags of `lab lock-contention`.
#[derive(Args)]
pub(crate) struct LockContentionLab {
    #[command(flatten)]
    output: PlotOutput,
    /// Number of packets per reader
    #[arg(long, value_name = "COUNT", default_value_t = 1_000_000)]
    packets: u64,
    /// Number of runs per case; the median is reported
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    runs: usize,
    /// Numbers of readers to measure
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "1,2,4,8")]
    readers: Vec<usize>,
    /// Measure the locks of a kernel UDP socket, by the kernel's trace events, instead of the
    /// model's; needs root
    #[arg(long, conflicts_with = "runs")]
    kernel: bool,
}

impl LockContentionLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let (packets_per_reader, readers) = (self.packets, self.readers);
        let result = if self.kernel {
            kernel_locks::run(&kernel_locks::ContentionConfig { packets_per_reader, readers })?
        } else {
            let runs = self.runs;
            lock_contention::run(&lock_contention::LockContentionConfig {
                packets_per_reader,
                runs,
                readers,
            })?
        };
        self.output.write(&result)
    }
}
