//! `tidegate lab growth`.

use clap::Args;
use tidegate_lab::experiments::compare::growth::{self, GrowthConfig, GrowthPart};

use super::{Measure, Output};
use crate::Failure;

/// Flags of `lab growth`.
#[derive(Args)]
pub(crate) struct GrowthLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    measure: Measure,
    /// Measure only these parts: connections, programs, lookup [default: all]
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    parts: Vec<GrowthPart>,
    /// Number of connections that send requests [default: 10000]
    #[arg(long, value_name = "COUNT")]
    active_connections: Option<usize>,
    /// Number of connections among which they are [default: 1000000; 100000 with --quick]
    #[arg(long, value_name = "COUNT")]
    connections: Option<usize>,
    /// Number of messages to attached programs [default: 2000000; 200000 with --quick]
    #[arg(long, value_name = "COUNT")]
    messages: Option<u64>,
    /// Number of UDP sockets among which one is looked up [default: 100000]
    #[arg(long, value_name = "COUNT")]
    socket_count: Option<usize>,
    /// Number of packets whose instructions are counted [default: 20000]
    #[arg(long, value_name = "COUNT")]
    packets: Option<u64>,
}

impl GrowthLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let config = self.measure.config(GrowthConfig::default(), GrowthConfig::quick, |config| {
            (&mut config.seconds, &mut config.repeats)
        });
        let config = GrowthConfig {
            parts: self.parts,
            active_connections: self.active_connections.unwrap_or(config.active_connections),
            connections: self.connections.unwrap_or(config.connections),
            messages: self.messages.unwrap_or(config.messages),
            sockets: self.socket_count.unwrap_or(config.sockets),
            packets: self.packets.unwrap_or(config.packets),
            ..config
        };
        self.output.write(&growth::run(&config)?)
    }
}
