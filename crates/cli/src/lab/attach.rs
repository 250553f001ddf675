//! `tidegate lab attach`.

use clap::Args;
use tidegate_lab::attach::{AttachConfig, Way, peer, run};

use super::Output;
use crate::Failure;

/// Flags of `lab attach`.
#[derive(Args)]
pub(crate) struct AttachLab {
    #[command(flatten)]
    output: Output,
    /// Messages that go there and back, one at a time
    #[arg(long, value_name = "COUNT", default_value_t = AttachConfig::default().round_trips)]
    round_trips: u64,
    /// Messages that go one way
    #[arg(long, value_name = "COUNT", default_value_t = AttachConfig::default().messages)]
    messages: u64,
    /// How often to measure everything; the median counts
    #[arg(long, value_name = "COUNT", default_value_t = AttachConfig::default().repeats)]
    repeats: usize,
    /// The other process of the experiment, which starts it itself
    #[arg(long, hide = true, requires = "cpu", value_parser = way)]
    as_peer: Option<Way>,
    #[arg(long, hide = true)]
    cpu: Option<usize>,
}

fn way(name: &str) -> Result<Way, String> {
    let found = Way::ALL.into_iter().find(|way| way.name() == name);
    found.ok_or_else(|| format!("there is no way {name}"))
}

impl AttachLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        if let (Some(way), Some(core)) = (self.as_peer, self.cpu) {
            return Ok(peer(way, core)?);
        }
        let Self { output, round_trips, messages, repeats, .. } = self;
        if repeats == 0 {
            return Err("--repeats 0: nothing would be measured; give 1 or more".into());
        }
        output.write(&run(&AttachConfig { round_trips, messages, repeats })?)
    }
}
