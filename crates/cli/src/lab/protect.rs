//! `tidegate lab protect`.

use clap::Args;
use tidegate_lab::protect;

use super::{Drawing, Output};
use crate::Failure;

/// Flags of `lab protect`.
#[derive(Args)]
pub(crate) struct ProtectLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    drawing: Drawing,
    /// Measure everything once and shortly, for a first look
    #[arg(long)]
    quick: bool,
    /// What carries the flooded service: kernel, or a mode of Tidegate
    /// [default: kernel,moderated,napi,polled+feedback]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    carriers: Vec<String>,
    /// How long to measure at each level
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// A third of the time line
    #[arg(long, value_name = "SECONDS")]
    third: Option<f64>,
    /// How often to measure everything; the median counts
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
}

impl ProtectLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = protect::ProtectConfig::default();
        if self.quick {
            config = config.quick();
        }
        config.carriers = self.carriers;
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.third_seconds = self.third.unwrap_or(config.third_seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        let result = protect::run(&config)?;
        self.drawing.write(&result)?;
        self.output.write(&result)
    }
}
