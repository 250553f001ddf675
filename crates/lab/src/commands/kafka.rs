//! `tidegate lab kafka`.

use std::path::PathBuf;

use clap::Args;
use tidegate_lab::experiments::compare::kafka::{KafkaConfig, run};

use super::Output;
use crate::Failure;

/// Flags of `lab kafka`.
#[derive(Args)]
pub(crate) struct KafkaLab {
    #[command(flatten)]
    output: Output,
    /// Fewer messages, and once, for a first look
    #[arg(long)]
    quick: bool,
    /// Number of messages [default: 1000000; 100000 with --quick]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    messages: Option<u32>,
    /// Number of repetitions of each measurement; the median is reported [default: 5; 1 with --quick]
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
    /// Folder of the broker's Java archives and of the linked client; scripts/kafka fills it
    #[arg(long, value_name = "FOLDER", default_value = "target/kafka")]
    programs: PathBuf,
}

impl KafkaLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let (messages, repeats) = if self.quick { (100_000, 1) } else { (1_000_000, 5) };
        let config = KafkaConfig {
            messages: self.messages.unwrap_or(messages),
            repeats: self.repeats.unwrap_or(repeats).max(1),
            programs: self.programs,
        };
        self.output.write(&run(&config)?)
    }
}
