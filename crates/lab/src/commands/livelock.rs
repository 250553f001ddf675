//! `tidegate lab livelock`.

use clap::Args;
use tidegate_lab::experiments::mogul::livelock;
use tidegate_lab::testbed::dns::servers::ServerKind;

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
    /// Transports of the service: kernel, or a mode of Tidegate [default: all]
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
}

impl LivelockLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = self.measure.config(
            livelock::LivelockConfig::default(),
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
