//! `tidegate lab echo-cost`.

use clap::Args;
use tidegate_lab::experiments::compare::echo_cost::{self, Traffic};

use super::Output;
use crate::Failure;

/// Flags of `lab echo-cost`.
#[derive(Args)]
pub(crate) struct EchoCostLab {
    #[command(flatten)]
    output: Output,
    /// Fewer packets, for a first look
    #[arg(long)]
    quick: bool,
    /// Number of packets to echo, of each kind of traffic [default: 100000]
    #[arg(long, value_name = "COUNT")]
    packets: Option<u64>,
    /// Use IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,
    /// Count instructions with valgrind's callgrind
    #[arg(long)]
    callgrind: bool,
    /// Echo only this traffic: one-flow, one-flow-timed, random-flows, random-flows-singly or tcp
    #[arg(long, value_name = "NAME")]
    traffic: Option<Traffic>,
    /// UDP sockets of the stack, one of which echoes the packets of one-flow
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    socket_count: u32,
    /// Packets of one-flow on the link at a time
    #[arg(long, value_name = "COUNT", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=32))]
    burst: u32,
}

impl EchoCostLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let (ipv6, callgrind) = (self.ipv6, self.callgrind);
        let mut config = echo_cost::EchoCostConfig {
            ipv6,
            callgrind,
            traffic: self.traffic,
            sockets: self.socket_count as usize,
            burst: self.burst as usize,
            ..Default::default()
        };
        if self.quick {
            config = config.quick();
        }
        config.packets = self.packets.unwrap_or(config.packets);
        self.output.write(&echo_cost::run(&config)?)
    }
}
