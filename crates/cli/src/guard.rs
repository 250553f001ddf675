//! `tidegate guard`: the gate in front of a server on the kernel's stack.

use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use tidegate::IpCidr;
use tidegate_engine::guard::{KernelGuard, Watch, policy};
use tidegate_gate::admission::{Admission, Config};

use crate::Failure;
use crate::config::{self, Text};
use crate::host::XdpMode;
use crate::process::{be_urgent, stop_flag};

/// Flags of `guard`.
#[derive(Args)]
pub(crate) struct Guard {
    /// The network interface
    #[arg(long, short, value_name = "NAME")]
    iface: String,
    /// A port of the server, as udp/53 or tcp/443; may be given several times.
    /// Everything else on the interface is left alone
    #[arg(long, value_name = "PROTOCOL/PORT", required = true)]
    port: Vec<Watch>,
    /// A network that goes first, whoever else comes; may be given several times
    #[arg(long, value_name = "PREFIX", conflicts_with = "config")]
    friend: Vec<Text<IpCidr>>,
    /// Take the classes from section [admission] of this TOML file [default: friends, then who
    /// was seen before, then strangers]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How to attach to the interface [default: auto: native, else generic]
    #[arg(long, value_enum, value_name = "MODE")]
    xdp_mode: Option<XdpMode>,
    /// Stop after so many seconds; otherwise at SIGINT or SIGTERM
    #[arg(long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Print the counters at the end as JSON
    #[arg(long)]
    json: bool,
}

impl Guard {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let config = match &self.config {
            Some(path) => config::admission(false, Some(path))?.ok_or_else(|| {
                let path = path.display();
                format!(
                    "{path}: there is no section [admission]; its classes are [[admission.class]]"
                )
            })?,
            None => {
                let friends: Vec<_> = self.friend.iter().map(|friend| friend.0).collect();
                policy(&self.port, &friends)
            }
        };
        let stop = stop_flag(self.duration)?;
        let mode = self.xdp_mode.map(Into::into).unwrap_or_default();

        let mut guard = KernelGuard::attach(&self.iface, mode, &config, &self.port, seed())?;
        be_urgent();
        self.ready(&guard)?;
        let began = Instant::now();
        let period = Duration::from_nanos(Config::PERIOD_NS);
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            guard.step(began.elapsed().as_nanos() as u64)?;
            thread::sleep(period);
        }
        // What was counted since the last step belongs to the report.
        guard.step(began.elapsed().as_nanos() as u64)?;
        self.report(guard.admission())
    }

    fn ready(&self, guard: &KernelGuard) -> Result<(), Failure> {
        let ports: Vec<_> = self.port.iter().map(ToString::to_string).collect();
        let way = if guard.is_native() { "native" } else { "generic" };
        let mut out = std::io::stdout().lock();
        writeln!(out, "ready: guard of {} on {} ({way})", ports.join(", "), self.iface)?;
        Ok(out.flush()?)
    }

    fn report(&self, admission: &Admission) -> Result<(), Failure> {
        let mut out = std::io::stdout().lock();
        if self.json {
            let classes: Vec<Value> = rows(admission).map(|(_, value)| value).collect();
            writeln!(out, "{}", json!({ "classes": classes }))?;
            return Ok(());
        }
        writeln!(out, "while not everything was admitted:")?;
        for (name, value) in rows(admission) {
            writeln!(
                out,
                "{name:<16} admitted {:>12}  refused {:>12} (closed {}, rate {}, source share {})",
                value["admitted"],
                value["refused"],
                value["refused_closed"],
                value["refused_rate"],
                value["refused_source_share"]
            )?;
        }
        Ok(())
    }
}

fn rows(admission: &Admission) -> impl Iterator<Item = (&str, Value)> {
    admission.classes().names().zip(admission.counters()).map(|(name, counters)| {
        let value = json!({
            "class": name,
            "admitted": counters.admitted,
            "refused": counters.refused(),
            "refused_closed": counters.refused_closed,
            "refused_rate": counters.refused_rate,
            "refused_source_share": counters.refused_source_share,
        });
        (name, value)
    })
}

/// A secret: the standard library keys its hashes from the system's randomness.
fn seed() -> [u8; 16] {
    let half = || u128::from(RandomState::new().hash_one(0));
    (half() << 64 | half()).to_le_bytes()
}
