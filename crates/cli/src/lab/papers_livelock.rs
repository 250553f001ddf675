//! `tidegate lab papers-livelock`.

use clap::Args;
use tidegate_lab::papers;

use super::DrawnOutput;
use crate::Failure;

/// Flags of `lab papers-livelock`.
#[derive(Args)]
pub(crate) struct PapersLivelockLab {
    #[command(flatten)]
    output: DrawnOutput,
}

impl PapersLivelockLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let result = papers::run()?;
        self.output.write(&result)
    }
}
