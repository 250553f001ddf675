//! `tidegate lab protect`.

use clap::Args;
use tidegate_lab::protect;

use super::{DrawnOutput, Measure};
use crate::Failure;

/// Flags of `lab protect`.
#[derive(Args)]
pub(crate) struct ProtectLab {
    #[command(flatten)]
    output: DrawnOutput,
    #[command(flatten)]
    measure: Measure,
    /// What carries the flooded service: kernel, or a mode of Tidegate
    /// [default: kernel,moderated,napi,polled+feedback]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    carriers: Vec<String>,
    /// A third of the time line
    #[arg(long, value_name = "SECONDS")]
    third: Option<f64>,
}

impl ProtectLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = self.measure.config(
            protect::ProtectConfig::default(),
            protect::ProtectConfig::quick,
            |config| (&mut config.seconds, &mut config.repeats),
        );
        config.carriers = self.carriers;
        config.third_seconds = self.third.unwrap_or(config.third_seconds);
        let result = protect::run(&config)?;
        self.output.write(&result)
    }
}
