//! `tidegate lab cores`.

use clap::Args;
use tidegate_lab::experiments::diaz::cores::{CoresConfig, run};

use super::{Measure, Output};
use crate::Failure;

/// Flags of `lab cores`.
#[derive(Args)]
pub(crate) struct CoresLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    measure: Measure,
    /// Numbers of network cores [default: 1,2,4, and so on up to half the processors of this machine]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    cores: Vec<usize>,
    /// Measure only the cases whose names contain this text: "echo", or "by dnsperf"
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl CoresLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config =
            self.measure.config(CoresConfig::default(), CoresConfig::quick, |config| {
                (&mut config.seconds, &mut config.repeats)
            });
        if !self.cores.is_empty() {
            config.cores = self.cores;
        }
        config.only = self.only;
        self.output.write(&run(&config)?)
    }
}
