//! `tidegate load`: packets at a rate, however slowly they are answered, and
//! TCP connections.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use serde::Serialize;
use tidegate_lab::load::{
    Exchange, LinkKind, LoadConfig, Progress, QuerySet, TcpLoadConfig, load_dns, load_tcp,
    load_udp, load_udp_closed,
};

use crate::Failure;

/// Load generators.
#[derive(Subcommand)]
pub(crate) enum Load {
    /// DNS queries from a file
    Dns(DnsLoad),
    /// UDP packets to a server that echoes them
    Udp(UdpLoad),
    /// TCP connections: requests to a server that echoes them, or bytes one way
    Tcp(TcpLoad),
}

/// Flags of `load dns`.
#[derive(Args)]
pub(crate) struct DnsLoad {
    #[command(flatten)]
    datagrams: Datagrams,
    /// A file with a query on each line: NAME TYPE (as dnsperf's)
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
    datagrams: Datagrams,
    /// Bytes of payload
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    bytes: usize,
    /// Keep so many requests on their way instead of sending at a rate: each answer is made the
    /// next request. That is the fastest; not for kernel sockets
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["rate", "requests"])]
    in_flight: Option<usize>,
}

/// Flags of `load tcp`.
#[derive(Args)]
pub(crate) struct TcpLoad {
    #[command(flatten)]
    common: Common,
    /// Connect through the kernel's sockets: the same as --port kernel
    #[arg(long, conflicts_with = "port")]
    kernel: bool,
    /// The length of the network's prefix [default: 24, 64 for IPv6]
    #[arg(long, value_name = "BITS")]
    prefix: Option<u8>,
    /// Connections at the same time; each source address has about 16,000 ports
    #[arg(long, short, value_name = "COUNT", default_value_t = 1)]
    connections: usize,
    /// Bytes of each message
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    bytes: usize,
    /// Send bytes one way, as fast as the server takes them
    #[arg(long)]
    send: bool,
    /// Take bytes one way, as fast as the server sends them
    #[arg(long, conflicts_with = "send")]
    receive: bool,
    /// Connect for each request
    #[arg(long)]
    connect_each: bool,
}

impl TcpLoad {
    fn run(self) -> Result<(), Failure> {
        let common = self.common;
        let link = if self.kernel { LinkKind::Kernel } else { common.port.kind };
        let defaults = TcpLoadConfig::new(link, common.target);
        let exchange = match (self.send, self.receive) {
            (true, _) => Exchange::Send,
            (_, true) => Exchange::Receive,
            _ => Exchange::Echo,
        };
        let config = TcpLoadConfig {
            interface: common.interface(),
            source: common.source,
            sources: common.sources,
            prefix: self.prefix.unwrap_or(defaults.prefix),
            connections: self.connections,
            exchange,
            message_bytes: self.bytes,
            connect_each: self.connect_each,
            rate_per_second: common.rate,
            seconds: common.seconds,
            warm_up_seconds: common.warm_up,
            core: common.cpu,
            ..defaults
        };
        common.print(&load_tcp(&config)?)
    }
}

/// What to send through.
#[derive(Clone, Debug)]
struct Link {
    kind: LinkKind,
    /// The device of DPDK's.
    device: Option<String>,
}

impl FromStr for Link {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, device) = match text.split_once(':') {
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
        Ok(Self { kind, device })
    }
}

/// Flags of every load.
#[derive(Args)]
struct Common {
    /// The server: ADDRESS:PORT or [ADDRESS]:PORT
    #[arg(value_name = "SERVER")]
    target: SocketAddr,
    /// What to send through: xdp (AF_XDP, fastest), packet (AF_PACKET), dpdk:DEVICE (a device of
    /// DPDK's), or kernel (kernel sockets: a core sends about 300,000 requests/s)
    #[arg(long, value_name = "KIND", default_value = "kernel")]
    port: Link,
    /// The network interface; not for kernel sockets and DPDK
    #[arg(long, short, value_name = "NAME")]
    iface: Option<String>,
    /// The first source address; on an interface one that the kernel does not have
    #[arg(long, value_name = "ADDRESS")]
    source: Option<IpAddr>,
    /// How many source addresses, counting up from the first
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    sources: u32,
    /// Requests per second, however slowly they are answered [default: as fast
    /// as it goes]
    #[arg(long, value_name = "RATE")]
    rate: Option<f64>,
    /// How long to measure
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    seconds: f64,
    /// How long to make load before measuring
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    warm_up: f64,
    /// Run on this processor only
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Flags of loads of datagrams.
#[derive(Args)]
struct Datagrams {
    #[command(flatten)]
    common: Common,
    /// How many source ports
    #[arg(long, value_name = "COUNT", default_value_t = 64)]
    ports: u16,
    /// The server's hardware address [default: asked for]
    #[arg(long, value_name = "MAC")]
    mac: Option<String>,
    /// How many requests to send at most
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
                    Some(count) => common.print(&load_udp_closed(&config, load.bytes, count)?),
                    None => common.print(&load_udp(&config, load.bytes, &mut progress)?),
                }
            }
        }
    }
}

fn progress(progress: &Progress) {
    eprintln!("{progress}");
}

impl Datagrams {
    fn config(&self) -> LoadConfig {
        let Common { target, rate, seconds, warm_up, cpu, .. } = self.common;
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
            ..LoadConfig::new(self.common.port.kind, target)
        }
    }
}

impl Common {
    fn interface(&self) -> Option<String> {
        self.port.device.clone().or_else(|| self.iface.clone())
    }

    fn print(&self, report: &(impl Serialize + Display)) -> Result<(), Failure> {
        if self.json {
            println!("{}", serde_json::to_string_pretty(report)?);
        } else {
            print!("{report}");
        }
        Ok(())
    }
}
