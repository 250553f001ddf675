//! `tidegate lab hostile`.

use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tidegate_lab::experiments::faults::hostile::{
    Attack, AttackerConfig, HostileConfig, HostilePart, run, run_attacker,
};

use super::Output;
use crate::Failure;

/// Flags of `lab hostile`.
#[derive(Args)]
pub(crate) struct HostileLab {
    #[command(flatten)]
    output: Output,
    /// Part to run [default: all parts]
    #[arg(long = "part", value_name = "PART", value_parser = parse_part)]
    parts: Vec<HostilePart>,
    /// Shorter and fewer measurements, for a first look
    #[arg(long)]
    quick: bool,
    /// Number of trials of each way to end a server [default: 200]
    #[arg(long, value_name = "COUNT")]
    trials: Option<u64>,
    /// Random seed; the same seed attacks at the same moments
    #[arg(long, value_name = "NUMBER", default_value_t = HostileConfig::default().seed)]
    seed: u64,
    /// Time until the effects of an attack must be over, in milliseconds
    #[arg(
        long,
        value_name = "MS",
        default_value_t = HostileConfig::default().limit.as_millis() as u64
    )]
    limit_ms: u64,
    /// Duration of the load beside each attached attacker, in seconds [default: 3]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Number of repetitions of that load; the median is reported [default: 5]
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
    /// Command that starts the daemon under attack, for another version; its first word also runs
    /// the programs [default: this program's daemon, with its rounds measured]
    #[arg(long, value_name = "COMMAND")]
    daemon: Option<String>,
    /// Attacker of the experiment; the experiment starts it itself
    #[arg(long, hide = true, requires_all = ["socket", "sink"], value_parser = parse_attack)]
    as_attacker: Option<Attack>,
    #[arg(long, hide = true)]
    socket: Option<PathBuf>,
    #[arg(long, hide = true)]
    sink: Option<SocketAddrV4>,
}

fn parse_part(name: &str) -> Result<HostilePart, String> {
    let found = HostilePart::ALL.into_iter().find(|part| part.name() == name);
    found.ok_or_else(|| {
        let names = HostilePart::ALL.map(HostilePart::name);
        format!("there is no part {name}; the parts are {}", names.join(" and "))
    })
}

fn parse_attack(name: &str) -> Result<Attack, String> {
    let found = Attack::ALL.into_iter().find(|attack| attack.name() == name);
    found.ok_or_else(|| format!("there is no attack {name}"))
}

impl HostileLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        if let (Some(attack), Some(socket), Some(sink)) = (self.as_attacker, self.socket, self.sink)
        {
            return Ok(run_attacker(&AttackerConfig { attack, socket, sink })?);
        }
        let mut config = HostileConfig {
            seed: self.seed,
            limit: Duration::from_millis(self.limit_ms),
            parts: self.parts,
            daemon: self.daemon,
            ..HostileConfig::default()
        };
        if self.quick {
            config = config.quick();
        }
        config.trials = self.trials.unwrap_or(config.trials);
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        if config.repeats == 0 || config.trials == 0 {
            return Err("--repeats and --trials: give 1 or more of each".into());
        }
        self.output.write(&run(&config)?)
    }
}
