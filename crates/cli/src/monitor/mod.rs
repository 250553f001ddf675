//! `tidegate monitor`: passive monitor of an interface, by flow.

mod output;

use std::io::IsTerminal;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::Ordering;

use clap::builder::TypedValueParser;
use clap::{Args, ValueEnum};
use tidegate_apps::monitor::{Monitor, MonitorConfig, Order, Report, TableConfig};
use tidegate_device::packet::PassiveConfig;
use tidegate_gate::{Config, Mode, Quota, Settings};

use crate::Failure;
use crate::choices::choices;
use crate::host::pin_to;
use crate::metrics::{Latest, MetricsOption, Readings, monitor_readings};
use crate::process::{Startup, announce_ready, secret_seed};
use crate::sandbox::UserOption;

/// Port of collectors (RFC 7011 section 10.3.4).
const IPFIX_PORT: u16 = 4739;

/// Flags of `monitor`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  tidegate monitor --iface eth0                         the largest flows, every second
  tidegate monitor --iface eth0 --count 1 --json        the flows of one second, as JSON
  tidegate monitor --iface eth0 --ipfix 192.0.2.9       export to a collector
  tidegate monitor --iface eth0 --cpu 1 --cpu-share 30  at most 30 % of processor 1")]
pub(crate) struct MonitorCommand {
    /// Network interface to monitor; its traffic stays with the kernel
    #[arg(long, short, visible_alias = "device", value_name = "NAME")]
    iface: String,
    /// Interval of the reports, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds())]
    interval: f64,
    /// Number of flows in a report
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    top: usize,
    /// Order of the flows
    #[arg(long, value_enum, value_name = "ORDER", default_value_t = FlowOrder::Bytes)]
    by: FlowOrder,
    /// Stop after this many reports [default: no limit]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Stop after this many seconds; SIGINT and SIGTERM stop earlier [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Print each report as a line of JSON
    #[arg(long)]
    json: bool,
    /// Export flow records by IPFIX (RFC 7011) over UDP to this collector [default port: 4739]
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = parse_collector)]
    ipfix: Option<SocketAddr>,
    /// Observation domain of the exported records
    #[arg(long, value_name = "NUMBER", default_value_t = 1, requires = "ipfix")]
    domain: u32,
    /// Time after which a flow that goes on is exported, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = seconds())]
    active_timeout: f64,
    /// Time without a packet after which a flow has ended, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 15.0, value_parser = seconds())]
    inactive_timeout: f64,
    /// Maximum number of flows in the table, rounded up to a power of two
    #[arg(long, value_name = "COUNT", default_value_t = 65_536,
        value_parser = clap::value_parser!(u32).range(1..=1 << 22))]
    flows: u32,
    /// Memory of the ring in which the kernel copies the first bytes of frames, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 32,
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    ring_mib: u32,
    /// Receive mode [default: polled]
    #[arg(long, value_parser = modes(), value_name = "MODE")]
    mode: Option<Mode>,
    /// Maximum number of packets per turn, or `unlimited` [default: 64]
    #[arg(long, value_name = "PACKETS")]
    quota: Option<Quota>,
    /// Maximum share of CPU time, in percent; packets beyond it are lost and counted [default: 100]
    #[arg(long, value_name = "PERCENT")]
    cpu_share: Option<u32>,
    /// Pin to this processor
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    #[command(flatten)]
    metrics: MetricsOption,
    #[command(flatten)]
    user: UserOption,
}

/// Order of the flows in a report.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum FlowOrder {
    /// Most bytes first
    Bytes,
    /// Most packets first
    Packets,
}

/// Receive modes without a queue between receiving and counting.
fn modes() -> impl TypedValueParser<Value = Mode> {
    choices([
        (
            "polled",
            Mode::Polled,
            "Turns with a quota each, for packets and for the monitor's own work",
        ),
        ("napi", Mode::Napi, "Polling rounds with a budget, as in Linux"),
        ("dedicated", Mode::Dedicated, "Endless busy-polling, on a core of its own"),
    ])
}

/// Parser of a time in seconds.
fn seconds() -> impl TypedValueParser<Value = f64> {
    clap::builder::StringValueParser::new().try_map(|text| match text.parse::<f64>() {
        Ok(seconds) if (0.001..=1e6).contains(&seconds) => Ok(seconds),
        _ => Err("give a number of seconds from 0.001 to 1000000"),
    })
}

fn parse_collector(text: &str) -> Result<SocketAddr, String> {
    let address = text
        .parse()
        .or_else(|_| text.parse::<IpAddr>().map(|address| SocketAddr::new(address, IPFIX_PORT)));
    address.map_err(|_| {
        "write an IP address, or one with a port as 192.0.2.9:2055 or [2001:db8::9]:2055".to_owned()
    })
}

fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

impl MonitorCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let startup = Startup::begin(&self.user, None, self.duration, &self.metrics)?;
        if let Some(cpu) = self.cpu {
            pin_to(cpu)?;
        }
        let mut monitor = Monitor::open(self.config()?)?;
        let stop = startup.stop();
        let latest = Latest::<Readings>::default();
        let _threads = startup.finish(
            vec![Box::new(|| Err("a monitor has no configuration to read again".into()))],
            &[],
            latest.clone(),
        )?;
        let mode = self.mode.unwrap_or_default().name();
        announce_ready(format_args!("monitor of {} in mode {mode}", self.iface))?;
        let mut reports = 0;
        let clears = std::io::stdout().is_terminal();
        monitor.run(&stop, &mut |report: &Report| {
            reports += 1;
            if self.metrics.is_given() {
                latest.publish(monitor_readings(&self.iface, report));
            }
            if self.count.is_some_and(|count| reports >= count) {
                stop.store(true, Ordering::Relaxed);
            }
            match self.json {
                true => output::print_json(&self.iface, report),
                false => output::print_table(&self.iface, report, clears),
            }
        })
    }

    fn config(&self) -> Result<MonitorConfig, Failure> {
        let mut gate = Config::default();
        gate.mode = self.mode.unwrap_or_default();
        gate.receive_quota = self.quota.unwrap_or(gate.receive_quota);
        gate.cpu_share_percent = self.cpu_share.unwrap_or(gate.cpu_share_percent);
        let export = match self.ipfix {
            None => None,
            Some(collector) => Some((connect(collector)?, self.domain)),
        };
        let ring = PassiveConfig::new(&self.iface).ring_bytes((self.ring_mib as usize) << 20);
        Ok(MonitorConfig {
            ring,
            gate: Settings::new(gate)?,
            table: TableConfig {
                max_flows: self.flows as usize,
                active_timeout_ns: nanoseconds(self.active_timeout),
                inactive_timeout_ns: nanoseconds(self.inactive_timeout),
                seed: secret_seed(),
            },
            export,
            report_interval_ns: nanoseconds(self.interval),
            top: self.top,
            order: match self.by {
                FlowOrder::Bytes => Order::Bytes,
                FlowOrder::Packets => Order::Packets,
            },
        })
    }
}

/// Socket of the export, which never blocks: a message that the kernel cannot take is lost.
fn connect(collector: SocketAddr) -> Result<UdpSocket, Failure> {
    let any: IpAddr = match collector {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let open = || {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(collector)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    };
    open().map_err(|error: std::io::Error| format!("--ipfix {collector}: {error}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectors_have_a_default_port() {
        for (text, expected) in [
            ("192.0.2.9", "192.0.2.9:4739"),
            ("192.0.2.9:2055", "192.0.2.9:2055"),
            ("2001:db8::9", "[2001:db8::9]:4739"),
            ("[2001:db8::9]:2055", "[2001:db8::9]:2055"),
        ] {
            assert_eq!(parse_collector(text).unwrap().to_string(), expected);
        }
        for wrong in ["", "collector", "192.0.2.9:", "192.0.2.9:99999", "[::1]"] {
            assert!(parse_collector(wrong).unwrap_err().contains("192.0.2.9:2055"), "{wrong}");
        }
    }
}
