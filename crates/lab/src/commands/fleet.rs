//! `tidegate lab fleet`.

use clap::{Args, ValueEnum};
use tidegate_lab::experiments::compare::fleet::{FleetConfig, FleetPart, run};

use super::{Measure, Output};
use crate::Failure;

/// Flags of `lab fleet`.
#[derive(Args)]
pub(crate) struct FleetLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    measure: Measure,
    /// Requests per second of the clients, to the whole fleet [default: 3000]
    #[arg(long, value_name = "RATE")]
    rate: Option<f64>,
    /// Flood of one server, in multiples of its capacity [default: 10]
    #[arg(long, value_name = "FACTOR")]
    flood: Option<f64>,
    /// Measure only these parts [default: all]
    #[arg(long, value_enum, value_name = "PART", value_delimiter = ',')]
    only: Vec<PartName>,
}

/// Name of a part.
#[derive(Clone, Copy, ValueEnum)]
enum PartName {
    /// A server is drained, and announced again
    Drain,
    /// The same, with dnsperf as the client
    Dnsperf,
    /// A server is killed
    Server,
    /// An announcer is killed
    Announcer,
    /// A server is flooded
    Flood,
}

impl From<PartName> for FleetPart {
    fn from(name: PartName) -> Self {
        match name {
            PartName::Drain => Self::Drain,
            PartName::Dnsperf => Self::Dnsperf,
            PartName::Server => Self::Server,
            PartName::Announcer => Self::Announcer,
            PartName::Flood => Self::Flood,
        }
    }
}

impl FleetLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config =
            self.measure.config(FleetConfig::default(), FleetConfig::quick, |config| {
                (&mut config.seconds, &mut config.repeats)
            });
        config.rate_pps = self.rate.unwrap_or(config.rate_pps);
        config.flood_factor = self.flood.unwrap_or(config.flood_factor);
        config.only = self.only.into_iter().map(Into::into).collect();
        self.output.write(&run(&config)?)
    }
}
