//! `tidegate lab sweep`.

use clap::Args;
use tidegate_lab::sweep;

use super::DrawnOutput;
use crate::Failure;

/// Flags of `lab sweep`.
#[derive(Args)]
pub(crate) struct SweepLab {
    #[command(flatten)]
    output: DrawnOutput,
    /// Fewer cores and loads, for a first look
    #[arg(long)]
    quick: bool,
    /// The numbers of cores [default: 1,2,4,8,16,32,64]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    cores: Vec<u32>,
    /// What all chance comes from: the same seed gives the same bytes
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
        let result = sweep::run(&config)?;
        self.output.write(&result)
    }
}
