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
    /// Number of packets to echo, of each kind of traffic
    #[arg(long, value_name = "COUNT", default_value_t = 100_000)]
    packets: u64,
    /// Use IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,
    /// Count instructions with valgrind's callgrind
    #[arg(long)]
    callgrind: bool,
    /// Echo only this traffic: one-flow, random-flows or random-flows-singly
    #[arg(long, value_name = "NAME")]
    traffic: Option<Traffic>,
}

impl EchoCostLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let (packets, ipv6, callgrind) = (self.packets, self.ipv6, self.callgrind);
        let config = echo_cost::EchoCostConfig { packets, ipv6, callgrind, traffic: self.traffic };
        self.output.write(&echo_cost::run(&config)?)
    }
}
