//! `tidegate lab dns`.

use clap::Args;
use tidegate_lab::dns;

use super::Output;
use crate::Failure;

/// Flags of `lab dns`.
#[derive(Args)]
pub(crate) struct DnsLab {
    #[command(flatten)]
    output: Output,
    /// Measure shortly, for a first look
    #[arg(long)]
    quick: bool,
    /// Which servers [default: all]
    #[arg(long, value_name = "SERVER", value_delimiter = ',')]
    servers: Vec<dns::servers::ServerKind>,
    /// Names in the zone
    #[arg(long, value_name = "COUNT", default_value_t = 100_000)]
    names: u64,
    /// How long to measure at each load
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// How often to measure each server at its best; the median counts
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
    /// Do not compare every answer with NSD's
    #[arg(long)]
    no_verify: bool,
}

impl DnsLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = dns::DnsConfig { names: self.names, ..dns::DnsConfig::default() };
        if self.quick {
            config = config.quick();
        }
        if !self.servers.is_empty() {
            config.servers = self.servers;
        }
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        config.verify = !self.no_verify;
        self.output.write(&dns::run(&config)?)
    }
}
