//! `tidegate lab protect`.

use clap::{Args, ValueEnum};
use tidegate_lab::experiments::jonack::protect;

use super::{Measure, PlotOutput};
use crate::Failure;

/// Flags of `lab protect`.
#[derive(Args)]
pub(crate) struct ProtectLab {
    #[command(flatten)]
    output: PlotOutput,
    #[command(flatten)]
    measure: Measure,
    /// Transports of the flooded service: kernel, or a mode of Tidegate
    /// [default: kernel,moderated,napi,polled+feedback]
    #[arg(long, alias = "carriers", value_name = "NAME", value_delimiter = ',')]
    transports: Vec<String>,
    /// Duration of each third of the time line, in seconds
    #[arg(long, value_name = "SECONDS")]
    third: Option<f64>,
    /// Measure only this part of the experiment [default: all parts]
    #[arg(long, value_enum)]
    only: Option<ProtectPart>,
}

/// Part of the experiment.
#[derive(Clone, Copy, ValueEnum)]
enum ProtectPart {
    /// Effect of the flood on the rest of the machine, at eight levels
    Levels,
    /// Recovery time of a server
    TimeLine,
    /// Service of a known client among unknown sources
    Admission,
    /// Total service with admission and without
    Conserve,
}

impl From<ProtectPart> for protect::ProtectPart {
    fn from(part: ProtectPart) -> Self {
        match part {
            ProtectPart::Levels => Self::Levels,
            ProtectPart::TimeLine => Self::TimeLine,
            ProtectPart::Admission => Self::Admission,
            ProtectPart::Conserve => Self::Conserve,
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
        config.carriers = self.transports;
        config.third_seconds = self.third.unwrap_or(config.third_seconds);
        let result = protect::run(&config)?;
        self.output.write(&result)
    }
}
