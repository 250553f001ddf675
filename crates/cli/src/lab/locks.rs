//! `tidegate lab locks`.

use clap::Args;
use tidegate_lab::{contention, locks};

use super::DrawnOutput;
use crate::Failure;

/// Flags of `lab locks`.
#[derive(Args)]
pub(crate) struct LocksLab {
    #[command(flatten)]
    output: DrawnOutput,
    /// Packets for each reader
    #[arg(long, value_name = "COUNT", default_value_t = 1_000_000)]
    packets: u64,
    /// How often to measure each case; the median counts
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    runs: usize,
    /// Numbers of readers
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "1,2,4,8")]
    readers: Vec<usize>,
    /// Watch the locks of a kernel UDP socket instead of the model's, by the
    /// kernel's trace events; needs root
    #[arg(long, conflicts_with = "runs")]
    kernel: bool,
}

impl LocksLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let (packets_per_reader, readers) = (self.packets, self.readers);
        let result = if self.kernel {
            contention::run(&contention::ContentionConfig { packets_per_reader, readers })?
        } else {
            let runs = self.runs;
            locks::run(&locks::LocksConfig { packets_per_reader, runs, readers })?
        };
        self.output.write(&result)
    }
}
