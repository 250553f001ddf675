//! `tidegate lab dpdk`.

use std::io::Write;

use clap::Args;
use tidegate_lab::dpdk::{DpdkLabConfig, ForwardConfig, forward, run};

use super::{DrawnOutput, Measure};
use crate::Failure;

/// Flags of `lab dpdk`.
#[derive(Args)]
pub(crate) struct DpdkLab {
    #[command(flatten)]
    output: DrawnOutput,
    #[command(flatten)]
    measure: Measure,
    /// Only send back every frame of this device of DPDK's as it came, for --seconds [default: 10],
    /// and say how many
    #[arg(long, value_name = "DEVICE")]
    forward: Option<String>,
    /// Run on this processor only
    #[arg(long, value_name = "CPU", requires = "forward")]
    cpu: Option<usize>,
    /// Put so many frames into the device first, if it returns what it is sent
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
                // Who listens waits for it; who does not needs no error.
                let _ = writeln!(out, "ready: {} is open", config.device);
                let _ = out.flush();
            })?;
            println!("{}", serde_json::json!({ "frames_per_second": rate.round() }));
            return Ok(());
        }
        let config =
            self.measure.config(DpdkLabConfig::default(), DpdkLabConfig::quick, |config| {
                (&mut config.seconds, &mut config.repeats)
            });
        self.output.write(&run(&config)?)
    }
}
