//! `tidegate lab monitor`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use signal_hook::consts::{SIGINT, SIGTERM};
use tidegate_lab::experiments::mogul::monitor;
use tidegate_lab::testbed::plain_reader::run_plain_reader;

use super::{Measure, PlotOutput};
use crate::Failure;

/// Flags of `lab monitor`.
#[derive(Args)]
pub(crate) struct MonitorLab {
    #[command(flatten)]
    output: PlotOutput,
    #[command(flatten)]
    measure: Measure,
    /// Offered loads besides the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
    /// Be the reader that only counts the frames of this interface; the experiment starts it
    #[arg(long, value_name = "NAME", hide = true)]
    as_plain_reader: Option<String>,
    /// Memory of the ring of that reader in MiB
    #[arg(long, value_name = "MIB", hide = true, default_value_t = 8)]
    ring_mib: usize,
}

impl MonitorLab {
    /// True for the process that only counts: it ends by a signal as a monitor does.
    pub(super) fn is_reader(&self) -> bool {
        self.as_plain_reader.is_some()
    }

    pub(super) fn run(self) -> Result<(), Failure> {
        if let Some(interface) = self.as_plain_reader {
            let stop = Arc::new(AtomicBool::new(false));
            for signal in [SIGINT, SIGTERM] {
                signal_hook::flag::register(signal, Arc::clone(&stop))?;
            }
            return Ok(run_plain_reader(&interface, self.ring_mib << 20, &stop)?);
        }
        let mut config = self.measure.config(
            monitor::MonitorConfig::default(),
            monitor::MonitorConfig::quick,
            |config| (&mut config.seconds, &mut config.repeats),
        );
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        let result = monitor::run(&config)?;
        self.output.write(&result)
    }
}
