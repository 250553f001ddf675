//! `tidegate lab livelock`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tidegate_lab::experiments::mogul::livelock;
use tidegate_lab::testbed::dns::servers::ServerKind;
use tidegate_lab::testbed::raw_receiver::{RawReceiverConfig, run_raw_receiver};

use super::{Measure, PlotOutput};
use crate::Failure;

/// Flags of `lab livelock`.
#[derive(Args)]
pub(crate) struct LivelockLab {
    #[command(flatten)]
    output: PlotOutput,
    #[command(flatten)]
    measure: Measure,
    /// Work per packet, in nanoseconds [default: 0,500,2000,10000]
    #[arg(long, value_name = "NANOSECONDS", value_delimiter = ',')]
    work_ns: Vec<u64>,
    /// Transports of the service: kernel, a mode of Tidegate, or raw [default: all]
    #[arg(long, alias = "carriers", value_name = "NAME", value_delimiter = ',')]
    transports: Vec<String>,
    /// DNS servers to measure [default: tidegate-xdp,nsd,knot,knot-xdp]
    #[arg(long, value_name = "SERVER", value_delimiter = ',', conflicts_with = "no_dns")]
    dns: Vec<ServerKind>,
    /// Measure no DNS servers
    #[arg(long)]
    no_dns: bool,
    /// Offered loads besides the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
    /// Hold every load for 10 seconds, instead of 2
    #[arg(long, conflicts_with = "quick")]
    long: bool,
    /// Only receive on this interface: what the test case raw runs
    #[arg(long, hide = true, value_name = "NAME", requires_all = ["address", "counters"])]
    as_raw_receiver: Option<String>,
    #[arg(long, hide = true)]
    address: Option<IpAddr>,
    #[arg(long, hide = true)]
    counters: Option<PathBuf>,
}

impl LivelockLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        if let (Some(interface), Some(address), Some(counters)) =
            (self.as_raw_receiver, self.address, self.counters)
        {
            let duration = Duration::from_secs_f64(self.measure.seconds.unwrap_or(10.0));
            let config = RawReceiverConfig { interface, address, counters, duration };
            return Ok(run_raw_receiver(&config)?);
        }
        let whole = livelock::LivelockConfig::default();
        let mut config = self.measure.config(
            if self.long { whole.long() } else { whole },
            livelock::LivelockConfig::quick,
            |config| (&mut config.seconds, &mut config.repeats),
        );
        config.carriers = self.transports;
        if !self.work_ns.is_empty() {
            config.work_ns = self.work_ns;
        }
        if self.no_dns || !self.dns.is_empty() {
            config.dns = self.dns;
        }
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        let result = livelock::run(&config)?;
        self.output.write(&result)
    }
}
