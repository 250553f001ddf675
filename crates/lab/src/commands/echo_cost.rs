//! `tidegate lab echo-cost`.

use clap::Args;
use tidegate_lab::experiments::compare::echo_cost;

use super::Output;
use crate::Failure;

/// Flags of `lab echo-cost`.
#[derive(Args)]
pub(crate) struct EchoCostLab {
    #[command(flatten)]
    output: Output,
    /// Number of packets to echo
    #[arg(long, value_name = "COUNT", default_value_t = 100_000)]
    packets: u64,
    /// Use IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,
    /// Count instructions with valgrind's callgrind
    #[arg(long)]
    callgrind: bool,
}

impl EchoCostLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let (packets, ipv6, callgrind) = (self.packets, self.ipv6, self.callgrind);
        let config = echo_cost::EchoCostConfig { packets, ipv6, callgrind };
        self.output.write(&echo_cost::run(&config)?)
    }
}
