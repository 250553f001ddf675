//! `tidegate lab ring`.

use clap::Args;
use tidegate_lab::experiments::diaz::ring::{RingLabConfig, run};

use super::{Measure, Output};
use crate::Failure;

/// Flags of `lab ring`.
#[derive(Args)]
pub(crate) struct RingLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    measure: Measure,
    /// Measure only the cases whose names contain this text, as "udp IPv6" or "attached ring"
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl RingLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let config =
            self.measure.config(RingLabConfig::default(), RingLabConfig::quick, |config| {
                (&mut config.seconds, &mut config.repeats)
            });
        self.output.write(&run(&config, self.only.as_deref())?)
    }
}
