//! `tidegate route` and `tidegate filter`.

use std::path::{Path, PathBuf};

use clap::{Arg, Args, Command, ValueEnum};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidegate::{AddressProbe, DropCounters, Route};
use tidegate_apps::filter::{FilterConfig, FilterReloader, FilterRules, FilterServer};
use tidegate_apps::router::{
    self, Forwarder, InterfaceSpec, Priorities, RouterConfig, RouterDevice,
};
use tidegate_gate::{Config, Mode, Quota, Settings};

use crate::Failure;
use crate::config::{AsText, SectionFlags};
use crate::core_placement::{check_cores, check_cpus, run_on_cores};
use crate::host::{address_probes, parse_route, pin_to};
use crate::metrics::{
    Latest, MetricsOption, PUBLISH_INTERVAL, Readings, RouterCounters, RouterSource,
};
use crate::output::print_line;
use crate::process::{Startup, announce_ready};
use crate::reload::ReloadPart;
use crate::report::drops_json;
use crate::sandbox::{Obstacle, UserOption};

/// Flags of `route`.
#[derive(Args)]
pub(crate) struct RouteCommand {
    /// Interface of the router with its addresses; one per link. KIND is xdp, packet, tap or
    /// dpdk; for dpdk, INTERFACE is a device as net_memif0,role=client,id=0
    #[arg(
        long,
        short,
        alias = "port",
        short_alias = 'p',
        value_name = "KIND:INTERFACE,ADDRESS/BITS,..."
    )]
    io: Vec<String>,
    /// Static route beyond the links, as PREFIX=GATEWAY; may be repeated
    #[arg(long, value_name = "PREFIX=GATEWAY")]
    route: Vec<String>,
    /// Check that no other host uses an address of the router [default: quick]
    #[arg(long, value_parser = address_probes(), value_name = "PROBE")]
    probe: Option<AsText<AddressProbe>>,
    /// Receive mode [default: polled]
    #[arg(long, value_enum, value_name = "MODE")]
    mode: Option<GateMode>,
    /// Maximum number of packets per turn of a receive or transmit ring, or `unlimited`
    /// [default: 64]
    #[arg(long, value_name = "PACKETS")]
    quota: Option<Quota>,
    /// Disable feedback: keep receiving when the queue to the filter is full
    #[arg(long)]
    no_feedback: bool,
    /// Maximum share of CPU time for packet processing, in percent [default: 100]
    #[arg(long, value_name = "PERCENT")]
    cpu_share: Option<u32>,
    /// Send every packet to the filter that listens on this Unix socket
    #[arg(long, alias = "screen", value_name = "PATH")]
    filter: Option<PathBuf>,
    /// Maximum number of packets per message to the filter [default: 1]
    #[arg(long, alias = "screen-batch", value_name = "PACKETS")]
    filter_batch: Option<usize>,
    /// Number of packet buffers of each network core [default: 16384]
    #[arg(long, value_name = "COUNT")]
    frames: Option<u32>,
    /// Use ordinary pages instead of hugepages
    #[arg(long)]
    no_hugepages: bool,
    /// Number of network cores: threads that each forward what their own receive queue of each
    /// interface brings [default: 1]
    #[arg(long, value_name = "COUNT")]
    cores: Option<usize>,
    /// Pin the network cores to these processors, round-robin
    #[arg(long, value_name = "CPU", value_delimiter = ',')]
    core_cpus: Vec<usize>,
    /// Pin to this processor
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// Run at real-time priority, before all applications on this processor, as a kernel's
    /// network code does
    #[arg(long)]
    realtime: bool,
    #[command(flatten)]
    metrics: MetricsOption,
    #[command(flatten)]
    user: UserOption,
    /// Configuration file (TOML), sections [router] and [gate]. Flags take precedence
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Stop after this many seconds; SIGINT and SIGTERM stop earlier [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Print the final counters as JSON
    #[arg(long)]
    json: bool,
}

/// Receive mode of a router.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum GateMode {
    /// As in 4.2BSD: receive work first, into a bounded queue
    Interrupt,
    /// As interrupt, with a limited interrupt rate
    Moderated,
    /// As in Linux: rounds with a weight, a budget and a time limit
    Napi,
    /// Rings take turns with a quota each
    Polled,
    /// Endless busy-polling
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

/// Configuration file of `--config`.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct RouterFile {
    router: RouterSection,
    gate: Config,
}

/// Section `[router]`.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RouterSection {
    #[serde(alias = "port")]
    io: Vec<String>,
    route: Vec<String>,
    probe: Option<AsText<AddressProbe>>,
    #[serde(alias = "screen")]
    filter: Option<PathBuf>,
    #[serde(alias = "screen-batch")]
    filter_batch: Option<usize>,
    frames: Option<u32>,
    no_hugepages: bool,
    cores: Option<usize>,
    core_cpus: Vec<usize>,
    cpu: Option<usize>,
    realtime: bool,
}

/// Real-time priorities of a router's threads: the receive thread runs before the protocol
/// thread, and both before applications.
const REALTIME_PRIORITIES: Priorities = Priorities { receive: Some(2), protocol: Some(1) };

/// Keys of section `[router]`: flags of `route`.
const SECTION_KEYS: [&str; 11] = [
    "io",
    "route",
    "probe",
    "filter",
    "filter-batch",
    "frames",
    "no-hugepages",
    "cores",
    "core-cpus",
    "cpu",
    "realtime",
];

/// Section `[router]`, with its flags.
pub(crate) fn section_flags() -> SectionFlags {
    let all = RouteCommand::augment_args(Command::new("route"));
    let is_key = |flag: &Arg| flag.get_long().is_some_and(|name| SECTION_KEYS.contains(&name));
    let keys = all.get_arguments().filter(|flag| is_key(flag)).cloned();
    ("router", Command::new("router").args(keys))
}

impl RouteCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let file = self.config.as_deref().map_or(Ok(RouterFile::default()), read_file)?;
        let cpu = self.cpu.or(file.router.cpu);
        let cores = self.cores.or(file.router.cores).unwrap_or(1);
        check_cores(cores)?;
        let core_cpus = if self.core_cpus.is_empty() {
            file.router.core_cpus.clone()
        } else {
            self.core_cpus.clone()
        };
        check_cpus("--core-cpus", &core_cpus)?;
        let realtime = self.realtime || file.router.realtime;
        let priorities = if realtime { REALTIME_PRIORITIES } else { Priorities::default() };
        let config = self.router_config(file)?;
        let obstacle = config.interfaces.iter().find_map(|interface| match interface.device {
            RouterDevice::Dpdk(_) => Some(Obstacle::Dpdk),
            RouterDevice::Xdp(_) => Obstacle::of_xdp(),
            _ => None,
        });
        let filter = config.filter.as_ref().map(|filter| filter.path.clone());
        let startup = Startup::begin(&self.user, obstacle, self.duration, &self.metrics)?;
        if let Some(cpu) = cpu {
            pin_to(cpu)?;
        }
        let mode = config.gate.config().mode;
        let devices = config.interfaces.iter().map(|interface| interface.device.name()).collect();
        let mut forwarders = router::open_cores(config, cores)?;
        priorities
            .acquire()
            .map_err(|error| format!("--realtime: {error}; it needs root or CAP_SYS_NICE"))?;
        let stop = startup.stop();
        let parts: Vec<ReloadPart> = vec![Box::new(|| {
            Err("a router reads its configuration only when it starts: restart it; its filter can be reloaded".into())
        })];
        let cores = if self.metrics.is_given() { watch(&mut forwarders) } else { Vec::new() };
        let source = RouterSource { devices, cores };
        let _threads = startup.finish(parts, &[], source)?;
        if let Some(path) = filter {
            warn_unless_accessible(&path);
        }
        let first = &mut forwarders[0];
        let kinds: Vec<_> = first.reports().into_iter().map(|report| report.kind).collect();
        first.on_ready(Box::new(move || {
            announce_ready(format_args!("route in mode {} by {}", mode.name(), kinds.join(", ")))
        }));
        run_on_cores(forwarders.iter_mut().collect(), &core_cpus, &stop, |forwarder| {
            router::run(forwarder, priorities, &stop)
        })?;
        print_report(&mut forwarders, mode, self.json)
    }

    /// Returns the configuration of the flags, with unset flags taken from the file.
    fn router_config(&self, file: RouterFile) -> Result<RouterConfig, Failure> {
        let section = file.router;
        let flags_or_file = |flags: &Vec<String>, file: Vec<String>| {
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
        for interface in flags_or_file(&self.io, section.io) {
            config.interfaces.push(interface.parse::<InterfaceSpec>()?);
        }
        for route in flags_or_file(&self.route, section.route) {
            let route: Route = parse_route(&route)?;
            config.routes.push(route);
        }
        if let Some(path) = self.filter.clone().or(section.filter) {
            let batch = self.filter_batch.or(section.filter_batch).unwrap_or(1);
            config.filter = Some(FilterConfig { path, batch });
        }
        config.probe = self.probe.or(section.probe).map_or(config.probe, |probe| probe.0);
        config.frames = self.frames.or(section.frames).unwrap_or(config.frames);
        Ok(config)
    }
}

/// Checks a router's configuration file without opening anything.
pub(crate) fn check_file(path: &Path) -> Result<(), Failure> {
    let file = read_file(path)?;
    let fail = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    Settings::new(file.gate).map_err(|error| fail(&error))?;
    for interface in &file.router.io {
        interface.parse::<InterfaceSpec>().map_err(|error| fail(&error))?;
    }
    for route in &file.router.route {
        parse_route(route).map_err(|error| fail(&error))?;
    }
    Ok(())
}

fn read_file(path: &Path) -> Result<RouterFile, Failure> {
    let fail = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fail(&error))?;
    Ok(toml::from_str(&text).map_err(|error| fail(&error))?)
}

/// Counters of an interface on all network cores.
#[derive(Default, Serialize)]
struct InterfaceCounts {
    #[serde(rename = "port")]
    kind: String,
    received: u64,
    transmitted: u64,
    forwarded: u64,
    handled: u64,
    icmp_errors_sent: u64,
}

impl InterfaceCounts {
    fn add(&mut self, report: &router::InterfaceReport) {
        self.received += report.device.received;
        self.transmitted += report.device.transmitted;
        self.forwarded += report.stack.forwarded;
        self.handled += report.stack.handled;
        self.icmp_errors_sent += report.stack.icmp_errors_sent;
    }
}

fn print_report(forwarders: &mut [Forwarder], mode: Mode, as_json: bool) -> Result<(), Failure> {
    let mut interfaces: Vec<InterfaceCounts> = Vec::new();
    let (mut turns, mut gate, mut drops) = (Vec::new(), Vec::new(), DropCounters::new());
    let mut received_by_core = Vec::new();
    for forwarder in &mut *forwarders {
        let reports = forwarder.reports();
        received_by_core.push(reports.iter().map(|report| report.device.received).sum::<u64>());
        for (at, report) in reports.iter().enumerate() {
            if at == interfaces.len() {
                interfaces
                    .push(InterfaceCounts { kind: report.kind.clone(), ..Default::default() });
            }
            interfaces[at].add(report);
        }
        turns.push(forwarder.counters());
        gate.push(*forwarder.gate().counters());
        drops.merge(&forwarder.drops());
    }
    // Only one network core has a filter.
    let filter = forwarders[0].filter_counters();
    if as_json {
        let filter = filter.map_or(Value::Null, |filter| {
            json!({
                "asked": filter.requests,
                "passed": filter.passed,
                "refused": filter.refused,
                "connections": filter.connections,
                "stray": filter.stray_verdicts,
            })
        });
        let report = json!({
            "mode": mode.name(),
            "ports": interfaces,
            "cores": received_by_core
                .iter()
                .map(|received| json!({ "received": received }))
                .collect::<Vec<_>>(),
            "screen": filter,
            "turns": turns.iter().map(|core| core.turns).sum::<u64>(),
            "busy_turns": turns.iter().map(|core| core.busy_turns).sum::<u64>(),
            "sleeps": turns.iter().map(|core| core.sleeps).sum::<u64>(),
            "held_by_feedback": gate.iter().map(|core| core.paused_by_feedback).sum::<u64>(),
            "held_by_share": gate.iter().map(|core| core.paused_by_share).sum::<u64>(),
            "share_lifted": gate.iter().map(|core| core.share_lifted).sum::<u64>(),
            "drops": drops_json(&drops),
        });
        print_line!("{report}")?;
        return Ok(());
    }
    for interface in &interfaces {
        print_line!(
            "{}: {} received, {} to be forwarded, {} transmitted",
            interface.kind,
            interface.received,
            interface.forwarded,
            interface.transmitted
        )?;
    }
    if let Some(filter) = filter {
        print_line!(
            "filter: {} requests, {} passed, {} refused",
            filter.requests,
            filter.passed,
            filter.refused
        )?;
    }
    for (reason, packets) in drops.nonzero() {
        print_line!("{packets:>12} dropped: {:<28} {}", reason.name(), reason.sentence())?;
    }
    Ok(())
}

/// Has each network core publish its counters.
fn watch(forwarders: &mut [Forwarder]) -> Vec<Latest<RouterCounters>> {
    let watch = |forwarder: &mut Forwarder| {
        let latest = Latest::default();
        let published = latest.clone();
        let publish =
            move |forwarder: &mut Forwarder| published.publish(RouterCounters::of(forwarder));
        forwarder.call_each(PUBLISH_INTERVAL, Box::new(publish));
        latest
    };
    forwarders.iter_mut().map(watch).collect()
}

/// Warns of a filter that this process may not connect to. A filter that is started later is found
/// when packets arrive.
fn warn_unless_accessible(filter: &Path) {
    use rustix::fs::{Access, access};
    if access(filter, Access::WRITE_OK) == Err(rustix::io::Errno::ACCESS) {
        tracing::warn!(
            "no packet will pass: the router's user may not connect to the filter at {}; start the \
             filter by `tidegate filter` with the same --user, or let that user write to the \
             socket",
            filter.display()
        );
    }
}

fn read_rules(path: &Path) -> Result<FilterRules, Failure> {
    let fail = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fail(&error))?;
    Ok(text.parse().map_err(|error| fail(&error))?)
}

/// Part of the reload that replaces the rules of a filter.
fn rules_part(path: PathBuf, reloader: FilterReloader) -> ReloadPart {
    Box::new(move || {
        let rules = read_rules(&path)?;
        let (count, reloader) = (rules.len(), reloader.clone());
        Ok(Box::new(move || {
            reloader.publish(rules);
            Ok(format!("{count} rules"))
        }))
    })
}

/// Flags of `filter`.
#[derive(Args)]
pub(crate) struct FilterCommand {
    /// Rules file (TOML), with `default` and `[[rule]]` sections
    #[arg(long, value_name = "FILE")]
    rules: PathBuf,
    /// Unix socket to listen on for the router; the path must not exist yet
    #[arg(long, value_name = "PATH")]
    listen: PathBuf,
    #[command(flatten)]
    user: UserOption,
    /// Maximum number of verdicts per message while packets wait
    #[arg(long, value_name = "VERDICTS", default_value_t = 1)]
    batch: usize,
    /// Pin to this processor
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// Stop after this many seconds; SIGINT and SIGTERM stop earlier [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Print the final counters as JSON
    #[arg(long)]
    json: bool,
}

impl FilterCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let startup = Startup::begin(&self.user, None, self.duration, &MetricsOption::default())?;
        if let Some(cpu) = self.cpu {
            pin_to(cpu)?;
        }
        let rules = read_rules(&self.rules)?;
        let count = rules.len();
        let mut server = FilterServer::listen(&self.listen, rules)?.batch(self.batch);
        startup.sandbox.give(&self.listen)?;
        let stop = startup.stop();
        let parts = vec![rules_part(self.rules.clone(), server.reloader())];
        let _threads = startup.finish(parts, &[], Latest::<Readings>::default())?;
        announce_ready(format_args!("filter with {count} rules at {}", self.listen.display()))?;
        let report = server.run(&stop)?;
        if self.json {
            let report = json!({
                "passed": report.passed,
                "refused": report.refused,
                "connections": report.connections,
            });
            print_line!("{report}")?;
        } else {
            print_line!("{} passed, {} refused", report.passed, report.refused)?;
        }
        Ok(())
    }
}
