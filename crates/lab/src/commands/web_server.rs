//! `tidegate lab web-server`.

use clap::Args;
use tidegate_lab::experiments::jonack::web_server::{self, WebServerConfig};

use super::{Measure, PlotOutput};
use crate::Failure;

/// Flags of `lab web-server`. A measurement is a third of the time.
#[derive(Args)]
pub(crate) struct WebServerLab {
    #[command(flatten)]
    output: PlotOutput,
    #[command(flatten)]
    measure: Measure,
    /// Thirds of 60 s, as in the paper
    #[arg(long, conflicts_with = "quick")]
    long: bool,
    /// Measure only the servers whose names contain this text, as `nginx`
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl WebServerLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let whole = WebServerConfig::default();
        let whole = if self.long { whole.long() } else { whole };
        let mut config = self.measure.config(whole, WebServerConfig::quick, |config| {
            (&mut config.third_seconds, &mut config.repeats)
        });
        config.only = self.only;
        self.output.write(&web_server::run(&config)?)
    }
}
