//! `tidegate lab protect`.

use clap::{Args, ValueEnum};
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
    /// Measure only this part
    #[arg(long, value_enum)]
    only: Option<Part>,
}

/// A part of the experiment.
#[derive(Clone, Copy, ValueEnum)]
enum Part {
    /// What the flood does to the rest of the machine at eight levels
    Levels,
    /// How soon a server recovers
    TimeLine,
    /// A known client among strangers
    Admission,
}

impl From<Part> for protect::Part {
    fn from(part: Part) -> Self {
        match part {
            Part::Levels => Self::Levels,
            Part::TimeLine => Self::TimeLine,
            Part::Admission => Self::Admission,
        }
    }
}

impl ProtectLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = self.measure.config(
            protect::ProtectConfig::default(),
            protect::ProtectConfig::quick,
            |config| (&mut config.seconds, &mut config.repeats),
        );
        config.only = self.only.map(Into::into);
        config.carriers = self.carriers;
        config.third_seconds = self.third.unwrap_or(config.third_seconds);
        let result = protect::run(&config)?;
        self.output.write(&result)
    }
}
