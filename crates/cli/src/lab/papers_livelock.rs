//! `tidegate lab papers-livelock`.

use clap::Args;
use tidegate_lab::papers;

use super::{Drawing, Output};
use crate::Failure;

/// Flags of `lab papers-livelock`.
#[derive(Args)]
pub(crate) struct PapersLivelockLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    drawing: Drawing,
}

impl PapersLivelockLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let result = papers::run()?;
        self.drawing.write(&result)?;
        self.output.write(&result)
    }
}
