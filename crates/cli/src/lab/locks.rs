//! `tidegate lab locks`.

use clap::Args;
use tidegate_lab::locks;

use super::{Drawing, Output};
use crate::Failure;

/// Flags of `lab locks`.
#[derive(Args)]
pub(crate) struct LocksLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    drawing: Drawing,
    /// Packets for each reader
    #[arg(long, value_name = "COUNT", default_value_t = 1_000_000)]
    packets: u64,
    /// How often to measure each case; the median counts
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    runs: usize,
    /// Numbers of readers
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "1,2,4,8")]
    readers: Vec<usize>,
}

impl LocksLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let config = locks::LocksConfig {
            packets_per_reader: self.packets,
            runs: self.runs,
            readers: self.readers,
        };
        let result = locks::run(&config)?;
        self.drawing.write(&result)?;
        self.output.write(&result)
    }
}
