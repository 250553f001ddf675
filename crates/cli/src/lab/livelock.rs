//! `tidegate lab livelock`.

use clap::Args;
use tidegate_lab::{dns, livelock};

use super::{Drawing, Output};
use crate::Failure;

/// Flags of `lab livelock`.
#[derive(Args)]
pub(crate) struct LivelockLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    drawing: Drawing,
    /// Measure everything once and shortly, for a first look
    #[arg(long)]
    quick: bool,
    /// Work for each packet [default: 0,500,2000,10000]
    #[arg(long, value_name = "NANOSECONDS", value_delimiter = ',')]
    work_ns: Vec<u64>,
    /// What carries the service: kernel, or a mode of Tidegate [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    carriers: Vec<String>,
    /// Which DNS servers [default: tidegate-xdp,nsd,knot,knot-xdp]
    #[arg(long, value_name = "SERVER", value_delimiter = ',', conflicts_with = "no_dns")]
    dns: Vec<dns::servers::ServerKind>,
    /// No DNS servers
    #[arg(long)]
    no_dns: bool,
    /// Loads to offer besides the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
    /// How long to measure at each load
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// How often to measure everything; the median counts
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
}

impl LivelockLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = livelock::LivelockConfig::default();
        if self.quick {
            config = config.quick();
        }
        config.carriers = self.carriers;
        if !self.work_ns.is_empty() {
            config.work_ns = self.work_ns;
        }
        if self.no_dns || !self.dns.is_empty() {
            config.dns = self.dns;
        }
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        let result = livelock::run(&config)?;
        self.drawing.write(&result)?;
        self.output.write(&result)
    }
}
