//! `tidegate lab dns`.

use clap::Args;
use tidegate_lab::experiments::compare::dns;
use tidegate_lab::testbed::dns::servers::ServerKind;

use super::{Measure, Output};
use crate::Failure;

/// Flags of `lab dns`.
#[derive(Args)]
pub(crate) struct DnsLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    measure: Measure,
    /// DNS servers to measure [default: all]
    #[arg(long, value_name = "SERVER", value_delimiter = ',')]
    servers: Vec<ServerKind>,
    /// Number of names in the zone
    #[arg(long, value_name = "COUNT", default_value_t = 100_000)]
    names: u64,
    /// Do not compare every answer with NSD's
    #[arg(long)]
    no_verify: bool,
}

impl DnsLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = self.measure.config(
            dns::DnsConfig { names: self.names, ..dns::DnsConfig::default() },
            dns::DnsConfig::quick,
            |config| (&mut config.seconds, &mut config.repeats),
        );
        if !self.servers.is_empty() {
            config.servers = self.servers;
        }
        config.verify = !self.no_verify;
        self.output.write(&dns::run(&config)?)
    }
}
