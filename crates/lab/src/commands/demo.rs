//! `tidegate demo`: a short demonstration, about a minute long.

use clap::Args;
use tidegate_lab::demo::{self, DemoConfig};

use super::{Output, clean_up_on_signal};
use crate::Failure;

/// Flags of `demo`.
#[derive(Args)]
pub(crate) struct Demo {
    #[command(flatten)]
    output: Output,
    /// Duration of each measurement, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    seconds: f64,
}

impl Demo {
    pub(crate) fn run(self) -> Result<(), Failure> {
        clean_up_on_signal(|| {
            let config = DemoConfig { seconds: self.seconds, ..DemoConfig::default() };
            let result = demo::run(&config)?;
            self.output.write(&result)
        })
    }
}
