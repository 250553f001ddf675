//! `tidegate lab queues`.

use std::time::Duration;

use clap::Args;
use tidegate_lab::queues;

use super::DrawnOutput;
use crate::Failure;

/// Flags of `lab queues`.
#[derive(Args)]
pub(crate) struct QueuesLab {
    #[command(flatten)]
    output: DrawnOutput,
    /// Only what the figures need, with fewer packets and runs, for a first
    /// look
    #[arg(long)]
    quick: bool,
    /// Packets for each reader [default: 1000000]
    #[arg(long, value_name = "COUNT")]
    packets: Option<u64>,
    /// How often to measure each case [default: 5]
    #[arg(long, value_name = "COUNT")]
    runs: Option<usize>,
    /// Numbers of producers [default: 1,2,3,4]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    producers: Option<Vec<usize>>,
    /// Numbers of readers [default: 1 to 10]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    readers: Option<Vec<usize>>,
    /// Numbers of both at once [default: 1 to 10]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    symmetric: Option<Vec<usize>>,
    /// Which queues [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    schemes: Vec<String>,
    /// After how long a run is cut off
    #[arg(long, value_name = "SECONDS", default_value_t = 25.0)]
    cut_off: f64,
}

impl QueuesLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = queues::QueuesConfig::default();
        if self.quick {
            config = config.quick();
        }
        config.packets_per_reader = self.packets.unwrap_or(config.packets_per_reader);
        config.runs = self.runs.unwrap_or(config.runs);
        // Asking for readers alone, or for both at once, leaves the rest out.
        if self.symmetric.is_some() && self.readers.is_none() && self.producers.is_none() {
            (config.producers, config.readers) = (Vec::new(), Vec::new());
        } else if self.symmetric.is_none() && (self.readers.is_some() || self.producers.is_some()) {
            config.symmetric = Vec::new();
        }
        config.producers = self.producers.unwrap_or(config.producers);
        config.readers = self.readers.unwrap_or(config.readers);
        config.symmetric = self.symmetric.unwrap_or(config.symmetric);
        config.schemes = self.schemes;
        config.cut_off = Duration::try_from_secs_f64(self.cut_off)
            .map_err(|error| format!("--cut-off {}: {error}", self.cut_off))?;
        let result = queues::run(&config, &mut |at| eprintln!("{at}"))?;
        self.output.write(&result)
    }
}
