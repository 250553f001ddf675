//! `tidegate lab profile`.

use clap::Args;
use tidegate_lab::experiments::diaz::profile;
use tidegate_lab::testbed::tcp::TcpLabConfig;

use super::{Measure, PlotOutput};
use crate::Failure;

/// Flags of `lab profile`.
#[derive(Args)]
pub(crate) struct ProfileLab {
    #[command(flatten)]
    output: PlotOutput,
    #[command(flatten)]
    measure: Measure,
}

impl ProfileLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let whole = TcpLabConfig { seconds: 10.0, repeats: 3, ..TcpLabConfig::default() };
        let config = self.measure.config(whole, TcpLabConfig::quick, |config| {
            (&mut config.seconds, &mut config.repeats)
        });
        self.output.write(&profile::run(&config)?)
    }
}
