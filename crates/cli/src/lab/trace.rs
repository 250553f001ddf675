//! `tidegate lab trace`.

use clap::Args;
use tidegate_lab::trace;

use super::DrawnOutput;
use crate::Failure;

/// Flags of `lab trace`.
#[derive(Args)]
pub(crate) struct TraceLab {
    #[command(flatten)]
    output: DrawnOutput,
    /// Packets to follow
    #[arg(long, value_name = "COUNT", default_value_t = 20_000)]
    packets: usize,
    /// Bytes of payload in each
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    payload: usize,
}

impl TraceLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let config = trace::TraceConfig { packets: self.packets, payload_bytes: self.payload };
        let result = trace::run(&config)?;
        self.output.write(&result)
    }
}
