//! `tidegate lab router`.

use clap::Args;
use tidegate_lab::experiments::mogul::router;

use super::{Measure, PlotOutput};
use crate::Failure;

/// Flags of `lab router`.
#[derive(Args)]
pub(crate) struct RouterLab {
    #[command(flatten)]
    output: PlotOutput,
    #[command(flatten)]
    measure: Measure,
    /// Offered loads besides the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
    /// Measure only the series whose names contain this text, as `feedback`
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl RouterLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = self.measure.config(
            router::RouterLabConfig::default(),
            router::RouterLabConfig::quick,
            |config| (&mut config.seconds, &mut config.repeats),
        );
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        config.only = self.only;
        let result = router::run(&config)?;
        self.output.write(&result)
    }
}
