//! `tidegate lab receive-trace`.

use clap::Args;
use tidegate_lab::experiments::rivera::receive_trace;

use super::PlotOutput;
use crate::Failure;

/// Flags of `lab receive-trace`.
#[derive(Args)]
pub(crate) struct ReceiveTraceLab {
    #[command(flatten)]
    output: PlotOutput,
    /// Number of packets to trace
    #[arg(long, value_name = "COUNT", default_value_t = 20_000)]
    packets: usize,
    /// Payload of each packet, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    payload: usize,
}

impl ReceiveTraceLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let config = receive_trace::ReceiveTraceConfig {
            packets: self.packets,
            payload_bytes: self.payload,
        };
        let result = receive_trace::run(&config)?;
        self.output.write(&result)
    }
}
