//! `tidegate lab attach-latency`.

use clap::Args;
use tidegate_lab::experiments::diaz::attach_latency::{
    AttachLatencyConfig, IpcTransport, run, run_peer,
};

use super::Output;
use crate::Failure;

/// Flags of `lab attach-latency`.
#[derive(Args)]
pub(crate) struct AttachLatencyLab {
    #[command(flatten)]
    output: Output,
    /// Number of round trips per transport, one message at a time
    #[arg(long, value_name = "COUNT", default_value_t = AttachLatencyConfig::default().round_trips)]
    round_trips: u64,
    /// Number of messages sent in one direction per transport
    #[arg(long, value_name = "COUNT", default_value_t = AttachLatencyConfig::default().messages)]
    messages: u64,
    /// Number of repetitions of each measurement; the median is reported
    #[arg(long, value_name = "COUNT", default_value_t = AttachLatencyConfig::default().repeats)]
    repeats: usize,
    /// Peer process of the experiment; the experiment starts it itself
    #[arg(long, hide = true, requires = "cpu", value_parser = parse_transport)]
    as_peer: Option<IpcTransport>,
    #[arg(long, hide = true)]
    cpu: Option<usize>,
}

fn parse_transport(name: &str) -> Result<IpcTransport, String> {
    let transport = IpcTransport::ALL.into_iter().find(|transport| transport.name() == name);
    transport.ok_or_else(|| format!("there is no transport {name}"))
}

impl AttachLatencyLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        if let (Some(transport), Some(core)) = (self.as_peer, self.cpu) {
            return Ok(run_peer(transport, core)?);
        }
        let Self { output, round_trips, messages, repeats, .. } = self;
        if repeats == 0 {
            return Err("--repeats 0: nothing would be measured; give 1 or more".into());
        }
        output.write(&run(&AttachLatencyConfig { round_trips, messages, repeats })?)
    }
}
