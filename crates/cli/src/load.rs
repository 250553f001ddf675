//! `tidegate load`: open-loop UDP load at a fixed rate, closed-loop UDP load, and TCP
//! connections.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use serde::Serialize;
use tidegate_load::{
    Exchange, LinkKind, LoadConfig, LoadProgress, QuerySet, TcpLoadConfig, load_dns, load_tcp,
    load_udp, load_udp_closed_loop,
};

use crate::Failure;
use crate::output::{log, print, print_line};

/// Load generators.
#[derive(Subcommand)]
pub(crate) enum Load {
    /// DNS queries from a file
    Dns(DnsLoad),
    /// UDP datagrams to an echo server
    Udp(UdpLoad),
    /// TCP connections: requests to an echo server, or bytes in one direction
    Tcp(TcpLoad),
}

/// Flags of `load dns`.
#[derive(Args)]
pub(crate) struct DnsLoad {
    #[command(flatten)]
    datagrams: DatagramOptions,
    /// Query file, one query per line: NAME TYPE (dnsperf's format)
    #[arg(long, value_name = "FILE")]
    queries: PathBuf,
    /// Send queries without EDNS
    #[arg(long)]
    no_edns: bool,
}

/// Flags of `load udp`.
#[derive(Args)]
pub(crate) struct UdpLoad {
    #[command(flatten)]
    datagrams: DatagramOptions,
    /// Payload of each datagram, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    bytes: usize,
    /// Closed loop: keep this many requests in flight instead of sending at a rate; each answer
    /// is sent back as the next request. Fastest; not for kernel sockets
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["rate", "requests"])]
    in_flight: Option<usize>,
}

/// Flags of `load tcp`.
#[derive(Args)]
pub(crate) struct TcpLoad {
    #[command(flatten)]
    common: LoadOptions,
    /// Connect through kernel sockets; same as --io kernel
    #[arg(long, conflicts_with = "io")]
    kernel: bool,
    /// Prefix length of the network, in bits [default: 24, 64 for IPv6]
    #[arg(long, value_name = "BITS")]
    prefix: Option<u8>,
    /// Number of concurrent connections; each source address has about 16,000 ports
    #[arg(long, short, value_name = "COUNT", default_value_t = 1)]
    connections: usize,
    /// Size of each message, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    bytes: usize,
    /// Only send, as fast as the server receives
    #[arg(long)]
    send: bool,
    /// Only receive, as fast as the server sends
    #[arg(long, conflicts_with = "send")]
    receive: bool,
    /// Open a new connection for each request
    #[arg(long)]
    connect_each: bool,
}

impl TcpLoad {
    fn run(self) -> Result<(), Failure> {
        let common = self.common;
        let link = if self.kernel { LinkKind::Kernel } else { common.io.kind };
        let defaults = TcpLoadConfig::new(link, common.target);
        let exchange = match (self.send, self.receive) {
            (true, _) => Exchange::Send,
            (_, true) => Exchange::Receive,
            _ => Exchange::Echo,
        };
        let config = TcpLoadConfig {
            interface: common.interface(),
            source: common.source,
            source_count: common.sources,
            prefix_len: self.prefix.unwrap_or(defaults.prefix_len),
            connections: self.connections,
            exchange,
            message_bytes: self.bytes,
            connection_per_request: self.connect_each,
            rate_per_second: common.rate,
            seconds: common.seconds,
            warm_up_seconds: common.warm_up,
            core: common.cpu,
            ..defaults
        };
        common.print(&load_tcp(&config)?)
    }
}

/// Packet I/O of the load generator: the value of `--io`.
#[derive(Clone, Debug)]
struct LoadIo {
    kind: LinkKind,
    /// DPDK device, with `dpdk:DEVICE`.
    dpdk_device: Option<String>,
}

impl FromStr for LoadIo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, dpdk_device) = match text.split_once(':') {
            Some(("dpdk", device)) => (LinkKind::Dpdk, Some(device.to_owned())),
            _ => {
                let kind = match text {
                    "xdp" => LinkKind::Xdp,
                    "packet" => LinkKind::Packet,
                    "kernel" => LinkKind::Kernel,
                    _ => return Err("expected xdp, packet, kernel or dpdk:DEVICE".into()),
                };
                (kind, None)
            }
        };
        Ok(Self { kind, dpdk_device })
    }
}

/// Flags common to all load generators.
#[derive(Args)]
struct LoadOptions {
    /// Server address: ADDRESS:PORT or [ADDRESS]:PORT
    #[arg(value_name = "SERVER")]
    target: SocketAddr,
    /// Packet I/O: xdp (AF_XDP, fastest), packet (AF_PACKET), dpdk:DEVICE (a DPDK device), or
    /// kernel (kernel sockets, about 300,000 requests/s per core)
    #[arg(long, alias = "port", value_name = "KIND", default_value = "kernel")]
    io: LoadIo,
    /// Network interface; not for kernel sockets and DPDK
    #[arg(long, short, value_name = "NAME")]
    iface: Option<String>,
    /// First source address; on an interface, an address that the kernel does not have
    #[arg(long, value_name = "ADDRESS")]
    source: Option<IpAddr>,
    /// Number of source addresses, counted up from --source
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    sources: u32,
    /// Requests per second, independent of the answers (open loop) [default: as fast as
    /// possible]
    #[arg(long, value_name = "RATE")]
    rate: Option<f64>,
    /// Duration of the measurement, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    seconds: f64,
    /// Warm-up before the measurement, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    warm_up: f64,
    /// Pin to this processor
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Flags common to the datagram load generators.
#[derive(Args)]
struct DatagramOptions {
    #[command(flatten)]
    common: LoadOptions,
    /// Number of source ports
    #[arg(long, value_name = "COUNT", default_value_t = 64)]
    ports: u16,
    /// MAC address of the server [default: resolved]
    #[arg(long, value_name = "MAC")]
    mac: Option<String>,
    /// Maximum number of requests to send [default: no limit]
    #[arg(long, value_name = "COUNT")]
    requests: Option<u64>,
}

impl Load {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self {
            Load::Dns(load) => {
                let queries = QuerySet::read(&load.queries, !load.no_edns)?;
                let config = load.datagrams.config();
                let report = load_dns(&config, &queries, None, &mut progress)?;
                load.datagrams.common.print(&report)
            }
            Load::Tcp(load) => load.run(),
            Load::Udp(load) => {
                let config = load.datagrams.config();
                let common = &load.datagrams.common;
                match load.in_flight {
                    Some(count) => common.print(&load_udp_closed_loop(&config, load.bytes, count)?),
                    None => common.print(&load_udp(&config, load.bytes, &mut progress)?),
                }
            }
        }
    }
}

fn progress(progress: &LoadProgress) {
    log(format_args!("{progress}"));
}

impl DatagramOptions {
    fn config(&self) -> LoadConfig {
        let LoadOptions { target, rate, seconds, warm_up, cpu, .. } = self.common;
        LoadConfig {
            interface: self.common.interface(),
            source: self.common.source,
            sources: self.common.sources,
            ports: self.ports,
            mac: self.mac.clone(),
            rate_pps: rate,
            seconds,
            warm_up_seconds: warm_up,
            requests: self.requests,
            core: cpu,
            ..LoadConfig::new(self.common.io.kind, target)
        }
    }
}

impl LoadOptions {
    fn interface(&self) -> Option<String> {
        self.io.dpdk_device.clone().or_else(|| self.iface.clone())
    }

    fn print(&self, report: &(impl Serialize + Display)) -> Result<(), Failure> {
        if self.json {
            print_line!("{}", serde_json::to_string_pretty(report)?)?;
        } else {
            print(format_args!("{report}"))?;
        }
        Ok(())
    }
}
