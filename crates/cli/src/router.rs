//! `tidegate route` and `tidegate screen`.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde::Deserialize;
use serde_json::{Value, json};
use tidegate::Route;
use tidegate_apps::router::{self, Forwarder, PortSpec, Priorities, RouterConfig};
use tidegate_apps::screen::{Rules, ScreenConfig, Screener};
use tidegate_gate::{Config, Mode, Quota, Settings};

use crate::Failure;
use tidegate::host::parse_route;

use crate::host::pin_to;
use crate::process::stop_flag;
use crate::report::drops_json;

/// Flags of `route`.
#[derive(Args)]
pub(crate) struct RouteCommand {
    /// A port with the router's addresses there; give one for each link. KIND is xdp, packet, tap
    /// or dpdk, whose INTERFACE is a device as net_memif0,role=client,id=0
    #[arg(long, short, value_name = "KIND:INTERFACE,ADDRESS/BITS,...")]
    port: Vec<String>,
    /// A route beyond the links, as PREFIX=GATEWAY; may be given several times
    #[arg(long, value_name = "PREFIX=GATEWAY")]
    route: Vec<String>,
    /// How packets are looked for [default: polled]
    #[arg(long, value_enum, value_name = "MODE")]
    mode: Option<GateMode>,
    /// The most packets of one turn of a receive or transmit ring, or `unlimited` [default: 64]
    #[arg(long, value_name = "PACKETS")]
    quota: Option<Quota>,
    /// Go on receiving when the queue to the screen is full
    #[arg(long)]
    no_feedback: bool,
    /// The share of the processor that packets may take, in percent [default: 100]
    #[arg(long, value_name = "PERCENT")]
    cpu_share: Option<u32>,
    /// Show every packet to the screen that listens at this path
    #[arg(long, value_name = "PATH")]
    screen: Option<PathBuf>,
    /// The most packets of one message to the screen [default: 1]
    #[arg(long, value_name = "PACKETS")]
    screen_batch: Option<usize>,
    /// Packet buffers [default: 16384]
    #[arg(long, value_name = "COUNT")]
    frames: Option<u32>,
    /// Do not try to get hugepages
    #[arg(long)]
    no_hugepages: bool,
    /// Run on this processor only
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// Come before every program on this processor, as a kernel's network code does
    #[arg(long)]
    realtime: bool,
    /// Take what the flags leave open from this TOML file, sections [router] and [gate]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Stop after so many seconds; otherwise at SIGINT or SIGTERM
    #[arg(long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Print the counters at the end as JSON
    #[arg(long)]
    json: bool,
}

/// The modes of the gate, with what they are.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum GateMode {
    /// 4.2BSD's shape: receive work first, into a bounded queue
    Interrupt,
    /// As interrupt, with a limited rate of interrupts
    Moderated,
    /// Linux's shape: rounds with a weight, a budget and a time
    Napi,
    /// Rings take turns with a quota each
    Polled,
    /// Polling without end
    Dedicated,
}

impl From<GateMode> for Mode {
    fn from(mode: GateMode) -> Self {
        match mode {
            GateMode::Interrupt => Self::Interrupt,
            GateMode::Moderated => Self::Moderated,
            GateMode::Napi => Self::Napi,
            GateMode::Polled => Self::Polled,
            GateMode::Dedicated => Self::Dedicated,
        }
    }
}

/// The file of `--config`.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct File {
    router: RouterSection,
    gate: Config,
}

/// Section `[router]`.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct RouterSection {
    port: Vec<String>,
    route: Vec<String>,
    screen: Option<PathBuf>,
    screen_batch: Option<usize>,
    frames: Option<u32>,
    no_hugepages: bool,
    cpu: Option<usize>,
    realtime: bool,
}

/// Real-time priorities of the halves of a router: receiving comes before
/// protocol work, and both before programs.
const PRIORITIES: Priorities = Priorities { receive: Some(2), protocol: Some(1) };

impl RouteCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let file = self.config.as_deref().map_or(Ok(File::default()), read_file)?;
        if let Some(cpu) = self.cpu.or(file.router.cpu) {
            pin_to(cpu)?;
        }
        let realtime = self.realtime || file.router.realtime;
        let priorities = if realtime { PRIORITIES } else { Priorities::default() };
        let config = self.router_config(file)?;
        let mode = config.gate.config().mode;
        let stop = stop_flag(self.duration)?;
        let mut forwarder = router::open(config)?;
        let kinds: Vec<_> = forwarder.reports().into_iter().map(|report| report.kind).collect();
        let mut out = std::io::stdout().lock();
        writeln!(out, "ready: route in mode {} by {}", mode.name(), kinds.join(", "))?;
        out.flush()?;
        drop(out);
        router::run(&mut forwarder, priorities, &stop).map_err(|error| match error.kind() {
            std::io::ErrorKind::PermissionDenied if realtime => {
                format!("--realtime: {error}; it needs root or CAP_SYS_NICE").into()
            }
            _ => Failure::from(error),
        })?;
        print(&mut forwarder, mode, self.json)
    }

    /// The flags, with what they leave open from the file.
    fn router_config(&self, file: File) -> Result<RouterConfig, Failure> {
        let section = file.router;
        let pick = |flags: &Vec<String>, file: Vec<String>| {
            if flags.is_empty() { file } else { flags.clone() }
        };
        let mut gate = file.gate;
        gate.mode = self.mode.map_or(gate.mode, Mode::from);
        if let Some(quota) = self.quota {
            (gate.receive_quota, gate.transmit_quota) = (quota, quota);
            gate.application_quota = quota;
        }
        gate.feedback &= !self.no_feedback;
        gate.cpu_share_percent = self.cpu_share.unwrap_or(gate.cpu_share_percent);
        let mut config = RouterConfig {
            gate: Settings::new(gate)?,
            hugepages: !(self.no_hugepages || section.no_hugepages),
            ..RouterConfig::default()
        };
        for port in pick(&self.port, section.port) {
            config.ports.push(port.parse::<PortSpec>()?);
        }
        for route in pick(&self.route, section.route) {
            let route: Route = parse_route(&route)?;
            config.routes.push(route);
        }
        if let Some(path) = self.screen.clone().or(section.screen) {
            let batch = self.screen_batch.or(section.screen_batch).unwrap_or(1);
            config.screen = Some(ScreenConfig { path, batch });
        }
        config.frames = self.frames.or(section.frames).unwrap_or(config.frames);
        Ok(config)
    }
}

fn read_file(path: &Path) -> Result<File, Failure> {
    let fail = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fail(&error))?;
    Ok(toml::from_str(&text).map_err(|error| fail(&error))?)
}

fn print(forwarder: &mut Forwarder, mode: Mode, as_json: bool) -> Result<(), Failure> {
    let (counters, screen) = (forwarder.counters(), forwarder.screen_counters());
    let gate = *forwarder.gate().counters();
    let ports = forwarder.reports();
    let drops = forwarder.drops();
    if as_json {
        let port = |port: &router::PortReport| {
            json!({
                "port": port.kind,
                "received": port.port.received,
                "transmitted": port.port.transmitted,
                "forwarded": port.stack.forwarded,
                "handled": port.stack.handled,
                "icmp_errors_sent": port.stack.icmp_errors_sent,
            })
        };
        let screen = screen.map_or(Value::Null, |screen| {
            json!({
                "asked": screen.asked,
                "passed": screen.passed,
                "refused": screen.refused,
                "connections": screen.connections,
                "stray": screen.stray,
            })
        });
        let report = json!({
            "mode": mode.name(),
            "ports": ports.iter().map(port).collect::<Vec<_>>(),
            "screen": screen,
            "turns": counters.turns,
            "busy_turns": counters.busy_turns,
            "sleeps": counters.sleeps,
            "held_by_feedback": gate.held_by_feedback,
            "held_by_share": gate.held_by_share,
            "share_lifted": gate.lifted,
            "drops": drops_json(&drops),
        });
        println!("{report}");
        return Ok(());
    }
    for port in &ports {
        println!(
            "{}: {} received, {} to be forwarded, {} transmitted",
            port.kind, port.port.received, port.stack.forwarded, port.port.transmitted
        );
    }
    if let Some(screen) = screen {
        println!(
            "screen: {} asked, {} passed, {} refused",
            screen.asked, screen.passed, screen.refused
        );
    }
    for (reason, packets) in drops.nonzero() {
        println!("{packets:>12} dropped: {:<28} {}", reason.name(), reason.sentence());
    }
    Ok(())
}

/// Flags of `screen`.
#[derive(Args)]
pub(crate) struct ScreenCommand {
    /// The rules: a TOML file with `default` and `[[rule]]` sections
    #[arg(long, value_name = "FILE")]
    rules: PathBuf,
    /// Where to listen for the router: a path that does not exist yet
    #[arg(long, value_name = "PATH")]
    listen: PathBuf,
    /// The most verdicts of one message, while packets wait [default: 1]
    #[arg(long, value_name = "VERDICTS", default_value_t = 1)]
    batch: usize,
    /// Run on this processor only
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// Stop after so many seconds; otherwise at SIGINT or SIGTERM
    #[arg(long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Print the counters at the end as JSON
    #[arg(long)]
    json: bool,
}

impl ScreenCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if let Some(cpu) = self.cpu {
            pin_to(cpu)?;
        }
        let fail = |error: &dyn std::fmt::Display| format!("{}: {error}", self.rules.display());
        let text = std::fs::read_to_string(&self.rules).map_err(|error| fail(&error))?;
        let rules: Rules = text.parse().map_err(|error| fail(&error))?;
        let stop = stop_flag(self.duration)?;
        let count = rules.len();
        let mut screener = Screener::listen(&self.listen, rules)?.batch(self.batch);
        let mut out = std::io::stdout().lock();
        writeln!(out, "ready: screen with {count} rules at {}", self.listen.display())?;
        out.flush()?;
        drop(out);
        let report = screener.run(&stop)?;
        if self.json {
            let report = json!({
                "passed": report.passed,
                "refused": report.refused,
                "connections": report.connections,
            });
            println!("{report}");
        } else {
            println!("{} passed, {} refused", report.passed, report.refused);
        }
        Ok(())
    }
}
