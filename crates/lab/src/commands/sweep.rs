//! `tidegate lab sweep`.

use std::path::PathBuf;

use clap::Args;
use tidegate_lab::experiments::simulated::sweep;

use super::PlotOutput;
use crate::Failure;

/// Flags of `lab sweep`.
#[derive(Args)]
pub(crate) struct SweepLab {
    #[command(flatten)]
    output: PlotOutput,
    /// Fewer cores and loads, for a first look
    #[arg(long)]
    quick: bool,
    /// Numbers of cores to simulate [default: 1,2,4,8,16,32,64]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    cores: Vec<u32>,
    /// Cost and share of packets that pass from core to core: a result that `tidegate lab cores --json`
    /// wrote
    #[arg(long, value_name = "FILE")]
    crossings: Option<PathBuf>,
    /// Random seed; the same seed reproduces the result byte for byte
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
}

impl SweepLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = sweep::SweepConfig { seed: self.seed, ..Default::default() };
        if self.quick {
            config = config.quick();
        }
        if !self.cores.is_empty() {
            config.cores = self.cores;
        }
        config.crossing = self.crossings.as_deref().map(sweep::CrossingCost::read).transpose()?;
        let result = sweep::run(&config)?;
        self.output.write(&result)
    }
}
