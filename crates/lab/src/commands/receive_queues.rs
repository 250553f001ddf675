//! `tidegate lab receive-queues`.

use std::time::Duration;

use clap::Args;
use tidegate_lab::experiments::rivera::receive_queues;

use super::PlotOutput;
use crate::Failure;

/// Flags of `lab receive-queues`.
#[derive(Args)]
pub(crate) struct ReceiveQueuesLab {
    #[command(flatten)]
    output: PlotOutput,
    /// Fewer packets and runs, for a first look
    #[arg(long)]
    quick: bool,
    /// Every case of the paper: 1 to 4 producers with 1 to 10 readers, and 1 to 10 of both; hours
    /// without smaller --packets, --runs and --cut-off
    #[arg(long, conflicts_with = "quick")]
    long: bool,
    /// Number of packets per reader [default: 1000000]
    #[arg(long, value_name = "COUNT")]
    packets: Option<u64>,
    /// Number of runs per case [default: 5]
    #[arg(long, value_name = "COUNT")]
    runs: Option<usize>,
    /// Numbers of producers to measure [default: none; 1,2,3,4 with --long or --readers]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    producers: Option<Vec<usize>>,
    /// Numbers of readers to measure [default: none; 1 to 10 with --long or
    /// --producers]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    readers: Option<Vec<usize>>,
    /// Numbers of producers and readers, equal for both [default: 1,4,10; 1 to 10 with --long]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    symmetric: Option<Vec<usize>>,
    /// Queue structures to measure [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    schemes: Vec<String>,
    /// Time limit of a run, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 25.0)]
    cut_off: f64,
}

impl ReceiveQueuesLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = receive_queues::ReceiveQueuesConfig::default();
        if self.quick {
            config = config.quick();
        }
        config.packets_per_reader = self.packets.unwrap_or(config.packets_per_reader);
        config.runs = self.runs.unwrap_or(config.runs);
        if self.long || self.readers.is_some() || self.producers.is_some() {
            config = config.long();
        }
        // Flags for readers or producers alone leave out the symmetric cases, and vice versa.
        if self.symmetric.is_some() && self.readers.is_none() && self.producers.is_none() {
            (config.producers, config.readers) = (Vec::new(), Vec::new());
        } else if self.symmetric.is_none() && (self.readers.is_some() || self.producers.is_some()) {
            config.symmetric = Vec::new();
        }
        config.producers = self.producers.unwrap_or(config.producers);
        config.readers = self.readers.unwrap_or(config.readers);
        config.symmetric = self.symmetric.unwrap_or(config.symmetric);
        config.schemes = self.schemes;
        config.time_limit = Duration::try_from_secs_f64(self.cut_off)
            .map_err(|error| format!("--cut-off {}: {error}", self.cut_off))?;
        let result = receive_queues::run(&config)?;
        self.output.write(&result)
    }
}
