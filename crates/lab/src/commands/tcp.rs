//! `tidegate lab echo-throughput`, `echo-message-size`, `echo-latency`, `bulk`, `connections`,
//! `syn-flood`, `apps`, `programs`, `noisy`, `ordinary`, `peers`, `priorities`,
//! `context-switches`.

use clap::Args;
use tidegate_lab::experiments::compare::peers::{self, PeerSelection};
use tidegate_lab::experiments::compare::{connections, noisy, ordinary, programs};
use tidegate_lab::experiments::diaz::priorities;
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
        self.config_from(TcpLabConfig::default())
    }

    fn config_from(&self, whole: TcpLabConfig) -> TcpLabConfig {
        let config = TcpLabConfig { full: self.full, ..whole };
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

/// Flags of `lab programs`.
#[derive(Args)]
pub(crate) struct ProgramsLab {
    #[command(flatten)]
    lab: TcpLab,
}

impl ProgramsLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        // Many cases: half of the time keeps the whole below 15 minutes.
        let whole = TcpLabConfig { seconds: 1.0, ..TcpLabConfig::default() };
        let config = self.lab.config_from(whole);
        self.lab.output.write(&programs::run(&config, self.lab.measure.quick)?)
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
        // Many cases: half of the time and three repeats keep the whole below 20 minutes.
        let whole = TcpLabConfig { seconds: 1.0, repeats: 3, ..TcpLabConfig::default() };
        let config = self.lab.config_from(whole);
        self.lab.output.write(&noisy::run(&config, self.lab.measure.quick)?)
    }
}

/// Flags of `lab priorities`.
#[derive(Args)]
pub(crate) struct PrioritiesLab {
    #[command(flatten)]
    lab: TcpLab,
}

impl PrioritiesLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let whole = TcpLabConfig { repeats: 3, ..TcpLabConfig::default() };
        let config = self.lab.config_from(whole);
        self.lab.output.write(&priorities::run(&config, self.lab.measure.quick)?)
    }
}

/// Flags of `lab ordinary`.
#[derive(Args)]
pub(crate) struct OrdinaryLab {
    #[command(flatten)]
    lab: TcpLab,
    /// Measure only the cases whose names contain this text, as "UDP IPv6" or "stream in"
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl OrdinaryLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        // Many cases: half of the time keeps the whole below 15 minutes.
        let whole = TcpLabConfig { seconds: 1.0, ..TcpLabConfig::default() };
        let config = self.lab.config_from(whole);
        self.lab.output.write(&ordinary::run(&config, self.only.as_deref())?)
    }
}

/// Flags of `lab peers`.
#[derive(Args)]
pub(crate) struct PeersLab {
    #[command(flatten)]
    lab: TcpLab,
    /// Measure only these peers, by name [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    peers: Vec<String>,
    /// Measure only the cases whose names contain this text, as "UDP IPv6" or "stream in"
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl PeersLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        // Many cases on many stacks: less time keeps the whole below ten minutes.
        let whole = TcpLabConfig { seconds: 0.6, ..TcpLabConfig::default() };
        let config = self.lab.config_from(whole);
        let selection = PeerSelection { peers: self.peers, case: self.only };
        self.lab.output.write(&peers::run(&config, &selection)?)
    }
}

/// Flags of `lab connections`.
#[derive(Args)]
pub(crate) struct ConnectionsLab {
    #[command(flatten)]
    lab: TcpLab,
    /// Maximum number of connections [default: 1000000; 100000 with --quick]
    #[arg(long, alias = "most", value_name = "COUNT")]
    max_connections: Option<usize>,
}

impl ConnectionsLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let whole = if self.lab.measure.quick { 100_000 } else { 1_000_000 };
        let max_connections = self.max_connections.unwrap_or(whole);
        self.lab.output.write(&connections::run(&self.lab.config(), max_connections)?)
    }
}
