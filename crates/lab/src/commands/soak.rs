//! `tidegate lab soak`.

use clap::Args;
use tidegate_lab::experiments::faults::soak;
use tidegate_lab::report::Progress;

use super::Output;
use crate::Failure;

/// Flags of `lab soak`.
#[derive(Args)]
pub(crate) struct SoakLab {
    #[command(flatten)]
    output: Output,
    /// Two seconds, for a first look
    #[arg(long)]
    quick: bool,
    /// Duration of the run, in seconds [default: 10]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Use AF_XDP on a veth pair instead of an in-memory link; needs root
    #[arg(long)]
    xdp: bool,
    /// Use IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,
    /// Probability of each fault per packet, from 0 to 1: loss, duplication, reordering and
    /// corruption
    #[arg(long, value_name = "PROBABILITY", default_value_t = 0.01)]
    faults: f64,
}

impl SoakLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = soak::SoakConfig {
            link: if self.xdp { soak::SoakLink::Xdp } else { soak::SoakLink::Mem },
            ipv6: self.ipv6,
            loss: self.faults,
            duplication: self.faults,
            reordering: self.faults,
            corruption: self.faults,
            ..soak::SoakConfig::default()
        };
        if self.quick {
            config = config.quick();
        }
        config.seconds = self.seconds.unwrap_or(config.seconds);
        let progress = Progress::new(config.seconds.ceil() as usize);
        let report = soak::run(&config, &mut |second| progress.step(second))?;
        drop(progress);
        self.output.write(&(&report).into())?;
        if report.unaccounted != 0 || report.frames_missing != 0 {
            return Err("packets or buffers are unaccounted for".into());
        }
        Ok(())
    }
}
