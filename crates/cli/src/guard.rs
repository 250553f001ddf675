//! `tidegate guard`: admission control in front of a server on the kernel's stack.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use tidegate::IpCidr;
use tidegate::device::xdp::AttachMode;
use tidegate_engine::guard::{KernelGuard, WatchedPort, policy};
use tidegate_gate::admission::{Admission, Config};

use crate::Failure;
use crate::config::{self, AsText, ConfigChanges};
use crate::host::attach_modes;
use crate::metrics::{Latest, MetricsOption, PUBLISH_INTERVAL, Readings, guard_readings};
use crate::process::{Startup, announce_ready, raise_priority, secret_seed};
use crate::reload::ReloadPart;
use crate::sandbox::{Obstacle, UserOption};

/// Flags of `guard`.
#[derive(Args)]
pub(crate) struct Guard {
    /// Network interface
    #[arg(long, short, value_name = "NAME")]
    iface: String,
    /// UDP or TCP port to guard, as udp/53 or tcp/443; may be repeated. All other traffic of the
    /// interface is left alone
    #[arg(long, value_name = "PROTOCOL/PORT", required = true)]
    port: Vec<WatchedPort>,
    /// Trusted network, admitted before all other sources; may be repeated
    #[arg(long, alias = "friend", value_name = "PREFIX", conflicts_with = "config")]
    trusted: Vec<AsText<IpCidr>>,
    /// Configuration file (TOML) with the classes in section [admission] [default: trusted
    /// sources, then known sources, then unknown sources]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// XDP attach mode [default: auto]
    #[arg(long, value_parser = attach_modes(), value_name = "MODE")]
    xdp_mode: Option<AsText<AttachMode>>,
    #[command(flatten)]
    metrics: MetricsOption,
    #[command(flatten)]
    user: UserOption,
    /// Stop after this many seconds; SIGINT and SIGTERM stop earlier [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Print the final counters as JSON
    #[arg(long)]
    json: bool,
}

impl Guard {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let startup = Startup::begin(&self.user, Obstacle::of_xdp(), self.duration, &self.metrics)?;
        let config = match &self.config {
            Some(path) => read_classes(path)?,
            None => {
                let trusted: Vec<_> = self.trusted.iter().map(|network| network.0).collect();
                policy(&self.port, &trusted)
            }
        };
        let mode = self.xdp_mode.map(|mode| mode.0).unwrap_or_default();
        let mut guard = KernelGuard::attach(&self.iface, mode, &config, &self.port, secret_seed())?;
        raise_priority();
        let (sender, changes) = channel();
        let stop = startup.stop();
        let latest = Latest::<Readings>::default();
        let mut parts = vec![classes_part(self.config.clone(), sender)];
        if let Some(path) = &self.config {
            let changes = ConfigChanges::since_now(path)?;
            parts.push(Box::new(move || {
                let named = changes.read()?;
                Ok(Box::new(move || Ok(named())))
            }));
        }
        let _threads = startup.finish(parts, &[], latest.clone())?;
        self.announce_ready(&guard)?;
        let began = Instant::now();
        let period = Duration::from_nanos(Config::PERIOD_NS);
        let mut published: Option<Instant> = None;
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            if let Some(config) = changes.try_iter().last() {
                guard.set_classes(&config, secret_seed())?;
            }
            guard.step(began.elapsed().as_nanos() as u64)?;
            if self.metrics.is_given()
                && published.is_none_or(|at| at.elapsed() >= PUBLISH_INTERVAL)
            {
                latest.publish(guard_readings(guard.admission()));
                published = Some(Instant::now());
            }
            thread::sleep(period);
        }
        // The report includes packets counted since the last step.
        guard.step(began.elapsed().as_nanos() as u64)?;
        self.report(guard.admission())
    }

    fn announce_ready(&self, guard: &KernelGuard) -> io::Result<()> {
        let ports: Vec<_> = self.port.iter().map(ToString::to_string).collect();
        let mode = if guard.is_native() { "native" } else { "generic" };
        announce_ready(format_args!("guard of {} on {} ({mode})", ports.join(", "), self.iface))
    }

    fn report(&self, admission: &Admission) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        if self.json {
            let classes: Vec<Value> = class_rows(admission).map(|(_, value)| value).collect();
            writeln!(out, "{}", json!({ "classes": classes }))?;
            return Ok(());
        }
        writeln!(out, "packets during overload, by class:")?;
        for (name, value) in class_rows(admission) {
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

/// Reads section `[admission]`.
fn read_classes(path: &Path) -> Result<Config, Failure> {
    let classes = config::admission(false, Some(path))?;
    Ok(classes.ok_or_else(|| {
        let path = path.display();
        format!("{path}: no section [admission]; define its classes as [[admission.class]]")
    })?)
}

/// Part of the reload that replaces the classes, if they are from a file.
fn classes_part(path: Option<PathBuf>, changes: Sender<Config>) -> ReloadPart {
    Box::new(move || {
        let Some(path) = &path else {
            return Err("the classes are not from a file: start it with --config".into());
        };
        let config = read_classes(path)?;
        Admission::new(&config, [0; 16])?;
        let changes = changes.clone();
        Ok(Box::new(move || {
            // The guard that would take them may have ended.
            let _ = changes.send(config);
            Ok("admission classes".to_owned())
        }))
    })
}

fn class_rows(admission: &Admission) -> impl Iterator<Item = (&str, Value)> {
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
