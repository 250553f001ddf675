//! `tidegate lab papers-livelock`.

use clap::Args;
use tidegate_lab::experiments::simulated::papers;

use super::PlotOutput;
use crate::Failure;

/// Flags of `lab papers-livelock`.
#[derive(Args)]
pub(crate) struct PapersLivelockLab {
    #[command(flatten)]
    output: PlotOutput,
    /// The whole simulation, which takes some seconds: the same as without this flag
    #[arg(long)]
    quick: bool,
}

impl PapersLivelockLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let Self { output, quick: _ } = self;
        let result = papers::run()?;
        output.write(&result)
    }
}
