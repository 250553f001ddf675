//! `tidegate lab echo-throughput`, `echo-message-size`, `echo-latency`, `bulk`, `connections`,
//! `syn-flood`, `apps`, `noisy`, `context-switches`.

use clap::Args;
use tidegate_lab::experiments::compare::{connections, noisy};
use tidegate_lab::testbed::apps::echo_server;
use tidegate_lab::testbed::tcp::TcpLabConfig;
use tidegate_lab::{Experiment, LabError};

use super::{Measure, Output};
use crate::Failure;

/// Flags of the TCP experiments.
#[derive(Args)]
pub(crate) struct TcpLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    measure: Measure,
    /// Use the paper's numbers of connections instead of those for this machine
    #[arg(long)]
    full: bool,
}

impl TcpLab {
    fn config(&self) -> TcpLabConfig {
        let config = TcpLabConfig { full: self.full, ..TcpLabConfig::default() };
        self.measure.config(config, TcpLabConfig::quick, |config| {
            (&mut config.seconds, &mut config.repeats)
        })
    }

    pub(super) fn run(
        self,
        experiment: fn(&TcpLabConfig) -> Result<Experiment, LabError>,
    ) -> Result<(), Failure> {
        self.output.write(&experiment(&self.config())?)
    }
}

/// Flags of `lab noisy`.
#[derive(Args)]
pub(crate) struct NoisyLab {
    #[command(flatten)]
    lab: TcpLab,
    /// Echo server of the experiment on this port; the experiment starts it itself
    #[arg(long, hide = true, value_name = "PORT")]
    echo_port: Option<u16>,
}

impl NoisyLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        if let Some(port) = self.echo_port {
            return Ok(echo_server::run(port)?);
        }
        self.lab.output.write(&noisy::run(&self.lab.config(), self.lab.measure.quick)?)
    }
}

/// Flags of `lab connections`.
#[derive(Args)]
pub(crate) struct ConnectionsLab {
    #[command(flatten)]
    lab: TcpLab,
    /// Maximum number of connections
    #[arg(long, alias = "most", value_name = "COUNT", default_value_t = 1_000_000)]
    max_connections: usize,
}

impl ConnectionsLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        self.lab.output.write(&connections::run(&self.lab.config(), self.max_connections)?)
    }
}
