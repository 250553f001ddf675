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
    /// Shorter and fewer measurements, for a first look
    #[arg(long)]
    quick: bool,
    /// Number of packets per reader [default: 30000; 50000 with --kernel]
    #[arg(long, value_name = "COUNT")]
    packets: Option<u64>,
    /// Number of runs per case; the median is reported [default: 3]
    #[arg(long, value_name = "COUNT")]
    runs: Option<usize>,
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
        let readers = self.readers;
        let (packets, runs) = match (self.kernel, self.quick) {
            // The trace buffer holds the events of so many packets.
            (true, false) => (50_000, 1),
            (true, true) => (5_000, 1),
            (false, false) => (30_000, 3),
            (false, true) => (10_000, 1),
        };
        let packets_per_reader = self.packets.unwrap_or(packets);
        let result = if self.kernel {
            kernel_locks::run(&kernel_locks::ContentionConfig { packets_per_reader, readers })?
        } else {
            let runs = self.runs.unwrap_or(runs);
            lock_contention::run(&lock_contention::LockContentionConfig {
                packets_per_reader,
                runs,
                readers,
            })?
        };
        self.output.write(&result)
    }
}
