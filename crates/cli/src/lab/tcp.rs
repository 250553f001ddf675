//! `tidegate lab echo-1`, `echo-2`, `echo-3`, `bulk`, `connections`,
//! `syn-flood`, `apps`, `asymmetric`.

use clap::Args;
use tidegate_lab::tcp::{TcpConfig, connections};
use tidegate_lab::{Experiment, LabError};

use super::{Measure, Output};
use crate::Failure;

/// Flags of the experiments with TCP.
#[derive(Args)]
pub(crate) struct TcpLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    measure: Measure,
    /// The paper's numbers of connections instead of those for this machine
    #[arg(long)]
    full: bool,
}

impl TcpLab {
    fn config(&self) -> TcpConfig {
        let config = TcpConfig { full: self.full, ..TcpConfig::default() };
        self.measure
            .config(config, TcpConfig::quick, |config| (&mut config.seconds, &mut config.repeats))
    }

    pub(super) fn run(
        self,
        experiment: fn(&TcpConfig) -> Result<Experiment, LabError>,
    ) -> Result<(), Failure> {
        self.output.write(&experiment(&self.config())?)
    }
}

/// Flags of `lab connections`.
#[derive(Args)]
pub(crate) struct ConnectionsLab {
    #[command(flatten)]
    lab: TcpLab,
    /// The most connections
    #[arg(long, value_name = "COUNT", default_value_t = 1_000_000)]
    most: usize,
}

impl ConnectionsLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        self.lab.output.write(&connections::run(&self.lab.config(), self.most)?)
    }
}
