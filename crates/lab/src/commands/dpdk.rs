//! `tidegate lab dpdk`.

use std::io::Write;

use clap::Args;
use tidegate_lab::experiments::farias::dpdk::{DpdkLabConfig, ForwardConfig, forward, run};

use super::{Measure, PlotOutput};
use crate::Failure;
use crate::output::print_line;

/// Flags of `lab dpdk`.
#[derive(Args)]
pub(crate) struct DpdkLab {
    #[command(flatten)]
    output: PlotOutput,
    #[command(flatten)]
    measure: Measure,
    /// Only forward: send every frame of this DPDK device back unchanged for --seconds
    /// [default: 10] and print the rate
    #[arg(long, value_name = "DEVICE")]
    forward: Option<String>,
    /// Pin to this processor
    #[arg(long, value_name = "CPU", requires = "forward")]
    cpu: Option<usize>,
    /// Number of frames to transmit first, for a device that loops frames back
    #[arg(long, value_name = "COUNT", requires = "forward", default_value_t = 0)]
    frames: usize,
}

impl DpdkLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        if let Some(device) = self.forward {
            let Ok(device) = device.parse();
            let seconds = self.measure.seconds.unwrap_or(10.0);
            let config = ForwardConfig { device, core: self.cpu, seconds, frames: self.frames };
            let mut out = std::io::stdout().lock();
            let rate = forward(&config, || {
                // The reader of the ready line may have gone; that is no error.
                let _ = writeln!(out, "ready: {} is open", config.device);
                let _ = out.flush();
            })?;
            print_line!("{}", serde_json::json!({ "frames_per_second": rate.round() }))?;
            return Ok(());
        }
        let config =
            self.measure.config(DpdkLabConfig::default(), DpdkLabConfig::quick, |config| {
                (&mut config.seconds, &mut config.repeats)
            });
        self.output.write(&run(&config)?)
    }
}
