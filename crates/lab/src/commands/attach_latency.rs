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
    /// Shorter and fewer measurements, for a first look
    #[arg(long)]
    quick: bool,
    /// Number of round trips per transport, one message at a time [default: 200000]
    #[arg(long, value_name = "COUNT")]
    round_trips: Option<u64>,
    /// Number of messages sent in one direction per transport [default: 5000000]
    #[arg(long, value_name = "COUNT")]
    messages: Option<u64>,
    /// Number of repetitions of each measurement; the median is reported [default: 5]
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
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
        let mut config = AttachLatencyConfig::default();
        if self.quick {
            config = config.quick();
        }
        config.round_trips = self.round_trips.unwrap_or(config.round_trips);
        config.messages = self.messages.unwrap_or(config.messages);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        if config.repeats == 0 {
            return Err("--repeats 0: nothing would be measured; give 1 or more".into());
        }
        self.output.write(&run(&config)?)
    }
}
