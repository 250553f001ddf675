//! `tidegate lab elastic`.

use clap::Args;
use tidegate_lab::experiments::diaz::elastic::{ElasticConfig, run};

use super::PlotOutput;
use crate::Failure;

/// Flags of `lab elastic`.
#[derive(Args)]
pub(crate) struct ElasticLab {
    #[command(flatten)]
    output: PlotOutput,
    /// Shorter phases, for a first look
    #[arg(long)]
    quick: bool,
    /// Duration of each phase, in seconds [default: 10]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Largest number of network cores [default: a quarter of the processors, at least 2]
    #[arg(long, value_name = "COUNT")]
    cores: Option<usize>,
    /// Requests per second in the phase of most load [default: 150,000 for each network core]
    #[arg(long, value_name = "RATE")]
    peak: Option<f64>,
}

impl ElasticLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = ElasticConfig::default();
        if self.quick {
            config = config.quick();
        }
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.cores = self.cores.unwrap_or(config.cores);
        config.peak_pps = self.peak.unwrap_or(config.peak_pps);
        self.output.write(&run(&config)?)
    }
}
