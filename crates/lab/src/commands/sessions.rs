//! `tidegate lab sessions`.

use clap::Args;
use tidegate_lab::experiments::jonack::sessions::{SessionsConfig, run};

use super::{Measure, Output};
use crate::Failure;

/// Flags of `lab sessions`.
#[derive(Args)]
pub(crate) struct SessionsLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    measure: Measure,
    /// Offered loads, in multiples of the capacity [default: 0.5,1,2,5,10]
    #[arg(long, value_name = "FACTOR", value_delimiter = ',')]
    loads: Vec<f64>,
}

impl SessionsLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config =
            self.measure.config(SessionsConfig::default(), SessionsConfig::quick, |config| {
                (&mut config.seconds, &mut config.repeats)
            });
        if !self.loads.is_empty() {
            config.loads = self.loads;
        }
        self.output.write(&run(&config)?)
    }
}
