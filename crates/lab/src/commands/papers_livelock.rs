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
}

impl PapersLivelockLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let result = papers::run()?;
        self.output.write(&result)
    }
}
