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
    /// Fewer packets, for a first look
    #[arg(long)]
    quick: bool,
    /// Number of packets to trace [default: 20000]
    #[arg(long, value_name = "COUNT")]
    packets: Option<usize>,
    /// Payload of each packet, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    payload: usize,
}

impl ReceiveTraceLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = receive_trace::ReceiveTraceConfig {
            payload_bytes: self.payload,
            ..receive_trace::ReceiveTraceConfig::default()
        };
        if self.quick {
            config = config.quick();
        }
        config.packets = self.packets.unwrap_or(config.packets);
        let result = receive_trace::run(&config)?;
        self.output.write(&result)
    }
}
